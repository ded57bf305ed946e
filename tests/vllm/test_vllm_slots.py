"""Who decodes in a step, who waits, and who stands last for vLLM to preempt."""

from __future__ import annotations

import random

import pytest
from stand_ins import Clock, Lengths, StandIn, ranker_of

from leap_rs._leap import Planner
from leap_rs.vllm.options import LeapOptions
from leap_rs.vllm.order import Ranker
from leap_rs.vllm.slots import DECODING, IDLE, PREFILLING, Slots, classes

ROOM = 1_000_000
"""Free blocks with which no step runs out."""


def decoding(name: str, generated: int = 1) -> StandIn:
    return StandIn(name, 10, num_output_tokens=generated, num_computed_tokens=10 + generated - 1)


def slots_of(ranker: Ranker, options: LeapOptions, slots: int, max_adapters: int | None = None) -> Slots:
    planner = Planner(
        slots=slots,
        step_tokens=40,
        block_size=16,
        groups=2,
        max_adapters=max_adapters,
        hysteresis=options.hysteresis,
        wait_cap_steps=options.wait_cap_steps,
    )
    return Slots(ranker, planner, 4096, adapters=max_adapters is not None)


def residents(
    lengths: dict[str, float], slots: int, **options: object
) -> tuple[Slots, list[StandIn], Ranker, Lengths, Clock]:
    clock, brain = Clock(), Lengths(lengths)
    ranker, parsed = ranker_of(brain, clock, **options)
    running = [decoding(name) for name in lengths]
    for request in running:
        ranker.arrived(request)
    return slots_of(ranker, parsed, slots), running, ranker, brain, clock


def names(requests: list[StandIn]) -> list[str]:
    return [request.request_id for request in requests]


@pytest.mark.parametrize(
    ("request_", "kind"),
    [
        (StandIn("first chunk", 10), PREFILLING),
        (StandIn("in chunks", 10, num_computed_tokens=6), PREFILLING),
        (StandIn("one prompt token left", 10, num_computed_tokens=9), PREFILLING),
        (StandIn("prefilled, token under way", 10, 0, num_computed_tokens=10, num_output_placeholders=1), DECODING),
        (StandIn("synchronous", 10, 5, num_computed_tokens=14), DECODING),
        (StandIn("prefilled and waiting for its token", 10, 0, num_computed_tokens=10), IDLE),
        (StandIn("asynchronous", 10, 5, num_computed_tokens=15, num_output_placeholders=1), DECODING),
        (StandIn("resumed", 10, 5, num_computed_tokens=0), PREFILLING),
        (StandIn("resumed, past its prompt", 10, 5, num_computed_tokens=12), PREFILLING),
        (StandIn("last token under way", 10, 4, 14, num_output_placeholders=1, max_tokens=5), IDLE),
        (StandIn("last but one under way", 10, 3, 13, num_output_placeholders=1, max_tokens=5), DECODING),
        (StandIn("at the end of the context", 10, 90, num_computed_tokens=99), IDLE),
        (StandIn("with drafts", 10, 5, num_computed_tokens=14, drafts=3), DECODING),
    ],
    ids=lambda value: value.request_id if isinstance(value, StandIn) else value,
)
def test_what_the_next_step_has_for_a_request(request_: StandIn, kind: int) -> None:
    assert list(classes([request_], 100, 1)) == [kind]


def test_with_enough_slots_and_memory_nothing_is_touched() -> None:
    slots, running, _, _, _ = residents({"a": 30, "b": 10, "c": 20}, 3)
    plan = slots.plan(running, ROOM, 1)
    assert names(plan.order) == names(running)
    assert plan.gated == []


def test_the_shortest_decode_and_the_longest_is_the_victim() -> None:
    slots, running, ranker, brain, _ = residents({"a": 50, "b": 10, "c": 40, "d": 20, "e": 30}, 2)
    prefill = StandIn("p", 100)
    brain.lengths["p"] = 35
    ending = StandIn("q", 10, 4, 14, num_output_placeholders=1, max_tokens=5)
    brain.lengths["q"] = 900
    for request in (prefill, ending):
        ranker.arrived(request)
    plan = slots.plan([*running, prefill, ending], 0, 1)
    assert names(plan.order) == ["q", "b", "d", "e", "p", "c", "a"]
    assert names(plan.gated) == ["a", "c", "e"]


def test_with_enough_slots_but_little_memory_the_longest_is_last() -> None:
    slots, running, _, _, _ = residents({"a": 30, "b": 50, "c": 20}, 8)
    plan = slots.plan(running, 0, 1)
    assert names(plan.order) == ["c", "a", "b"]
    assert plan.gated == []


@pytest.mark.parametrize("seed", range(20))
def test_nobody_waits_longer_than_the_cap_and_one_round(seed: int) -> None:
    rng = random.Random(seed)
    n, k, cap = rng.randint(2, 12), rng.randint(1, 4), rng.randint(1, 10)
    slots, running, _, _, _ = residents({f"r{i}": rng.randint(1, 1000) for i in range(n)}, k, wait_cap_steps=cap)
    waited = dict.fromkeys((request.request_id for request in running), 0)
    for _ in range(100):
        plan = slots.plan(running, ROOM, 1)
        gated = set(names(plan.gated))
        assert len(running) - len(gated) == min(k, n)
        slots.scheduled(plan, {name: 1 for name in waited if name not in gated})
        for name in waited:
            waited[name] = waited[name] + 1 if name in gated else 0
            assert waited[name] <= cap + -(-n // k)
    assert (slots.promotions > 0) is (n > k)


def test_without_a_cap_and_aging_the_longest_waits_until_the_others_are_gone() -> None:
    slots, running, _, _, _ = residents({"long": 500, "short": 20}, 1, aging_rate=0)
    for _ in range(50):
        plan = slots.plan(running, ROOM, 1)
        assert names(plan.gated) == ["long"]
        slots.scheduled(plan, {"short": 1})


def test_a_holder_keeps_its_slot_until_another_is_shorter_by_the_factor() -> None:
    slots, running, _, brain, _ = residents({"a": 100, "b": 101}, 1, hysteresis=1.5)
    held = slots.plan(running, ROOM, 1)
    assert names(held.gated) == ["b"]
    slots.scheduled(held, {"a": 1})
    for length, gated in [(90, "b"), (68, "b"), (60, "a")]:
        brain.lengths["b"] = length
        plan = slots.plan(running, ROOM, 1)
        assert names(plan.gated) == [gated]


def test_aging_in_the_slots() -> None:
    """ln 40 - ln 10 is worth 13.86 s at 0.1 per second."""
    clock, brain = Clock(), Lengths({"long": 41, "short": 11})
    ranker, options = ranker_of(brain, clock, aging_rate=0.1, hysteresis=1)
    slots = slots_of(ranker, options, 1)
    early = decoding("long")
    ranker.arrived(early)
    for wait_s, gated in [(13.8, "long"), (13.9, "short")]:
        clock.now = wait_s
        late = decoding("short")
        ranker.arrived(late)
        assert names(slots.plan([early, late], ROOM, 1).gated) == [gated]
