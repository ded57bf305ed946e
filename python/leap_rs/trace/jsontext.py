"""JSON traces as text: what a file opens with, its objects one at a time, and errors that say where and what is wrong.

A list of objects is decoded entry by entry over a window of the file and JSON lines one by one, so that the memory does
not grow with the file.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

from leap_rs._leap import TraceError
from leap_rs.trace.files import HEAD_BYTES, opened, reason

LONGEST_BYTES = 64 << 20
"""The longest line or entry; without a limit a file without line ends would be read into memory as one line."""

_OPENING_BYTES = 4 << 20
_WINDOW_BYTES = 1 << 20
_NEAR_END = 16  # longer than any token that json reports by its start when the text ends inside it
_UNTERMINATED = "Unterminated string"
_MARK = b"\xef\xbb\xbf"
_SPACE = " \t\n\r"

# Decimals, because a Unix time with a fraction of a second has more digits than a float.
_DECODER = json.JSONDecoder(parse_float=Decimal)
_FLOATS = json.JSONDecoder()


@dataclass(frozen=True)
class Opening:
    """How a JSON file begins, which is what tells the formats apart."""

    is_list: bool
    first: dict[str, Any]
    """The first object, or as many of its keys as the opening of the file holds."""


@dataclass(frozen=True)
class Entry:
    """One object of a file."""

    number: int
    """Its line (JSON lines) or its place in the list, counted from 1."""
    size: int
    """Length of its text."""
    value: Any


def opening(path: Path) -> Opening | None:
    """The opening of a file that holds a JSON object, JSON lines or a JSON list of objects; None for any other."""
    with opened(path) as file:
        data = file.read(HEAD_BYTES)
        if not data.removeprefix(_MARK).lstrip().startswith((b"{", b"[")):
            return None
        while True:
            text = data.removeprefix(_MARK).decode("utf-8", "ignore")
            found, whole = _opening(text)
            more = b"" if whole or len(data) >= _OPENING_BYTES else file.read(3 * len(data))
            if not more:
                return found
            data += more


def entry_name(is_list: bool) -> str:
    """What `Entry.number` counts."""
    return "entry" if is_list else "line"


def entries(path: Path, *, is_list: bool, objects: bool = True) -> Iterator[Entry]:
    """The objects of JSON lines or of a JSON list, or `TraceError` with the line of the fault.

    objects: whether anything else is such a fault, too; else it is an entry as it stands there.
    """
    try:
        yield from _Window(path, objects=objects).entries() if is_list else _lines(path, objects=objects)
    except OSError as error:
        raise TraceError(f"{path}: cannot be read: {reason(error)}") from error


def documents(path: Path) -> list[dict[str, Any]]:
    """All JSON objects that stand in the file one after the other, with or without line ends between them, or in a list."""
    try:
        with opened(path) as file:
            text = file.read().removeprefix(_MARK).decode()
    except UnicodeDecodeError as error:
        raise _not_text(path, error.object[: error.start].count(b"\n") + 1) from error
    except OSError as error:
        raise TraceError(f"{path}: cannot be read: {reason(error)}") from error
    found: list[dict[str, Any]] = []
    at = _skip(text, 0)
    while at < len(text):
        try:
            value, end = _FLOATS.raw_decode(text, at)
            value = whole(value, text[at:end])
        except (ValueError, RecursionError) as error:
            line = text.count("\n", 0, _position(error, at)) + 1
            raise TraceError(f"{path}: line {line}: {_fault(error, text)}") from error
        for one in value if isinstance(value, list) else [value]:
            if not isinstance(one, dict):
                line = text.count("\n", 0, at) + 1
                raise TraceError(f"{path}: line {line}: expected a JSON object, found {shown(one)}")
            found.append(one)
        at = _skip(text, end)
    return found


def whole(value: Any, text: str) -> Any:
    """A decoded value with U+FFFD for every half of a surrogate pair, which JSON can say and UTF-8 cannot."""
    return _mended(value) if "\\ud" in text or "\\uD" in text else value


def _mended(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, list):
        return [_mended(one) for one in value]
    if isinstance(value, dict):
        return {_mended(key): _mended(one) for key, one in value.items()}
    return value


def shown(value: object) -> str:
    """A value as it stands in the file, shortened."""
    text = str(value) if isinstance(value, Decimal) else json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _opening(text: str) -> tuple[Opening | None, bool]:
    # Key by key: a detailed benchmark result is one object of megabytes, and its keys come first.
    first: dict[str, Any] = {}
    at = _skip(text, 0)
    is_list = text[at : at + 1] == "["
    try:
        if is_list:
            at = _skip(text, at + 1)
        if text[at] != "{":
            return None, True
        at = _skip(text, at + 1)
        while text[at] != "}":
            key, at = _DECODER.raw_decode(text, at)
            at = _skip(text, at)
            if not isinstance(key, str) or text[at] != ":":
                break
            value, at = _DECODER.raw_decode(text, _skip(text, at + 1))
            at = _skip(text, at)
            first[key] = value
            if text[at] != ",":
                break
            at = _skip(text, at + 1)
    except (ValueError, IndexError, RecursionError, ArithmeticError):
        return Opening(is_list, whole(first, text)), False
    return Opening(is_list, whole(first, text)), True


def _lines(path: Path, *, objects: bool) -> Iterator[Entry]:
    number = 0
    with opened(path) as file:
        while line := file.readline(LONGEST_BYTES + 1):
            number += 1
            if len(line) > LONGEST_BYTES:
                raise TraceError(f"{path}: line {number}: longer than {LONGEST_BYTES >> 20} MiB, so not JSON lines")
            if number == 1:
                line = line.removeprefix(_MARK)
            if line.isspace() or not line:
                continue
            try:
                text = line.decode()
                value = whole(_DECODER.decode(text), text)
            except UnicodeDecodeError as error:
                raise _not_text(path, number) from error
            except (ValueError, RecursionError, ArithmeticError) as error:
                cut = "" if line.endswith(b"\n") else " (the last line; is the file truncated?)"
                raise TraceError(f"{path}: line {number}: {_fault(error, text.rstrip())}{cut}") from error
            if objects and not isinstance(value, dict):
                raise TraceError(f"{path}: line {number}: expected a JSON object, found {shown(value)}")
            yield Entry(number, len(line), value)


class _Window:
    """The part of a JSON list that is being decoded."""

    def __init__(self, path: Path, *, objects: bool) -> None:
        self._path = path
        self._objects = objects
        self._decode = codecs.getincrementaldecoder("utf-8-sig")()
        self._text = ""
        self._at = 0
        self._line = 1
        self._ended = False

    def entries(self) -> Iterator[Entry]:
        with opened(self._path) as file:
            self._file = file
            self._take("[")
            number = 0
            if self._peek() == "]":
                self._take("]")
            else:
                while True:
                    number += 1
                    yield self._entry(number)
                    if self._peek() != ",":
                        break
                    self._take(",")
                self._take("]")
            if self._peek():
                raise self._error("text after the end of the list")

    def _entry(self, number: int) -> Entry:
        self._peek()
        while True:
            try:
                value, end = _DECODER.raw_decode(self._text, self._at)
                value = whole(value, self._text[self._at : end])
                break
            except (ValueError, RecursionError, ArithmeticError) as error:
                at = _position(error, self._at)
                inside = _UNTERMINATED in str(error) or at >= len(self._text) - _NEAR_END
                if inside and not self._ended and len(self._text) - self._at <= LONGEST_BYTES:
                    self._more()
                    continue
                self._line += self._text.count("\n", self._at, at)
                raise self._error(f"entry {number}: {_fault(error, self._text, columns=False)}") from error
        if self._objects and not isinstance(value, dict):
            raise self._error(f"entry {number}: expected a JSON object, found {shown(value)}")
        size = end - self._at
        self._line += self._text.count("\n", self._at, end)
        self._at = end
        return Entry(number, size, value)

    def _peek(self) -> str:
        """The next character that is no space; empty at the end of the file."""
        while True:
            start = self._at
            self._at = _skip(self._text, start)
            self._line += self._text.count("\n", start, self._at)
            if self._at < len(self._text) or self._ended:
                return self._text[self._at : self._at + 1]
            self._more()

    def _take(self, sign: str) -> None:
        found = self._peek()
        if not found:
            raise self._error(f"the list is cut off here: expected '{sign}'")
        if found != sign:
            raise self._error(f"expected '{sign}', found {shown(self._text[self._at : self._at + 20])}")
        self._at += 1

    def _more(self) -> None:
        rest = self._text[self._at :]
        # As much again as is there, or an entry of many windows would be decoded once for each of them.
        data = self._file.read(max(_WINDOW_BYTES, len(rest)))
        self._ended = not data
        try:
            self._text = rest + self._decode.decode(data, self._ended)
        except UnicodeDecodeError as error:
            line = self._line + rest.count("\n") + error.object[: error.start].count(b"\n")
            raise _not_text(self._path, line) from error
        self._at = 0

    def _error(self, what: str) -> TraceError:
        return TraceError(f"{self._path}: line {self._line}: {what}")


def _skip(text: str, at: int) -> int:
    while at < len(text) and text[at] in _SPACE:
        at += 1
    return at


def _position(error: Exception, at: int) -> int:
    return error.pos if isinstance(error, json.JSONDecodeError) else at


def _fault(error: Exception, text: str, *, columns: bool = True) -> str:
    """What is wrong with a JSON text, in one line; the column only where the text holds the whole line."""
    if isinstance(error, RecursionError):
        return "not valid JSON: nested too deeply"
    if not isinstance(error, json.JSONDecodeError):
        return f"not valid JSON: {reason(error)}"
    if error.pos >= len(text) or error.msg.startswith(_UNTERMINATED):
        return "not valid JSON: it ends in the middle"
    message = "expected nothing more" if error.msg == "Extra data" else error.msg[0].lower() + error.msg[1:]
    message = message.replace("expecting", "expected")
    where = f" at column {error.colno}" if columns else ""
    return f"not valid JSON: {message}{where}, found {shown(text[error.pos : error.pos + 20])}"


def _not_text(path: Path, line: int) -> TraceError:
    return TraceError(f"{path}: line {line}: not UTF-8 text")
