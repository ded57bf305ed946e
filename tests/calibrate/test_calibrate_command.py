"""The command: exit statuses, what goes where, and that leap-replay accepts what it writes."""

from __future__ import annotations

from pathlib import Path

import pytest
from commands import Run, runner, strict_json
from synthetic_run import KV_TOKENS, LIMITS, alone, loaded, write_run

from leap_rs.calibrate.command import main
from leap_rs.replay import replay
from leap_rs.replay.engines import COST_KEYS


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    return runner(main, capsys)


@pytest.fixture
def quiet(tmp_path: Path) -> Path:
    return write_run(tmp_path / "quiet", **alone())


def test_the_file_is_a_cost_model_for_replay(run: Run, tmp_path: Path, traces: Path) -> None:
    busy = write_run(tmp_path / "busy", **loaded(count=80))
    out = tmp_path / "cost.json"
    status, text, _ = run(busy, "--out", out, "--jitters", 2, "--name", "ours", "--json")
    assert status == 0
    written, printed = strict_json(out.read_text()), strict_json(text)
    assert printed == {"leap_calibrate_version": 1, "out": str(out), **written}
    assert tuple(written["cost"]) == COST_KEYS
    assert written["kv_tokens"] == KV_TOKENS - 16  # usable, as presets state it
    config = replay(
        traces / "gpt-4-0613-arenahard.parquet", policies="fcfs", seeds=1, num_prompts=20, cost_model=out
    ).to_dict()["config"]
    assert config["engine"] == "ours"
    assert config["cost_model"] == written["cost"]
    assert config["kv_tokens"] == KV_TOKENS
    assert {key: config[key] for key in LIMITS} == LIMITS


def test_the_report_says_what_was_fitted_how_good_it_is_and_what_is_missing(
    run: Run, quiet: Path, tmp_path: Path
) -> None:
    status, text, _ = run(quiet, "--out", tmp_path / "cost.json", "--jitters", 2)
    assert status == 0
    assert "fitted on the first 12 of 24 requests" in text
    assert "the last 12 requests, not fitted" in text
    for word in ("TTFT", "TPOT", "E2EL", "PTL", "not identified: per_decode_seq_s", "front-end lag", "worst held-out"):
        assert word in text
    assert "only 12 requests are held out" in text


def test_refit_writes_the_fit_on_everything_and_says_so(run: Run, quiet: Path, tmp_path: Path) -> None:
    documents = []
    for words in ((), ("--refit",)):
        status, text, _ = run(quiet, "--out", tmp_path / "cost.json", "--jitters", 2, "--json", *words)
        assert status == 0
        documents.append(strict_json(text))
    half, whole = documents
    assert whole["calibration"]["fitted_on"] == "all 24 requests; errors are of a fit on the first 12"
    assert half["calibration"]["fitted_on"] == "the first 12 of 24 requests"
    assert half["calibration"]["runs"] == whole["calibration"]["runs"]
    assert half["cost"] != whole["cost"]


def test_fitting_everything_leaves_nothing_to_judge_on(run: Run, quiet: Path, tmp_path: Path) -> None:
    status, text, _ = run(quiet, "--out", tmp_path / "cost.json", "--jitters", 2, "--fit-share", 1, "--json")
    assert status == 0
    document = strict_json(text)["calibration"]
    assert document["worst_held_out_percent"] is None
    assert document["runs"][0]["held_out"] is None
    assert any("all requests were fitted" in note for note in document["notes"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--pull", "1"), "--pull must be above 1"),
        (("--pull", "nan"), "--pull must be above 1"),
        (("--fit-share", "0"), "--fit-share must be above 0"),
        (("--jitter-ms", "-1"), "--jitter-ms must be 0 or more"),
        (("--engine", "b200"), "--engine: no preset 'b200'"),
        (("--kv-tokens", "16"), "--kv-tokens: 16 tokens are 1 blocks"),
        (("--cost-model", "none.json"), "cost model none.json: No such file"),
        (("--workload", "none.jsonl"), "none.jsonl: cannot be read"),
    ],
)
def test_wrong_options_are_one_line_and_nothing_is_written(
    run: Run, quiet: Path, tmp_path: Path, words: tuple[str, ...], message: str
) -> None:
    out = tmp_path / "cost.json"
    status, text, error = run(quiet, "--out", out, *words)
    assert (status, text) == (1, "")
    assert error.startswith(f"leap-calibrate: {message}")
    assert error.count("\n") == 1
    assert not out.exists()


def test_a_broken_run_leaves_an_older_file_alone(run: Run, quiet: Path, tmp_path: Path) -> None:
    out = tmp_path / "cost.json"
    out.write_text("older")
    (quiet / "requests.jsonl").write_text("{\n")
    status, text, error = run(quiet, "--out", out)
    assert (status, text) == (1, "")
    assert "requests.jsonl: line 1: not JSON" in error
    assert out.read_text() == "older"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cost.json", "quiet"]


def test_a_place_that_cannot_be_written_is_refused_before_the_fit(run: Run, quiet: Path, tmp_path: Path) -> None:
    status, _, error = run(quiet, "--out", tmp_path / "none" / "cost.json")
    assert status == 1
    assert "there is no directory" in error
    status, _, error = run(quiet, "--out", quiet)
    assert status == 1
    assert "it is a directory" in error


def test_usage_and_help(run: Run) -> None:
    assert run("--out", "x.json")[0] == 2
    assert run("run")[0] == 2
    status, text, _ = run("--help")
    assert status == 0
    words = " ".join(text.replace("│", " ").split())
    assert "null block included" in words
