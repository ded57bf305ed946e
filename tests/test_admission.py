"""Admission and the aging clock from Python: their formulas by numpy, and errors by name."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from leap_rs._leap import Admission, AgingClock, ConfigError, RemainingTable

AHEAD = np.array([8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 16384])


@given(
    lengths=st.lists(st.floats(1e-3, 1e6), min_size=1, max_size=20),
    mean=st.floats(1.0, 1e4),
    squared=st.booleans(),
)
def test_the_boost_is_its_formula(lengths: list[float], mean: float, squared: bool) -> None:
    x, u = np.array(lengths), mean**2 if squared else mean
    got = AgingClock(per_wait=2.0).boosted(np.log(x).tolist(), [mean] * len(x), squared=squared)
    # -expm1(-y) is 1 - exp(-y) to the last digit.
    assert np.allclose(got, np.log(u / 9 * -np.expm1(-9 * x / u)), rtol=1e-12, atol=1e-12)


def test_lengths_are_compared_as_they_are_by_the_second_and_before_a_mean_is_known() -> None:
    ln = [math.log(x) for x in (0.5, 100.0, 1e5)]
    assert AgingClock(per_second=0.05).boosted(ln, [10.0] * 3, squared=True) == pytest.approx(ln)
    assert AgingClock(per_wait=2.0).boosted(ln, [math.inf] * 3, squared=False) == pytest.approx(ln)
    assert AgingClock(per_wait=2.0).boosted([], [], squared=False) == []


def test_each_request_goes_by_the_mean_of_its_own_arrival() -> None:
    got = AgingClock(per_wait=2.0).boosted([math.log(60.0)] * 2, [6.0, 600.0], squared=False)
    assert np.exp(got) == pytest.approx([6 / 9 * (1 - math.exp(-90)), 600 / 9 * (1 - math.exp(-0.9))])


def test_by_the_second_the_clock_is_the_time() -> None:
    clock = AgingClock(per_second=0.5)
    for second in range(1, 20):
        clock.finished(30)
        clock.step(float(second), 1000)
    assert clock.at(40.0) == pytest.approx(20.0)
    assert clock.arrival(40.0) == pytest.approx((20.0, 30.0))


def test_a_standing_wait_is_worth_alpha_at_any_load() -> None:
    for waiting in (40, 400):
        clock = AgingClock(per_wait=3.0)
        assert clock.arrival(0.0) == (0.0, math.inf)
        for second in range(1, 900):
            clock.finished(None if second % 2 else 50)
            clock.finished(150)
            clock.step(float(second), waiting)
        # Two a second end, so `waiting` / 2 seconds are the standing wait.
        start = clock.at(899.0)
        assert clock.at(899.0 + waiting / 2) - start == pytest.approx(3.0, rel=0.02)
        # Every other second one of 50 beside one of 150, else one of 150 alone.
        assert clock.arrival(899.0)[1] == pytest.approx((50 + 2 * 150) / 3, rel=0.01)


@pytest.mark.parametrize("rate", [-1.0, math.nan, math.inf])
def test_a_rate_that_is_none_is_refused_in_one_line(rate: float) -> None:
    with pytest.raises(ConfigError, match=r"^aging: expected a finite number of at least 0"):
        AgingClock(per_wait=rate)
    with pytest.raises(ConfigError, match=r"^aging_rate: expected a finite number of at least 0"):
        AgingClock(per_second=rate)


def test_one_aging_is_asked_for() -> None:
    for given_ in ({}, {"per_wait": 1.0, "per_second": 1.0}):
        with pytest.raises(ConfigError, match="either per_wait or per_second"):
            AgingClock(**given_)
    with pytest.raises(ConfigError, match="2 lengths and 1 means"):
        AgingClock(per_wait=1.0).boosted([1.0, 2.0], [3.0], squared=False)


@pytest.mark.parametrize("share", [0.0, -0.01, 1.5, math.nan])
def test_a_share_that_is_none_is_refused_in_one_line(share: float) -> None:
    with pytest.raises(ConfigError, match=r"^recompute_share: expected a number above 0 and at most 1, got"):
        Admission([(16, None)], 100, share)


def test_as_many_numbers_as_ids() -> None:
    with pytest.raises(ConfigError, match="2 ids and 1 numbers"):
        Admission([(16, None)], 100, 0.01).progressed([1, 2], [3])
    with pytest.raises(OverflowError):
        Admission([(16, None)], -1, 0.01)


resident = st.tuples(st.integers(1, 900), st.integers(1, 900), st.integers(0, 20), st.floats(0, 1))


def held(prompt: int, shared: int, generated: int, length: int, cap: int) -> np.ndarray:
    """Blocks that one of a known length has to itself at each of the tokens ahead; none once it has ended."""
    begun = (prompt + generated) // 16 * 16
    stored = begun + 8
    ahead = max(begun - prompt, 0) + AHEAD
    blocks = np.maximum((stored + AHEAD) / 16 + 0.5 - shared, 0.0)
    return np.where(ahead < min(length, cap), blocks, 0.0)


@given(residents=st.lists(resident, min_size=2, max_size=8), blocks=st.integers(20, 800), cap=st.integers(1, 1000))
def test_with_known_lengths_a_request_comes_in_where_all_of_them_fit(
    residents: list[tuple[int, int, int, float]], blocks: int, cap: int
) -> None:
    room = Admission([(16, None)], blocks, 0.01)
    total = np.zeros(len(AHEAD))
    for number, (prompt, length, shared, progress) in enumerate(residents):
        generated = int(progress * (length - 1))
        total += held(prompt, shared, generated, length, cap)
        table = RemainingTable.of_length(length)
        if number == len(residents) - 1:
            fits = room.has_room(prompt=prompt, generated=generated, cap=cap, shared_blocks=shared, table=table)
        else:
            room.admitted(number, prompt=prompt, cap=cap, shared_blocks=shared, table=table)
            room.progressed([number], [generated])
    # Sums are kept in parts of a block: what is that near to the edge may be on either side of it.
    if abs(total.max() - blocks) > 0.01:
        assert fits is bool(total.max() <= blocks)


def test_holds_are_counted_and_the_margin_follows_what_is_computed_again() -> None:
    room = Admission([(16, None)], 100, 0.01)
    assert (room.holds, room.peak_ratio) == (0, None)
    room.held()
    room.held()
    assert room.holds == 2
    start = room.z
    room.stepped(1000, 0)
    # 5 standard deviations a KV cache of 1,600 tokens computed again; what is computed at all counts a hundredth.
    assert room.z == pytest.approx(start - 5 * 1000 * 0.01 / 1600, abs=1e-4)
    room.stepped(0, 40)
    assert room.z == pytest.approx(start - 5 * 10 / 1600 + 5 * 40 / 1600, abs=1e-4)


def test_who_left_or_was_never_in_takes_no_room() -> None:
    table = RemainingTable.of_length(1000)
    room = Admission([(16, None)], 90, 0.01)
    asked = {"prompt": 64, "generated": 0, "cap": 2000, "shared_blocks": 0, "table": table}
    for leave in (room.left, room.preempted):
        room.admitted(1, prompt=64, cap=2000, shared_blocks=0, table=table)
        room.progressed([1, 77], [0, 5])
        assert not room.has_room(**asked)
        # Now that it is known to be short, the other may come in; and if it is long again, not.
        room.learned(1, RemainingTable.of_length(5))
        room.progressed([1], [0])
        assert room.has_room(**asked)
        room.learned(1, table)
        room.progressed([1], [0])
        assert not room.has_room(**asked)
        leave(1)
        leave(1)
        assert room.has_room(**asked)
