"""The compiled replay against first come first served in a few lines: no memory limit, whole prompts, no overlap."""

from __future__ import annotations

import json

import numpy as np
import pytest
import small_engine

from leap_rs import _leap

COST = {
    "step_s": 0.00669,
    "per_decode_seq_s": 5.13e-5,
    "per_kv_token_s": 1.231e-6,
    "per_token_over_free_s": 1.711e-5,
    "free_tokens": 24.0,
    "per_prefill_pair_s": 9.93e-9,
    "per_kv_token_with_prefill_s": 3.37e-7,
}


def step_s(decoding: list[int], prompts: list[int]) -> float:
    """Seconds of one step: stored tokens of those that decode, lengths of the prompts that it takes in."""
    read = sum(stored + 1 for stored in decoding)
    per_kv = COST["per_kv_token_s"] + (COST["per_kv_token_with_prefill_s"] if prompts else 0.0)
    over = max(0.0, len(decoding) + sum(prompts) - COST["free_tokens"])
    pairs = sum(prompt * prompt / 2 for prompt in prompts)
    return (
        COST["step_s"]
        + COST["per_decode_seq_s"] * len(decoding)
        + per_kv * read
        + COST["per_token_over_free_s"] * over
        + COST["per_prefill_pair_s"] * pairs
    )


def fcfs(arrival: list[float], prompt: list[int], output: list[int], seats: int) -> tuple[list[float], list[float]]:
    """First-token and finish times."""
    first, finish = [0.0] * len(arrival), [0.0] * len(arrival)
    made = [0] * len(arrival)
    running: list[int] = []
    now, following = 0.0, 0
    while running or following < len(arrival):
        if not running:
            now = max(now, arrival[following])
        new = []
        while following < len(arrival) and arrival[following] <= now and len(running) + len(new) < seats:
            new.append(following)
            following += 1
        now += step_s([prompt[i] + made[i] - 1 for i in running], [prompt[i] for i in new])
        running += new
        for i in running:
            made[i] += 1
            if made[i] == 1:
                first[i] = now
            if made[i] == output[i]:
                finish[i] = now
        running = [i for i in running if made[i] < output[i]]
    return first, finish


@pytest.mark.parametrize(("seats", "seed"), [(1, 0), (3, 1), (8, 2), (40, 3)])
def test_replay_agrees_with_a_few_lines(seats: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    n = 150
    gaps = random.exponential(0.08, n) * (random.random(n) < 0.6)
    arrival = np.cumsum(gaps)
    arrival -= arrival[0]
    prompt = random.integers(1, 600, n).astype(np.uint32)
    output = np.maximum(1, random.geometric(1 / 40, n)).astype(np.uint32)
    engine = {
        **small_engine.ENGINE,
        "cost": COST,
        "kv_tokens": 10_000_000,
        "max_num_seqs": seats,
        "max_num_batched_tokens": 1_000_000,
        "async_scheduling": False,
        "enable_prefix_caching": False,
    }
    columns = {"arrival_s": arrival, "prompt_tokens": prompt, "output_tokens": output}
    text, table = _leap.replay(columns, small_engine.asked(["fcfs"], engine), requests=True)
    assert table is not None
    order = np.argsort(table["request"])
    first, finish = fcfs(arrival.tolist(), prompt.tolist(), output.tolist(), seats)
    np.testing.assert_allclose(table["first_token_s"][order], first, rtol=1e-9)
    np.testing.assert_allclose(table["finish_s"][order], finish, rtol=1e-9)
    # Mean TTFT from the planned arrival.
    reported = json.loads(text)["results"][0]["metrics"]["mean_ttft_ms"]["mean"]
    assert reported == pytest.approx(1e3 * float(np.mean(np.array(first) - arrival)), rel=1e-9)
