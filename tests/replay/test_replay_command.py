"""The command: exit statuses, what goes to which stream, files that it writes."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from commands import Run, runner, strict_json

from leap_rs.replay.command import expand, main

# Three quiet minutes: 12 requests, 15 s apart, as vidur writes traces.
QUIET = [(15.0 * i, 100 + 7 * i, (8, 600, 30, 250)[i % 4]) for i in range(12)]


def write_csv(path: Path, rows: Sequence[tuple[float, int, int]]) -> Path:
    lines = ["arrived_at,num_prefill_tokens,num_decode_tokens", *(f"{t},{p},{n}" for t, p, n in rows)]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    return runner(main, capsys)


@pytest.fixture
def quiet(tmp_path: Path) -> Path:
    return write_csv(tmp_path / "quiet.csv", QUIET)


def test_help_says_what_kv_tokens_counts(run: Run) -> None:
    status, out, _ = run("--help")
    words = " ".join(out.replace("│", " ").split())
    assert status == 0
    assert "this includes the null block" in words
    for option in [
        "--load",
        "--request-rate",
        "--burstiness",
        "--num-prompts",
        "--seed",
        "--seeds",
        "--max-concurrency",
        "--sweep",
        "--engine",
        "--decode-slots",
        "--data-parallel-size",
        "--max-num-seqs",
        "--max-num-batched-tokens",
        "--kv-tokens",
        "--policy",
        "--cost-model",
        "--goodput",
        "--percentile-metrics",
        "--metric-percentiles",
        "--save-result",
        "--result-dir",
        "--result-filename",
        "--metadata",
        "--report",
        "--json",
        "--readout",
        "--block-size",
        "--watermark",
        "--enable-chunked-prefill",
        "--enable-prefix-caching",
        "--async-scheduling",
        "--wait-cap-s",
        "--max-tokens",
        "--threads",
    ]:
        assert option in words


@pytest.mark.parametrize("words", [[], ["a.csv", "--speed"], ["a.csv", "--load", "fast"], ["a.csv", "b.csv"]])
def test_wrong_usage_is_status_2(run: Run, words: list[str]) -> None:
    status, out, err = run(*words)
    assert status == 2
    assert out == ""
    assert err != ""


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--load", "-1"], "--load"),
        (["--engine", "tpu"], "--engine: no preset 'tpu'"),
        (["--policy", "sjf"], "sjf"),
        (["--policy", "leap:speed=1"], "speed"),
        (["--sweep", "load"], "--sweep"),
        (["--goodput", "speed:1"], "--goodput"),
        (["--kv-tokens", "16"], "--kv-tokens: "),
        (["--max-num-seqs", "0"], "--max-num-seqs: "),
        (["--data-parallel-size", "0"], "--data-parallel-size: "),
        (["--max-num-batched-tokens", "16", "--max-num-seqs", "17"], "--max-num-batched-tokens"),
        (["--policy", "leap:wait_cap_s=x"], "policy leap:wait_cap_s=x: "),
        (["--cost-model", "missing.json"], "missing.json"),
        (["--readout", "missing.safetensors"], "missing.safetensors"),
        (["--result-dir", "x"], "--save-result"),
        (["--policy", "score:bert"], "bert"),
        (
            ["--report", "nowhere/page.html"],
            "--report: nowhere/page.html: cannot be written: there is no directory nowhere",
        ),
        (["--report", "."], "--report: .: cannot be written: it is a directory"),
    ],
)
def test_an_option_that_cannot_be_used_is_one_line_and_status_1(
    run: Run, quiet: Path, words: list[str], part: str
) -> None:
    status, out, err = run(quiet, *words)
    assert status == 1
    assert out == ""
    assert err.startswith("leap-replay: ")
    assert err.count("\n") == 1
    assert part in err
    assert "Traceback" not in err


def test_a_trace_that_cannot_be_read_is_status_1(run: Run, tmp_path: Path) -> None:
    for name, content in (("missing.csv", None), ("empty.csv", ""), ("zero.parquet", "PAR1")):
        path = tmp_path / name
        if content is not None:
            path.write_text(content)
        status, out, err = run(path)
        assert (status, out, err.count("\n")) == (1, "", 1)
        assert name in err


def test_without_a_queue_the_last_line_says_that_no_policy_can_matter(run: Run, quiet: Path) -> None:
    status, out, err = run(quiet, "--seeds", 2)
    assert (status, err) == (0, "")
    assert "no policy can matter at this load" in " ".join(out.split()[-40:])
    assert max(map(len, out.splitlines())) <= 120
    for policy in ("fcfs", "sjf-prompt", "hrrn", "las", "mlfq", "sjf-oracle", "srpt-oracle"):
        assert any(line.startswith(f"{policy} ") for line in out.splitlines())
    assert "leap-frozen is left out" in out
    assert "leap-paper is left out" in out


def test_json_is_alone_on_stdout_and_every_policy_ties_without_a_queue(run: Run, quiet: Path) -> None:
    status, out, err = run(quiet, "--seeds", 2, "--json")
    found = strict_json(out)
    assert (status, err) == (0, "")
    results = found["results"]
    assert all(result["queue"]["share_of_steps_with_queue"] == 0 for result in results)
    assert all(result["metrics"] == results[0]["metrics"] for result in results)
    assert all(result["paired"]["mean_ptl_ms"]["mean"] == 0 for result in results)


def test_compressed_by_load_they_differ(run: Run, tmp_path: Path) -> None:
    rows = [(30.0 * i, 100 + i % 50, (8, 900, 30, 250)[i % 4]) for i in range(120)]
    words = (write_csv(tmp_path / "t.csv", rows), "--load", 1.5, "--max-num-seqs", 8, "--seeds", 2, "--json")
    status, out, _ = run(*words)
    found = strict_json(out)
    ptl = {result["policy"]: result["metrics"]["mean_ptl_ms"]["mean"] for result in found["results"]}
    assert status == 0
    assert found["results"][0]["queue"]["share_of_steps_with_queue"] > 0.3
    assert ptl["srpt-oracle"] < 0.8 * ptl["fcfs"]
    assert all(result["load"] == 1.5 for result in found["results"])
    assert run(*words)[1] == out


def test_one_token_answers(run: Run, tmp_path: Path) -> None:
    """Answers of 1, 1, 4 and 6 tokens that never overlap: TPOT is a mean over two requests, ITL over 3 + 5 gaps."""
    trace = write_csv(tmp_path / "one.csv", [(0.0, 80, 1), (6.0, 80, 1), (12.0, 80, 4), (18.0, 80, 6)])
    common = (trace, "--policy", "fcfs", "--seeds", 1, "--json")
    first = strict_json(run(*common)[1])["results"][0]["metrics"]
    none = strict_json(run(*common, "--goodput", "tpot:0.000001")[1])["results"][0]["metrics"]
    all_good = strict_json(run(*common, "--goodput", "ttft:1000000")[1])["results"][0]["metrics"]
    ratio = none["request_goodput"]["mean"] / all_good["request_goodput"]["mean"]
    assert ratio == pytest.approx(0.5)
    assert first["mean_itl_ms"]["mean"] > 0
    assert first["mean_ptl_ms"]["ci95"] is None
    single = write_csv(tmp_path / "single.csv", [(0.0, 80, 1), (6.0, 90, 1)])
    only = strict_json(run(single, "--policy", "fcfs", "--seeds", 2, "--json")[1])["results"][0]["metrics"]
    assert only["mean_tpot_ms"]["mean"] is None
    assert only["p99_itl_ms"]["mean"] is None
    assert only["mean_ptl_ms"]["mean"] == pytest.approx(only["mean_e2el_ms"]["mean"])
    table = run(single, "--policy", "fcfs", "--seeds", 2)[1]
    assert any(line.split().count("-") >= 4 for line in table.splitlines() if line.startswith("fcfs"))


def test_a_request_that_can_never_fit_is_told_by_row_and_left_out(run: Run, tmp_path: Path) -> None:
    """64 blocks of 16 are 63 usable, 1,008 tokens; prompt + output - 1 are stored: 1,008 fit, 1,009 and 4,399 do not."""
    rows = [(0.0, 1004, 5), (0.0, 70, 25), (1.0, 1000, 10), (2.0, 70, 25), (3.0, 4000, 400), (4.0, 70, 25)]
    status, out, err = run(write_csv(tmp_path / "t.csv", rows), "--kv-tokens", 1024, "--policy", "fcfs", "--json")
    found = strict_json(out)
    assert (status, err) == (0, "")
    assert [item["row"] for item in found["trace"]["left_out"]] == [2, 4]
    assert found["config"]["kv_tokens_usable"] == 1008
    assert any("row 2" in note and "row 4" in note for note in found["notes"])


def test_saved_result_is_what_json_prints(run: Run, quiet: Path, tmp_path: Path) -> None:
    status, out, err = run(
        quiet,
        "--policy",
        "fcfs",
        "--seeds",
        1,
        "--json",
        "--save-result",
        "--result-dir",
        tmp_path / "r",
        "--metadata",
        "gpu=H100",
    )
    file = tmp_path / "r" / "leap-replay-quiet-recorded.json"
    assert status == 0
    assert str(file) in err
    assert strict_json(file.read_text()) == strict_json(out)
    assert strict_json(out)["gpu"] == "H100"
    run(
        quiet,
        "--policy",
        "fcfs",
        "--seeds",
        1,
        "--save-result",
        "--result-dir",
        tmp_path,
        "--result-filename",
        "x.json",
    )
    assert (tmp_path / "x.json").exists()


def test_a_sweep_gives_a_result_a_policy_and_point(run: Run, quiet: Path) -> None:
    words = (quiet, "--policy", "fcfs", "--policy", "las", "--sweep", "load=0.6:1.0:0.2", "--seeds", 1)
    found = strict_json(run(*words, "--json")[1])
    assert [(r["policy"], r["load"]) for r in found["results"]] == [
        (policy, load) for load in (0.6, 0.8, 1.0) for policy in ("fcfs", "las")
    ]
    assert len(found["conclusions"]) == 3
    assert "Mean PTL, ms, by load" in run(*words)[1]


def test_request_rate_replaces_the_arrivals(run: Run, quiet: Path) -> None:
    words = (quiet, "--policy", "fcfs", "--seeds", 1, "--json", "--request-rate")
    assert strict_json(run(*words, "inf")[1])["results"][0]["request_rate"] == "inf"
    slow, fast = (strict_json(run(*words, rate)[1])["results"][0]["metrics"] for rate in (0.05, 5))
    assert slow["request_throughput"]["mean"] < fast["request_throughput"]["mean"]


def test_several_values_after_one_option_as_in_vllm() -> None:
    assert expand(["t.csv", "--goodput", "ttft:500", "tpot:50", "--load", "1.2"]) == [
        *("t.csv", "--goodput", "ttft:500", "--goodput", "tpot:50", "--load", "1.2")
    ]
    assert expand(["--metadata", "a=1", "b=2", "t.csv"]) == ["--metadata", "a=1", "--metadata", "b=2", "t.csv"]
    assert expand(["--goodput", "ttft:500", "t.csv"]) == ["--goodput", "ttft:500", "t.csv"]
    assert expand(["--goodput=ttft:500", "--", "a:b"]) == ["--goodput=ttft:500", "--", "a:b"]
    assert expand(["--goodput"]) == ["--goodput"]


def test_ctrl_c_is_status_130_in_one_line(tmp_path: Path) -> None:
    rows = [(0.01 * i, 300, 300 + i % 700) for i in range(20_000)]
    trace = write_csv(tmp_path / "long.csv", rows)
    code = "from leap_rs.replay.command import main; print('ready', flush=True); main()"
    # So many seeds take minutes on any machine: the signal always finds it at work.
    command = [sys.executable, "-c", code, str(trace), "--seeds", "1000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        time.sleep(2)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (130, "", "leap-replay: interrupted\n")


def test_threads_do_not_change_a_byte(run: Run, quiet: Path) -> None:
    words = (quiet, "--load", 2, "--max-num-seqs", 4, "--seeds", 3, "--json", "--threads")
    one, two = (run(*words, threads)[1] for threads in (1, 2))
    assert one == two
    assert strict_json(one)["results"][0]["queue"]["share_of_steps_with_queue"] > 0


def test_options_for_foreign_traces(run: Run, tmp_path: Path) -> None:
    def replayed(*words: object) -> Any:
        status, out, err = run(*words, "--policy", "fcfs", "--seeds", "1", "--json")
        assert status == 0, err
        return strict_json(out)

    # Two recordings of 0, 2, 4 and 1, 2 in milliseconds: the second follows the first by its mean gap of 2.
    two = write_csv(tmp_path / "two.csv", [(float(at), 10, 5) for at in (0, 2000, 4000, 1000, 2000)])
    assert run(two)[0] == 1
    joined = replayed(two, "--join", "--unit", "ms")
    assert joined["trace"]["duration_s"] == pytest.approx(7.0)
    assert any("2 recordings" in note for note in joined["notes"])
    assert replayed(two, "--sort", "--unit", "ms")["trace"]["duration_s"] == pytest.approx(4.0)
    assert replayed(two, "--sort", "--unit", "us")["trace"]["duration_s"] == pytest.approx(0.004)
    assert run(two, "--unit", "hours")[0] == 2
    status, _, error = run(two, "--sort", "--join")
    assert (status, error.count("\n")) == (1, 1)
    assert "sort and join" in error


def test_turns_of_conversations_are_counted(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "burst.csv"
    rows = ["0,a,1,m,10,5,15,x", "30,b,1,m,10,5,15,x", "60,a,1,m,10,5,15,x", "90,,1,m,10,5,15,x", "99,a,1,m,10,5,15,x"]
    header = "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type"
    path.write_text("\n".join([header, *rows]))
    status, out, _ = run(path, "--policy", "fcfs", "--seeds", "1", "--json")
    assert status == 0
    assert any("2 of 5 requests continue a conversation" in note for note in strict_json(out)["notes"])
