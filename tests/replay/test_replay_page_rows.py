"""What the page keeps of single requests, against brute force over the rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from leap_rs.replay.options import build
from leap_rs.replay.page import rows as page_rows
from leap_rs.replay.page.rows import LEVELS, PointDetail, collect, from_requests, shown_points
from leap_rs.replay.run import run

POLICIES = ("fcfs", "leap", "sjf-oracle")


def table(n: int, policies: Sequence[str], seed: int = 0, points: int = 1) -> pl.DataFrame:
    """Rows as a replay keeps them, at random, of two seeds a policy and point."""
    rng = np.random.default_rng(seed)
    parts = []
    for point in range(points):
        for policy in policies:
            for run_seed in (3, 4):
                arrival = np.sort(rng.uniform(0, 50, n))
                first = arrival + rng.exponential(2, n)
                parts.append(
                    pl.DataFrame(
                        {
                            "policy": [policy] * n,
                            "point": np.full(n, point, np.uint32),
                            "seed": np.full(n, run_seed, np.uint64),
                            "arrival_s": arrival,
                            "first_token_s": first,
                            "finish_s": first + rng.exponential(5, n),
                            "output_tokens": rng.integers(1, 900, n).astype(np.uint32),
                            "predicted_tokens": (
                                np.full(n, np.nan, np.float32)
                                if policy == "fcfs"
                                else rng.normal(0, 1, n).astype(np.float32)
                                if policy.startswith("score:")
                                else rng.uniform(1, 700, n).astype(np.float32)
                            ),
                        }
                    )
                )
    return pl.concat(parts)


def document(policies: Sequence[str], requests: int, points: int = 1) -> dict[str, Any]:
    results = [
        {"policy": policy, "point": point, "metrics": {"duration": {"mean": 60.0, "ci95": None}}}
        for point in range(points)
        for policy in policies
    ]
    return {
        "trace": {"requests": requests},
        "config": {"points": [{} for _ in range(points)], "seed": 3},
        "results": results,
    }


def test_quantiles_are_the_smallest_latencies_that_a_share_of_the_requests_kept() -> None:
    frame = table(97, ["fcfs"])
    (detail,) = from_requests(document(["fcfs"], 97), frame)
    first_seed = frame.filter(pl.col("seed") == 3)
    for metric, seconds in {
        "ttft": first_seed["first_token_s"] - first_seed["arrival_s"],
        "e2el": first_seed["finish_s"] - first_seed["arrival_s"],
        "ptl": (first_seed["finish_s"] - first_seed["arrival_s"]) / first_seed["output_tokens"],
    }.items():
        values = sorted(1e3 * second for second in seconds)
        found = detail.policies["fcfs"].quantiles[metric]
        for level, quantile in zip(LEVELS, found, strict=True):
            expected = next(v for v in values if sum(u <= v for u in values) / 97 >= level - 1e-12)
            assert quantile == pytest.approx(expected, rel=1e-12), (metric, level)


def test_the_queue_counts_who_has_arrived_and_has_no_first_token() -> None:
    frame = table(60, POLICIES)
    (detail,) = from_requests(document(POLICIES, 60), frame)
    assert detail.instants[0] == 0
    assert detail.instants[-1] == 60
    for policy in POLICIES:
        own = frame.filter(pl.col("seed") == 3, pl.col("policy") == policy)
        pairs = list(zip(own["arrival_s"], own["first_token_s"], strict=True))
        expected = [sum(arrival <= t < first for arrival, first in pairs) for t in detail.instants]
        assert detail.policies[policy].waiting.tolist() == expected


def test_every_prediction_falls_into_the_bin_that_holds_it() -> None:
    frame = table(80, POLICIES)
    (detail,) = from_requests(document(POLICIES, 80), frame)
    assert detail.policies["fcfs"].prediction is None
    found = detail.policies["leap"].prediction
    assert found is not None
    assert not found.ranks
    own = frame.filter(pl.col("seed") == 3, pl.col("policy") == "leap")
    expected = np.zeros_like(found.counts)
    for predicted, true in zip(own["predicted_tokens"], own["output_tokens"], strict=True):
        i = max(k for k, edge in enumerate(found.edges) if edge <= predicted)
        j = max(k for k, edge in enumerate(found.edges) if edge <= true)
        expected[i, j] += 1
    assert found.counts.tolist() == expected.tolist()


def test_scores_of_no_unit_are_compared_by_rank() -> None:
    policies = ["score:bert"]
    frame = table(40, policies)
    (detail,) = from_requests(document(policies, 40), frame)
    found = detail.policies["score:bert"].prediction
    assert found is not None
    assert found.ranks
    # 40 ranks without ties in 20 bins: two a bin of the score.
    assert found.counts.sum(axis=1).tolist() == [2] * 20
    assert found.counts.sum() == 40


def test_a_long_sweep_shows_points_from_the_first_to_the_last() -> None:
    assert shown_points(5) == [0, 1, 2, 3, 4]
    many = shown_points(1000)
    assert len(set(many)) == page_rows.MAX_POINTS
    assert (many[0], many[-1]) == (0, 999)


def test_rows_are_asked_for_in_bounded_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    frame = table(30, POLICIES, points=2).filter(pl.col("seed") == 3)
    monkeypatch.setattr(page_rows, "MAX_ROWS", 70)
    asked: list[tuple[int, list[str]]] = []

    def rows(point: int, names: Sequence[str]) -> pl.DataFrame:
        asked.append((point, list(names)))
        return frame.filter(pl.col("point") == point, pl.col("policy").is_in(names))

    details = collect(document(POLICIES, 30, points=2), rows)
    assert asked == [(0, ["fcfs", "leap"]), (0, ["sjf-oracle"]), (1, ["fcfs", "leap"]), (1, ["sjf-oracle"])]
    assert [list(detail.policies) for detail in details] == [list(POLICIES)] * 2


def test_simulating_the_first_seed_once_more_shows_what_all_rows_show(
    traces: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = build(
        {"policies": POLICIES, "sweep": ["load=1,1.4"], "seeds": 2, "num_prompts": 120, "seed": 7, "max_num_seqs": 16}
    )

    def details() -> list[PointDetail]:
        found = run(traces / "llama-3-8b-alpacaeval.parquet", options, for_page=True).details
        assert found is not None
        return found

    kept = details()
    monkeypatch.setattr(page_rows, "MAX_ROWS", 250)
    again = details()
    assert [detail.point for detail in again] == [0, 1]
    for one, other in zip(kept, again, strict=True):
        assert one.instants.tolist() == other.instants.tolist()
        for policy in POLICIES:
            a, b = one.policies[policy], other.policies[policy]
            assert a.waiting.tolist() == b.waiting.tolist()
            assert {k: v.tolist() for k, v in a.quantiles.items()} == {k: v.tolist() for k, v in b.quantiles.items()}
            assert (a.prediction is None) == (b.prediction is None)
            if a.prediction is not None and b.prediction is not None:
                assert a.prediction.counts.tolist() == b.prediction.counts.tolist()
