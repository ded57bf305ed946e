"""A directory of parts as one trace: what a server writes while it serves.

Each part is a trace of its own, with the requests that finished while it was filled; one that took long arrived before many
of an earlier part. The parts are read in the order of their first arrivals, so that no more is held in memory than is
interleaved. Several engines, and a server that was started again, are put on one clock by when each of them started.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import polars as pl

from leap_rs._leap import TraceError
from leap_rs.trace import schema
from leap_rs.trace.model import ReadOptions, Stream, Trace
from leap_rs.trace.parquet import LeapReader

START_KEY = "recording_start_unix_s"
"""Metadata of a part: when its engine's clock stood at 0."""

_PATTERN = "part-*.parquet"
_KEY = "arrival_s"
_SAME = ("model", "layer", "encoder", "encoder_layer")


def part_name(number: int) -> str:
    """The file of a part, counted from 1."""
    return f"part-{number:05d}.parquet"


def part_files(directory: Path) -> list[Path]:
    """The parts in a directory and in those right below it, such as the engines' own."""
    return sorted([*directory.glob(_PATTERN), *directory.glob(f"*/{_PATTERN}")])


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

    def frame(self) -> pl.DataFrame:
        """The part, checked, on the recording's clock."""
        frame = LeapReader().read(self.path, ReadOptions()).frame
        return frame.with_columns(pl.col(_KEY) + self.offset_s)


class PartsReader:
    """A directory of parts."""

    name = "leap"
    description = "a directory of recorded parts"

    def sniff(self, path: Path) -> bool:
        """See `Reader`."""
        return path.is_dir()

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
    files = part_files(directory)
    if not files:
        raise TraceError(f"{directory}: is a directory without parts of a recording ({_PATTERN}), not a trace")
    parts = [_opened(file) for file in files]
    _refuse_others(parts)
    starts = [_start(part) for part in parts]
    first = min(starts)
    moved = [
        Part(part.path, part.metadata, part.columns, start - first, part.first + start - first)
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


def _opened(file: Path) -> Part:
    reader = LeapReader()
    stream = reader.stream(file, ReadOptions())
    frame = next(stream.frames)
    stream.close()
    return Part(file, stream.metadata, frame.schema, 0.0, float(frame[_KEY][0]))


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
