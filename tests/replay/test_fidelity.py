"""The simulated engine against recorded runs of real servers.

The step-time coefficients of the two presets were fitted to these very runs. What is held here is therefore the model
of the scheduler (chunked prefill, the prefix cache, KV capacity, preemption, the lag of async scheduling), which nothing
was fitted to: with a wrong one no coefficients bring TTFT, TPOT and the preemptions right at once. It says nothing on the
step times of another card.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl
import pytest

from leap_rs.replay import ReplayResult, replay
from leap_rs.trace import read_trace

ENGINES = ("rtx4090-llama-8b", "rtxpro6000-llama-8b")
TOLERANCE = 0.05
Milliseconds = dict[str, np.ndarray]


@pytest.fixture(scope="module", params=ENGINES)
def run(request: pytest.FixtureRequest) -> tuple[str, ReplayResult, pl.DataFrame]:
    """The recorded run at its own times under the preset of its name, and what was measured."""
    path = Path(__file__).parents[2] / "traces" / f"{request.param}.parquet"
    return request.param, replay(path, policies="fcfs", engine=request.param, seeds=1), read_trace(path)


def latencies(arrival: pl.Series, first: pl.Series, last: pl.Series, tokens: pl.Series) -> Milliseconds:
    """In milliseconds from the planned arrival, by the definitions of `vllm bench serve`, and PTL."""
    start, first_token, end, n = (column.to_numpy().astype(np.float64) for column in (arrival, first, last, tokens))
    many = n > 1
    return {
        "ttft": 1e3 * (first_token - start),
        "tpot": 1e3 * (end - first_token)[many] / (n - 1)[many],
        "e2el": 1e3 * (end - start),
        "ptl": 1e3 * (end - start) / n,
    }


@pytest.mark.parametrize("metric", ["ttft", "tpot", "e2el", "ptl"])
def test_mean_and_p90_are_within_5_percent_of_the_real_run(
    run: tuple[str, ReplayResult, pl.DataFrame], metric: str
) -> None:
    _, result, real = run
    measured = latencies(
        *(real[name] for name in ("arrival_s", "measured_first_token_s", "measured_last_token_s", "output_tokens"))
    )[metric]
    simulated = result.to_dict()["results"][0]["metrics"]
    assert simulated[f"mean_{metric}_ms"]["mean"] == pytest.approx(measured.mean(), rel=TOLERANCE)
    assert simulated[f"p90_{metric}_ms"]["mean"] == pytest.approx(np.percentile(measured, 90), rel=TOLERANCE)


def test_every_request_of_the_run_is_replayed(run: tuple[str, ReplayResult, pl.DataFrame]) -> None:
    _, result, real = run
    rows = result.requests.sort("row")
    assert rows["output_tokens"].to_list() == real["output_tokens"].to_list()
    # The replay's clock starts at the first arrival.
    np.testing.assert_allclose(rows["arrival_s"], real["arrival_s"] - real["arrival_s"][0], atol=1e-9)


def test_preemptions_of_the_small_card(run: tuple[str, ReplayResult, pl.DataFrame]) -> None:
    """The 24 GB card was out of KV blocks for most of the run and preempted about 190 times; the 96 GB one never."""
    name, result, _ = run
    low, high = (170, 210) if name == "rtx4090-llama-8b" else (0, 0)
    assert low <= result.to_dict()["results"][0]["queue"]["preemptions"] <= high
