"""Finished requests with the attributes of vLLM's, and what a trace must say of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

WIDTH = 6


@dataclass
class Request:
    number: int
    arrival_s: float
    output_tokens: int
    reason: str = "stop"
    prompt: tuple[int, ...] = (3, 1, 4)
    max_tokens: int = 100
    name: str | None = None
    row: Any = None
    sampling: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.name = self.name or f"r{self.number}"
        if self.row is None:
            self.row = np.random.default_rng(self.number).normal(size=WIDTH).astype(np.float16)

    def hand_to(self, recorder: Any) -> None:
        sampling = SimpleNamespace(
            **{"temperature": 0.5, "top_p": 0.75, "min_tokens": 0, "ignore_eos": False} | self.sampling
        )
        request = SimpleNamespace(
            request_id=self.name,
            prompt_token_ids=list(self.prompt),
            num_output_tokens=self.output_tokens,
            max_tokens=self.max_tokens,
            sampling_params=sampling,
        )
        recorder.finished(request, self.reason, self.number, self.arrival_s, None if self.row is False else self.row)


def traffic(n: int, seed: int = 0) -> list[Request]:
    """Requests in the order in which they finish; some of them arrived long before."""
    rng = np.random.default_rng(seed)
    arrivals = np.sort(rng.uniform(0, 100, n))
    lengths = rng.integers(1, 100, n)
    made = [Request(i, float(arrivals[i]), int(lengths[i]), prompt=tuple(range(1, 2 + i % 7))) for i in range(n)]
    return sorted(made, key=lambda one: one.arrival_s + one.output_tokens)
