"""Who gives its KV cache to a better request that waits."""

from __future__ import annotations

import math

import pytest
from stand_ins import options_of

from leap_rs.vllm.evict import Claim, Evictor, Resident


def residents(*items: tuple[float, int]) -> list[Resident]:
    return [Resident(f"r{i}", key, i, blocks) for i, (key, blocks) in enumerate(items)]


def test_only_as_many_as_make_room_the_worst_first() -> None:
    evictor = Evictor(options_of(evict_factor=2, evict_per_s=1))
    here = residents((5.0, 4), (9.0, 4), (7.0, 4), (2.0, 4))
    assert evictor.victims(Claim(1.0, 6, seat=False), here, 0, now=0.0) == ["r1", "r2"]
    assert evictor.evictions == 2


def test_a_seat_takes_one_even_where_memory_is_free() -> None:
    evictor = Evictor(options_of())
    assert evictor.victims(Claim(1.0, 6, seat=True), residents((5.0, 1), (6.0, 1)), 100, now=0.0) == ["r1"]
    assert Evictor(options_of()).victims(Claim(1.0, 6, seat=False), residents((5.0, 1)), 100, now=0.0) == []


@pytest.mark.parametrize(("factor", "evicted"), [(1.0, True), (2.0, True), (2.1, False)])
def test_only_who_is_worse_by_the_factor(factor: float, evicted: bool) -> None:
    here = residents((math.log(20.001), 8))
    claim = Claim(math.log(10), 8, seat=False)
    assert bool(Evictor(options_of(evict_factor=factor)).victims(claim, here, 0, now=0.0)) is evicted


def test_nobody_where_it_would_not_be_enough() -> None:
    evictor = Evictor(options_of())
    assert evictor.victims(Claim(0.0, 10, seat=False), residents((5.0, 4), (6.0, 4)), 1, now=0.0) == []
    assert evictor.evictions == 0
    # It does not look at everybody again in the very next step.
    assert not evictor.ready(0.01)
    assert evictor.ready(1.0)


def test_no_more_than_the_rate() -> None:
    evictor = Evictor(options_of(evict_per_s=0.5))
    here = residents(*[(5.0 + i, 1) for i in range(10)])
    assert len(evictor.victims(Claim(0.0, 3, seat=False), here, 0, now=10.0)) == 3
    # Three at one in two seconds.
    assert not evictor.ready(15.9)
    assert evictor.victims(Claim(0.0, 1, seat=False), here, 0, now=15.9) == []
    assert len(evictor.victims(Claim(0.0, 1, seat=False), here, 0, now=16.0)) == 1
    assert not Evictor(options_of(evict_per_s=0)).ready(1e9)


def test_of_equals_the_last_to_arrive() -> None:
    here = residents((5.0, 4), (5.0, 4), (6.0, 4), (5.0, 4))
    assert Evictor(options_of()).victims(Claim(0.0, 7, seat=False), here, 0, now=0.0) == ["r2", "r3"]
