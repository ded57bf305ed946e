"""A table of any size in parts, as text: CSV as RFC 4180 has it, its lines counted, and Parquet; columns by their names."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from leap_rs._leap import TraceError
from leap_rs.trace.files import head, opened, reason

if TYPE_CHECKING:
    from leap_rs.trace.opening import Opening

PART_BYTES = 8 * 2**20
PART_ROWS = 262_144
LONGEST_LINE = 64 * 2**20

LINE = "line"
_MARK = b"\xef\xbb\xbf"
_LINES = "lines"
_QUOTE, _LINE_END = 34, 10


def header_names(path: Path) -> list[str]:
    """The names in the first line; empty where the file is not text."""
    try:
        return _names(head(path).removeprefix(_MARK).split(b"\n", 1)[0].decode())
    except UnicodeDecodeError:
        return []


def text_parts(path: Path) -> Iterator[tuple[int, str]]:
    """The file's lines in parts, each with the number (from 1) of its first line, without a byte order mark.

    A part ends where a line does, and not within quotes.
    """
    line, rest = 1, b""
    try:
        with opened(path) as file:
            start = file.read(len(_MARK))
            rest = b"" if start == _MARK else start
            while block := file.read(PART_BYTES):
                rest += block
                cut = _record_end(rest)
                if cut < 0:
                    if len(rest) > LONGEST_LINE:
                        raise TraceError(f"{path}: line {line}: longer than {LONGEST_LINE} bytes, so no text in lines")
                    continue
                text, rest = rest[:cut], rest[cut + 1 :]
                yield line, _decoded(path, line, text)
                line += text.count(b"\n") + 1
    except OSError as error:
        raise TraceError(f"{path}: cannot be read: {reason(error)}") from error
    if rest:
        yield line, _decoded(path, line, rest)


def rows(start: Opening, required: Sequence[str], optional: Sequence[str] = ()) -> Iterator[pl.DataFrame]:
    """The wanted columns as text, with the `line` of each row: of text counted from 1, of Parquet the row from 0.

    Blank lines are skipped, CRLF is read as LF. An optional column is there in every part or in none.
    """
    if start.dtypes:
        yield from _parquet_rows(start, [*required, *optional])
        return
    path = start.path
    names: list[str] = []
    for line, text in text_parts(path):
        quoted = '"' in text
        table = _quoted_records(path, line, text) if quoted else _plain_lines(line, text)
        if not names:
            names = _names(text.split("\n", 1)[0])
            _check_header(path, names, required, optional)
            table = table.slice(1)
        if table.height:
            wanted = (*required, *(name for name in optional if name in names))
            fields = [pl.col(f"field_{names.index(name)}").str.strip_chars().alias(name) for name in wanted]
            cells = _cells(path, table, names) if quoted else _split(path, table, names)
            yield cells.select(LINE, *fields)


def _parquet_rows(start: Opening, names: Sequence[str]) -> Iterator[pl.DataFrame]:
    texts = [pl.col(name).cast(pl.String).fill_null("") for name in names]
    try:
        lazy = pl.scan_parquet(start.path, hive_partitioning=False, glob=False)
        total = int(lazy.select(pl.len()).collect().item())
        for first in range(0, total, PART_ROWS):
            part = lazy.slice(first, PART_ROWS).select(texts).collect()
            yield part.with_row_index(LINE, offset=first).with_columns(pl.col(LINE).cast(pl.UInt64))
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException, OSError) as error:
        raise TraceError(f"{start.path}: the Parquet file is damaged: {reason(error)[:200]}") from error


def _record_end(text: bytes) -> int:
    """The last line end that no quotes enclose; -1 where there is none."""
    cut = text.rfind(b"\n")
    if cut < 0 or b'"' not in text:
        return cut
    signs = np.frombuffer(text, dtype=np.uint8)
    # A quote within quotes is doubled, so that the count is even outside of them.
    outside = (np.cumsum(signs == _QUOTE) % 2 == 0) & (signs == _LINE_END)
    ends = np.flatnonzero(outside)
    return int(ends[-1]) if len(ends) else -1


def _plain_lines(line: int, text: str) -> pl.DataFrame:
    lines = pl.Series(_LINES, [text]).str.split("\n").explode().str.strip_chars()
    table = pl.DataFrame({LINE: pl.int_range(line, line + len(lines), dtype=pl.UInt64, eager=True), _LINES: lines})
    return table.filter(pl.col(_LINES) != "")


def _quoted_records(path: Path, line: int, text: str) -> pl.DataFrame:
    """The records of text with quotes, which may hold commas and line ends; each with its first line."""
    reader = csv.reader(io.StringIO(text, newline=""), strict=True, skipinitialspace=True)
    places: list[int] = []
    records: list[list[str]] = []
    begins = line
    try:
        for fields in reader:
            if any(field.strip() for field in fields):
                places.append(begins)
                records.append(fields)
            begins = line + reader.line_num
    except csv.Error as error:
        raise TraceError(f"{path}: line {begins}: the quotes do not match: {reason(error)}") from error
    return pl.DataFrame(
        {LINE: pl.Series(places, dtype=pl.UInt64), _LINES: pl.Series(records, dtype=pl.List(pl.String))}
    )


def _cells(path: Path, table: pl.DataFrame, names: list[str]) -> pl.DataFrame:
    """Records as `field_0` and so on."""
    counts = table[_LINES].list.len()
    wrong = (counts != len(names)).arg_true()
    if len(wrong):
        row = int(wrong[0])
        raise _wrong_count(path, table[LINE][row], counts[row], names)
    return table.select(LINE, *(pl.col(_LINES).list.get(i).alias(f"field_{i}") for i in range(len(names))))


def _split(path: Path, table: pl.DataFrame, names: list[str]) -> pl.DataFrame:
    """Lines without quotes as `field_0` and so on."""
    commas = table[_LINES].str.count_matches(",", literal=True)
    wrong = (commas != len(names) - 1).arg_true()
    if len(wrong):
        row = int(wrong[0])
        raise _wrong_count(path, table[LINE][row], commas[row] + 1, names)
    return table.select(LINE, pl.col(_LINES).str.split_exact(",", len(names) - 1)).unnest(_LINES)


def _wrong_count(path: Path, line: int, count: int, names: list[str]) -> TraceError:
    return TraceError(f"{path}: line {line}: {count} fields, but the header has {len(names)}")


def _names(line: str) -> list[str]:
    try:
        fields = next(csv.reader([line.strip()], skipinitialspace=True), [])
    except csv.Error:
        fields = line.split(",")
    return [name.strip() for name in fields]


def _check_header(path: Path, names: list[str], required: Sequence[str], optional: Sequence[str]) -> None:
    for column in required:
        if column not in names:
            raise TraceError(f"{path}: line 1: column '{column}' is missing; the header is {','.join(names)}")
    for column in (*required, *optional):
        if names.count(column) > 1:
            raise TraceError(f"{path}: line 1: column '{column}' stands there {names.count(column)} times")


def _decoded(path: Path, line: int, text: bytes) -> str:
    try:
        return text.decode()
    except UnicodeDecodeError as error:
        raise TraceError(f"{path}: line {line + text[: error.start].count(10)}: not UTF-8 text") from error
