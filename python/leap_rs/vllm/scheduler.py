"""`LeapScheduler`: vLLM's own scheduler, whose waiting queue, decode slots and victims follow predicted lengths.

One name for the synchronous and the asynchronous engine. vLLM's `schedule` stays as it is and does all bookkeeping; what
it looks at is put in order before it runs. Unarmed, nothing is touched, and the schedule is stock vLLM's step for step.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import vllm
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.request_queue import RequestQueue
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

from leap_rs._leap import Evictor

from .admission import Room
from .brain import Brain, Watcher
from .compat import LOG, Engine, check, lacks_adapter, seats
from .metrics import OF_THE_SCHEDULER
from .options import LeapOptions, given, parse
from .order import Ranker
from .slots import Plan, Slots, decoding, planner_of
from .start import brain_and_recorder, prefills_only, refuse
from .waiting import WaitingQueue, first_by_urgency

RequestQueue.register(WaitingQueue)

_T = TypeVar("_T", bound="LeapScheduler")


class LeapScheduler:
    """What `--scheduler-cls` names; the object made is a scheduler of the kind that the engine runs with.

    `brain` and `clock` (seconds, never backwards) are for tests; vLLM gives neither.
    """

    def __new__(cls: type[_T], *args: Any, **kwargs: Any) -> _T:
        kind: type[Any] = cls
        if cls is LeapScheduler:
            config = kwargs["vllm_config"] if "vllm_config" in kwargs else args[0]
            kind = _AsyncLeapScheduler if config.scheduler_config.async_scheduling else _SyncLeapScheduler
        made: _T = object.__new__(kind)
        return made


class _Levers:
    """What both kinds share; stands before vLLM's class, so that `super()` is vLLM's."""

    vllm_config: Any
    lora_config: Any
    kv_cache_config: Any
    kv_cache_manager: Any
    running: list[Any]
    waiting: Any
    requests: dict[str, Any]
    block_size: int
    max_model_len: int
    max_num_running_reqs: int
    max_num_scheduled_tokens: int
    current_step: int
    prev_step_scheduled_req_ids: set[str]

    def __init__(
        self,
        *args: Any,
        brain: Brain | None = None,
        clock: Callable[[], float] = time.monotonic,
        **kwargs: Any,
    ) -> None:
        # All that can be refused is refused before vLLM opens anything.
        config = kwargs["vllm_config"] if "vllm_config" in kwargs else args[0]
        self._leap_engine: Engine = check(vllm, Scheduler, Request)
        options = parse({"leap": given(config)}) or LeapOptions()
        refuse(config, options)
        ends_early = prefills_only(config)
        if ends_early:
            LOG.info(
                "leap: a prefill instance ends every request after one token: nothing to order and nothing to learn"
            )
            options = options.model_copy(update={"mode": "shadow"})
        self.leap_options: LeapOptions = options
        super().__init__(*args, **kwargs)
        recorder = None
        if brain is None and ends_early:
            brain = Watcher()
        elif brain is None:
            brain, recorder = brain_and_recorder(config, options)
        self.leap: Ranker = Ranker(brain, options, clock, labels=not ends_early, recorder=recorder)
        self._leap_version = self.leap.version
        self._leap_armed = False
        self._leap_settling = False
        # Requests of which the hidden state is still to come.
        self._leap_unread: set[str] = set()
        # Preempted while a step was under way: its tokens still come, and change the key.
        self._leap_drifting: list[Any] = []
        self._leap_blocked: str | None = None
        self._leap_evicting = False
        self._leap_told: str | None = None
        self.leap_adapter_waits = 0
        # Residents whose adapters take no place in the step that runs or ran last.
        self.leap_uncounted: set[Any] = set()
        self.leap_promotions = 0
        self._leap_shown: tuple[float, ...] = (0,) * len(OF_THE_SCHEDULER)
        planner = planner_of(self, options)
        self.leap_slots = Slots(self.leap, planner, self.max_model_len, adapters=bool(self.lora_config))
        self.leap_evict = Evictor(options.evict_factor, options.evict_per_s)
        self.leap_queues: tuple[WaitingQueue, ...] = ()
        self._leap_preempted: set[str] = set()
        self.leap_recomputed_tokens = 0
        # Shadow touches nothing.
        acts = options.mode != "shadow" and options.has("admission")
        self.leap_room = Room(self, self.leap, options) if acts else None
        lets_in = self.leap_room.lets_in if self.leap_room is not None else None
        if self.leap_options.has("queue") or acts:
            self.waiting = WaitingQueue(self.leap, self.leap_options, lets_in=lets_in)
            self.leap_queues = (self.waiting,)
            if self._leap_engine.skipped_queue:
                self.skipped_waiting: Any = WaitingQueue(
                    self.leap, self.leap_options, lets_in=lets_in, holders_first=True
                )
                self.waiting.beside, self.skipped_waiting.beside = (self.skipped_waiting,), self.leap_queues
                self.leap_queues += (self.skipped_waiting,)
        # An engine that goes on from a saved state may be armed before its first request.
        self._leap_follow(self.leap.armed)
        self._leap_show()

    # Requests come, are read, and go.

    def add_request(self, request: Any) -> None:
        if request.request_id not in self.requests:
            self.leap.arrived(request)
            self._leap_unread.add(request.request_id)
        super().add_request(request)  # type: ignore[misc]

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        # Before vLLM sees the tokens: a request may end with this very step, and its row is part of its label.
        rows = getattr(model_runner_output, "leap_rows", None)
        for request_id, row in (rows or {}).items():
            self.leap.state(request_id, row)
            if self.leap_room is not None:
                self.leap_room.learned(request_id)
        return super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc]

    def _preempt_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        self.leap.preempted(request)
        self._leap_preempted.add(request.request_id)
        self._leap_drifting.append(request)
        if self.leap_room is not None:
            self.leap_room.left(request, preempted=not self._leap_evicting)
        return super()._preempt_request(request, *args, **kwargs)  # type: ignore[misc]

    def _free_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        self._leap_unread.discard(request.request_id)
        self._leap_preempted.discard(request.request_id)
        ended = self.leap.finished(request)
        if self.leap_room is not None:
            self.leap_room.left(request, preempted=False)
            if ended is not None:
                self.leap_room.finished(ended)
        return super()._free_request(request, *args, **kwargs)  # type: ignore[misc]

    def finish_requests(self, request_ids: Any, *args: Any, **kwargs: Any) -> Any:
        finished = super().finish_requests(request_ids, *args, **kwargs)  # type: ignore[misc]
        if request_ids is None:
            # All of them end where the engine is about to. During its shutdown it lets signals kill it, and where the one
            # that it was stopped by went to the whole group, as Ctrl-C's does, a second one comes from the server.
            self.leap.save()
        return finished

    def shutdown(self) -> None:
        self.leap.close()
        super().shutdown()  # type: ignore[misc]

    # One step.

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        self._leap_follow(self.leap.armed)
        now = self.leap.now()
        # Those inside are known to admission control alone, those who wait to the queues.
        fresh = self.leap.fresh()
        if self.leap_room is not None:
            for request_id in fresh:
                self.leap_room.learned(request_id)
        output = self._leap_step(now, fresh, args, kwargs)
        waiting = (
            len(self.waiting) + len(getattr(self, "skipped_waiting", ())) + len(getattr(self, "kv_holding_waiting", ()))
        )
        self.leap.aging.step(now, waiting + self.leap_slots.gated_requests)
        self._leap_show()
        return output

    def _leap_step(self, now: float, fresh: Sequence[str], args: Any, kwargs: Any) -> Any:
        drifting, self._leap_drifting = self._leap_drifting, []
        if not self._leap_armed:
            return self._leap_run([], [], args, kwargs) if not self._leap_settling else self._leap_settle(args, kwargs)
        version = self.leap.version
        for queue in self.leap_queues:
            queue.begin_step(now)
            queue.rescore(drifting, fresh, everybody=version != self._leap_version)
        self._leap_version = version
        self._leap_drifting = [
            r for r in drifting if r.status == RequestStatus.PREEMPTED and getattr(r, "num_in_flight_tokens", 0) > 0
        ]
        evicted = self._leap_evict(now) if self.leap_options.has("evict") else []
        plan = self._leap_plan() if self.leap_options.has("slots") else None
        output = self._leap_run(plan.gated if plan is not None else [], evicted, args, kwargs)
        if plan is not None:
            self.leap_slots.scheduled(plan, output.num_scheduled_tokens)
        # Those put back were only looked at: for a grammar that is not ready, at every step.
        self.leap_promotions += sum(r.status == RequestStatus.RUNNING for q in self.leap_queues for r in q.promoted)
        self._leap_note_blocked(output)
        return output

    def _leap_run(self, gated: list[Any], evicted: list[Any], args: Any, kwargs: Any) -> Any:
        """Runs vLLM's own step, in which it passes over `gated`; `evicted` come back into the queue after it."""
        held = self._leap_gate(gated)
        self.leap_uncounted = set() if self._leap_engine.gated_adapters else set(gated)
        room = self.leap_room
        if room is not None:
            room.begin()
        try:
            output = super().schedule(*args, **kwargs)  # type: ignore[misc]
        finally:
            for request, tokens in held:
                if request.status == RequestStatus.RUNNING:
                    request.num_computed_tokens -= tokens
            for request in evicted:
                self.waiting.prepend_request(request)
        if evicted:
            output.preempted_req_ids = {*(output.preempted_req_ids or ()), *(r.request_id for r in evicted)}
        self.leap_slots.passed_over(sum(request.status == RequestStatus.RUNNING for request in gated))
        recomputed = self._leap_recomputed(output) if self._leap_preempted else 0
        if room is not None:
            room.end(output.total_num_scheduled_tokens, recomputed)
        self._leap_mark(output)
        return output

    def _leap_recomputed(self, output: Any) -> int:
        """Tokens that those who come back in this step compute again, less what was still cached."""
        back = self._leap_preempted & output.num_scheduled_tokens.keys()
        self._leap_preempted -= back
        recomputed = 0
        for request_id in back:
            request = self.requests[request_id]
            cached = request.num_computed_tokens - output.num_scheduled_tokens[request_id]
            recomputed += max(request.num_tokens - cached, 0)
        self.leap_recomputed_tokens += recomputed
        return recomputed

    def _leap_settle(self, args: Any, kwargs: Any) -> Any:
        """A step after disarming: the first, and as long as those once gated bring more adapters than a step may have."""
        apart = self.leap_slots.settle(self.running)
        self._leap_settling = bool(apart)
        return self._leap_run(apart, [], args, kwargs)

    def _leap_follow(self, armed: bool) -> None:
        if armed == self._leap_armed:
            return
        self._leap_armed = armed
        self._leap_version = self.leap.version
        for queue in self.leap_queues if self.leap_options.has("queue") else ():
            queue.arm(armed)
        if not armed:
            self._leap_settling = True
            # vLLM's order of admission is lost by now; that of arrival is closest to it.
            self.running.sort(key=lambda request: self.leap.live(request).number)
        LOG.info("leap: %s", "armed: the order follows predicted lengths" if armed else "first come first served")

    def _leap_plan(self) -> Plan:
        plan = self.leap_slots.plan(self.running, self._leap_free_blocks())
        self.running[:] = plan.order
        return plan

    def _leap_gate(self, gated: Iterable[Any]) -> list[tuple[Any, int]]:
        """Makes vLLM pass over requests in the next step; returns what has to be taken back after it."""
        held = []
        for request in gated:
            if self._leap_engine.gate_by_step:
                # The step to come is current_step + 1.
                after = self.current_step + 2
                request.next_decode_eligible_step = max(request.next_decode_eligible_step, after)
            else:
                left = request.num_tokens_with_spec + request.num_output_placeholders - request.num_computed_tokens
                request.num_computed_tokens += left
                held.append((request, left))
        return held

    def _leap_free_blocks(self) -> int:
        return int(self.kv_cache_manager.block_pool.get_num_free_blocks())

    def _leap_show(self) -> None:
        """Writes the metrics that are the scheduler's where they have changed: a step has no time to lose."""
        # vLLM's own count of requests that it passed over, under the name that its version has.
        put_off = self.skipped_waiting if self._leap_engine.skipped_queue else getattr(self, "deferred_waiting", ())
        slots, armed = self.leap_slots, self._leap_armed
        promotions, evictions = slots.promotions + self.leap_promotions, self.leap_evict.evicted
        holds, ratio = self.leap_room.shown() if self.leap_room is not None else (0, math.nan)
        counts: tuple[float, ...] = (
            *(not armed, armed, slots.gated_requests, slots.slot_waits, promotions, evictions, len(put_off)),
            *(holds, self.leap_recomputed_tokens, ratio),
        )
        if self.leap.metrics is not None and counts != self._leap_shown:
            for (name, value), count, shown in zip(OF_THE_SCHEDULER, counts, self._leap_shown, strict=True):
                if count != shown:
                    self.leap.metrics.set(name, count, value)
            self._leap_shown = counts

    # Evictions.

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

    def _leap_evict(self, now: float) -> list[Any]:
        """Preempts for the first of the queue; those who gave way stand aside until vLLM has gone through the queue."""
        head = self._leap_first() if self._leap_blocked is not None and self.leap_evict.ready(now) else None
        if head is None or head.request_id != self._leap_blocked:
            return []
        residents = decoding(self.running, self.max_model_len)
        groups = max(len(self.kv_cache_config.kv_cache_groups), 1)
        indices = self.leap_evict.victims(
            [(self.leap.key(r), self.leap.live(r).number, self._leap_own_blocks(r)) for r in residents],
            key=self.leap.key(head),
            blocks=-(-(head.num_tokens + 1) // self.block_size) * groups,
            seat=len(self.running) >= seats(self),
            free_blocks=self._leap_free_blocks(),
            now_s=now,
        )
        victims = [residents[i] for i in indices]
        if not victims:
            return []
        gone = set(victims)
        self.running[:] = [request for request in self.running if request not in gone]
        self._leap_evicting = True
        for request in victims:
            self._preempt_request(request, time.monotonic())
            self.waiting.remove_request(request)
            # The V1 runner keeps rows of the step before; this request is not one of them any more.
            self.prev_step_scheduled_req_ids.discard(request.request_id)
        self._leap_evicting = False
        return victims

    def _leap_own_blocks(self, request: Any) -> int:
        groups = self.kv_cache_manager.get_blocks(request.request_id).blocks
        return sum(block.ref_cnt == 1 and not block.is_null for blocks in groups for block in blocks)

    def _select_waiting_queue_for_scheduling(self) -> Any:
        """Until 0.31 vLLM asks here which queue is next: by key, those that were skipped compete with all others."""
        if not (self._leap_armed and self.leap_options.has("queue")):
            return super()._select_waiting_queue_for_scheduling()  # type: ignore[misc]
        return first_by_urgency(self.leap_queues)

    def _leap_first(self) -> Any:
        """Who is next for admission, None if nobody waits."""
        by_key = self._leap_armed and self.leap_options.has("queue")
        queue = first_by_urgency(self.leap_queues) if by_key else getattr(self, "skipped_waiting", None) or self.waiting
        return queue.peek_request() if queue else None

    # The way to the hidden states.

    def _leap_mark(self, output: Any) -> None:
        """Tells the worker where the last prompt tokens of this step are: {request: index among its tokens}."""
        scheduled: dict[str, int] = output.num_scheduled_tokens
        positions = {}
        for request_id in self._leap_unread & scheduled.keys():
            request, tokens = self.requests[request_id], scheduled[request_id]
            position = request.num_prompt_tokens - 1 - (request.num_computed_tokens - tokens)
            if 0 <= position < tokens:
                positions[request_id] = position
        self._leap_unread.difference_update(positions)
        output.leap_positions = positions


class _SyncLeapScheduler(_Levers, LeapScheduler, Scheduler):  # type: ignore[misc]
    """For the synchronous engine."""


class _AsyncLeapScheduler(_Levers, LeapScheduler, AsyncScheduler):  # type: ignore[misc]
    """For the asynchronous engine."""
