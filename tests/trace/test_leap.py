"""The leap format: what is written is what is read, and the committed traces are what they say."""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from leap_rs.trace import ReadOptions, load, read_trace, write_trace
from leap_rs.trace.schema import identity

# Requests, as the sources count them: FLASK's 1,740 less 287 that are marked as AlpacaEval's, 198 more that are spelled
# otherwise there, and 40 without an answer.
ANSWERED = {
    "llama-3-8b-alpacaeval": ("Llama-3-8B-Instruct", "alpacaeval", 805),
    "llama-2-70b-flask": ("Llama-2-70B-chat", "flask", 1740 - 287 - 198 - 40),
    "vicuna-33b-flask": ("Vicuna-33B", "flask", 1740 - 287 - 198 - 40),
    "gpt-4-0613-arenahard": ("GPT-4-0613", "arenahard", 500),
    "sharegpt": ("ChatGPT", "sharegpt", 3574),
}
SAMPLED = {"smollm2-sharegpt": ("sharegpt", 683, 20.0), "smollm2-multilingual": ("multilingual", 340, 10.0)}
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


def mean_rate(frame: pl.DataFrame) -> float:
    return (frame.height - 1) / float(frame["arrival_s"][-1])


def texts(frame: pl.DataFrame) -> list[str]:
    return sorted(column for column, dtype in frame.schema.items() if dtype == pl.String)


@pytest.mark.parametrize("name", ANSWERED)
def test_committed_trace_of_published_answers(name: str, traces: Path) -> None:
    model, domain, rows = ANSWERED[name]
    trace = load(traces / f"{name}.parquet")
    frame = trace.frame
    assert frame.height == rows
    assert set(frame["domain"]) == {domain}
    assert set(frame["finish_reason"]) == {"stop"}
    assert "max_tokens" not in frame.columns
    assert mean_rate(frame) == pytest.approx(20, rel=1e-6)
    assert trace.metadata["model"] == model
    assert identity("features", trace.metadata) == {"model": "SmolLM2-135M-Instruct", "layer": "20"}
    assert identity("prompt_features", trace.metadata) == {"model": "SmolLM2-135M-Instruct"}
    assert identity("text_features", trace.metadata) == {"encoder": "all-MiniLM-L6-v2", "encoder_layer": "4"}
    assert frame.schema["features"] == pl.Array(pl.Float16, 576)
    assert frame.schema["text_features"] == pl.Array(pl.Float16, 384)
    assert texts(frame) == sorted(["domain", "finish_reason", "request_id", *(["session"] * (name == "sharegpt"))])
    assert frame["request_id"].str.contains(rf"^{domain}(-[0-9]+)+$").all()


@pytest.mark.parametrize("name", SAMPLED)
def test_committed_trace_of_sampled_answers(name: str, traces: Path) -> None:
    domain, rows, rate = SAMPLED[name]
    trace = load(traces / f"{name}.parquet")
    frame = trace.frame
    assert frame.height == rows
    assert set(frame["domain"]) == {domain}
    assert set(frame["max_tokens"]) == {1024}
    capped = frame["output_tokens"] == 1024
    assert (capped >= (frame["finish_reason"] == "length")).all()
    assert mean_rate(frame) == pytest.approx(rate, rel=1e-6)
    assert trace.metadata["model"] == "SmolLM2-135M-Instruct"
    assert "features_model" not in trace.metadata
    assert identity("features", trace.metadata)["layer"] == "20"
    assert frame.schema["features"] == pl.Array(pl.Float16, 576)
    assert texts(frame) == ["domain", "finish_reason", "request_id"]
    assert frame["request_id"].str.contains("^[a-z]{2}-[0-9a-f]{12}$").all()


@pytest.mark.parametrize("name", [*ANSWERED, *SAMPLED])
def test_committed_prompt_features_end_with_the_length(name: str, traces: Path) -> None:
    frame = read_trace(traces / f"{name}.parquet")
    assert frame.schema["prompt_features"] == pl.Array(pl.Float16, 259)
    tokens = frame["prompt_tokens"].to_numpy().astype(np.float64)
    expected = np.stack([np.sqrt(tokens), np.log1p(tokens), tokens], axis=1)
    # 11 bits of a number are kept.
    np.testing.assert_allclose(frame["prompt_features"].to_numpy()[:, 256:], expected, rtol=2**-11)


def test_two_models_answer_the_same_prompts(traces: Path) -> None:
    one, other = (read_trace(traces / f"{name}-flask.parquet") for name in ("llama-2-70b", "vicuna-33b"))
    assert one.drop("output_tokens").equals(other.drop("output_tokens"))
    assert not one["output_tokens"].equals(other["output_tokens"])


def test_no_prompt_that_readouts_are_judged_on_is_in_the_trace_that_they_are_fitted_on(traces: Path) -> None:
    """The same text in other spelling has nearly the same direction, less what all texts share."""
    judged, fitted = (
        read_trace(traces / f"{name}.parquet")["text_features"].to_numpy().astype(np.float64)
        for name in ("llama-3-8b-alpacaeval", "llama-2-70b-flask")
    )
    mean = judged.mean(axis=0)
    a, b = (rows - mean for rows in (judged, fitted))
    cosines = b @ a.T / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)[:, None]
    assert cosines.max() < 0.89


def test_committed_conversations_come_in_order_and_share_their_history(traces: Path) -> None:
    trace = load(traces / "sharegpt.parquet")
    frame = trace.frame.with_columns(turn=pl.col("request_id").str.split("-").list.last().cast(pl.Int64))
    assert trace.metadata["block_size"] == "16"
    assert frame["session"].n_unique() == 997
    assert (frame["prefix_blocks"].list.len() == frame["prompt_tokens"] // 16).all()
    seen: set[int] = set()
    for (_,), turns in frame.group_by("session", maintain_order=True):
        assert turns["turn"].is_sorted()
        assert turns["turn"].is_unique().all()
        prompt, output = (turns[name].cast(pl.Int64) for name in ("prompt_tokens", "output_tokens"))
        # A prompt holds all that was said before it.
        assert (prompt.diff().drop_nulls() > output.head(turns.height - 1)).all()
        blocks = turns["prefix_blocks"].to_list()
        for before, after in pairwise(blocks):
            assert after[: len(before)] == before
        # Blocks are the same in one conversation alone, and each is another.
        assert len(set(blocks[-1])) == len(blocks[-1])
        assert seen.isdisjoint(blocks[-1])
        seen.update(blocks[-1])


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
