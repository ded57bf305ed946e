"""A CSV file of any size in parts: blocks of bytes cut at line ends, fields by the header's names, lines counted."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from pathlib import Path

import polars as pl

from leap_rs._leap import TraceError
from leap_rs.trace.files import head, reason

PART_BYTES = 8 * 2**20
LONGEST_LINE = 64 * 2**20

LINE = "line"
_MARK = b"\xef\xbb\xbf"
_LINES = "lines"


def header_names(path: Path) -> list[str]:
    """The names in the first line; empty where the file is not text."""
    try:
        return _names(head(path).removeprefix(_MARK).split(b"\n", 1)[0].decode())
    except UnicodeDecodeError:
        return []


def text_parts(path: Path) -> Iterator[tuple[int, str]]:
    """The file's lines in parts, each with the number (from 1) of its first line, without a byte order mark."""
    line, rest = 1, b""
    try:
        with path.open("rb") as file:
            if file.read(len(_MARK)) != _MARK:
                file.seek(0)
            while block := file.read(PART_BYTES):
                cut = block.rfind(b"\n")
                if cut < 0:
                    rest += block
                    if len(rest) > LONGEST_LINE:
                        raise TraceError(f"{path}: line {line}: longer than {LONGEST_LINE} bytes, so no text in lines")
                    continue
                text, rest = rest + block[:cut], block[cut + 1 :]
                yield line, _decoded(path, line, text)
                line += text.count(b"\n") + 1
    except OSError as error:
        raise TraceError(f"{path}: cannot be read: {reason(error)}") from error
    if rest:
        yield line, _decoded(path, line, rest)


def rows(path: Path, required: Sequence[str], optional: Sequence[str] = ()) -> Iterator[pl.DataFrame]:
    """The wanted columns as text, with the `line` of each row. Blank lines are skipped, CRLF is read as LF.

    An optional column is there in every part or in none.
    """
    names: list[str] = []
    for line, text in text_parts(path):
        lines = pl.Series(_LINES, [text]).str.split("\n").explode().str.strip_chars()
        table = pl.DataFrame({LINE: pl.int_range(line, line + len(lines), dtype=pl.UInt64, eager=True), _LINES: lines})
        if not names:
            names = _names(lines[0])
            _check_header(path, names, required, optional)
            table = table.slice(1)
        table = table.filter(pl.col(_LINES) != "")
        if table.height:
            wanted = (*required, *(name for name in optional if name in names))
            fields = [pl.col(f"field_{names.index(name)}").str.strip_chars().alias(name) for name in wanted]
            yield _fields(path, table, names).select(LINE, *fields)


def _fields(path: Path, table: pl.DataFrame, names: list[str]) -> pl.DataFrame:
    """The lines split into `field_0` and so on."""
    quotes = table[_LINES].str.contains('"', literal=True)
    plain = _split(path, table.filter(~quotes) if quotes.any() else table, names)
    if not quotes.any():
        return plain
    quoted = table.filter(quotes)
    cells = [_unquoted(path, line, text, names) for line, text in quoted.iter_rows()]
    columns = [pl.Series(f"field_{i}", [row[i] for row in cells], dtype=pl.String) for i in range(len(names))]
    return pl.concat([plain, pl.DataFrame([quoted[LINE], *columns])]).sort(LINE)


def _split(path: Path, table: pl.DataFrame, names: list[str]) -> pl.DataFrame:
    commas = table[_LINES].str.count_matches(",", literal=True)
    wrong = (commas != len(names) - 1).arg_true()
    if len(wrong):
        row = int(wrong[0])
        raise _wrong_count(path, table[LINE][row], commas[row] + 1, names)
    return table.select(LINE, pl.col(_LINES).str.split_exact(",", len(names) - 1)).unnest(_LINES)


def _unquoted(path: Path, line: int, text: str, names: list[str]) -> list[str]:
    """One line with quotes: a comma between them separates nothing."""
    try:
        fields = next(csv.reader([text], strict=True, skipinitialspace=True))
    except csv.Error as error:
        raise TraceError(f"{path}: line {line}: the quotes do not match: {reason(error)}") from error
    if len(fields) != len(names):
        raise _wrong_count(path, line, len(fields), names)
    return fields


def _wrong_count(path: Path, line: int, count: int, names: list[str]) -> TraceError:
    return TraceError(f"{path}: line {line}: {count} fields, but the header has {len(names)}")


def _names(line: str) -> list[str]:
    return [name.strip().strip('"') for name in line.split(",")]


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
