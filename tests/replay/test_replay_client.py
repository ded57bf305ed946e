"""When the client sends: drawn arrivals, and a cap on requests in flight."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import polars as pl
import pytest
from small_engine import COST, ENGINE, asked

import leap_rs
from leap_rs import _leap
from leap_rs.replay import replay

PROMPT, OUTPUT = 30, 100
SEATS = ENGINE["max_num_seqs"]


def frame(count: int, prompt: int = PROMPT, output: int = OUTPUT) -> pl.DataFrame:
    return pl.DataFrame(
        {
            "arrival_s": np.arange(count, dtype=float),
            "prompt_tokens": pl.Series([prompt] * count, dtype=pl.UInt32),
            "output_tokens": pl.Series([output] * count, dtype=pl.UInt32),
        }
    )


def core(count: int = 48, *, policies: tuple[str, ...] = ("fcfs",), **options: Any) -> tuple[dict[str, Any], Any]:
    """Equal requests on an engine without overlap and prefix cache, of which every step time has a formula."""
    engine = ENGINE | {"async_scheduling": False, "enable_prefix_caching": False}
    trace = {name: column.to_numpy() for name, column in zip(frame(1).columns, frame(count), strict=True)}
    text, rows = _leap.replay(trace, asked(policies, engine, **options), requests=True)
    return json.loads(text), rows


def seconds_together(inside: int) -> float:
    """From the first step to the last of so many equal requests that start at once."""
    prefill = COST["step_s"] + COST["per_token_over_free_s"] * max(0.0, inside * PROMPT - COST["free_tokens"])
    prefill += COST["per_prefill_pair_s"] * inside * PROMPT * PROMPT / 2
    read = inside * (PROMPT + 1 + np.arange(OUTPUT - 1))
    decode = COST["step_s"] + COST["per_decode_seq_s"] * inside + COST["per_kv_token_s"] * read
    return prefill + float(decode.sum())


@pytest.mark.parametrize("cap", [1, 3, 4, 12, 13, 400, None])
def test_the_capacity_is_that_under_the_cap_of_the_client(cap: int | None) -> None:
    """Equal requests go in batches of as many as are let in, which start and end together."""
    inside = SEATS if cap is None else min(cap, SEATS)
    report, _ = core(max_concurrency=cap)
    assert report["capacity_rps"][0] == pytest.approx(inside / seconds_together(inside), rel=1e-9)


def test_load_1_under_a_cap_offers_what_the_engine_can_do_under_it() -> None:
    found = replay(frame(400), policies="fcfs", seeds=1, load=1.0, max_concurrency=2).to_dict()
    (result,) = found["results"]
    assert result["request_rate"] == found["config"]["capacity_rps"][0]
    # Equal requests at a constant gap of what two at a time take: served as fast as they come, but for the last's end.
    assert result["metrics"]["request_throughput"]["mean"] == pytest.approx(result["request_rate"], rel=0.02)
    free = replay(frame(400), policies="fcfs", seeds=1, load=1.0).to_dict()
    assert free["config"]["capacity_rps"][0] > 5 * result["request_rate"]


def test_a_cap_below_the_seats_is_told_in_the_conclusion() -> None:
    """Under a rush whatever is sent finds a seat, so all policies do the same."""
    limits = {"max_concurrency": 2, "max_num_seqs": 256}
    found = replay(frame(60), policies=("fcfs", "sjf-oracle"), seeds=1, request_rate=math.inf, **limits)
    (sentence,) = found.conclusions
    assert (
        "the client's cap of 2 in flight (--max-concurrency) is the queue in front of the engine's 256 seats"
        in sentence
    )
    one, other = found.to_dict()["results"]
    assert one["metrics"] == other["metrics"]


def test_the_seats_are_those_of_all_ranks() -> None:
    options: dict[str, Any] = {"policies": "fcfs", "seeds": 1, "request_rate": math.inf, "data_parallel_size": 2}
    at, above = (replay(frame(60), max_num_seqs=4, max_concurrency=cap, **options).conclusions[0] for cap in (8, 9))
    assert "in front of the engine's 8 seats" in at
    assert "client" not in above


def test_a_search_under_a_cap_below_the_seats_says_why_there_is_no_queue() -> None:
    result = leap_rs.tune(
        frame(40), "p99_e2el<=1.1", request_rate=math.inf, max_concurrency=2, max_num_seqs=8, num_prompts=20, seeds=2
    )
    assert result.to_dict()["verdict"]["status"] == "no_queue"
    assert "the client's cap of 2 in flight (--max-concurrency) is the queue" in result.conclusions[0]


@pytest.mark.parametrize("seeds", [1, 3])
def test_a_constant_gap_for_every_policy_and_seed(seeds: int) -> None:
    result = replay(
        frame(64), policies=("fcfs", "sjf-oracle"), seeds=seeds, request_rate=4.0, burstiness=math.inf, threads=1
    )
    for _, rows in result.requests.group_by("policy", "seed"):
        assert rows["arrival_s"].sort().to_list() == [i / 4 for i in range(1, 65)]
    document = json.loads(result.to_json())
    assert document["config"]["burstiness"] == "inf"
    assert 'burstiness=float("inf")' in result.command


@pytest.mark.parametrize("burstiness", [0.3, 1.0, 6.0])
def test_the_last_of_n_arrives_at_n_over_the_rate(burstiness: float) -> None:
    result = replay(
        frame(50, 20, 4), policies="fcfs", seeds=20, num_prompts=120, request_rate=2.5, burstiness=burstiness
    )
    runs = [np.sort(rows["arrival_s"].to_numpy()) for _, rows in result.requests.group_by("seed")]
    assert [run[-1] for run in runs] == [120 / 2.5] * 20
    assert min(run[0] for run in runs) > 0
    gaps = np.concatenate([np.diff(run, prepend=0.0) for run in runs])
    # In units of the mean the deviation of Gamma is 1 / sqrt(shape); 2,400 gaps, at most a few per cent of error.
    assert gaps.std() * 2.5 == pytest.approx(1 / math.sqrt(burstiness), rel=0.12)
    assert len({float(run[0]) for run in runs}) == 20


@pytest.mark.parametrize(("value", "what"), [("fast", '"fast"'), (0.0, "above 0"), (-1.0, "above 0")])
def test_a_shape_that_is_none_is_refused(value: object, what: str) -> None:
    with pytest.raises(leap_rs.ConfigError, match="burstiness") as caught:
        core(burstiness=value)
    assert what in str(caught.value)
