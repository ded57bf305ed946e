"""JSON lines with Mooncake's keys: Mooncake itself, LMBench's GMI and RAGPulse, which share names but not meanings.

Other tools write Mooncake's rows too, with blocks of another size and other names for some keys.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import polars as pl

from leap_rs._leap import TraceError
from leap_rs.trace.foreign import ForeignReader
from leap_rs.trace.jsonrows import (
    BLOCKS,
    Columns,
    Further,
    Row,
    block_ids,
    frames,
    missing,
    nanoseconds,
    tokens,
)
from leap_rs.trace.jsontext import entries, shown
from leap_rs.trace.model import Raw, ReadOptions
from leap_rs.trace.opening import JSON, Key, Opening, opened, present
from leap_rs.trace.schema import BLOCK_SIZE_KEY

NAMES = {
    "arrival_s": "timestamp",
    "prompt_tokens": "input_length",
    "output_tokens": "output_length",
    "prefix_blocks": "hash_ids",
}
KEYS = (NAMES["prompt_tokens"], NAMES["output_tokens"])
COLUMNS: Columns = {"arrival_ns": pl.Int64, "prompt_tokens": pl.Int64, "output_tokens": pl.Int64}

_TIME, _PROMPT, _OUTPUT, _BLOCKS = NAMES.values()
_TIMES = (_TIME, "created_time")
_CHAT = "chat_id"
_UNIX_NS = re.compile(r"\d{17,19}", re.ASCII)


class MooncakeReader(ForeignReader):
    """Mooncake: times in milliseconds, blocks of 512 tokens unless another size is given, as other tools write them."""

    name = "mooncake"
    description = "Mooncake JSONL (timestamp in ms, input_length, output_length, hash_ids of 512-token blocks)"
    own_options = ("prefix_block_size",)
    kinds = (JSON,)
    keys: ClassVar[Sequence[Key]] = ((_PROMPT, "input_tokens"), (_OUTPUT, "output_tokens"))
    also = (_TIMES, _BLOCKS)
    block_size = 512

    def contradiction(self, opening: Opening) -> str:
        """See `Described`."""
        if _CHAT in opening.names:
            return f"has {_CHAT}"
        if isinstance(opening.first.get(_BLOCKS), dict):
            return f"its {_BLOCKS} is no list"
        time = present(_TIMES, opening.names)
        return f"its {time} is a string" if time is not None and isinstance(opening.first[time], str) else ""

    def raw(self, path: Path, options: ReadOptions) -> Raw:
        """See `ForeignReader`."""
        unit = options.unit or "ms"
        start = opened(path)
        prompt_key, output_key = (present(key, start.names) or "" for key in self.keys)
        time_key = present(_TIMES, start.names)
        further = Further(start, known=(prompt_key, output_key, time_key, _BLOCKS))
        has_blocks = _BLOCKS in start.names
        size = options.prefix_block_size or self.block_size

        def row(entry: dict[str, Any]) -> Row:
            prompt = tokens(entry, prompt_key)
            common = (*(() if time_key is None else (nanoseconds(entry, time_key, unit),)), prompt)
            row = (*common, tokens(entry, output_key), *further.of(entry))
            if not has_blocks:
                return row
            # Some of a file's rows may say nothing of their blocks.
            if missing(entry, _BLOCKS) or prompt is None:
                return (*row, [])
            return (*row, block_ids(entry, _BLOCKS, size, prompt, open_size=True))

        columns: Columns = dict(COLUMNS)
        if time_key is None:
            options.refuse_unit(path, "the file has no times")
            del columns["arrival_ns"]
        columns |= further.columns | ({"prefix_blocks": BLOCKS} if has_blocks else {})
        metadata = {"source": self.name} | ({BLOCK_SIZE_KEY: str(size)} if has_blocks else {})
        names = {**NAMES, **further.names, "prompt_tokens": prompt_key, "output_tokens": output_key}
        return Raw(
            frames(path, entries(path, is_list=False), row, columns),
            names if time_key is None else {**names, "arrival_s": time_key},
            no_times="" if time_key is not None else f"no key '{_TIME}'",
            unit="ms",
            metadata=metadata,
            notes=further.notes,
        )


class GmiReader(ForeignReader):
    """LMBench's GMI trace: the times are strings of Unix nanoseconds, and the blocks have no fixed size."""

    name = "gmi"
    description = "LMBench GMI JSONL (Mooncake's keys, timestamp a string of Unix ns)"
    kinds = (JSON,)
    keys = (_TIME, *KEYS)
    also = (_BLOCKS,)

    def contradiction(self, opening: Opening) -> str:
        """See `Described`."""
        if _CHAT in opening.names:
            return f"has {_CHAT}"
        if isinstance(opening.first.get(_BLOCKS), dict):
            return f"its {_BLOCKS} is no list"
        return "" if isinstance(opening.first.get(_TIME), str) else f"its {_TIME} is no string"

    def raw(self, path: Path, options: ReadOptions) -> Raw:
        """See `ForeignReader`."""
        start = opened(path)
        first = start.first
        if options.unit is None and not _UNIX_NS.fullmatch(first[_TIME]):
            what = f"{shown(first[_TIME])} is a string, but no Unix time in nanoseconds: give its unit with --unit"
            raise TraceError(f"{path}: line 1: key '{_TIME}': {what}")
        unit = options.unit or "ns"
        further = Further(start, known=(_TIME, *KEYS, _BLOCKS))

        def row(entry: dict[str, Any]) -> Row:
            time = nanoseconds(entry, _TIME, unit, text=True)
            return time, tokens(entry, _PROMPT), tokens(entry, _OUTPUT), *further.of(entry)

        # About 32 tokens a block, from 6 to 102 in the published file: no number of cached tokens follows from that.
        notes = [f"'{_BLOCKS}' is not read: the blocks have no fixed size"] if _BLOCKS in first else []
        parts = frames(path, entries(path, is_list=False), row, {**COLUMNS, **further.columns})
        names = {**NAMES, **further.names}
        return Raw(parts, names, metadata={"source": self.name}, notes=notes + further.notes)


class RagPulseReader(ForeignReader):
    """RAGPulse: times are strings of seconds, and the ids name parts of the prompt (passages, history), not blocks."""

    name = "ragpulse"
    description = "RAGPulse JSONL (timestamp a string of s, input_length, output_length, session_id)"
    kinds = (JSON,)
    keys = (*KEYS, _BLOCKS)
    also = (_TIME,)

    def contradiction(self, opening: Opening) -> str:
        """See `Described`."""
        if _CHAT in opening.names:
            return f"has {_CHAT}"
        return "" if isinstance(opening.first.get(_BLOCKS), dict) else f"its {_BLOCKS} is no object"

    def raw(self, path: Path, options: ReadOptions) -> Raw:
        """See `ForeignReader`."""
        unit = options.unit or "s"
        start = opened(path)
        further = Further(start, known=(_TIME, *KEYS, _BLOCKS))
        timed = _TIME in start.names

        def row(entry: dict[str, Any]) -> Row:
            time = (nanoseconds(entry, _TIME, unit, text=True),) if timed else ()
            return *time, tokens(entry, _PROMPT), tokens(entry, _OUTPUT), *further.of(entry)

        notes = [f"'{_BLOCKS}' is not read: its ids name parts of the prompt, not blocks of it", *further.notes]
        columns = {name: dtype for name, dtype in COLUMNS.items() if timed or name != "arrival_ns"}
        parts = frames(path, entries(path, is_list=False), row, {**columns, **further.columns})
        names = {**NAMES, **further.names}
        no_times = "" if timed else f"no key '{_TIME}'"
        return Raw(parts, names, no_times=no_times, unit="s", metadata={"source": self.name}, notes=notes)
