"""Logs of servers, proxies and benchmark tools: each of their shapes, and what each reader decides.

The samples are made, in the tools' own layout; what is right of them follows from the numbers that stand there.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from leap_rs._leap import ConfigError, TraceError
from leap_rs.trace import READERS, ReadOptions, load
from leap_rs.trace.command import main
from leap_rs.trace.describe import MEASURED, describe
from leap_rs.trace.opening import opened

SAMPLES = Path(__file__).parent.parent / "cases" / "formats"

RIGHT: dict[str, tuple[str, list[tuple[float, int, int]], list[int]]] = {
    # Format; arrival, prompt and output of every request; how many rows are left out, by reason.
    "otlp_vllm_spans.jsonl": ("otlp", [(0.0, 250, 64), (0.9, 33, 12), (2.0, 9, 2)], []),
    "aiperf_profile_export.jsonl": ("aiperf", [(0.0, 40, 12), (0.8, 200, 20)], [1, 1]),
    "guidellm_benchmarks.json": ("guidellm", [(0.0, 40, 90), (1.25, 120, 31), (1.75, 15, 64)], [1, 1]),
    "sglang_bench_serving.jsonl": ("sglang", [(0.0, 600, 9), (0.0, 20, 3)], [1, 1]),
    "litellm_spend_logs.csv": ("litellm", [(0.0, 100, 40)], [1, 1]),
    "inference_perf_per_request_lifecycle_metrics.json": (
        "inference-perf",
        [(0.0, 300, 80), (1.25, 64, 30)],
        [1],
    ),
    "llmservingsim_workload.jsonl": ("llmservingsim", [(0.0, 20, 5), (0.25, 64, 12)], []),
    "llmperf_individual_responses.json": ("llmperf", [(0.0, 550, 100)], [1]),
}


def columns(path: Path, *names: str) -> list[tuple[Any, ...]]:
    return load(path).frame.select(names).rows()


def spans(*spans: dict[str, Any]) -> dict[str, Any]:
    return {"resourceSpans": [{"scopeSpans": [{"spans": list(spans)}]}]}


def span(start: int, name: str = "llm_request", **attributes: Any) -> dict[str, Any]:
    typed = [{"key": f"gen_ai.{key.replace('__', '.')}", "value": value} for key, value in attributes.items()]
    return {"name": name, "startTimeUnixNano": str(start), "attributes": typed}


def whole(value: int) -> dict[str, str]:
    return {"intValue": str(value)}


@pytest.mark.parametrize("name", RIGHT)
def test_a_sample_is_read(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kind, rows, left_out = RIGHT[name]
    path, out = SAMPLES / name, tmp_path / "out.parquet"
    trace = load(path)
    assert trace.format == kind
    assert [reader.name for reader in READERS if reader.fit(opened(path)).whole] == [kind]
    found = trace.frame.select("arrival_s", "prompt_tokens", "output_tokens").rows()
    assert [row[1:] for row in found] == [row[1:] for row in rows]
    assert [row[0] for row in found] == pytest.approx([row[0] for row in rows], abs=1e-9)
    assert [one.count for one in trace.left_out] == left_out

    with pytest.raises(SystemExit) as ended:
        main(["convert", str(path), "--out", str(out)])
    assert ended.value.code == 0
    assert pl.read_parquet(out).equals(trace.frame)
    with pytest.raises(SystemExit) as ended:
        main(["describe", str(path)])
    assert ended.value.code == 0
    assert f"{len(rows)} request" in capsys.readouterr().out


def test_spans_of_vllm_say_limits_sampling_and_measured_times() -> None:
    path = SAMPLES / "otlp_vllm_spans.jsonl"
    assert columns(path, "max_tokens", "finish_reason", "request_id") == [
        (64, "length", "cmpl-1"),
        (64, "stop", "cmpl-2"),
        (16, "stop", "cmpl-3"),
    ]
    frame = load(path).frame
    assert frame["temperature"].to_list() == pytest.approx([0.7] * 3)
    assert frame["top_p"].to_list() == pytest.approx([0.9] * 3)
    assert frame.select("ttft_s", "e2el_s", "time_in_queue_s").rows() == [
        (0.31, 1.2, 0.2),
        (0.05, 0.4, 0.001),
        (0.04, 0.09, 0.0),
    ]


def test_describe_says_what_a_fit_of_the_cost_lacks() -> None:
    for name, lacks in (
        ("otlp_vllm_spans.jsonl", []),
        ("guidellm_benchmarks.json", []),
        ("sglang_bench_serving.jsonl", ["arrival times: the tool that wrote the file kept none"]),
        ("llmservingsim_workload.jsonl", [f"{', '.join(MEASURED)}: what a real run measured"]),
    ):
        assert describe(SAMPLES / name)["missing"]["leap-calibrate"] == lacks


def test_spans_stand_in_lines_in_a_list_and_in_one_object(tmp_path: Path) -> None:
    lines = (SAMPLES / "otlp_vllm_spans.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in lines if line.strip()]
    right = load(SAMPLES / "otlp_vllm_spans.jsonl").frame
    together = {"resourceSpans": [one for entry in found for one in entry["resourceSpans"]]}
    for text in (
        json.dumps(found),
        json.dumps(found, indent=2),
        json.dumps(together),
        json.dumps(together, indent=2),
        "\n".join([*lines, json.dumps({"resourceMetrics": []}), json.dumps({"resourceLogs": []})]),
    ):
        path = tmp_path / "spans"
        path.write_text(text)
        assert load(path).frame.equals(right)


def test_one_object_of_all_spans_may_be_longer_than_a_look_at_a_file(tmp_path: Path) -> None:
    many = [span(n, usage__prompt_tokens=whole(5), usage__completion_tokens=whole(n + 1)) for n in range(25_000)]
    path = tmp_path / "spans.json"
    path.write_text(json.dumps(spans(*many)))
    assert path.stat().st_size > 4 << 20
    assert load(path).frame["output_tokens"].to_list() == list(range(1, 25_001))


def test_spans_by_the_names_of_the_standard(tmp_path: Path) -> None:
    ends = {"arrayValue": {"values": [{"stringValue": "length"}]}}
    answered = span(
        2_000_000_000,
        "chat m",
        usage__input_tokens=whole(7),
        usage__output_tokens=whole(3),
        response__finish_reasons=ends,
        response__model={"stringValue": "m"},
    )
    failed = {**span(1_000_000_000, "chat m", usage__input_tokens=whole(7)), "status": {"code": 2}}
    path = tmp_path / "spans.jsonl"
    path.write_text(json.dumps(spans(span(5, "GET /"), answered, failed)))
    trace = load(path)
    assert trace.frame.select("prompt_tokens", "output_tokens", "finish_reason", "model").rows() == [
        (7, 3, "length", "m")
    ]
    assert [(out.reason, out.first) for out in trace.left_out] == [("the request failed", "span 3")]
    assert any("no spans 'llm_request'" in note for note in trace.notes)


def test_a_client_s_span_of_a_request_of_vllm_is_no_second_request(tmp_path: Path) -> None:
    counts = {"usage__prompt_tokens": whole(5), "usage__completion_tokens": whole(2)}
    path = tmp_path / "spans.jsonl"
    path.write_text(json.dumps(spans(span(1, "chat m", **counts), span(2, **counts))))
    assert load(path).frame.height == 1


def test_vllm_leaves_out_a_temperature_of_0(tmp_path: Path) -> None:
    counts = {"usage__prompt_tokens": whole(5), "usage__completion_tokens": whole(2)}
    mass = {"request__top_p": {"doubleValue": 1.0}}
    hot = {"request__temperature": {"doubleValue": 0.5}}
    path = tmp_path / "spans.jsonl"
    path.write_text(json.dumps(spans(span(1, **counts, **mass), span(2, **counts, **mass, **hot))))
    assert load(path).frame["temperature"].to_list() == [0.0, 0.5]


def test_several_answers_to_one_request_share_an_id(tmp_path: Path) -> None:
    counts = {"usage__prompt_tokens": whole(5), "usage__completion_tokens": whole(2)}
    named = {"request__id": {"stringValue": "cmpl-1"}}
    path = tmp_path / "spans.jsonl"
    path.write_text(json.dumps(spans(span(1, **counts, **named), span(1, **counts, **named))))
    trace = load(path)
    assert trace.frame.height == 2
    assert "request_id" not in trace.frame.columns
    assert "no request_id: some stand there more than once" in trace.notes


def test_what_a_log_says_of_some_requests_only_is_no_column(tmp_path: Path) -> None:
    counts = {"usage__prompt_tokens": whole(5), "usage__completion_tokens": whole(20)}
    path = tmp_path / "spans.jsonl"
    path.write_text(json.dumps(spans(span(1, **counts), span(2, **counts, request__max_tokens=whole(30)))))
    trace = load(path)
    assert "max_tokens" not in trace.frame.columns
    assert "no max_tokens: only 1 of 2 requests have one" in trace.notes

    short = [span(n, **counts, request__max_tokens=whole(10 * n)) for n in (1, 2)]
    path.write_text(json.dumps(spans(*short)))
    trace = load(path)
    assert "max_tokens" not in trace.frame.columns
    assert "no max_tokens: 1 answers are longer than theirs (first: span 1)" in trace.notes


def test_aiperf_counts_from_the_planned_arrival() -> None:
    # Sent 0.2 ms after it was due; 90.5 ms to the first token and 1290.5 ms to the last from there.
    path = SAMPLES / "aiperf_profile_export.jsonl"
    first = columns(path, "request_id", "session", "ttft_s", "e2el_s", "client_queue_s")[0]
    assert first[:2] == ("a1", "u1")
    assert first[2:] == pytest.approx((0.0907, 1.2907, 0.0002), abs=1e-12)


def test_guidellm_forced_lengths_and_measured_times() -> None:
    path = SAMPLES / "guidellm_benchmarks.json"
    assert columns(path, "request_id", "max_tokens", "forced", "finish_reason") == [
        ("g1", 256, False, "stop"),
        ("g2", 256, False, "stop"),
        ("g3", 64, True, "length"),
    ]
    for row, right in zip(
        columns(path, "ttft_s", "e2el_s", "client_queue_s"),
        [(0.152, 2.852, 0.002), (0.202, 0.902, 0.002), (0.202, 2.002, 0.002)],
        strict=True,
    ):
        assert row == pytest.approx(right, abs=1e-6)


def test_guidellm_holds_a_benchmark_a_rate(tmp_path: Path) -> None:
    report = json.loads((SAMPLES / "guidellm_benchmarks.json").read_text())
    later = json.loads(json.dumps(report["benchmarks"][0]))
    for one in later["requests"]["successful"]:
        one["info"]["timings"]["targeted_start"] += 100
        one["request_id"] += "-later"
    report["benchmarks"].append(later)
    path = tmp_path / "two.json"
    path.write_text(json.dumps(report, indent=1))
    with pytest.raises(TraceError, match=r"two results; choose with --run N or --join"):
        load(path)
    arrivals = load(path, ReadOptions(join=True)).frame["arrival_s"].to_list()
    assert arrivals == pytest.approx([0, 1.25, 1.75, 100, 101.25, 101.75], abs=1e-6)
    assert load(path, ReadOptions(run=2)).frame["request_id"].to_list() == ["g1-later", "g2-later", "g3-later"]
    with pytest.raises(ConfigError, match=r"run 3 is not there: the file holds two results"):
        load(path, ReadOptions(run=3))


def test_guidellm_reports_of_version_1_have_the_same_requests(tmp_path: Path) -> None:
    report = json.loads((SAMPLES / "guidellm_benchmarks.json").read_text())
    report = {
        "metadata": {**report["metadata"], "version": 1},
        "args": report["config"],
        "benchmarks": report["benchmarks"],
    }
    for fate in report["benchmarks"][0]["requests"].values():
        for one in fate or []:
            del one["response_id"]
    path = tmp_path / "report.json"
    path.write_text(json.dumps(report))
    assert load(path).frame.equals(load(SAMPLES / "guidellm_benchmarks.json").frame)


def test_sglang_results_without_details_say_what_to_do(tmp_path: Path) -> None:
    path = SAMPLES / "sglang_bench_serving.jsonl"
    assert [str(out) for out in load(path).left_out][1] == "1 row left out: the request failed (first: request 3)"
    with pytest.raises(TraceError, match=r"run with --output-details"):
        load(path, ReadOptions(run=1))
    assert load(path, ReadOptions(run=2)).frame["output_tokens"].to_list() == [9, 3]
    # The first answer took 0.2 s and eight gaps of 0.02 s, the second 0.1 s and two of 0.03 s.
    assert load(path).frame["e2el_s"].to_list() == pytest.approx([0.36, 0.16])
    only = tmp_path / "summary.jsonl"
    only.write_text(path.read_text().splitlines()[0])
    with pytest.raises(TraceError, match=r"run with --output-details"):
        load(only)


def test_litellm_as_json_and_what_its_cache_answered(tmp_path: Path) -> None:
    row = {
        "request_id": "a",
        "call_type": "acompletion",
        "status": "success",
        "cache_hit": "False",
        "prompt_tokens": 10,
        "completion_tokens": 4,
        "startTime": "2026-02-03T10:00:01.500Z",
        "completionStartTime": "2026-02-03T10:00:02Z",
        "endTime": "2026-02-03T10:00:03.250Z",
        "team_id": "t",
        "model": "m",
        "messages": [{"role": "user", "content": "?"}],
    }
    rows = [
        row,
        {**row, "request_id": "b", "cache_hit": "True"},
        {**row, "request_id": "c", "startTime": "2026-02-03T10:00:00+00:00", "completionStartTime": row["endTime"]},
    ]
    for text in (json.dumps(rows), "\n".join(map(json.dumps, rows))):
        path = tmp_path / "logs"
        path.write_text(text)
        assert [reader.name for reader in READERS if reader.fit(opened(path)).whole] == ["litellm"]
        trace = load(path)
        # The third came in one piece: when its first token was there is not known.
        assert trace.frame.select("arrival_s", "request_id", "tenant", "ttft_s", "e2el_s").rows() == [
            (0.0, "c", "t", None, 3.25),
            (1.5, "a", "t", 0.5, 1.75),
        ]
        assert [out.reason for out in trace.left_out] == ["answered by the proxy's cache"]


def test_inference_perf_of_before_and_forced_lengths(tmp_path: Path) -> None:
    path = SAMPLES / "inference_perf_per_request_lifecycle_metrics.json"
    assert columns(path, "forced", "max_tokens", "model") == [(True, 128, "m"), (True, 128, "m")]
    for row, right in zip(columns(path, "ttft_s", "e2el_s"), [(0.1, 2.95), (0.1, 1.4)], strict=True):
        assert row == pytest.approx(right, abs=1e-9)

    info = {"input_tokens": 12, "output_tokens": 5, "output_token_times": [7.25, 7.5, 8.0]}
    entry = {"start_time": 7, "end_time": 8.5, "request": "no JSON", "response": "", "info": info, "error": None}
    old = tmp_path / "old.json"
    old.write_text(json.dumps([entry]))
    assert columns(old, "prompt_tokens", "output_tokens", "ttft_s", "e2el_s") == [(12, 5, 0.25, 1.0)]


def test_prefixes_of_a_workload_are_those_of_its_tokens() -> None:
    trace = load(SAMPLES / "llmservingsim_workload.jsonl")
    first, second = trace.frame["prefix_blocks"].to_list()
    # 20 and 64 tokens are 1 and 4 full blocks of 16, and the second prompt begins with the first.
    assert (len(first), len(second)) == (1, 4)
    assert second[0] == first[0]
    assert len(set(second)) == 4
    assert trace.metadata["block_size"] == "16"


@pytest.mark.parametrize("name", ["guidellm_benchmarks.json", "sglang_bench_serving.jsonl", "litellm_spend_logs.csv"])
def test_strict_refuses_failed_requests(name: str) -> None:
    with pytest.raises(TraceError, match=r"the request (failed|did not end), and strict refuses that"):
        load(SAMPLES / name, ReadOptions(strict=True))


def test_a_unit_is_a_contradiction() -> None:
    for name in RIGHT:
        with pytest.raises(ConfigError, match=r"a unit \(ms\) cannot be given"):
            load(SAMPLES / name, ReadOptions(unit="ms"))
