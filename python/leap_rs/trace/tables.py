"""Foreign tables: Azure, vidur, BurstGPT and splitwise-sim, as CSV or as Parquet. Columns go by the header's names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import ClassVar

import polars as pl

from leap_rs._leap import TraceError
from leap_rs.trace import schema, table
from leap_rs.trace.foreign import ForeignReader
from leap_rs.trace.jsonrows import IDS, SESSIONS
from leap_rs.trace.model import UNIT_WORDS, Raw, ReadOptions, Unit
from leap_rs.trace.opening import CSV, PARQUET, Opening, opened, present
from leap_rs.trace.schema import U32_MAX
from leap_rs.trace.table import LINE
from leap_rs.trace.times import dates, nanoseconds

_NOTHING = ("", "-", "null", "none", "nan", "na", "n/a", "<na>")
"""What tables hold where there is no value."""


class TableReader(ForeignReader):
    """A table with a row a request, its times numbers in seconds unless a unit is given."""

    kinds = (CSV, PARQUET)
    names: ClassVar[Mapping[str, str]]
    """What the file calls the leap columns `arrival_s`, `prompt_tokens` and `output_tokens`."""
    optional: ClassVar[Mapping[str, str]] = {}
    """What the file calls further columns, where it has them."""
    unit: ClassVar[Unit | None] = "s"

    def __init_subclass__(cls) -> None:
        cls.keys = (cls.names["prompt_tokens"], cls.names["output_tokens"])
        cls.also = (cls.names["arrival_s"], *cls.optional.values())

    def raw(self, path: Path, options: ReadOptions) -> Raw:
        """See `ForeignReader`."""
        start = opened(path)
        names = dict(self.names)
        no_times = ""
        if names["arrival_s"] not in start.names:
            options.refuse_unit(path, "the file has no times")
            no_times = f"no column '{names.pop('arrival_s')}'"
        further = self._further(start, names)
        parsed = _Typed(start, [name for leap, name in further.items() if leap not in self.optional])
        rows = table.rows(start, list(names.values()), list(further.values()))
        parts = (
            pl.DataFrame(list(self._columns(path, part, names, further, parsed, options.unit, start.row)))
            for part in rows
        )
        return Raw(parts, {**further, **names}, start.row, no_times, self.unit, notes=parsed.notes)

    def times(self, text: pl.Series, unit: Unit | None) -> tuple[pl.Series, str]:
        """Int64 nanoseconds on the file's own clock, null where there is no time; and what a time looks like."""
        unit = unit or self.unit or "s"
        wanted = f"a finite number of {UNIT_WORDS[unit]} below 146 years (--unit says what the times are in)"
        return nanoseconds(text, unit), wanted

    def further(self, rows: pl.DataFrame, name: str) -> pl.Series:
        """An optional column, from the rows as text."""
        return rows[name]

    def _further(self, start: Opening, names: Mapping[str, str]) -> dict[str, str]:
        """Leap's name and the file's for every other column: none is lost."""
        found = {leap: name for leap, name in self.optional.items() if name in start.names}
        for leap, several in (("request_id", IDS), ("session", SESSIONS)):
            name = present(several, start.names)
            if leap not in self.optional and name is not None:
                found[leap] = name
        known = {*names.values(), *found.values()}
        # A column that only has a name of leap's keeps it, and that name says whose it is.
        rest = [name for name in start.names if name and name not in known and start.names.count(name) == 1]
        return found | {name if name not in schema.KNOWN else f"{self.name}_{name}": name for name in rest}

    def _columns(
        self,
        path: Path,
        rows: pl.DataFrame,
        names: Mapping[str, str],
        further: Mapping[str, str],
        parsed: _Typed,
        unit: Unit | None,
        place: str,
    ) -> Iterator[pl.Series]:
        yield rows[LINE].alias("place")
        if "arrival_s" in names:
            times, wanted = self.times(rows[names["arrival_s"]], unit)
            _refuse(path, rows, times.is_null(), names["arrival_s"], wanted, place)
            yield times.alias("arrival_ns")
        for leap in ("prompt_tokens", "output_tokens"):
            yield _whole(path, rows, names[leap], place).alias(leap)
        for leap, name in further.items():
            column = self.further(rows, name) if leap in self.optional else parsed.column(rows[name])
            yield column.alias(leap)


class _Typed:
    """Columns that leap does not know, as what they hold: whole numbers, numbers or text, by the first part of the file."""

    def __init__(self, start: Opening, names: list[str]) -> None:
        self._as_text = {name for name in names if name in (*IDS, *SESSIONS)}
        self._dtypes: dict[str, pl.DataType] = {
            name: dtype for name in names if not isinstance(dtype := start.dtypes.get(name, pl.String()), pl.String)
        }
        self.notes: list[str] = []

    def column(self, text: pl.Series) -> pl.Series:
        """One part of a column."""
        name = text.name
        if name in self._as_text:
            return text
        values = text.set(text.str.to_lowercase().is_in(_NOTHING), None)
        if name not in self._dtypes:
            self._dtypes[name] = next((d for d in (pl.Int64(), pl.Float64()) if _all(values, d)), pl.String())
        dtype = self._dtypes[name]
        if isinstance(dtype, pl.String):
            return text
        typed: pl.Series = values.cast(dtype, strict=False)
        if typed.null_count() > values.null_count():
            note = f"column '{name}' is read as {dtype}, which not all of its values are: these are missing"
            self.notes += [note] if note not in self.notes else []
        return typed


def _all(values: pl.Series, dtype: pl.DataType) -> bool:
    some = values.null_count() < len(values)
    return some and values.cast(dtype, strict=False).null_count() == values.null_count()


class AzureReader(TableReader):
    """Azure's LLM inference traces of 2023, 2024 and 2025 (LMM), and what inference-perf reads: times are dates."""

    name = "azure"
    description = "Azure CSV (TIMESTAMP,ContextTokens,GeneratedTokens)"
    names: ClassVar[Mapping[str, str]] = {
        "arrival_s": "TIMESTAMP",
        "prompt_tokens": "ContextTokens",
        "output_tokens": "GeneratedTokens",
    }
    unit = None

    def raw(self, path: Path, options: ReadOptions) -> Raw:
        """See `ForeignReader`."""
        options.refuse_unit(path, f"the times of {self.name} are dates")
        return super().raw(path, options)

    def times(self, text: pl.Series, unit: Unit | None) -> tuple[pl.Series, str]:  # noqa: ARG002
        """See `TableReader`."""
        return dates(text), "a date and time as ISO 8601 has them, such as 2023-11-16 18:15:46.6805900"


class VidurReader(TableReader):
    """The small CSV of vidur and of splitwise's converted traces; vidur's files of lengths alone have no times."""

    name = "vidur"
    description = "vidur CSV (arrived_at,num_prefill_tokens,num_decode_tokens, or the last two alone)"
    names: ClassVar[Mapping[str, str]] = {
        "arrival_s": "arrived_at",
        "prompt_tokens": "num_prefill_tokens",
        "output_tokens": "num_decode_tokens",
    }


class BurstGptReader(TableReader):
    """BurstGPT, of either release: with `Session ID` and `Elapsed time` or without."""

    name = "burstgpt"
    description = "BurstGPT CSV (Timestamp,[Session ID,Elapsed time,]Model,Request tokens,Response tokens,...)"
    names: ClassVar[Mapping[str, str]] = {
        "arrival_s": "Timestamp",
        "prompt_tokens": "Request tokens",
        "output_tokens": "Response tokens",
    }
    optional: ClassVar[Mapping[str, str]] = {
        "session": "Session ID",
        "elapsed_time_s": "Elapsed time",
        "model": "Model",
        "domain": "Log Type",
    }

    def further(self, rows: pl.DataFrame, name: str) -> pl.Series:
        """See `TableReader`."""
        text = rows[name]
        if name == self.optional["session"]:
            return text.set(text.is_in(["", "-"]), None)
        if name == self.optional["elapsed_time_s"]:
            seconds: pl.Series = text.cast(pl.Float64, strict=False)
            return seconds
        return text


class SplitwiseReader(TableReader):
    """The traces of splitwise-sim."""

    name = "splitwise-sim"
    description = "splitwise-sim CSV (arrival_timestamp,prompt_size,token_size)"
    names: ClassVar[Mapping[str, str]] = {
        "arrival_s": "arrival_timestamp",
        "prompt_tokens": "prompt_size",
        "output_tokens": "token_size",
    }
    optional: ClassVar[Mapping[str, str]] = {"request_id": "request_id", "tenant": "application_id"}


def _whole(path: Path, rows: pl.DataFrame, column: str, place: str) -> pl.Series:
    """Token counts; null where the row says none, as a failed request does."""
    text = rows[column]
    values: pl.Series = text.cast(pl.Int64, strict=False)
    bad = values.is_null()
    if bad.any():
        # pandas writes `12.0` for whole numbers in a column that once held a gap.
        values = text.str.extract(r"^(\d+)(?:\.0+)?$", 1).cast(pl.Int64, strict=False)
        bad = values.is_null() & ~text.str.to_lowercase().is_in(_NOTHING)
    bad = bad | ((values < 0) | (values > U32_MAX)).fill_null(value=False)
    _refuse(path, rows, bad, column, f"a whole number of tokens up to {U32_MAX}", place)
    return values


def _refuse(path: Path, rows: pl.DataFrame, bad: pl.Series, column: str, wanted: str, place: str) -> None:
    at = bad.arg_true()
    if len(at):
        row = int(at[0])
        number, text = rows[LINE][row], rows[column][row]
        counted = " (the first row is 0)" if place == "row" else ""
        raise TraceError(f"{path}: {place} {number}{counted}: column '{column}': expected {wanted}, found {text!r}")
