"""Faults of schedulers from the public record, on vLLM's own scheduler."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("vllm.version")

from fake_setup import VERSION, Job, Oracle, Setup, prompt_of
from fake_worker import FakeEngine, Step

pytestmark = pytest.mark.vllm

BOTH = pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])
LEAP = {"mode": "armed", "levers": ["queue", "slots"], "aging_rate": 0.05, "memory_weight": 1.0}


def grammar_mix(compiled_s: float) -> list[Job]:
    """Sixteen requests, every second one with a grammar, as in the public reports of servers that hung."""
    rng = random.Random(24)
    shape = [(8, 8), (30, 200), (40, 60), (6, 24)]
    return [
        Job(
            f"r{i}",
            0.0,
            prompt_of(rng, 6),
            length=shape[i % 4][0],
            max_tokens=shape[i % 4][1],
            grammar_s=compiled_s if i % 2 else None,
        )
        for i in range(16)
    ]


@BOTH
@pytest.mark.parametrize("compiled_s", [0.0, 1.0, 30.0, 1000.0])
@pytest.mark.parametrize("levers", [["queue", "slots"], ["queue", "admission"]], ids="+".join)
def test_24_requests_that_wait_for_a_grammar_all_end(
    async_scheduling: bool, compiled_s: float, levers: list[str]
) -> None:
    jobs = grammar_mix(compiled_s)
    leap = {**LEAP, "levers": levers}
    engine = FakeEngine(Setup(max_num_seqs=2, async_scheduling=async_scheduling, leap=leap), Oracle(jobs))
    engine.run(jobs)
    engine.check_end()
    assert len(engine.outcome.reasons) == 16
    assert engine.scheduler.leap_guard.fault is None


@BOTH
def test_24_once_its_grammar_is_ready_a_request_competes_by_its_key(async_scheduling: bool) -> None:
    jobs = grammar_mix(20.0)
    engine = FakeEngine(Setup(max_num_seqs=1, async_scheduling=async_scheduling, leap=LEAP), Oracle(jobs))
    engine.run(jobs)
    engine.check_end()
    order = [name for step in engine.outcome.steps for name in step.admitted]
    when = {name: step.now for step in engine.outcome.steps for name in step.admitted}
    lengths = {job.name: job.length for job in jobs}
    # All arrive at once and have prompts of one length: the shortest first, among those that were ready.
    early = [name for name in order if when[name] < 20.0]
    late = [name for name in order if when[name] >= 20.0]
    assert [lengths[name] for name in early] == sorted(lengths[name] for name in early)
    assert [lengths[name] for name in late] == sorted(lengths[name] for name in late)
    assert all(not (int(name[1:]) % 2) for name in early)
    # A short one with a grammar passes long ones without.
    assert order.index("r3") < order.index("r2")


@BOTH
def test_24_aborting_one_that_waits_for_its_grammar_leaves_no_entry(async_scheduling: bool) -> None:
    jobs = grammar_mix(50.0)
    jobs[1] = replace(jobs[1], abort_s=10.0)
    engine = FakeEngine(Setup(max_num_seqs=2, async_scheduling=async_scheduling, leap=LEAP), Oracle(jobs))
    seen = []

    def watch(engine: FakeEngine, step: Step) -> None:
        scheduler = engine.scheduler
        queued = [request.request_id for queue in scheduler.leap_queues for request in queue]
        assert len(queued) == len(set(queued))
        running, waiting = scheduler.get_request_counts()
        # Every request that has not ended is in one of vLLM's own counts.
        assert running + waiting == len(scheduler.requests)
        assert waiting == len(queued)
        seen.append("r1" in queued)
        assert ("r1" in queued) is (step.now < 10.0)

    engine.run(jobs, watch=watch)
    engine.check_end()
    assert True in seen
    assert False in seen


def test_24_the_counts_of_vllms_own_metrics_include_both_kinds_of_waiting() -> None:
    jobs = grammar_mix(1e9)
    engine = FakeEngine(Setup(max_num_seqs=2, leap=LEAP), Oracle(jobs))
    for job in jobs:
        engine.add(job)
    engine.scheduler.schedule()
    stats = engine.scheduler.make_stats()
    assert stats.num_running_reqs == 2
    assert stats.num_waiting_reqs + stats.num_skipped_waiting_reqs == 14
    assert engine.scheduler.get_request_counts() == (2, 14)


def memory_heavy(cases: Path) -> list[Job]:
    rng = random.Random(25)
    rows = [line.split(",") for line in (cases / "25-memory_heavy_head.csv").read_text().split()[1:]]
    return [
        Job(f"r{i}", float(arrival), prompt_of(rng, int(prompt)), length=int(output), max_tokens=int(output))
        for i, (arrival, prompt, output) in enumerate(rows)
    ]


@BOTH
def test_25_a_short_answer_to_a_huge_prompt_blocks_as_in_vllm_and_is_never_passed_by(
    async_scheduling: bool, cases: Path
) -> None:
    """20,480 tokens of KV cache: the first one's 8,192 and the second's 16,384 do not fit together.

    By key the second is first also under the memory term (8 tokens after 16k against 512 after 1k), so the order is that
    of arrival, and the schedule must be stock vLLM's: the queue stops at the first that does not fit. Nobody bypasses it.
    """
    jobs = memory_heavy(cases)
    setup = Setup(
        max_num_seqs=256,
        max_num_batched_tokens=8192,
        max_model_len=32768,
        blocks=20480 // 16,
        async_scheduling=async_scheduling,
        prefix_caching=False,
    )
    outcomes = []
    for leap in (None, {**LEAP, "levers": ["queue"]}):
        engine = FakeEngine(replace(setup, leap=leap), Oracle(jobs))
        engine.run(jobs, cost=lambda _: 0.02)
        engine.check_end()
        outcomes.append(engine.outcome)
    stock, ours = outcomes
    assert [step.scheduled for step in ours.steps] == [step.scheduled for step in stock.steps]
    admitted = {name: step.now for step in ours.steps for name in step.admitted}
    assert admitted["r1"] >= ours.finish_s["r0"]
    assert all(admitted[f"r{i}"] >= admitted["r1"] for i in range(2, 10))


@BOTH
def test_25_where_the_memory_term_puts_the_small_ones_first_the_huge_one_waits_no_longer_than_its_bound(
    async_scheduling: bool, cases: Path
) -> None:
    jobs = memory_heavy(cases)
    # Short answers to small prompts keep coming: 8 ln units of memory and length are worth so many seconds of aging.
    rng = random.Random(1)
    stream = [Job(f"s{i}", 2.0 + i * 0.5, prompt_of(rng, 64), length=8, max_tokens=8) for i in range(400)]
    setup = Setup(
        max_num_seqs=4,
        max_num_batched_tokens=8192,
        max_model_len=32768,
        blocks=20480 // 16,
        async_scheduling=async_scheduling,
        prefix_caching=False,
        leap={**LEAP, "levers": ["queue"]},
    )
    engine = FakeEngine(setup, Oracle([*jobs, *stream]))
    engine.run([*jobs, *stream], cost=lambda _: 0.02)
    engine.check_end()
    admitted = {name: step.now for step in engine.outcome.steps for name in step.admitted}
    # ln((16384 + 4) / (64 + 4)) / 0.05 = 109.7 s: who came later than that after it cannot have passed it.
    overtook = [job.arrival_s for job in stream if admitted[job.name] < admitted["r1"]]
    assert max(overtook, default=0.0) <= jobs[1].arrival_s + 109.7 + 1.0


@BOTH
def test_28_a_request_that_waits_for_an_adapter_is_told_and_never_takes_a_place_that_is_not_there(
    async_scheduling: bool,
) -> None:
    """One adapter at a time, and a stream of short requests of adapter 1 that keeps two of them active."""
    rng = random.Random(28)
    jobs = [Job(f"a{i}", i * 5.0, prompt_of(rng, 4), length=12, max_tokens=12, lora=1) for i in range(60)]
    jobs.append(Job("b", 7.0, prompt_of(rng, 4), length=5, max_tokens=5, lora=2))
    setup = Setup(max_num_seqs=4, max_loras=1, async_scheduling=async_scheduling, leap={**LEAP, "aging_rate": 1.0})
    engine = FakeEngine(setup, Oracle(jobs))

    def watch(engine: FakeEngine, step: Step) -> None:
        assert len({engine.jobs[name].lora for name in step.scheduled}) <= 1

    engine.run(jobs, watch=watch)
    engine.check_end()
    admitted = {name: step.now for step in engine.outcome.steps for name in step.admitted}
    # It had the best key all the time, and no place: that is what the counter says.
    assert admitted["b"] >= max(engine.outcome.finish_s[f"a{i}"] for i in range(59))
    assert engine.scheduler.leap_adapter_waits > 200


@BOTH
@pytest.mark.parametrize("cap", [None, 8])
def test_28_gated_residents_do_not_bring_more_adapters_into_a_step_than_there_is_room_for(
    async_scheduling: bool, cap: int | None
) -> None:
    """vLLM asserts that the adapters of a step fit, and until 0.32 counts no gated one's, which would come on top."""
    rng = random.Random(5)
    jobs = [
        Job(f"r{i}", i * 1.0, prompt_of(rng, 40), length=rng.randint(5, 60), max_tokens=99, lora=1 + i % 4)
        for i in range(40)
    ]
    leap = {**LEAP, "decode_slots": 4, "wait_cap_steps": cap, "hysteresis": 1.0}
    setup = Setup(max_num_seqs=10, max_loras=2, async_scheduling=async_scheduling, leap=leap)
    engine = FakeEngine(setup, Oracle(jobs))
    held = []

    def watch(engine: FakeEngine, step: Step) -> None:
        assert len({engine.jobs[name].lora for name in step.scheduled}) <= 2
        held.append(len({request.lora_request.lora_int_id for request in engine.scheduler.running}))

    engine.run(jobs, watch=watch)
    engine.check_end()
    assert (max(held) > 2) == (VERSION < (0, 33))


@BOTH
def test_28_a_gated_residents_adapter_has_a_place_from_0_33_on(async_scheduling: bool) -> None:
    """Both seats are taken, by one with an adapter that is gated and one without: who is next waits for a seat, or for both."""
    rng = random.Random(6)
    jobs = [
        Job("gated", 0.0, prompt_of(rng, 8), length=80, max_tokens=80, lora=1),
        Job("decodes", 1.0, prompt_of(rng, 8), length=40, max_tokens=40),
        Job("next", 5.0, prompt_of(rng, 8), length=10, max_tokens=10, lora=2),
    ]
    leap = {**LEAP, "decode_slots": 1, "wait_cap_steps": None, "hysteresis": 1.0}
    engine = FakeEngine(
        Setup(max_num_seqs=2, max_loras=1, async_scheduling=async_scheduling, leap=leap, prefix_caching=False),
        Oracle(jobs),
    )
    waits = []

    def watch(engine: FakeEngine, step: Step) -> None:
        if "decodes" in step.scheduled and "gated" not in step.scheduled and step.now > 6.0:
            waits.append(engine.scheduler.leap_adapter_waits)

    engine.run(jobs, watch=watch)
    engine.check_end()
    assert len(waits) > 20
    assert (waits[-1] == 0) == (VERSION < (0, 33))
