"""How many requests the KV cache holds at a time, and where the engine's seats run out before it does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import polars as pl

# Share of the steps from which a queue in front of full seats is a lasting one, and up to which one in front of a full
# KV cache is rare.
STANDING, RARE = 0.05, 0.01
# More seats by less than this are within what the estimate may be wrong.
WORTH = 1.25


def held_tokens(frame: pl.DataFrame, usable: int, block_size: int) -> float | None:
    """KV tokens that a resident holds on average, of the requests of a trace that the engine can serve."""
    prompt, output = (pl.col(name).cast(pl.Float64) for name in ("prompt_tokens", "output_tokens"))
    # A seat is held for as many steps as the answer has tokens, and the answer is half there on average: the renewal
    # reward theorem weights each request by its output. The last block of each is half full.
    held = (output * (prompt + output / 2)).sum() / output.sum() + block_size / 2
    served = frame.filter(prompt + output - 1 <= usable)
    return None if served.is_empty() else float(served.select(held).item())


def could_hold(config: Mapping[str, Any], held: float | None) -> int | None:
    """Residents that the KV cache of one rank holds of requests that each hold so many tokens, in two digits.

    Not more than the tokens of a step: vLLM refuses more sequences than those.
    """
    if not held:
        return None
    number = max(min(int(config["kv_tokens_usable"] / held), int(config["max_num_batched_tokens"])), 1)
    unit = 10 ** max(len(str(number)) - 2, 0)
    return int(number // unit * unit)


def short_of_seats(document: Mapping[str, Any], point: int, result: Mapping[str, Any]) -> str | None:
    """That requests wait for a seat and not for memory under `result`, fcfs at this point; what to type against it."""
    config, queue = document["config"], result["queue"]
    seats = int(config["points"][point]["max_num_seqs"] or config["max_num_seqs"])
    slots = config["points"][point]["decode_slots"] or config.get("decode_slots") or seats
    steps, by_seats, by_memory = (
        queue.get(key) for key in ("steps", "steps_blocked_by_seats", "steps_blocked_by_memory")
    )
    most = could_hold(config, document["trace"].get("kv_tokens_a_resident"))
    # With fewer decode slots than seats more seats only hold more of those who do not decode.
    if most is None or most < WORTH * seats or slots < seats or not steps:
        return None
    if by_seats < STANDING * steps or by_memory > RARE * steps:
        return None
    whose = "each rank's KV cache" if config.get("data_parallel_size", 1) > 1 else "the KV cache"
    return (
        f"seats, not order, are short here: in {100 * by_seats / steps:.0f} % of the steps all {seats} are taken while "
        f"requests wait, and {whose} could hold about {most} of this traffic at a time (--max-num-seqs {most})"
    )
