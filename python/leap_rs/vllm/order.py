"""What the core makes the keys of live requests of: remaining length, average KV cache, the aging clock at arrival.

One place that asks the brain. Whatever it answers, and if it fails, the engine goes on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from leap_rs._leap import RemainingTable, static_key

from .brain import Brain, Reason
from .guard import Guard
from .metrics import MetricsWriter
from .options import LeapOptions
from .recorder import Recorder

# exp() of what lies within stays a positive finite number.
_LARGEST_LN = 690.0


@dataclass(slots=True)
class Live:
    """What the plugin keeps of a request from its arrival to its end."""

    number: int
    """Place in the order of arrival, and the request's id in the core's queues."""
    arrival_s: float
    aged: float
    """What the aging clock showed then."""
    mean_tokens: float
    """Mean length of those that had finished by then."""
    queued_s: float
    """When it last began to wait for admission: on arrival, or when it was preempted."""
    promised: int = 0
    """Output tokens that it has once the steps are done that were under way when it was preempted."""
    row: Any = None
    """Its hidden state, where what is served is recorded."""
    session: bool = False
    """Whether its input came in turns."""


class Ranker:
    """Asks the brain for the live requests, and makes keys of its answers."""

    def __init__(
        self,
        brain: Brain,
        options: LeapOptions,
        clock: Callable[[], float],
        *,
        labels: bool = True,
        recorder: Recorder | None = None,
    ) -> None:
        """`labels` False where an end says nothing of a length: every request then ends as an error."""
        self._brain = brain
        self._options = options
        self._clock = clock
        self._labels = labels
        self._recorder = recorder
        self.aging = options.clock()
        # Arrivals are counted from the start of the engine: aging multiplies them, and digits are worth keeping.
        self._start_s = clock()
        self._live: dict[str, Live] = {}
        self._arrived = 0
        self._mean_remaining: Callable[[str, int], float] | None = getattr(brain, "mean_remaining", None)
        self._table: Callable[[str], RemainingTable | None] | None = getattr(brain, "table", None)
        self._fresh: Callable[[], Sequence[str]] | None = getattr(brain, "fresh", None)
        self.metrics: MetricsWriter | None = getattr(brain, "metrics", None)
        self.guard: Guard = getattr(brain, "guard", None) or Guard(self.metrics)

    @property
    def fault(self) -> str | None:
        """The first fault of anything that is the plugin's."""
        return self.guard.fault

    @property
    def armed(self) -> bool:
        """Whether the schedule follows the predictions now."""
        if self.fault is not None or self._options.mode == "shadow" or self._options.order == "fcfs":
            return False
        return bool(self._ask(lambda: self._brain.armed, False))

    @property
    def version(self) -> int:
        """The brain's own."""
        return int(self._ask(lambda: self._brain.version, 0))

    def fresh(self) -> Sequence[str]:
        """The requests of which more is known than when this was asked last."""
        found: Sequence[str] = self._ask(self._fresh, ()) if self._fresh is not None else ()
        return found

    def now(self) -> float:
        """Seconds since the engine started."""
        return self._clock() - self._start_s

    def arrived(self, request: Any) -> None:
        """Takes a request in."""
        now = self.now()
        aged, mean_tokens = self.aging.arrival(now)
        self._live[request.request_id] = Live(self._arrived, now, aged, mean_tokens, now, session=session(request))
        self._arrived += 1
        if session(request):
            return
        sampling = request.sampling_params
        self._ask(
            lambda: self._brain.arrived(
                request.request_id,
                request.prompt_token_ids or (),
                request.max_tokens,
                int(getattr(sampling, "min_tokens", 0) or 0),
                bool(getattr(sampling, "ignore_eos", False)),
            ),
            None,
        )

    def state(self, request_id: str, row: Any) -> None:
        """Hands a hidden state on, of a request that is still there."""
        live = self._live.get(request_id)
        if live is not None:
            if self._recorder is not None:
                # Those of a step lie in one buffer, which a row alone must not keep.
                live.row = np.array(row)
            self._ask(lambda: self._brain.state(request_id, row), None)

    def preempted(self, request: Any) -> None:
        """Takes down that a request is about to wait again, before vLLM forgets what is under way for it."""
        live = self.live(request)
        live.queued_s = self.now()
        live.promised = request.num_output_tokens + request.num_output_placeholders

    def finished(self, request: Any) -> int | None:
        """Lets a request go; returns its length, where it has one."""
        live = self._live.pop(request.request_id, None)
        if live is None or live.session:
            return None
        reason = _reason(request) if self._labels else "error"
        length = int(request.num_output_tokens) if reason in ("stop", "length") and request.num_output_tokens else None
        self.aging.finished(length)
        if self._recorder is not None:
            self._recorder.finished(request, reason, live.number, live.arrival_s, live.row)
        self._ask(lambda: self._brain.finished(request.request_id, reason, request.num_output_tokens), None)
        return length

    def save(self) -> None:
        """Has the recorder write what it has, and the brain save what it has learned."""
        if self._recorder is not None:
            self.guard.call(self._recorder.save)
        self._ask(self._brain.save, None)

    def close(self) -> None:
        """Shuts the recorder and the brain down."""
        if self._recorder is not None:
            self.guard.always(self._recorder.close)
        self.guard.always(self._brain.close)

    def give_up(self) -> None:
        """Keeps nothing of any request, after a fault."""
        self._live.clear()
        if self._recorder is not None:
            self._recorder.no_more()

    def live(self, request: Any) -> Live:
        """What is kept of a request; one that came in by no door of ours is taken in now."""
        found = self._live.get(request.request_id)
        if found is None:
            self.arrived(request)
            found = self._live[request.request_id]
        return found

    def ranks(self, requests: Sequence[Any]) -> tuple[list[float], list[float]]:
        """The parts of keys that change, after the tokens that each request has or will have once the steps under way are done.

        Returns:
            Remaining lengths as aging compares them, and the tokens of KV cache that each will hold on average.
        """
        lives = [self.live(request) for request in requests]
        counts = [generated(request, live) for request, live in zip(requests, lives, strict=True)]
        ln = self._ln_remaining(requests, counts)
        remaining = [math.exp(value) for value in self._boosted(ln, lives)]
        if self._options.memory_weight == 0:
            return remaining, [1.0] * len(remaining)
        means, expect = [math.exp(value) for value in ln], self._mean_remaining
        if expect is not None:
            means = self._ask(
                lambda: [float(expect(r.request_id, made)) for r, made in zip(requests, counts, strict=True)], means
            )
        memory = [
            r.num_prompt_tokens + made + (min(mean, _left(r, made)) / 2 if mean > 0 else 0.0)
            for r, made, mean in zip(requests, counts, means, strict=True)
        ]
        return remaining, memory

    def ln_remaining(self, requests: Sequence[Any], lives: Sequence[Live]) -> list[float]:
        """Logarithms of the remaining lengths of requests as aging compares them; `lives` are what is kept of them."""
        counts = [generated(request, live) for request, live in zip(requests, lives, strict=True)]
        return self._boosted(self._ln_remaining(requests, counts), lives)

    def table(self, request_id: str) -> RemainingTable | None:
        """What is known of a request's length by those whose word counts; None where nothing is."""
        know = self._table
        found: RemainingTable | None = self._ask(lambda: know(request_id), None) if know is not None else None
        return found

    def _boosted(self, ln: list[float], lives: Sequence[Live]) -> list[float]:
        if self._options.aging_rate is not None:
            return ln
        return self.aging.boosted(ln, [live.mean_tokens for live in lives], squared=self._options.squared)

    def _ln_remaining(self, requests: Sequence[Any], counts: Sequence[int]) -> list[float]:
        def ask() -> list[float]:
            remaining = self._brain.remaining_key
            return [remaining(request.request_id, made) for request, made in zip(requests, counts, strict=True)]

        found: list[float] = self._ask(ask, [math.nan] * len(counts))
        if all(-_LARGEST_LN <= ln <= _LARGEST_LN for ln in found):
            return found
        lefts = [math.log(_left(request, made)) for request, made in zip(requests, counts, strict=True)]
        return [
            left if math.isnan(ln) else min(max(ln, -_LARGEST_LN), _LARGEST_LN)
            for ln, left in zip(found, lefts, strict=True)
        ]

    def key(self, request: Any) -> float:
        """Key of a request as in the queue; smaller goes first."""
        (remaining,), (memory,) = self.ranks([request])
        aged = self.live(request).aged
        return static_key(remaining, 1.0, aged, memory_weight=self._options.memory_weight, memory_tokens=memory)

    def _ask(self, call: Callable[[], Any], otherwise: Any) -> Any:
        return self.guard.call(call, otherwise=otherwise)


def session(request: Any) -> bool:
    """Whether its input comes in turns, each with an answer of its own: it has no one length, and nothing is learned of it.

    vLLM counts the tokens of the last turn alone, and answers each before it knows what is still to come.
    """
    return bool(getattr(request, "resumable", False))


def generated(request: Any, live: Live) -> int:
    """Tokens that a request has, or will have once the steps under way are done."""
    return int(max(request.num_output_tokens + request.num_output_placeholders, live.promised))


def _left(request: Any, generated: int) -> float:
    return float(max(request.max_tokens - generated, 1))


def _reason(request: Any) -> Reason:
    reason = request.get_finished_reason()
    name = str(getattr(reason, "name", reason)).lower()
    # A repetition that was cut off is no natural end.
    return _REASONS.get(name, "error")


_REASONS: dict[str, Reason] = {"stop": "stop", "length": "length", "abort": "abort"}
