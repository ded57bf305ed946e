"""The order and the plausibility of a foreign file's times, kept while its parts pass by."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path

import polars as pl

from leap_rs._leap import TraceError
from leap_rs.trace.model import UNIT_WORDS, Raw, Unit
from leap_rs.trace.times import MAX_NS, NS_PER_S

BUSIEST_RATE = 2_000.0  # requests per second: more than any single server has been seen to take
QUIETEST_GAP_S = 600.0  # gaps of ten minutes, most of the time, are more likely gaps in milliseconds
UNIX_TIME_S = 1e8
MOST_RECORDINGS = 1_000


class Joined:
    """Times that run backwards: refused, or the start of another recording, which is put behind the one before.

    The first request of the next recording follows the last of the one before by that one's mean gap.
    """

    def __init__(self, path: Path, raw: Raw, *, refuse: bool) -> None:
        self.path, self.raw, self.refuse = path, raw, refuse
        self.starts: list[int] = []
        # Of the recording under way, on the file's clock.
        self._first = self._last = self._count = 0
        self._shift = 0

    def parts(self, parts: Iterator[pl.DataFrame]) -> Iterator[pl.DataFrame]:
        """The parts with `arrival_ns` that never runs backwards."""
        for part in parts:
            start = 0
            for back in self._backward(part["arrival_ns"]):
                place = int(part["place"][back])
                if self.refuse:
                    column = self.raw.names.get("arrival_s", "arrival_s")
                    before = self._last if back == 0 else int(part["arrival_ns"][back - 1])
                    raise TraceError(
                        f"{self.path}: {self.raw.place} {place}: column '{column}': times run backwards, from "
                        f"{_time(before)} to {_time(int(part['arrival_ns'][back]))}: --sort (sort=True) orders the rows, "
                        "--join (join=True) takes the place for the beginning of another recording"
                    )
                self.starts.append(place)
                if len(self.starts) > MOST_RECORDINGS:
                    raise TraceError(
                        f"{self.path}: {self.raw.place} {place}: times run backwards for the {len(self.starts)}th time: "
                        "these are no recordings one behind the other; --sort (sort=True) orders the rows"
                    )
                if back > start:
                    yield self._shifted(part.slice(start, back - start))
                self._begin_another(int(part["arrival_ns"][back]))
                start = back
            yield self._shifted(part.slice(start))

    def notes(self) -> list[str]:
        """What was joined."""
        if not self.starts:
            return []
        shown = ", ".join(str(place) for place in self.starts[:5])
        more = f" and {len(self.starts) - 5} more" if len(self.starts) > 5 else ""
        return [
            f"{len(self.starts) + 1} recordings, one behind the other by its mean gap: times run backwards at "
            f"{self.raw.place} {shown}{more}"
        ]

    def _backward(self, times: pl.Series) -> list[int]:
        before = times.shift(1)
        before[0] = self._last if self._count else times[0]
        return [int(row) for row in (times < before).arg_true()]

    def _begin_another(self, first: int) -> None:
        gap = (self._last - self._first) // (self._count - 1) if self._count > 1 else 0
        self._shift += self._last + gap - first
        self._count = 0
        if self._shift > MAX_NS:
            raise TraceError(f"{self.path}: the recordings last over a century, one behind the other")

    def _shifted(self, piece: pl.DataFrame) -> pl.DataFrame:
        times = piece["arrival_ns"]
        if self._count == 0:
            self._first = int(times[0])
        self._last = int(times[-1])
        self._count += piece.height
        return piece.with_columns(pl.col("arrival_ns") + self._shift) if self._shift else piece


class Plausibility:
    """Whether the times could be in the unit that they were taken for."""

    def __init__(self, column: str, unit: Unit) -> None:
        self.column, self.unit = column, unit
        self._count = self._wide = 0
        self._last: float | None = None

    def see(self, arrival: pl.Series) -> None:
        """The next part of `arrival_s`."""
        gaps = arrival.diff().drop_nulls()
        self._wide += int((gaps > QUIETEST_GAP_S).sum())
        if self._last is not None:
            self._wide += float(arrival[0]) - self._last > QUIETEST_GAP_S
        self._count += len(arrival)
        self._last = float(arrival[-1])

    def notes(self) -> list[str]:
        """A sentence where the times look as if they were in another unit."""
        span = self._last or 0.0
        if self._count < 2 or span == 0.0:
            return []
        really = f"is '{self.column}' really in {UNIT_WORDS[self.unit]}?"
        if (self._count - 1) / span > BUSIEST_RATE:
            coarser = "" if self.unit == "s" else " Are the timestamps seconds?"
            return [f"{self._count} requests arrive within {_shown(span)}: {really}{coarser}"]
        if 2 * self._wide > self._count - 1 or span > UNIX_TIME_S:
            mean = span / (self._count - 1)
            return [f"the requests are {mean:.3g} s apart on average, {span:.3g} s in all: {really}"]
        return []


def _time(ns: int) -> str:
    """A time on the file's own clock: a date where it counts from 1970, else seconds."""
    seconds = ns / NS_PER_S
    if seconds < UNIX_TIME_S:
        return f"{seconds:.9g} s"
    return datetime.fromtimestamp(seconds, tz=timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _shown(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 0.1 else f"{seconds:.3g} s"
