"""The scheduler's own metrics, on vLLM's scheduler under the fake worker, against counts made here from the steps."""

from __future__ import annotations

import math
import random
import threading
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm.version")

from fake_setup import Job, Oracle, Setup, prompt_of
from fake_worker import FakeEngine, Step

from leap_rs.vllm.metrics import METRICS, OF_THE_SCHEDULER, MetricsWriter
from leap_rs.vllm.online import OnlineBrain
from leap_rs.vllm.settings import BrainSettings

pytestmark = pytest.mark.vllm

BOTH = pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])
LEAP = {"mode": "armed", "hysteresis": 1.0, "memory_weight": 0, "aging_rate": 0}


class Measured(Oracle):
    """The brain that knows the lengths, with metrics that nobody else writes."""

    def __init__(self, jobs: Iterable[Job] = (), *, armed: bool = True) -> None:
        super().__init__(jobs, armed=armed)
        self.metrics = MetricsWriter.nowhere()


class Counts:
    """Counts what the metrics should say after each step from what was scheduled, and compares."""

    def __init__(self, brain: Measured, *, slots: int | None = None, wait_cap_s: float | None = None) -> None:
        self.brain = brain
        self.slots = slots
        self.wait_cap_s = wait_cap_s
        self.queued_s: dict[str, float] = {}
        self.counted: Counter[str] = Counter()
        self.most: Counter[str] = Counter()

    def __call__(self, engine: FakeEngine, step: Step) -> None:
        gated = set(step.gated) - set(step.preempted)
        self.counted["slot_waits"] += len(gated)
        if self.slots is not None:
            self.counted["wait_cap_promotions"] += len(set(step.decoding) - set(self.shortest(engine, step)))
        if self.wait_cap_s is not None:
            self.counted["wait_cap_promotions"] += self.early(engine, step)
        shown = {name: self.brain.metrics.get(name) for name, value in OF_THE_SCHEDULER if not value}
        armed = engine.scheduler.leap.armed
        assert [self.brain.metrics.get("mode", mode) for mode in ("armed", "shadow")] == [armed, not armed]
        assert shown["gated_requests"] == len(gated)
        for name in ("slot_waits", "wait_cap_promotions"):
            assert shown[name] == self.counted[name]
        # What vLLM itself shows as `num_requests_waiting_by_reason{reason="deferred"}`.
        assert shown["blocked_requests"] == engine.scheduler.make_stats().num_skipped_waiting_reqs
        for name, value in shown.items():
            self.most[name] = max(self.most[name], int(value) if math.isfinite(value) else 0)

    def key(self, engine: FakeEngine, step: Step, name: str) -> tuple[float, int]:
        return math.log(self.brain.remaining(name, step.generated[name])), list(engine.jobs).index(name)

    def shortest(self, engine: FakeEngine, step: Step) -> list[str]:
        contenders = [*step.decoding, *step.gated]
        return sorted(contenders, key=lambda name: self.key(engine, step, name))[: self.slots]

    def early(self, engine: FakeEngine, step: Step) -> int:
        """Who was admitted before somebody with a better key that could have been."""
        left = [name for name in step.waiting if not blocked(engine.jobs[name], step.now)]
        found = 0
        for name in step.admitted:
            found += name != min(left, key=lambda other: self.key(engine, step, other))
            left.remove(name)
        return found


def blocked(job: Job, now: float) -> bool:
    return job.grammar_s is not None and job.grammar_s > now


def jobs_of(n: int, seed: int, *, every_s: float = 2.0, most: int = 60) -> list[Job]:
    rng = random.Random(seed)
    return [Job(f"r{i}", i * every_s, prompt_of(rng, 12), length=rng.randint(2, most), max_tokens=99) for i in range(n)]


def play(jobs: list[Job], setup: Setup, brain: Measured, counts: Any = None) -> FakeEngine:
    engine = FakeEngine(setup, brain)
    engine.run(jobs, watch=counts)
    engine.check_end()
    return engine


@BOTH
@pytest.mark.parametrize("seed", range(3))
def test_slots(async_scheduling: bool, seed: int) -> None:
    jobs = jobs_of(40, seed)
    setup = Setup(max_num_seqs=8, async_scheduling=async_scheduling)
    setup = replace(setup, leap={**LEAP, "levers": ["slots"], "decode_slots": 3, "wait_cap_steps": 6})
    brain = Measured(jobs)
    counts = Counts(brain, slots=3)
    play(jobs, setup, brain, counts)
    assert counts.most["gated_requests"] == 5
    assert counts.counted["slot_waits"] > 100
    assert counts.counted["wait_cap_promotions"] > 20
    # The last step has nobody to gate.
    assert brain.metrics.get("gated_requests") == 0


@BOTH
def test_a_gated_resident_that_loses_its_blocks_is_none_any_more(async_scheduling: bool) -> None:
    jobs = jobs_of(30, 4, every_s=1.0, most=90)
    setup = Setup(max_num_seqs=8, blocks=12, async_scheduling=async_scheduling, prefix_caching=False)
    brain = Measured(jobs)
    counts = Counts(brain)
    engine = play(jobs, replace(setup, leap={**LEAP, "decode_slots": 3}), brain, counts)
    assert any(set(step.gated) & set(step.preempted) for step in engine.outcome.steps)
    assert brain.metrics.get("evictions") == 0


@BOTH
def test_a_queue_with_a_cap_counts_who_went_first_by_it_and_not_who_was_looked_at(async_scheduling: bool) -> None:
    jobs = jobs_of(40, 5)
    # The longest of all waits for its grammar far beyond the cap, and is looked at in every step.
    jobs.append(replace(jobs[3], name="late", length=90, grammar_s=400.0))
    setup = Setup(max_num_seqs=2, async_scheduling=async_scheduling)
    brain = Measured(jobs)
    counts = Counts(brain, wait_cap_s=30.0)
    play(jobs, replace(setup, leap={**LEAP, "levers": ["queue"], "wait_cap_s": 30.0}), brain, counts)
    assert 5 < counts.counted["wait_cap_promotions"] < 40
    assert brain.metrics.get("slot_waits") == 0


@BOTH
def test_evictions(async_scheduling: bool) -> None:
    """With blocks to spare nobody is preempted but by the evict lever."""
    jobs = [*jobs_of(2, 6, every_s=0.0), *jobs_of(12, 7, every_s=40.0, most=9)]
    jobs = [
        replace(job, name=f"r{i}", length=600 if i < 2 else job.length, max_tokens=900) for i, job in enumerate(jobs)
    ]
    setup = Setup(max_num_seqs=2, async_scheduling=async_scheduling)
    brain = Measured(jobs)
    engine = play(jobs, replace(setup, leap={**LEAP, "levers": ["queue", "evict"]}), brain)
    preempted = sum(len(step.preempted) for step in engine.outcome.steps)
    assert preempted > 3
    assert brain.metrics.get("evictions") == preempted


@BOTH
@pytest.mark.parametrize("levers", [["queue", "slots"], []], ids=["ours", "vllms"])
def test_blocked_are_those_without_a_grammar_or_a_place_for_their_adapter(
    async_scheduling: bool, levers: list[str]
) -> None:
    rng = random.Random(8)
    jobs = [
        Job(
            f"r{i}",
            float(i),
            prompt_of(rng, 12),
            length=rng.randint(5, 30),
            max_tokens=99,
            grammar_s=i + 10.0 * (i % 3) if i % 2 else None,
            lora=1 + i % 3 if i % 5 == 0 else None,
        )
        for i in range(40)
    ]
    brain = Measured(jobs)
    seen = set()

    def watch(engine: FakeEngine, step: Step) -> None:
        used = {engine.jobs[r.request_id].lora for r in engine.scheduler.running} - {None}
        # There are seats and blocks for all: who still waits after a step does so for nothing else.
        waiting = [engine.jobs[request.request_id] for request in engine.queued()]
        apart = [job for job in waiting if job.lora is not None and not blocked(job, step.now)]
        assert all(blocked(job, step.now) or job in apart for job in waiting)
        assert all(job.lora not in used and len(used) == 1 for job in apart)
        assert brain.metrics.get("blocked_requests") == len(waiting)
        seen.add((len(apart) > 0, len(waiting) > len(apart)))

    setup = Setup(max_num_seqs=64, max_num_batched_tokens=4096, blocks=2000, max_loras=1)
    play(jobs, replace(setup, async_scheduling=async_scheduling, leap={**LEAP, "levers": levers}), brain, watch)
    assert {(True, True), (False, False)} <= seen
    assert brain.metrics.get("blocked_requests") == 0


@BOTH
@pytest.mark.parametrize("order", ["gittins", "fcfs"])
def test_in_vllms_own_order_nothing_is_counted(async_scheduling: bool, order: str) -> None:
    jobs = jobs_of(40, 9)
    options = {"order": order, "levers": ["queue", "slots", "evict"], "decode_slots": 2, "wait_cap_steps": 2}
    leap = {**LEAP, **options, "wait_cap_s": 5.0}
    brain = Measured(jobs, armed=order == "fcfs")
    play(jobs, Setup(max_num_seqs=8, async_scheduling=async_scheduling, leap=leap), brain, Counts(brain))
    shown = {name: brain.metrics.get(*name) for name in OF_THE_SCHEDULER}
    assert math.isnan(shown.pop(("kv_peak_ratio", "")))
    assert shown == {name: name == ("mode", "shadow") for name in shown}


@BOTH
def test_nobody_is_gated_once_it_has_disarmed(async_scheduling: bool) -> None:
    jobs = jobs_of(40, 10, every_s=0.5)
    brain = Measured(jobs)
    counts = Counts(brain)
    gauge: list[float] = []

    def watch(engine: FakeEngine, step: Step) -> None:
        counts(engine, step)
        gauge.append(brain.metrics.get("gated_requests"))
        brain.armed = len(gauge) < 30

    setup = Setup(max_num_seqs=8, async_scheduling=async_scheduling)
    play(jobs, replace(setup, leap={**LEAP, "levers": ["slots"], "decode_slots": 3}), brain, watch)
    assert max(gauge[:30]) == 5
    assert max(gauge[30:]) == 0


def test_a_brain_without_metrics_is_served_too() -> None:
    jobs = jobs_of(10, 11)
    engine = FakeEngine(Setup(max_num_seqs=4, leap={**LEAP, "decode_slots": 1}), Oracle(jobs))
    engine.run(jobs)
    engine.check_end()
    assert engine.scheduler.leap.metrics is None
    assert engine.scheduler.leap_slots.slot_waits > 0


def test_each_metric_has_one_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A number is 8 bytes that one thread writes; two would lose counts."""
    writers: dict[str, set[str]] = {metric.name: set() for metric in METRICS}
    brain = OnlineBrain(BrainSettings(model="m", mode="armed", max_tokens=99, metrics_dir=tmp_path / "metrics"))
    for method in ("set", "add", "observe"):
        original = getattr(MetricsWriter, method)

        def write(self: MetricsWriter, name: str, *args: Any, original: Any = original, **kwargs: Any) -> None:
            writers[name].add(threading.current_thread().name)
            original(self, name, *args, **kwargs)

        monkeypatch.setattr(MetricsWriter, method, write)
    jobs = jobs_of(60, 12)
    # So few blocks that some lose theirs and others are held back.
    setup = Setup(max_num_seqs=8, blocks=14, prefix_caching=False)
    engine = FakeEngine(replace(setup, leap={**LEAP, "decode_slots": 2, "wait_cap_steps": 3}), brain)
    engine.run(jobs)
    engine.check_end()
    brain.settle()
    own = threading.current_thread().name
    # No request was put off, and the evict lever is not on.
    written = {name for name, _ in OF_THE_SCHEDULER} - {"evictions", "blocked_requests"}
    assert {name for name, threads in writers.items() if own in threads} == written
    assert all(len(threads) <= 1 for threads in writers.values())
    assert writers["labels"] == {"leap-brain"}
    assert brain.metrics.get("slot_waits") == engine.scheduler.leap_slots.slot_waits > 0
    engine.scheduler.leap.close()
