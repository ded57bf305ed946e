"""Values in the depth of JSON that other tools write: looked up by dotted paths, and never trusted to be of their type.

What a request cannot do without is an `EntryError` where it is of another type; what it can do without is then missing.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

from leap_rs._leap import TraceError
from leap_rs.trace import jsonrows
from leap_rs.trace.files import opened, reason
from leap_rs.trace.foreign import ForeignReader
from leap_rs.trace.jsonrows import EntryError
from leap_rs.trace.jsontext import LONGEST_BYTES, Entry, documents, entries, shown
from leap_rs.trace.model import Unit
from leap_rs.trace.opening import JSON_LIST, Fit, Opening, spellings

_DIGITS = re.compile(r"\d{1,20}", re.ASCII)
_LARGEST = 2.0**63


class NestedReader(ForeignReader):
    """A format that is known by keys in the depth of its first object, which `keys` and `also` name by dotted paths."""

    def fit(self, opening: Opening) -> Fit:
        """See `Reader`."""
        paths = [path for key in (*self.keys, *self.also) for path in spellings(key)]
        deep = [path for path in paths if "." in path and _there(opening.first, path)]
        return super().fit(replace(opening, names=(*opening.names, *deep)))


def _there(first: Mapping[str, Any], path: str) -> bool:
    parent, _, name = path.rpartition(".")
    found = at(first, parent)
    return isinstance(found, dict) and name in found


@contextmanager
def placed(path: Path, what: str, number: int) -> Iterator[None]:
    """An `EntryError` becomes a `TraceError` that says where in the file it is: `line`, 7."""
    try:
        yield
    except EntryError as error:
        raise TraceError(f"{path}: {what} {number}: {error}") from error


def at(entry: object, path: str) -> Any:
    """What stands at a dotted path; None where it or anything on the way is not there."""
    for name in path.split("."):
        if not isinstance(entry, dict):
            return None
        entry = entry.get(name)
    return entry


def tokens(entry: object, *paths: str) -> int | None:
    """The number of tokens at the first path that says one; None where none does, as of a failed request."""
    for path in paths:
        found = at(entry, path)
        if found is not None:
            return counted(found, path)
    return None


def counted(found: object, name: str) -> int | None:
    """A number of tokens, also one that is written as text; None for nothing."""
    if isinstance(found, str):
        text = found.strip()
        found = int(text) if _DIGITS.fullmatch(text) else (text or None)
    return jsonrows.tokens({name: exact(found)}, name)


def time(entry: object, unit: Unit, *paths: str) -> int:
    """The time, in nanoseconds, at the first path that says one. `EntryError` where none does."""
    for path in paths:
        found = at(entry, path)
        if found is not None:
            return jsonrows.nanoseconds({path: exact(found)}, path, unit, text=True)
    raise EntryError(f"no time: {' and '.join(repr(path) for path in paths)} are missing" if paths else "no time")


def moment(entry: object, unit: Unit, path: str) -> int | None:
    """A time, in nanoseconds, that a request can do without; None where there is none that can be one."""
    try:
        return time(entry, unit, path)
    except EntryError:
        return None


def exact(found: object) -> object:
    """A float as the decimal number that stands in the file, which is the shortest one that reads as the float."""
    return Decimal(repr(found)) if type(found) is float and math.isfinite(found) else found


def number(found: object) -> float | None:
    """A finite number of any type; None for anything else."""
    if type(found) is int:
        return float(found) if abs(found) <= _LARGEST else None
    if type(found) is Decimal or type(found) is float:
        value = float(found)
        return value if abs(value) <= _LARGEST else None
    return None


def whole(found: object) -> int | None:
    """A whole number; None for anything else."""
    value = number(found)
    return int(value) if value is not None and value == int(value) else None


def text(found: object) -> str | None:
    """A text that is not empty, or a whole number as one; None for anything else."""
    if type(found) is int:
        found = str(found) if abs(found) <= _LARGEST else None
    return found if isinstance(found, str) and found else None


def embedded(found: object) -> Mapping[str, Any]:
    """The object in a string of JSON, or the object itself; empty for anything else."""
    if isinstance(found, str):
        try:
            found = json.loads(found)
        except (ValueError, RecursionError):
            return {}
    return found if isinstance(found, dict) else {}


def listed(found: object, path: str) -> list[Any]:
    """A list, empty where there is nothing. `EntryError` for anything else."""
    if found is None:
        return []
    if isinstance(found, list):
        return found
    raise EntryError(f"key '{path}': expected a list, found {shown(found)}")


def objects(path: Path, start: Opening) -> Iterator[Entry]:
    """The objects of a file: one a line, a list of them, or a single one over many lines or in one that is very long."""
    if start.kind == JSON_LIST:
        yield from entries(path, is_list=True)
    elif _is_lines(path):
        yield from entries(path, is_list=False)
    else:
        yield from (Entry(number, 0, one) for number, one in enumerate(documents(path), start=1))


def _is_lines(path: Path) -> bool:
    try:
        with opened(path) as file:
            while line := file.readline(LONGEST_BYTES + 1):
                if stripped := line.strip():
                    return len(line) <= LONGEST_BYTES and stripped.endswith(b"}")
    except OSError as error:
        raise TraceError(f"{path}: cannot be read: {reason(error)}") from error
    return True
