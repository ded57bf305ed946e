"""Nothing to rank: undefined numbers are null and told once, and nothing warns."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import polars as pl
from fit_command import fit, fit_json

from leap_rs.trace import read_trace, write_trace

RANKS = ("spearman", "kendall_tau_b", "pairwise_accuracy_1_2", "pairwise_accuracy_2")


def equal_lengths(small: Path) -> Path:
    path = small / "equal.parquet"
    frame = read_trace(small / "math.parquet").with_columns(
        output_tokens=pl.lit(30, pl.UInt32), finish_reason=pl.lit("stop")
    )
    write_trace(frame, path)
    return path


def test_an_evaluation_on_equal_lengths(small: Path) -> None:
    equal = equal_lengths(small)
    words = [small / "code.parquet", "--out", small / "r.safetensors", "--lam", "30", "--eval", equal, "--rls"]
    (one,) = fit_json(*words, "--layers")
    found = one["evaluations"][str(equal)]
    assert set(found) == {"frozen", "rls", "frozen_second_half", "rls_second_half"}
    for score in found.values():
        assert {score[name] for name in RANKS} == {None}
        assert score["mae_tokens"] == score["mae_tokens_to_256"] > 0
        assert (score["mae_tokens_257_to_1024"], score["mae_tokens_above_1024"]) == (None, None)
        assert 0 <= score["inside_50"] <= score["inside_90"] <= 1
    curve = one["curves"][str(equal)]
    assert (curve["in_domain"], curve["learning"], curve["within_0_02_after"]) == (None, [], None)
    assert [(window["frozen"], window["rls"]) for window in curve["windows"]] == [(None, None)] * 2


def test_undefined_is_told_once_and_without_warnings(small: Path) -> None:
    equal = equal_lengths(small)
    code = "from leap_rs.fit.command import main; main()"
    words = ["code.parquet", "--out", "r.safetensors", "--lam", "30", "--eval", str(equal), "--rls", "--layers"]
    call = [sys.executable, "-W", "error", "-c", code, *words]
    done = subprocess.run(call, capture_output=True, text=True, cwd=small, check=False)
    assert done.returncode == 0
    assert done.stderr == f"leap-fit: {equal}: all 199 lengths are 30 tokens, so ranks are undefined\n"
    assert done.stdout.count("undefined") == 1
    assert "nan" not in done.stdout.lower()


def test_a_trace_of_cut_answers_alone(small: Path) -> None:
    """Every length is only a lower bound: RLS learns from them and intervals count them, but there is no error."""
    frame = read_trace(small / "math.parquet").with_columns(
        output_tokens=pl.lit(20, pl.UInt32), max_tokens=pl.lit(20, pl.UInt32), finish_reason=pl.lit("length")
    )
    write_trace(frame, small / "cut.parquet")
    judged = str(small / "cut.parquet")
    words = [small / "code.parquet", "--out", small / "r.safetensors", "--lam", "30", "--eval", judged, "--rls"]
    result = fit(*words, "--json")
    assert result.exit_code == 0, result.output
    assert "199 answers were cut before 1024 tokens: left out of ranks and errors" in result.stderr
    (one,) = json.loads(result.stdout)["readouts"]
    for score in one["evaluations"][judged].values():
        assert (score["rows"], score["spearman"], score["mae_tokens"]) == (0, None, None)
        # Predicted far above 20 tokens: nearly all of the distribution lies where the answer may have ended.
        assert 0.45 < score["inside_50"] < 0.6
    assert one["curves"][judged]["in_domain"] is None
