"""JSON lines with Mooncake's keys: Mooncake itself, LMBench's GMI and RAGPulse, which share names but not meanings."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import polars as pl

from leap_rs._leap import TraceError
from leap_rs.trace.foreign import ForeignReader
from leap_rs.trace.jsonrows import BLOCKS, Columns, Row, block_ids, frames, nanoseconds, string, tokens
from leap_rs.trace.jsontext import entries, opening, shown
from leap_rs.trace.model import Raw, ReadOptions
from leap_rs.trace.schema import BLOCK_SIZE_KEY

NAMES = {
    "arrival_s": "timestamp",
    "prompt_tokens": "input_length",
    "output_tokens": "output_length",
    "prefix_blocks": "hash_ids",
}
COLUMNS: Columns = {"arrival_ns": pl.Int64, "prompt_tokens": pl.Int64, "output_tokens": pl.Int64}

_TIME, _PROMPT, _OUTPUT, _BLOCKS = NAMES.values()
_SESSION = "session_id"
_UNIX_NS = re.compile(r"\d{17,19}", re.ASCII)


def first_line(path: Path) -> dict[str, Any]:
    """The first object of JSON lines that hold lengths under Mooncake's keys; empty for any other file."""
    found = opening(path)
    if found is None or found.is_list or not {_PROMPT, _OUTPUT} <= found.first.keys():
        return {}
    return found.first


class MooncakeReader(ForeignReader):
    """Mooncake: times in milliseconds, blocks of 512 tokens."""

    name = "mooncake"
    description = "Mooncake JSONL (timestamp in ms, input_length, output_length, hash_ids of 512-token blocks)"
    block_size = 512

    def sniff(self, path: Path) -> bool:
        """See `Reader`."""
        first = first_line(path)
        known = not isinstance(first.get(_TIME), str) and not isinstance(first.get(_BLOCKS), dict)
        return bool(first) and known and "chat_id" not in first

    def raw(self, path: Path, options: ReadOptions) -> Raw:
        """See `ForeignReader`."""
        unit = options.unit or "ms"
        has_blocks = _BLOCKS in first_line(path)

        def row(entry: dict[str, Any]) -> Row:
            prompt = tokens(entry, _PROMPT)
            common = nanoseconds(entry, _TIME, unit), prompt, tokens(entry, _OUTPUT)
            return (*common, block_ids(entry, _BLOCKS, self.block_size, prompt)) if has_blocks else common

        columns: Columns = {**COLUMNS, "prefix_blocks": BLOCKS} if has_blocks else COLUMNS
        metadata = {"source": self.name} | ({BLOCK_SIZE_KEY: str(self.block_size)} if has_blocks else {})
        parts = frames(path, entries(path, is_list=False), row, columns)
        return Raw(parts, NAMES, unit="ms", metadata=metadata)


class GmiReader(ForeignReader):
    """LMBench's GMI trace: the times are strings of Unix nanoseconds, and the blocks have no fixed size."""

    name = "gmi"
    description = "LMBench GMI JSONL (Mooncake's keys, timestamp a string of Unix ns)"

    def sniff(self, path: Path) -> bool:
        """See `Reader`."""
        first = first_line(path)
        return isinstance(first.get(_TIME), str) and not isinstance(first.get(_BLOCKS), dict) and "chat_id" not in first

    def raw(self, path: Path, options: ReadOptions) -> Raw:
        """See `ForeignReader`."""
        first = first_line(path)
        if options.unit is None and not _UNIX_NS.fullmatch(first[_TIME]):
            what = f"{shown(first[_TIME])} is a string, but no Unix time in nanoseconds: give its unit with --unit"
            raise TraceError(f"{path}: line 1: key '{_TIME}': {what}")
        unit = options.unit or "ns"

        def row(entry: dict[str, Any]) -> Row:
            return nanoseconds(entry, _TIME, unit, text=True), tokens(entry, _PROMPT), tokens(entry, _OUTPUT)

        # About 32 tokens a block, from 6 to 102 in the published file: no number of cached tokens follows from that.
        notes = [f"'{_BLOCKS}' is not read: the blocks have no fixed size"] if _BLOCKS in first else []
        parts = frames(path, entries(path, is_list=False), row, COLUMNS)
        return Raw(parts, NAMES, metadata={"source": self.name}, notes=notes)


class RagPulseReader(ForeignReader):
    """RAGPulse: times are strings of seconds, and the ids name parts of the prompt (passages, history), not blocks."""

    name = "ragpulse"
    description = "RAGPulse JSONL (timestamp a string of s, input_length, output_length, session_id)"

    def sniff(self, path: Path) -> bool:
        """See `Reader`."""
        first = first_line(path)
        return isinstance(first.get(_BLOCKS), dict) and "chat_id" not in first

    def raw(self, path: Path, options: ReadOptions) -> Raw:
        """See `ForeignReader`."""
        unit = options.unit or "s"

        def row(entry: dict[str, Any]) -> Row:
            time = nanoseconds(entry, _TIME, unit, text=True)
            return time, tokens(entry, _PROMPT), tokens(entry, _OUTPUT), string(entry, _SESSION)

        notes = [f"'{_BLOCKS}' is not read: its ids name parts of the prompt, not blocks of it"]
        parts = frames(path, entries(path, is_list=False), row, {**COLUMNS, "session": pl.String})
        names = {**NAMES, "session": _SESSION}
        return Raw(parts, names, unit="s", metadata={"source": self.name}, notes=notes)
