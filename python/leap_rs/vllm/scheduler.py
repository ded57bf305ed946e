"""`LeapScheduler`: vLLM's own scheduler, whose waiting queue, decode slots and victims follow predicted lengths.

One name for the synchronous and the asynchronous engine. vLLM's `schedule` stays as it is and does all bookkeeping; what
it looks at is put in order before it runs. Unarmed, nothing is touched, and the schedule is stock vLLM's step for step.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import vllm
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

from leap_rs._leap import Evictor

from .admission import Room
from .brain import Brain, Watcher
from .compat import LOG, Engine, check, paused, seats
from .evicting import Evicting
from .guarded import Step, let_go
from .metrics import OF_THE_SCHEDULER, show_given_up
from .online import OnlineBrain
from .options import LeapOptions
from .order import Ranker, session
from .slots import Plan, Slots, apart, drafts_by_row, forget_drafts, next_step, pass_over, planner_of
from .start import brain_and_recorder, checked, prefills_only
from .waiting import WaitingQueue, first_by_urgency

_T = TypeVar("_T", bound="LeapScheduler")


class LeapScheduler:
    """What `--scheduler-cls` names; the object made is a scheduler of the kind that the engine runs with.

    `brain` and `clock` (seconds, never backwards) are for tests; vLLM gives neither.
    """

    leap_reads_table = True

    def __new__(cls: type[_T], *args: Any, **kwargs: Any) -> _T:
        kind: type[Any] = cls
        if cls is LeapScheduler:
            config = kwargs["vllm_config"] if "vllm_config" in kwargs else args[0]
            kind = _AsyncLeapScheduler if config.scheduler_config.async_scheduling else _SyncLeapScheduler
        made: _T = object.__new__(kind)
        return made


class _Levers(Evicting):
    """What both kinds share; stands before vLLM's class, so that `super()` is vLLM's."""

    vllm_config: Any
    requests: dict[str, Any]
    max_num_running_reqs: int

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
        options = checked(config)
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
        self._leap_given_up = False
        self._leap_plan = Plan(())
        self._leap_told: str | None = None
        self.leap_adapter_waits = 0
        # Residents whose adapters take no place in the step that runs or ran last.
        self.leap_uncounted: set[Any] = set()
        self.leap_promotions = 0
        # The time of the step that runs or ran last, counted from the start of the engine.
        self._leap_now = 0.0
        self._leap_shown: tuple[float, ...] = (0,) * len(OF_THE_SCHEDULER)
        planner = planner_of(self, options)
        self.leap_slots = Slots(self.leap, planner, self.max_model_len, adapters=bool(self.lora_config))
        self._leap_drafts_by_row = drafts_by_row(self)
        self.leap_evict = Evictor(options.evict_factor, options.evict_per_s)
        self.leap_queues: tuple[WaitingQueue, ...] = ()
        self._leap_preempted: set[str] = set()
        self.leap_recomputed_tokens = 0
        # Shadow touches nothing.
        acts = options.mode != "shadow" and options.has("admission")
        self.leap_room = Room(self, self.leap, options) if acts else None
        lets_in = self.leap_room.lets_in if self.leap_room is not None else None
        self.leap_guard = self.leap.guard
        if self.leap_options.has("queue") or acts:
            self.waiting = WaitingQueue(self.leap, options, lets_in=lets_in)
            self.leap_queues = (self.waiting,)
            if self._leap_engine.skipped_queue:
                self.skipped_waiting: Any = WaitingQueue(self.leap, options, lets_in=lets_in, holders_first=True)
                self.waiting.beside, self.skipped_waiting.beside = (self.skipped_waiting,), self.leap_queues
                self.leap_queues += (self.skipped_waiting,)
        learned = f"; {brain.learned()}" if isinstance(brain, OnlineBrain) else ""
        LOG.info("leap: mode %s, levers %s%s", options.mode, ", ".join(options.levers) or "none", learned)
        # An engine that goes on from a saved state may be armed before its first request.
        self._leap_follow(self.leap.armed)
        self._leap_show()

    # Requests come, are read, and go. vLLM's own part of each is run whatever becomes of the plugin's.

    def add_request(self, request: Any) -> None:
        self.leap_guard.call(self._leap_came, request)
        super().add_request(request)  # type: ignore[misc]

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        # Before vLLM sees the tokens: a request may end with this very step, and its row is part of its label.
        self.leap_guard.call(self._leap_read, model_runner_output)
        outputs = super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc]
        self.leap_guard.call(self._leap_forget_gone)
        return outputs

    def _preempt_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        self.leap_guard.call(self._leap_left, request)
        return super()._preempt_request(request, *args, **kwargs)

    def _free_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        self.leap_guard.call(self._leap_ended, request)
        return super()._free_request(request, *args, **kwargs)  # type: ignore[misc]

    def finish_requests(self, request_ids: Any, *args: Any, **kwargs: Any) -> Any:
        finished = super().finish_requests(request_ids, *args, **kwargs)  # type: ignore[misc]
        if request_ids is None:
            # All of them end where the engine is about to. During its shutdown it lets signals kill it, and where the one
            # that it was stopped by went to the whole group, as Ctrl-C's does, a second one comes from the server.
            self.leap_guard.call(self.leap.save)
        self.leap_guard.call(self._leap_forget_gone)
        return finished

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> Any:
        # Those who lose their blocks here do so for new weights and not for want of memory, which admission learns from.
        short, self._leap_evicting = set(self._leap_preempted), True
        try:
            return super().reset_prefix_cache(*args, **kwargs)  # type: ignore[misc]
        finally:
            self._leap_preempted, self._leap_evicting = short, False

    def shutdown(self) -> None:
        self.leap_guard.always(self.leap.close)
        super().shutdown()  # type: ignore[misc]

    def _leap_forget_gone(self) -> None:
        if not self.running:
            # Nobody may come for a long time, and the plan of the last step holds those that it was about.
            self._leap_plan, self.leap_uncounted = Plan(()), set()
        for queue in self.leap_queues:
            queue.forget_gone()

    def _leap_came(self, request: Any) -> None:
        if request.request_id not in self.requests:
            self.leap.arrived(request)
            if not session(request):
                self._leap_unread.add(request.request_id)

    def _leap_read(self, model_runner_output: Any) -> None:
        for request_id, row in (getattr(model_runner_output, "leap_rows", None) or {}).items():
            self.leap.state(request_id, row)
            if self.leap_room is not None:
                self.leap_room.learned(request_id)

    def _leap_left(self, request: Any) -> None:
        self.leap.preempted(request)
        self._leap_preempted.add(request.request_id)
        self._leap_drifting.append(request)
        if self.leap_room is not None:
            self.leap_room.left(request, preempted=not self._leap_evicting)

    def _leap_ended(self, request: Any) -> None:
        self._leap_unread.discard(request.request_id)
        self._leap_preempted.discard(request.request_id)
        ended = self.leap.finished(request)
        if self.leap_room is not None:
            self.leap_room.left(request, preempted=False)
            if ended is not None:
                self.leap_room.finished(ended)

    # One step.

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        step = Step()
        self.leap_guard.call(self._leap_before, step)
        if self.leap_guard.fault is not None:
            self._leap_give_up(step)
        try:
            output = super().schedule(*args, **kwargs)  # type: ignore[misc]
        finally:
            step.take_back(self)
        if step.aside:
            output.preempted_req_ids = {*(output.preempted_req_ids or ()), *(r.request_id for r in step.aside)}
        self.leap_guard.call(self._leap_after, output)
        return output

    def _leap_before(self, step: Step) -> None:
        """Puts what vLLM is about to look at in order."""
        self._leap_follow(self.leap.armed)
        self._leap_now = self.leap.now()
        # Those inside are known to admission control alone, those who wait to the queues.
        fresh = self.leap.fresh()
        if self.leap_room is not None:
            for request_id in fresh:
                self.leap_room.learned(request_id)
        drifting, self._leap_drifting = self._leap_drifting, []
        if self._leap_drafts_by_row and (self._leap_armed or self._leap_settling):
            forget_drafts(self.running, self.prev_step_scheduled_req_ids)
        self._leap_plan = Plan(())
        if self._leap_armed:
            self._leap_order(step, fresh, drifting)
        elif self._leap_settling:
            self._leap_settle()
        pass_over(self._leap_plan.gated, next_step(self), step.held, by_step=self._leap_engine.gate_by_step)
        self.leap_uncounted = set() if self._leap_engine.gated_adapters else set(self._leap_plan.gated)
        if self.leap_room is not None:
            self.leap_room.begin()

    def _leap_order(self, step: Step, fresh: Sequence[str], drifting: Sequence[Any]) -> None:
        version = self.leap.version
        for queue in self.leap_queues:
            queue.rescore(drifting, fresh, everybody=version != self._leap_version)
        self._leap_version = version
        self._leap_drifting = [
            r for r in drifting if r.status == RequestStatus.PREEMPTED and getattr(r, "num_in_flight_tokens", 0) > 0
        ]
        # Who gave way in a paused engine would not be let in again: a pause that waits for those inside would miss it.
        if self.leap_options.has("evict") and not paused(self):
            self._leap_evict(step)
        # With every seat taken vLLM does not look at those who wait.
        if len(self.running) < seats(self):
            for queue in self.leap_queues:
                queue.arrange(self._leap_now)
        if self.leap_options.has("slots"):
            self._leap_plan = self.leap_slots.plan(self.running, self._leap_free_blocks(), next_step(self))
            self.running[:] = self._leap_plan.order

    def _leap_after(self, output: Any) -> None:
        """Takes down what vLLM has made of it."""
        plan = self._leap_plan
        self.leap_slots.passed_over(sum(request.status == RequestStatus.RUNNING for request in plan.gated))
        recomputed = self._leap_recomputed(output) if self._leap_preempted else 0
        if self.leap_room is not None:
            self.leap_room.end(output.total_num_scheduled_tokens, recomputed)
        self._leap_mark(output)
        if self._leap_armed:
            if self.leap_options.has("slots"):
                self.leap_slots.scheduled(plan, output.num_scheduled_tokens)
            self.leap_promotions += sum(queue.admitted() for queue in self.leap_queues)
            self._leap_note_blocked(output)
        waiting = (
            len(self.waiting) + len(getattr(self, "skipped_waiting", ())) + len(getattr(self, "kv_holding_waiting", ()))
        )
        self.leap.aging.step(self._leap_now, waiting + self.leap_slots.gated_requests)
        self._leap_show()

    def _leap_give_up(self, step: Step) -> None:
        """Makes the schedule vLLM's own, whatever was half done when the fault came."""
        step.mend(self)
        if not self._leap_given_up:
            self._leap_given_up = True
            if self._leap_armed or self._leap_settling:
                # vLLM's order of admission is lost by now; that of arrival is closest to it.
                self.running.sort(key=lambda request: request.arrival_time)
            self._leap_armed = False
            let_go((*self.leap_queues, *((self.leap_room,) if self.leap_room is not None else ()), self.leap))
            self._leap_unread.clear()
            self._leap_preempted.clear()
            self._leap_drifting = []
            self._leap_plan = Plan(())
            self.leap_uncounted = set()
            if self.leap.metrics is not None:
                show_given_up(self.leap.metrics)
        if self._leap_drafts_by_row:
            forget_drafts(self.running, self.prev_step_scheduled_req_ids)
        if self.lora_config and self.leap_options.has("slots"):
            over = apart(self.running, self.lora_config.max_loras)
            pass_over(over, next_step(self), step.held, by_step=self._leap_engine.gate_by_step)

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

    def _leap_settle(self) -> None:
        """A step after disarming: the first, and as long as those once gated bring more adapters than a step may have."""
        over = self.leap_slots.settle(self.running, next_step(self))
        self._leap_settling = bool(over)
        self._leap_plan = Plan((), over)

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

    # Whose turn it is.

    def _select_waiting_queue_for_scheduling(self) -> Any:
        """Until 0.31 vLLM asks here which queue is next: by key, those that were skipped compete with all others."""
        found = self.leap_guard.call(self._leap_select)
        return super()._select_waiting_queue_for_scheduling() if found is None else found  # type: ignore[misc]

    def _leap_select(self) -> Any:
        by_key = self._leap_armed and self.leap_options.has("queue")
        return first_by_urgency(self.leap_queues) if by_key else None

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
