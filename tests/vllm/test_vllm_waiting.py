"""The waiting queue against a list that is sorted whole, in both of its orders and across changes between them."""

# ruff: noqa: ARG002 - brains carry out a protocol, whatever they make of its arguments

from __future__ import annotations

import math
import random
from collections import deque
from typing import Any

import pytest

pytest.importorskip("vllm.version")

from fake_setup import VERSION  # noqa: F401 - imports vLLM with its warnings silenced
from stand_ins import Clock, Lengths, StandIn, ranker_of

from leap_rs.vllm.order import Ranker
from leap_rs.vllm.waiting import INSERTED_A_STEP, RESCORED_A_STEP, WaitingQueue


def key_of(request: StandIn, length: float, arrival_s: float, rate: float, weight: float) -> float:
    remaining = max(length - request.num_output_tokens, 1)
    mean = min(remaining, max(request.max_tokens - request.num_output_tokens, 1))
    held = request.num_prompt_tokens + request.num_output_tokens + mean / 2
    return math.log(remaining) + weight * math.log(held) + rate * arrival_s


@pytest.mark.parametrize("seed", range(40))
def test_it_is_what_a_search_of_a_list_would_find(seed: int) -> None:
    rng = random.Random(seed)
    rate, weight = rng.choice([0.0, 0.05, 1.0]), rng.choice([0.0, 1.0])
    cap = rng.choice([None, 4.0])
    clock, brain = Clock(), Lengths()
    ranker, options = ranker_of(brain, clock, aging_rate=rate, memory_weight=weight, wait_cap_s=cap)
    queue = WaitingQueue(ranker, options)
    queue.arm(True)
    inside: dict[str, tuple[float, int, StandIn]] = {}
    arrived: dict[str, float] = {}

    def expected() -> list[StandIn]:
        def place(item: tuple[float, int, StandIn]) -> tuple[float, ...]:
            since, number, request = item
            if cap is not None and clock.now - since >= cap:
                return (0, since, number)
            key = key_of(request, brain.lengths[request.request_id], arrived[request.request_id], rate, weight)
            return (1, key, number)

        return [item[2] for item in sorted(inside.values(), key=place)]

    for number in range(200):
        clock.now += rng.choice([0.0, 0.25, 1.0])
        action = rng.random()
        if action < 0.4 or not inside:
            # A few at a time, which are put in their places, and many, after which all are put in order.
            for i in range(rng.choice([1, 1, 2, INSERTED_A_STEP + 1])):
                request = StandIn(
                    f"r{number}.{i}", num_prompt_tokens=rng.randint(1, 300), max_tokens=rng.randint(1, 500)
                )
                brain.lengths[request.request_id] = rng.randint(1, 400)
                arrived[request.request_id] = clock.now
                ranker.arrived(request)
                inside[request.request_id] = (clock.now, ranker.live(request).number, request)
                rng.choice([queue.add_request, queue.prepend_request, lambda r: queue.prepend_requests([r])])(request)
        elif action < 0.5:
            gone = rng.choice(list(inside.values()))[2]
            del inside[gone.request_id]
            rng.choice([queue.remove_request, lambda r: queue.remove_requests([r, StandIn("other")])])(gone)
        elif action < 0.6:
            for name in inside:
                brain.lengths[name] = rng.randint(1, 400)
            queue.rescore(everybody=True)
            while queue._stale:
                queue.rescore()
        else:
            # A step of vLLM's: some are passed over and put back, some are admitted, and some of these preempted at once.
            queue.arrange(clock.now)
            assert list(queue) == expected()
            skipped: deque[StandIn] = deque()
            for _ in range(rng.randint(0, len(inside))):
                first = queue.peek_request()
                assert queue.pop_request() is first
                if rng.random() < 0.7:
                    skipped.appendleft(first)
                else:
                    del inside[first.request_id]
            queue.prepend_requests(skipped)
            # Everybody has kept their place, so there is nothing to be done.
            assert list(queue) == [request for request in expected() if request.request_id in inside]
        assert len(queue) == len(inside)
        assert bool(queue) is bool(inside)
        assert {request.request_id for request in queue} == set(inside)
        if inside:
            first_of_all = queue.first(clock.now)
            assert first_of_all is not None
            assert first_of_all[1] is expected()[0]
        else:
            assert queue.first(clock.now) is None
    assert queue._requests.keys() == {number for _, number, _ in inside.values()}
    assert queue._numbers.keys() == inside.keys()


@pytest.mark.parametrize("seed", range(10))
def test_unarmed_it_is_a_deque_as_vllm_uses_one(seed: int) -> None:
    rng = random.Random(seed)
    ranker, options = ranker_of(Lengths(), Clock())
    queue, model = WaitingQueue(ranker, options), deque[Any]()
    for number in range(200):
        request = StandIn(f"r{number}")
        action = rng.random()
        if action < 0.4:
            queue.add_request(request)
            model.append(request)
        elif action < 0.5:
            queue.prepend_request(request)
            model.appendleft(request)
        elif action < 0.6:
            several = [StandIn(f"r{number}.{i}") for i in range(3)]
            queue.prepend_requests(several)
            model.extendleft(several)
        elif model and action < 0.7:
            several = rng.sample(list(model), min(2, len(model)))
            queue.remove_requests(several)
            model = deque(item for item in model if item not in several)
        elif model and action < 0.75:
            one = rng.choice(list(model))
            queue.remove_request(one)
            model.remove(one)
        elif model:
            assert queue.peek_request() is model[0]
            assert queue.pop_request() is model.popleft()
        assert list(queue) == list(model)
        assert len(queue) == len(model)


def test_arming_and_disarming_keep_everybody() -> None:
    brain = Lengths({"a": 30, "b": 10, "c": 20})
    ranker, options = ranker_of(brain, Clock(), memory_weight=0)
    queue = WaitingQueue(ranker, options)
    requests = [StandIn(name) for name in "abc"]
    for request in requests:
        ranker.arrived(request)
        queue.add_request(request)
    queue.arm(True)
    queue.arrange(0.0)
    assert [request.request_id for request in queue] == ["b", "c", "a"]
    queue.arm(False)
    assert list(queue) == requests
    queue.arm(True)
    queue.arrange(0.0)
    assert queue.pop_request() is requests[1]
    queue.arm(False)
    assert list(queue) == [requests[0], requests[2]]


def test_an_empty_queue_says_so() -> None:
    ranker, options = ranker_of(Lengths(), Clock())
    queue = WaitingQueue(ranker, options)
    for armed in (False, True):
        queue.arm(armed)
        assert not queue
        assert list(queue) == []
        with pytest.raises(IndexError):
            queue.peek_request()
        with pytest.raises(IndexError):
            queue.pop_request()
        with pytest.raises(ValueError, match=r"r0|not in"):
            queue.remove_request(StandIn("r0"))
        queue.remove_requests([StandIn("r0")])


def test_a_request_that_has_ended_can_still_be_taken_out() -> None:
    """vLLM frees a preempted request that ends with a token that was under way before it takes it out of the queue."""
    ranker, options = ranker_of(Lengths({"a": 5, "b": 6}), Clock())
    queue = WaitingQueue(ranker, options)
    queue.arm(True)
    first, second = StandIn("a"), StandIn("b")
    for request in (first, second):
        ranker.arrived(request)
        queue.add_request(request)
    ranker.finished(first)
    queue.remove_requests({first})
    assert list(queue) == [second]
    assert ranker.live(second).number == 1


def test_rescoring_is_spread_over_steps() -> None:
    waiting = 2 * RESCORED_A_STEP + 10
    brain = Lengths({f"r{i}": 10 + i for i in range(waiting)})
    ranker, options = ranker_of(brain, Clock(), memory_weight=0)
    queue = WaitingQueue(ranker, options)
    queue.arm(True)
    for i in range(waiting):
        request = StandIn(f"r{i}")
        ranker.arrived(request)
        queue.add_request(request)
    queue.arrange(0.0)
    brain.lengths = {f"r{i}": 10 + waiting - i for i in range(waiting)}
    for step in range(3):
        queue.rescore(everybody=step == 0)
        queue.arrange(0.0)
        settled = queue.peek_request().request_id == f"r{waiting - 1}"
        assert settled is (step == 2)
    assert [request.request_id for request in queue] == [f"r{i}" for i in reversed(range(waiting))]


def test_those_of_whom_more_is_known_get_new_keys_and_nobody_else_does(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = 2 * RESCORED_A_STEP
    brain = Lengths({f"r{i}": 1000 + i for i in range(waiting)})
    ranker, options = ranker_of(brain, Clock(), memory_weight=0)
    queue = WaitingQueue(ranker, options)
    queue.arm(True)
    for i in range(waiting):
        request = StandIn(f"r{i}", max_tokens=5000)
        ranker.arrived(request)
        queue.add_request(request)
    queue.arrange(0.0)
    asked: list[str] = []
    ranks = Ranker.ranks
    monkeypatch.setattr(
        Ranker, "ranks", lambda self, requests: (asked.extend(r.request_id for r in requests), ranks(self, requests))[1]
    )
    last = f"r{waiting - 1}"
    brain.lengths.update({last: 3, "r7": 1, "r8": 2, "r9": 4})
    queue.rescore(fresh=["r7", "gone", last])
    assert set(asked) == {"r7", last}
    assert len(asked) == 2
    queue.arrange(0.0)
    assert [request.request_id for request in queue][:3] == ["r7", last, "r0"]
    # Where everybody's turn comes too, theirs comes first.
    queue.rescore(everybody=True)
    queue.rescore(fresh=[last])
    assert asked[2 + RESCORED_A_STEP] == last
    assert len(asked) == 2 + 2 * RESCORED_A_STEP
    # As many at once as come: a bounded number a step.
    asked.clear()
    for step in range(4):
        queue.rescore(fresh=[f"r{i}" for i in range(RESCORED_A_STEP + 5)] if step == 0 else ())
        assert len(asked) <= (step + 1) * RESCORED_A_STEP
    assert set(asked) >= {f"r{i}" for i in range(RESCORED_A_STEP + 5)}


def test_who_holds_blocks_goes_first_in_the_queue_of_the_skipped() -> None:
    brain = Lengths({"short": 1, "holder": 500})
    ranker, options = ranker_of(brain, Clock(), memory_weight=1, aging_rate=0.05)
    queue = WaitingQueue(ranker, options, holders_first=True)
    queue.arm(True)
    for request in (StandIn("short"), StandIn("holder", num_computed_tokens=16)):
        ranker.arrived(request)
        queue.add_request(request)
    queue.arrange(0.0)
    assert queue.peek_request().request_id == "holder"


def test_a_brain_that_fails_leaves_the_order_of_arrival() -> None:
    class Broken(Lengths):
        def remaining_key(self, request_id: str, generated: int) -> float:
            raise RuntimeError("no readout")

    ranker, options = ranker_of(Broken(), Clock())
    assert isinstance(ranker, Ranker)
    assert ranker.armed
    queue = WaitingQueue(ranker, options)
    queue.arm(True)
    request = StandIn("a")
    ranker.arrived(request)
    queue.add_request(request)
    queue.arrange(0.0)
    assert not ranker.armed
    assert ranker.fault == "RuntimeError: no readout"
    assert queue.pop_request() is request


@pytest.mark.parametrize("answer", [float("nan"), float("inf"), float("-inf"), 1e308, -1e308])
def test_a_senseless_prediction_still_has_a_place(answer: float) -> None:
    class Senseless(Lengths):
        def remaining_key(self, request_id: str, generated: int) -> float:
            return answer if request_id == "odd" else math.log(7)

    ranker, options = ranker_of(Senseless(), Clock())
    queue = WaitingQueue(ranker, options)
    queue.arm(True)
    for name in ("odd", "even"):
        request = StandIn(name)
        ranker.arrived(request)
        queue.add_request(request)
    queue.arrange(0.0)
    assert {queue.pop_request().request_id for _ in range(2)} == {"odd", "even"}


@pytest.mark.parametrize("armed", [False, True])
def test_while_the_first_of_all_has_no_room_neither_queue_has_anybody(armed: bool) -> None:
    """Before 0.32 vLLM keeps those that it skipped apart, looks at them first, and takes an empty queue for the other."""
    ranker, options = ranker_of(Lengths({"old": 50, "new": 10}), Clock(), memory_weight=0)
    asked: list[str] = []

    def lets_in(queue: WaitingQueue) -> bool:
        asked.append(queue.first_of_all().request_id)
        return asked[-1] != first

    waiting = WaitingQueue(ranker, options, lets_in=lets_in)
    skipped = WaitingQueue(ranker, options, lets_in=lets_in, holders_first=True)
    waiting.beside, skipped.beside = (skipped,), (waiting,)
    old, new = StandIn("old"), StandIn("new")
    for request in (old, new):
        ranker.arrived(request)
    skipped.add_request(old)
    waiting.add_request(new)
    for queue in (waiting, skipped):
        queue.arm(armed)
        queue.arrange(0.0)
    # By key the shorter one is first, though it stands in the other queue.
    first = "new" if armed else "old"
    assert (bool(waiting), bool(skipped)) == (False, False)
    assert (len(waiting), len(skipped)) == (1, 1)
    assert asked == [first, first]
    (waiting if armed else skipped).pop_request()
    # Whoever is left has room.
    assert (bool(waiting), bool(skipped)) == (not armed, armed)
    assert asked[2:] == ["old" if armed else "new"]


def test_who_has_only_just_been_passed_over_has_no_place_yet() -> None:
    """Until 0.31 vLLM asks whether anybody waits once more after it has put them into the other queue."""
    ranker, options = ranker_of(Lengths({"a": 50, "b": 10}), Clock(), memory_weight=0)
    waiting, skipped = WaitingQueue(ranker, options), WaitingQueue(ranker, options, holders_first=True)
    waiting.beside, skipped.beside = (skipped,), (waiting,)
    for name in ("a", "b"):
        request = StandIn(name)
        ranker.arrived(request)
        waiting.add_request(request)
    for queue in (waiting, skipped):
        queue.arm(True)
        queue.arrange(0.0)
    passed_over = waiting.pop_request()
    assert passed_over.request_id == "b"
    skipped.prepend_requests([passed_over])
    assert skipped.urgency() is None
    assert waiting.first_of_all().request_id == "a"
    # The next step knows it again.
    for queue in (waiting, skipped):
        queue.arrange(1.0)
    assert waiting.first_of_all() is passed_over


def test_an_empty_queue_asks_nobody() -> None:
    ranker, options = ranker_of(Lengths(), Clock())
    queue = WaitingQueue(ranker, options, lets_in=lambda _: pytest.fail("asked for nobody"))
    assert not queue
