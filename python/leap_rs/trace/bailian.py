"""Alibaba's Qwen-Bailian usage traces: JSON lines with times in seconds, 16-token blocks and chats that continue."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl

from leap_rs.trace.foreign import ForeignReader
from leap_rs.trace.jsonrows import (
    BLOCKS,
    Columns,
    EntryError,
    Row,
    block_ids,
    frames,
    missing,
    nanoseconds,
    string,
    tokens,
    value,
)
from leap_rs.trace.jsontext import entries, shown
from leap_rs.trace.model import Raw, ReadOptions
from leap_rs.trace.mooncake import COLUMNS, KEYS, NAMES
from leap_rs.trace.opening import JSON, opened
from leap_rs.trace.schema import BLOCK_SIZE_KEY

_CHAT, _PARENT, _TYPE = "chat_id", "parent_chat_id", "type"
_NO_PARENT = -1


class BailianReader(ForeignReader):
    """Qwen-Bailian; a chat and all that continues it are one `session`, the type of a request is its `domain`."""

    name = "qwen-bailian"
    description = "Qwen-Bailian JSONL (chat_id, parent_chat_id, timestamp in s, hash_ids of 16-token blocks)"
    block_size = 16

    kinds = (JSON,)
    keys = (_CHAT, *KEYS)
    also = (_PARENT, _TYPE, NAMES["prefix_blocks"])

    def raw(self, path: Path, options: ReadOptions) -> Raw:
        """See `ForeignReader`."""
        unit = options.unit or "s"
        first = opened(path).first
        columns: Columns = {**COLUMNS, "session": pl.String}
        names = {**NAMES, "session": _PARENT}
        metadata = {"source": self.name}
        if has_type := _TYPE in first:
            columns["domain"] = pl.String
            names["domain"] = _TYPE
        if has_blocks := NAMES["prefix_blocks"] in first:
            columns["prefix_blocks"] = BLOCKS
            metadata[BLOCK_SIZE_KEY] = str(self.block_size)
        sessions = _Sessions()

        def row(entry: dict[str, Any]) -> Row:
            prompt = tokens(entry, NAMES["prompt_tokens"])
            time = nanoseconds(entry, NAMES["arrival_s"], unit)
            found: list[object] = [time, prompt, tokens(entry, NAMES["output_tokens"]), sessions.of(entry)]
            if has_type:
                found.append(string(entry, _TYPE))
            if has_blocks:
                known = prompt is not None and not missing(entry, NAMES["prefix_blocks"])
                found.append(block_ids(entry, NAMES["prefix_blocks"], self.block_size, prompt or 0) if known else [])
            return tuple(found)

        parts = frames(path, entries(path, is_list=False), row, columns)
        return Raw(parts, names, unit="s", metadata=metadata)


class _Sessions:
    """The first chat of each chain of chats."""

    def __init__(self) -> None:
        # Chats that continue another one only: the first of a chain is its own root, in the trace or before it.
        self._roots: dict[int, int] = {}

    def of(self, entry: dict[str, Any]) -> str:
        chat, parent = _whole(entry, _CHAT), _whole(entry, _PARENT)
        if parent == _NO_PARENT:
            return str(chat)
        root = self._roots.get(parent, parent)
        self._roots[chat] = root
        return str(root)


def _whole(entry: dict[str, Any], key: str) -> int:
    found = value(entry, key)
    if type(found) is not int or not _NO_PARENT <= found < 2**63:
        raise EntryError(f"key '{key}': expected a whole number, {_NO_PARENT} for none, found {shown(found)}")
    return found
