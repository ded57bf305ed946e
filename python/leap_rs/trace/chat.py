"""Data sets of text as traces: ShareGPT, chat messages, LMSYS-Chat-1M, WildChat and Alpaca, from JSON, JSON lines or Parquet.

The first exchange of a conversation is a request, as `vllm bench serve` takes it from ShareGPT; where each question has its
time, every exchange is one. The lengths are those of the text alone under the given tokenizer, without a chat template and
special tokens.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import dropwhile
from pathlib import Path
from typing import Any, ClassVar

import polars as pl

from leap_rs._leap import TraceError
from leap_rs.trace.files import reason
from leap_rs.trace.foreign import ForeignReader
from leap_rs.trace.jsonrows import PART_ROWS, Columns, EntryError, Row, frame, value
from leap_rs.trace.jsontext import Entry, entries, shown
from leap_rs.trace.model import LeftOut, Raw, ReadOptions
from leap_rs.trace.opening import JSON, JSON_LIST, PARQUET, Opening, opened
from leap_rs.trace.times import dates
from leap_rs.trace.tokenizer import Count, counter

BATCH = 1024
"""Exchanges are counted so many at a time, on all cores, and fewer where they are long."""
BATCH_CHARACTERS = 8 << 20

_USER = frozenset({"human", "user"})
_MODEL = frozenset({"gpt", "chatgpt", "assistant", "model", "bard", "bing"})
_WHO, _WORDS = ("from", "role"), ("value", "content")
_ROWS = 4096
_SCHEMA: Columns = {"place": pl.UInt64, "prompt_tokens": pl.Int64, "output_tokens": pl.Int64}
_ONE_SIDED = "an empty or one-sided conversation"
_OTHER = "an entry of another shape"


@dataclass(frozen=True)
class Exchange:
    """What a user asked and a model answered."""

    prompt: str
    answer: str
    later: int = 0
    """Answers of the same conversation that come after this one and are no requests."""
    further: tuple[object, ...] = ()
    """What the reader's `columns` hold of it."""


class TextReader(ForeignReader):
    """A data set of text, an entry a conversation."""

    kinds = (JSON, JSON_LIST, PARQUET)
    columns: ClassVar[Columns] = {}
    """Columns besides the lengths."""
    timed: ClassVar[bool] = False

    @abstractmethod
    def exchanges(self, entry: dict[str, Any]) -> list[Exchange]:
        """Those that are requests. Raises `EntryError` for an entry of another shape."""

    def contradiction(self, opening: Opening) -> str:
        """See `Described`."""
        # Logs of proxies may hold the texts of what they passed on.
        return next((f"has {name}" for name in ("arrival_s", "call_type") if name in opening.names), "")

    def raw(self, path: Path, options: ReadOptions) -> Raw:
        """See `ForeignReader`."""
        options.refuse_unit(path, f"the times of {self.name} are dates" if self.timed else "the file has no times")
        count = counter(path, options.tokenizer)
        start = opened(path)
        parquet = start.kind == PARQUET
        source = self._rows(path, start) if parquet else entries(path, is_list=start.kind == JSON_LIST, objects=False)
        metadata = {"source": self.name}
        if (tokenizer := options.tokenizer) is not None:
            # The directory tells one model from another; the file has the same name in all of them.
            metadata["tokenizer"] = (tokenizer if tokenizer.is_dir() else tokenizer.parent).resolve().name
        names = {"prompt_tokens": f"{self.keys[0]} (prompt)", "output_tokens": f"{self.keys[-1]} (answer)"}
        no_times = "" if self.timed else "a data set of text has none"
        raw = Raw(iter(()), names, start.row, no_times, metadata=metadata, unordered=self.timed)
        raw.parts = _Pass(path, raw, options, count, self.columns).parts(source, self)
        return raw

    def _rows(self, path: Path, start: Opening) -> Iterator[Entry]:
        wanted = [name for name in start.names if name in (*self.keys, *self.also)]
        try:
            lazy = pl.scan_parquet(path, hive_partitioning=False, glob=False).select(wanted)
            total = int(lazy.select(pl.len()).collect().item())
            for first in range(0, total, _ROWS):
                rows = lazy.slice(first, _ROWS).collect().iter_rows(named=True)
                yield from (Entry(number, 0, row) for number, row in enumerate(rows, start=first))
        except (pl.exceptions.PolarsError, pl.exceptions.PanicException, OSError) as error:
            raise TraceError(f"{path}: the Parquet file is damaged: {reason(error)[:200]}") from error


class ShareGptReader(TextReader):
    """ShareGPT and its cleaned copies."""

    name = "sharegpt"
    description = "ShareGPT JSON (conversations of from, value)"
    keys = ("conversations",)

    def exchanges(self, entry: dict[str, Any]) -> list[Exchange]:
        """See `TextReader`."""
        return first_exchange(entry, "conversations")


class MessagesReader(TextReader):
    """Messages as chat APIs take them, a conversation an entry, as data sets for fine-tuning have them."""

    name = "messages"
    description = "chat JSON (messages of role, content)"
    keys = ("messages",)

    def exchanges(self, entry: dict[str, Any]) -> list[Exchange]:
        """See `TextReader`."""
        return first_exchange(entry, "messages")


class LmsysReader(TextReader):
    """LMSYS-Chat-1M."""

    name = "lmsys-chat"
    description = "LMSYS-Chat-1M JSON or Parquet (conversation_id, conversation of role, content)"
    keys = ("conversation_id", "conversation")

    def exchanges(self, entry: dict[str, Any]) -> list[Exchange]:
        """See `TextReader`."""
        return first_exchange(entry, "conversation")


class WildChatReader(TextReader):
    """WildChat: conversations whose questions have a time, so that each question with its answer is a request."""

    name = "wildchat"
    description = "WildChat JSON or Parquet (conversation_hash, timestamp, conversation of role, content, timestamp)"
    keys = ("conversation_hash", "timestamp", "conversation")
    also = ("model",)
    columns: ClassVar[Columns] = {"session": pl.String, "model": pl.String, "time": pl.String}
    timed = True

    def exchanges(self, entry: dict[str, Any]) -> list[Exchange]:
        """See `TextReader`."""
        messages = _messages(entry, "conversation")
        said = [_said("conversation", at, message) for at, message in enumerate(messages)]
        found: list[Exchange] = []
        before: list[str] = []
        for at, (who, words) in enumerate(said):
            asked = at > 0 and said[at - 1][0] in _USER and said[at - 1][1].strip()
            if who in _MODEL and words.strip() and asked:
                # A question without a time of its own was asked when its answer came, or the conversation.
                times = (messages[at - 1].get("timestamp"), messages[at].get("timestamp"), entry["timestamp"])
                time = next((str(time) for time in times if time is not None), None)
                model = entry.get("model")
                further = (shown_text(entry["conversation_hash"]), None if model is None else str(model), time)
                found.append(Exchange("\n".join(before), words, further=further))
            before += [words] if words.strip() else []
        return found


class AlpacaReader(TextReader):
    """Alpaca: an instruction, at times with an input, and one output."""

    name = "alpaca"
    description = "Alpaca JSON or Parquet (instruction, input, output)"
    keys = ("instruction", "output")
    also = ("input",)

    def exchanges(self, entry: dict[str, Any]) -> list[Exchange]:
        """See `TextReader`."""
        parts = [_text(entry, key) for key in ("instruction", "input") if key in entry or key == "instruction"]
        prompt, answer = "\n".join(part for part in parts if part.strip()), _text(entry, "output")
        return [Exchange(prompt, answer)] if prompt and answer.strip() else []


def first_exchange(entry: dict[str, Any], key: str) -> list[Exchange]:
    """The messages up to the first answer, and that answer.

    Answers at the very beginning are left out: ShareGPT's cleaned copies cut long conversations into pieces, and the
    question of such an answer is in the piece before.
    """
    said = [_said(key, at, message) for at, message in enumerate(_messages(entry, key))]
    rest = list(dropwhile(lambda message: message[0] in _MODEL, said))
    answer = next((at for at, message in enumerate(rest) if message[0] in _MODEL), len(rest))
    asked = [words for _, words in rest[:answer] if words.strip()]
    if answer == len(rest) or not rest[answer][1].strip():
        return []
    if not any(who in _USER and words.strip() for who, words in rest[:answer]):
        return []
    later = sum(who in _MODEL for who, _ in rest[answer + 1 :])
    return [Exchange("\n".join(asked), rest[answer][1], later)]


def shown_text(found: object) -> str:
    """A value that stands for a name."""
    return found if isinstance(found, str) else shown(found)


@dataclass
class _Pass:
    """One pass over a data set, with what is left out of it."""

    path: Path
    raw: Raw
    options: ReadOptions
    count: Count
    columns: Columns
    left_out: dict[str, LeftOut] = field(default_factory=dict)
    longer: int = 0
    later: int = 0
    batch: list[tuple[int, Exchange]] = field(default_factory=list)
    characters: int = 0
    rows: list[Row] = field(default_factory=list)

    def parts(self, source: Iterator[Entry], reader: TextReader) -> Iterator[pl.DataFrame]:
        for entry in source:
            try:
                found = reader.exchanges(entry.value) if isinstance(entry.value, dict) else None
            except EntryError as error:
                self._leave_out(entry.number, _OTHER, str(error))
                continue
            if not found:
                self._leave_out(entry.number, _OTHER if found is None else _ONE_SIDED)
                continue
            for exchange in found:
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
        rows = zip(self.batch, prompts, answers, strict=True)
        self.rows.extend((place, prompt, answer, *exchange.further) for (place, exchange), prompt, answer in rows)
        self.batch.clear()
        self.characters = 0

    def _part(self) -> pl.DataFrame:
        part = frame(self.rows, {**_SCHEMA, **self.columns})
        self.rows.clear()
        if "time" not in self.columns:
            return part
        return part.with_columns(dates(part["time"]).alias("arrival_ns")).drop("time")

    def _leave_out(self, number: int, why: str, what: str = "") -> None:
        if self.options.strict:
            where = f"{self.path}: {self.raw.place} {number}"
            raise TraceError(f"{where}: {what or why}, and strict refuses those")
        known = self.left_out.get(why)
        first = f"{self.raw.place} {number}" if known is None else known.first
        self.left_out[why] = LeftOut(why, 1 if known is None else known.count + 1, first)

    def _conclude(self) -> None:
        self.raw.left_out.extend(self.left_out.values())
        if self.later:
            answers = "1 later answer" if self.later == 1 else f"{self.later} later answers"
            whose = "1 conversation" if self.longer == 1 else f"{self.longer} conversations"
            what = "only the first exchange of a conversation is a request"
            self.raw.notes.append(f"{answers} in {whose} are not in the trace: {what}")


def _messages(entry: dict[str, Any], key: str) -> list[Any]:
    found = value(entry, key)
    if found is None:
        return []
    if not isinstance(found, list):
        raise EntryError(f"key '{key}': expected a list of messages, found {shown(found)}")
    return found


def _said(key: str, at: int, message: object) -> tuple[str, str]:
    """Who speaks, in lower case, and what."""
    try:
        if not isinstance(message, dict):
            raise EntryError(f"expected an object, found {shown(message)}")
        who = next((message[name] for name in _WHO if isinstance(message.get(name), str)), None)
        if who is None:
            raise EntryError(f"expected who speaks under '{_WHO[0]}' or '{_WHO[1]}', found {shown(message)}")
        return who.lower(), _text(message, next((name for name in _WORDS if name in message), _WORDS[0]))
    except EntryError as error:
        raise EntryError(f"key '{key}', message {at + 1}: {error}") from None


def _text(entry: Mapping[str, Any], key: str) -> str:
    found = value(dict(entry), key)
    if found is None:
        return ""
    if isinstance(found, list):
        # Parts of a message, images among them.
        return "\n".join(part["text"] for part in found if isinstance(part, dict) and isinstance(part.get("text"), str))
    if not isinstance(found, str):
        raise EntryError(f"key '{key}': expected text, found {shown(found)}")
    return found
