"""Slots where more than the next token of a request is under way: drafts to be verified, and steps in a pipeline."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("vllm.version")

from fake_setup import Job, Oracle, Setup, prompt_of
from fake_worker import FakeEngine, Step

pytestmark = pytest.mark.vllm

SLOTS = {"mode": "armed", "levers": ["queue", "slots"], "decode_slots": 2, "aging_rate": 0}


def jobs_of(count: int, seed: int = 0) -> list[Job]:
    rng = random.Random(seed)
    return [Job(f"r{i}", 0.0, prompt_of(rng, 8), length=rng.randint(10, 60), max_tokens=1000) for i in range(count)]


def serve(jobs: list[Job], setup: Setup) -> FakeEngine:
    engine = FakeEngine(setup, Oracle(jobs))
    engine.run(jobs)
    engine.check_end()
    return engine


def drafting(*, async_scheduling: bool = True, **options: Any) -> Setup:
    return Setup(async_scheduling=async_scheduling, drafts=3, prefix_caching=False, blocks=2000, **options)


@pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])
def test_nobody_has_drafts_that_the_worker_does_not_find(async_scheduling: bool) -> None:
    jobs = jobs_of(8)
    stock = serve(jobs, drafting(async_scheduling=async_scheduling))
    leap = {**SLOTS, "wait_cap_steps": 2}
    engine = serve(jobs, drafting(async_scheduling=async_scheduling, leap=leap))
    assert sum(len(step.gated) for step in engine.outcome.steps) > 100
    assert stock.lost_drafts == []
    assert engine.lost_drafts == []
    # Most decodes have some all the same.
    assert len(engine.outcome.steps) < sum(job.length for job in jobs) / SLOTS["decode_slots"]


@pytest.mark.parametrize("disarmed_at", [5.0, 6.0, 7.0, 8.0])
def test_nor_has_who_was_passed_over_when_the_slots_were_given_up(disarmed_at: float) -> None:
    jobs = jobs_of(8)
    brain = Oracle(jobs)
    engine = FakeEngine(drafting(leap={**SLOTS, "mode": "auto"}), brain)

    def disarm(_: FakeEngine, step: Step) -> None:
        brain.armed = step.now < disarmed_at

    engine.run(jobs, watch=disarm)
    engine.check_end()
    assert any(step.gated for step in engine.outcome.steps)
    assert engine.lost_drafts == []


def test_the_second_model_runner_keeps_the_drafts_of_those_passed_over() -> None:
    """It keeps them by request, so that none have to be given up: each decode has as many as it can."""
    jobs = jobs_of(8)
    engine = FakeEngine(drafting(v2_runner=True, leap={**SLOTS, "wait_cap_steps": 2}), Oracle(jobs))
    given = []

    def watch(engine: FakeEngine, step: Step) -> None:
        given.extend(step.scheduled[name] for name in step.decoding if engine.made[name] > 1)

    engine.run(jobs, watch=watch)
    engine.check_end()
    assert engine.lost_drafts
    assert min(given) == 1 + engine.setup.drafts


PIPELINE = Setup(max_num_batched_tokens=32, async_scheduling=True, pipeline=2, v2_runner=True)


def pipelined(leap: dict[str, object] | None) -> FakeEngine:
    """Eight equal requests on an asynchronous pipeline of two ranks; the prompts of four fit into a step."""
    return serve([replace(job, length=80) for job in jobs_of(8)], replace(PIPELINE, leap=leap))


def skip_without_turns(stock: FakeEngine) -> None:
    if max(len(step.scheduled) for step in stock.outcome.steps[10:100]) == 8:
        pytest.skip("this vLLM does not take turns between the halves of a pipeline's residents")


@pytest.mark.parametrize("cap", [None, 1])
def test_half_as_many_slots_are_enough_for_a_pipeline_of_two(cap: int | None) -> None:
    """Each half of the residents has every second step, in which the other one's tokens are on their way."""
    stock = pipelined(None)
    skip_without_turns(stock)
    engine = pipelined({**SLOTS, "decode_slots": 4, "wait_cap_steps": cap})
    assert len(engine.outcome.steps) == len(stock.outcome.steps)
    # Nobody waits for a slot, so no cap can let anybody pass.
    assert engine.scheduler.leap_slots.slot_waits == 0
    assert engine.scheduler.leap_slots.promotions == 0


class Worsening(Oracle):
    """Takes a request for longer with every token that it has written."""

    def remaining(self, request_id: str, generated: int) -> float:
        return float(self.lengths[request_id] * 1.01**generated)


def test_who_has_a_slot_keeps_it_while_its_token_is_on_its_way() -> None:
    skip_without_turns(pipelined(None))
    jobs = [replace(job, length=80 + i) for i, job in enumerate(jobs_of(8))]
    brain, hysteresis = Worsening(jobs), 1.1
    engine = FakeEngine(replace(PIPELINE, leap={**SLOTS, "hysteresis": hysteresis}), brain)
    engine.run(jobs)
    engine.check_end()
    holds: dict[str, bool] = {}
    kept, lost = 0, 0
    for step in engine.outcome.steps:
        length = {name: brain.remaining(name, made) for name, made in step.generated.items()}
        for name in step.gated:
            for other in step.decoding:
                if holds.get(name) and not holds.get(other):
                    lost += 1
                    assert length[other] * hysteresis <= length[name] * (1 + 1e-9)
                kept += bool(holds.get(other) and not holds.get(name) and length[name] < length[other])
        # Only where somebody goes without is there anything to hold.
        holds |= dict.fromkeys(step.decoding, bool(step.gated)) | dict.fromkeys(step.gated, False)
    assert min(kept, lost) > 20
