"""The aging clock as it is described, for tests that make keys themselves: an integral, a mean over 30 s, a boost."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

MEMORY_S = 30.0
SHORTEST_WAIT_S = 1.0
FORGETTING = 0.9995
BOOST = 9.0


@dataclass
class AgingModel:
    """V(t), the integral of alpha / W since the start; W = waiting / completions per second, at least 1 s."""

    alpha: float
    steps: list[tuple[float, float]] = field(default_factory=lambda: [(0.0, SHORTEST_WAIT_S)])
    """When W changed, and to what."""
    ends: list[tuple[float, int]] = field(default_factory=list)
    """When how many ended, as the step after it was told."""
    lengths: list[int] = field(default_factory=list)
    waiting: int = 0
    mean_tokens: float = math.inf

    def at(self, now: float) -> float:
        ends = [since for since, _ in self.steps[1:]] + [now]
        return sum(
            self.alpha * max(end - since, 0.0) / wait for (since, wait), end in zip(self.steps, ends, strict=True)
        )

    def step(self, now: float, waiting: int, ended: int, lengths: Iterable[int]) -> None:
        """A step was composed: so many requests had ended since the last one, some of them with a length."""
        self.lengths += lengths
        if self.lengths:
            weights = [FORGETTING**age for age in reversed(range(len(self.lengths)))]
            tokens = sum(weight * length for weight, length in zip(weights, self.lengths, strict=True))
            self.mean_tokens = tokens / sum(weights)
        if waiting == self.waiting and not ended:
            return
        self.waiting = waiting
        self.ends.append((now, ended))
        rate = sum(count / MEMORY_S * math.exp((when - now) / MEMORY_S) for when, count in self.ends)
        if waiting == 0:
            wait = 0.0
        elif rate == 0:
            wait = now
        else:
            wait = waiting * (1 - math.exp(-now / MEMORY_S)) / rate
        self.steps.append((now, max(wait, SHORTEST_WAIT_S)))


def boosted(remaining: float, mean_tokens: float, *, squared: bool) -> float:
    """Remaining length as relative aging compares it."""
    if math.isinf(mean_tokens):
        return remaining
    unit = mean_tokens**2 if squared else mean_tokens
    return unit / BOOST * (1 - math.exp(-BOOST * remaining / unit))
