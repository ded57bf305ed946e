"""Prompts from a Parquet or JSON lines file: as text, as messages of a chat, or as token ids."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import polars as pl

from leap_rs._leap import ConfigError, LeapError, TraceError
from leap_rs.trace.files import MAGIC, existing_file, head, reason
from leap_rs.trace.jsonlines import json_lines

Kind = Literal["text", "messages", "tokens"]

COLUMNS = ("prompt", "messages", "prompt_token_ids")
"""Where prompts are looked for, in this order, unless the column is given."""
_EXPECTED = "a text, a list of messages with role and content, or a list of token ids"


@dataclass(frozen=True)
class Prompts:
    """The prompts of a file. Each is known by its row, counted from 0."""

    path: Path
    column: str
    kind: Kind
    values: list[Any]
    digest: str
    """SHA-256 of the file."""

    def fault(self, row: int, what: str) -> LeapError:
        """An error that names the file and the row."""
        return LeapError(f"{self.path}: row {row} (the first row is 0): {what}")


def read_prompts(path: Path, column: str | None = None, limit: int | None = None) -> Prompts:
    """Read prompts.

    Args:
        path: Parquet, or JSON lines with an object a line.
        column: The column or field that holds the prompts; one of `COLUMNS` when not given.
        limit: Only the first so many.

    Raises:
        LeapError: There are none, or one is none; names the file, the column and the row.
    """
    path = existing_file(path)
    read = _parquet if head(path).startswith(MAGIC) else _json_lines
    name, found = read(path, column)
    values: list[Any] = []
    kinds: list[Kind] = []
    for row, value in enumerate(islice(found, limit)):
        kind = _kind(value)
        if kind is None or kind != (kinds[0] if kinds else kind):
            wanted = _EXPECTED if kind is None else f"{kinds[0]} as in row 0"
            raise TraceError(
                f"{path}: column '{name}', row {row} (the first row is 0): expected {wanted}, found {_shown(value)}"
            )
        values.append(value)
        kinds[:] = [kind]
    if not values:
        raise TraceError(f"{path}: holds no prompts")
    return Prompts(path, name, kinds[0], values, _digest(path))


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _parquet(path: Path, column: str | None) -> tuple[str, Iterator[Any]]:
    try:
        lazy = pl.scan_parquet(path, hive_partitioning=False, glob=False)
        name = _column(path, lazy.collect_schema().names(), column)
        return name, iter(lazy.select(name).collect().to_series().to_list())
    except (pl.exceptions.PolarsError, OSError) as error:
        raise TraceError(f"{path}: the Parquet file is damaged: {reason(error)[:200]}") from error


def _json_lines(path: Path, column: str | None) -> tuple[str, Iterator[Any]]:
    first = next(json_lines(path), None)
    if first is None:
        raise TraceError(f"{path}: holds no prompts")
    name = _column(path, list(first[1]), column)

    def values() -> Iterator[Any]:
        for line, row in json_lines(path):
            if name not in row:
                raise TraceError(f"{path}: line {line}: no field '{name}'; there are {', '.join(row) or 'none'}")
            yield row[name]

    return name, values()


def _column(path: Path, names: list[str], column: str | None) -> str:
    there = ", ".join(names) or "none"
    if column is not None:
        if column not in names:
            raise ConfigError(f"{path}: no column '{column}'; there are {there}")
        return column
    found = next((name for name in COLUMNS if name in names), None)
    if found is None:
        wanted = ", ".join(f"'{name}'" for name in COLUMNS)
        raise ConfigError(f"{path}: none of the columns {wanted}; there are {there} (--column says which it is)")
    return found


def _kind(value: Any) -> Kind | None:
    if isinstance(value, str):
        return "text"
    if not isinstance(value, list) or not value:
        return None
    if all(type(token) is int and token >= 0 for token in value):
        return "tokens"
    if all(isinstance(message, dict) and all(isinstance(message.get(k), str) for k in _KEYS) for message in value):
        return "messages"
    return None


_KEYS = ("role", "content")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
