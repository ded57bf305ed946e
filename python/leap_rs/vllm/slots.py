"""The slots lever: what vLLM's running requests are to the core's plan of a step, and what the plan is to vLLM.

vLLM goes through its running requests in order and preempts the last one when KV blocks run out, so the order decides
both. Those without a slot are gated: they keep their blocks and are passed over for one step.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from leap_rs._leap import Planner

from .compat import LOG
from .options import LeapOptions
from .order import Ranker

IDLE, DECODING, PREFILLING = range(3)


@dataclass(slots=True)
class Plan:
    """One step's arrangement of the running requests."""

    order: Sequence[Any]
    gated: list[Any] = field(default_factory=list)
    contenders: list[Any] = field(default_factory=list)
    """Those whose steps without a slot are counted: who could decode, and who prefills but was gated."""
    promoted: int = 0


def next_step(scheduler: Any) -> int:
    """The number of the step to come, as vLLM counts them; 1 where it does not."""
    return int(getattr(scheduler, "current_step", 0)) + 1


def classes(running: Sequence[Any], max_model_len: int, step: int) -> bytes:
    """Who decodes, who prefills (also anew after a preemption), and for whom there is nothing to do in the next step."""
    found = bytearray()
    for request in running:
        computed, placeholders = request.num_computed_tokens, request.num_output_placeholders
        prompt = request.num_prompt_tokens
        left = request.num_tokens_with_spec + placeholders - computed
        # Its last token is under way already.
        ending = placeholders > 0 and computed + 2 - placeholders >= prompt + request.max_tokens
        # In an asynchronous pipeline its last step is still on the way through the ranks: vLLM passes over it by itself.
        under_way = step < getattr(request, "next_decode_eligible_step", 0)
        if left <= 0 or ending or under_way or computed >= max_model_len - 1:
            found.append(IDLE)
        elif computed >= prompt and request.num_tokens + placeholders - computed <= 1:
            found.append(DECODING)
        else:
            found.append(PREFILLING)
    return bytes(found)


def decoding(running: Sequence[Any], max_model_len: int, step: int) -> list[Any]:
    """Who decodes in the next step or could."""
    kinds = classes(running, max_model_len, step)
    return [request for request, kind in zip(running, kinds, strict=True) if kind == DECODING]


def pass_over(gated: Iterable[Any], step: int, held: list[tuple[Any, int]], *, by_step: bool) -> None:
    """Makes vLLM pass over requests in the step to come; adds to `held` what has to be taken back after it."""
    for request in gated:
        if by_step:
            request.next_decode_eligible_step = max(request.next_decode_eligible_step, step + 1)
        else:
            left = request.num_tokens_with_spec + request.num_output_placeholders - request.num_computed_tokens
            held.append((request, left))
            request.num_computed_tokens += left


def apart(running: Iterable[Any], most: int) -> list[Any]:
    """Residents of more adapters than a step may have, the first of them left out: without the planner, and without keys."""
    inside: set[int] = set()
    found = []
    for request in running:
        adapter = _adapter(request)
        if adapter is None or adapter in inside or len(inside) < most:
            inside |= set() if adapter is None else {adapter}
        else:
            found.append(request)
    return found


def drafts_by_row(scheduler: Any) -> bool:
    """Whether the model runner knows drafts by the rows of the step before alone, and the scheduler only their number."""
    drafts = getattr(scheduler, "num_spec_tokens", 0) > 0 and scheduler.scheduler_config.async_scheduling
    return bool(drafts and not getattr(scheduler, "use_v2_model_runner", False))


def forget_drafts(running: Iterable[Any], step_before: Collection[str]) -> None:
    """Takes away the drafts of those who were not in the step before: their places would be filled with no token at all."""
    for request in running:
        if request.spec_token_ids and request.request_id not in step_before:
            request.spec_token_ids = []


def planner_of(scheduler: Any, options: LeapOptions) -> Planner:
    """What plans the steps of a scheduler of vLLM."""
    most = scheduler.max_num_running_reqs
    if options.decode_slots is not None and options.decode_slots > most:
        LOG.warning("leap: decode_slots %d is more than max_num_seqs %d, which holds", options.decode_slots, most)
    return Planner(
        slots=min(options.decode_slots or most, most),
        step_tokens=scheduler.max_num_scheduled_tokens,
        block_size=scheduler.block_size,
        groups=max(len(scheduler.kv_cache_config.kv_cache_groups), 1),
        max_adapters=scheduler.lora_config.max_loras if scheduler.lora_config else None,
        hysteresis=options.hysteresis,
        wait_cap_steps=options.wait_cap_steps,
    )


class Slots:
    """Shows the running requests to the planner, step by step."""

    def __init__(self, ranker: Ranker, planner: Planner, max_model_len: int, *, adapters: bool = False) -> None:
        """`adapters`: whether those of a step are limited."""
        self._ranker = ranker
        self._planner = planner
        self._max_model_len = max_model_len
        self._adapters = adapters
        self.gated_requests = 0
        self.slot_waits = 0
        self.promotions = 0

    def plan(self, running: Sequence[Any], free_blocks: int, step: int) -> Plan:
        """The next step, which vLLM counts as `step`."""
        if not self._planner.look(len(running), free_blocks):
            return Plan(running)
        order, gated, contenders, promoted = self._planner.plan(*self._show(running, step))
        return Plan(
            [running[i] for i in order], [running[i] for i in gated], [running[i] for i in contenders], promoted
        )

    def settle(self, running: Sequence[Any], step: int) -> list[Any]:
        """Who must still be passed over when the slots are vLLM's own again: residents of more adapters than fit."""
        return [running[i] for i in self._planner.settle(*self._show(running, step))]

    def scheduled(self, plan: Plan, scheduled: dict[str, int]) -> None:
        """Takes note of who got to decode in the step that was planned."""
        self.promotions += plan.promoted
        self._planner.scheduled([request.request_id in scheduled for request in plan.contenders])

    def passed_over(self, residents: int) -> None:
        """Counts those who stayed resident in a step and were kept from it."""
        self.gated_requests = residents
        self.slot_waits += residents

    def _show(self, running: Sequence[Any], step: int) -> tuple[list[float], list[float]] | tuple[()]:
        """What the keys of the running requests are made of, where the plan goes by keys."""
        lives = [self._ranker.live(request) for request in running]
        adapters = [_adapter(request) for request in running] if self._adapters else None
        numbers = [live.number for live in lives]
        if not self._planner.wants_keys(numbers, classes(running, self._max_model_len, step), adapters):
            return ()
        return self._ranker.ln_remaining(running, lives), [live.aged for live in lives]


def _adapter(request: Any) -> int | None:
    adapter = getattr(request, "lora_request", None)
    return None if adapter is None else int(adapter.lora_int_id)
