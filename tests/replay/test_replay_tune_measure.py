"""Candidates on one half: metrics by their definitions, intervals by Student's t, the same requests for every engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from scipy import stats

from leap_rs.replay import replay
from leap_rs.replay.options import build
from leap_rs.replay.tune.measure import Bench, Estimate, Measured, by_policy
from leap_rs.replay.tune.space import Candidate, fcfs
from leap_rs.trace import Trace, load

METRICS = ("mean_ptl", "p99_e2el", "request_throughput")


@pytest.fixture(scope="module")
def sharegpt() -> Trace:
    return load(Path(__file__).parents[2] / "traces" / "smollm2-sharegpt.parquet")


def rows() -> pl.DataFrame:
    """Two seeds of one policy; the second has an answer of a single token."""
    return pl.DataFrame(
        {
            "policy": ["x"] * 5,
            "seed": [0, 0, 0, 1, 1],
            "arrival_s": [0.0, 1.0, 2.0, 0.0, 1.0],
            "first_token_s": [0.5, 2.0, 2.25, 1.0, 3.0],
            "finish_s": [1.0, 4.0, 2.5, 5.0, 3.0],
            "output_tokens": pl.Series([2, 5, 3, 9, 1], dtype=pl.UInt32),
        }
    )


def test_metrics_by_their_definitions() -> None:
    names = ("mean_ptl", "median_ttft", "std_e2el", "p90_e2el", "mean_tpot", *METRICS[2:], "output_throughput")
    found = by_policy(rows(), (*names, "request_goodput"), {"e2el": 1000.0, "tpot": 600.0})["x"]
    e2el = (np.array([1000.0, 3000.0, 500.0]), np.array([5000.0, 2000.0]))
    ttft = (np.array([500.0, 1000.0, 250.0]), np.array([1000.0, 2000.0]))
    expected = {
        "mean_ptl": [np.mean(e2el[0] / [2, 5, 3]), np.mean(e2el[1] / [9, 1])],
        "median_ttft": [np.median(part) for part in ttft],
        "std_e2el": [np.std(part) for part in e2el],
        "p90_e2el": [np.percentile(part, 90) for part in e2el],
        "mean_tpot": [np.mean((e2el[0] - ttft[0]) / [1, 4, 2]), 4000 / 8],
        "request_throughput": [3 / 4, 2 / 5],
        "output_throughput": [10 / 4, 10 / 5],
        "request_goodput": [2 / 4, 0.0],
    }
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, rtol=1e-12, err_msg=name)


def test_an_undefined_metric_is_nan() -> None:
    single = rows().filter(pl.col("output_tokens") == 1)
    assert np.isnan(by_policy(single, ("mean_tpot",), {})["x"]["mean_tpot"]).all()


def test_intervals_are_students_t() -> None:
    values = np.array([1.0, 4.0, 2.0, 7.0])
    low, high = stats.t.interval(0.95, 3, loc=values.mean(), scale=stats.sem(values))
    found = Estimate.of(values)
    assert found.mean == pytest.approx(3.5)
    assert found.ci95 == pytest.approx((low, high))
    assert Estimate.of(values[:1]) == Estimate(1.0, None)
    assert Estimate.of(np.array([np.nan, 1.0])).to_dict() == {"mean": None, "ci95": None}


def test_ratios_are_paired_by_seed() -> None:
    one = Measured(fcfs(1), {"mean_ptl": np.array([2.0, 6.0])})
    base = Measured(fcfs(2), {"mean_ptl": np.array([1.0, 2.0, 9.0])})
    np.testing.assert_array_equal(one.ratio(base, "mean_ptl"), [2.0, 3.0])
    assert one.change(base, "mean_ptl").mean == pytest.approx(150.0)


def test_a_bench_measures_what_a_replay_reports(sharegpt: Trace) -> None:
    options: dict[str, Any] = {
        "load": 1.2,
        "seeds": 3,
        "num_prompts": 150,
        "readout": sharegpt.path.parent / "readout.safetensors",
    }
    bench = Bench(sharegpt, build(options), 8, METRICS)
    candidates = [
        Candidate(("queue",), "gittins:ptl", 0.1, 1.0, None, 8),
        Candidate(("queue", "evict"), "countdown", 0.0, 0.0, None, 8),
    ]
    measured = bench.measure(candidates, 3)
    result = replay(sharegpt.path, policies=["fcfs", *(one.policy for one in candidates)], max_num_seqs=8, **options)
    for one, told in zip([bench.fcfs, *measured], result.to_dict()["results"], strict=True):
        assert one.candidate.policy == told["policy"]
        for metric, values in one.values.items():
            key = metric if metric == "request_throughput" else f"{metric}_ms"
            assert values.mean() == pytest.approx(told["metrics"][key]["mean"], rel=1e-9)
        change = one.change(bench.fcfs, "p99_e2el")
        assert change.mean == pytest.approx(told["paired"]["p99_e2el_ms"]["mean"], rel=1e-6, abs=1e-9)
        assert change.ci95 == pytest.approx(told["paired"]["p99_e2el_ms"]["ci95"], rel=1e-6, abs=1e-9)


def test_every_engine_is_offered_the_same_requests_a_second(sharegpt: Trace) -> None:
    """Load 1.2 of 8 sequences is another multiple of what 16 can serve, so a replay at that load must agree."""
    options: dict[str, Any] = {"seeds": 2, "num_prompts": 150}
    bench = Bench(sharegpt, build({"load": 1.2, **options}), 8, METRICS)
    (wider,) = bench.measure([fcfs(16)], 2)
    own_load = 1.2 * bench.capacity[8, None] / bench.capacity[16, None]
    told = replay(sharegpt.path, policies="fcfs", load=own_load, max_num_seqs=16, **options).to_dict()["results"][0]
    assert own_load < 1.0
    assert wider.values["mean_ptl"].mean() == pytest.approx(told["metrics"]["mean_ptl_ms"]["mean"], rel=1e-9)
    (narrow,) = bench.measure([fcfs(8)], 2)
    np.testing.assert_allclose(narrow.values["mean_ptl"], bench.fcfs.values["mean_ptl"], rtol=1e-9)


def test_a_preset_with_few_slots_is_measured_without_that_limit(sharegpt: Trace) -> None:
    bench = Bench(sharegpt, build({"load": 1.2, "seeds": 2, "engine": "paper"}), 512, METRICS)
    free = replay(sharegpt.path, policies="fcfs", load=1.2, seeds=2, engine="paper", decode_slots=512).to_dict()[
        "results"
    ][0]
    assert bench.fcfs.values["mean_ptl"].mean() == pytest.approx(free["metrics"]["mean_ptl_ms"]["mean"], rel=1e-9)
