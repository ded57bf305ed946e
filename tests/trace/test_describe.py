"""`leap-trace describe` against numpy on the whole trace, whatever the size of the parts."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from leap_rs.trace import parquet, tally, write_trace
from leap_rs.trace.command import main
from leap_rs.trace.describe import describe
from leap_rs.trace.report import duration, render, sparkline
from leap_rs.trace.tally import Arrivals, Lengths, Prefixes

SHARES = {"p10": 10, "p25": 25, "p50": 50, "p75": 75, "p90": 90, "p99": 99}


def assert_summary(found: dict[str, float], lengths: Any) -> None:
    assert found["mean"] == pytest.approx(np.mean(lengths))
    assert (found["min"], found["max"]) == (min(lengths), max(lengths))
    for name, share in SHARES.items():
        assert found[name] == pytest.approx(np.percentile(lengths, share))


def parts(values: list[int], cuts: list[int]) -> list[list[int]]:
    edges = sorted({0, *(cut % (len(values) + 1) for cut in cuts), len(values)})
    return [values[low:high] for low, high in pairwise(edges)]


@given(st.lists(st.integers(1, 2**32 - 1), min_size=1, max_size=40), st.lists(st.integers(0, 100), max_size=4))
def test_length_quantiles(values: list[int], cuts: list[int]) -> None:
    lengths = Lengths("x")
    for part in parts(values, cuts):
        lengths.see(pl.DataFrame({"x": pl.Series(part, dtype=pl.UInt32)}))
    assert_summary(lengths.summary(), values)


@given(
    st.lists(st.integers(0, 10**7), min_size=2, max_size=60),
    st.lists(st.integers(0, 100), max_size=4),
    st.integers(8, 14),
)
def test_arrivals(ticks: list[int], cuts: list[int], bins: int) -> None:
    times = np.sort(np.array(ticks)) / 1000
    arrivals = Arrivals()
    arrivals.BINS = 2**bins
    for part in parts(sorted(ticks), cuts):
        arrivals.see(np.array(part) / 1000)
    gaps = np.diff(times)
    span = times[-1] - times[0]
    assert arrivals.duration_s == span
    if span == 0:
        assert (arrivals.rate, arrivals.gap_cv()) == (None, None)
        return
    assert arrivals.rate == pytest.approx(len(times) / span)
    assert arrivals.gap_cv() == pytest.approx(gaps.std() / gaps.mean())
    for window in (1, 10, 60, 4096):
        whole = int(span // window)
        found = arrivals.dispersion(window)
        if whole < 10 or window % arrivals.width_s:
            assert found is None
        else:
            counts = np.histogram(times - times[0], bins=np.arange(whole + 1) * window)[0]
            # numpy's last bin is closed.
            counts[-1] -= np.count_nonzero(times - times[0] == whole * window)
            assert found == pytest.approx(counts.var() / counts.mean())
    width, rates = arrivals.rates(4)
    if rates:
        assert sum(rates) * width == pytest.approx(len(times))
    else:
        assert span < 4 * arrivals.width_s


def test_rates_of_steady_arrivals() -> None:
    arrivals = Arrivals()
    arrivals.see(np.concatenate([np.arange(0, 100, 0.5), np.arange(100, 200.01, 0.1)]))
    width, rates = arrivals.rates(8)
    assert width == pytest.approx(25)
    assert rates == pytest.approx([2] * 4 + [10] * 4, rel=0.02)


@given(st.lists(st.lists(st.integers(0, 5), max_size=4, unique=True), max_size=12), st.lists(st.integers(0, 100)))
def test_shared_prefixes_against_a_set(rows: list[list[int]], cuts: list[int]) -> None:
    seen: set[int] = set()
    shared = 0
    for row in rows:
        for block in row:
            if block not in seen:
                break
            shared += 16
        seen.update(row)
    prefixes = Prefixes(16)
    frame = pl.DataFrame({"prefix_blocks": pl.Series(rows, dtype=pl.List(pl.UInt64))})
    frame = frame.with_columns(pl.lit(100, dtype=pl.UInt32).alias("prompt_tokens"))
    for part in parts(list(range(len(rows))), cuts):
        if part:
            prefixes.see(frame[part])
    assert prefixes.shared_tokens == shared
    assert prefixes.prompt_tokens == 100 * len(rows)


def trace_file(path: Path) -> pl.DataFrame:
    rng = np.random.default_rng(3)
    count = 500
    budget = rng.choice([64, 128], count)
    output = np.minimum(rng.geometric(1 / 60, count), budget)
    frame = pl.DataFrame(
        {
            "arrival_s": np.cumsum(rng.exponential(0.2, count)),
            "prompt_tokens": pl.Series(rng.integers(1, 900, count), dtype=pl.UInt32),
            "output_tokens": pl.Series(output, dtype=pl.UInt32),
            "max_tokens": pl.Series(budget, dtype=pl.UInt32),
            "finish_reason": np.where(output == budget, "length", "stop"),
            "domain": rng.choice(["chat", "code"], count),
            "session": pl.Series([None if i % 5 == 0 else f"s{i % 60}" for i in range(count)], dtype=pl.String),
            "prompt_features": pl.Series(rng.standard_normal((count, 4)), dtype=pl.Array(pl.Float32, 4)),
        }
    )
    write_trace(frame, path, model="m")
    return frame


def test_a_whole_description(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(parquet, "PART_ROWS", 64)
    path = tmp_path / "t.parquet"
    frame = trace_file(path)
    with pytest.raises(SystemExit) as caught:
        main(["describe", str(path), "--json", "--num-prompts", "100"])
    assert caught.value.code == 0
    found = json.loads(capsys.readouterr().out, parse_constant=lambda text: pytest.fail(f"{text} is no JSON"))

    assert (found["requests"], found["format"], found["metadata"]["model"]) == (500, "leap", "m")
    for column in ("prompt_tokens", "output_tokens"):
        assert_summary(found[column], frame[column].to_numpy())
    for group in found["groups"]["domain"]:
        own = frame.filter(pl.col("domain") == group["value"])
        assert group["requests"] == own.height
        assert_summary(group["output_tokens"], own["output_tokens"].to_numpy())
    cut = int((frame["finish_reason"] == "length").sum())
    assert found["cut_by_budget"] == {"requests": cut, "share": cut / 500}
    sessions = frame["session"].drop_nulls()
    assert found["conversations"] == {
        "requests": 400,
        "sessions": sessions.n_unique(),
        "continuations": 400 - sessions.n_unique(),
    }
    head = frame.head(100)
    assert found["head"]["request_rate"] == pytest.approx(100 / (head["arrival_s"][-1] - head["arrival_s"][0]))
    assert found["head"]["mean_output_tokens"] == pytest.approx(head["output_tokens"].mean())
    assert found["shared_prefix"] is None
    assert [line.split(":")[0] for line in found["missing"]["leap-replay"]] == ["features", "text_features"]
    assert found["missing"]["leap-fit"] == []
    assert len(found["missing"]["leap-calibrate"]) == 1

    text = render(found)
    for part in (
        "500 requests over",
        "domain chat, output",
        f"{cut} requests, {cut / 5:.1f} %",
        f"{400 - sessions.n_unique()} of 500 requests continue one of {sessions.n_unique()} sessions",
        "leap-calibrate: measured_queued_s",
    ):
        assert part in text


def test_what_is_undefined_is_null(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "t.csv"
    path.write_text("arrived_at,num_prefill_tokens,num_decode_tokens\n5,7,3\n")
    with pytest.raises(SystemExit):
        main(["describe", str(path), "--json"])
    found = json.loads(capsys.readouterr().out, parse_constant=lambda text: pytest.fail(f"{text} is no JSON"))
    assert found["duration_s"] == 0.0
    assert found["request_rate"] is None
    assert found["arrivals"] == {
        "gap_cv": None,
        "dispersion": {"1s": None, "10s": None, "60s": None},
        "window_s": None,
        "request_rates": [],
    }
    assert "1 request over 0 s" in render(found)


def test_the_committed_runs_have_what_a_calibration_needs(traces: Path) -> None:
    found = describe(traces / "rtx4090-llama-8b.parquet")
    assert found["missing"]["leap-calibrate"] == []
    # Their lengths were forced.
    assert [line.split(":")[0] for line in found["missing"]["leap-fit"]] == [
        "features, prompt_features or text_features",
        "answers that ended by themselves",
    ]
    assert 0 < found["shared_prefix"]["token_share"] < 0.1


def test_too_many_groups_are_not_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tally.Lengths, "MOST_GROUPS", 1)
    trace_file(tmp_path / "t.parquet")
    found = describe(tmp_path / "t.parquet")
    assert found["groups"] == {"domain": None}
    assert "domain: too many different ones to list" in render(found)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.5, "0.5 s"), (119, "119 s"), (125, "2 min 5 s"), (7260, "2 h 1 min"), (90000, "1 d 1 h")],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_sparkline() -> None:
    assert sparkline([0, 1, 4, 8]) == "▁▂▅█"
    assert sparkline([]) == ""


def test_long_names_do_not_cut_the_numbers(tmp_path: Path) -> None:
    names = [f"a tenant with a name that goes on for very long, number {i}" for i in range(2)]
    large = {"prompt_tokens": [4_000_000_000, 12_345_678], "output_tokens": [23_456_789, 1]}
    write_trace(pl.DataFrame({"arrival_s": [0.0, 1.0], **large, "tenant": names}), tmp_path / "t.parquet")
    lines = render(describe(tmp_path / "t.parquet")).splitlines()
    (head,) = [at for at, line in enumerate(lines) if line.startswith("tokens")]
    table = lines[head : head + 7]
    assert table[0].split() == ["tokens", "requests", "mean", "P10", "P25", "P50", "P75", "P90", "P99", "max"]
    for row, value in zip(table[3:], (4_000_000_000, 23_456_789, 12_345_678, 1), strict=True):
        assert row.startswith("  tenant a tena")
        assert row.split()[-9:] == ["1", *[f"{value:,}"] * 8]
    assert [row.split("…, ")[1].split()[0] for row in table[3:]] == ["prompt", "output"] * 2


def test_a_detailed_benchmark_lacks_nothing_for_calibration(cases: Path) -> None:
    found = describe(cases / "10-vllm_detailed_failed.json")
    assert found["missing"]["leap-calibrate"] == []
    assert found["missing"]["leap-fit"] != []


def test_a_benchmark_without_send_times_is_told(cases: Path, tmp_path: Path) -> None:
    result = json.loads((cases / "10-vllm_detailed_failed.json").read_text())
    del result["start_times"]
    (tmp_path / "r.json").write_text(json.dumps(result))
    (line,) = describe(tmp_path / "r.json")["missing"]["leap-calibrate"]
    assert line.startswith("start_times: ")
