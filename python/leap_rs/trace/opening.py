"""How a file begins: what kind of file it is and which columns or keys it has. The formats are told apart by that alone.

Every reader says what of its format it found and what it lacks, so that a file of no format can be told which one it is
nearest to. No look at a format raises.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

import polars as pl

from leap_rs._leap import TraceError
from leap_rs.trace import jsontext, table
from leap_rs.trace.files import MAGIC, compression, head, reason

_ZIP = b"PK\x03\x04"

CSV, JSON, JSON_LIST, PARQUET = "CSV", "JSON lines", "a JSON list", "Parquet"
"""The kinds of files; JSON lines are any JSON objects one behind the other, a single one among them."""

_KIND_WORDS = re.compile(r"( or)? (CSV|JSONL|JSON|Parquet)( or Parquet)?$")
Key: TypeAlias = "str | tuple[str, ...]"
"""A name, or several of which a file has one."""

_NEAR = 0.5
_MOST_NAMES = 12


@dataclass(frozen=True)
class Opening:
    """The beginning of a file."""

    path: Path
    kind: str | None
    """None where it is none of the kinds."""
    names: tuple[str, ...] = ()
    """The columns, or the keys of the first object."""
    first: Mapping[str, Any] = field(default_factory=dict)
    """The first JSON object, as far as the beginning of the file holds it."""
    dtypes: Mapping[str, pl.DataType] = field(default_factory=dict)
    """Of a Parquet file's columns; empty where its footer is damaged."""

    @property
    def row(self) -> str:
        """What messages count in it: lines of text from 1, with the header among them; rows of Parquet from 0."""
        return {PARQUET: "row", JSON_LIST: "entry"}.get(self.kind or "", "line")

    def shown(self) -> str:
        """The file in words."""
        if self.kind is None:
            return "neither CSV nor JSON nor Parquet"
        what = "columns" if self.kind in (CSV, PARQUET) else "keys"
        return f"{self.kind} with {_listed(self.names)}" if self.names else f"{self.kind} without {what}"


@dataclass(frozen=True)
class Fit:
    """How well a file fits a format."""

    has: tuple[str, ...] = ()
    """The format's columns or keys that the file has."""
    lacks: tuple[str, ...] = ()
    """Those that it has to have and has not."""
    but: str = ""
    """What else keeps it from being of the format, as the rest of a sentence: `is Parquet, and read from CSV`."""
    other_kind: bool = False
    """Whether the format's files are of another kind."""

    @property
    def whole(self) -> bool:
        """Whether the format's reader reads it."""
        return not self.lacks and not self.but

    @property
    def rank(self) -> tuple[float, bool, int, int]:
        """Of two fits the nearer one has the greater."""
        return self.share, not self.but, -len(self.lacks), len(self.has)

    @property
    def share(self) -> float:
        """How near it is, from 0 to 1."""
        return len(self.has) / (len(self.has) + len(self.lacks)) if self.has else 0.0


class Described:
    """A format as data: its kinds of files, the names that it has to have, and further ones that tell it from others."""

    name: str
    description: str
    kinds: ClassVar[Sequence[str]]
    keys: ClassVar[Sequence[Key]]
    """Columns of a table, or keys of the first JSON object, without which it is not of the format; of several one."""
    also: ClassVar[Sequence[Key]] = ()
    """Those that it may have."""
    own_options: ClassVar[Collection[str]] = ()
    """Options of `ReadOptions` that only files of some formats leave a choice for, and these do."""

    @property
    def title(self) -> str:
        """What the format is called in a sentence."""
        return _KIND_WORDS.sub("", self.description.partition(" (")[0])

    def fit(self, opening: Opening) -> Fit:
        """See `Reader`."""
        has = tuple(name for key in (*self.keys, *self.also) if (name := present(key, opening.names)) is not None)
        lacks = tuple(spellings(key)[0] for key in self.keys if present(key, opening.names) is None)
        if opening.kind not in self.kinds:
            kind = opening.kind or "of no kind that is read"
            what = f"is {kind}, and {self.title} is read from {' or '.join(self.kinds)}"
            return Fit(has, lacks, what, other_kind=True)
        return Fit(has, lacks, self.contradiction(opening))

    def contradiction(self, opening: Opening) -> str:  # noqa: ARG002
        """What of a file keeps it from being of the format besides its names, as `Fit.but`; empty where nothing does."""
        return ""


def opened(path: Path) -> Opening:
    """The beginning of a file. `TraceError` where it cannot be read at all, or has to be unpacked by hand."""
    packed = compression(path)
    try:
        start = head(path)
        if start.startswith(MAGIC) and packed is None:
            dtypes = _dtypes(path)
            return Opening(path, PARQUET, tuple(dtypes), dtypes=dtypes)
        if start.startswith((MAGIC, _ZIP)):
            what = "a zip archive" if packed is None else f"Parquet that is packed once more ({packed})"
            raise TraceError(f"{path}: is {what}: unpack it first")
        found = jsontext.opening(path)
    except OSError as error:
        raise TraceError(f"{path}: cannot be read: {reason(error)}") from error
    if found is not None:
        return Opening(path, JSON_LIST if found.is_list else JSON, tuple(found.first), first=found.first)
    names = table.header_names(path)
    return Opening(path, CSV, tuple(names)) if len(names) > 1 else Opening(path, None)


def spellings(key: Key) -> tuple[str, ...]:
    """The names of a key, the usual one first."""
    return (key,) if isinstance(key, str) else key


def present(key: Key, names: Collection[str]) -> str | None:
    """What a file with these names calls a key that has several names, or one; None where it has none of them."""
    return next((name for name in spellings(key) if name in names), None)


def refusal(opening: Opening, fits: Mapping[str, Fit]) -> str:
    """Why a file is of no format: the nearest one with what is missing, or what the file is."""
    near = {name: fit for name, fit in fits.items() if fit.share >= _NEAR}
    if not near:
        names = [name for name, fit in fits.items() if not fit.other_kind]
        known = f"; formats of that kind are {', '.join(names)}" if names else ""
        return f"not a trace format that is read: it is {opening.shown()}{known}"
    name, fit = max(near.items(), key=lambda item: item[1].rank)
    if not fit.lacks:
        return f"looks like {name}, but {fit.but}"
    what = "column" if opening.kind in (CSV, PARQUET) else "key"
    lacks = f"{what} {fit.lacks[0]}" if len(fit.lacks) == 1 else f"{what}s {', '.join(fit.lacks)}"
    return f"looks like {name}, but has no {lacks}; it has {_listed(opening.names)}"


def _dtypes(path: Path) -> Mapping[str, pl.DataType]:
    try:
        return dict(pl.read_parquet_schema(path))
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException, OSError, ValueError):
        return {}


def _listed(names: Sequence[str]) -> str:
    # On one line, whatever a header holds.
    plain = [" ".join(name.split()) for name in names[:_MOST_NAMES]]
    shown = [name if len(name) <= 40 else f"{name[:37]}..." for name in plain]
    more = f" and {len(names) - len(shown)} more" if len(names) > len(shown) else ""
    return ", ".join(shown) + more
