"""The evict lever: which residents give their KV cache to a waiting request that is better by a stated factor."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .options import LeapOptions

# After a look at all residents that found nobody, the next one is not before so many seconds.
_LOOK_S = 0.05


@dataclass(frozen=True)
class Resident:
    """A request that may be made to give way."""

    request: Any
    key: float
    number: int
    """Place in the order of arrival: of equal keys the last gives way first."""
    blocks: int
    """Blocks that come free with it: those that nobody shares."""


@dataclass(frozen=True)
class Claim:
    """What the first of the queue lacks."""

    key: float
    blocks: int
    """Blocks that it needs, those that it may find cached included."""
    seat: bool
    """Whether it lacks a seat as well."""


class Evictor:
    """Says who is to be preempted, at most `evict_per_s` a second."""

    def __init__(self, options: LeapOptions) -> None:
        self._options = options
        self._next_s = -math.inf
        self.evictions = 0

    def ready(self, now: float) -> bool:
        """Whether anybody may be evicted now."""
        return self._options.evict_per_s > 0 and now >= self._next_s

    def victims(self, claim: Claim, residents: Sequence[Resident], free_blocks: int, now: float) -> list[Any]:
        """The worst residents, each worse than the claim by `evict_factor`, as many as make room; none if all do not."""
        if not self.ready(now):
            return []
        bar = claim.key + math.log(self._options.evict_factor)
        worse = sorted((r for r in residents if r.key > bar), key=lambda r: (r.key, r.number), reverse=True)
        free, seats = free_blocks, 0 if claim.seat else 1
        chosen = []
        for resident in worse:
            if free >= claim.blocks and seats > 0:
                break
            chosen.append(resident.request)
            free += resident.blocks
            seats += 1
        if not chosen or free < claim.blocks or seats == 0:
            self._next_s = now + _LOOK_S
            return []
        self._next_s = now + len(chosen) / self._options.evict_per_s
        self.evictions += len(chosen)
        return chosen
