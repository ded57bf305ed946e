"""Broken runs: one line that names file, line and key, whatever is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from synthetic_run import good_rows, write_lines

from leap_rs import TraceError
from leap_rs.calibrate import read_runs
from leap_rs.trace import read_trace, write_trace

Row = dict[str, Any]


def without(key: str) -> Callable[[Row], Row]:
    return lambda row: {k: v for k, v in row.items() if k != key}


def having(**values: Any) -> Callable[[Row], Row]:
    return lambda row: {**row, **values}


@pytest.mark.parametrize(
    ("change", "key", "words"),
    [
        (without("queued_ts"), "queued_ts", "is missing"),
        (without("request_id"), "request_id", "is missing"),
        (having(first_token_ts=float("nan")), "first_token_ts", "finite number of seconds, found nan"),
        (having(last_token_ts=float("inf")), "last_token_ts", "finite number of seconds, found inf"),
        (having(last_token_ts=None), "last_token_ts", "finite number of seconds, found None"),
        (having(arrival_time="1700000003"), "arrival_time", "finite number of seconds"),
        (having(queued_ts=True), "queued_ts", "finite number of seconds, found True"),
        (having(input_toks=1.5), "input_toks", "whole number of tokens, found 1.5"),
        (having(output_toks=-1), "output_toks", "whole number of tokens, found -1"),
        (having(input_toks=2**32), "input_toks", "whole number of tokens"),
        (having(first_token_ts=503.001), "first_token_ts", "is before queued_ts"),
        (having(last_token_ts=503.1), "last_token_ts", "is before first_token_ts"),
        (having(queued_ts=1.7e9 + 3, first_token_ts=1.7e9 + 4, last_token_ts=1.7e9 + 5), "queued_ts", "another clock"),
        (having(first_token_ts=1.7e9, last_token_ts=1.7e9 + 1), "first_token_ts", "another clock"),
        (having(arrival_time=503.0), "queued_ts", "another clock"),
        (having(request_id="bench-1"), "request_id", "already that of line 2"),
        (having(request_id=3), "request_id", "expected text"),
    ],
)
def test_a_wrong_value_is_named(tmp_path: Path, change: Callable[[Row], Row], key: str, words: str) -> None:
    rows = good_rows()
    rows[3] = change(rows[3])
    write_lines(tmp_path / "requests.jsonl", rows)
    with pytest.raises(TraceError) as caught:
        read_runs(tmp_path)
    message = str(caught.value)
    assert message.startswith(f"{tmp_path / 'requests.jsonl'}: line 4: key '{key}'")
    assert words in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b'{"request_id": "bench-0", "input_toks": 2748 610}\n', "not JSON"),
        (b'{"request_id": "bench-0"', "not JSON"),
        (b"\xff\xfe{}\n", "not JSON"),
        (b"[1, 2]\n", "expected an object, found list"),
        (b"[" * 100_000 + b"\n", "not JSON"),
    ],
)
def test_a_line_that_is_no_object_is_named(tmp_path: Path, text: bytes, words: str) -> None:
    good = json.dumps(good_rows()[0]).encode() + b"\n\n"
    (tmp_path / "requests.jsonl").write_bytes(good + text)
    with pytest.raises(TraceError, match=f"requests.jsonl: line 3: {words}"):
        read_runs(tmp_path)


def test_an_empty_log_is_refused(tmp_path: Path) -> None:
    (tmp_path / "requests.jsonl").write_text("\n")
    with pytest.raises(TraceError, match="the file holds no requests"):
        read_runs(tmp_path)


def test_requests_without_tokens_are_left_out_and_counted(tmp_path: Path) -> None:
    rows = good_rows()
    # A failed request has no token times.
    rows[2] = {**rows[2], "output_toks": 0, "first_token_ts": None, "last_token_ts": None}
    write_lines(tmp_path / "requests.jsonl", rows)
    (run,) = read_runs(tmp_path)
    assert len(run) == 5
    assert "1 requests without tokens left out (first: line 3)" in run.notes


def test_a_directory_or_file_that_is_no_run_is_refused(tmp_path: Path, traces: Path) -> None:
    with pytest.raises(TraceError, match=r"no requests.jsonl in this directory"):
        read_runs(tmp_path)
    with pytest.raises(TraceError, match="not a measured run"):
        read_runs(traces / "gpt-4-0613-arenahard.parquet")
    with pytest.raises(TraceError, match="cannot be read"):
        read_runs(tmp_path / "none.parquet")


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("meta.json", "{", "not JSON"),
        ("meta.json", "[]", "expected an object"),
        ("meta.json", '{"started_at": "yesterday"}', "key 'started_at': 'yesterday' is no time"),
        ("timeseries.csv", "t,running\n1,2\n", "waiting"),
        ("timeseries.csv", "t,running,waiting\n1,2,3\n2,x,3\n", "x"),
        ("timeseries.csv", "t,running,waiting\n1,2,3\n2,nan,3\n", "line 3: column 'running'"),
    ],
)
def test_broken_files_beside_the_log_are_named(tmp_path: Path, name: str, text: str, words: str) -> None:
    write_lines(tmp_path / "requests.jsonl", good_rows())
    (tmp_path / "timeseries.csv").write_text("t,running,waiting\n1,2,3\n")
    (tmp_path / name).write_text(text)
    with pytest.raises(TraceError) as caught:
        read_runs(tmp_path)
    assert str(caught.value).startswith(str(tmp_path / name))
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("change", "column", "words"),
    [
        (pl.col("measured_queued_s") - 1.0, "measured_queued_s", "queued before arrival_s"),
        (pl.col("measured_first_token_s") * 0, "measured_first_token_s", "the first token came before"),
        (pl.col("measured_last_token_s") * 0, "measured_last_token_s", "the last token came before"),
        (pl.col("measured_last_token_s") * float("nan"), "measured_last_token_s", "finite number of seconds"),
        (pl.lit("x").alias("measured_queued_s"), "measured_queued_s", "must be seconds as Float64"),
    ],
)
def test_a_leap_trace_with_wrong_measured_times_is_named(
    tmp_path: Path, traces: Path, change: pl.Expr, column: str, words: str
) -> None:
    frame = read_trace(traces / "rtx4090-llama-8b.parquet").with_columns(change)
    write_trace(frame, tmp_path / "run.parquet")
    with pytest.raises(TraceError, match=words) as caught:
        read_runs(tmp_path / "run.parquet")
    assert f"column '{column}'" in str(caught.value)


def test_a_leap_trace_with_one_measured_column_names_the_missing_one(tmp_path: Path, traces: Path) -> None:
    frame = read_trace(traces / "rtx4090-llama-8b.parquet").drop("measured_queued_s")
    write_trace(frame, tmp_path / "run.parquet")
    with pytest.raises(TraceError, match="column 'measured_queued_s': missing"):
        read_runs(tmp_path / "run.parquet")
