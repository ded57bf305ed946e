"""The whole plugin on the real engine, step by step: it learns from zero, keeps what it learned, and the order changes.

What is asserted of the order are steps, and never times: a schedule is compared with one that the test makes itself.
"""

from __future__ import annotations

import heapq
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_requests import LAYER
from prompt_reference import projection
from scipy.stats import spearmanr
from shared_engines import Configuration, Engines
from vllm_engine import Engine

from leap_rs import OnlineReadout

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1800)]

READOUTS = ("prompt", "state")
KINDS = ("exact", "censored", "forced", "aborted", "failed")
# Prompts of two kinds of words; of the tokens that an answer may consist of, one in so many ends it.
ALLOWED = range(1000, 1512)
WORDS = {"short": (1000, 2), "long": (20_000, 16)}
CAP = 12
NATURAL, FORCED, BATCH = 384, 16, 8
MAX_MODEL_LEN = 96


def prompt(kind: str, rng: np.random.Generator) -> list[int]:
    first = WORDS[kind][0]
    return [int(token) for token in rng.integers(first, first + 200, int(rng.integers(8, 20)))]


def natural(n: int, seed: int) -> list[dict[str, Any]]:
    """Requests that end by themselves or at their cap: any of the tokens allowed may come, and some of them end it."""
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(n):
        kind = ("short", "long")[int(rng.integers(2))]
        sampling = {
            "temperature": 2.0,
            "max_tokens": CAP,
            "allowed_token_ids": list(ALLOWED),
            "stop_token_ids": list(ALLOWED[:: WORDS[kind][1]]),
        }
        made.append({"tokens": prompt(kind, rng), "sampling": sampling})
    return made


def forced(lengths: Sequence[int], seed: int) -> list[dict[str, Any]]:
    rng = np.random.default_rng(seed)
    return [
        {
            "tokens": rng.integers(1000, 20_000, 8).tolist(),
            "sampling": {"temperature": 0.0, "max_tokens": length, "ignore_eos": True},
        }
        for length in lengths
    ]


@dataclass(frozen=True)
class Seen:
    """The plugin's numbers at one moment, and what it then predicted for a prompt of each kind."""

    numbers: dict[str, float]
    predicted: dict[str, dict[str, float]]


PROBES = {kind: prompt(kind, np.random.default_rng(99)) for kind in WORDS}


def look(engine: Engine) -> Seen:
    return Seen(engine.metrics(), {kind: engine.predicted(tokens, 64) for kind, tokens in PROBES.items()})


def updates(numbers: dict[str, float]) -> dict[str, int]:
    return {name: int(numbers[f"updates/{name}"]) for name in READOUTS}


def run_past_a_save(engine: Engine, requests: list[dict[str, Any]]) -> dict[str, float]:
    """Until the engine has saved, and has learned more after that."""
    at_save: dict[str, int] | None = None
    engine.begin(requests, 32)
    while not engine.steps(1)["done"]:
        numbers = engine.metrics()
        if at_save is None and numbers["state_saves/saved"]:
            at_save = updates(numbers)
        if at_save is not None and updates(numbers) != at_save:
            break
    return engine.metrics()


@dataclass(frozen=True)
class Life:
    """An engine that learned from zero, was shut down, started, killed, and started again."""

    reasons: Counter[tuple[bool, str]]
    learned: Seen
    judged: dict[str, np.ndarray]
    """Score, length and mark of each request that the saved verdict on a readout rests on."""
    resumed: Seen
    killed: dict[str, float]
    saved: dict[str, OnlineReadout]
    after_kill: Seen


@pytest.fixture(scope="module")
def life(engines: Engines, configurations: dict[str, Configuration], tmp_path_factory: pytest.TempPathFactory) -> Life:
    state_dir = tmp_path_factory.mktemp("live") / "state"
    directory = state_dir / "engine-0"
    leap = {"state_dir": str(state_dir), "state_every": 2, "layer": LAYER}

    def started() -> Engine:
        return engines.scheduled(configurations["eager"], "leap", leap, max_model_len=MAX_MODEL_LEN)

    engine = started()
    done = engine.run(natural(NATURAL, 0) + forced([5] * FORCED, 1), 48)
    engine.wait_for(lambda now: set(updates(now).values()) == {NATURAL // BATCH})
    learned = look(engine)
    # In its place comes one that knows nothing but what this one saves at its end.
    engine = started()
    judges = json.loads((directory / "state.json").read_text())["extra"]["judges"]
    judged = {name: np.array(judge["seen"], dtype=float).T for name, judge in judges.items()}
    resumed = look(engine)
    killed = run_past_a_save(engine, natural(NATURAL, 2))
    engine.kill()
    engines.end()
    files = json.loads((directory / "state.json").read_text())["files"]
    saved = {name: OnlineReadout.load(directory / file["name"]) for name, file in files.items()}
    after_kill = look(started())
    reasons = Counter((request["number"] < NATURAL, request["reason"]) for request in done)
    return Life(reasons, learned, judged, resumed, killed, saved, after_kill)


def test_from_zero_it_learns_every_label_and_arms(life: Life) -> None:
    numbers = life.learned.numbers
    expected = {
        "exact": life.reasons[True, "stop"],
        "censored": life.reasons[True, "length"],
        "forced": FORCED,
        "aborted": 0,
        "failed": 0,
    }
    assert {kind: numbers[f"labels/{kind}"] for kind in KINDS} == expected
    assert expected["exact"] + expected["censored"] == NATURAL
    assert min(expected["exact"], expected["censored"]) > 0
    assert updates(numbers) == dict.fromkeys(READOUTS, NATURAL // BATCH)
    assert numbers["captures_missed"] == numbers["dropped_labels/prompt"] == numbers["dropped_labels/state"] == 0
    # The words of a prompt say how long its answer is.
    for name in READOUTS:
        assert life.learned.predicted["long"][name] > 1.5 * life.learned.predicted["short"][name]
        assert numbers[f"rank_correlation/{name}"] > 0.2
        assert numbers[f"armed_readout/{name}"] == 1
    assert numbers["mode/armed"] == 1


def test_started_again_it_goes_on_where_it_was(life: Life) -> None:
    for key in (f"{what}/{name}" for what in ("updates", "armed_readout") for name in READOUTS):
        assert life.resumed.numbers[key] == life.learned.numbers[key], key
    for name, (score, tokens, censored) in life.judged.items():
        # Every limit is that of a long answer, so that all of them count.
        assert set(tokens[censored == 1]) == {CAP}
        expected = spearmanr(score[-200:], tokens[-200:]).statistic
        assert life.resumed.numbers[f"rank_correlation/{name}"] == pytest.approx(expected, abs=1e-9)
    assert life.resumed.numbers["mode/armed"] == 1
    for kind, predicted in life.learned.predicted.items():
        assert life.resumed.predicted[kind] == pytest.approx(predicted, rel=1e-6)


def test_killed_it_starts_again_with_the_last_saved_state(life: Life, model: Callable[[str], Path]) -> None:
    from safetensors.numpy import load_file

    last = {name: readout.updates for name, readout in life.saved.items()}
    for name in READOUTS:
        assert NATURAL // BATCH < last[name] <= life.killed[f"updates/{name}"]
    assert updates(life.after_kill.numbers) == last
    assert life.after_kill.numbers["mode/armed"] == 1
    (embedding,) = (rows for name, rows in load_file(model("real") / "model.safetensors").items() if "embed" in name)
    for kind, tokens in PROBES.items():
        n = len(tokens)
        mean = embedding[tokens].astype(np.float64).mean(0) @ projection(embedding.shape[1], 256, seed=0)
        features = np.concatenate([mean, [np.sqrt(n), np.log1p(n), n]]).astype(np.float32)
        expected = life.saved["prompt"].predict(features[None])[0]
        assert life.after_kill.predicted[kind]["prompt"] == pytest.approx(expected, rel=0.01)
        assert life.after_kill.predicted[kind]["state"] != pytest.approx(
            life.resumed.predicted[kind]["state"], rel=1e-6
        )


SEATS, SLOTS, RESIDENTS = 4, 4, 24
LENGTHS = np.random.default_rng(3).permutation(np.arange(2, 2 + RESIDENTS)).tolist()
# Whose scheduler it is, options of the plugin, and seats.
ORDERS: dict[str, tuple[str, dict[str, Any], int]] = {
    "stock": ("stock", {}, SEATS),
    "queue": ("leap", {"mode": "armed", "levers": ["queue"], "aging_rate": 0.0}, SEATS),
    "slots": ("leap", {"mode": "armed", "levers": ["slots"], "aging_rate": 0.0, "decode_slots": SLOTS}, RESIDENTS),
}


@pytest.fixture(scope="module")
def orders(engines: Engines, configurations: dict[str, Configuration]) -> dict[str, list[dict[str, Any]]]:
    return {
        name: engines.run(configurations["eager"], kind, forced(LENGTHS, 4), leap=leap, max_num_seqs=seats).requests
        for name, (kind, leap, seats) in ORDERS.items()
    }


def seated(work: Sequence[int], order: Sequence[int], seats: int) -> dict[int, tuple[int, int]]:
    """First and last step of each: in this order, whenever one of the seats is free."""
    free = [0] * seats
    steps = {}
    for i in order:
        start = heapq.heappop(free)
        steps[i] = (start + 1, start + work[i])
        heapq.heappush(free, start + work[i])
    return steps


def steps_of(done: Sequence[dict[str, Any]]) -> dict[int, tuple[int, int]]:
    return {request["number"]: (request["first_step"], request["end_step"]) for request in done}


def test_stock_goes_by_arrival_and_the_queue_lever_by_length(orders: dict[str, list[dict[str, Any]]]) -> None:
    arrival = list(range(len(LENGTHS)))
    by_length = sorted(arrival, key=lambda i: LENGTHS[i])
    assert [request["tokens"] for request in orders["queue"]] == LENGTHS
    assert steps_of(orders["stock"]) == seated(LENGTHS, arrival, SEATS)
    assert steps_of(orders["queue"]) == seated(LENGTHS, by_length, SEATS)


def test_slots_decode_the_shortest_of_all_residents(orders: dict[str, list[dict[str, Any]]]) -> None:
    # All are prefilled in the first step, which gives each its first token.
    left = [length - 1 for length in LENGTHS]
    decoded = seated(left, sorted(range(len(left)), key=lambda i: left[i]), SLOTS)
    assert steps_of(orders["slots"]) == {i: (1, 1 + last) for i, (_, last) in decoded.items()}
