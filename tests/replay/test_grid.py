"""The grid of ratios to stock: its arithmetic by hand, and one small run of the script."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHES = Path(__file__).parents[2] / "benches"


@pytest.fixture
def bounds(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHES))
    return importlib.import_module("grid_bounds")


@pytest.fixture
def grid(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHES))
    return importlib.import_module("grid")


def test_a_change_in_percent_as_a_ratio(bounds: Any) -> None:
    found = bounds.ratio({"mean": -40.0, "ci95": [-45.0, -35.0]})
    assert (found.mean, found.half) == pytest.approx((0.6, 0.05))
    assert (found.low, found.high) == pytest.approx((0.55, 0.65))
    assert bounds.ratio({"mean": 2.0, "ci95": None}) == bounds.Ratio(1.02, None)
    assert bounds.ratio({"mean": None, "ci95": None}) is None
    assert bounds.ratio(None) is None


def test_geometric_means(bounds: Any) -> None:
    assert bounds.geometric_mean([0.5, 2.0]) == pytest.approx(1.0)
    assert bounds.geometric_mean([0.2, 0.4, 0.8]) == pytest.approx(0.4)
    assert bounds.geometric_mean([0.0, 1.0]) == 0.0
    assert bounds.geometric_mean([]) is None


@pytest.mark.parametrize(
    ("metric", "mean", "half", "expected"),
    [
        ("mean_ptl_ms", 1.0, 0.0, "KEPT"),
        ("mean_ptl_ms", 1.0004, 0.0, "KEPT"),
        ("mean_ptl_ms", 1.04, 0.05, "WITHIN"),
        ("mean_e2el_ms", 1.04, 0.03, "BROKEN"),
        ("mean_e2el_ms", 1.04, None, "BROKEN"),
        ("p99_e2el_ms", 1.25, 0.0, "KEPT"),
        ("p99_e2el_ms", 1.26, 0.5, "BROKEN"),
        ("request_throughput", 0.996, 0.0, "KEPT"),
        ("request_throughput", 0.99, 0.006, "WITHIN"),
        ("request_throughput", 0.99, 0.004, "BROKEN"),
    ],
)
def test_bounds_of_a_policy_that_reorders(
    bounds: Any, metric: str, mean: float, half: float | None, expected: str
) -> None:
    [bound] = [bound for bound in bounds.bounds_of("leap:batch=4") if bound.metric == metric]
    assert bounds.verdict(bounds.Ratio(mean, half), bound).name == expected


@pytest.mark.parametrize(
    ("metric", "mean", "half", "expected"),
    [
        ("p99_e2el_ms", 1.2, 0.1, "BROKEN"),
        ("p99_e2el_ms", 1.05, 0.1, "WITHIN"),
        ("request_throughput", 0.997, 0.001, "BROKEN"),
        ("request_throughput", 1.002, 0.001, "KEPT"),
    ],
)
def test_what_keeps_the_order_has_closer_bounds(
    bounds: Any, metric: str, mean: float, half: float, expected: str
) -> None:
    [bound] = [bound for bound in bounds.bounds_of("fcfs:levers=admission") if bound.metric == metric]
    assert bounds.verdict(bounds.Ratio(mean, half), bound).name == expected


def test_the_worst_cell_is_the_slowest_or_the_one_that_serves_least(bounds: Any) -> None:
    cells = {"a": bounds.Ratio(0.9), "b": bounds.Ratio(1.1)}
    assert bounds.worst("mean_ptl_ms", cells) == ("b", bounds.Ratio(1.1))
    assert bounds.worst("request_throughput", cells) == ("a", bounds.Ratio(0.9))
    assert bounds.worst("mean_ptl_ms", {}) is None


def test_a_comma_inside_a_policy_does_not_end_it(grid: Any) -> None:
    assert grid.split(["fcfs, leap:order=gittins,batch=4,leap", "hrrn"]) == [
        "fcfs",
        "leap:order=gittins,batch=4",
        "leap",
        "hrrn",
    ]
    assert grid.split(None) == []


def test_the_summary_by_hand(grid: Any, bounds: Any) -> None:
    def row(load: float, ptl: float, p99: float) -> Any:
        ratios = {"mean_ptl_ms": bounds.Ratio(ptl, 0.01), "p99_e2el_ms": bounds.Ratio(p99, 0.01)}
        return grid.Row("card", "trace", load, "leap", ratios, (9.0, 4.0), queued=0.5, short=False)

    [found] = grid.summary([row(1.0, 1.1, 1.0), row(1.2, 0.4, 1.3), row(1.2, 0.9, 1.2)])
    assert (found["policy"], found["cells"], found["cells_without_a_queue"]) == ("leap", 3, 0)
    assert found["worst"]["mean_ptl_ms"] == {"cell": "card, trace, load 1", "mean": 1.1, "half": 0.01}
    assert found["worst"]["request_throughput"] is None
    assert [means["mean_ptl_ms"] for means in found["geometric_means"]] == pytest.approx([1.1, 0.6])
    assert [(one["metric"], one["mean"], one["verdict"]) for one in found["passed"]] == [
        ("mean_ptl_ms", 1.1, "broken"),
        ("p99_e2el_ms", 1.3, "broken"),
    ]


def test_a_recorded_run_with_the_first_run_dealt_anew(tmp_path: Path) -> None:
    out = tmp_path / "grid.json"
    words = [
        "--policies",
        "hrrn",
        "--engines",
        "rtx4090-llama-8b",
        "--traces",
        "recorded",
        "--seeds",
        "2",
        "--seed",
        "7",
    ]
    done = subprocess.run(
        [sys.executable, str(BENCHES / "grid.py"), *words, "--json", str(out), "--cache", str(tmp_path / "cache")],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "rtx4090-llama-8b, recorded, own times" in done.stdout
    assert "hrrn against fcfs, 1 cells (0 without a queue, 1 with too few requests)" in done.stdout
    [row] = json.loads(out.read_text())["rows"]
    assert (row["policy"], row["load"]) == ("hrrn", None)
    assert row["ratios"]["mean_ptl_ms"]["mean"] > 0
    assert (tmp_path / "cache" / "recorded-rtx4090-llama-8b.seed7.parquet").is_file()
