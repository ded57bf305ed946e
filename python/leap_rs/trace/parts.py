"""A directory of parts as one trace: what a server writes while it serves, and what Spark, DuckDB, pyarrow and dask write.

Each part is a trace of its own. Those of a server have the requests that finished while they were filled; one that took long
arrived before many of an earlier part. The parts are read in the order of their first arrivals, so that no more is held in
memory than is interleaved. Several engines, and a server that was started again, are put on one clock by when each of them
started. Folders called name=value are columns; empty parts and what begins with _ or . are no parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from urllib.parse import unquote

import polars as pl

from leap_rs._leap import TraceError
from leap_rs.trace import schema
from leap_rs.trace.model import ReadOptions, Stream, Trace
from leap_rs.trace.opening import Fit, Opening, refusal
from leap_rs.trace.opening import opened as open_file
from leap_rs.trace.parquet import LeapReader

START_KEY = "recording_start_unix_s"
"""Metadata of a part: when its engine's clock stood at 0."""

_PATTERN = "part-*.parquet"
_SUFFIXES = (".parquet", ".parq", ".pq")
_NULL = "__HIVE_DEFAULT_PARTITION__"
_KEY = "arrival_s"
_SAME = ("model", "layer", "encoder", "encoder_layer")


def part_name(number: int) -> str:
    """The file of a part, counted from 1."""
    return f"part-{number:05d}.parquet"


def part_files(directory: Path) -> list[Path]:
    """The parts that a server has written into a directory and into those right below it, such as the engines' own."""
    return sorted([*directory.glob(_PATTERN), *directory.glob(f"*/{_PATTERN}")])


def data_files(directory: Path) -> list[Path]:
    """The Parquet files in and below a directory, as every writer of data sets names them."""
    found = (path for path in directory.rglob("*") if path.suffix in _SUFFIXES and path.is_file())
    return sorted(path for path in found if not any(part[0] in "_." for part in path.relative_to(directory).parts))


def folder_columns(directory: Path, file: Path) -> dict[str, str | None]:
    """What the folders above a part say of all its rows: `name=value`, with what a path cannot hold as %XX."""
    pairs = [part.partition("=") for part in file.relative_to(directory).parts[:-1] if "=" in part]
    return {unquote(name): None if value == _NULL else unquote(value) for name, _, value in pairs}


@dataclass(frozen=True)
class Part:
    """A file of a recording."""

    path: Path
    metadata: dict[str, str]
    columns: pl.Schema
    offset_s: float
    """From the start of the recording to that of the file's own clock."""
    first: float
    """Its first arrival, in seconds from the start of the recording."""
    folders: dict[str, str | None] = field(default_factory=dict)
    """Columns that its folders say."""

    def frame(self) -> pl.DataFrame:
        """The part, checked, on the recording's clock."""
        frame = LeapReader().read(self.path, ReadOptions()).frame
        said = [pl.lit(value, dtype=pl.String).alias(name) for name, value in self.folders.items()]
        return frame.with_columns(pl.col(_KEY) + self.offset_s, *said)


class PartsReader:
    """A directory of parts."""

    name = "leap"
    description = "a directory of recorded parts"

    title = "a directory of recorded parts"
    own_options = ()

    def fit(self, opening: Opening) -> Fit:
        """See `Reader`. A directory does not begin as a file does."""
        return Fit(but=f"is {opening.shown()}")

    def read(self, path: Path, options: ReadOptions) -> Trace:
        """See `Reader`."""
        stream = self.stream(path, options)
        frame = pl.concat(stream.frames)
        return Trace(schema.checked(frame, path, stream.metadata), path, self.name, stream.metadata)

    def stream(self, path: Path, options: ReadOptions) -> Stream:
        """See `Reader`."""
        options.refuse_unit(path, "the leap format is in seconds")
        parts = opened(path)
        metadata = {key: value for key, value in parts[0].metadata.items() if key != START_KEY}
        frames = swept([(part.first, part.frame) for part in parts], _KEY)
        return Stream(frames, path, self.name, metadata)


def opened(directory: Path) -> list[Part]:
    """The parts of a recording by their first arrivals; `TraceError` where they are of no one recording."""
    files = data_files(directory)
    if not files:
        raise TraceError(f"{directory}: is a directory without Parquet files, not a trace")
    parts = [part for file in files if (part := _opened(directory, file)) is not None]
    if not parts:
        raise TraceError(f"{directory}: the trace holds no requests ({len(files)} empty parts)")
    _refuse_others(parts)
    starts = [_start(part) for part in parts]
    first = min(starts)
    moved = [
        replace(part, offset_s=start - first, first=part.first + start - first)
        for part, start in zip(parts, starts, strict=True)
    ]
    return sorted(moved, key=lambda part: part.first)


def swept(parts: Sequence[tuple[float, Callable[[], pl.DataFrame]]], key: str) -> Iterator[pl.DataFrame]:
    """All rows by `key` of frames that are each ordered by it; they come with their first keys, ordered by those.

    No more is in memory than may still be followed by a row that belongs before it.
    """
    held: pl.DataFrame | None = None
    for (_, read), following in zip(parts, [*parts[1:], None], strict=True):
        frame = read()
        held = frame if held is None else pl.concat([held, frame]).sort(key, maintain_order=True)
        due = held.height if following is None else int(held[key].search_sorted(following[0], side="left"))
        if due:
            yield held.head(due)
            held = held.slice(due)


def _opened(directory: Path, file: Path) -> Part | None:
    """A part; None where it is empty, as the first one of Spark often is."""
    reader = LeapReader()
    start = open_file(file)
    fit = reader.fit(start)
    if not fit.whole:
        raise TraceError(f"{file}: {refusal(start, {reader.title: fit})}; a directory holds parts in leap's format")
    if start.dtypes and not _rows(file):
        return None
    stream = reader.stream(file, ReadOptions())
    frame = next(stream.frames)
    stream.close()
    said = {name: value for name, value in folder_columns(directory, file).items() if name not in frame.columns}
    return Part(file, stream.metadata, frame.schema, 0.0, float(frame[_KEY][0]), said)


def _rows(file: Path) -> int:
    try:
        return int(pl.scan_parquet(file, hive_partitioning=False, glob=False).select(pl.len()).collect().item())
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException, OSError):
        # The reader says what is wrong with it.
        return 1


def _start(part: Part) -> float:
    text = part.metadata.get(START_KEY, "0")
    try:
        return float(text)
    except ValueError:
        raise TraceError(f"{part.path}: metadata {START_KEY} must be seconds, not {text!r}") from None


def _refuse_others(parts: Sequence[Part]) -> None:
    one = parts[0]
    for part in parts[1:]:
        for key in _SAME:
            ours, theirs = part.metadata.get(key), one.metadata.get(key)
            if ours != theirs:
                raise TraceError(
                    f"{part.path}: is of {key} {ours or 'unknown'}, but {one.path} of {theirs or 'unknown'}"
                )
        if part.columns != one.columns:
            raise TraceError(f"{part.path}: has the columns {part.columns}, but {one.path} {one.columns}")
        if part.folders.keys() != one.folders.keys():
            ours, theirs = (", ".join(each.folders) or "none" for each in (part, one))
            raise TraceError(f"{part.path}: its folders say the columns {ours}, but those of {one.path} {theirs}")
