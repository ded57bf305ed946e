"""Runs whose coefficients are known: they come back where the run determines them, and are named where it does not."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from synthetic_run import TRUTH, alone, loaded, off_by, true_cost, write_run

from leap_rs import ConfigError
from leap_rs.calibrate import Calibration, CalibrationOptions, calibrate
from leap_rs.replay.engines import COST_KEYS

FACTORS = dict(zip(COST_KEYS, (1.3, 0.77, 0.77, 1.3, 0.77, 1.3, 1.3), strict=True))


@pytest.fixture(scope="module")
def wrong(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A start that is 30 % off in every coefficient."""
    path = tmp_path_factory.mktemp("start") / "wrong.json"
    path.write_text(json.dumps(off_by(FACTORS)))
    return path


@pytest.fixture(scope="module")
def recovered(tmp_path_factory: pytest.TempPathFactory, wrong: Path) -> Calibration:
    folder = write_run(tmp_path_factory.mktemp("loaded") / "run", **loaded())
    return calibrate([folder], CalibrationOptions(engine=TRUTH, cost_model=wrong, jitters=4))


def test_held_out_errors_are_tiny(recovered: Calibration) -> None:
    (run,) = recovered.runs
    assert run.held_out is not None
    assert run.fitted == 80
    for name, error in run.held_out.items():
        assert error.error_percent == pytest.approx(0.0, abs=1.0), name


def test_identified_coefficients_are_recovered(recovered: Calibration) -> None:
    truth, fitted = true_cost(), recovered.fit.cost
    known = [one for one in recovered.determined if one.relative_to_prior < 0.3]
    assert {"step_s", "per_token_over_free_s", "per_kv_token_s"} <= {one.name for one in known}
    for one in known:
        sd = one.deviation / fitted[one.name]
        assert abs(math.log(fitted[one.name] / truth[one.name])) < max(3 * sd, 0.05), one.name


def test_no_coefficient_is_further_off_than_its_deviation_says(recovered: Calibration) -> None:
    truth, fitted = true_cost(), recovered.fit.cost
    assert {one.name for one in recovered.determined} == set(COST_KEYS)
    for one in recovered.determined:
        assert abs(math.log(fitted[one.name] / truth[one.name])) < 3 * one.deviation / fitted[one.name], one.name


def test_a_run_without_load_names_what_only_load_shows(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "alone", **alone())
    document = calibrate([folder], CalibrationOptions(jitters=2)).to_dict()
    missing = document["calibration"]["not_identified"]
    assert "never more than 1 sequence decoded at a time, so no batch effect" in missing["per_decode_seq_s"]
    assert "no step of these runs mixed prefill and decode" in missing["per_kv_token_with_prefill_s"]
    assert "step_s" not in missing
    # What the run does not determine stays where the start put it.
    for key in ("per_decode_seq_s", "per_kv_token_with_prefill_s"):
        assert document["cost"][key] == pytest.approx(true_cost()[key], rel=0.1)
        assert not document["calibration"]["coefficients"][key]["identified"]


def test_a_second_run_determines_what_the_first_could_not(tmp_path: Path) -> None:
    quiet = write_run(tmp_path / "alone", **alone())
    busy = write_run(tmp_path / "loaded", **loaded(seed=5))
    options = CalibrationOptions(jitters=2)
    (first,) = [one for one in calibrate([quiet], options).determined if one.name == "per_decode_seq_s"]
    both = calibrate([quiet, busy], options)
    (joint,) = [one for one in both.determined if one.name == "per_decode_seq_s"]
    assert joint.relative_to_prior < first.relative_to_prior
    assert [len(run.run) for run in both.runs] == [24, 160]


def test_front_end_lag_is_not_taken_for_step_time(tmp_path: Path) -> None:
    """Half of the requests reach the queue 0.4 s late: latencies grow by that, coefficients do not."""
    arrivals = alone()
    lag = 0.4 * (arrivals["arrival_s"] % 40 > 0)
    plain = calibrate([write_run(tmp_path / "plain", **arrivals)], CalibrationOptions(jitters=2))
    late = calibrate([write_run(tmp_path / "late", **arrivals, lag_s=lag)], CalibrationOptions(jitters=2))
    assert late.fit.cost["step_s"] == pytest.approx(plain.fit.cost["step_s"], rel=0.02)
    assert late.runs[0].run.lag_s.max() == pytest.approx(0.4)
    before, after = plain.runs[0].held_out, late.runs[0].held_out
    assert before is not None
    assert after is not None
    assert after["mean_ttft"].measured_ms == pytest.approx((before["mean_ttft"].measured_ms or 0) + 200, abs=1)
    assert after["mean_ttft"].error_percent == pytest.approx(0, abs=3)


def test_a_zero_of_the_start_stays_unless_it_is_the_unmeasured_one(tmp_path: Path) -> None:
    """Dearer KV reads in mixed steps may be 0 because nobody measured them; another 0 is a form without the term."""
    start = tmp_path / "start.json"
    zeros = {"per_kv_token_with_prefill_s": 0.0, "per_decode_seq_s": 0.0}
    start.write_text(json.dumps({**true_cost(), **zeros}))
    folder = write_run(tmp_path / "run", **loaded())
    options = CalibrationOptions(engine=TRUTH, cost_model=start, jitters=4)
    found = calibrate([folder], options)
    assert found.fit.cost["per_decode_seq_s"] == 0.0
    assert any("not fitted: per_decode_seq_s" in note for note in found.notes)
    truth = true_cost()["per_kv_token_with_prefill_s"]
    (one,) = [one for one in found.determined if one.name == "per_kv_token_with_prefill_s"]
    assert one.relative_to_prior < 0.9
    assert 0 < found.fit.cost[one.name] < truth + 2 * one.deviation
    assert truth < found.fit.cost[one.name] + 2 * one.deviation


def test_the_same_inputs_give_the_same_coefficients(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", **alone())
    options = CalibrationOptions(jitters=2, seed=3)
    assert calibrate([folder], options).to_dict() == calibrate([folder], options).to_dict()


def test_a_run_given_twice_is_no_second_run(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", **alone())
    with pytest.raises(ConfigError, match=r"requests.jsonl is given twice"):
        calibrate([folder, folder / "requests.jsonl"])


def test_a_run_of_another_engine_is_told(tmp_path: Path) -> None:
    """Three seats where the engine had 48: no step times explain that queue."""
    folder = write_run(tmp_path / "run", **loaded())
    found = calibrate([folder], CalibrationOptions(jitters=2, limits={"max_num_seqs": 3}))
    assert any("this is not the engine that was simulated" in note for note in found.notes)
    right = calibrate([folder], CalibrationOptions(jitters=2))
    assert not any("this is not the engine" in note for note in right.notes)


def test_two_starts_agree_within_what_they_say_they_know(tmp_path: Path) -> None:
    """Deviations are those of the coefficient and not of the bumps of one simulated path."""
    folder = write_run(tmp_path / "run", **loaded())
    ends = []
    for name, factor in (("low", 0.75), ("high", 1.33)):
        start = tmp_path / f"{name}.json"
        start.write_text(json.dumps(off_by(dict.fromkeys(COST_KEYS, factor))))
        found = calibrate([folder], CalibrationOptions(engine=TRUTH, cost_model=start, jitters=4))
        assert found.worst_held_out_percent is not None
        assert found.worst_held_out_percent < 1.5
        ends.append({one.name: (found.fit.cost[one.name], one.deviation) for one in found.determined})
    for name in COST_KEYS:
        (low, low_sd), (high, high_sd) = (end[name] for end in ends)
        assert abs(low - high) < 3 * math.hypot(low_sd, high_sd), name
