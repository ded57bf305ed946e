"""The space of a search: what it holds, where it starts, and that every part of it can be reached."""

from __future__ import annotations

import pytest

from leap_rs._leap import ConfigError
from leap_rs.replay.tune.space import AGING_RATES, Candidate, Space, default_space, fcfs


@pytest.fixture
def space() -> Space:
    return default_space(256)


def test_the_default_space_is_the_product_of_its_choices(space: Space) -> None:
    """All 7 sets of levers where every resident decodes, the 4 with slots where fewer do; fcfs at other numbers."""
    assert {engine for engine in space.engines if engine[1] is None} == {(n, None) for n in (256, 128, 64)}
    assert {engine for engine in space.engines if engine[0] == 128} == {(128, None), (128, 96), (128, 64)}
    each = len(space.orders) * len(AGING_RATES) * 2
    assert len(space.candidates()) == 3 * 7 * each + 6 * 4 * each + 2
    assert len(set(space.candidates())) == space.to_dict()["candidates"]


def test_everything_that_a_search_meets_is_in_the_space(space: Space) -> None:
    everything = set(space.candidates())
    coarse = space.coarse()
    assert set(coarse) <= everything
    for candidate in coarse:
        for stride in space.strides:
            found = space.neighbours(candidate, stride)
            assert candidate not in found
            assert set(found) <= everything


@pytest.mark.parametrize("count", range(1, 41))
def test_refinements_reach_every_aging_rate(count: int) -> None:
    swept = {"aging_rate": [0.25 * i for i in range(count)], "max_num_seqs": [8.0], "decode_slots": [8.0]}
    space = default_space(8, swept)
    reached = set(space.coarse())
    for stride in space.strides:
        reached |= {other for one in reached for other in space.neighbours(one, stride)}
    assert {one.aging_rate for one in reached} == set(space.aging_rates)


def test_from_a_coarse_candidate_all_choices_can_be_reached(space: Space) -> None:
    start = Candidate(("queue",), "gittins:ptl", 0.07, 1.0, None, 256)
    reached, front = {start}, {start}
    while front:
        front = {other for one in front for other in space.neighbours(one, 1)} - reached
        reached |= front
    assert reached == {one for one in space.candidates() if one.order == "gittins:ptl"}


def test_fewer_slots_than_sequences_only_with_the_lever(space: Space) -> None:
    limited = [one for one in space.candidates() if one.decode_slots is not None]
    assert limited
    assert all("slots" in one.levers and one.decode_slots < one.max_num_seqs for one in limited if one.decode_slots)


@pytest.mark.parametrize(("stock", "searched"), [(300, {75, 150, 300}), (3, {1, 3}), (1, {1})])
def test_no_more_sequences_than_the_engine_has(stock: int, searched: set[int]) -> None:
    assert {n for n, _ in default_space(stock).engines} == searched


def test_swept_values_replace_the_usual_ones() -> None:
    swept = {"max_num_seqs": [8.0, 32.0], "decode_slots": [4.0, 16.0], "aging_rate": [0.25]}
    space = default_space(16, swept)
    assert space.engines == ((8, None), (8, 4), (32, None), (32, 4), (32, 16))
    assert space.aging_rates == (0.25,)
    assert fcfs(8) in space.candidates()
    with pytest.raises(ConfigError, match="sweep: load is no choice of --tune"):
        default_space(16, {"load": [1.0]})


@pytest.mark.parametrize(
    ("candidate", "policy"),
    [
        (fcfs(4), "fcfs"),
        (
            Candidate(("queue", "slots"), "gittins:e2el", 0.05, 1.0, None, 4),
            "leap:levers=queue+slots,order=gittins,objective=e2el,aging_rate=0.05,memory_weight=1",
        ),
        (
            Candidate(("evict",), "countdown", 0.123456789, 0.0, 2, 4),
            "leap:levers=evict,order=countdown,aging_rate=0.123456789,memory_weight=0",
        ),
    ],
)
def test_a_candidate_as_a_policy(candidate: Candidate, policy: str) -> None:
    assert candidate.policy == policy
