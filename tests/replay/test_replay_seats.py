"""How many requests the KV cache holds, and the sentence where seats run out before it does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import polars as pl
import pytest

import leap_rs
from leap_rs.replay import replay
from leap_rs.replay.seats import could_hold, held_tokens

Make = Callable[..., dict[str, Any]]
SHORT = "Seats, not order, are short here"


def frame(prompt: list[int], output: list[int], gap_s: float = 0.1) -> pl.DataFrame:
    return pl.DataFrame({"arrival_s": np.arange(len(prompt)) * gap_s, "prompt_tokens": prompt, "output_tokens": output})


def test_what_a_resident_holds_is_the_average_over_its_steps() -> None:
    """Token by token: in its step a a request holds prompt + a - 1/2 tokens, and every request once has its steps."""
    prompt, output = [100, 7, 300], [1, 250, 40]
    stays = [p + a + 0.5 for p, n in zip(prompt, output, strict=True) for a in range(n)]
    assert held_tokens(frame(prompt, output), 10_000, 16) == pytest.approx(np.mean(stays) + 8)


def test_what_the_engine_can_never_hold_does_not_count() -> None:
    kept = held_tokens(frame([10, 90], [10, 12]), 100, 16)
    assert kept == held_tokens(frame([10], [10]), 100, 16)
    assert held_tokens(frame([90], [12]), 100, 16) is None


@pytest.mark.parametrize(
    ("usable", "held", "tokens", "expected"),
    [(446_000, 505.0, 8192, 880), (1000, 30.0, 8192, 33), (10, 50.0, 8192, 1), (446_000, 20.0, 2048, 2000)],
)
def test_in_two_digits_and_no_more_than_tokens_of_a_step(usable: int, held: float, tokens: int, expected: int) -> None:
    assert could_hold({"kv_tokens_usable": usable, "max_num_batched_tokens": tokens}, held) == expected
    assert could_hold({"kv_tokens_usable": usable, "max_num_batched_tokens": tokens}, None) is None


@pytest.mark.parametrize(
    ("changes", "options", "told"),
    [
        ({}, {}, True),
        ({"steps_blocked_by_seats": 40.0}, {}, False),
        ({"steps_blocked_by_memory": 11.0}, {}, False),
        ({}, {"sweep": {"max_num_seqs": [712]}}, True),
        ({}, {"sweep": {"max_num_seqs": [713]}}, False),
        ({}, {"sweep": {"decode_slots": [64]}}, False),
        ({}, {"max_concurrency": 100}, False),
    ],
)
def test_seats_are_short_where_they_and_not_memory_stop_requests(
    make_document: Make, core_result: Make, changes: dict[str, float], options: dict[str, Any], told: bool
) -> None:
    """446,000 usable tokens of 500 each are 892, so 890 in two digits; 1.25 times 712 seats."""
    entry = core_result("fcfs")
    counts = {"steps": 1000.0, "steps_blocked_by_seats": 400.0, "steps_blocked_by_memory": 10.0, **changes}
    entry["queue"] |= {key: {"mean": count, "ci95": None} for key, count in counts.items()}
    (sentence,) = make_document([entry], kv_tokens_a_resident=500.0, **options)["conclusions"]
    assert (SHORT in sentence) == told
    if told:
        assert "could hold about 890 of this traffic at a time (--max-num-seqs 890)" in sentence


def test_more_seats_end_the_queue_that_they_made() -> None:
    """Two seats and memory for many: with as many as the sentence says the queue is gone."""
    trace = frame([20] * 60, [30] * 60, gap_s=0.01)
    options: dict[str, Any] = {"policies": "fcfs", "seeds": 1, "kv_tokens": 1616}
    few = replay(trace, max_num_seqs=2, **options)
    # 20 + 15 tokens and half a block of 16 are 43; of 1,600 usable tokens that is 37 times.
    assert "in 9" in few.conclusions[0]
    assert "(--max-num-seqs 37)" in few.conclusions[0]
    many = replay(trace, max_num_seqs=37, **options).to_dict()["results"][0]["queue"]
    queue = few.to_dict()["results"][0]["queue"]
    assert many["mean_waiting"] < 0.1 * queue["mean_waiting"]
    assert many["preemptions"] == 0


def test_a_search_goes_up_to_what_the_kv_cache_holds() -> None:
    """Without a queue nothing is searched, so that this is quick."""
    quiet = frame([20] * 8, [30] * 8, gap_s=9.0)
    document = leap_rs.tune(quiet, "p99_e2el<=1.1", kv_tokens=1616, max_num_seqs=8, num_prompts=4, seeds=2).to_dict()
    assert [one["max_num_seqs"] for one in document["space"]["engines"] if one["decode_slots"] is None] == [
        8,
        4,
        2,
        17,
        37,
    ]


def test_a_search_says_when_more_seats_alone_are_the_answer() -> None:
    """Of equal requests no order gains, and two seats leave most of the KV cache empty."""
    rush = frame([20] * 120, [30] * 120, gap_s=0.01)
    limits: dict[str, Any] = {"kv_tokens": 1616, "max_num_seqs": 2, "num_prompts": 60, "seeds": 2, "readout": "none"}
    result = leap_rs.tune(rush, "p99_e2el<=1.1", objective="e2el", load=1.4, **limits)
    verdict = result.to_dict()["verdict"]
    assert (verdict["recommend"], verdict["bound_held"]) == ("max_num_seqs", True)
    assert result.server["max_num_seqs"] > 2
    assert f"--max-num-seqs {result.server['max_num_seqs']}" in " ".join(result.conclusions)
