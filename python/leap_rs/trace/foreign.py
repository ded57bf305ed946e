"""What all foreign formats share: a reader says what its file holds, and the rules for requests and times are here.

Rows without output or prompt tokens are left out and counted, times are put into order or refused, the first request
becomes time 0, and every part leaves with the columns, dtypes and checks of the leap format.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import polars as pl

from leap_rs._leap import TraceError
from leap_rs.trace import schema
from leap_rs.trace.arrivals import Joined, Plausibility
from leap_rs.trace.model import LeftOut, Raw, ReadOptions, Stream, Trace
from leap_rs.trace.opening import Described
from leap_rs.trace.order import in_order
from leap_rs.trace.times import NS_PER_S

_TOKENS = (
    ("output_tokens", "no output tokens, so a failed request"),
    ("prompt_tokens", "no prompt tokens"),
)
_MISSING = "no number of {}, so a failed request"


class ForeignReader(Described, ABC):
    """A format that is not leap's own. A subclass says how to recognise it and what a file holds."""

    @abstractmethod
    def raw(self, path: Path, options: ReadOptions) -> Raw:
        """What the file says, as it stands there. Raises `TraceError` for what cannot be read as this format."""

    def read(self, path: Path, options: ReadOptions) -> Trace:
        """See `Reader`."""
        stream = self.stream(path, options)
        frame = pl.concat(list(stream.frames), rechunk=True)
        if "request_id" in frame.columns:
            schema.refuse_repeated_ids(frame["request_id"], path)
        return Trace(
            frame, path, self.name, stream.metadata, tuple(stream.left_out), tuple(stream.notes), stream.no_times
        )

    def stream(self, path: Path, options: ReadOptions) -> Stream:
        """See `Reader`."""
        raw = self.raw(path, options)
        stream = Stream(iter(()), path, self.name, raw.metadata, raw.no_times)
        stream.frames = _Stage(stream, raw, options).frames()
        return stream


@dataclass(frozen=True, kw_only=True)
class _Places(schema.Rows):
    """Rows by where they stand in a foreign file, columns by the file's own names."""

    places: pl.Series
    raw: Raw

    def place(self, row: int) -> str:
        return f"{self.raw.place} {self.places[row]}"

    def fault(self, what: str, *, column: str | None = None, row: int | None = None) -> TraceError:
        words = [str(self.path)]
        if row is not None:
            words.append(self.place(row))
        if column is not None:
            words.append(f"column '{self.raw.names.get(column, column)}'")
        return TraceError(": ".join([*words, what]))


class _Stage:
    """One pass over a foreign file."""

    def __init__(self, stream: Stream, raw: Raw, options: ReadOptions) -> None:
        self.path = stream.path
        self.stream, self.raw, self.options = stream, raw, options
        self.zeros: dict[tuple[str, str], LeftOut] = {}

    def frames(self) -> Iterator[pl.DataFrame]:
        """The parts in leap's columns; afterwards `stream` knows what was left out."""
        parts = self._requests()
        joined = plausible = None
        if (self.options.sort or self.raw.unordered) and not self.raw.no_times:
            parts = in_order(parts, "arrival_ns", self.path)
        elif not self.raw.no_times:
            joined = Joined(self.path, self.raw, refuse=not self.options.join)
            parts = joined.parts(parts)
        # A unit that the user gave can be the wrong one as well.
        unit = self.options.unit or self.raw.unit
        if not self.raw.no_times and unit is not None:
            plausible = Plausibility(self.raw.names.get("arrival_s", "arrival_s"), unit)

        origin: int | None = None
        count = 0
        try:
            for part in parts:
                if self.raw.no_times:
                    arrival = pl.repeat(0.0, part.height, eager=True).alias("arrival_s")
                else:
                    ns = part["arrival_ns"].to_numpy()
                    origin = int(ns[0]) if origin is None else origin
                    # Divided by numpy: polars multiplies by the reciprocal, which is one rounding more.
                    arrival = pl.Series("arrival_s", (ns - origin) / NS_PER_S)
                if plausible is not None:
                    plausible.see(arrival)
                rest = [name for name in part.columns if name not in ("place", "arrival_ns")]
                at = _Places(path=self.path, first=count, places=part["place"], raw=self.raw)
                frame = schema.checked(pl.DataFrame([arrival, *part.select(rest)]), at, self.raw.metadata)
                count += part.height
                yield frame
        finally:
            # Also where somebody wanted only the first parts.
            self.stream.left_out.extend([*self.raw.left_out, *self.zeros.values()])
            self.stream.notes.extend(self.raw.notes)
            self.stream.notes.extend(joined.notes() if joined is not None else [])
            self.stream.notes.extend(plausible.notes() if plausible is not None else [])
        if count == 0:
            why = f" ({'; '.join(map(str, self.stream.left_out))})" if self.stream.left_out else ""
            raise TraceError(f"{self.path}: the trace holds no requests{why}")

    def _requests(self) -> Iterator[pl.DataFrame]:
        """The rows that are requests."""
        for part in self.raw.parts:
            kept = self._checked(part)
            for column, meaning in _TOKENS:
                missing = _MISSING.format(column.replace("_", " "))
                kept = self._without(kept, kept[column].is_null(), column, missing)
                kept = self._without(kept, kept[column] == 0, column, meaning)
            if kept.height and not (self.options.strict and self.zeros):
                yield kept
        if self.options.strict:
            for (column, _), out in self.zeros.items():
                name = self.raw.names.get(column, column)
                rows = "such row" if out.count == 1 else "such rows"
                raise TraceError(
                    f"{self.path}: {out.first}: column '{name}': {out.reason}; {out.count} {rows}, and strict refuses "
                    "them"
                )

    def _checked(self, part: pl.DataFrame) -> pl.DataFrame:
        """The part, if its tokens are whole numbers and its times are there; more is checked when it is complete."""
        at = _Places(path=self.path, places=part["place"], raw=self.raw)
        for column, _ in _TOKENS:
            values = part[column]
            bad = ((values < 0) | (values > schema.U32_MAX)).arg_true()
            if len(bad):
                row = int(bad[0])
                found = f"expected a whole number of tokens up to {schema.U32_MAX}, found {values[row]}"
                raise at.fault(found, column=column, row=row)
        if not self.raw.no_times:
            bad = part["arrival_ns"].is_null().arg_true()
            if len(bad):
                raise at.fault("no time", column="arrival_s", row=int(bad[0]))
        return part

    def _without(self, part: pl.DataFrame, rows: pl.Series, column: str, why: str) -> pl.DataFrame:
        if not rows.any():
            return part
        self._leave_out(column, why, part.filter(rows)["place"])
        return part.filter(~rows)

    def _leave_out(self, column: str, meaning: str, places: pl.Series) -> None:
        known = self.zeros.get((column, meaning))
        first = known.first if known else f"{self.raw.place} {places[0]}"
        self.zeros[column, meaning] = LeftOut(meaning, len(places) + (known.count if known else 0), first)
