"""Nothing to rank: undefined numbers are null and told once, and nothing warns."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import polars as pl
from fit_command import BUDGET, ROWS, fit, fit_json

from leap_rs._leap import Readout
from leap_rs.trace import read_trace, write_trace

RANKS = ("spearman", "kendall_tau_b", "pairwise_accuracy_1_2", "pairwise_accuracy_2")


def equal_lengths(small: Path) -> Path:
    path = small / "equal.parquet"
    frame = read_trace(small / "judged.parquet").with_columns(
        output_tokens=pl.lit(30, pl.UInt32), finish_reason=pl.lit("stop")
    )
    write_trace(frame, path)
    return path


def test_an_evaluation_on_equal_lengths(small: Path) -> None:
    equal = equal_lengths(small)
    words = [small / "other.parquet", "--out", small / "r.safetensors", "--lam", "30", "--eval", equal, "--rls"]
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
    words = ["other.parquet", "--out", "r.safetensors", "--lam", "30", "--eval", str(equal), "--rls", "--layers"]
    call = [sys.executable, "-W", "error", "-c", code, *words]
    done = subprocess.run(call, capture_output=True, text=True, cwd=small, check=False)
    assert done.returncode == 0
    assert done.stderr == f"leap-fit: {equal}: all {ROWS['judged']} lengths are 30 tokens, so ranks are undefined\n"
    assert done.stdout.count("undefined") == 1
    assert "nan" not in done.stdout.lower()


def test_a_trace_of_cut_answers_alone(small: Path) -> None:
    """Every length is only a lower bound: RLS learns from them and intervals count them, but there is no error."""
    frame = read_trace(small / "judged.parquet").with_columns(
        output_tokens=pl.lit(20, pl.UInt32), max_tokens=pl.lit(20, pl.UInt32), finish_reason=pl.lit("length")
    )
    write_trace(frame, small / "cut.parquet")
    judged = str(small / "cut.parquet")
    words = [small / "other.parquet", "--out", small / "r.safetensors", "--lam", "30", "--eval", judged, "--rls"]
    result = fit(*words, "--json")
    assert result.exit_code == 0, result.output
    assert f"{ROWS['judged']} answers were cut before {BUDGET} tokens: left out of ranks and errors" in result.stderr
    (one,) = json.loads(result.stdout)["readouts"]
    for score in one["evaluations"][judged].values():
        assert (score["rows"], score["spearman"], score["mae_tokens"]) == (0, None, None)
        # Predicted far above 20 tokens: nearly all of the distribution lies where the answer may have ended.
        assert 0.45 < score["inside_50"] < 0.6
    assert one["curves"][judged]["in_domain"] is None


def variant(small: Path, name: str, **columns: object) -> Path:
    """The small trace that is judged on, with other values in some columns."""
    path = small / f"{name}.parquet"
    values = {key: pl.lit(value) if isinstance(value, str) else value for key, value in columns.items()}
    write_trace(read_trace(small / "judged.parquet").with_columns(**values), path)
    return path


def test_an_evaluation_on_aborted_answers_alone(small: Path) -> None:
    aborted = variant(small, "aborted", finish_reason="abort")
    words = [small / "other.parquet", "--out", small / "r.safetensors", "--lam", "30", "--eval", aborted, "--rls"]
    (one,) = fit_json(*words)
    for score in one["evaluations"][str(aborted)].values():
        assert score.pop("rows") == 0
        assert set(score.values()) == {None}
    curve = one["curves"][str(aborted)]
    assert (curve["windows"], curve["in_domain"], curve["learning"]) == ([], None, [])
    printed = fit(*words)
    assert printed.exit_code == 0, printed.output
    assert f"{aborted}: all answers were aborted: there is nothing to judge on" in printed.stderr


def test_nothing_to_fit_on_names_the_files_and_why(small: Path) -> None:
    rows = ROWS["judged"]
    known = pl.int_range(pl.len()) == 3
    for path, what in (
        (
            variant(small, "aborted", finish_reason="abort"),
            f"no answer has a known length (0 were cut before 1024 tokens, {rows}",
        ),
        (variant(small, "cut", finish_reason="length", output_tokens=pl.int_range(1, pl.len() + 1)), "no answer has"),
        (
            variant(
                small,
                "one",
                finish_reason=pl.when(known).then(pl.lit("stop")).otherwise(pl.lit("length")),
                output_tokens=pl.int_range(1, pl.len() + 1),
            ),
            f"one answer alone has a known length ({rows - 1} were cut",
        ),
        (
            variant(
                small,
                "same",
                finish_reason=pl.when(pl.int_range(pl.len()) < 20).then(pl.lit("stop")).otherwise(pl.lit("length")),
                output_tokens=pl.when(pl.int_range(pl.len()) < 20).then(9).otherwise(pl.int_range(1, pl.len() + 1)),
            ),
            "the target has no variance: all 20 known lengths are 9 tokens",
        ),
    ):
        result = fit(path, "--out", small / "r.safetensors")
        assert result.exit_code == 1
        assert result.stderr.startswith(f"leap-fit: {path}: ")
        assert what in result.stderr
        assert result.stderr.count("\n") == 1


def test_too_few_rows_for_the_folds_name_the_file(small: Path) -> None:
    result = fit(small / "other.parquet", "--out", small / "r.safetensors", "--folds", "500")
    assert (result.exit_code, result.stderr.startswith(f"leap-fit: {small / 'other.parquet'}: ")) == (1, True)
    assert "do not fill 500 folds" in result.stderr


def test_a_readout_is_not_written_without_its_anchor(small: Path) -> None:
    (small / "r.anchor.safetensors").mkdir()
    before = sorted(small.iterdir())
    result = fit(small / "other.parquet", "--out", small / "r.safetensors", "--lam", "30")
    assert result.exit_code == 1
    assert result.stderr == f"leap-fit: {small / 'r.anchor.safetensors'}: cannot be written: it is a directory\n"
    assert sorted(small.iterdir()) == before


def test_the_model_is_known_if_any_trace_names_it(small: Path) -> None:
    write_trace(read_trace(small / "judged.parquet"), small / "unnamed.parquet")
    words = [small / "unnamed.parquet", small / "other.parquet", "--out", small / "r.safetensors", "--lam", "30"]
    assert fit(*words).exit_code == 0
    meta = Readout.load(small / "r.safetensors").meta
    assert (meta["model"], meta["layer"]) == ("m", 20)
