"""Small files in the exact shape of public ones, each with a fault that has cost somebody a wrong result."""

from __future__ import annotations

import json
from pathlib import Path

import polars as pl
import pytest

from leap_rs.trace import load
from leap_rs.trace.command import main

CASES = Path(__file__).parent.parent / "cases"


def run(words: list[str | Path]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([str(word) for word in words])
    assert caught.value.code == 0


def test_burstgpt_with_failures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out = CASES / "01-burstgpt_with_fails.csv", tmp_path / "out.parquet"
    trace = load(path)
    assert trace.format == "burstgpt"
    assert trace.frame["output_tokens"].to_list() == [35, 214, 301, 512]
    assert trace.frame["arrival_s"].to_list() == [0.0, 45.0, 183.0, 183.0]
    assert trace.frame["prompt_tokens"].to_list() == [412, 88, 655, 1730]
    assert trace.frame["model"].to_list() == ["ChatGPT", "ChatGPT", "GPT-4", "ChatGPT"]
    assert [(out.count, out.first) for out in trace.left_out] == [(2, "line 3")]

    run(["convert", path, "--out", out])
    assert "2 rows left out: no output tokens, so a failed request (first: line 3)" in capsys.readouterr().out
    assert pl.read_parquet(out).equals(trace.frame)
    run(["describe", path])
    assert "2 rows left out: no output tokens" in capsys.readouterr().out


def test_azure_with_crlf_and_no_last_newline(tmp_path: Path) -> None:
    path, out = CASES / "08-azure2023_submillisecond_crlf.csv", tmp_path / "out.parquet"
    content = path.read_bytes()
    assert content.count(b"\r\n") == 5
    assert not content.endswith(b"\n")
    run(["convert", path, "--out", out])
    frame = load(out).frame
    assert frame["arrival_s"].to_list() == pytest.approx([0, 0.00015, 0.0009, 0.0094001, 0.0859], abs=1e-9)
    assert frame["output_tokens"].to_list() == [44, 109, 55, 16, 7]
    assert frame.schema["output_tokens"] == pl.UInt32
    assert frame.equals(load(path).frame)


def test_a_quiet_head_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(["describe", "--json", CASES / "16-no_queue.csv"])
    quiet = json.loads(capsys.readouterr().out)
    assert quiet["requests"] == 20
    assert quiet["request_rate"] == pytest.approx(1 / 30)
    assert quiet["arrivals"]["gap_cv"] == pytest.approx(0.0, abs=1e-12)
    assert quiet["head"] is None

    # The same and 92 times as fast afterwards, as in BurstGPT.
    path = tmp_path / "long.csv"
    times = [30.0 * i for i in range(20)] + [570 + 30 / 92 * i for i in range(1, 2000)]
    rows = [f"{at:.9f},{100},{50 if i < 20 else 60}" for i, at in enumerate(times)]
    path.write_text("\n".join(["arrived_at,num_prefill_tokens,num_decode_tokens", *rows]))
    run(["describe", "--json", path, "--num-prompts", "20"])
    head = json.loads(capsys.readouterr().out)["head"]
    assert head["requests"] == 20
    assert head["request_rate"] == pytest.approx(1 / 30)
    assert head["mean_output_tokens"] == 50.0
    assert head["differs_in"] == ["request_rate"]
    run(["describe", path, "--num-prompts", "20"])
    whole = 2018 / times[-1]
    assert f"0.0333 requests/s against {whole:.3g}" in capsys.readouterr().out
