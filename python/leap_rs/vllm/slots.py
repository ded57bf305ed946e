"""The slots lever: which residents decode in a step, and in which order vLLM looks at them.

vLLM goes through its running requests in order and preempts the last one when KV blocks run out, so the order decides
both. Those without a slot are gated: they keep their blocks and are passed over for one step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from leap_rs._leap import select_slots

from .options import LeapOptions
from .order import Ranker


@dataclass(slots=True)
class Plan:
    """One step's arrangement of the running requests."""

    order: list[Any]
    gated: list[Any] = field(default_factory=list)
    contenders: list[Any] = field(default_factory=list)
    """Those whose steps without a slot are counted: who could decode, and who prefills but was gated."""
    promoted: int = 0


@dataclass(slots=True)
class Sorted:
    """Running requests by what the next step has for them."""

    decoding: list[Any] = field(default_factory=list)
    prefilling: list[Any] = field(default_factory=list)
    idle: list[Any] = field(default_factory=list)


def sort(running: Sequence[Any], max_model_len: int) -> Sorted:
    """Who decodes, who prefills (also anew after a preemption), and for whom there is nothing to do in the next step."""
    found = Sorted()
    for request in running:
        computed, placeholders = request.num_computed_tokens, request.num_output_placeholders
        left = request.num_tokens_with_spec + placeholders - computed
        # Its last token is under way already.
        ending = placeholders > 0 and computed + 2 - placeholders >= request.num_prompt_tokens + request.max_tokens
        if left <= 0 or ending or computed >= max_model_len - 1:
            found.idle.append(request)
        elif computed >= request.num_prompt_tokens and request.num_tokens + placeholders - computed <= 1:
            found.decoding.append(request)
        else:
            found.prefilling.append(request)
    return found


class Slots:
    """Chooses who decodes, step by step."""

    def __init__(
        self, ranker: Ranker, options: LeapOptions, slots: int, max_model_len: int, max_loras: int | None = None
    ) -> None:
        self._ranker = ranker
        self._options = options
        self._slots = slots
        self._max_model_len = max_model_len
        self._max_loras = max_loras
        # Steps since residents last decoded, of those that have waited; and who had a slot in the step before.
        self._waited: dict[str, int] = {}
        self._holders: set[str] = set()
        # Whether a decoding request may stand behind a prefill, where tokens can run out before its turn.
        self._shuffled = False
        self.gated_requests = 0
        self.slot_waits = 0
        self.promotions = 0

    def plan(self, running: Sequence[Any], *, memory_is_short: bool) -> Plan:
        """The next step. Where memory is short the worst comes last, since that is whom vLLM preempts."""
        roomy = len(running) <= self._slots and self._max_loras is None and not memory_is_short
        if roomy and not self._shuffled:
            return Plan(list(running))
        self._shuffled = not roomy
        found = sort(running, self._max_model_len)
        apart = self._beyond_adapters(found)
        if not apart and len(found.decoding) <= self._slots and not memory_is_short:
            # Prefills last: vLLM hands out tokens in this order, and a decoding request needs only one.
            return Plan(found.idle + found.decoding + found.prefilling, contenders=found.decoding)
        contenders = found.decoding + [request for request in found.prefilling if request in apart]
        decoding = [request for request in found.decoding if request not in apart]
        decoding.sort(key=lambda request: self._ranker.live(request).number)
        chosen, gated, promoted = self._choose(decoding)
        gated += apart
        tail = [request for request in found.prefilling if request not in apart] + gated
        if memory_is_short:
            chosen.sort(key=self._key)
            tail.sort(key=self._key)
        # Those who need nothing come first: preempting one whose last token is under way would gain little.
        return Plan(found.idle + chosen + tail, gated, contenders, promoted)

    def settle(self, running: Sequence[Any]) -> list[Any]:
        """Who must still be passed over when the slots are vLLM's own again: residents of more adapters than fit."""
        self._waited.clear()
        self._holders.clear()
        return self._beyond_adapters(sort(running, self._max_model_len))

    def scheduled(self, plan: Plan, scheduled: dict[str, int]) -> None:
        """Takes note of who got to decode in the step that was planned."""
        self.promotions += plan.promoted
        names = [request.request_id for request in plan.contenders]
        self._waited = {name: self._waited.get(name, 0) + 1 for name in names if name not in scheduled}
        self._holders = {name for name in names if name in scheduled} if plan.gated else set()

    def passed_over(self, residents: int) -> None:
        """Counts those who stayed resident in a step and were kept from it."""
        self.gated_requests = residents
        self.slot_waits += residents

    def _key(self, request: Any) -> tuple[float, int]:
        return self._ranker.key(request, memory=False), self._ranker.live(request).number

    def _beyond_adapters(self, found: Sorted) -> list[Any]:
        """Who must be passed over because a step holds no more than `max_loras` adapters.

        vLLM counts the adapters of those it schedules, so beside gated residents it admits requests of further ones.
        """
        active = found.decoding + found.prefilling
        if self._max_loras is None or len({_adapter(request) for request in active} - {None}) <= self._max_loras:
            return []

        def place(request: Any) -> tuple[float, float, int]:
            waited, cap = self._waited.get(request.request_id, 0), self._options.wait_cap_steps
            return (-waited if cap is not None and waited >= cap else 0, *self._key(request))

        taken: set[int] = set()
        apart = []
        for request in sorted(active, key=place):
            adapter = _adapter(request)
            if adapter is None or adapter in taken:
                continue
            if len(taken) < self._max_loras:
                taken.add(adapter)
            else:
                apart.append(request)
        return apart

    def _choose(self, decoding: list[Any]) -> tuple[list[Any], list[Any], int]:
        if len(decoding) <= self._slots:
            return decoding, [], 0
        ranks = [self._ranker.rank(request) for request in decoding]
        remaining = [
            rank.remaining / self._options.hysteresis if request.request_id in self._holders else rank.remaining
            for request, rank in zip(decoding, ranks, strict=True)
        ]
        arrival_s = [rank.arrival_s for rank in ranks]
        waited = [self._waited.get(request.request_id, 0) for request in decoding]
        cap = self._options.wait_cap_steps

        def select(cap: int | None) -> set[int]:
            rate = self._options.aging_rate
            return set(
                select_slots(remaining, arrival_s, waited, self._slots, aging_rate=rate, wait_cap_steps=cap).tolist()
            )

        indices = select(cap)
        promoted = 0
        if cap is not None and any(waited[i] >= cap for i in indices):
            promoted = len(indices - select(None))
        chosen = [request for i, request in enumerate(decoding) if i in indices]
        gated = [request for i, request in enumerate(decoding) if i not in indices]
        return chosen, gated, promoted


def _adapter(request: Any) -> int | None:
    adapter = getattr(request, "lora_request", None)
    return None if adapter is None else int(adapter.lora_int_id)
