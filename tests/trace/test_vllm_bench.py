"""Results of `vllm bench serve`: the requests that succeeded by planned arrival, and what is no measured run refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bench_results import SUMMARY, detailed

from leap_rs._leap import ConfigError, TraceError
from leap_rs.trace import READERS, ReadOptions, load
from leap_rs.trace.opening import opened
from leap_rs.trace.vllm_bench import bench_runs, is_bench_result


def write(path: Path, *results: dict[str, Any], between: str = "\n", **how: Any) -> Path:
    path.write_text(between.join(json.dumps(result, **how) for result in results))
    return path


def test_a_failed_request_is_left_out_and_tokens_are_not_chunks(cases: Path) -> None:
    (run,) = bench_runs(cases / "10-vllm_detailed_failed.json")
    assert run.number == 1
    assert run.output_tokens.tolist() == [9, 1, 5, 8]
    assert run.prompt_tokens.tolist() == [40, 48, 40, 40]
    assert run.arrival_s == pytest.approx([0, 0.01, 0.01, 0.02], abs=1e-9)
    assert run.e2el_s == pytest.approx([0.37, 0.4, 0.51, 0.51], abs=1e-12)
    assert run.ttft_s == pytest.approx([0.21, 0.4, 0.35, 0.3], abs=1e-12)
    assert [len(gaps) for gaps in run.itls_s] == [3, 0, 4, 7]
    assert [(out.count, out.first) for out in run.left_out] == [(1, "run 1, request index 1")]
    assert run.summary["request_rate"] == "inf"
    assert not set(run.summary) & {"itls", "latencies", "generated_texts", "errors"}
    assert run.arrival_s.dtype == run.ttft_s.dtype == run.e2el_s.dtype == np.float64
    assert run.prompt_tokens.dtype == run.output_tokens.dtype == np.uint32


def test_a_summary_that_still_holds_two_arrays_is_refused(cases: Path) -> None:
    path = cases / "10-vllm_summary_only.json"
    assert is_bench_result(path)
    with pytest.raises(TraceError, match=r"10-vllm_summary_only\.json: run 1: only a summary .* --save-detailed"):
        bench_runs(path)


def test_appended_runs_and_bare_nan_are_read(cases: Path) -> None:
    first, second = bench_runs(cases / "12-vllm_appended_nan.json")
    assert (first.number, second.number) == (1, 2)
    assert first.output_tokens.tolist() == [1, 1]
    assert second.output_tokens.tolist() == [3, 2]
    assert first.summary["mean_tpot_ms"] is None
    assert second.summary["mean_tpot_ms"] == 100.0
    assert second.e2el_s == pytest.approx([0.4, 0.4])  # without `latencies`: TTFT and the gaps


@pytest.mark.parametrize("between", ["", "\n", "\r\n\r\n", " "])
@pytest.mark.parametrize("how", [{}, {"indent": 2, "sort_keys": True}, {"separators": (",", ":")}])
@pytest.mark.parametrize("runs", [1, 2, 3])
def test_runs_stand_one_after_the_other(between: str, how: dict[str, Any], runs: int, tmp_path: Path) -> None:
    path = write(tmp_path / "r", *(detailed(output_lens=[9, 2, n]) for n in range(1, runs + 1)), between=between, **how)
    assert is_bench_result(path)
    assert [int(run.output_tokens[2]) for run in bench_runs(path)] == list(range(1, runs + 1))


def test_the_planned_arrival_is_before_the_wait_in_the_client(tmp_path: Path) -> None:
    # Two requests at a time: the third was due at 100.1 and sent at 101; the second was due first.
    result = detailed(max_concurrency=2, start_times=[100.2, 100.0, 101.0], queue_times=[0.0, -1e-7, 0.9])
    (run,) = bench_runs(write(tmp_path / "r.json", result))
    assert run.arrival_s == pytest.approx([0.0, 0.1, 0.2])
    assert run.prompt_tokens.tolist() == [32, 48, 40]
    assert run.client_queue_s == pytest.approx([0.0, 0.9, 0.0])
    assert run.ttft_s == pytest.approx([0.1, 1.2, 0.2])
    assert run.e2el_s == pytest.approx([0.21, 1.2, 0.31])
    assert run.notes == ()


def test_without_queue_times_a_limit_on_concurrency_is_told(tmp_path: Path) -> None:
    (run,) = bench_runs(write(tmp_path / "r.json", detailed(max_concurrency=2, queue_times=None)))
    assert len(run.notes) == 1
    assert "not when it was due" in run.notes[0]
    (run,) = bench_runs(write(tmp_path / "r.json", detailed(queue_times=None)))
    assert run.notes == ()


def test_a_request_may_succeed_with_nothing_said(tmp_path: Path) -> None:
    (run,) = bench_runs(write(tmp_path / "r.json", detailed(output_lens=[0, 2, 1], input_lens=[1, 1, 0])))
    assert run.output_tokens.tolist() == [2]
    assert run.arrival_s.tolist() == [0.0]
    assert [out.first for out in run.left_out] == ["run 1, request index 0", "run 1, request index 2"]


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "an array too short": ({"ttfts": [0.1, 0.2]}, "key 'ttfts' has 2 values, but 'input_lens' has 3"),
    "an array that is none": ({"itls": 4}, "key 'itls': expected an array with one value a request, found 4"),
    "NaN time": ({"ttfts": [0.1, math.nan, 0.1]}, "key 'ttfts', request index 1: expected a finite"),
    "infinite latency": ({"latencies": [0.1, 1, math.inf]}, "key 'latencies', request index 2"),
    "negative latency": ({"latencies": [-0.1, 1, 1]}, "key 'latencies', request index 0"),
    "NaN gap": ({"itls": [[0.1], [math.nan], []]}, "key 'itls', request index 1"),
    "no start": ({"start_times": [1.0, None, 2.0]}, "key 'start_times', request index 1"),
    "true tokens": ({"output_lens": [1, True, 1]}, "key 'output_lens', request index 1: expected a whole"),
    "half a token": ({"output_lens": [1, 1.5, 1]}, "key 'output_lens', request index 1"),
    "negative tokens": ({"input_lens": [1, 1, -1]}, "key 'input_lens', request index 2"),
    "tokens beyond 32 bits": ({"input_lens": [2**32, 1, 1]}, "key 'input_lens', request index 0"),
    "text for tokens": ({"input_lens": ["1", 1, 1]}, "key 'input_lens', request index 0"),
    "all failed": ({"errors": ["a", "b", "c"]}, "no request succeeded (3 in the file)"),
    "no requests": ({"input_lens": [], "output_lens": []}, "key 'ttfts' has 3 values, but 'input_lens' has 0"),
    "times not recorded": ({"start_times": None, "queue_times": None}, "run 1 has no start_times"),
    "no ttfts": ({"ttfts": None}, "only a summary (no ttfts): save with --save-detailed"),
    "a pooling model": ({"output_lens": None, "input_sequence_throughput": 3.0}, "generates no tokens"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_results_name_the_run_the_key_and_the_request(name: str, tmp_path: Path) -> None:
    changes, what = WRONG[name]
    path = write(tmp_path / "r.json", detailed(), detailed(**changes))
    with pytest.raises(TraceError) as caught:
        bench_runs(path)
    assert str(caught.value).startswith(f"{path}: run ")
    assert what.replace("run 1", "run 2") in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("edit", "what"),
    [
        (lambda text: text[:-20], r"line 3: not valid JSON: .*found|line 3: not valid JSON: it ends in the middle"),
        (lambda text: text + "]", r"line 3: not valid JSON: expected value at column \d+, found \"\]\""),
        (lambda text: text + "\n7", r"line 4: expected a JSON object, found 7"),
        (lambda text: text.replace("[40, 32", "[40 32"), r"line 1: not valid JSON: expected ',' delimiter"),
        (lambda text: text + "\n" + "[" * 100_000, r"line 4: not valid JSON"),
        (lambda text: text.replace("opt-125m", "opt-\udcff"), r"line 1: not UTF-8 text"),
    ],
)
def test_broken_json_names_the_line(edit: Any, what: str, tmp_path: Path) -> None:
    path = write(tmp_path / "r.json", detailed(), detailed(), between="\n\n")
    path.write_bytes(edit(path.read_text()).encode(errors="surrogateescape"))
    with pytest.raises(TraceError, match=what) as caught:
        bench_runs(path)
    assert "Extra data" not in str(caught.value)


def test_summaries_of_other_shapes(tmp_path: Path) -> None:
    assert is_bench_result(write(tmp_path / "s.json", SUMMARY, indent=4, sort_keys=True))
    assert is_bench_result(write(tmp_path / "list.json", [SUMMARY]))  # type: ignore[arg-type]
    assert not is_bench_result(write(tmp_path / "nested.json", {"runs": SUMMARY}))
    assert not is_bench_result(write(tmp_path / "text.json", {"text": json.dumps(SUMMARY)}))


def test_the_trace_of_a_run_with_a_failed_request(cases: Path) -> None:
    path = cases / "10-vllm_detailed_failed.json"
    trace = load(path)
    assert trace.format == "vllm-bench"
    assert trace.frame["arrival_s"].to_list() == pytest.approx([0, 0.01, 0.01, 0.02], abs=1e-9)
    assert trace.frame["output_tokens"].to_list() == [9, 1, 5, 8]
    assert trace.frame["prompt_tokens"].to_list() == [40, 48, 40, 40]
    assert trace.told() == [f"{path}: 1 row left out: the request failed (first: run 1, request index 1)"]
    assert trace.metadata["model"] == "facebook/opt-125m"
    with pytest.raises(TraceError, match=r"run 1, request index 1: the request failed, and strict refuses that"):
        load(path, ReadOptions(strict=True))
    with pytest.raises(TraceError, match="save with --save-detailed"):
        load(cases / "10-vllm_summary_only.json")


def test_of_two_results_one_is_chosen_or_both_are_joined(cases: Path) -> None:
    path = cases / "12-vllm_appended_nan.json"
    with pytest.raises(TraceError, match=r"12-vllm_appended_nan\.json: two results; choose with --run N or --join$"):
        load(path)
    assert load(path, ReadOptions(run=1)).frame.rows() == [(0.0, 32, 1), (0.5, 32, 1)]
    assert load(path, ReadOptions(run=2)).frame.rows() == [(0.0, 32, 3), (0.5, 32, 2)]
    joined = load(path, ReadOptions(join=True))
    # The first run's last answer ends 0.5 + 0.3 s after its first request.
    assert joined.frame["arrival_s"].to_list() == pytest.approx([0.0, 0.5, 0.8, 1.3])
    assert joined.frame["output_tokens"].to_list() == [1, 1, 3, 2]
    assert any("2 runs are joined" in note for note in joined.notes)
    for run in (0, 3, -1):
        with pytest.raises(ConfigError, match=f"run {run} is not there: the file holds two results"):
            load(path, ReadOptions(run=run))


def test_a_chosen_run_does_not_depend_on_the_others(tmp_path: Path) -> None:
    path = write(tmp_path / "r.json", SUMMARY, detailed())
    assert load(path, ReadOptions(run=2)).frame.height == 3
    with pytest.raises(TraceError, match="run 1: only a summary"):
        load(path, ReadOptions(run=1))
    with pytest.raises(TraceError, match="run 1: only a summary"):
        load(path, ReadOptions(join=True))


def test_runs_that_send_all_at_once_stay_apart(tmp_path: Path) -> None:
    burst = detailed(start_times=[7.0, 7.0, 7.0], latencies=[0.31, 0.9, 0.3], ttfts=[0.2, 0.1, 0.3])
    trace = load(write(tmp_path / "r.json", burst, burst), ReadOptions(join=True))
    assert trace.frame["arrival_s"].to_list() == pytest.approx([0, 0, 0, 0.9, 0.9, 0.9])


def test_a_trace_without_send_times_says_so(tmp_path: Path) -> None:
    trace = load(write(tmp_path / "r.json", detailed(start_times=None, queue_times=None)))
    assert trace.frame["arrival_s"].to_list() == [0.0, 0.0, 0.0]
    assert any("no arrival times (no key 'start_times')" in line for line in trace.told())


def test_a_unit_is_a_contradiction(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"a unit \(s\) cannot be given"):
        load(write(tmp_path / "r.json", detailed()), ReadOptions(unit="s"))


def test_a_long_result_is_recognised_by_one_reader(tmp_path: Path) -> None:
    wide = detailed(generated_texts=['"conversations": ' * 3000, "b", "c"])
    for result in (wide, dict(reversed(wide.items())), dict(sorted(wide.items()))):
        path = write(tmp_path / "r", result)
        assert [reader.name for reader in READERS if reader.fit(opened(path)).whole] == ["vllm-bench"]
