"""Order of requests from Python: values against numpy and scipy, the queue against a sorted list, errors by name."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from leap_rs._leap import AgingQueue, ConfigError, LeapError, RemainingTable, remaining, select_slots, static_key


def survival_by_integration(m: float, s: float, a: float, cap: float) -> float:
    """E[min(L, cap) - a | L > a] by the midpoint rule over y = sqrt(L)."""
    low = max(math.sqrt(a), m - 12 * s)
    edges = np.linspace(low, max(m + 12 * s, low + 12 * s), 200_001)
    y = (edges[1:] + edges[:-1]) / 2
    z = (y - m) / s
    density = np.exp(-0.5 * (z**2 - np.min(np.abs(z)) ** 2))
    return float(np.sum((np.minimum(y**2, cap) - a) * density) / np.sum(density))


@pytest.mark.parametrize(
    ("m", "s", "a", "cap"),
    [
        (15, 5, 200, math.inf),
        (15, 5, 200, 300),
        (15, 5, 0, 1024),
        (10, 3, 900, 4096),
        (60, 20, 100, 2048),
        (8, 2, 400, math.inf),
    ],
)
def test_survival_equals_the_integral(m: float, s: float, a: float, cap: float) -> None:
    assert remaining(m, s, a, cap)[0] == pytest.approx(survival_by_integration(m, s, a, cap), rel=1e-6)


def test_survival_reference_value() -> None:
    assert remaining(15, 5, 200, math.inf)[0] == pytest.approx(150.8, abs=0.05)


def test_kinds_and_broadcasting() -> None:
    score = np.array([10, 20, 30], dtype=np.float16)
    got = remaining(score, 5.0, np.array([0, 500, 100], dtype=np.uint32), 1024, kind="countdown")
    assert got.dtype == np.float64
    assert got.shape == (3,)
    assert got.tolist() == [100.0, 1.0, 800.0]
    each = [remaining(m, 5.0, a, 1024)[0] for m, a in [(10, 0), (20, 500), (30, 100)]]
    assert remaining([10, 20, 30], [5.0], [0, 500, 100], 1024).tolist() == each
    assert remaining([], 5.0, 0, 1024).shape == (0,)


@given(
    m=st.floats(1, 64),
    s=st.floats(0.1, 20),
    a=st.integers(0, 4000),
    objective=st.sampled_from(["ptl", "e2el"]),
)
def test_gittins_equals_its_definition(m: float, s: float, a: int, objective: str) -> None:
    cap = 4096.0
    edges = np.linspace(-4, 4, 33)
    cdf = np.array([0.5 * math.erfc(-z / math.sqrt(2)) for z in edges])
    mass = np.diff(cdf) / (cdf[-1] - cdf[0])
    z = (edges[1:] + edges[:-1]) / 2
    z = z / np.sqrt(np.sum(mass * z**2))
    lengths = np.append(np.minimum(np.maximum(m + s * z, 1) ** 2, cap), cap)
    weights = np.append(mass * 0.999, 0.001)
    left = lengths > a
    lengths, weights = lengths[left], weights[left]
    worth = weights / lengths if objective == "ptl" else weights
    ratios = [
        np.sum(worth[lengths <= x]) / np.sum(np.minimum(lengths - a, x - a) * weights) for x in np.unique(lengths)
    ]
    expected = max(1 / max(ratios), 1.0)
    got = remaining(m, s, a, cap, kind="gittins", objective=objective)[0]  # type: ignore[arg-type]
    assert got == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (([1, math.nan], 1, 0, 10), r"score\[1\]"),
        ((1, [1, 1, -1], 0, 10), r"noise\[2\]"),
        ((1, 1, [-1], 10), r"generated\[0\]"),
        ((1, 1, 0, [10, 0]), r"cap\[1\]"),
        (([1, 2], 1, [1, 2, 3], 10), "generated has 3 values"),
        ((np.ones((2, 2)), 1, 0, 10), "score: expected a number or one dimension"),
    ],
)
def test_remaining_names_the_first_bad_value(arguments: tuple[object, ...], named: str) -> None:
    with pytest.raises(ConfigError, match=named) as caught:
        remaining(*arguments)  # type: ignore[arg-type]
    assert isinstance(caught.value, LeapError)
    assert isinstance(caught.value, ValueError)


def test_unknown_kind_and_objective_are_refused() -> None:
    with pytest.raises(ConfigError, match="srpt"):
        remaining(1, 1, 0, 10, kind="srpt")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="tpot"):
        remaining(1, 1, 0, 10, kind="gittins", objective="tpot")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"cap\[0\]"):
        remaining(1, 1, 0, math.inf, kind="gittins")


@pytest.mark.parametrize("kind", ["countdown", "survival", "gittins"])
@pytest.mark.parametrize("objective", ["ptl", "e2el"])
def test_a_table_holds_what_remaining_says_at_its_levels(kind: str, objective: str) -> None:
    table = RemainingTable(12.5, 4.0, 700, kind=kind, objective=objective)  # type: ignore[arg-type]
    assert (table.score, table.cap, table.known) == (12.5, 700, True)
    level, levels = 0, []
    while level < 700:
        expected = remaining(12.5, 4.0, level, 700, kind=kind, objective=objective)[0]  # type: ignore[arg-type]
        # A table is kept in f32.
        assert table.remaining(level) == pytest.approx(expected, rel=1e-6)
        levels.append(level)
        level = table.next_rekey(level)
    assert levels[:5] == [0, 8, 11, 16, 23]
    assert table.remaining(700) == 1.0
    assert table.next_rekey(700) == 2**32 - 1
    if kind == "survival":
        assert table.mean_remaining(157) == table.remaining(157)
    if kind == "gittins":
        assert table.remaining(9) == table.remaining(8)


def test_a_table_of_a_known_length() -> None:
    assert RemainingTable.of_length(300, objective="e2el").remaining(128) == pytest.approx(172)
    assert RemainingTable.of_length(300, objective="ptl").remaining(128) == pytest.approx(300 * 172)
    assert RemainingTable.of_length(300, kind="countdown").remaining(130) == pytest.approx(170, abs=1e-3)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [((math.nan, 1, 10), "score"), ((1, -1.0, 10), "noise"), ((1, math.inf, 10), "noise"), ((1, 1, 0), "cap")],
)
def test_a_table_of_bad_values_is_refused(arguments: tuple[float, float, int], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        RemainingTable(*arguments)


residents = st.lists(st.tuples(st.floats(1, 9000), st.floats(0, 500), st.integers(0, 200)), max_size=60)


@given(residents, st.integers(0, 70), st.floats(0, 0.2), st.none() | st.integers(0, 200))
def test_select_slots_equals_sorting(
    rows: list[tuple[float, float, int]], slots: int, rate: float, cap: int | None
) -> None:
    tokens, arrival, waited = (np.array([row[i] for row in rows]) for i in range(3))
    keys = [math.log(s) + rate * t for s, t, _ in rows]

    def rank(i: int) -> tuple[int, float, int]:
        late = cap is not None and rows[i][2] >= cap
        return (0, -rows[i][2], i) if late else (1, keys[i], i)

    got = select_slots(tokens, arrival, waited, slots, aging_rate=rate, wait_cap_steps=cap)
    assert got.dtype == np.uint32
    assert got.tolist() == sorted(sorted(range(len(rows)), key=rank)[:slots])


@pytest.mark.parametrize(
    ("arguments", "rate", "named"),
    [
        (([1, 0], [0, 0], [0, 0]), 0.1, r"remaining\[1\]"),
        (([1, 1], [0, math.inf], [0, 0]), 0.1, r"arrival_s\[1\]"),
        (([1, 1], [0, 0], [0, -1]), 0.1, r"steps_waited\[1\]"),
        (([1, 1], [0, 0], [0]), 0.1, "2, 2 and 1 values"),
        (([1, 1], [0, 0], [0, 0]), -1.0, "aging_rate"),
    ],
)
def test_select_slots_names_the_first_bad_value(
    arguments: tuple[list[float], list[float], list[int]], rate: float, named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        select_slots(*arguments, 1, aging_rate=rate, wait_cap_steps=None)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9), st.integers(1, 5), st.integers(0, 9)), max_size=80))
def test_queue_agrees_with_a_sorted_list(steps: list[tuple[int, int, int, int]]) -> None:
    rate = 0.25
    queue = AgingQueue(rate)
    model: dict[int, tuple[float, int, int]] = {}
    pushes = 0
    for action, key, tokens, arrival in steps:
        if action == 0 and key not in model:
            queue.push(key, tokens, arrival)
            model[key] = (math.log(tokens) + rate * arrival, pushes, arrival)
            pushes += 1
        elif action == 1 and model:
            first = min(model, key=lambda k: model[k])
            assert queue.peek() == first
            assert queue.pop() == first
            del model[first]
        elif action == 2 and key in model:
            queue.remove(key)
            del model[key]
        elif action == 3 and key in model:
            queue.rekey(key, tokens)
            model[key] = (math.log(tokens) + rate * model[key][2], *model[key][1:])
        assert len(queue) == len(model)
        assert [k in queue for k in range(10)] == [k in model for k in range(10)]


def test_empty_and_unknown_raise_as_containers_do() -> None:
    queue = AgingQueue(0.05)
    assert not queue
    with pytest.raises(IndexError):
        queue.pop()
    with pytest.raises(IndexError):
        queue.peek()
    with pytest.raises(IndexError):
        queue.head(0.0)
    with pytest.raises(KeyError):
        queue.remove(3)
    with pytest.raises(KeyError):
        queue.rekey(3, 10.0)
    assert "3" not in queue
    assert -1 not in queue


def test_bad_values_change_nothing() -> None:
    with pytest.raises(ConfigError, match="aging_rate"):
        AgingQueue(math.nan)
    with pytest.raises(ConfigError, match="wait_cap_s"):
        AgingQueue(0.05, wait_cap_s=-1.0)
    queue = AgingQueue(0.05)
    queue.push(2**64 - 1, 10.0, 0.0)
    with pytest.raises(ConfigError, match="already"):
        queue.push(2**64 - 1, 10.0, 0.0)
    with pytest.raises(ConfigError, match="request 5: remaining"):
        queue.push(5, math.nan, 0.0)
    with pytest.raises(ConfigError, match="request 5: arrival_s"):
        queue.push(5, 1.0, math.inf)
    assert len(queue) == 1
    assert queue.pop() == 2**64 - 1


def test_wait_cap_acts_where_the_time_is_given() -> None:
    queue = AgingQueue(0.0, wait_cap_s=10.0)
    queue.push(1, 900.0, 0.0)
    queue.push(2, 5.0, 8.0)
    assert queue.peek() == 2
    assert queue.peek(now_s=9.5) == 2
    assert queue.pop(now_s=10.0) == 1


def test_a_wait_counts_from_the_entry_into_the_queue() -> None:
    queue = AgingQueue(0.0, wait_cap_s=10.0)
    queue.push(1, 900.0, 0.0, queued_s=7.0)
    queue.push(2, 5.0, 6.0)
    assert queue.head(15.9) == (2, False, False)
    assert queue.head(16.0) == (2, True, False)
    queue.push(3, 1.0, 6.5)
    assert queue.head(16.0) == (2, True, True)
    queue.remove(2)
    queue.remove(3)
    assert queue.head(16.9) == (1, False, False)
    assert queue.head(17.0) == (1, True, False)
    with pytest.raises(ConfigError, match="queued_s"):
        queue.push(4, 1.0, 0.0, queued_s=math.nan)


def test_the_queue_says_its_keys() -> None:
    queue = AgingQueue(0.1, memory_weight=0.5)
    queue.push(1, 100.0, 7.0, memory_tokens=270.0)
    assert queue.key(1) == pytest.approx(math.log(100) + 0.5 * math.log(270) + 0.7)
    assert static_key(100.0, 0.1, 7.0, memory_weight=0.5, memory_tokens=270.0) == queue.key(1)
    assert static_key(100.0, 0.1, 7.0) == pytest.approx(math.log(100) + 0.7)
    for missing in (lambda: queue.key(2), lambda: AgingQueue(0.1).key(1)):
        with pytest.raises(KeyError):
            missing()


def test_memory_term_counts_with_its_weight() -> None:
    for weight, first in [(0.0, 1), (1.0, 2)]:
        queue = AgingQueue(0.0, memory_weight=weight)
        queue.push(1, 10.0, 0.0, memory_tokens=16_000)
        queue.push(2, 20.0, 0.0, memory_tokens=500)
        assert queue.peek() == first


def test_the_order_of_all_is_what_one_pop_after_the_other_takes() -> None:
    queue = AgingQueue(0.1, wait_cap_s=10.0)
    for number, (tokens, arrival) in enumerate([(900.0, 0.0), (5.0, 8.0), (7.0, 1.0), (5.0, 8.0), (2.0, 9.0)]):
        queue.push(number, tokens, arrival)
    # 0 and 2 have waited for the cap; of equal keys the first in is the first out.
    order = queue.order(11.0)
    assert order == [0, 2, 4, 1, 3]
    assert [queue.place(number, 11.0) for number in order] == [0, 1, 2, 3, 4]
    assert queue.urgency(2, 11.0) == (True, 1.0)
    assert queue.urgency(4, 11.0) == (False, queue.key(4))
    assert queue.next_overdue(11.0) == 18.0
    queue.rekey_many([3, 2], [1.0, 900.0], [1.0, 1.0])
    assert queue.order(9.0) == [3, 4, 1, 0, 2]
    for lengths in ([1.0], [1.0, 1.0, 1.0]):
        with pytest.raises(ConfigError, match="rekey_many: 2 ids"):
            queue.rekey_many([1, 2], lengths, [1.0, 1.0])
    for missing in (lambda: queue.place(9, 0.0), lambda: queue.urgency(9, 0.0)):
        with pytest.raises(KeyError):
            missing()
    with pytest.raises(KeyError):
        queue.rekey_many([9], [1.0], [1.0])
    order = queue.order(11.0)
    assert [queue.pop(11.0) for _ in range(5)] == order
    assert AgingQueue(0.1).next_overdue(0.0) is None
