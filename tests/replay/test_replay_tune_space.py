"""The space of a search: what it holds, where it starts, and that every part of it can be reached."""

from __future__ import annotations

import polars as pl
import pytest

from leap_rs._leap import ConfigError
from leap_rs.replay import replay
from leap_rs.replay.tune.space import (
    AGINGS,
    LEVER_SETS,
    RECOMPUTE_SHARES,
    Candidate,
    Space,
    default_space,
    fcfs,
    plain_leap,
)


@pytest.fixture
def space() -> Space:
    return default_space(256)


def test_the_default_space_is_the_product_of_its_choices(space: Space) -> None:
    """All sets of levers where every resident decodes, those with slots where fewer do; fcfs at other numbers."""
    assert {engine for engine in space.engines if engine[1] is None} == {(n, None) for n in (256, 128, 64)}
    assert {engine for engine in space.engines if engine[0] == 128} == {(128, None), (128, 96), (128, 64)}
    each = len(space.orders) * len(AGINGS) * 2
    # What admission risks is a choice only where it is a lever.
    risks = {levers: len(RECOMPUTE_SHARES) if "admission" in levers else 1 for levers in LEVER_SETS}
    slotted = sum(risks[levers] for levers in LEVER_SETS if "slots" in levers)
    assert len(space.candidates()) == 3 * sum(risks.values()) * each + 6 * slotted * each + 2
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


@pytest.mark.parametrize("key", ["aging", "aging_rate"])
@pytest.mark.parametrize("count", range(1, 41))
def test_refinements_reach_every_aging(count: int, key: str) -> None:
    swept = {key: [0.25 * i for i in range(count)], "max_num_seqs": [8.0], "decode_slots": [8.0]}
    space = default_space(8, swept)
    reached = set(space.coarse())
    for stride in space.strides:
        reached |= {other for one in reached for other in space.neighbours(one, stride)}
    assert {one.aging for one in reached} == set(space.agings)
    assert {one.aging_key for one in reached} == {key}


def test_from_a_coarse_candidate_all_choices_can_be_reached(space: Space) -> None:
    start = Candidate(("queue",), "gittins:ptl", 0.5, 1.0, None, 256)
    reached, front = {start}, {start}
    while front:
        front = {other for one in front for other in space.neighbours(one, 1)} - reached
        reached |= front
    assert reached == {one for one in space.candidates() if one.order == "gittins:ptl"}


def test_fewer_slots_than_sequences_only_with_the_lever(space: Space) -> None:
    limited = [one for one in space.candidates() if one.decode_slots is not None]
    assert limited
    assert all("slots" in one.levers and one.decode_slots < one.max_num_seqs for one in limited if one.decode_slots)


@pytest.mark.parametrize(
    ("stock", "could_hold", "searched"),
    [
        (300, None, [300, 150, 75]),
        (3, None, [3, 1]),
        (1, None, [1]),
        # 1.25 times the seats is where more of them begin to be worth a look.
        (300, 374, [300, 150, 75]),
        (300, 375, [300, 150, 75, 375]),
        # From three times on also their geometric mean.
        (100, 299, [100, 50, 25, 299]),
        (100, 400, [100, 50, 25, 200, 400]),
    ],
)
def test_as_many_sequences_as_the_kv_cache_holds(stock: int, could_hold: int | None, searched: list[int]) -> None:
    space = default_space(stock, None, could_hold)
    assert [n for n, slots in space.engines if slots is None] == searched
    assert {fcfs(n) for n in searched if n != stock} == {one for one in space.candidates() if not one.levers}


def test_swept_values_replace_the_usual_ones() -> None:
    swept = {"max_num_seqs": [8.0, 32.0], "decode_slots": [4.0, 16.0], "aging_rate": [0.25]}
    space = default_space(16, swept)
    assert space.engines == ((8, None), (8, 4), (32, None), (32, 4), (32, 16))
    assert (space.aging_key, space.agings) == ("aging_rate", (0.25,))
    assert space.to_dict()["aging_rates"] == [0.25]
    assert default_space(16, {"aging": [3.0]}).to_dict()["agings"] == [3.0]
    assert fcfs(8) in space.candidates()
    with pytest.raises(ConfigError, match="sweep: load is no choice of --tune"):
        default_space(16, {"load": [1.0]})


@pytest.mark.parametrize(
    ("candidate", "policy"),
    [
        (fcfs(4), "fcfs"),
        (
            Candidate(("queue", "slots"), "gittins:e2el", 0.05, 1.0, None, 4, None, "aging_rate"),
            "leap:levers=queue+slots,order=gittins,objective=e2el,aging_rate=0.05,memory_weight=1",
        ),
        (
            Candidate(("queue", "admission"), "countdown", 0.123456789, 0.0, 2, 4, 0.003),
            "leap:levers=queue+admission,order=countdown,aging=0.123456789,memory_weight=0,recompute_share=0.003",
        ),
    ],
)
def test_a_candidate_as_a_policy(candidate: Candidate, policy: str) -> None:
    assert candidate.policy == policy


def test_the_untuned_policy_is_the_default_of_the_replayer() -> None:
    """The core says what `leap` is; here it is spelled out, so that it stands beside what was searched."""
    frame = pl.DataFrame({"arrival_s": [0.0, 1.0], "prompt_tokens": [5, 5], "output_tokens": [9, 9]})
    spelled = plain_leap(4).policy
    result = replay(frame, policies=["leap", spelled], seeds=1, max_num_seqs=4, readout="none").to_dict()
    ours, core = (result["config"]["policy_options"][name] for name in (spelled, "leap"))
    assert {**ours, "name": "leap"} == core
