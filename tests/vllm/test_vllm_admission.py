"""The lever admission on vLLM's scheduler under the fake worker: when it acts, whom it holds, and what it spares."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("vllm.version")

from fake_setup import BLOCK, Job, Oracle, Setup, prompt_of
from fake_worker import FakeEngine, Outcome, Step
from scenarios import Teller

from leap_rs.vllm.waiting import WaitingQueue

pytestmark = pytest.mark.vllm

BOTH = pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])
SHORT = Setup(max_num_seqs=16, max_num_batched_tokens=512, blocks=40, prefix_caching=False)
"""A dozen requests grow beyond its 624 tokens."""
ACTS = [{"mode": "auto"}, {"mode": "armed", "order": "fcfs"}, {"mode": "auto", "levers": ["admission"]}]


def jobs_of(count: int, seed: int, *, every_s: float = 4.0, abort: tuple[int, ...] = ()) -> list[Job]:
    rng = random.Random(seed)
    return [
        Job(
            f"r{i}",
            i * every_s,
            prompt_of(rng, rng.randint(8, 40)),
            length=rng.randint(20, 150),
            max_tokens=200,
            abort_s=i * every_s + 30 if i in abort else None,
        )
        for i in range(count)
    ]


class Held:
    """The metric of holds after each step."""

    def __init__(self) -> None:
        self.after: list[int] = []

    def __call__(self, engine: FakeEngine, _: Step) -> None:
        self.after.append(engine.scheduler.leap_room.core.holds)

    @property
    def first(self) -> int:
        return next(i for i, holds in enumerate(self.after) if holds)


def run(jobs: list[Job], setup: Setup, leap: Mapping[str, Any] | None, brain: Any = None, watch: Any = None) -> Outcome:
    engine = FakeEngine(replace(setup, leap=leap), brain)
    engine.run(jobs, watch=watch)
    engine.check_end()
    return engine.outcome


def preempted(outcome: Outcome) -> int:
    return sum(len(step.preempted) for step in outcome.steps)


def scheduled(steps: list[Step]) -> list[list[tuple[str, int]]]:
    return [list(step.scheduled.items()) for step in steps]


@BOTH
@pytest.mark.parametrize("leap", ACTS, ids=["auto", "fcfs", "alone"])
def test_unarmed_it_is_stock_vllm_up_to_the_first_hold_and_from_then_on_spares_preemptions(
    async_scheduling: bool, leap: dict[str, Any]
) -> None:
    before, after = 0, 0
    for seed in range(4):
        setup, jobs, held = replace(SHORT, async_scheduling=async_scheduling), jobs_of(80, seed), Held()
        stock = run(jobs, setup, None)
        # With order fcfs the brain is not asked, so it may well be armed.
        ours = run(jobs, setup, leap, Oracle(jobs, armed="order" in leap), held)
        first = held.first
        assert scheduled(ours.steps[:first]) == scheduled(stock.steps[:first])
        theirs = scheduled(stock.steps)[first]
        mine = scheduled(ours.steps)[first]
        # Of those whom vLLM would have admitted too, some or all stay out.
        assert mine == theirs[: len(mine)]
        assert {name for name, _ in theirs[len(mine) :]} <= set(stock.steps[first].admitted)
        # First come first served as before: whoever comes in for the first time does so in the order of arrival.
        admitted = list(dict.fromkeys(name for step in ours.steps for name in step.admitted))
        assert admitted == [job.name for job in jobs]
        assert ours.tokens == stock.tokens
        before, after = before + preempted(stock), after + preempted(ours)
    # What is left is that of the time before 16 lengths are known.
    assert before > 100
    assert after < before / 2


@BOTH
def test_fewer_than_16_lengths_tell_nothing(async_scheduling: bool) -> None:
    setup = replace(SHORT, async_scheduling=async_scheduling)
    # 15 end, and 25 more are aborted, which says nothing of a length.
    jobs = jobs_of(40, 5, abort=tuple(i for i in range(40) if i % 8 > 2))
    assert sum(job.abort_s is None for job in jobs) == 15
    stock = run(jobs, setup, None)
    held = Held()
    ours = run(jobs, setup, {"mode": "auto"}, Oracle(jobs, armed=False), held)
    assert ours == stock
    assert preempted(stock) > 0
    assert held.after[-1] == 0


@BOTH
def test_with_16_lengths_it_holds(async_scheduling: bool) -> None:
    setup, jobs = replace(SHORT, async_scheduling=async_scheduling), jobs_of(80, 6)
    known: list[int] = []
    held = Held()

    def watch(engine: FakeEngine, step: Step) -> None:
        held(engine, step)
        known.append(len(engine.outcome.reasons))

    run(jobs, setup, {"mode": "auto"}, Oracle(jobs, armed=False), watch)
    assert known[held.first] >= 16
    assert known[held.first] < 30


def test_in_shadow_it_touches_nothing_even_if_the_brain_is_armed() -> None:
    jobs = jobs_of(60, 7)
    stock = run(jobs, SHORT, None)
    assert preempted(stock) > 0
    assert run(jobs, SHORT, {"mode": "shadow", "levers": ["admission"]}, Teller(jobs)) == stock


@BOTH
def test_while_the_first_is_held_the_queue_is_empty_only_for_who_looks_for_somebody_to_admit(
    async_scheduling: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup, jobs = replace(SHORT, async_scheduling=async_scheduling), jobs_of(60, 8)
    held = Held()
    within: list[tuple[bool, int, int]] = []
    real = WaitingQueue.__bool__
    engine = FakeEngine(replace(setup, leap={"mode": "auto"}), Oracle(jobs, armed=False))

    def waiting(admitted: int = 0) -> int:
        """Those who have come, less those who have ended or run."""
        return len(engine.added_s) - len(engine.outcome.reasons) - admitted

    def looked_at(self: WaitingQueue) -> bool:
        answer = real(self)
        within.append((answer, len(self), waiting(len(engine.scheduler.running))))
        return answer

    monkeypatch.setattr(WaitingQueue, "__bool__", looked_at)

    def watch(engine: FakeEngine, step: Step) -> None:
        held(engine, step)
        stats = engine.scheduler.make_stats()
        expected = waiting(len(engine.scheduler.running))
        assert stats.num_waiting_reqs + stats.num_skipped_waiting_reqs == expected
        assert len(engine.scheduler.waiting) == len(list(engine.scheduler.waiting)) == expected
        # The step is over, and anybody may see that they wait.
        assert bool(engine.scheduler.waiting) is (expected > 0)

    engine.run(jobs, watch=watch)
    engine.check_end()
    assert held.after[-1] > 20
    hidden = [(length, expected) for answer, length, expected in within if not answer and length]
    assert len(hidden) >= held.after[-1]
    assert all(length == expected for length, expected in hidden)


def three(**second: Any) -> list[Job]:
    """One inside that holds 14 of 30 blocks and grows to 26, one of 16 and soon 17, and one of 2."""
    rng = random.Random(9)
    return [
        Job("inside", 0.0, prompt_of(rng, 16), length=400, max_tokens=500),
        replace(Job("large", 200.0, prompt_of(rng, 250), length=20, max_tokens=500), **second),
        Job("small", 202.0, prompt_of(rng, 16), length=5, max_tokens=500),
    ]


def admitted_s(outcome: Outcome) -> dict[str, float]:
    return {name: step.now for step in reversed(outcome.steps) for name in step.admitted}


THIRTY = Setup(max_num_seqs=8, max_num_batched_tokens=512, blocks=31, prefix_caching=False)
TELLS = {"mode": "auto", "levers": ["admission"]}


@BOTH
def test_who_has_no_room_waits_for_it_and_so_does_who_comes_after(async_scheduling: bool) -> None:
    jobs, setup = three(), replace(THIRTY, async_scheduling=async_scheduling)
    stock = run(jobs, setup, None)
    assert admitted_s(stock)["large"] <= 202
    assert preempted(stock) > 0
    ours = run(jobs, setup, TELLS, Teller(jobs, armed=False))
    at = admitted_s(ours)
    # Until the one inside is within 8 tokens of its end, the nearest that is looked at.
    assert 390 <= at["large"] <= 405
    assert at["small"] >= at["large"]
    assert preempted(ours) == 0


@BOTH
def test_who_waits_for_an_adapters_place_is_not_held_and_holds_nobody(async_scheduling: bool) -> None:
    jobs = three(lora=2)
    jobs[0] = replace(jobs[0], lora=1)
    setup = replace(THIRTY, async_scheduling=async_scheduling, max_loras=1)
    held = Held()
    at = admitted_s(run(jobs, setup, TELLS, Teller(jobs, armed=False), held))
    assert at["small"] <= 204
    # Its adapter's place comes with the end of the one inside.
    assert 400 <= at["large"] <= 405
    assert held.after[-1] == 0


@BOTH
def test_who_waits_for_a_grammar_is_not_held_and_holds_nobody_until_it_has_it(async_scheduling: bool) -> None:
    jobs = three(grammar_s=250.0)
    jobs.append(replace(jobs[2], name="late", arrival_s=260.0))
    setup = replace(THIRTY, async_scheduling=async_scheduling)
    held = Held()
    outcome = run(jobs, setup, TELLS, Teller(jobs, armed=False), held)
    at = admitted_s(outcome)
    assert at["small"] <= 204
    # With its grammar it is first come first served again.
    assert 390 <= at["large"] <= 405
    assert at["late"] >= at["large"]
    assert 250 <= outcome.steps[held.first].now <= 252


@BOTH
def test_who_holds_blocks_for_remote_kv_is_not_held_and_holds_nobody(async_scheduling: bool) -> None:
    """It is asked before the load, fits then, and no longer does when its KV has come: vLLM takes it all the same."""
    rng = random.Random(15)
    setup = replace(THIRTY, async_scheduling=async_scheduling, remote_kv_s=40.0)
    jobs = [
        Job("inside", 0.0, prompt_of(rng, 16), length=100, max_tokens=500),
        Job("remote", 10.0, prompt_of(rng, 200), length=100, max_tokens=500),
        Job("small", 12.0, prompt_of(rng, 16), length=5, max_tokens=500),
        # Comes in while the load is under way, whose blocks nobody counts, and takes the room there is.
        Job("beside", 14.0, prompt_of(rng, 100), length=200, max_tokens=500),
    ]
    stock = run(jobs, setup, None)
    ours = run(jobs, setup, TELLS, Teller(jobs, armed=False))
    at = admitted_s(ours)
    assert at["small"] <= 14
    assert at["beside"] <= 16
    assert 50 <= at["remote"] <= 54
    assert at == admitted_s(stock)
    assert ours.tokens == stock.tokens
    # One that holds nothing when it comes by then is held.
    jobs[1] = replace(jobs[1], name="local", arrival_s=50.0)
    assert admitted_s(run(jobs, setup, None))["local"] <= 52
    assert admitted_s(run(jobs, setup, TELLS, Teller(jobs, armed=False)))["local"] > 90


@BOTH
def test_who_is_overdue_is_first_and_is_not_passed_while_it_is_held(async_scheduling: bool) -> None:
    rng = random.Random(10)
    jobs = three()[:2]
    jobs += [Job(f"s{i}", 208.0 + 6 * i, prompt_of(rng, 16), length=4, max_tokens=300) for i in range(40)]
    leap = {"mode": "armed", "levers": ["queue", "admission"], "wait_cap_s": 60.0, "aging": 0}
    setup = replace(THIRTY, async_scheduling=async_scheduling)
    held = Held()
    outcome = run(jobs, setup, leap, Teller(jobs), held)
    at = admitted_s(outcome)
    assert 390 <= at["large"] <= 405
    passed = [f"s{i}" for i in range(40) if at[f"s{i}"] < at["large"]]
    # Until it was overdue, 60 s after its arrival, the short ones went first.
    assert passed == [f"s{i}" for i in range(9)]
    assert max(at[name] for name in passed) <= 200.0 + 60.0
    # From then on it is held in every step, until the one inside is so near its end that only vLLM still says no.
    overdue = [i for i, step in enumerate(outcome.steps) if 262.0 < step.now < 380.0]
    assert held.after[overdue[-1]] - held.after[overdue[0]] == len(overdue) - 1


class Failing:
    """Admission of which one call fails from the first time on."""

    def __init__(self, core: Any, call: str) -> None:
        self._core, self._call = core, call
        self.failed = 0

    def __getattr__(self, name: str) -> Any:
        if name != self._call:
            return getattr(self._core, name)
        return self._fail

    def _fail(self, *_: Any, **__: Any) -> Any:
        self.failed += 1
        raise RuntimeError("no such resident")


CALLS = ["admitted", "left", "preempted", "learned", "finished", "progressed", "has_room", "held", "stepped"]


@BOTH
@pytest.mark.parametrize("call", CALLS)
def test_a_fault_in_it_is_told_once_and_vllm_serves_on_as_it_does_by_itself(
    async_scheduling: bool, call: str, caplog: pytest.LogCaptureFixture
) -> None:
    setup, jobs = replace(SHORT, async_scheduling=async_scheduling), jobs_of(80, 11)
    engine = FakeEngine(replace(setup, leap={"mode": "auto"}), Oracle(jobs, armed=False))
    failing = Failing(engine.scheduler.leap_room.core, call)
    engine.scheduler.leap_room.core = failing
    engine.run(jobs)
    engine.check_end()
    assert failing.failed == 1
    assert engine.scheduler.leap_guard.fault == "RuntimeError: no such resident"
    assert sum("a fault of the plugin" in record.getMessage() for record in caplog.records) == 1
    # Nobody has been held yet when it fails: what fails comes before the first hold, or is that hold.
    assert engine.outcome == run(jobs, setup, None)


def test_a_resident_that_it_was_not_told_of_is_no_fault() -> None:
    jobs, held = jobs_of(60, 16), Held()

    def watch(engine: FakeEngine, step: Step) -> None:
        held(engine, step)
        if len(held.after) == 30:
            room, oldest = engine.scheduler.leap_room, engine.scheduler.running[0]
            room.core.left(room._inside.pop(oldest.request_id).number)

    engine = FakeEngine(replace(SHORT, leap=TELLS), Teller(jobs, armed=False))
    engine.run(jobs, watch=watch)
    engine.check_end()
    assert engine.scheduler.leap_guard.fault is None
    assert held.after[-1] > held.after[29]


def test_a_limit_beyond_what_the_core_counts_to_is_no_fault() -> None:
    jobs = [replace(job, max_tokens=2**40) for job in jobs_of(40, 13)]
    engine = FakeEngine(replace(SHORT, leap=TELLS), Oracle(jobs, armed=False))
    engine.run(jobs)
    engine.check_end()
    assert engine.scheduler.leap_guard.fault is None
    assert engine.scheduler.leap_room.core.holds > 0


def test_blocks_that_others_hold_are_no_ones_own() -> None:
    """Three that share 20 blocks and grow by 5 each fit into 36; three that share nothing would need 75."""
    rng = random.Random(14)
    shared = prompt_of(rng, 20 * BLOCK)
    for prompts, together in [([shared] * 3, True), ([prompt_of(rng, 20 * BLOCK) for _ in range(3)], False)]:
        jobs = [
            Job(f"r{i}", 30.0 * i, prompt + prompt_of(rng, 8), length=64, max_tokens=100)
            for i, prompt in enumerate(prompts)
        ]
        jobs[0] = replace(jobs[0], length=70)
        setup = replace(SHORT, blocks=46, prefix_caching=True)
        at = admitted_s(run(jobs, setup, TELLS, Teller(jobs, armed=False)))
        assert (at["r1"] <= 32.0) is together
