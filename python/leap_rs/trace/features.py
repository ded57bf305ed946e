"""Adds the features of the prompts' texts to a trace: rows of a text encoder. The texts themselves stay where they are."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import polars.selectors as cs

from leap_rs._leap import TraceError
from leap_rs.encoder.model import Encoder, Rows
from leap_rs.encoder.source import EncoderInfo, inspect
from leap_rs.trace import open_stream, schema
from leap_rs.trace.combine import Combined
from leap_rs.trace.convert import Written, write
from leap_rs.trace.files import MAGIC, existing_file, head, reason
from leap_rs.trace.jsonlines import json_lines
from leap_rs.trace.jsontext import shown
from leap_rs.trace.model import ReadOptions
from leap_rs.trace.parquet import check_target

COLUMN = schema.COLUMN_OF["text"]
LAYER_PREFIX = "text_layer_"
TEXTS = ("text", "prompt")
"""Where texts are looked for, in this order."""
_ID = "request_id"
_AT_ONCE = 256

Progress = Callable[[int], AbstractContextManager[Callable[[int], object]]]
"""Opens what is called with how many more requests are done."""


def add(
    trace: Path, texts: Path, encoder: str, out: Path, layer: int | None, layers: bool, progress: Progress
) -> Written:
    """Writes the trace with `text_features`.

    Args:
        trace: A trace of any known format.
        texts: The prompts' texts; see `read_texts`.
        encoder: The encoder's directory or name; see `inspect`.
        out: The trace to write.
        layer: After how many layers it is read; the default of `inspect` where not given.
        layers: Whether the rows of every layer become columns too.
        progress: Shows how far it is.

    Raises:
        LeapError: Names the file and the row.
    """
    check_target(out)
    info = inspect(encoder, layer)
    known = read_texts(texts)
    # Before the model is loaded and hours go by.
    requests = _check(trace, known)
    # With all layers the last one that is computed is the model's own.
    model = Encoder.load(replace(info, layer=info.depth) if layers else info, threads=len(os.sched_getaffinity(0)))
    stream = open_stream(trace, ReadOptions())
    metadata = {**stream.metadata, "encoder": info.name, "encoder_layer": str(info.layer)}
    with progress(requests) as advance:
        frames = _with_features(stream.frames, known, model, info, layers, advance)
        return write(Combined(frames, metadata), out, [stream])


class Texts:
    """The texts of a file, by `request_id` where it has them, else in its order."""

    def __init__(self, path: Path, frame: pl.DataFrame) -> None:
        self.path = path
        self._texts: list[str] = frame.to_series(0).to_list()
        self._by_id: Mapping[str, int] | None = None
        if _ID in frame.columns:
            self._by_id = {name: row for row, name in enumerate(frame[_ID].to_list())}

    def of(self, frame: pl.DataFrame, at: schema.Rows) -> list[str]:
        """The texts of a trace's rows; `TraceError` at the first that has none."""
        if self._by_id is None or _ID not in frame.columns:
            found = self._texts[at.first : at.first + frame.height]
            if len(found) < frame.height:
                lacking = at.place(len(found))
                raise TraceError(f"{self.path}: holds {len(self._texts)} texts, and none for {lacking} of {at.path}")
            return found
        for row, name in enumerate(frame[_ID]):
            if name not in self._by_id:
                raise TraceError(f"{self.path}: has no text for {at.place(row)} of {at.path} ({_ID} {name!r})")
        return [self._texts[self._by_id[name]] for name in frame[_ID]]

    def refuse_more(self, requests: int, columns: list[str], trace: Path) -> None:
        """Texts that go by their order are as many as the requests."""
        if (self._by_id is None or _ID not in columns) and len(self._texts) > requests:
            raise TraceError(f"{self.path}: holds {len(self._texts)} texts, but {trace} has {requests} requests")


def read_texts(path: Path) -> Texts:
    """The texts of a Parquet, CSV or JSON lines file: its column `text` or `prompt`, beside `request_id` if it has it."""
    path = existing_file(path)
    start = head(path)
    if not start.strip():
        raise TraceError(f"{path}: the file is empty")
    frame = _from_json(path) if start.lstrip().startswith(b"{") else _from_table(path, parquet=start.startswith(MAGIC))
    at = schema.Rows(path)
    for series in frame:
        if series.dtype != pl.String:
            raise at.fault(f"must be texts, not {series.dtype}", column=series.name)
        missing = series.is_null().arg_true()
        if len(missing):
            raise at.fault("no value (null)", column=series.name, row=int(missing[0]))
    if _ID in frame.columns:
        schema.refuse_repeated_ids(frame[_ID], at)
    return Texts(path, frame)


def _wanted(path: Path, names: Sequence[str]) -> list[str]:
    """The column of the texts, and that of ids where there is one."""
    text = next((name for name in TEXTS if name in names), None)
    if text is None:
        there = ", ".join(names) or "none"
        raise TraceError(f"{path}: has no column {' or '.join(map(repr, TEXTS))}; there are {there}")
    return [text, _ID] if _ID in names else [text]


def _from_table(path: Path, *, parquet: bool) -> pl.DataFrame:
    try:
        if parquet:
            lazy = pl.scan_parquet(path, hive_partitioning=False, glob=False)
        else:
            # Every value is a text: ids may look like numbers.
            lazy = pl.read_csv(path, infer_schema=False, glob=False).lazy()
        frame = lazy.select(_wanted(path, lazy.collect_schema().names())).collect()
        return frame.cast({cs.by_name(_ID, require_all=False) & cs.integer(): pl.String})
    except (pl.exceptions.PolarsError, OSError) as error:
        raise TraceError(f"{path}: cannot be read: {reason(error)[:200]}") from error


def _from_json(path: Path) -> pl.DataFrame:
    names: list[str] = []
    rows: list[tuple[str, ...]] = []
    for line, row in json_lines(path):
        names = names or _wanted(path, list(row))
        for name in names:
            if type(row.get(name)) is not str and not (name == _ID and type(row.get(name)) is int):
                found = f"is {shown(row[name])}" if name in row else "is missing"
                raise TraceError(f"{path}: line {line}: '{name}' must be a text, and {found}")
        rows.append(tuple(str(row[name]) for name in names))
    return pl.DataFrame(rows, schema=dict.fromkeys(names, pl.String), orient="row")


def _check(trace: Path, texts: Texts) -> int:
    """How many requests the trace has, each with a text."""
    stream = open_stream(trace, ReadOptions())
    requests, columns = 0, list[str]()
    for frame in stream.frames:
        texts.of(frame, schema.Rows(trace, requests))
        requests, columns = requests + frame.height, frame.columns
    texts.refuse_more(requests, columns, trace)
    return requests


def _with_features(
    frames: Iterator[pl.DataFrame],
    texts: Texts,
    encoder: Encoder,
    info: EncoderInfo,
    layers: bool,
    advance: Callable[[int], object],
) -> Iterator[pl.DataFrame]:
    first = 0
    for frame in frames:
        given = texts.of(frame, schema.Rows(texts.path, first))
        first += frame.height
        parts = []
        for start in range(0, len(given), _AT_ONCE):
            some = given[start : start + _AT_ONCE]
            parts.append(encoder.layers(some) if layers else encoder.encode(some)[None])
            advance(len(some))
        rows = np.concatenate(parts, axis=1)
        columns = {COLUMN: rows[info.layer if layers else 0]}
        if layers:
            columns |= {f"{LAYER_PREFIX}{layer}": made for layer, made in enumerate(rows)}
        # Layers that are there may be of another encoder.
        yield frame.select(~cs.starts_with(LAYER_PREFIX)).with_columns(
            _series(name, made, info) for name, made in columns.items()
        )


def _series(name: str, rows: Rows, info: EncoderInfo) -> pl.Series:
    # An encoder norms its states; those of a causal model may be too large for 16 bits.
    kept = rows.astype(np.float16) if info.kind == "bert" else rows
    inner = pl.Float16 if info.kind == "bert" else pl.Float32
    return pl.Series(name, kept, dtype=pl.Array(inner, info.width))
