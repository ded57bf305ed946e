"""Foreign CSV traces: fields by the header's names, faults by their line number, failed rows left out and counted."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import polars as pl

from leap_rs._leap import TraceError
from leap_rs.trace.files import head, reason
from leap_rs.trace.model import PER_SECOND, LeftOut, ReadOptions, Trace
from leap_rs.trace.schema import U32_MAX

NS_PER_S = 1_000_000_000
BUSIEST_RATE = 10_000.0  # requests per second: more than any single server has been seen to take
QUIETEST_GAP_S = 600.0  # a median gap of ten minutes is more likely a gap in milliseconds
UNIX_TIME_S = 1e8

_LINE = "line"


@dataclass(frozen=True)
class Columns:
    """What a CSV format calls the three columns that a replay needs."""

    time: str
    prompt: str
    output: str

    def all(self) -> tuple[str, str, str]:
        """The three names."""
        return self.time, self.prompt, self.output


def header_names(path: Path) -> list[str]:
    """The names in the first line; empty where the file is not text."""
    first = head(path).removeprefix(b"\xef\xbb\xbf").split(b"\n", 1)[0]
    try:
        return _split_header(first.decode())
    except UnicodeDecodeError:
        return []


class AzureReader:
    """Azure LLM inference traces of 2023. Times are naive, with 7 fractional digits, and read as whole ns."""

    name = "azure-2023"
    description = "Azure 2023 CSV (TIMESTAMP,ContextTokens,GeneratedTokens)"
    columns = Columns("TIMESTAMP", "ContextTokens", "GeneratedTokens")

    def sniff(self, path: Path) -> bool:
        """See `Reader`."""
        return set(self.columns.all()) <= set(header_names(path))

    def read(self, path: Path, options: ReadOptions) -> Trace:
        """See `Reader`."""
        options.refuse_unit(path, f"the times of {self.name} are dates")
        rows = read_rows(path, self.columns)
        stamps = rows[self.columns.time]
        times = stamps.str.to_datetime("%Y-%m-%d %H:%M:%S%.f", time_unit="ns", strict=False).cast(pl.Int64)
        _refuse(path, rows, times.is_null(), self.columns.time, "a time such as 2023-11-16 18:15:46.6805900")
        kept, left_out = requests(path, rows.with_columns(times), self.columns, options)
        # Integers are subtracted before the division: a Unix time in f64 seconds has no room for 100 ns.
        ns = kept["arrival"]
        arrival = ((ns - ns[0]).cast(pl.Float64) / NS_PER_S).alias("arrival_s")
        return Trace(_frame(arrival, kept), path, self.name, {}, left_out)


class VidurReader:
    """The small CSV of vidur and of splitwise's converted traces; times in seconds unless a unit is given."""

    name = "vidur"
    description = "vidur CSV (arrived_at,num_prefill_tokens,num_decode_tokens)"
    columns = Columns("arrived_at", "num_prefill_tokens", "num_decode_tokens")

    def sniff(self, path: Path) -> bool:
        """See `Reader`."""
        return {self.columns.prompt, self.columns.output} <= set(header_names(path))

    def read(self, path: Path, options: ReadOptions) -> Trace:
        """See `Reader`."""
        rows = read_rows(path, self.columns)
        times = rows[self.columns.time].cast(pl.Float64, strict=False)
        good = times.is_finite().fill_null(value=False)
        _refuse(path, rows, ~good, self.columns.time, "a finite number of seconds")
        kept, left_out = requests(path, rows.with_columns(times), self.columns, options)
        at = kept["arrival"]
        arrival = ((at - at[0]) / PER_SECOND[options.unit or "s"]).alias("arrival_s")
        notes = () if options.unit else implausible_times(arrival, self.columns.time)
        return Trace(_frame(arrival, kept), path, self.name, {}, left_out, notes)


def read_rows(path: Path, columns: Columns) -> pl.DataFrame:
    """The wanted columns as text, with the 1-based `line` of each row. Blank lines are skipped, CRLF is read as LF."""
    try:
        text = path.read_bytes().removeprefix(b"\xef\xbb\xbf").decode()
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise TraceError(f"{path}: line {line}: not UTF-8 text") from error
    except OSError as error:
        raise TraceError(f"{path}: cannot be read: {reason(error)}") from error
    first, *lines = text.split("\n")
    names = _split_header(first)
    for column in columns.all():
        if column not in names:
            raise TraceError(f"{path}: line 1: column '{column}' is missing; the header is {','.join(names)}")
        if names.count(column) > 1:
            raise TraceError(f"{path}: line 1: column '{column}' stands there {names.count(column)} times")

    fields = pl.Series("fields", lines, dtype=pl.String).str.strip_chars()
    table = pl.DataFrame({_LINE: pl.int_range(2, 2 + len(lines), dtype=pl.UInt64, eager=True), "fields": fields})
    table = table.filter(pl.col("fields") != "").with_columns(pl.col("fields").str.split(","))
    wrong = table.filter(pl.col("fields").list.len() != len(names))
    if wrong.height:
        line, count = wrong[_LINE][0], len(wrong["fields"][0])
        raise TraceError(f"{path}: line {line}: {count} fields, but the header has {len(names)}")
    if table.height == 0:
        raise TraceError(f"{path}: the trace holds no requests")
    wanted = [
        pl.col("fields").list.get(names.index(name)).str.strip_chars().str.strip_chars('"').alias(name)
        for name in columns.all()
    ]
    return table.select(_LINE, *wanted)


def requests(
    path: Path, rows: pl.DataFrame, columns: Columns, options: ReadOptions
) -> tuple[pl.DataFrame, tuple[LeftOut, ...]]:
    """Rows that are requests (line, arrival, prompt_tokens, output_tokens) by arrival, and what was left out."""
    table = pl.DataFrame(
        [
            rows[_LINE],
            rows[columns.time].alias("arrival"),
            _whole(path, rows, columns.prompt).alias("prompt_tokens"),
            _whole(path, rows, columns.output).alias("output_tokens"),
        ]
    )
    left_out = []
    for column, name, meaning in (
        ("output_tokens", columns.output, "no output tokens, so a failed request"),
        ("prompt_tokens", columns.prompt, "no prompt tokens"),
    ):
        zero = table.filter(pl.col(column) == 0)
        if zero.height == 0:
            continue
        first = f"line {zero[_LINE][0]}"
        if options.strict:
            raise TraceError(
                f"{path}: {first}: column '{name}' is 0 ({meaning}); {zero.height} such rows, and strict refuses them"
            )
        left_out.append(LeftOut(meaning, zero.height, first))
        table = table.filter(pl.col(column) > 0)
    if table.height == 0:
        raise TraceError(f"{path}: the trace holds no requests ({'; '.join(map(str, left_out))})")

    back = (table["arrival"].diff() < 0).fill_null(value=False).arg_true()
    if len(back) and not options.sort:
        line = table[_LINE][int(back[0])]
        raise TraceError(
            f"{path}: line {line}: column '{columns.time}': times run backwards; sort says to order the rows by time"
        )
    return table.sort("arrival", maintain_order=True), tuple(left_out)


def implausible_times(arrival: pl.Series, column: str) -> tuple[str, ...]:
    """A sentence where the times look as if they were in another unit than seconds."""
    if len(arrival) < 2:
        return ()
    span = float(arrival[-1])
    gap = arrival.diff().drop_nulls().median()
    median_gap = float(gap) if isinstance(gap, int | float) else 0.0
    if 0.0 < span < (len(arrival) - 1) / BUSIEST_RATE:
        return (f"{len(arrival)} requests arrive within {span:.3g} s: is '{column}' really in seconds?",)
    if median_gap > QUIETEST_GAP_S or span > UNIX_TIME_S:
        return (f"the requests are {median_gap:.3g} s apart, {span:.3g} s in all: is '{column}' really in seconds?",)
    return ()


def _whole(path: Path, rows: pl.DataFrame, column: str) -> pl.Series:
    # pandas writes `12.0` for whole numbers in a column that once held a gap.
    digits = rows[column].str.extract(r"^(\d+)(?:\.0+)?$", 1)
    values = digits.cast(pl.Int64, strict=False)
    _refuse(path, rows, values.is_null() | (values > U32_MAX), column, f"a whole number of tokens up to {U32_MAX}")
    tokens: pl.Series = values.cast(pl.UInt32)
    return tokens


def _refuse(path: Path, rows: pl.DataFrame, bad: pl.Series, column: str, wanted: str) -> None:
    at = bad.arg_true()
    if len(at):
        row = int(at[0])
        line, text = rows[_LINE][row], rows[column][row]
        raise TraceError(f"{path}: line {line}: column '{column}': expected {wanted}, found {text!r}")


def _split_header(line: str) -> list[str]:
    return [name.strip().strip('"') for name in line.split(",")]


def _frame(arrival: pl.Series, kept: pl.DataFrame) -> pl.DataFrame:
    return pl.DataFrame([arrival, kept["prompt_tokens"], kept["output_tokens"]])
