"""Several traces as one: interleaved by arrival, or one behind the other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain

import polars as pl

from leap_rs._leap import ConfigError, TraceError
from leap_rs.trace import schema
from leap_rs.trace.model import Stream
from leap_rs.trace.order import merged

_ID_COLUMNS = ("request_id", "session")
_KEY = "arrival_s"


@dataclass
class Combined:
    """The parts of the one trace; `notes` say what it has lost."""

    frames: Iterator[pl.DataFrame]
    metadata: dict[str, str]
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class _Input:
    stream: Stream
    label: str
    number: int
    columns: pl.Schema
    frames: Iterator[pl.DataFrame]


def combine(
    streams: Sequence[Stream], labels: Sequence[str], *, join: bool = False, one_recording: bool = False
) -> Combined:
    """One trace from several, part by part.

    Interleaved by arrival, each from its own start, or with `join` one behind the other: the first request of the next
    follows the last of the one before by that one's mean gap. Columns that all have are kept. Ids and sessions get the
    label in front and a file without `tenant` gets its label there. Block hashes are made different from file to file,
    unless the files are parts of `one_recording`.
    """
    if len(set(labels)) < len(labels):
        raise ConfigError(f"labels must differ, not {', '.join(labels)}; --label gives one a file")
    inputs = [_opened(stream, label, i) for i, (stream, label) in enumerate(zip(streams, labels, strict=True))]
    _refuse_other_features(inputs)
    metadata, notes = _metadata(inputs)
    kept = _common_columns(inputs, metadata, notes)
    sources = [_prepared(one, kept, one_recording=one_recording) for one in inputs]
    frames = _one_behind_the_other(sources) if join else merged(sources, _KEY)
    return Combined(frames, metadata, notes)


def _opened(stream: Stream, label: str, number: int) -> _Input:
    first = next(stream.frames, None)
    if first is None:
        raise TraceError(f"{stream.path}: the trace holds no requests")
    return _Input(stream, label, number, first.schema, chain((first,), stream.frames))


def _refuse_other_features(inputs: Sequence[_Input]) -> None:
    for column in schema.FEATURE_COLUMNS:
        having = [one for one in inputs if column in one.columns]
        for one in having[1:]:
            first = having[0]
            if one.columns[column] != first.columns[column]:
                raise schema.Rows(one.stream.path).fault(
                    f"{one.columns[column]}, but {first.stream.path} has {first.columns[column]}", column=column
                )
            own, other = (schema.identity(column, each.stream.metadata) for each in (one, first))
            for key in schema.FEATURES_OF[column]:
                ours, theirs = own.get(key), other.get(key)
                if ours != theirs:
                    raise schema.Rows(one.stream.path).fault(
                        f"from {key} {ours or 'unknown'}, but those of {first.stream.path} are from {key} "
                        f"{theirs or 'unknown'}",
                        column=column,
                    )


def _metadata(inputs: Sequence[_Input]) -> tuple[dict[str, str], list[str]]:
    every = [one.stream.metadata for one in inputs]
    keys = list(dict.fromkeys(key for one in every for key in one))
    same = {key: every[0][key] for key in keys if key in every[0] and len({one.get(key) for one in every}) == 1}
    lost = [key for key in keys if key not in same and key not in ("source", schema.BLOCK_SIZE_KEY)]
    same["source"] = "; ".join(one.stream.metadata.get("source", one.stream.path.name) for one in inputs)
    return same, [f"metadata that differ from file to file are left out: {', '.join(lost)}"] if lost else []


def _common_columns(inputs: Sequence[_Input], metadata: dict[str, str], notes: list[str]) -> pl.Schema:
    sizes = {schema.block_size(one.stream.path, one.stream.metadata) for one in inputs}
    names = list(dict.fromkeys(name for one in inputs for name in one.columns))
    kept: dict[str, pl.DataType] = {}
    for name in names:
        dtypes = {one.columns[name] for one in inputs if name in one.columns}
        if name == "prefix_blocks" and len(sizes) > 1:
            notes.append(f"column prefix_blocks is dropped: blocks of {', '.join(map(str, sorted(sizes)))} tokens")
        elif len(dtypes) > 1:
            notes.append(f"column {name} is dropped: {', '.join(sorted(map(str, dtypes)))}")
        elif name == "tenant" or all(name in one.columns for one in inputs):
            kept[name] = dtypes.pop()
        else:
            lacking = [str(one.stream.path) for one in inputs if name not in one.columns]
            notes.append(f"column {name} is dropped: not in {', '.join(lacking)}")
    kept["tenant"] = pl.String()
    if "prefix_blocks" in kept:
        metadata[schema.BLOCK_SIZE_KEY] = str(sizes.pop())
    return pl.Schema(kept)


def _prepared(one: _Input, columns: pl.Schema, *, one_recording: bool) -> Iterator[pl.DataFrame]:
    changes: list[pl.Expr] = []
    if "tenant" not in one.columns:
        changes.append(pl.lit(one.label).alias("tenant"))
    if not one_recording:
        label = pl.lit(f"{one.label}/")
        # A session may be a number: the format leaves that column open.
        changes += [(label + pl.col(name).cast(pl.String)).alias(name) for name in _ID_COLUMNS if name in columns]
        if "prefix_blocks" in columns:
            # A format may number its blocks from 0 in every file.
            hashed = pl.element().hash(seed=one.number)
            changes.append(pl.col("prefix_blocks").list.eval(hashed))
    for frame in one.frames:
        yield frame.with_columns(changes).select(columns.names())


def _one_behind_the_other(sources: Sequence[Iterator[pl.DataFrame]]) -> Iterator[pl.DataFrame]:
    start = 0.0
    for source in sources:
        first: float | None = None
        last, count = 0.0, 0
        for frame in source:
            first = float(frame[_KEY][0]) if first is None else first
            shifted = frame.with_columns(pl.col(_KEY) - first + start)
            last, count = float(shifted[_KEY][-1]), count + frame.height
            yield shifted
        start = last + ((last - start) / (count - 1) if count > 1 else 0.0)
