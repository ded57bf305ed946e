"""Runs from logs of servers and tools: the times are those that the log has, and the cost is that of the engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from synthetic_run import alone, true_cost, write_run

from leap_rs import TraceError
from leap_rs.calibrate import CalibrationOptions, calibrate, read_runs
from leap_rs.trace import load, write_trace

SAMPLES = Path(__file__).parent.parent / "cases" / "formats"


def spans(folder: Path) -> list[str]:
    """The synthetic run of `folder` as a server would have told it, in the order in which its requests ended."""
    rows = [json.loads(line) for line in (folder / "requests.jsonl").read_text().splitlines()]
    lines = []
    for row in sorted(rows, key=lambda row: row["last_token_ts"]):
        attributes: dict[str, Any] = {
            "gen_ai.usage.prompt_tokens": {"intValue": str(row["input_toks"])},
            "gen_ai.usage.completion_tokens": {"intValue": str(row["output_toks"])},
            "gen_ai.latency.time_to_first_token": {"doubleValue": row["first_token_ts"] - row["queued_ts"]},
            "gen_ai.latency.e2e": {"doubleValue": row["last_token_ts"] - row["queued_ts"]},
        }
        span = {
            "name": "llm_request",
            "startTimeUnixNano": str(round(row["queued_ts"] * 1e9)),
            "attributes": [{"key": key, "value": value} for key, value in attributes.items()],
        }
        lines.append(json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": [span]}]}]}))
    return lines


def test_spans_of_a_server_have_the_times_of_its_run(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", **alone())
    log, converted = tmp_path / "spans.jsonl", tmp_path / "converted.parquet"
    log.write_text("\n".join(spans(folder)))
    trace = load(log)
    write_trace(trace.frame, converted, **trace.metadata)
    (expected,) = read_runs(folder)
    for path in (log, converted):
        (run,) = read_runs(path)
        np.testing.assert_allclose(run.queued_s, expected.queued_s, atol=1e-6)
        np.testing.assert_allclose(run.first_token_s, expected.first_token_s, atol=1e-6)
        np.testing.assert_allclose(run.last_token_s, expected.last_token_s, atol=1e-6)
        assert run.requests.rows() == expected.requests.rows()
    found = calibrate([log], CalibrationOptions(engine="a100-llama-8b", jitters=2))
    assert found.fit.cost["step_s"] == pytest.approx(true_cost()["step_s"], rel=0.02)


def test_latencies_count_from_the_plan_and_the_engine_s_time_from_the_sending() -> None:
    (run,) = read_runs(SAMPLES / "aiperf_profile_export.jsonl")
    # Both were sent 0.2 ms after they were due.
    assert run.planned_s == pytest.approx([-0.0002, 0.7998])
    assert run.queued_s == pytest.approx([0.0, 0.8])
    assert run.first_token_s == pytest.approx([0.0905, 0.88])
    assert run.last_token_s == pytest.approx([1.2905, 0.98])


def test_every_benchmark_of_a_report_is_a_run(tmp_path: Path) -> None:
    report = json.loads((SAMPLES / "guidellm_benchmarks.json").read_text())
    report["benchmarks"] *= 2
    path = tmp_path / "report.json"
    path.write_text(json.dumps(report))
    runs = read_runs(path)
    assert [run.name for run in runs] == ["report run 1", "report run 2"]
    for run in runs:
        assert run.queued_s == pytest.approx([0.0, 1.25, 1.75])
        assert run.first_token_s == pytest.approx([0.15, 1.45, 1.95])


def test_requests_without_measured_times_are_left_out_and_told(tmp_path: Path) -> None:
    entries = json.loads((SAMPLES / "inference_perf_per_request_lifecycle_metrics.json").read_text())
    for key in ("chunk_times", "output_token_times"):
        entries[0]["info"]["response_metrics"][key] = []
    path = tmp_path / "log.json"
    path.write_text(json.dumps(entries))
    (run,) = read_runs(path)
    assert len(run) == 1
    assert "1 of 2 requests left out: no measured times that can be right" in run.notes


@pytest.mark.parametrize("name", ["sglang_bench_serving.jsonl", "llmperf_individual_responses.json"])
def test_a_log_without_arrivals_is_no_run(name: str) -> None:
    with pytest.raises(TraceError, match=r"not a measured run: no arrival times"):
        read_runs(SAMPLES / name)
