"""Calibration on the recorded runs of two real servers: the first half of their requests fitted, the second held out."""

from __future__ import annotations

from pathlib import Path

import pytest

from leap_rs.calibrate import Calibration, CalibrationOptions, calibrate, read_runs

SMALL, LARGE = "rtx4090-llama-8b", "rtxpro6000-llama-8b"
# Percent, worst of mean and P90 of TTFT, TPOT, E2EL and PTL, as reached by hand on these runs; the same start is used
# for both, of a card that is neither, so that no coefficient has seen the held-out half.
REACHED_BY_HAND = {SMALL: 2.8, LARGE: 1.3}
KV_TOKENS = {SMALL: 41_408, LARGE: 568_016}
MAX_NUM_SEQS = {SMALL: 256, LARGE: 128}


@pytest.fixture(scope="module", params=[pytest.param(SMALL, marks=pytest.mark.slow), LARGE])
def calibration(request: pytest.FixtureRequest, traces: Path) -> Calibration:
    limits = {"kv_tokens": KV_TOKENS[request.param], "max_num_seqs": MAX_NUM_SEQS[request.param]}
    options = CalibrationOptions(engine="a100-llama-8b", limits=limits, name=request.param)
    return calibrate([traces / f"{request.param}.parquet"], options)


def test_held_out_errors_are_as_good_as_by_hand(calibration: Calibration) -> None:
    (run,) = calibration.runs
    assert run.held_out is not None
    assert run.fitted == 150
    assert len(run.held_out) == 8
    for name, error in run.held_out.items():
        assert error.error_percent == pytest.approx(0.0, abs=REACHED_BY_HAND[calibration.options.name]), name


def test_preemptions_appear_on_the_small_card_only(calibration: Calibration) -> None:
    low, high = (165, 215) if calibration.options.name == SMALL else (0, 0)
    assert low <= calibration.runs[0].preemptions <= high


def test_what_a_steady_load_cannot_tell_apart_is_said(calibration: Calibration) -> None:
    """The small card decoded 33 to 48 sequences at a full cache nearly all the time."""
    reasons = {one.name: one.reason for one in calibration.determined if one.reason is not None}
    assert "per_decode_seq_s" in reasons or calibration.options.name == LARGE
    if calibration.options.name == SMALL:
        assert "sequences decode nearly all the time" in str(reasons["per_kv_token_s"])
        pairs = {frozenset((a, b)) for a, b, _ in calibration.correlations}
        assert frozenset(("step_s", "per_kv_token_s")) in pairs


def test_shared_prefixes_of_the_real_workload(traces: Path) -> None:
    """32 of 300 prompts start with an earlier prompt's blocks: 19,520 of 257,239 prompt tokens."""
    (run,) = read_runs(traces / f"{SMALL}.parquet")
    assert len(run) == 300
    assert run.shared_prefixes() == (32, 19_520)
    assert run.requests["prompt_tokens"].sum() == 257_239


def test_the_lag_in_front_of_the_engine_is_its_own_term(traces: Path) -> None:
    (run,) = read_runs(traces / f"{SMALL}.parquet")
    assert run.lag_s.min() > 0
    # Both from the planned arrival: what the client and the front end added, up to 0.24 s, is no time in the engine.
    in_engine, planned = run.first_token_s - run.queued_s, run.first_token_s - run.planned_s
    assert (planned - in_engine) == pytest.approx(run.lag_s)
    assert 0.1 < run.lag_s.max() < 0.3
