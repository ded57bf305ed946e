"""What a reader gives back, and the one interface that every reader has."""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

import polars as pl

from leap_rs._leap import ConfigError

if TYPE_CHECKING:
    from leap_rs.trace.opening import Fit, Opening

Unit = Literal["s", "ms", "us", "ns"]

PER_SECOND: Mapping[Unit, float] = {"s": 1.0, "ms": 1e3, "us": 1e6, "ns": 1e9}
UNIT_WORDS: Mapping[Unit, str] = {"s": "seconds", "ms": "milliseconds", "us": "microseconds", "ns": "nanoseconds"}


@dataclass(frozen=True)
class ReadOptions:
    """How to treat what a foreign format may hold. The leap format is strict and needs none of them."""

    strict: bool = False
    """Refuse a file with failed or zero-length rows instead of leaving those rows out."""
    sort: bool = False
    """Sort a file whose times run backwards (equal times keep the order of the file) instead of refusing it."""
    join: bool = False
    """Where times run backwards another recording begins: put it behind the one before instead of refusing the file."""
    unit: Unit | None = None
    """The unit of the file's times, where the format leaves it open."""
    tokenizer: Path | None = None
    """A `tokenizer.json`, or a directory with one, for formats that carry text instead of token counts."""
    run: int | None = None
    """Which of several results in one file, counted from 1; for formats that can hold several."""
    prefix_block_size: int | None = None
    """Tokens in a block of prefixes, for formats that number blocks and do not say their size."""

    def __post_init__(self) -> None:
        if self.unit is not None and self.unit not in PER_SECOND:
            raise ConfigError(f"unit {self.unit!r} is not one of {', '.join(PER_SECOND)}")
        if self.sort and self.join:
            raise ConfigError("sort and join contradict each other: one mixes recordings, the other keeps them apart")

    def refuse_unit(self, path: Path, why: str) -> None:
        """For formats whose times have one unit: a given one is a contradiction (`ConfigError`)."""
        if self.unit is not None:
            raise ConfigError(f"{path}: a unit ({self.unit}) cannot be given: {why}")


@dataclass(frozen=True)
class LeftOut:
    """Rows of a foreign file that are no requests."""

    reason: str
    count: int
    first: str
    """Where the first of them stands, as the user sees it (`line 7`)."""

    def __str__(self) -> str:
        rows = "1 row" if self.count == 1 else f"{self.count} rows"
        return f"{rows} left out: {self.reason} (first: {self.first})"


@dataclass(frozen=True)
class Trace:
    """A trace in memory, in the columns and units of the leap format, whatever the file's own format."""

    frame: pl.DataFrame
    path: Path
    format: str
    metadata: dict[str, str] = field(default_factory=dict)
    left_out: tuple[LeftOut, ...] = ()
    notes: tuple[str, ...] = ()
    """What a user should know before trusting the trace, one sentence each."""
    no_times: str = ""
    """Why it has no arrival times, so that every `arrival_s` is 0; empty where it has some."""

    @property
    def has_times(self) -> bool:
        """Whether it has arrival times."""
        return not self.no_times

    @property
    def name(self) -> str:
        """The file's name without directory and suffix."""
        return self.path.stem

    def told(self, *, times: bool = True) -> list[str]:
        """Everything that the reader noticed, one line each, each naming the file.

        times: whether that there are none is worth a line, which it is not where none are asked for.
        """
        return _told(self, times=times)


@dataclass
class Raw:
    """What a foreign file says, part by part, before the rules that all foreign formats share are applied.

    Every part has the columns `place` (UInt64: where a row stands in the file), `prompt_tokens` and `output_tokens`
    (Int64, 0 allowed), `arrival_ns` (Int64, on the file's own clock and in its own order) unless the format has no
    times, and any optional columns of the leap format.
    """

    parts: Iterator[pl.DataFrame]
    names: Mapping[str, str]
    """What the file calls a leap column, for messages: `{"output_tokens": "GeneratedTokens"}`."""
    place: str = "line"
    """What `place` counts: `line`, `row`, `request`."""
    no_times: str = ""
    """Why there are no arrival times (`no column 'TIMESTAMP'`); empty where there are."""
    unit: Unit | None = None
    """The unit in which the reader took the times, where that could be wrong; None where the file leaves no doubt."""
    unordered: bool = False
    """Whether rows stand there in no order by nature: they are then sorted by time, asked or not."""
    metadata: dict[str, str] = field(default_factory=dict)
    left_out: list[LeftOut] = field(default_factory=list)
    """Rows that the reader itself left out; complete once the parts are used up."""
    notes: list[str] = field(default_factory=list)
    """As in `Trace`; complete once the parts are used up."""


@dataclass
class Stream:
    """A trace part by part, in the columns and units of the leap format and in the order of arrival."""

    frames: Iterator[pl.DataFrame]
    """The parts, to be used up once; none is empty. Raises `TraceError` at the part that is at fault."""
    path: Path
    format: str
    metadata: dict[str, str] = field(default_factory=dict)
    no_times: str = ""
    """As in `Trace`."""
    left_out: list[LeftOut] = field(default_factory=list)
    """As in `Trace`; complete once the frames are used up."""
    notes: list[str] = field(default_factory=list)
    """As in `Trace`; complete once the frames are used up."""

    @property
    def has_times(self) -> bool:
        """As in `Trace`."""
        return not self.no_times

    def told(self) -> list[str]:
        """As in `Trace`."""
        return _told(self, times=True)

    def close(self) -> None:
        """Ends it early; what was left out and noticed up to there is complete."""
        if isinstance(self.frames, Generator):
            self.frames.close()


def _told(trace: Trace | Stream, *, times: bool) -> list[str]:
    lacks = without_times(trace) if times else []
    return [f"{trace.path}: {what}" for what in (*trace.left_out, *trace.notes, *lacks)]


def without_times(trace: Trace | Stream) -> list[str]:
    """That a trace has no arrival times, where it has none."""
    return [f"no arrival times ({trace.no_times}): all requests arrive at 0"] if trace.no_times else []


class Reader(Protocol):
    """One trace format."""

    name: str
    description: str
    """The format in a line: what it is called, the kind of file and its columns or keys."""

    @property
    def own_options(self) -> Collection[str]:
        """Options of `ReadOptions` that only files of some formats leave a choice for, and these do."""
        ...

    @property
    def title(self) -> str:
        """What the format is called in a sentence."""
        ...

    def fit(self, opening: Opening) -> Fit:
        """How well a file fits this format, judged by how it begins and never by its suffix. Raises nothing."""
        ...

    def read(self, path: Path, options: ReadOptions) -> Trace:
        """Read the whole file. Raises `TraceError` that names the file, the place and the fault."""
        ...

    def stream(self, path: Path, options: ReadOptions) -> Stream:
        """Read the file part by part, in bounded memory."""
        ...
