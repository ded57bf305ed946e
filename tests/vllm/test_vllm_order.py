"""What the ranker asks of a brain, tells it, and makes of its answers."""

# ruff: noqa: ARG002 - brains carry out a protocol, whatever they make of its arguments

from __future__ import annotations

import math
from enum import IntEnum
from types import SimpleNamespace
from typing import Any

import pytest
from stand_ins import Clock, Lengths, StandIn, options_of, ranker_of

from leap_rs._leap import DEFAULT_AGING, RemainingTable
from leap_rs.vllm.brain import Brain, Watcher
from leap_rs.vllm.order import Ranker


class Finish(IntEnum):
    STOP = 0
    LENGTH = 1
    ABORT = 2
    ERROR = 3
    REPETITION = 4


def test_a_key_is_the_formula() -> None:
    clock = Clock()
    ranker, _ = ranker_of(Lengths({"a": 120}), clock, aging_rate=0.1, memory_weight=0.5)
    request = StandIn("a", num_prompt_tokens=200, num_output_tokens=18, num_output_placeholders=2, max_tokens=150)
    clock.now = 7.0
    ranker.arrived(request)
    clock.now = 9.0
    # 120 - 20 generated leave 100.
    assert ranker.key(request) == pytest.approx(math.log(100) + 0.5 * math.log(200 + 20 + 50) + 0.1 * 7)


@pytest.mark.parametrize(
    ("options", "unit"),
    [
        ({"aging": 2, "order": "countdown"}, 100.0),
        ({"order": "gittins", "objective": "e2el"}, 100.0),
        ({"aging": 0.5, "order": "gittins", "objective": "ptl"}, 100.0**2),
        ({"aging": 2, "order": "survival", "objective": "ptl"}, 100.0),
        ({"aging_rate": 2, "order": "countdown"}, math.inf),
    ],
)
def test_relative_aging_flattens_what_is_long_against_the_mean_at_arrival(options: dict[str, Any], unit: float) -> None:
    clock = Clock()
    lengths = {"a": 30, "b": 300, "c": 30_000, "first": 9}
    ranker, _ = ranker_of(Lengths(lengths), clock, memory_weight=0, **options)
    ended = StandIn("first", num_output_tokens=100, reason=Finish.STOP)
    # As long as nothing is known of lengths they are compared as they are.
    ranker.arrived(ended)
    early = StandIn("c", max_tokens=10**6)
    ranker.arrived(early)
    assert ranker.ln_remaining([early], [ranker.live(early)]) == pytest.approx([math.log(30_000)])
    ranker.finished(ended)
    ranker.aging.step(1.0, 0)
    clock.now = 3.0
    requests = [StandIn("a", max_tokens=10**6), StandIn("b", max_tokens=10**6)]
    for request in requests:
        ranker.arrived(request)
    requests.append(early)
    lives = [ranker.live(request) for request in requests]
    # u / c (1 - exp(-c x / u)) with c = 9; the early one has no mean to be compared with.
    share = unit / 9
    expected = [math.log(x if math.isinf(unit) else share * (1 - math.exp(-x / share))) for x in (30, 300)] + [
        math.log(30_000)
    ]
    assert ranker.ln_remaining(requests, lives) == pytest.approx(expected)
    # Nobody waits, so that a second is worth alpha.
    rate = options.get("aging_rate", options.get("aging", DEFAULT_AGING))
    assert [live.aged for live in lives] == pytest.approx([3 * rate, 3 * rate, 0.0])
    assert ranker.key(requests[0]) == pytest.approx(expected[0] + 3 * rate)


def test_only_ends_that_say_something_of_a_length_count_for_the_mean() -> None:
    clock = Clock()
    ranker, _ = ranker_of(Lengths({}), clock)
    for number, (tokens, reason) in enumerate([(100, Finish.STOP), (7, Finish.ABORT), (0, Finish.STOP), (3, None)]):
        request = StandIn(f"r{number}", num_output_tokens=tokens, reason=reason)
        ranker.arrived(request)
        assert ranker.finished(request) == (100 if number == 0 else None)
    ranker.aging.step(1.0, 0)
    late = StandIn("late")
    ranker.arrived(late)
    assert ranker.live(late).mean_tokens == pytest.approx(100.0)


def test_what_a_brain_knows_of_a_length_is_handed_on_and_a_failure_is_not() -> None:
    class Knows(Lengths):
        def table(self, request_id: str) -> Any:
            if request_id == "odd":
                raise KeyError(request_id)
            return RemainingTable.of_length(7)

    ranker, _ = ranker_of(Knows(), Clock())
    found = ranker.table("a")
    assert found is not None
    assert found.mean_remaining(0) == pytest.approx(7.0)
    plain, _ = ranker_of(Lengths(), Clock())
    assert plain.table("a") is None
    assert ranker.table("odd") is None
    assert ranker.fault == "KeyError: 'odd'"


def test_tokens_under_way_count_through_a_preemption() -> None:
    clock = Clock()
    ranker, _ = ranker_of(Lengths({"a": 120}), clock, aging_rate=0, memory_weight=0)
    request = StandIn("a", num_output_tokens=18, num_output_placeholders=2)
    ranker.arrived(request)
    clock.now = 3.0
    ranker.preempted(request)
    assert ranker.live(request).queued_s == 3.0
    for output, placeholders, left in ((18, 0, 100), (20, 0, 100), (20, 1, 99)):
        request.num_output_tokens, request.num_output_placeholders = output, placeholders
        assert ranker.key(request) == pytest.approx(math.log(left))


def test_the_memory_term_goes_by_the_mean_where_the_brain_knows_it() -> None:
    class Gittins(Lengths):
        def mean_remaining(self, request_id: str, generated: int) -> float:
            return 40.0

    ranker, _ = ranker_of(Gittins({"a": 10_000}), Clock(), memory_weight=1, aging_rate=0)
    request = StandIn("a", num_prompt_tokens=100)
    ranker.arrived(request)
    assert ranker.key(request) == pytest.approx(math.log(10_000) + math.log(100 + 20))
    # Without it, no more than the request may still generate.
    plain, _ = ranker_of(Lengths({"a": 10_000}), Clock(), memory_weight=1, aging_rate=0)
    plain.arrived(request)
    assert plain.key(request) == pytest.approx(math.log(10_000) + math.log(100 + 500))


def test_what_a_brain_is_told_of_an_arrival() -> None:
    brain = Lengths({"a": 1})
    ranker, _ = ranker_of(brain, Clock())
    ranker.arrived(StandIn("a", sampling_params=SimpleNamespace(min_tokens=5, ignore_eos=True), max_tokens=9))
    assert brain.last == ("a", (1, 2, 3), 9, 5, True)
    embeds = StandIn("b")
    embeds.prompt_token_ids = None  # type: ignore[assignment]
    ranker.arrived(embeds)
    assert brain.last == ("b", (), 1000, 0, False)


@pytest.mark.parametrize(
    ("reason", "told"),
    [
        (Finish.STOP, "stop"),
        (Finish.LENGTH, "length"),
        (Finish.ABORT, "abort"),
        (Finish.ERROR, "error"),
        (Finish.REPETITION, "error"),
        (None, "error"),
        ("stop", "stop"),
    ],
)
def test_what_a_brain_is_told_of_an_end(reason: Any, told: str) -> None:
    brain = Lengths()
    ranker, _ = ranker_of(brain, Clock())
    request = StandIn("a", num_output_tokens=4, reason=reason)
    ranker.arrived(request)
    ranker.finished(request)
    ranker.finished(request)
    assert brain.ended == [("a", told, 4)]


def test_where_ends_say_nothing_of_lengths_no_end_is_a_label() -> None:
    brain = Lengths()
    ranker = Ranker(brain, options_of(), Clock(), labels=False)
    request = StandIn("a", num_output_tokens=1, reason=Finish.LENGTH)
    ranker.arrived(request)
    ranker.finished(request)
    assert brain.ended == [("a", "error", 1)]


@pytest.mark.parametrize(
    ("options", "armed"),
    [
        ({"mode": "auto"}, True),
        ({"mode": "armed"}, True),
        ({"mode": "shadow"}, False),
        ({"order": "fcfs"}, False),
    ],
)
def test_the_mode_may_overrule_the_brain(options: dict[str, str], armed: bool) -> None:
    brain = Lengths()
    ranker, _ = ranker_of(brain, Clock(), **options)
    assert ranker.armed is armed
    brain.armed = False
    assert ranker.armed is False


def test_after_a_fault_the_brain_is_left_alone() -> None:
    class Broken(Lengths):
        calls = 0

        closed = False

        def state(self, request_id: str, row: Any) -> None:
            self.calls += 1
            raise ValueError("width")

        def close(self) -> None:
            self.closed = True

    brain = Broken()
    ranker, _ = ranker_of(brain, Clock())
    request = StandIn("a")
    ranker.arrived(request)
    ranker.state("unknown", None)
    assert brain.calls == 0
    ranker.state("a", None)
    ranker.state("a", None)
    assert brain.calls == 1
    assert (ranker.armed, ranker.fault) == (False, "ValueError: width")
    ranker.finished(request)
    assert brain.ended == []
    ranker.close()
    assert brain.closed, "it has a process and threads"


def test_the_watcher_is_a_brain_that_never_arms() -> None:
    watcher = Watcher()
    assert isinstance(watcher, Brain)
    ranker, _ = ranker_of(watcher, Clock(), memory_weight=0)
    request = StandIn("a")
    ranker.arrived(request)
    ranker.state("a", None)
    assert ranker.key(request) == pytest.approx(0.0)
    ranker.finished(request)
    ranker.close()
    assert (ranker.armed, ranker.fault) == (False, None)
