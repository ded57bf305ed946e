"""Metrics, occupancy and step functions against numbers made by hand."""

from __future__ import annotations

import numpy as np
import pytest
from synthetic_run import run_of

from leap_rs.calibrate.errors import metric_errors, occupancy, worst
from leap_rs.calibrate.forward import Simulated, step_values
from leap_rs.calibrate.measured import Observed


def simulated(first: list[float], last: list[float], **more: object) -> Simulated:
    return Simulated(np.zeros(len(first)), np.array(first), np.array(last), 0, **more)  # type: ignore[arg-type]


def test_errors_by_the_definitions() -> None:
    # Planned at -0.5 and 0.5; TTFT 1.0 and 1.5 s, E2EL 3.0 and 1.5 s, TPOT 2 / 4 s (the one-token answer has none).
    run = run_of([0.5, 2.0], [2.5, 2.0], [5, 1], late=0.5)
    ours = [simulated([0.7, 2.0], [2.5, 2.0]), simulated([0.5, 2.0], [2.5, 2.0])]
    errors = metric_errors(run, ours, np.array([True, True]))
    assert errors["mean_ttft"].measured_ms == pytest.approx(1250)
    assert errors["mean_ttft"].simulated_ms == pytest.approx(1300)
    assert errors["mean_ttft"].error_percent == pytest.approx(4.0)
    assert errors["mean_ttft"].jitter_sd_percent == pytest.approx(4.0)
    assert errors["p90_ttft"].measured_ms == pytest.approx(1450)
    assert errors["mean_tpot"].measured_ms == pytest.approx(500)
    assert errors["mean_tpot"].error_percent == pytest.approx(-5.0)
    assert errors["mean_e2el"].error_percent == pytest.approx(0.0)
    assert errors["mean_ptl"].measured_ms == pytest.approx((3.0 / 5 + 1.5) / 2 * 1e3)
    assert worst(errors) == pytest.approx(5.0)


def test_ttft_and_tpot_errors_do_not_hide_in_e2el() -> None:
    """Far too short a TTFT and far too long a TPOT give the right E2EL: each is reported."""
    run = run_of([8.0], [10.0], [11])
    errors = metric_errors(run, [simulated([1.0], [10.0])], np.array([True]))
    assert errors["mean_e2el"].error_percent == pytest.approx(0)
    assert errors["mean_ttft"].error_percent == pytest.approx(-87.5)
    assert errors["mean_tpot"].error_percent == pytest.approx(350)


def test_only_one_token_answers_have_no_tpot() -> None:
    run = run_of([0.5, 1.5], [0.5, 1.5], [1, 1])
    errors = metric_errors(run, [simulated([0.5, 1.5], [0.5, 1.5])], np.array([True, True]))
    assert errors["mean_tpot"].to_dict() == dict.fromkeys(errors["mean_tpot"].to_dict())
    assert worst(errors) == pytest.approx(0)


def test_step_values_before_at_and_after_entries() -> None:
    found = step_values(np.array([1.0, 2.0, 4.0]), np.array([3, 5, 0]), np.array([0.5, 1.0, 1.9, 2.0, 3.9, 9.0]))
    assert found.tolist() == [0, 3, 3, 5, 5, 0]


def test_occupancy_at_the_times_of_the_log() -> None:
    observed = Observed(np.array([1.0, 2.0, 3.0]), running=np.array([4.0, 6.0, 2.0]), waiting=np.array([0.0, 3.0, 0.0]))
    run = run_of([0.5], [3.0], [2], observed)
    at = np.array([0.0, 1.5, 2.5])
    timeline = (at, np.array([0, 1, 0]), np.array([4, 5, 3]))
    found = occupancy(run, [simulated([0.5], [3.0], timeline=timeline)])
    assert found is not None
    assert found["running"] == {
        "mean_measured": 4.0,
        "mean_simulated": 4.0,
        "mean_absolute_difference": pytest.approx(2 / 3),
        "peak_measured": 6.0,
        "peak_simulated": 5.0,
    }
    assert found["waiting"]["mean_absolute_difference"] == pytest.approx(2 / 3)
    assert occupancy(run_of([0.5], [3.0], [2]), []) is None
