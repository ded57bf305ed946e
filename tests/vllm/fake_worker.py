"""vLLM's real scheduler and KV-cache manager under a worker that computes nothing: it hands out tokens known beforehand.

The engine's loop is that of `EngineCore`: synchronous, or asynchronous with one step composed while another one runs. Time
is virtual. Every step is checked here for what must hold of any schedule.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

# Before vLLM: it says how much vLLM logs.
from fake_setup import BLOCK, EOS, Adapter, Grammars, Job, Setup, compile_grammar, config_of, grammar_of

with warnings.catch_warnings():
    # vLLM's own, and those of what it imports.
    warnings.simplefilter("ignore")
    import torch
    from vllm.sampling_params import SamplingParams
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput, ModelRunnerOutput
    from vllm.v1.request import Request, RequestStatus

    from leap_rs.vllm import LeapScheduler, slots

DRAFT = 9
"""Whatever a draft is, the worker knows whether it is right."""


@dataclass
class Step:
    """What one step was made of."""

    now: float
    scheduled: dict[str, int]
    decoding: tuple[str, ...]
    """Those scheduled that decode: they were neither admitted nor prefilling."""
    gated: tuple[str, ...]
    admitted: tuple[str, ...]
    waiting: tuple[str, ...]
    """Who waited before the step, as vLLM would iterate over them."""
    preempted: tuple[str, ...]
    running: int
    generated: dict[str, int]
    """Tokens of those who run or wait before the step, those under way included."""


@dataclass
class Outcome:
    """What came out of a run."""

    tokens: dict[str, list[int]] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    finish_s: dict[str, float] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)

    @property
    def finish_order(self) -> list[str]:
        return sorted(self.finish_s, key=lambda name: self.finish_s[name])


class FakeEngine:
    """One engine: a scheduler, and the loop around it."""

    def __init__(self, setup: Setup, brain: Any = None) -> None:
        self.setup = setup
        self.now = 0.0
        group = KVCacheGroupSpec(
            ["layer"], FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
        )
        arguments: dict[str, Any] = {
            "vllm_config": config_of(setup),
            "kv_cache_config": KVCacheConfig(num_blocks=setup.blocks, kv_cache_tensors=[], kv_cache_groups=[group]),
            "structured_output_manager": Grammars(),
            "block_size": BLOCK,
            "log_stats": setup.log_stats,
        }
        self.scheduler: Any
        with patch.dict(os.environ, VLLM_USE_V2_MODEL_RUNNER=str(int(setup.v2_runner))):
            if setup.leap is None:
                self.scheduler = (AsyncScheduler if setup.async_scheduling else Scheduler)(**arguments)
            else:
                self.scheduler = LeapScheduler(**arguments, brain=brain, clock=lambda: self.now)
        init_none_hash(_hash)
        self._hasher = get_request_block_hasher(BLOCK, _hash) if setup.prefix_caching else None
        self.free_blocks = self._free()
        self.jobs: dict[str, Job] = {}
        self.added_s: dict[str, float] = {}
        self.outcome = Outcome()
        # When the loads under way have begun.
        self.loads: dict[str, float] = {}
        # With drafts: tokens that the worker has made of each request, and who was in its last batch.
        self.made: Counter[str] = Counter()
        self.batch: set[str] = set()
        self.lost_drafts: list[str] = []
        """Who was to be given drafts that the worker has not: it finds them by the rows of its last batch."""

    def force_old_gate(self) -> None:
        """Passes over requests as it is done where they cannot be told the step before which they do not decode."""
        self.scheduler._leap_engine = replace(self.scheduler._leap_engine, gate_by_step=False)

    def queued(self) -> list[Any]:
        """Those who wait, in whichever queues this version of vLLM has."""
        names = ("skipped_waiting", "kv_holding_waiting", "waiting")
        return [request for name in names for request in getattr(self.scheduler, name, ())]

    def _free(self) -> int:
        return int(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    def add(self, job: Job) -> None:
        sampling = SamplingParams(temperature=0.0, max_tokens=job.max_tokens, ignore_eos=job.ignore_eos)
        sampling._eos_token_id = EOS
        request = Request(
            request_id=job.name,
            prompt_token_ids=list(job.prompt),
            sampling_params=sampling,
            pooling_params=None,
            arrival_time=job.arrival_s,
            block_hasher=self._hasher,
            lora_request=None if job.lora is None else Adapter(job.lora),
        )
        if job.grammar_s is not None:
            request.structured_output_request = grammar_of(ready=job.grammar_s <= self.now)
            request.status = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
        self.jobs[job.name] = job
        self.added_s[job.name] = self.now
        self.outcome.tokens[job.name] = []
        self.scheduler.add_request(request)

    def abort(self, name: str) -> None:
        request = self.scheduler.requests.get(name)
        if request is not None and not request.is_finished():
            self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
            self._ended(name, "abort")

    def _ended(self, name: str, reason: str) -> None:
        assert name not in self.outcome.reasons, f"{name} ended twice"
        self.outcome.reasons[name] = reason
        self.outcome.finish_s[name] = self.now

    def run(
        self,
        jobs: Iterable[Job],
        *,
        cost: Callable[[Step], float] = lambda _: 1.0,
        watch: Callable[[FakeEngine, Step], None] | None = None,
        most_steps: int = 20_000,
    ) -> Outcome:
        """Serves jobs until all have ended; `watch` sees every step right after it was composed."""
        arrivals = deque(sorted(jobs, key=lambda job: job.arrival_s))
        aborts = sorted((j.abort_s, j.name) for j in arrivals if j.abort_s is not None)
        compiling = [job for job in arrivals if job.grammar_s is not None]
        flying: deque[tuple[Any, ModelRunnerOutput, float]] = deque()
        # As many batches as vLLM has under way.
        depth = self.setup.pipeline + (1 if self.setup.async_scheduling else 0)
        busy_s = 0.0
        for _ in range(most_steps):
            while arrivals and arrivals[0].arrival_s <= self.now:
                self.add(arrivals.popleft())
            while aborts and aborts[0][0] <= self.now:
                self.abort(aborts.pop(0)[1])
            for job in [job for job in compiling if job.grammar_s is not None and job.grammar_s <= self.now]:
                compiling.remove(job)
                if (request := self.scheduler.requests.get(job.name)) is not None:
                    compile_grammar(request.structured_output_request)
            if not (self.scheduler.has_requests() or flying):
                if not arrivals:
                    return self.outcome
                self.now = arrivals[0].arrival_s
                continue
            step = None
            if self.scheduler.has_requests():
                step, output, result = self._compose()
                if watch is not None:
                    watch(self, step)
                # The worker takes one step after the other.
                busy_s = max(busy_s, self.now) + cost(step)
                flying.append((output, result, busy_s))
            if len(flying) >= depth or step is None or not step.scheduled:
                output, result, end_s = flying.popleft()
                self.now = max(self.now, end_s)
                self._take(output, result)
        raise AssertionError(f"still {len(self.scheduler.requests)} requests after {most_steps} steps")

    def _compose(self) -> tuple[Step, Any, ModelRunnerOutput]:
        scheduler = self.scheduler
        could_decode = slots.decoding(scheduler.running, self.setup.max_model_len, slots.next_step(scheduler))
        running = {request.request_id for request in scheduler.running}
        waiting = tuple(request.request_id for request in self.queued())
        generated = {
            request.request_id: request.num_output_tokens + request.num_output_placeholders
            for request in (*scheduler.running, *self.queued())
        }
        output = scheduler.schedule()
        scheduled = dict(output.num_scheduled_tokens)
        decoding = [request.request_id for request in could_decode]
        step = Step(
            now=self.now,
            scheduled=scheduled,
            decoding=tuple(name for name in decoding if name in scheduled and name in running),
            gated=tuple(name for name in decoding if name not in scheduled),
            admitted=tuple(name for name in scheduled if name not in running),
            waiting=waiting,
            preempted=tuple(output.preempted_req_ids or ()),
            running=len(scheduler.running),
            generated=generated,
        )
        self.outcome.steps.append(step)
        assert output.total_num_scheduled_tokens == sum(scheduled.values()) <= self.setup.max_num_batched_tokens
        assert len(scheduler.running) <= self.setup.max_num_seqs
        assert len({request.request_id for request in scheduler.running}) == len(scheduler.running)
        ids = list(scheduled)
        sampled = []
        for name in ids:
            request = scheduler.requests[name]
            assert request.num_computed_tokens >= 0
            if request.is_prefill_chunk:
                sampled.append([])
            elif self.setup.drafts > 0:
                sampled.append(self._accepted(request, output.scheduled_spec_decode_tokens.get(name, ())))
            else:
                sampled.append([self.jobs[name].token(request.num_computed_tokens - request.num_prompt_tokens)])
        self.batch = set(ids)
        result = ModelRunnerOutput(
            req_ids=ids, req_id_to_index={name: i for i, name in enumerate(ids)}, sampled_token_ids=sampled
        )
        if self.setup.remote_kv_s is not None:
            result.kv_connector_output = self._delivered(self.setup.remote_kv_s)
        positions = getattr(output, "leap_positions", {})
        for name, position in positions.items():
            request = scheduler.requests[name]
            # Of a first prefill the step's last token is the prompt's last one.
            assert position == scheduled[name] - 1 or request.num_preemptions > 0
            assert request.num_computed_tokens - scheduled[name] + position == len(self.jobs[name].prompt) - 1
        result.leap_rows = dict.fromkeys(positions, (self.now,))
        return step, output, result

    def _accepted(self, request: Any, drafted: Sequence[int]) -> list[int]:
        """The next token of a request, and those of its drafts that are right: known to the scheduler only later."""
        name, drafts = request.request_id, len(drafted)
        assert request.num_preemptions == 0
        # A synchronous scheduler has the drafts themselves.
        if -1 in drafted and name not in self.batch:
            self.lost_drafts.append(name)
            drafts = 0
        start = self.made[name]
        self.made[name] += 1 + (start * 7 + len(name)) % (drafts + 1)
        return [self.jobs[name].token(i) for i in range(start, self.made[name])]

    def _delivered(self, takes_s: float) -> KVConnectorOutput:
        """Whose remote KV has come with this step."""
        loading = self.scheduler.connector.loading
        for name in loading:
            self.loads.setdefault(name, self.now)
        done = {name for name in loading if self.now - self.loads[name] >= takes_s}
        loading -= done
        return KVConnectorOutput(finished_recving=done)

    def _take(self, output: Any, result: ModelRunnerOutput) -> None:
        for outputs in self.scheduler.update_from_output(output, result).values():
            for item in outputs.outputs:
                assert item.request_id not in self.outcome.reasons, f"{item.request_id} spoke after its end"
                self.outcome.tokens[item.request_id] += item.new_token_ids
                if item.finish_reason is not None:
                    self._ended(item.request_id, str(item.finish_reason))

        if self.setup.drafts > 0 and not self.setup.async_scheduling:
            self.scheduler.update_draft_token_ids(
                DraftTokenIds(result.req_ids, [[DRAFT] * self.setup.drafts for _ in result.req_ids])
            )

    def check_end(self) -> None:
        """Everything that must hold once all requests have ended: each once, with its tokens, all blocks returned."""
        scheduler = self.scheduler
        assert not scheduler.requests
        assert not scheduler.running
        assert not self.queued()
        assert scheduler.get_request_counts() == (0, 0)
        assert self._free() == self.free_blocks
        for name, job in self.jobs.items():
            got, reason = self.outcome.tokens[name], self.outcome.reasons[name]
            if reason == "abort":
                assert job.abort_s is not None
                assert got == job.output[: len(got)]
            else:
                assert got == job.output, f"{name}: {len(got)} tokens of {len(job.output)}"
                assert reason == ("stop" if job.length <= job.max_tokens else "length")


def _hash(value: Any) -> bytes:
    return hashlib.sha256(pickle.dumps(value)).digest()
