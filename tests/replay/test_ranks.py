"""Data-parallel ranks in lock-step: against a naive simulation, and what must hold of them in any case."""

from __future__ import annotations

import io
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl
import pytest
import small_engine
from lockstep_reference import Request, lockstep
from rich.console import Console
from small_engine import asked

from leap_rs import _leap
from leap_rs._leap import ConfigError, Readout
from leap_rs.replay import replay
from leap_rs.replay.report import render

ENGINE: dict[str, Any] = {
    **small_engine.ENGINE,
    "kv_tokens": 2560,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 256,
    "enable_prefix_caching": False,
}
TIMES = ("admitted_s", "first_token_s", "finish_s")


def columns(seed: int, n: int = 150, gap_s: float = 0.03) -> dict[str, Any]:
    """Bursts and pauses, some of them longer than the load balancer's 100 ms and than everything under way."""
    random = np.random.default_rng(seed)
    gaps = random.exponential(gap_s, n) * (random.random(n) < 0.7) + (random.random(n) < 0.02) * 2.5
    return {
        "arrival_s": np.cumsum(gaps) - gaps[0],
        "prompt_tokens": random.integers(1, 500, n).astype(np.uint32),
        "output_tokens": np.maximum(1, random.geometric(1 / 50, n)).astype(np.uint32),
    }


def simulate(trace: dict[str, Any], *, timeline: bool = False, **changes: Any) -> dict[str, npt.NDArray[Any]]:
    return _leap.simulate(trace, json.dumps(ENGINE | changes), timeline=timeline)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_ranks_agree_with_one_token_at_a_time(ranks: int, async_scheduling: bool, seed: int) -> None:
    trace = columns(seed, gap_s=0.09 / ranks)
    changes = {"async_scheduling": async_scheduling, "kv_tokens": [1024, 1600, 2560, 10_000][seed]}
    run = simulate(trace, data_parallel_size=ranks, **changes)
    expected = lockstep(trace, ENGINE | changes, ranks)
    for name, attribute in zip(TIMES, ("admitted", "first", "finish"), strict=True):
        np.testing.assert_allclose(run[name], [getattr(r, attribute) for r in expected], rtol=1e-9, atol=1e-9)
    assert run["preemptions"].tolist() == [r.preemptions for r in expected]
    assert {r.rank for r in expected} == set(range(ranks))
    # From a cache that is short all the time to one that is never.
    assert seed not in (0, 3) or (run["preemptions"].sum() > 0) == (seed == 0)


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("ranks", [2, 3])
def test_each_rank_orders_its_own_queue(ranks: int, async_scheduling: bool) -> None:
    trace = columns(11, gap_s=0.02)
    engine = ENGINE | {"async_scheduling": async_scheduling, "max_num_seqs": 4, "data_parallel_size": ranks}

    def length(request: Request) -> float:
        return request.output

    _, rows = _leap.replay(trace, asked(["sjf-oracle:memory_weight=0"], engine), requests=True)
    assert rows is not None
    order = np.argsort(rows["request"])
    expected = lockstep(trace, engine, ranks, key=length)
    np.testing.assert_allclose(rows["first_token_s"][order], [r.first for r in expected], rtol=1e-9)
    np.testing.assert_allclose(rows["finish_s"][order], [r.finish for r in expected], rtol=1e-9)
    assert [r.finish for r in expected] != [r.finish for r in lockstep(trace, engine, ranks)]


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_a_step_lasts_as_long_as_that_of_the_slowest_rank(async_scheduling: bool) -> None:
    """A long prompt on one rank holds the only sequence of the other up for its whole prefill."""
    trace: dict[str, Any] = {
        "arrival_s": np.array([0.0, 0.001]),
        "prompt_tokens": np.array([10, 2000], dtype=np.uint32),
        "output_tokens": np.array([200, 1], dtype=np.uint32),
    }
    limits = {"async_scheduling": async_scheduling, "max_num_batched_tokens": 2048}
    alone = simulate({name: values[:1] for name, values in trace.items()}, data_parallel_size=2, **limits)
    both = simulate(trace, data_parallel_size=2, **limits)
    cost = ENGINE["cost"]
    prefill = cost["step_s"] + cost["per_token_over_free_s"] * 1976 + cost["per_prefill_pair_s"] * 2000 * 1000
    # The long prompt is taken in beside the first decode step, or with async scheduling beside the second.
    stored = 12 if async_scheduling else 11
    decode = cost["step_s"] + cost["per_decode_seq_s"] + cost["per_kv_token_s"] * stored
    assert both["finish_s"][0] - alone["finish_s"][0] == pytest.approx(prefill - decode, rel=1e-9)
    # On one engine the two share a step instead.
    shared = simulate(trace, **limits)
    assert shared["finish_s"][0] > both["finish_s"][0]


@pytest.mark.parametrize("ranks", [2, 5])
def test_limits_are_a_rank_s_own(ranks: int) -> None:
    run = simulate(columns(3, n=400, gap_s=0.0), timeline=True, data_parallel_size=ranks)
    assert run["preemptions"].sum() > 0
    assert ENGINE["max_num_seqs"] * (ranks - 1) < run["timeline_resident"].max() <= ENGINE["max_num_seqs"] * ranks
    assert 0.9 < run["timeline_kv_share"].max() <= 1.0
    assert [run[f"timeline_{name}"][-1] for name in ("waiting", "resident", "kv_share")] == [0, 0, 0]
    assert np.isfinite(run["finish_s"]).all()
    for earlier, later in pairwise(TIMES):
        assert (run[earlier] <= run[later]).all()


def test_one_rank_is_the_engine_itself() -> None:
    trace, changes = columns(5), {"data_parallel_size": 1}
    plain, one = simulate(trace, timeline=True), simulate(trace, timeline=True, **changes)
    assert {name: values.tobytes() for name, values in plain.items()} == {n: v.tobytes() for n, v in one.items()}
    policies = ["fcfs", "las", "srpt-oracle"]
    assert _leap.replay(trace, asked(policies, ENGINE))[0] == _leap.replay(trace, asked(policies, ENGINE | changes))[0]


@pytest.mark.parametrize("ranks", [2, 4])
def test_capacity_grows_with_the_ranks_when_all_steps_are_equal(ranks: int) -> None:
    cost = dict.fromkeys(ENGINE["cost"], 0.0) | {"step_s": 0.01, "free_tokens": 1e6}
    engine = ENGINE | {"cost": cost, "kv_tokens": 100_000, "max_num_batched_tokens": 100_000}
    trace = columns(6, n=600)
    one, several = (
        json.loads(_leap.replay(trace, asked(["fcfs"], engine | {"data_parallel_size": n}))[0])["capacity_rps"][0]
        for n in (1, ranks)
    )
    assert several == pytest.approx(ranks * one, rel=0.05)


def frame(n: int = 80) -> pl.DataFrame:
    random = np.random.default_rng(9)
    return pl.DataFrame(
        {
            **columns(9, n, gap_s=0.02),
            "features": pl.Series(random.normal(size=(n, 5)).astype(np.float32)),
            "score_x": pl.Series(random.normal(size=n), dtype=pl.Float32),
        }
    )


POLICIES = ("fcfs", "las", "hrrn", "leap", "leap-paper:levers=slots", "score:x:delay_s=0.05,gpu_share=0.2")
LEVERS = ("leap:levers=queue+slots+evict", "srpt-oracle:wait_cap_steps=3")


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_every_policy_serves_every_request_once(async_scheduling: bool) -> None:
    limits: dict[str, Any] = {"max_num_seqs": 6, "decode_slots": 4, "kv_tokens": 2048, "data_parallel_size": 3}
    common: dict[str, Any] = {"policies": POLICIES + LEVERS, "seeds": 2, "async_scheduling": async_scheduling}
    result = replay(frame(), **common, **limits, num_prompts=200, threads=1)
    rows = result.requests
    assert rows.group_by("policy", "seed").len()["len"].to_list() == [200] * 2 * len(POLICIES + LEVERS)
    assert rows.filter(pl.col("first_token_s") <= pl.col("arrival_s")).is_empty()
    assert rows.filter(pl.col("finish_s") < pl.col("first_token_s")).is_empty()
    assert result.to_dict()["config"]["data_parallel_size"] == 3
    again = replay(frame(), **common, **limits, num_prompts=200, threads=2)
    assert again.requests.equals(rows)


def test_what_one_rank_has_predicted_of_a_request_the_others_know_when_it_comes_again(tmp_path: Path) -> None:
    """80 requests three times over: of each the prediction of the first time holds, whichever rank it comes to."""
    trace, path = frame(), tmp_path / "readout.safetensors"
    Readout.fit(trace["features"].to_numpy(), trace["output_tokens"].to_numpy(), max_tokens=512).save(path)
    common: dict[str, Any] = {"policies": "leap-paper", "readout": path, "seeds": 1, "data_parallel_size": 3}
    rows = replay(trace, **common, num_prompts=240, kv_tokens=20_000).requests
    told = rows.group_by("row").agg(pl.col("predicted_tokens").unique())
    assert told["predicted_tokens"].list.len().to_list() == [1] * 80
    assert told["predicted_tokens"].explode().is_finite().all()
    # The ranks learn on their own, so none would say again what another said of the request before.
    once = replay(trace, **common, kv_tokens=20_000).requests.sort("row")["predicted_tokens"]
    single = replay(trace, **common | {"data_parallel_size": 1}, kv_tokens=20_000).requests.sort("row")
    assert (once != single["predicted_tokens"]).any()


def test_the_report_counts_the_seats_of_all_ranks() -> None:
    result = replay(frame(), policies="fcfs", seeds=1, load=1.2, max_num_seqs=6, data_parallel_size=3)
    assert any("80 requests are few for an engine that takes 18 at a time" in note for note in result.notes)
    out = io.StringIO()
    render(result.to_dict(), Console(file=out, width=120, highlight=False), text_width=120)
    assert "3 such ranks in lock-step" in " ".join(out.getvalue().split())


def test_no_rank_at_all_is_refused() -> None:
    with pytest.raises(ConfigError, match="data_parallel_size must be at least 1"):
        simulate(columns(1), data_parallel_size=0)
    with pytest.raises(ConfigError, match=r"^data_parallel_size: "):
        replay(frame(), data_parallel_size=0)
