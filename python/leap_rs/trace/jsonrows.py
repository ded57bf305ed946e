"""Rows of JSON traces: the checks that every number, time and list of block ids passes, and frames of many rows."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from decimal import Decimal
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from leap_rs._leap import TraceError
from leap_rs.trace.jsontext import Entry, entry_name, shown
from leap_rs.trace.model import Unit
from leap_rs.trace.opening import Opening, present
from leap_rs.trace.schema import U32_MAX
from leap_rs.trace.times import MAX_NS

BLOCKS = pl.List(pl.UInt64)

PART_BYTES = 8 << 20
PART_ROWS = 200_000

Row = tuple[object, ...]
Columns = dict[str, pl.DataType | type[pl.DataType]]

SESSIONS = ("session_id", "conversation_id", "session", "chat_session_id", "thread_id")
"""What files call the conversation that a request belongs to."""
IDS = ("request_id", "id", "req_id")
"""What they call a request."""

_NS_PER: Mapping[Unit, int] = {"s": 1_000_000_000, "ms": 1_000_000, "us": 1_000, "ns": 1}
_DIGITS = re.compile(r"\d{1,30}(?:\.\d{1,30})?", re.ASCII)
_U64_MAX = 2**64 - 1


class EntryError(Exception):
    """What is wrong with an entry, without the place, which only the loop over the entries knows."""


class Further:
    """What every format may hold besides: an id and a session. Of all other keys the loss is told, once.

    Args:
        opening: The file's.
        known: The keys that the reader reads itself.
    """

    def __init__(self, opening: Opening, known: Collection[str | None]) -> None:
        found = {"request_id": present(IDS, opening.names), "session": present(SESSIONS, opening.names)}
        self.names = {leap: key for leap, key in found.items() if key is not None and key not in known}
        self.columns: Columns = dict.fromkeys(self.names, pl.String)
        lost = [f"'{key}'" for key in opening.names if key not in (*known, *self.names.values())]
        self.notes = [f"not read: {', '.join(lost[:MOST_LOST])}{more(lost)}"] if lost else []
        self._number = 0

    def of(self, entry: dict[str, Any]) -> tuple[str | None, ...]:
        """The entry's, in the order of `columns`."""
        self._number += 1
        return tuple(self._text(entry, leap, key) for leap, key in self.names.items())

    def _text(self, entry: dict[str, Any], leap: str, key: str) -> str | None:
        found = entry.get(key)
        if found is None:
            return f"request {self._number}" if leap == "request_id" else None
        return found if isinstance(found, str) else shown(found)


MOST_LOST = 8


def more(names: Collection[str]) -> str:
    """How many are not shown."""
    return f" and {len(names) - MOST_LOST} more" if len(names) > MOST_LOST else ""


def frames(
    path: Path,
    entries: Iterator[Entry],
    row: Callable[[dict[str, Any]], Row],
    columns: Columns,
    *,
    is_list: bool = False,
) -> Iterator[pl.DataFrame]:
    """Frames with `place` and `columns`, filled by `row`, which raises `EntryError` for an entry that breaks a rule."""
    schema: Columns = {"place": pl.UInt64, **columns}
    rows: list[Row] = []
    size = 0
    for entry in entries:
        try:
            rows.append((entry.number, *row(entry.value)))
        except EntryError as error:
            raise TraceError(f"{path}: {entry_name(is_list)} {entry.number}: {error}") from error
        size += entry.size
        if size >= PART_BYTES or len(rows) >= PART_ROWS:
            yield frame(rows, schema)
            rows, size = [], 0
    if rows:
        yield frame(rows, schema)


def frame(rows: list[Row], schema: Columns) -> pl.DataFrame:
    """A frame of at least one row."""
    columns = zip(*rows, strict=True)
    return pl.DataFrame(
        [
            _lists(values).alias(name) if dtype == BLOCKS else pl.Series(name, values, dtype=dtype)
            for (name, dtype), values in zip(schema.items(), columns, strict=True)
        ]
    )


def _lists(values: tuple[Any, ...]) -> pl.Series:
    # polars makes a Series of every inner list, which takes longer than all the rest of the reading.
    lengths = np.fromiter(map(len, values), dtype=np.int64, count=len(values))
    flat = np.fromiter(chain.from_iterable(values), dtype=np.uint64, count=int(lengths.sum()))
    rows = np.arange(len(values))
    filled = (
        pl.DataFrame({"row": np.repeat(rows, lengths), "ids": flat}).group_by("row", maintain_order=True).agg("ids")
    )
    all_rows = pl.DataFrame({"row": rows}).join(filled, on="row", how="left", maintain_order="left")
    return all_rows["ids"].fill_null(pl.Series([[]], dtype=BLOCKS))


def value(entry: dict[str, Any], key: str) -> Any:
    """The value of a key that has to be there."""
    try:
        return entry[key]
    except KeyError:
        raise EntryError(f"key '{key}' is missing; the entry has {', '.join(entry) or 'no keys'}") from None


def missing(entry: dict[str, Any], key: str) -> bool:
    """Whether an entry says nothing under a key."""
    return entry.get(key) is None


def tokens(entry: dict[str, Any], key: str) -> int | None:
    """A number of tokens; None where the entry says none, as a failed request does."""
    found = entry.get(key)
    if found is None:
        return None
    if type(found) is int and 0 <= found <= U32_MAX:
        return found
    # 12.0 comes from tables in which the column once had a gap.
    if type(found) is Decimal and 0 <= found <= U32_MAX and found == int(found):
        return int(found)
    raise _wrong(key, f"a whole number of tokens up to {U32_MAX}", found)


def nanoseconds(entry: dict[str, Any], key: str, unit: Unit, *, text: bool = False) -> int:
    """A time that is not negative, exact to the nanosecond; `text` allows a number that is written as a string."""
    found = value(entry, key)
    number = Decimal(found) if text and type(found) is str and _DIGITS.fullmatch(found) else found
    scale = _NS_PER[unit]
    if type(number) is int and number >= 0:
        if number * scale <= MAX_NS:
            return number * scale
    # The comparison comes first: an exponent can make a short number too long to be multiplied out.
    elif type(number) is Decimal and number >= 0 and number <= MAX_NS:
        exact = int((number * scale).to_integral_value())
        if exact <= MAX_NS:
            return exact
    elif type(number) not in (int, Decimal) or number < 0:
        raise _wrong(key, f"a time in {unit}, 0 or later", found)
    raise EntryError(
        f"key '{key}': {shown(found)} is no time in {unit} (it would be over a century); --unit says which unit"
    )


def string(entry: dict[str, Any], key: str) -> str:
    """A text."""
    found = value(entry, key)
    if type(found) is str:
        return found
    raise _wrong(key, "a string", found)


def block_ids(entry: dict[str, Any], key: str, size: int, prompt_tokens: int, *, open_size: bool = False) -> list[int]:
    """The ids of the prompt's full blocks of `size` tokens.

    The formats also number the block that the prompt fills in part, and nothing else: another count means that the
    blocks or the length are not what they seem, or the size, where the format leaves that open.
    """
    found = value(entry, key)
    if type(found) is not list or not set(map(type, found)) <= {int}:
        raise _wrong(key, "a list of whole numbers", found)
    full = prompt_tokens // size
    needed = -(-prompt_tokens // size)
    if not full <= len(found) <= needed:
        blocks = "1 block" if needed == 1 else f"{needed} blocks"
        given = f"key '{key}': {prompt_tokens} tokens need {blocks} of {size}, {len(found)} given"
        raise EntryError(given + (": --prefix-block-size says how many tokens a block has" if open_size else ""))
    del found[full:]
    if found and (min(found) < 0 or max(found) > _U64_MAX):
        raise _wrong(key, "block ids from 0 to 2**64 - 1", found)
    return found


def _wrong(key: str, wanted: str, found: object) -> EntryError:
    return EntryError(f"key '{key}': expected {wanted}, found {shown(found)}")
