"""Runs from the JSON of `vllm bench serve --save-detailed`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from synthetic_run import alone, true_cost, write_run

from leap_rs import TraceError
from leap_rs.calibrate import CalibrationOptions, calibrate, read_runs


def bench_json(folder: Path) -> dict[str, Any]:
    """The synthetic run of `folder` as a client would have measured it."""
    rows = [json.loads(line) for line in (folder / "requests.jsonl").read_text().splitlines()]
    ttft = [row["first_token_ts"] - row["queued_ts"] for row in rows]
    decode = [row["last_token_ts"] - row["first_token_ts"] for row in rows]
    gaps = [
        [time / (row["output_toks"] - 1)] * (row["output_toks"] - 1) for time, row in zip(decode, rows, strict=True)
    ]
    return {
        "date": "20260101-000000",
        "backend": "vllm",
        "endpoint_type": "openai",
        "model_id": "meta-llama/Llama-3.1-8B",
        "tokenizer_id": "meta-llama/Llama-3.1-8B",
        "num_prompts": len(rows),
        "burstiness": 1.0,
        "request_rate": "inf",
        "max_concurrency": None,
        "input_lens": [row["input_toks"] for row in rows],
        "output_lens": [row["output_toks"] for row in rows],
        "start_times": [row["queued_ts"] for row in rows],
        "queue_times": [0.0] * len(rows),
        "ttfts": ttft,
        "itls": gaps,
        "latencies": [sum(parts) for parts in zip(ttft, decode, strict=True)],
        "errors": [""] * len(rows),
        "generated_texts": [""] * len(rows),
    }


def test_times_are_those_of_the_result(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", **alone())
    (tmp_path / "result.json").write_text(json.dumps(bench_json(folder)))
    (run,), (expected,) = read_runs(tmp_path / "result.json"), read_runs(folder)
    np.testing.assert_allclose(run.queued_s, expected.queued_s, atol=1e-6)
    np.testing.assert_allclose(run.first_token_s, expected.first_token_s, atol=1e-6)
    np.testing.assert_allclose(run.last_token_s, expected.last_token_s, atol=1e-6)
    assert run.requests.rows() == expected.requests.rows()
    assert run.facts.model == "meta-llama/Llama-3.1-8B"
    assert any("times are the client's" in note for note in run.notes)


def test_two_results_of_one_file_are_fitted_together(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", **alone())
    text = json.dumps(bench_json(folder))
    (tmp_path / "result.json").write_text(f"{text}\n{text}")
    found = calibrate([tmp_path / "result.json"], CalibrationOptions(engine="a100-llama-8b", jitters=2))
    assert [run.run.name for run in found.runs] == ["result run 1", "result run 2"]
    assert found.fit.cost["step_s"] == pytest.approx(true_cost()["step_s"], rel=0.02)


def test_a_summary_is_refused(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", **alone())
    result = {k: v for k, v in bench_json(folder).items() if k not in ("ttfts", "itls", "input_lens", "output_lens")}
    (tmp_path / "result.json").write_text(json.dumps(result))
    with pytest.raises(TraceError, match="--save-detailed"):
        read_runs(tmp_path / "result.json")
