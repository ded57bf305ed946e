"""Data sets of text as traces without times: ShareGPT, LMSYS-Chat-1M and Alpaca, from JSON, JSON lines or Parquet.

The first exchange of a conversation is a request, as `vllm bench serve` takes it from ShareGPT; its lengths are those of
the text alone under the given tokenizer, without a chat template and special tokens.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import dropwhile
from pathlib import Path
from typing import Any, ClassVar

import polars as pl

from leap_rs._leap import TraceError
from leap_rs.trace.files import head, reason
from leap_rs.trace.foreign import ForeignReader
from leap_rs.trace.jsonrows import PART_ROWS, Columns, EntryError, Row, frame, value
from leap_rs.trace.jsontext import Entry, entries, entry_name, opening, shown
from leap_rs.trace.model import LeftOut, Raw, ReadOptions
from leap_rs.trace.parquet import MAGIC
from leap_rs.trace.tokenizer import Count, counter

BATCH = 1024
"""Exchanges are counted so many at a time, on all cores, and fewer where they are long."""
BATCH_CHARACTERS = 8 << 20

_USER = frozenset({"human", "user"})
_MODEL = frozenset({"gpt", "chatgpt", "assistant", "model", "bard", "bing"})
_ROWS = 4096
_SCHEMA: Columns = {"place": pl.UInt64, "prompt_tokens": pl.Int64, "output_tokens": pl.Int64}


@dataclass(frozen=True)
class Exchange:
    """What a user asked and a model answered."""

    prompt: str
    answer: str
    later: int = 0
    """Answers of the same conversation that come after this one."""


class TextReader(ForeignReader):
    """A data set of text, an entry a conversation."""

    keys: ClassVar[tuple[str, ...]]
    """The keys that tell the format."""
    also: ClassVar[tuple[str, ...]] = ()
    """Further keys that are read where they are there."""

    @abstractmethod
    def exchange(self, entry: dict[str, Any]) -> Exchange | None:
        """The first exchange; None where there is none. Raises `EntryError` for an entry of another shape."""

    def sniff(self, path: Path) -> bool:
        """See `Reader`."""
        if head(path).startswith(MAGIC):
            names = parquet_columns(path)
            return set(self.keys) <= set(names) and "arrival_s" not in names
        found = opening(path)
        return found is not None and set(self.keys) <= found.first.keys()

    def raw(self, path: Path, options: ReadOptions) -> Raw:
        """See `ForeignReader`."""
        options.refuse_unit(path, "the file has no times")
        count = counter(path, options.tokenizer)
        found = None if head(path).startswith(MAGIC) else opening(path)
        place = "row" if found is None else entry_name(found.is_list)
        source = self._rows(path) if found is None else entries(path, is_list=found.is_list)
        metadata = {"source": self.name}
        if (tokenizer := options.tokenizer) is not None:
            # The directory tells one model from another; the file has the same name in all of them.
            metadata["tokenizer"] = (tokenizer if tokenizer.is_dir() else tokenizer.parent).resolve().name
        names = {"prompt_tokens": f"{self.keys[0]} (prompt)", "output_tokens": f"{self.keys[-1]} (answer)"}
        raw = Raw(iter(()), names, place, has_times=False, metadata=metadata)
        raw.parts = _Pass(path, raw, options, count).parts(source, self)
        return raw

    def _rows(self, path: Path) -> Iterator[Entry]:
        wanted = [name for name in parquet_columns(path) if name in (*self.keys, *self.also)]
        try:
            lazy = pl.scan_parquet(path, hive_partitioning=False, glob=False).select(wanted)
            total = int(lazy.select(pl.len()).collect().item())
            for start in range(0, total, _ROWS):
                rows = lazy.slice(start, _ROWS).collect().iter_rows(named=True)
                yield from (Entry(number, 0, row) for number, row in enumerate(rows, start=start))
        except (pl.exceptions.PolarsError, pl.exceptions.PanicException, OSError) as error:
            raise TraceError(f"{path}: the Parquet file is damaged: {reason(error)[:200]}") from error


class ShareGptReader(TextReader):
    """ShareGPT and its cleaned copies."""

    name = "sharegpt"
    description = "ShareGPT JSON (conversations of from, value)"
    keys = ("conversations",)

    def exchange(self, entry: dict[str, Any]) -> Exchange | None:
        """See `TextReader`."""
        return first_exchange(entry, "conversations", "from", "value")


class LmsysReader(TextReader):
    """LMSYS-Chat-1M."""

    name = "lmsys-chat"
    description = "LMSYS-Chat-1M JSON or Parquet (conversation_id, conversation of role, content)"
    keys = ("conversation_id", "conversation")

    def exchange(self, entry: dict[str, Any]) -> Exchange | None:
        """See `TextReader`."""
        return first_exchange(entry, "conversation", "role", "content")


class AlpacaReader(TextReader):
    """Alpaca: an instruction, at times with an input, and one output."""

    name = "alpaca"
    description = "Alpaca JSON or Parquet (instruction, input, output)"
    keys = ("instruction", "output")
    also = ("input",)

    def exchange(self, entry: dict[str, Any]) -> Exchange | None:
        """See `TextReader`."""
        parts = [_text(entry, key) for key in ("instruction", "input") if key in entry or key == "instruction"]
        prompt, answer = "\n".join(part for part in parts if part.strip()), _text(entry, "output")
        return Exchange(prompt, answer) if prompt and answer.strip() else None


def first_exchange(entry: dict[str, Any], key: str, role: str, text: str) -> Exchange | None:
    """The messages up to the first answer, and that answer.

    Answers at the very beginning are left out: ShareGPT's cleaned copies cut long conversations into pieces, and the
    question of such an answer is in the piece before.
    """
    found = value(entry, key)
    if found is None:
        return None
    if not isinstance(found, list):
        raise EntryError(f"key '{key}': expected a list of messages, found {shown(found)}")
    said = [_message(key, at, message, role, text) for at, message in enumerate(found)]
    rest = list(dropwhile(lambda message: message[0] in _MODEL, said))
    answer = next((at for at, message in enumerate(rest) if message[0] in _MODEL), len(rest))
    asked = [words for _, words in rest[:answer] if words.strip()]
    if answer == len(rest) or not rest[answer][1].strip():
        return None
    if not any(who in _USER and words.strip() for who, words in rest[:answer]):
        return None
    later = sum(who in _MODEL for who, _ in rest[answer + 1 :])
    return Exchange("\n".join(asked), rest[answer][1], later)


def parquet_columns(path: Path) -> list[str]:
    """The columns of a Parquet file; none where it is damaged."""
    try:
        return list(pl.read_parquet_schema(path))
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException, OSError, ValueError):
        return []


@dataclass
class _Pass:
    """One pass over a data set, with what is left out of it."""

    path: Path
    raw: Raw
    options: ReadOptions
    count: Count
    empty: int = 0
    first_empty: int = 0
    longer: int = 0
    later: int = 0
    batch: list[tuple[int, Exchange]] = field(default_factory=list)
    characters: int = 0
    rows: list[Row] = field(default_factory=list)

    def parts(self, source: Iterator[Entry], reader: TextReader) -> Iterator[pl.DataFrame]:
        for entry in source:
            try:
                exchange = reader.exchange(entry.value)
            except EntryError as error:
                raise TraceError(f"{self.path}: {self.raw.place} {entry.number}: {error}") from error
            if exchange is None:
                self._leave_out(entry.number)
                continue
            self.longer += exchange.later > 0
            self.later += exchange.later
            self.batch.append((entry.number, exchange))
            self.characters += len(exchange.prompt) + len(exchange.answer)
            if len(self.batch) >= BATCH or self.characters >= BATCH_CHARACTERS:
                self._count_batch()
                if len(self.rows) >= PART_ROWS:
                    yield self._part()
        self._count_batch()
        if self.rows:
            yield self._part()
        self._conclude()

    def _count_batch(self) -> None:
        prompts = self.count([exchange.prompt for _, exchange in self.batch])
        answers = self.count([exchange.answer for _, exchange in self.batch])
        places = [place for place, _ in self.batch]
        self.rows.extend(zip(places, prompts, answers, strict=True))
        self.batch.clear()
        self.characters = 0

    def _part(self) -> pl.DataFrame:
        part = frame(self.rows, _SCHEMA)
        self.rows.clear()
        return part

    def _leave_out(self, number: int) -> None:
        if self.options.strict:
            where = f"{self.path}: {self.raw.place} {number}"
            raise TraceError(f"{where}: an empty or one-sided conversation, and strict refuses those")
        if self.empty == 0:
            self.first_empty = number
        self.empty += 1

    def _conclude(self) -> None:
        if self.empty:
            where = f"{self.raw.place} {self.first_empty}"
            self.raw.left_out.append(LeftOut("an empty or one-sided conversation", self.empty, where))
        if self.later:
            answers = "1 later answer" if self.later == 1 else f"{self.later} later answers"
            whose = "1 conversation" if self.longer == 1 else f"{self.longer} conversations"
            what = "only the first exchange of a conversation is a request"
            self.raw.notes.append(f"{answers} in {whose} are not in the trace: {what}")


def _message(key: str, at: int, message: object, role: str, text: str) -> tuple[str, str]:
    if not isinstance(message, dict):
        raise EntryError(f"key '{key}', message {at + 1}: expected an object, found {shown(message)}")
    try:
        who = message.get(role)
        if not isinstance(who, str):
            raise EntryError(f"expected who speaks under '{role}', found {shown(message)}")
        return who.lower(), _text(message, text)
    except EntryError as error:
        raise EntryError(f"key '{key}', message {at + 1}: {error}") from None


def _text(entry: dict[str, Any], key: str) -> str:
    found = value(entry, key)
    if found is None:
        return ""
    if not isinstance(found, str):
        raise EntryError(f"key '{key}': expected text, found {shown(found)}")
    return found
