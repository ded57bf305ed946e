"""Foreign CSV traces: Azure, vidur, BurstGPT and splitwise-sim. Columns go by the header's names."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import ClassVar

import polars as pl

from leap_rs._leap import TraceError
from leap_rs.trace import table
from leap_rs.trace.files import head
from leap_rs.trace.foreign import ForeignReader
from leap_rs.trace.model import UNIT_WORDS, Raw, ReadOptions, Unit
from leap_rs.trace.schema import U32_MAX
from leap_rs.trace.table import LINE
from leap_rs.trace.times import dates, nanoseconds

_OFFSET = re.compile(rb"(?:[+-]\d\d:?\d\d|Z)$")


class CsvReader(ForeignReader):
    """A CSV with a row a request, its times numbers in seconds unless a unit is given."""

    names: ClassVar[Mapping[str, str]]
    """What the file calls the leap columns `arrival_s`, `prompt_tokens` and `output_tokens`."""
    optional: ClassVar[Mapping[str, str]] = {}
    """What the file calls further columns, where it has them."""
    unit: ClassVar[Unit | None] = "s"

    def sniff(self, path: Path) -> bool:
        """See `Reader`."""
        return {self.names["prompt_tokens"], self.names["output_tokens"]} <= set(table.header_names(path))

    def raw(self, path: Path, options: ReadOptions) -> Raw:
        """See `ForeignReader`."""
        names = dict(self.names)
        if not self.has_times(path):
            options.refuse_unit(path, "the file has no times")
            del names["arrival_s"]
        rows = table.rows(path, list(names.values()), list(self.optional.values()))
        parts = (pl.DataFrame(list(self._columns(path, part, names, options.unit))) for part in rows)
        return Raw(parts, {**self.optional, **names}, LINE, "arrival_s" in names, self.unit)

    def has_times(self, path: Path) -> bool:  # noqa: ARG002
        """Whether this file has the column of times."""
        return True

    def times(self, text: pl.Series, unit: Unit | None) -> tuple[pl.Series, str]:
        """Int64 nanoseconds on the file's own clock, null where there is no time; and what a time looks like."""
        unit = unit or self.unit or "s"
        wanted = f"a finite number of {UNIT_WORDS[unit]} below 146 years (--unit says what the times are in)"
        return nanoseconds(text, unit), wanted

    def further(self, rows: pl.DataFrame, name: str) -> pl.Series:
        """An optional column, from the rows as text."""
        return rows[name]

    def _columns(
        self, path: Path, rows: pl.DataFrame, names: Mapping[str, str], unit: Unit | None
    ) -> Iterator[pl.Series]:
        yield rows[LINE].alias("place")
        if "arrival_s" in names:
            times, wanted = self.times(rows[names["arrival_s"]], unit)
            _refuse(path, rows, times.is_null(), names["arrival_s"], wanted)
            yield times.alias("arrival_ns")
        for leap in ("prompt_tokens", "output_tokens"):
            yield _whole(path, rows, names[leap]).alias(leap)
        for leap, name in self.optional.items():
            if name in rows.columns:
                yield self.further(rows, name).alias(leap)


class AzureReader(CsvReader):
    """Azure LLM inference traces of 2023, and what inference-perf reads: dates without an offset, to 100 ns."""

    name = "azure-2023"
    description = "Azure 2023 CSV (TIMESTAMP,ContextTokens,GeneratedTokens)"
    names: ClassVar[Mapping[str, str]] = {
        "arrival_s": "TIMESTAMP",
        "prompt_tokens": "ContextTokens",
        "output_tokens": "GeneratedTokens",
    }
    unit = None
    form: ClassVar[str] = "%Y-%m-%d %H:%M:%S%.f"
    example: ClassVar[str] = "2023-11-16 18:15:46.6805900"

    def raw(self, path: Path, options: ReadOptions) -> Raw:
        """See `ForeignReader`."""
        options.refuse_unit(path, f"the times of {self.name} are dates")
        return super().raw(path, options)

    def times(self, text: pl.Series, unit: Unit | None) -> tuple[pl.Series, str]:  # noqa: ARG002
        """See `CsvReader`."""
        return dates(text, self.form), f"a time such as {self.example}"


class Azure2024Reader(AzureReader):
    """Azure LLM inference traces of 2024: the same columns, dates with an offset from UTC."""

    name = "azure-2024"
    description = "Azure 2024 CSV (the same with times such as 2024-05-10 00:00:00.009930+00:00)"
    form = "%Y-%m-%d %H:%M:%S%.f%:z"
    example = "2024-05-10 00:00:00.009930+00:00"

    def sniff(self, path: Path) -> bool:
        """See `Reader`."""
        if not super().sniff(path):
            return False
        lines = [line for line in head(path).split(b"\n")[1:] if line.strip()]
        fields = lines[0].split(b",") if lines else []
        column = table.header_names(path).index(self.names["arrival_s"]) if fields else 0
        return column < len(fields) and _OFFSET.search(fields[column].strip().strip(b'"')) is not None


class VidurReader(CsvReader):
    """The small CSV of vidur and of splitwise's converted traces; vidur's files of lengths alone have no times."""

    name = "vidur"
    description = "vidur CSV (arrived_at,num_prefill_tokens,num_decode_tokens, or the last two alone)"
    names: ClassVar[Mapping[str, str]] = {
        "arrival_s": "arrived_at",
        "prompt_tokens": "num_prefill_tokens",
        "output_tokens": "num_decode_tokens",
    }

    def has_times(self, path: Path) -> bool:
        """See `CsvReader`."""
        return self.names["arrival_s"] in table.header_names(path)


class BurstGptReader(CsvReader):
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
        """See `CsvReader`."""
        text = rows[name]
        if name == self.optional["session"]:
            return text.set(text.is_in(["", "-"]), None)
        if name == self.optional["elapsed_time_s"]:
            seconds: pl.Series = text.cast(pl.Float64, strict=False)
            return seconds
        return text


class SplitwiseReader(CsvReader):
    """The traces of splitwise-sim."""

    name = "splitwise-sim"
    description = "splitwise-sim CSV (arrival_timestamp,prompt_size,token_size)"
    names: ClassVar[Mapping[str, str]] = {
        "arrival_s": "arrival_timestamp",
        "prompt_tokens": "prompt_size",
        "output_tokens": "token_size",
    }
    optional: ClassVar[Mapping[str, str]] = {"request_id": "request_id", "tenant": "application_id"}


def _whole(path: Path, rows: pl.DataFrame, column: str) -> pl.Series:
    text = rows[column]
    values: pl.Series = text.cast(pl.Int64, strict=False)
    if values.null_count():
        # pandas writes `12.0` for whole numbers in a column that once held a gap.
        values = text.str.extract(r"^(\d+)(?:\.0+)?$", 1).cast(pl.Int64, strict=False)
    bad = values.is_null() | (values < 0) | (values > U32_MAX)
    _refuse(path, rows, bad, column, f"a whole number of tokens up to {U32_MAX}")
    return values


def _refuse(path: Path, rows: pl.DataFrame, bad: pl.Series, column: str, wanted: str) -> None:
    at = bad.arg_true()
    if len(at):
        row = int(at[0])
        line, text = rows[LINE][row], rows[column][row]
        raise TraceError(f"{path}: line {line}: column '{column}': expected {wanted}, found {text!r}")
