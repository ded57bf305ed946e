"""The leap trace format on disk: Parquet with key-value metadata, read strictly and written whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path

import polars as pl
from polars.io.plugins import register_io_source

from leap_rs._leap import TraceError
from leap_rs.trace import schema
from leap_rs.trace.files import MAGIC, reason, require_utf8
from leap_rs.trace.model import ReadOptions, Stream, Trace
from leap_rs.trace.opening import PARQUET, Described, Fit, Opening
from leap_rs.writing import obstacle, replacing

PART_ROWS = 262_144
PART_BYTES = 64 * 2**20
IDS_A_PASS = 8_000_000

ARRIVALS_KEY = "arrivals"
NO_ARRIVALS = "none"
"""Of that key: every `arrival_s` is 0 because there was no traffic to record."""

_ARROW_KEYS = ("ARROW:schema", "pandas")
_DAMAGE = (pl.exceptions.PolarsError, pl.exceptions.PanicException, OSError, ValueError, OverflowError)


class LeapReader(Described):
    """The leap trace format."""

    name = "leap"
    description = "leap Parquet (arrival_s, prompt_tokens, output_tokens, ...)"
    kinds = (PARQUET,)
    keys = schema.REQUIRED

    def fit(self, opening: Opening) -> Fit:
        """See `Reader`. What says that it is of the format, or is too damaged to say anything, is read: strictly."""
        if opening.kind == PARQUET and (not opening.dtypes or self._says_so(opening.path)):
            return Fit(tuple(self.keys))
        return super().fit(opening)

    def _says_so(self, path: Path) -> bool:
        try:
            return schema.VERSION_KEY in self._metadata(path)
        except TraceError:
            return True

    def read(self, path: Path, options: ReadOptions) -> Trace:
        """See `Reader`."""
        options.refuse_unit(path, "the leap format is in seconds")
        metadata = self._metadata(path)
        try:
            frame = pl.read_parquet(path, hive_partitioning=False, glob=False)
        except _DAMAGE as error:
            raise _damaged(path, error) from error
        return Trace(schema.checked(frame, path, metadata), path, self.name, metadata, no_times=_no_times(metadata))

    def stream(self, path: Path, options: ReadOptions) -> Stream:
        """See `Reader`."""
        options.refuse_unit(path, "the leap format is in seconds")
        metadata = self._metadata(path)
        return Stream(_parts(path, metadata), path, self.name, metadata, _no_times(metadata))

    def _metadata(self, path: Path) -> dict[str, str]:
        require_utf8(path)
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(size - len(MAGIC), 0))
            whole = size >= 3 * len(MAGIC) and file.read() == MAGIC
        if not whole:
            raise TraceError(f"{path}: the Parquet file is truncated (its footer is missing)")
        try:
            metadata = dict(pl.read_parquet_metadata(path))
        except _DAMAGE as error:
            raise _damaged(path, error) from error
        for key in _ARROW_KEYS:
            metadata.pop(key, None)
        return metadata


def _no_times(metadata: Mapping[str, str]) -> str:
    none = metadata.get(ARRIVALS_KEY) == NO_ARRIVALS
    return f"metadata {ARRIVALS_KEY} is {NO_ARRIVALS}" if none else ""


def _parts(path: Path, metadata: dict[str, str]) -> Iterator[pl.DataFrame]:
    try:
        lazy = pl.scan_parquet(path, hive_partitioning=False, glob=False)
        rows = _rows_a_part(lazy.collect_schema())
    except _DAMAGE as error:
        raise _damaged(path, error) from error
    start, end = 0, 0.0
    while True:
        try:
            frame = lazy.slice(start, rows).collect()
        except _DAMAGE as error:
            raise _damaged(path, error) from error
        if frame.height == 0 and start > 0:
            return
        at = schema.Rows(path, start)
        frame = schema.checked(frame, at, metadata)
        first = float(frame["arrival_s"][0])
        if first < end:
            raise at.fault(f"times run backwards, from {end} s to {first} s", column="arrival_s", row=0)
        yield frame
        start, end = start + frame.height, float(frame["arrival_s"][-1])


def _rows_a_part(columns: Mapping[str, pl.DataType]) -> int:
    widths = [dtype.size for dtype in columns.values() if isinstance(dtype, pl.Array)]
    return max(1, min(PART_ROWS, PART_BYTES // (4 * sum(widths) + 1)))


def _damaged(path: Path, error: BaseException) -> TraceError:
    return TraceError(f"{path}: the Parquet file is damaged: {reason(error)[:200]}")


def write_trace(frame: pl.DataFrame, path: str | os.PathLike[str], **metadata: object) -> None:
    """Write a trace in the leap format.

    `frame` is checked as `read_trace` would check it (`TraceError` names the column and the first bad row) and gets the
    format's dtypes; columns that the format does not know are kept. `metadata` goes into the file as text (`model`,
    `layer`, `sampling`, `source`, `block_size`, ...; None is left out). The file appears whole or not at all, and an
    older file of that name stays until then.
    """
    path = Path(path)
    if not isinstance(frame, pl.DataFrame):
        raise TraceError(f"{path}: a trace is written from a polars DataFrame, not from {type(frame).__name__}")
    texts = _metadata_texts(path, metadata)
    checked = schema.checked(frame, path, texts)
    check_target(path)
    with replacing(path, TraceError) as temporary:
        try:
            checked.write_parquet(temporary, compression="zstd", metadata=texts)
        except pl.exceptions.PolarsError as error:
            raise TraceError(f"{path}: cannot be written: {reason(error)}") from error


def write_parts(
    frames: Iterator[pl.DataFrame], path: Path, metadata: Mapping[str, object], *, rate: float | None = None
) -> int:
    """Write a trace part by part, in bounded memory; returns its requests. The parts have been checked.

    rate: requests a second to which the arrivals are scaled: the last of n comes at n / rate.

    What is checked here is what no part can know: that all have the same columns, and that no `request_id` comes twice.
    An error of the frames' iterator leaves this function as it is, and no file.
    """
    check_target(path)
    texts = _metadata_texts(path, metadata)
    first = next(frames, None)
    if first is None:
        raise TraceError(f"{path}: the trace holds no requests")
    columns = first.schema
    failed: list[BaseException] = []
    rows, end = 0, 0.0

    def parts(*_: object) -> Iterator[pl.DataFrame]:
        nonlocal rows, end
        try:
            for frame in chain((first,), frames):
                if frame.schema != columns:
                    raise TraceError(f"{path}: columns change on the way, from {columns} to {frame.schema}")
                rows += frame.height
                end = float(frame["arrival_s"][-1])
                yield frame
        except BaseException as error:
            # polars may wrap it, or put its own text around it.
            failed.append(error)
            raise

    with replacing(path, TraceError) as temporary:
        try:
            _sink(register_io_source(parts, schema=columns), temporary, columns, texts)
            if "request_id" in columns:
                _refuse_repeated_ids(temporary, path, rows)
            if rate is not None and end > 0:
                # How many there are is known only now. Reading the source again would cost more: it may be text to count.
                scaled = pl.col("arrival_s") * (rows / rate / end)
                with replacing(temporary, TraceError) as again:
                    lazy = pl.scan_parquet(temporary, hive_partitioning=False, glob=False)
                    _sink(lazy.with_columns(scaled), again, columns, texts)
        except TraceError:
            raise
        except BaseException as error:
            if failed:
                raise failed[0] from None
            if isinstance(error, pl.exceptions.PolarsError):
                raise TraceError(f"{path}: cannot be written: {reason(error)}") from error
            raise
    return rows


def _sink(lazy: pl.LazyFrame, file: Path, columns: pl.Schema, texts: dict[str, str]) -> None:
    lazy.sink_parquet(
        file,
        compression="zstd",
        metadata=texts,
        row_group_size=_rows_a_part(columns),
        maintain_order=True,
        engine="streaming",
    )


def check_target(path: Path) -> None:
    """`TraceError` where a trace could not be written under this name; before anything is read."""
    if fault := obstacle(path):
        raise TraceError(f"{path}: cannot be written: {fault}")
    require_utf8(path.parent, "the directory of a Parquet file")


def _refuse_repeated_ids(file: Path, path: Path, rows: int) -> None:
    """In passes over shares of the ids, so that no pass holds more than some millions of them."""
    ids = pl.col("request_id")
    passes = rows // IDS_A_PASS + 1
    for share in range(passes):
        lazy = pl.scan_parquet(file, hive_partitioning=False, glob=False).select(ids)
        hashes = lazy.select(ids.hash()).filter(pl.col("request_id") % passes == share).collect(engine="streaming")
        twice = hashes.filter(pl.col("request_id").is_duplicated())
        if twice.height == 0:
            continue
        # Equal hashes are not yet equal ids.
        suspects = lazy.with_row_index("row").filter(ids.hash().is_in(twice["request_id"].unique().implode())).collect()
        repeated = suspects.filter(~ids.is_first_distinct())
        if repeated.height:
            row, text = repeated.row(0)
            first = suspects.filter(ids == text)["row"][0]
            raise schema.Rows(path).fault(f"{text!r} is already the id of row {first}", column="request_id", row=row)


def _metadata_texts(path: Path, metadata: Mapping[str, object]) -> dict[str, str]:
    # Names of files need not be UTF-8; the text of a Parquet file must be.
    texts = {key: str(value).encode(errors="replace").decode() for key, value in metadata.items() if value is not None}
    reserved = [key for key in _ARROW_KEYS if key in texts]
    if reserved:
        raise TraceError(f"{path}: metadata key {reserved[0]!r} is reserved by the Parquet writer")
    return {schema.VERSION_KEY: schema.VERSION, **texts}
