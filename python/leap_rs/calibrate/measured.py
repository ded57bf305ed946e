"""One measured run: what a real engine was asked for, when, and when its tokens came, all on the engine's clock."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class EngineFacts:
    """What a run says about the engine that served it."""

    model: str | None = None
    hardware: str = ""
    """Any words that may name the card: the device's name, the run's own name."""
    limits: Mapping[str, Any] = field(default_factory=dict)
    """Options of the engine by their name in `leap-replay` (`max_num_seqs`, `kv_tokens` as vLLM counts it, ...)."""
    data_parallel_size: int | None = None


@dataclass(frozen=True)
class Observed:
    """Requests running and waiting in the real engine, sampled."""

    at_s: Floats
    running: Floats
    waiting: Floats


@dataclass(frozen=True)
class MeasuredRun:
    """Requests in the order in which the engine queued them; times in seconds, 0 where the first one was queued."""

    path: Path
    name: str
    format: str
    planned_s: Floats
    """When the client meant to send; latencies count from here."""
    sent_s: Floats
    """When the client did send."""
    queued_s: Floats
    """When the engine had the request in its queue."""
    first_token_s: Floats
    last_token_s: Floats
    requests: pl.DataFrame
    """`prompt_tokens`, `output_tokens` and, where prompts are known, `prefix_blocks`."""
    block_size: int
    """Tokens in a block of `prefix_blocks`."""
    facts: EngineFacts
    one_loop_clock: bool = True
    """Whether queued_s was stamped by the engine's loop, which takes requests in only between two steps."""
    observed: Observed | None = None
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.queued_s)

    @property
    def lag_s(self) -> Floats:
        """What each request spent in front of the engine: no step time, and never fitted."""
        return self.queued_s - self.sent_s

    @property
    def output_tokens(self) -> Floats:
        """Output tokens as numbers to calculate with."""
        return self.requests["output_tokens"].to_numpy().astype(np.float64)

    def engine_arrivals(self, known: npt.NDArray[np.bool_]) -> Floats:
        """When the simulated engine should see each request, in the order of the queue.

        The real loop stamps `queued_s` at the end of a step, and composes the next one with the request in it. A
        simulated loop has its step ends elsewhere and would let the request wait for the next one, half a step on
        average, so that much of the lag is taken back: half the median time a token of the requests that are `known`
        (those held out must not say how fast the engine is), never more than the lag itself.
        """
        if not self.one_loop_clock:
            return self.queued_s
        several = known & (self.output_tokens > 1)
        if not several.any():
            return self.queued_s
        decode = (self.last_token_s - self.first_token_s)[several] / (self.output_tokens - 1)[several]
        back = np.minimum(np.maximum(self.lag_s, 0.0), np.median(decode) / 2)
        return np.maximum.accumulate(self.queued_s - back)

    def shared_prefixes(self) -> tuple[int, int] | None:
        """Prompts that start with blocks of an earlier prompt, and the tokens of those blocks; None if not known.

        An upper bound of what the engine took from its prefix cache, since eviction is not modelled here.
        """
        if "prefix_blocks" not in self.requests.columns:
            return None
        seen: set[int] = set()
        prompts = tokens = 0
        lists = self.requests["prefix_blocks"].to_list()
        for blocks, prompt in zip(lists, self.requests["prompt_tokens"], strict=True):
            # The last token of a prompt is always computed: its block cannot come from the cache whole.
            usable = blocks[: (prompt - 1) // self.block_size]
            shared = next((i for i, block in enumerate(usable) if block not in seen), len(usable))
            prompts += shared > 0
            tokens += shared * self.block_size
            seen.update(blocks)
        return prompts, tokens
