"""The leap format: what is written is what is read, and the committed traces are what they say."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from leap_rs.trace import ReadOptions, load, read_trace, write_trace

DOMAINS = {"sharegpt": 683, "chat": 454, "instruct": 284, "multilingual": 340, "math": 199, "code": 113}
RUNS = ("rtx4090-llama-8b", "rtxpro6000-llama-8b")
WHOLE = (pl.Int8, pl.UInt8, pl.Int16, pl.UInt16, pl.Int32, pl.UInt32, pl.Int64, pl.UInt64)


@st.composite
def frames(draw: st.DrawFn) -> pl.DataFrame:
    rows = draw(st.integers(1, 5))

    def column(values: st.SearchStrategy[object]) -> list[object]:
        return draw(st.lists(values, min_size=rows, max_size=rows))

    def real(width: int, low: float | None = None, high: float | None = None) -> st.SearchStrategy[float]:
        return st.floats(low, high, width=width, allow_nan=False, allow_infinity=False)

    tokens = st.integers(1, 2**32 - 1)
    prompt, maximum = column(tokens), column(tokens)
    output = [draw(st.integers(1, most)) for most in maximum]
    frame = pl.DataFrame(
        {
            "arrival_s": pl.Series(sorted(column(real(64, 0.0, 1e7))), dtype=pl.Float64),
            "prompt_tokens": pl.Series(prompt, dtype=pl.UInt32),
            "output_tokens": pl.Series(output, dtype=pl.UInt32),
        }
    )

    def array(width: int, size: int) -> list[list[float]]:
        return column(st.lists(real(width), min_size=size, max_size=size))  # type: ignore[return-value]

    optional: dict[str, Callable[[], pl.Series]] = {
        "request_id": lambda: pl.Series([f"{index}/{draw(st.text(max_size=5))}" for index in range(rows)]),
        "max_tokens": lambda: pl.Series(maximum, dtype=pl.UInt32),
        "finish_reason": lambda: pl.Series(column(st.sampled_from(["stop", "length", "abort"]))),
        "domain": lambda: pl.Series(column(st.text(max_size=5))),
        "temperature": lambda: pl.Series(column(real(32, 0.0, 2.0)), dtype=pl.Float32),
        "prefix_tokens": lambda: pl.Series([draw(st.integers(0, most)) for most in prompt], dtype=pl.UInt32),
        "features": lambda: pl.Series(array(16, 3), dtype=pl.Array(pl.Float16, 3)),
        "prompt_features": lambda: pl.Series(array(32, 2), dtype=pl.Array(pl.Float32, 2)),
        "score_a": lambda: pl.Series(column(real(32)), dtype=pl.Float32),
        "unknown": lambda: pl.Series(column(st.one_of(st.none(), st.integers(0, 9))), dtype=pl.Int64),
    }
    chosen = draw(st.sets(st.sampled_from(sorted(optional)), max_size=4))
    return frame.with_columns(optional[name]().alias(name) for name in sorted(chosen))


@given(frames(), st.dictionaries(st.sampled_from(["model", "layer", "source", "x"]), st.text(max_size=20)))
def test_round_trip(tmp_path_factory: pytest.TempPathFactory, frame: pl.DataFrame, metadata: dict[str, str]) -> None:
    directory = tmp_path_factory.mktemp("round")
    path = directory / "trace.parquet"
    write_trace(frame, path, **metadata)
    trace = load(path)
    assert trace.frame.equals(frame)
    assert trace.frame.schema == frame.schema
    assert trace.metadata == {**metadata, "leap_trace_version": "1"}
    assert trace.told() == []
    again = directory / "again.parquet"
    write_trace(trace.frame, again, **metadata)
    assert again.read_bytes() == path.read_bytes()


@pytest.mark.parametrize("dtype", WHOLE)
def test_any_integer_type_is_read(dtype: type[pl.DataType], tmp_path: Path) -> None:
    frame = pl.DataFrame({"arrival_s": [0, 1, 2], "prompt_tokens": [1, 100, 127], "output_tokens": [1, 2, 127]})
    path = tmp_path / "trace.parquet"
    frame.cast({"prompt_tokens": dtype, "output_tokens": dtype}).write_parquet(path)
    read = read_trace(path)
    assert read.schema == {"arrival_s": pl.Float64, "prompt_tokens": pl.UInt32, "output_tokens": pl.UInt32}
    assert read.rows() == frame.rows()


def test_the_suffix_and_the_working_directory_do_not_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    frame = pl.DataFrame({"arrival_s": [0.0], "prompt_tokens": [1], "output_tokens": [1]})
    monkeypatch.chdir(tmp_path)
    write_trace(frame, "trace [1]=*.csv", layer=20, note=None)
    assert os.listdir() == ["trace [1]=*.csv"]  # noqa: PTH208
    trace = load("trace [1]=*.csv", ReadOptions(strict=True))
    assert trace.frame.rows() == [(0.0, 1, 1)]
    assert trace.metadata == {"layer": "20", "leap_trace_version": "1"}


@pytest.mark.parametrize("name", DOMAINS)
def test_committed_domain_trace(name: str, traces: Path) -> None:
    path = traces / f"{name}.parquet"
    assert path.stat().st_size < 6e6
    trace = load(path)
    frame = trace.frame
    assert frame.height == DOMAINS[name]
    assert set(frame["domain"]) == {name}
    assert set(frame["max_tokens"]) == {1024}
    capped = frame["output_tokens"] == 1024
    assert (capped >= (frame["finish_reason"] == "length")).all()
    assert trace.metadata["model"] == "SmolLM2-135M-Instruct"
    assert trace.metadata["layer"] == "20"
    assert frame.schema["features"] == pl.Array(pl.Float16, 576)
    rate = (frame.height - 1) / frame["arrival_s"][-1]
    assert rate == pytest.approx(10 if name in {"multilingual", "math", "code"} else 20, rel=1e-6)
    strings = [column for column, dtype in frame.schema.items() if dtype == pl.String]
    assert sorted(strings) == ["domain", "finish_reason", "request_id"]
    assert frame["request_id"].str.contains("^[a-z]{2}-[0-9a-f]{12}$").all()


def test_committed_prompt_features_end_with_the_length(traces: Path) -> None:
    for name in DOMAINS:
        frame = read_trace(traces / f"{name}.parquet")
        assert frame.schema["prompt_features"] == pl.Array(pl.Float32, 259)
        tokens = frame["prompt_tokens"].to_numpy().astype(np.float64)
        expected = np.stack([np.sqrt(tokens), np.log1p(tokens), tokens], axis=1)
        np.testing.assert_allclose(frame["prompt_features"].to_numpy()[:, 256:], expected, rtol=1e-6)


@pytest.mark.parametrize("name", RUNS)
def test_committed_real_run(name: str, traces: Path) -> None:
    trace = load(traces / f"{name}.parquet")
    frame = trace.frame
    assert frame.height == 300
    assert set(frame["finish_reason"]) == {"length"}
    assert int(frame["prompt_tokens"].sum()) == 257_239
    assert trace.metadata["block_size"] == "16"
    assert (frame["prefix_blocks"].list.len() == frame["prompt_tokens"] // 16).all()
    assert (frame["measured_queued_s"] - frame["arrival_s"]).min() > 0
    assert (frame["measured_first_token_s"] > frame["measured_queued_s"]).all()
    assert (frame["measured_last_token_s"] >= frame["measured_first_token_s"]).all()

    seen: set[int] = set()
    repeated = []
    for blocks in frame["prefix_blocks"].to_list():
        shared = 0
        while shared < len(blocks) and blocks[shared] in seen:
            shared += 1
        repeated.append(16 * shared)
        seen.update(blocks)
    # Counted from the token ids of the published workload, prefix by prefix.
    assert sum(count > 0 for count in repeated) == 32
    assert sum(repeated) == 19_520
