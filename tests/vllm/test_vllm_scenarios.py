"""Random scenarios against vLLM's real scheduler: nothing is lost, and the order is the one that is promised.

LEAP_SCENARIOS=1000 draws more than the usual 100.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import replace

import pytest

pytest.importorskip("vllm.version")

from fake_setup import Oracle
from fake_worker import FakeEngine, Outcome
from scenarios import Scenario, draw, play

pytestmark = pytest.mark.vllm

SCENARIOS = int(os.environ.get("LEAP_SCENARIOS", "100"))


@pytest.mark.parametrize("seed", range(SCENARIOS))
def test_every_request_ends_once_with_its_tokens_and_within_its_bounds(seed: int) -> None:
    scenario = draw(seed)
    engine, brain, _ = play(scenario)
    assert set(brain.calls) == {job.name for job in scenario.jobs}
    assert set(brain.calls.values()) == {1}
    told = {name: (reason, len(engine.outcome.tokens[name])) for name, reason in engine.outcome.reasons.items()}
    assert brain.ended == told
    for name, tokens in engine.outcome.tokens.items():
        assert name in brain.rows or not tokens


def test_the_scenarios_reach_what_they_are_for() -> None:
    seen: Counter[str] = Counter()
    for seed in range(60):
        scenario = draw(seed)
        engine, _, watch = play(scenario)
        seen.update(watch.checked)
        seen["preempted"] += sum(len(step.preempted) for step in engine.outcome.steps)
        seen["gated"] += sum(len(step.gated) for step in engine.outcome.steps)
        seen["evicted"] += engine.scheduler.leap_evict.evicted
        seen["slot promotions"] += engine.scheduler.leap_slots.promotions
        seen["queue promotions"] += engine.scheduler.leap_promotions
        seen["aborts"] += sum(reason == "abort" for reason in engine.outcome.reasons.values())
        seen["adapter waits"] += engine.scheduler.leap_adapter_waits
        seen["loads of remote KV"] += len(engine.loads)
        if engine.scheduler.leap_room is not None:
            assert engine.scheduler.leap_guard.fault is None
            seen["holds"] += engine.scheduler.leap_room.core.holds
    for what in (
        "slots",
        "queue",
        "preempted",
        "gated",
        "evicted",
        "slot promotions",
        "queue promotions",
        "aborts",
        "adapter waits",
        "holds",
        "loads of remote KV",
        "read",
    ):
        assert seen[what] >= 5, f"{what}: {seen}"


def unarmed(scenario: Scenario, leap: dict[str, object] | None) -> Outcome:
    engine = FakeEngine(replace(scenario.setup, leap=leap), Oracle(scenario.jobs, armed=False))
    engine.run(scenario.jobs)
    engine.check_end()
    return engine.outcome


@pytest.mark.parametrize("seed", range(0, SCENARIOS, 2))
def test_in_shadow_the_schedule_is_that_of_stock_vllm_step_for_step(seed: int) -> None:
    """So it is in auto before it is armed, but for admission, which waits for no readout."""
    scenario = draw(seed)
    stock = unarmed(scenario, None)
    levers = [lever for lever in scenario.leap["levers"] if lever != "admission"]
    for options in ({"mode": "shadow"}, {"mode": "auto", "levers": levers}):
        ours = unarmed(scenario, {**scenario.leap, **options})
        assert [list(step.scheduled.items()) for step in ours.steps] == [
            list(step.scheduled.items()) for step in stock.steps
        ]
        assert ours == stock


@pytest.mark.parametrize(
    "leap",
    [
        {"mode": "shadow"},
        {"mode": "shadow", "levers": ["admission"]},
        {"mode": "armed", "order": "fcfs", "levers": ["queue", "slots", "evict"], "decode_slots": 2},
        {"levers": []},
    ],
)
def test_modes_without_an_order_are_stock_vllm_even_if_the_brain_is_armed(leap: dict[str, object]) -> None:
    for seed in range(10):
        scenario = draw(seed)
        stock = unarmed(scenario, None)
        engine = FakeEngine(replace(scenario.setup, leap=leap), Oracle(scenario.jobs))
        engine.run(scenario.jobs)
        engine.check_end()
        assert engine.outcome == stock


def test_both_ways_to_gate_give_the_same_schedule() -> None:
    gated = 0
    for seed in range(25):
        scenario = draw(seed)
        by_step, _, _ = play(replace(scenario, gate_by_step=True))
        by_count, _, _ = play(replace(scenario, gate_by_step=False))
        assert by_step.outcome == by_count.outcome
        gated += sum(len(step.gated) for step in by_step.outcome.steps)
    assert gated > 100
