"""What holds for every trace and every option: nothing is lost, time runs forward, the summary is that of the rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from leap_rs._leap import ConfigError, TraceError
from leap_rs.replay import ReplayResult, replay

POLICIES = (
    *("fcfs", "sjf-prompt", "hrrn", "las", "mlfq", "sjf-oracle", "srpt-oracle"),
    *("leap", "leap-paper", "score:x", "leap:objective=e2el", "leap:order=survival,rls=off"),
    *("leap:levers=queue+slots+evict,aging_rate=0", "leap-paper:wait_cap_steps=4"),
    *("leap:encoder_s=0.7", "leap:levers=queue+slots+evict+admission,encoder_s=0.2"),
)


@st.composite
def frames(draw: st.DrawFn) -> pl.DataFrame:
    """A small trace in the leap format, with some of the optional columns."""
    n = draw(st.integers(2, 25))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    longest = draw(st.sampled_from([1, 4, 60, 300]))
    output = rng.integers(1, longest + 1, n)
    columns: dict[str, Any] = {
        # A last arrival apart from the first, so that a load can be asked for.
        "arrival_s": np.sort(np.append(rng.choice([0.0, 0.25, 3.0], n - 1) * rng.integers(0, 9, n - 1), 30.0)),
        "prompt_tokens": pl.Series(rng.integers(1, draw(st.sampled_from([2, 100, 900])) + 1, n), dtype=pl.UInt32),
        "output_tokens": pl.Series(output, dtype=pl.UInt32),
        "features": pl.Series(rng.normal(size=(n, 5)).astype(np.float32)),
        "score_x": pl.Series(rng.normal(size=n), dtype=pl.Float32),
    }
    if draw(st.booleans()):
        columns["max_tokens"] = pl.Series(output + rng.integers(0, 50, n), dtype=pl.UInt32)
    if draw(st.booleans()):
        columns["finish_reason"] = rng.choice(["stop", "length", "abort"], n)
    if draw(st.booleans()):
        columns["prompt_features"] = pl.Series(rng.normal(size=(n, 3)).astype(np.float16))
    if draw(st.booleans()):
        columns["text_features"] = pl.Series(rng.normal(size=(n, 4)).astype(np.float32))
    if draw(st.booleans()):
        blocks = [[int(h) for h in rng.integers(0, 2, p // 16)] for p in columns["prompt_tokens"]]
        columns["prefix_blocks"] = pl.Series(blocks, dtype=pl.List(pl.UInt64))
    return pl.DataFrame(columns)


OPTIONS = st.fixed_dictionaries(
    {
        "policies": st.lists(st.sampled_from(POLICIES), min_size=1, max_size=3, unique=True),
        "engine": st.sampled_from(["h100-llama-8b", "rtx4090-llama-8b", "paper"]),
        "seed": st.integers(0, 2**40),
        "seeds": st.integers(1, 3),
    },
    optional={
        "load": st.sampled_from([0.5, 1.2, 30.0]),
        "max_num_seqs": st.sampled_from([1, 2, 9, 300]),
        "max_num_batched_tokens": st.sampled_from([512, 2048]),
        "decode_slots": st.integers(1, 4),
        # Some requests of 900 + 300 tokens fit the smallest, not all of them; single ones always do.
        "kv_tokens": st.sampled_from([1024, 1536, 4096]),
        "watermark": st.sampled_from([0.01, 0.1]),
        "enable_prefix_caching": st.booleans(),
        "async_scheduling": st.booleans(),
        "scheduler_reserve_full_isl": st.booleans(),
        "num_prompts": st.integers(1, 60),
        "max_concurrency": st.integers(1, 4),
        "wait_cap_s": st.sampled_from([0.1, 5.0]),
    },
)


def recomputed(rows: pl.DataFrame) -> pl.DataFrame:
    """A row a policy: means by definition, in milliseconds from the planned arrival, first over requests, then seeds."""
    start, first, end, n = (pl.col(name) for name in ("arrival_s", "first_token_s", "finish_s", "output_tokens"))
    by_run = rows.group_by("policy", "seed").agg(
        mean_ttft_ms=1e3 * (first - start).mean(),
        mean_e2el_ms=1e3 * (end - start).mean(),
        mean_ptl_ms=1e3 * ((end - start) / n).mean(),
        mean_tpot_ms=1e3 * ((end - first) / (n - 1)).filter(n > 1).mean(),
        request_throughput=pl.len() / end.max(),
        output_throughput=n.sum() / end.max(),
        preemptions=pl.col("preemptions").sum().cast(pl.Float64),
    )
    return by_run.group_by("policy").mean().drop("seed")


def plain(result: ReplayResult) -> tuple[dict[str, Any], bytes]:
    """Everything of a result, the rows as bytes."""
    return result.to_dict(), result.requests.write_ipc(None).getvalue()


@settings(suppress_health_check=[HealthCheck.too_slow], max_examples=80)
@given(frame=frames(), options=OPTIONS)
def test_whatever_is_replayed(frame: pl.DataFrame, options: dict[str, Any]) -> None:
    head = frame[: options.get("num_prompts", frame.height)]
    # The last token is never read again, so it is not stored; one block is never usable.
    usable = options["kv_tokens"] - 16 if "kv_tokens" in options else 2**31
    fits = head.with_row_index("row").filter(pl.col("prompt_tokens") + pl.col("output_tokens") - 1 <= usable)
    if fits.is_empty():
        with pytest.raises(TraceError, match="no request fits the engine"):
            replay(frame, threads=1, **options)
        return
    if "load" in options and fits["arrival_s"][0] == fits["arrival_s"][-1]:
        # Of a single moment there is no rate that a load could scale.
        with pytest.raises(ConfigError, match="arrive at once"):
            replay(frame, threads=1, **options)
        return
    result = replay(frame, threads=1, **options)
    document, rows = result.to_dict(), result.requests

    assert rows.filter(pl.col("first_token_s") <= pl.col("arrival_s")).is_empty()
    assert rows.filter(pl.col("finish_s") < pl.col("first_token_s")).is_empty()
    assert rows.filter((pl.col("output_tokens") == 1) & (pl.col("finish_s") != pl.col("first_token_s"))).is_empty()

    # Each run serves as many requests as the report says, and each row of the trace as often as any other, to one.
    replayed = document["trace"]["requests"]
    counts = rows.group_by("policy", "seed").agg(pl.len(), pl.col("row"))
    assert counts.height == len(options["policies"]) * options["seeds"]
    assert set(counts["len"]) == {replayed}
    expected = set(fits["row"])
    assert {item["row"] for item in document["trace"]["left_out"]} == set(range(head.height)) - expected
    for served in counts["row"]:
        times = served.value_counts()["count"]
        assert set(served) <= expected
        if replayed >= len(expected):
            assert set(served) == expected
        assert times.max() - times.min() <= 1
    again = rows.with_columns(truth=frame["output_tokens"].gather(rows["row"]))
    assert again["output_tokens"].equals(again["truth"], check_names=False)

    summary = result.summary
    assert summary.height == len(options["policies"])
    joined = summary.join(recomputed(rows), on="policy", suffix="_again")
    for name in (name.removesuffix("_again") for name in joined.columns if name.endswith("_again")):
        ours, formula = (joined[column].to_list() for column in (name, f"{name}_again"))
        assert ours == [None if value is None else pytest.approx(value, rel=1e-9) for value in formula], name

    assert plain(replay(frame, threads=2, **options)) == plain(result)
