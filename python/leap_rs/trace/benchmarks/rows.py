"""The frame of a reader whose file holds an object a request: the reader says what one object tells, no more."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from leap_rs.trace import requests
from leap_rs.trace.jsonrows import Further
from leap_rs.trace.model import Raw, ReadOptions
from leap_rs.trace.nested import NestedReader, objects, placed
from leap_rs.trace.opening import JSON, JSON_LIST, opened, spellings
from leap_rs.trace.requests import Request


class RowsReader(NestedReader):
    """JSON lines or a JSON list, each object of it a request."""

    kinds: ClassVar[Sequence[str]] = (JSON, JSON_LIST)
    names: ClassVar[Mapping[str, str]]
    """What the file calls the leap columns, for messages."""
    no_times: ClassVar[str] = ""
    unordered: ClassVar[bool] = True
    """Tools write a request when it has ended, so that later ones may stand before it."""
    fixed: ClassVar[Mapping[str, str]] = {}
    """Metadata that every such file has."""

    further: ClassVar[Sequence[str]] = ()
    """Keys that are read where they are there, besides those by which the format is known."""

    @abstractmethod
    def request(self, place: int, entry: dict[str, Any]) -> Request:
        """What one object tells. Raises `EntryError` where it breaks a rule."""

    def _why_no_unit(self) -> str:
        return "the file has no times" if self.no_times else f"the times of {self.title} have one"

    def _read(self) -> set[str]:
        """The keys of an entry of which anything is read."""
        paths = (path for key in (*self.keys, *self.also) for path in spellings(key))
        return {path.partition(".")[0] for path in (*paths, *self.further)}

    def raw(self, path: Path, options: ReadOptions) -> Raw:
        """See `ForeignReader`."""
        options.refuse_unit(path, self._why_no_unit())
        start = opened(path)

        def found() -> Iterator[Request]:
            for entry in objects(path, start):
                with placed(path, start.row, entry.number):
                    request = self.request(entry.number, entry.value)
                yield request

        return requests.raw(
            path,
            found,
            options,
            source=self.name,
            names=self.names,
            place=start.row,
            no_times=self.no_times,
            unordered=self.unordered,
            metadata=self.fixed,
            notes=Further(start, self._read()).notes,
        )
