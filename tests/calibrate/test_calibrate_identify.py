"""The posterior against the closed form of a linear model, and what the load's numbers are made of."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.signal import lfilter
from synthetic_run import run_of, true_cost

from leap_rs.calibrate.fit import Fit, Parameters
from leap_rs.calibrate.forward import Simulated
from leap_rs.calibrate.identify import Load, correlation_time, determine, load_of

PULL = 1.5
QUIET = Load(low_batch=1, high_batch=1, peak_batch=1, mixed_share=0.0, longest_prompt=100)


def fit_with(slopes: np.ndarray, residuals: np.ndarray) -> Fit:
    parameters = Parameters(true_cost(), PULL)
    return Fit(parameters, np.zeros(7), residuals, (slopes, slopes), 1.0, 1.0, 5, True)


def test_deviations_are_those_of_the_linear_normal_model() -> None:
    random = np.random.default_rng(0)
    slopes = random.normal(0, 1, (40, 3, 7)) * np.array([3, 1, 0.3, 0.1, 0.03, 1, 2])
    residuals = 0.1 * random.normal(0, 1, (40, 3))
    found, _ = determine(fit_with(slopes, residuals), QUIET)
    flat = slopes.reshape(-1, 7)
    covariance = np.linalg.inv(flat.T @ flat + np.eye(7) / math.log(PULL) ** 2)
    cost = true_cost()
    for i, one in enumerate(found):
        assert one.deviation == pytest.approx(cost[one.name] * math.sqrt(covariance[i, i]), rel=1e-6)
        assert one.relative_to_prior == pytest.approx(math.sqrt(covariance[i, i]) / math.log(PULL), rel=1e-6)


def test_the_noise_of_slopes_is_no_information() -> None:
    """Slopes that are nothing but noise, independent in the two halves of the jitters: nothing is identified."""
    random = np.random.default_rng(1)
    halves = tuple(random.normal(0, 0.5, (100, 3, 7)) for _ in range(2))
    fit = fit_with(halves[0], 0.1 * random.normal(0, 1, (100, 3)))
    same, _ = determine(fit, QUIET)
    apart, _ = determine(Fit(**{**vars(fit), "slopes": halves}), QUIET)
    assert all(one.relative_to_prior < 0.4 for one in same)
    assert np.median([one.relative_to_prior for one in apart]) > 0.6


def test_two_columns_that_move_together_are_named_as_a_pair() -> None:
    random = np.random.default_rng(2)
    slopes = np.zeros((50, 3, 7))
    shared = random.normal(0, 4, (50, 3))
    slopes[:, :, 0], slopes[:, :, 2] = shared, 0.8 * shared
    found, pairs = determine(fit_with(slopes, np.zeros((50, 3))), QUIET)
    assert [(a, b) for a, b, _ in pairs] == [("step_s", "per_kv_token_s")]
    assert pairs[0][2] < -0.9
    by_name = {one.name: one for one in found}
    assert by_name["free_tokens"].relative_to_prior == pytest.approx(1.0)
    assert "10 % of it moves E2EL by only 0 %" in str(by_name["free_tokens"].reason)


@pytest.mark.parametrize("rho", [0.0, 0.5, 0.8])
def test_correlation_time_of_an_autoregression(rho: float) -> None:
    """An AR(1) series has the integrated autocorrelation time (1 + rho) / (1 - rho)."""
    noise = np.random.default_rng(3).normal(0, 1, (60_000, 3))
    series = lfilter([1.0], [1.0, -rho], noise, axis=0)
    assert correlation_time(series) == pytest.approx((1 + rho) / (1 - rho), rel=0.08)


def test_correlation_time_of_no_residual_is_one() -> None:
    assert correlation_time(np.zeros((20, 3))) == 1.0


def test_the_load_is_counted_from_the_simulated_times() -> None:
    """Request 0 decodes from 1 to 9, request 1 is prefilled from 3 to 5 and decodes from 5 to 7, request 2 is later."""
    one = Simulated(np.array([0.0, 3.0, 20.0]), np.array([1.0, 5.0, 21.0]), np.array([9.0, 7.0, 30.0]), 0)
    run = run_of([1.0, 5.0, 21.0], [9.0, 7.0, 30.0], [5, 5, 5])
    load = load_of([run], [one], [9.0])
    assert load.peak_batch == 2
    assert load.mixed_share == pytest.approx(2 / 8)
    assert (load.low_batch, load.high_batch) == (1, 2)
    assert load_of([run], [one], [4.0]).peak_batch == 1
