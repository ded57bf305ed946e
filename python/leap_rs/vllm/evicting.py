"""The lever evict: who gives way to the first of the queue, and whether that one was refused a seat or blocks at all."""

from __future__ import annotations

import time
from typing import Any

from vllm.v1.request import RequestStatus

from leap_rs._leap import Evictor

from .compat import LOG, lacks_adapter, seats
from .guarded import Step
from .options import LeapOptions
from .order import Ranker
from .slots import decoding, next_step
from .waiting import WaitingQueue


class Evicting:
    """The part of the scheduler that preempts for the first of the queue."""

    lora_config: Any
    kv_cache_config: Any
    kv_cache_manager: Any
    running: list[Any]
    waiting: Any
    block_size: int
    max_model_len: int
    max_num_scheduled_tokens: int
    prev_step_scheduled_req_ids: set[str]
    leap: Ranker
    leap_options: LeapOptions
    leap_evict: Evictor
    leap_queues: tuple[WaitingQueue, ...]
    leap_adapter_waits: int
    leap_uncounted: set[Any]
    _leap_armed: bool
    _leap_now: float
    _leap_blocked: str | None
    _leap_evicting: bool
    _leap_told: str | None
    _preempt_request: Any

    def _leap_note_blocked(self, output: Any) -> None:
        """Remembers the first of the queue if it was refused a seat or blocks, and not just tokens of this step."""
        self._leap_note_adapter()
        budget_left = output.total_num_scheduled_tokens < self.max_num_scheduled_tokens
        head = self._leap_first() if budget_left else None
        admissible = head is not None and head.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED)
        self._leap_blocked = head.request_id if head is not None and admissible else None

    def _leap_note_adapter(self) -> None:
        """Counts the steps in which the first of the queue waits for an adapter's place, which no key can give it."""
        first = self._leap_first() if self.lora_config else None
        if first is None or not lacks_adapter(self, first, self.leap_uncounted):
            return
        self.leap_adapter_waits += 1
        if first.request_id != self._leap_told:
            self._leap_told = first.request_id
            LOG.info("leap: request %s is next but waits for its LoRA adapter: max_loras are in use", first.request_id)

    def _leap_evict(self, step: Step) -> None:
        """Preempts for the first of the queue; those who gave way stand aside until vLLM has gone through the queue."""
        now = self._leap_now
        head = self._leap_first() if self._leap_blocked is not None and self.leap_evict.ready(now) else None
        if head is None or head.request_id != self._leap_blocked:
            return
        residents = decoding(self.running, self.max_model_len, next_step(self))
        indices = self.leap_evict.victims(
            [(self.leap.key(r), self.leap.live(r).number, self._leap_own_blocks(r)) for r in residents],
            key=self.leap.key(head),
            blocks=-(-(head.num_tokens + 1) // self.block_size) * self._leap_groups(),
            seat=len(self.running) >= seats(self),
            free_blocks=self._leap_free_blocks(),
            now_s=now,
        )
        self._leap_evicting = True
        for request in (residents[i] for i in indices):
            step.aside.append(request)
            self.running.remove(request)
            self._preempt_request(request, time.monotonic())
            self.waiting.remove_request(request)
            # The V1 runner keeps rows of the step before; this request is not one of them any more.
            self.prev_step_scheduled_req_ids.discard(request.request_id)
        self._leap_evicting = False

    def _leap_own_blocks(self, request: Any) -> int:
        groups = self.kv_cache_manager.get_blocks(request.request_id).blocks
        return sum(block.ref_cnt == 1 and not block.is_null for blocks in groups for block in blocks)

    def _leap_first(self) -> Any:
        """Who is next for admission, None if nobody waits."""
        if self._leap_armed and self.leap_options.has("queue"):
            firsts = [first for queue in self.leap_queues if (first := queue.first(self._leap_now)) is not None]
            return min(firsts, key=lambda first: first[0])[1] if firsts else None
        queue = getattr(self, "skipped_waiting", None) or self.waiting
        return queue.peek_request() if queue else None

    def _leap_free_blocks(self) -> int:
        return int(self.kv_cache_manager.block_pool.get_num_free_blocks())

    def _leap_groups(self) -> int:
        return max(len(self.kv_cache_config.kv_cache_groups), 1)
