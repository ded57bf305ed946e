"""The search against brute force: every candidate of its own space through `replay`, on the same half and seeds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from leap_rs._leap import ConfigError
from leap_rs.replay import replay
from leap_rs.replay.options import build
from leap_rs.replay.tune.bound import parse
from leap_rs.replay.tune.measure import Bench
from leap_rs.replay.tune.run import halves, split
from leap_rs.replay.tune.search import FINALISTS, Found, Search
from leap_rs.replay.tune.space import Space
from leap_rs.trace import Trace, load

STOCK = 8
SEEDS = 3
SMALL = Space(
    stock=STOCK,
    levers=(("queue",), ("queue", "evict")),
    orders=("gittins:ptl", "countdown"),
    agings=(0.0, 1.0, 4.0),
    memory_weights=(1.0,),
    engines=((STOCK, None),),
)
LARGE = replace(
    SMALL,
    levers=(("queue",), ("queue", "admission"), ("queue", "evict"), ("queue", "evict", "admission")),
    orders=("gittins:ptl", "gittins:e2el", "survival", "countdown"),
    agings=(0.0, 0.5, 1.0, 2.0, 4.0),
    memory_weights=(1.0, 0.0),
    recompute_shares=(0.01, 0.03),
)


@pytest.fixture(scope="module")
def first() -> Trace:
    """Half of a few requests with prompt features alone, so that a simulation is quick."""
    trace = load(Path(__file__).parents[2] / "traces" / "vicuna-33b-flask.parquet")
    frame = trace.frame.head(200).drop("features", "text_features")
    return halves(replace(trace, frame=frame, metadata={"model": "SmolLM2-135M-Instruct"}))[0]


@pytest.fixture(scope="module")
def options(first: Trace) -> dict[str, Any]:
    return {
        "load": 1.4,
        "seeds": SEEDS,
        "num_prompts": 160,
        "readout": first.path.parent / "readout.prompt.safetensors",
    }


def search(first: Trace, options: dict[str, Any], space: Space, bound: str, objective: str = "mean_ptl") -> Found:
    bounds = parse(bound)
    metrics = ("mean_ptl", "mean_e2el", *(one.metric for one in bounds))
    bench, *parts = (Bench(one, build(options), STOCK, metrics) for one in (first, *split(first)))
    return Search(bench, space, bounds, objective, SEEDS, parts=parts).run()


Row = tuple[float, float, str]
Brute = Callable[[Space, str, float], list[Row]]


@pytest.fixture(scope="module")
def brute_force(first: Trace, options: dict[str, Any]) -> Brute:
    """Objective, upper end of the ratio of P99 E2EL to fcfs, and policy of every candidate, best first.

    The end is the highest of the half and, where the half keeps the factor, of its first and second part.
    """

    @lru_cache
    def results(space: Space) -> list[list[dict[str, Any]]]:
        policies = [one.policy for one in space.candidates()]
        middle = first.frame.height // 2
        found = [
            replay(frame, policies=["fcfs", *policies], max_num_seqs=STOCK, **options).to_dict()["results"][1:]
            for frame in (first.frame, first.frame[:middle], first.frame[middle:])
        ]
        assert [one["policy"] for one in found[0]] == policies
        return found

    def call(space: Space, objective: str, factor: float) -> list[Row]:
        rows = []
        for same in zip(*results(space), strict=True):
            ends = [1 + one["paired"]["p99_e2el_ms"]["ci95"][1] / 100 for one in same]
            end = max(ends) if ends[0] <= factor else ends[0]
            rows.append((same[0]["metrics"][f"{objective}_ms"]["mean"], end, same[0]["policy"]))
        return sorted(rows)

    return call


@pytest.mark.parametrize("objective", ["mean_ptl", "mean_e2el"])
@pytest.mark.parametrize("factor", [1.05, 1.2, 1.5, 9.0])
def test_a_small_space_is_searched_whole(
    first: Trace, options: dict[str, Any], brute_force: Brute, factor: float, objective: str
) -> None:
    assert len(SMALL.candidates()) <= FINALISTS
    everything = brute_force(SMALL, objective, factor)
    meets = [one for one in everything if one[1] <= factor]
    found = search(first, options, SMALL, f"p99_e2el<={factor}", objective)
    if meets:
        assert found.chosen is not None
        assert found.chosen.candidate.policy == meets[0][2]
        assert found.chosen.values[objective].mean() == pytest.approx(meets[0][0], rel=1e-9)
        assert found.nearest is None
    else:
        assert found.chosen is None
        assert found.nearest is not None
        assert found.nearest.candidate.policy == min(everything, key=lambda one: one[1])[2]
    assert found.tried == len(SMALL.candidates())
    assert found.rounds == [{"candidates": len(SMALL.candidates()), "seeds": SEEDS}]


@pytest.mark.parametrize("factor", [1.1, 1.3, 9.0])
def test_a_large_space_gives_nearly_the_best_without_replaying_it_whole(
    first: Trace, options: dict[str, Any], brute_force: Brute, factor: float
) -> None:
    everything = brute_force(LARGE, "mean_ptl", factor)
    best = next(one for one in everything if one[1] <= factor)
    found = search(first, options, LARGE, f"p99_e2el<={factor}")
    assert found.chosen is not None
    assert best[0] * (1 - 1e-9) <= found.chosen.values["mean_ptl"].mean() <= 1.03 * best[0]
    assert any(one[2] == found.chosen.candidate.policy and one[1] <= factor for one in everything)
    assert found.tried < len(LARGE.candidates())
    assert [one["seeds"] for one in found.rounds[:3]] == [1, 1, 2]


def test_nothing_meets_an_impossible_bound(first: Trace, options: dict[str, Any]) -> None:
    found = search(first, options, LARGE, "p99_e2el<=0.01")
    assert found.chosen is None
    assert found.nearest is not None
    others = {one.candidate: float(one.values["p99_e2el"].mean()) for one in found.finalists}
    assert min(others.values()) <= others[found.nearest.candidate] <= 1.1 * min(others.values())


def test_all_bounds_have_to_be_kept(first: Trace, options: dict[str, Any]) -> None:
    loose = search(first, options, SMALL, "p99_e2el<=9")
    both = search(first, options, SMALL, "p99_e2el<=9,p99_ptl<=0.0001")
    assert loose.chosen is not None
    assert both.chosen is None


def test_the_same_seed_gives_the_same_search(first: Trace, options: dict[str, Any]) -> None:
    one, again, threaded = (
        search(first, {**options, "threads": threads}, LARGE, "p99_e2el<=1.3") for threads in (2, 2, 1)
    )
    for other in (again, threaded):
        assert [x.candidate for x in one.finalists] == [x.candidate for x in other.finalists]
        assert one.rounds == other.rounds
        for x, y in zip(one.finalists, other.finalists, strict=True):
            assert all((x.values[name] == y.values[name]).all() for name in x.values)


def test_a_metric_without_a_value_cannot_be_bound() -> None:
    path = Path(__file__).parents[2] / "traces" / "gpt-4-0613-arenahard.parquet"
    trace = load(path)
    single = replace(trace, frame=trace.frame.with_columns(output_tokens=trace.frame["output_tokens"] * 0 + 1))
    bench = Bench(single, build({"load": 1.4, "seeds": 2}), STOCK, ("mean_ptl", "mean_tpot"))
    with pytest.raises(ConfigError, match="tune: mean_tpot_ms is 0 or undefined under fcfs"):
        Search(bench, SMALL, parse("mean_tpot<=1"), "mean_ptl", 2)
