"""Workloads of LLMServingSim: planned arrivals, lengths, and prompts as ids of tokens, of which prefixes follow.

`leap-calibrate` reads them beside the runs that they made.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from leap_rs.trace.benchmarks.rows import RowsReader
from leap_rs.trace.jsonrows import EntryError, nanoseconds, tokens
from leap_rs.trace.jsontext import shown
from leap_rs.trace.nested import text
from leap_rs.trace.opening import JSON
from leap_rs.trace.requests import Request
from leap_rs.trace.schema import BLOCK_SIZE_KEY, DEFAULT_BLOCK_SIZE, U32_MAX

PROMPT, OUTPUT, ARRIVAL, IDS = "input_toks", "output_toks", "arrival_time_ns", "input_tok_ids"


class ServingSimReader(RowsReader):
    """A request a line; prompts become hashes of their blocks of 16 tokens."""

    name = "llmservingsim"
    description = "LLMServingSim JSONL (input_toks, output_toks, arrival_time_ns, input_tok_ids)"
    kinds = (JSON,)
    keys = (PROMPT, OUTPUT, ARRIVAL)
    also = (IDS,)
    names: ClassVar[Mapping[str, str]] = {"arrival_s": ARRIVAL, "prompt_tokens": PROMPT, "output_tokens": OUTPUT}
    unordered = False
    further = ("session_id",)
    fixed: ClassVar[Mapping[str, str]] = {BLOCK_SIZE_KEY: str(DEFAULT_BLOCK_SIZE)}

    def request(self, place: int, entry: dict[str, Any]) -> Request:
        """See `RowsReader`."""
        prompt, output = tokens(entry, PROMPT), tokens(entry, OUTPUT)
        blocks = block_hashes(token_ids(entry), DEFAULT_BLOCK_SIZE) if prompt and entry.get(IDS) is not None else None
        return Request(
            place,
            prompt,
            output,
            nanoseconds(entry, ARRIVAL, "ns"),
            columns={"prefix_blocks": blocks, "session": text(entry.get("session_id"))},
        )


def token_ids(entry: Mapping[str, Any]) -> list[int]:
    """The prompt of a request. `EntryError` where it is none, or not as long as the request says."""
    found = entry[IDS]
    if not isinstance(found, list) or any(type(token) is not int or not 0 <= token <= U32_MAX for token in found):
        raise EntryError(f"key '{IDS}': expected a list of token ids, found {shown(found)}")
    if len(found) != entry[PROMPT]:
        raise EntryError(f"key '{IDS}': {len(found)} ids for {entry[PROMPT]} {PROMPT}")
    return found


def block_hashes(tokens: Sequence[int], block_size: int) -> list[int]:
    """One hash a full block, each over its block and the hash before it: equal leading hashes mean an equal prefix."""
    hashes: list[int] = []
    previous = b""
    for start in range(0, len(tokens) - block_size + 1, block_size):
        block = np.array(tokens[start : start + block_size], dtype="<u4").tobytes()
        previous = hashlib.blake2b(previous + block, digest_size=8).digest()
        hashes.append(int.from_bytes(previous, "little"))
    return hashes
