"""The tables and the result object: widths, units, undefined numbers, strict JSON."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable
from typing import Any

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from leap_rs._leap import LeapError
from leap_rs.replay.report import cell, interval_cell, render
from leap_rs.replay.results import ReplayResult

Make = Callable[..., dict[str, Any]]
POLICIES = ("fcfs", "sjf-prompt", "leap-frozen", "leap", "score:length-of-the-other-model", "srpt-oracle")


def rendered(document: dict[str, Any]) -> list[str]:
    out = io.StringIO()
    render(document, Console(file=out, width=120, highlight=False))
    return out.getvalue().splitlines()


@given(st.floats(0, 9e7))
def test_a_cell_is_short_and_near(value: float) -> None:
    text = cell(value)
    shown = float(text[:-1]) * 1000 if text.endswith("k") else float(text)
    assert len(text) <= 6
    assert math.isclose(shown, value, rel_tol=0.006, abs_tol=0.0051)


def test_undefined_is_a_dash() -> None:
    assert cell(None) == "-"
    assert interval_cell(None) == "-"
    assert interval_cell({"mean": None, "ci95": None}) == "-"
    assert interval_cell({"mean": 1234.0, "ci95": None}, 1e-3) == "1.23"
    assert interval_cell({"mean": 63.0, "ci95": [58.0, 68.0]}) == "63.0 ±5.0"
    assert interval_cell({"mean": 0.34, "ci95": [0.34, 0.34]}) == "0.34 ±0"
    assert interval_cell({"mean": 630.0, "ci95": [629.8, 630.2]}) == "630 ±0.2"


def test_the_tables_fit_120_columns_and_hold_every_policy(make_document: Make, core_result: Make, paired: Make) -> None:
    entries = [
        core_result(name, ptl=123_456.0, spearman=0.44, paired=paired((-86.0, (-88.0, -84.0)), p99=3.0))
        for name in POLICIES
    ]
    document = make_document(entries, load=1.2, goodput={"ttft": 500})
    lines = rendered(document)
    assert max(len(line) for line in lines) <= 120
    for policy in POLICIES:
        assert sum(line.startswith(f"{policy[:20]}") and line[len(policy[:20])] not in "-:" for line in lines) == 4
    text = "\n".join(lines)
    for header in (
        "PTL ms",
        "E2EL s",
        "TTFT ms",
        "TPOT ms",
        "P99",
        "<=84",
        "<=1024",
        "preempted",
        "Spearman",
        "Kendall",
    ):
        assert header in text
    assert "..." not in text
    assert "traces/[x].parquet" in text
    assert " ".join(lines).rstrip().replace("  ", " ").endswith(document["conclusions"][0].split(": ", 1)[1])


def test_columns_of_the_kv_cache_are_there_where_they_say_something(make_document: Make, core_result: Make) -> None:
    named = [core_result(name) for name in ("fcfs", "leap")]
    silent = "\n".join(rendered(make_document(named)))
    assert not any(word in silent for word in ("recomputed", "blocked", "held"))
    counts = {"computed_tokens": 4000.0, "recomputed_tokens": 50.0, "admission_holds": 123.0}
    named[1]["queue"] |= {key: {"mean": count, "ci95": None} for key, count in counts.items()}
    lines = rendered(make_document(named))
    at = next(i for i, line in enumerate(lines) if line.split()[:1] == ["policy"] and "held" in line)
    assert lines[at].split() == ["policy", "queue", "%", "waiting", "preempted", "recomputed", "%", "held"]
    assert lines[at + 1].split() == ["fcfs", "40.0", "12.0", "3.00", "-", "-"]
    # 50 of 4,000 tokens.
    assert lines[at + 2].split() == ["leap", "40.0", "12.0", "3.00", "1.25", "123"]
    assert "held: steps in which admission held the next in line back" in " ".join(lines)


def test_a_sweep_of_many_points_fits_too(make_document: Make, core_result: Make) -> None:
    loads = [round(0.6 + 0.1 * i, 1) for i in range(11)]
    entries = [core_result(name, point=i, load=load) for i, load in enumerate(loads) for name in POLICIES]
    lines = rendered(make_document(entries, sweep={"load": loads}))
    assert max(len(line) for line in lines) <= 120
    text = "\n".join(lines)
    assert "Mean PTL, ms, by load" in text
    assert sum(line.split()[:2] == ["policy", "0.6"] and line.split()[-1] == "1.6" for line in lines) == 3


def test_only_the_chosen_percentiles_are_kept(make_document: Make, core_result: Make) -> None:
    document = make_document([core_result("fcfs")], percentile_metrics="ttft", metric_percentiles="50,90,99")
    metrics = document["results"][0]["metrics"]
    assert "p99_ttft_ms" in metrics
    assert "p99_ptl_ms" not in metrics
    assert "mean_ptl_ms" in metrics
    assert not any(line.startswith("policy") and line.count("P99") > 1 for line in rendered(document))


def test_one_token_answers_have_no_tpot(make_document: Make, core_result: Make) -> None:
    document = make_document([core_result("fcfs", tpot=None)])
    assert document["results"][0]["metrics"]["mean_tpot_ms"] == {"mean": None, "ci95": None}
    row = next(
        line for line in rendered(document)[::-1] if (line.startswith("fcfs") and "800" in line) or "0.80" in line
    )
    assert " -" in row


def test_numbers_of_queue_and_prediction_stand_plain_with_intervals_beside(
    make_document: Make, core_result: Make
) -> None:
    result = make_document([core_result("leap", spearman=0.44, share=0.25)])["results"][0]
    assert result["queue"]["share_of_steps_with_queue"] == 0.25
    assert result["queue"]["ci95"]["preemptions"] == [2.0, 4.0]
    assert result["prediction"]["spearman"] == 0.44
    assert result["prediction"]["mae_tokens"] is None


def test_the_object_is_strict_json_with_the_metadata_in_it(
    make_document: Make, core_result: Make, tmp_path: Any
) -> None:
    result = ReplayResult(make_document([core_result("fcfs", ptl=None)], metadata=["gpu=H100", "note=a=b"]))

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    parsed = json.loads(result.to_json(), parse_constant=refuse)
    assert parsed == result.to_dict()
    assert (parsed["gpu"], parsed["note"], parsed["leap_replay_version"]) == ("H100", "a=b", 1)
    target = result.save(tmp_path / "r.json")
    assert json.loads(target.read_text()) == parsed
    assert [path.name for path in tmp_path.iterdir()] == ["r.json"]


def test_saving_where_nothing_can_be_written_is_a_leap_error(
    make_document: Make, core_result: Make, tmp_path: Any
) -> None:
    result = ReplayResult(make_document([core_result("fcfs")]))
    with pytest.raises(LeapError, match=r"missing"):
        result.save(tmp_path / "missing" / "r.json")
    with pytest.raises(LeapError, match="keep_requests"):
        _ = result.requests


def test_the_summary_has_a_row_a_policy_and_load(make_document: Make, core_result: Make) -> None:
    entries = [core_result(name, point=i, load=load) for i, load in enumerate((0.8, 1.2)) for name in ("fcfs", "leap")]
    summary = ReplayResult(make_document(entries, sweep={"load": [0.8, 1.2]})).summary
    assert summary.select("policy", "load").rows() == [("fcfs", 0.8), ("leap", 0.8), ("fcfs", 1.2), ("leap", 1.2)]
    assert summary["mean_ptl_ms"].to_list() == [100.0] * 4
    assert summary["mean_ptl_ms_ci95_hi"].to_list() == [101.0] * 4
    assert summary["q4_mean_e2el_ms"].to_list() == [102_400.0] * 4
    assert summary.schema["spearman"] == pl.Float64


def test_text_wraps_at_a_narrow_terminal_and_tables_stay_whole(make_document: Make, core_result: Make) -> None:
    out = io.StringIO()
    document = make_document([core_result(name, ptl=123_456.0) for name in POLICIES], load=1.2)
    render(document, Console(file=out, width=120, highlight=False), text_width=60)
    assert "…" not in out.getvalue().replace("score:length-of-the-oth…", "")
    last = out.getvalue().splitlines()[-2:]
    assert all(len(line) <= 60 for line in last)
