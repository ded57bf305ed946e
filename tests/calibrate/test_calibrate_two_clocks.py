"""Rows with the client's Unix time and the engine's monotonic clock; the expected numbers are by hand from the rows."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from synthetic_run import run_of, write_lines

from leap_rs.calibrate import read_runs

CASE = Path(__file__).parents[1] / "cases" / "14-two_clocks_requests.jsonl"


def test_each_clock_gets_its_own_zero() -> None:
    (run,) = read_runs(CASE)
    # By arrival: bench-0, 1, 2, 3. The engine had bench-3 before bench-2.
    by_arrival = np.argsort(run.sent_s)
    in_engine = (run.first_token_s - run.queued_s)[by_arrival]
    from_arrival = (run.first_token_s - run.sent_s)[by_arrival]
    np.testing.assert_allclose(in_engine, [0.6960, 0.2800, 0.5050, 2.9040], atol=1e-6)
    np.testing.assert_allclose(from_arrival, [0.6960, 0.4310, 0.7000, 2.9080], atol=1e-6)
    np.testing.assert_allclose(run.lag_s[by_arrival], [0, 0.151, 0.195, 0.004], atol=1e-6)


def test_the_order_is_that_of_the_queue() -> None:
    (run,) = read_runs(CASE)
    assert run.requests["prompt_tokens"].to_list() == [2358, 1034, 685, 1320]
    assert (np.diff(run.queued_s) > 0).all()
    assert run.queued_s[0] == 0
    assert (np.diff(run.engine_arrivals(np.ones(len(run), dtype=np.bool_))) >= 0).all()


def test_without_a_workload_the_plan_is_what_was_sent() -> None:
    (run,) = read_runs(CASE)
    np.testing.assert_array_equal(run.planned_s, run.sent_s)
    assert any("shared prefixes are not known" in note for note in run.notes)


def test_the_order_of_lines_does_not_matter(tmp_path: Path) -> None:
    rows = [json.loads(line) for line in CASE.read_text().splitlines()]
    write_lines(tmp_path / "requests.jsonl", rows[::-1])
    (run,), (expected,) = read_runs(tmp_path), read_runs(CASE)
    np.testing.assert_allclose(run.queued_s, expected.queued_s)
    np.testing.assert_allclose(run.first_token_s, expected.first_token_s)
    np.testing.assert_allclose(run.lag_s, expected.lag_s, atol=1e-6)


@pytest.mark.parametrize(("lag", "back"), [(0.0, 0.0), (0.004, 0.004), (0.5, 0.010)])
def test_lag_is_taken_back_up_to_half_a_step(tmp_path: Path, lag: float, back: float) -> None:
    """The loop stamps requests between steps. Here a token takes 20 ms, so half a step is 10 ms."""
    rows = []
    for i in range(8):
        late = lag if i % 2 else 0.0
        queued = 50.0 + i + late
        times = {"arrival_time": 1e9 + i, "queued_ts": queued, "first_token_ts": queued + 0.1}
        counts = {"request_id": f"r{i}", "input_toks": 10, "output_toks": 11}
        rows.append({**counts, **times, "last_token_ts": queued + 0.1 + 10 * 0.020})
    write_lines(tmp_path / "requests.jsonl", rows)
    (run,) = read_runs(tmp_path)
    expected = run.queued_s - np.where(np.arange(8) % 2, back, 0.0)
    everything = np.ones(8, dtype=np.bool_)
    np.testing.assert_allclose(run.engine_arrivals(everything), expected, atol=1e-6)


def test_how_fast_held_out_requests_were_is_not_looked_at() -> None:
    """All of them late by 0.6 s; a token takes 0.1 s in the fitted half and 0.9 s in the other."""
    last = [1.0 + i + (0.4 if i < 4 else 3.6) for i in range(8)]
    run = run_of([1.0 + i for i in range(8)], last, [5] * 8, lag=0.6)
    fitted = np.arange(8) < 4
    np.testing.assert_allclose(run.queued_s - run.engine_arrivals(fitted), 0.05)
    np.testing.assert_allclose(run.queued_s - run.engine_arrivals(~fitted), 0.45)
