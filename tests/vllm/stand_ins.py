"""Requests with the attributes of vLLM's, and a brain with given lengths, for tests without vLLM."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from leap_rs.vllm.options import LeapOptions, parse
from leap_rs.vllm.order import Ranker


@dataclass(eq=False)
class StandIn:
    request_id: str
    num_prompt_tokens: int = 10
    num_output_tokens: int = 0
    num_computed_tokens: int = 0
    num_output_placeholders: int = 0
    max_tokens: int = 1000
    drafts: int = 0
    prompt_token_ids: tuple[int, ...] = (1, 2, 3)
    sampling_params: Any = None
    reason: Any = None

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + self.num_output_tokens

    @property
    def num_tokens_with_spec(self) -> int:
        return self.num_tokens + self.drafts

    def get_finished_reason(self) -> Any:
        return self.reason


class Lengths:
    """A brain that says what it is told to."""

    armed = True
    version = 0

    def __init__(self, lengths: dict[str, float] | None = None) -> None:
        self.lengths = lengths or {}
        self.ended: list[tuple[str, str, int]] = []

    def arrived(self, *args: Any) -> None:
        self.last = args

    def state(self, request_id: str, row: Any) -> None: ...

    def remaining_key(self, request_id: str, generated: int) -> float:
        return math.log(max(self.lengths[request_id] - generated, 1))

    def finished(self, request_id: str, reason: str, output_tokens: int) -> None:
        self.ended.append((request_id, reason, output_tokens))

    def save(self) -> None: ...

    def close(self) -> None: ...


class Clock:
    """A clock that is set by hand; it did not start at 0."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return 1e6 + self.now


def options_of(**values: Any) -> LeapOptions:
    options = parse({"leap": {"mode": "armed", **values}})
    assert options is not None
    return options


def ranker_of(brain: Any, clock: Clock, **values: Any) -> tuple[Ranker, LeapOptions]:
    options = options_of(**values)
    return Ranker(brain, options, clock), options
