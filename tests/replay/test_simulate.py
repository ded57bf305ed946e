"""One simulation at recorded times: as the replay's own rows, and the engine over time as it follows from them."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from small_engine import ENGINE, asked

from leap_rs import _leap
from leap_rs._leap import ConfigError, TraceError

Floats = npt.NDArray[np.float64]


def columns(seed: int, n: int = 120) -> dict[str, Any]:
    random = np.random.default_rng(seed)
    return {
        "arrival_s": np.cumsum(random.exponential(0.05, n) * (random.random(n) < 0.7)),
        "prompt_tokens": random.integers(1, 700, n).astype(np.uint32),
        "output_tokens": np.maximum(1, random.geometric(1 / 60, n)).astype(np.uint32),
    }


def simulate(trace: dict[str, Any], *, timeline: bool = False, **changes: Any) -> dict[str, npt.NDArray[Any]]:
    return _leap.simulate(trace, json.dumps(ENGINE | changes), timeline=timeline)


def at(run: dict[str, npt.NDArray[Any]], name: str, seconds: Floats) -> npt.NDArray[Any]:
    """The step function `name` at some times; nothing is there before its first entry."""
    index = np.searchsorted(run["timeline_s"], seconds, side="right")
    return np.concatenate([[0], run[f"timeline_{name}"]])[index]


def between(run: dict[str, npt.NDArray[Any]], count: int = 4000) -> Floats:
    """Times at which nothing happens."""
    random = np.random.default_rng(5)
    return random.uniform(0.0, float(run["finish_s"].max()) + 1.0, count)


@pytest.mark.parametrize("changes", [{}, {"async_scheduling": False}, {"kv_tokens": 2560}, {"max_num_seqs": 1}])
def test_one_simulation_is_a_replay_of_the_first_seed(changes: dict[str, Any]) -> None:
    trace = columns(1)
    run = simulate(trace, **changes)
    # The replay's clock starts at the first arrival.
    shifted = trace | {"arrival_s": trace["arrival_s"] - trace["arrival_s"][0]}
    _, rows = _leap.replay(shifted, asked(["fcfs"], ENGINE | changes), requests=True)
    assert rows is not None
    order = np.argsort(rows["request"])
    run = simulate(shifted, **changes)
    for name in ("first_token_s", "finish_s", "preemptions"):
        np.testing.assert_array_equal(run[name], rows[name][order])
    assert run["preemptions"].dtype == np.uint32
    assert (run["preemptions"].sum() > 0) == (changes.get("kv_tokens") == 2560)


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_the_clock_is_that_of_the_arrivals(async_scheduling: bool) -> None:
    """An hour later everything happens an hour later, to the rounding of the sums."""
    trace = columns(2)
    run = simulate(trace, async_scheduling=async_scheduling)
    later = simulate(trace | {"arrival_s": trace["arrival_s"] + 3600.0}, async_scheduling=async_scheduling)
    for name in ("admitted_s", "first_token_s", "finish_s"):
        np.testing.assert_allclose(later[name] - 3600.0, run[name], atol=1e-8)


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_who_waits_and_who_is_resident_follows_from_the_times_of_the_requests(async_scheduling: bool) -> None:
    trace = columns(3)
    run = simulate(trace, timeline=True, async_scheduling=async_scheduling)
    assert run["preemptions"].sum() == 0
    arrival, admitted, finish = trace["arrival_s"], run["admitted_s"], run["finish_s"]
    assert (arrival <= admitted).all()
    assert (admitted < run["first_token_s"]).all()
    times = between(run)

    def count(moments: Floats) -> npt.NDArray[np.int64]:
        return np.searchsorted(np.sort(moments), times, side="right")

    np.testing.assert_array_equal(at(run, "waiting", times), count(arrival) - count(admitted))
    np.testing.assert_array_equal(at(run, "resident", times), count(admitted) - count(finish))
    assert run["timeline_waiting"].max() > 0
    assert run["timeline_resident"].max() == ENGINE["max_num_seqs"]


def test_the_cache_fills_token_by_token() -> None:
    """One request on an idle engine without overlap: the blocks for its prompt, then one for every 16 tokens more."""
    trace: dict[str, Any] = {
        "arrival_s": np.array([2.5]),
        "prompt_tokens": np.array([30], dtype=np.uint32),
        "output_tokens": np.array([100], dtype=np.uint32),
    }
    run = simulate(trace, timeline=True, async_scheduling=False)
    cost = ENGINE["cost"]
    prefill = cost["step_s"] + cost["per_token_over_free_s"] * 6 + cost["per_prefill_pair_s"] * 30 * 15
    decode = cost["step_s"] + cost["per_decode_seq_s"] + cost["per_kv_token_s"] * (31 + np.arange(99))
    # Step k, composed when k steps have run, stores 30 + k tokens.
    composed = 2.5 + np.concatenate([[0.0], np.cumsum(np.concatenate([[prefill], decode]))])
    stored = np.append(30 + np.arange(100), 0)
    expected = np.ceil(stored / 16) / (ENGINE["kv_tokens"] // 16)
    middle = (composed[1:] + composed[:-1]) / 2
    np.testing.assert_allclose(at(run, "kv_share", middle), expected[:-1], rtol=1e-12)
    assert at(run, "kv_share", np.array([2.4, composed[-1] + 0.1])).tolist() == [0.0, 0.0]
    # One entry a change and no others: 30 tokens are 2 blocks, 129 are 9, and at the end all are free.
    changed = np.diff(expected, prepend=0.0) != 0
    np.testing.assert_allclose(run["timeline_s"], composed[changed])


@pytest.mark.parametrize("changes", [{"kv_tokens": 2560}, {"kv_tokens": 2560, "async_scheduling": False}])
def test_a_full_cache_is_seen_and_everything_is_given_back(changes: dict[str, Any]) -> None:
    trace = columns(4)
    run = simulate(trace, timeline=True, **changes)
    assert run["preemptions"].sum() > 0
    assert 0.95 < run["timeline_kv_share"].max() <= 1.0
    assert run["timeline_kv_share"].min() >= 0.0
    assert (np.diff(run["timeline_s"]) > 0).all()
    states = np.stack([run[f"timeline_{name}"] for name in ("waiting", "resident", "kv_share")])
    assert (np.diff(states, axis=1) != 0).any(axis=0).all()
    assert states[:, -1].tolist() == [0.0, 0.0, 0.0]
    # A preempted request waits again, whatever it was admitted first.
    times = between(run)
    inside = (trace["arrival_s"][None, :] <= times[:, None]) & (times[:, None] < run["finish_s"][None, :])
    np.testing.assert_array_equal(at(run, "waiting", times) + at(run, "resident", times), inside.sum(axis=1))


def test_a_request_that_can_never_fit_is_named() -> None:
    trace = columns(6) | {"prompt_tokens": np.where(np.arange(120) == 7, 9000, 5).astype(np.uint32)}
    with pytest.raises(TraceError, match=r"row 7: .*6400 are usable"):
        simulate(trace)


def test_an_engine_that_cannot_be_used_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_num_seqs must be at least 1"):
        simulate(columns(7), max_num_seqs=0)
    with pytest.raises(ConfigError, match=r"engine: .*speed"):
        simulate(columns(7), speed=1)
    with pytest.raises(TraceError, match="output_tokens is missing"):
        _leap.simulate({"arrival_s": np.zeros(1), "prompt_tokens": np.ones(1, np.uint32)}, json.dumps(ENGINE))


@pytest.mark.parametrize("policy", ["fcfs", "srpt-oracle:levers=queue+slots+evict,evict_per_s=20"])
@pytest.mark.parametrize("changes", [{}, {"async_scheduling": False}, {"kv_tokens": 1600, "decode_slots": 4}])
def test_the_steps_are_all_that_the_requests_need(policy: str, changes: dict[str, Any]) -> None:
    trace = columns(3)
    log = _leap.simulate(
        trace, json.dumps(ENGINE | {"enable_prefix_caching": False} | changes), policy=policy, steps=True
    )
    rows, tokens = log["step_requests"], log["step_tokens"].astype(np.int64)
    times = np.repeat(log["step_s"], np.diff(log["step_ends"].astype(np.int64), prepend=0))
    assert (np.diff(log["step_s"]) >= 0).all()
    np.testing.assert_array_equal(np.bincount(log["step_preempted"], minlength=120), log["preemptions"])
    # The last token is never read again, so it is not computed; what a preemption threw away is computed once more.
    needed = trace["prompt_tokens"].astype(np.int64) + trace["output_tokens"] - 1
    computed = np.bincount(rows, tokens, minlength=120)
    kept = log["preemptions"] == 0
    np.testing.assert_array_equal(computed[kept], needed[kept])
    assert (computed[~kept] >= needed[~kept]).all()
    first = np.full(120, np.inf)
    np.minimum.at(first, rows, times)
    np.testing.assert_array_equal(first, log["admitted_s"])
    assert "step_s" not in simulate(trace)
