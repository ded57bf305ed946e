"""From the columns of a trace to the arrays that the core replays, prefix blocks brought to the engine's block size."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from leap_rs.trace import schema
from leap_rs.trace.labels import finish_reason

FINISH = {"stop": 0, "length": 1, "abort": 2}
SCORE_PREFIX = "score_"

# Odd constants of a 64-bit mixer (splitmix64); any fixed ones would do, since block hashes only have to differ.
_MULTIPLY = np.uint64(0x9E3779B97F4A7C15)
_MIX = np.uint64(0xBF58476D1CE4E5B9)

Hashes = npt.NDArray[np.uint64]
Offsets = npt.NDArray[np.int64]


def score_names(frame: pl.DataFrame) -> list[str]:
    """Names of the predictors whose scores the trace carries, in column order."""
    return [name.removeprefix(SCORE_PREFIX) for name in frame.columns if name.startswith(SCORE_PREFIX)]


def to_columns(frame: pl.DataFrame, *, trace_block: int, engine_block: int) -> tuple[dict[str, Any], list[str]]:
    """Arrays by the names that the core expects, and notes on what could not be used.

    `trace_block` and `engine_block` are tokens in a block of `prefix_blocks` and in a KV block of the engine.
    """
    notes: list[str] = []
    columns: dict[str, Any] = {
        "arrival_s": np.ascontiguousarray(frame["arrival_s"].to_numpy(), dtype=np.float64),
        "prompt_tokens": np.ascontiguousarray(frame["prompt_tokens"].to_numpy(), dtype=np.uint32),
        "output_tokens": np.ascontiguousarray(frame["output_tokens"].to_numpy(), dtype=np.uint32),
    }
    for name in ("max_tokens", "prefix_tokens"):
        if name in frame.columns:
            columns[name] = np.ascontiguousarray(frame[name].to_numpy(), dtype=np.uint32)
    ended = finish_reason(frame.columns).replace_strict(FINISH, return_dtype=pl.UInt8)
    codes = frame.with_columns(ended.alias("finish"))["finish"]
    columns["finish"] = np.ascontiguousarray(codes.to_numpy())
    if schema.FORCED in frame.columns:
        columns["forced"] = np.ascontiguousarray(frame[schema.FORCED].to_numpy(), dtype=np.bool_)
    for name in schema.FEATURE_COLUMNS:
        if name in frame.columns:
            columns[name] = np.ascontiguousarray(frame[name].to_numpy())
    scores = {
        name: np.ascontiguousarray(frame[SCORE_PREFIX + name].to_numpy(), dtype=np.float32)
        for name in score_names(frame)
    }
    if scores:
        columns["scores"] = scores
    if "prefix_blocks" in frame.columns:
        lists = frame["prefix_blocks"]
        offsets = np.zeros(len(frame) + 1, dtype=np.int64)
        np.cumsum(lists.list.len().to_numpy(), out=offsets[1:])
        hashes = np.ascontiguousarray(lists.explode().drop_nulls().to_numpy(), dtype=np.uint64)
        resized = resize_blocks(offsets, hashes, trace_block, engine_block)
        if resized is None:
            notes.append(
                f"prefix blocks of {trace_block} tokens do not fit KV blocks of {engine_block} tokens: replayed "
                f"without a shared prefix (choose --block-size as a multiple or a divisor of {trace_block})"
            )
        else:
            columns["prefix_block_offsets"], columns["prefix_block_hashes"] = resized
            columns["prefix_block_size"] = engine_block
    return columns, notes


def turns(frame: pl.DataFrame) -> list[str]:
    """A note on requests that continue a conversation, where the trace tells them by a column `session`."""
    if "session" not in frame.columns:
        return []
    sessions = frame["session"].drop_nulls()
    later = len(sessions) - sessions.n_unique()
    if later == 0:
        return []
    return [
        f"{later} of {frame.height} requests continue a conversation; replay is open loop: they arrive when they did, "
        "however fast the answer before them was"
    ]


def resize_blocks(offsets: Offsets, hashes: Hashes, old: int, new: int) -> tuple[Offsets, Hashes] | None:
    """Hashes of `old`-token blocks as hashes of `new`-token blocks; None where neither size divides the other.

    Two prompts share a new block exactly where they share every old block that it overlaps and all before it.
    """
    if old == new:
        return offsets, hashes
    if old % new == 0:
        parts = old // new
        index = np.arange(parts, dtype=np.uint64) * _MULTIPLY
        mixed = _mixed(hashes[:, None] + index[None, :])
        return offsets * parts, np.ascontiguousarray(mixed.reshape(-1))
    if new % old:
        return None
    width = new // old
    counts = np.diff(offsets) // width
    joined_offsets = np.zeros_like(offsets)
    np.cumsum(counts, out=joined_offsets[1:])
    # First old block of every new one: the row's start plus `width` times the position in the row.
    position = np.arange(joined_offsets[-1]) - np.repeat(joined_offsets[:-1], counts)
    first = np.repeat(offsets[:-1], counts) + position * width
    joined = np.zeros(len(first), dtype=np.uint64)
    for i in range(width):
        joined = _mixed(joined * _MULTIPLY + hashes[first + i])
    return joined_offsets, joined


def _mixed(values: Hashes) -> Hashes:
    values = (values ^ (values >> np.uint64(30))) * _MIX
    mixed: Hashes = values ^ (values >> np.uint64(31))
    return mixed
