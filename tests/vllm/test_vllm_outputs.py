"""What clients get is what stock vLLM gives them, whatever the levers do: the real engine, greedy, in float32."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from leap_rs import Readout

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(3000)]

LAYER = 20
STORY = (
    "The lighthouse on the northern rock had three keepers, who spoke to each other only in winter. In summer one of them "
    "painted the railings, one counted the ships, and the third wrote letters that nobody came to fetch."
)
QUESTIONS = (
    "What is the capital of France?",
    "Say hello.",
    "What is two plus three?",
    "Name a colour.",
    "What is the opposite of hot?",
    "Name the largest planet.",
    "Is water wet? Answer yes or no.",
    "What animal says moo?",
    "What is the capital of Italy?",
    "Which month comes after May?",
    "Translate 'thank you' into French.",
    "How many legs has a spider?",
)
FORCED = (31, 3, 24, 9, 36, 2, 17, 28, 5, 12, 34, 21)
NATURAL_LIMIT = 40
LEVERS = ("queue", "slots", "queue+slots+evict")
SLOTS = 3
SEQUENCES = 8

SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "chunked": {"max_num_batched_tokens": 64},
    "shared prefixes": {"shared": True},
    "wait cap": {"leap": {"wait_cap_steps": 8}},
    # Answers long enough that residents outgrow the blocks that were free when they came.
    "memory": {"num_gpu_blocks_override": 12, "max_model_len": 256, "times": 2},
    "asynchronous": {"asynchronous": True},
    # As in the tests of captured states, so that what they have compiled serves here too.
    "compiled": {"enforce_eager": False, "max_num_batched_tokens": 64},
    "order fcfs": {"leap": {"order": "fcfs"}},
}


@pytest.fixture(scope="module")
def smollm(model: Callable[[str], Path]) -> Path:
    return model("real")


@pytest.fixture(scope="module")
def prompts(smollm: Path, tokenised: Callable[..., list[list[int]]]) -> dict[str, list[list[int]]]:
    short = tokenised(smollm, QUESTIONS)
    return {"short": short, "shared": tokenised(smollm, [f"{STORY}\n\n{question}" for question in QUESTIONS])}


@pytest.fixture(scope="module")
def readout(
    smollm: Path,
    prompts: dict[str, list[list[int]]],
    reference: Callable[..., dict[str, Any]],
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """Fitted to lengths without meaning, so that its predictions are of all sizes and mostly wrong."""
    states = reference(smollm, prompts["short"])
    rows = np.stack([states[f"hidden_{i}"][LAYER, -1] for i in range(len(QUESTIONS))])
    lengths = np.random.default_rng(3).permutation(np.linspace(2, 60, len(rows)).astype(int))
    path = tmp_path_factory.mktemp("readout") / "state.safetensors"
    meta = {"kind": "state", "layer": LAYER}
    Readout.fit(rows, lengths, max_tokens=512, lam=10.0, meta=meta).save(path)
    return path


def requests(prompts: list[list[int]], times: int) -> list[dict[str, Any]]:
    """Each question twice: answered as far as the model likes, and in a length that the client has settled."""
    made = []
    for tokens, length in zip(prompts, FORCED, strict=True):
        made.append({"tokens": tokens, "sampling": {"max_tokens": times * length, "ignore_eos": True}})
        made.append({"tokens": tokens, "sampling": {"max_tokens": NATURAL_LIMIT}})
    return made


@pytest.fixture(scope="module")
def runs(
    smollm: Path, prompts: dict[str, list[list[int]]], readout: Path, engines: Callable[..., dict[str, Any]]
) -> dict[str, Any]:
    parts: tuple[dict[str, Any], dict[str, Any]] = ({}, {})
    for number, (name, setting) in enumerate(SETTINGS.items()):
        chosen = parts[number % 2]
        given = dict(setting)
        texts = prompts["shared" if given.pop("shared", False) else "short"]
        batches = [requests(texts, given.pop("times", 1))]
        leap = {"mode": "armed", "layer": LAYER, "readout": str(readout), "decode_slots": SLOTS, "evict_per_s": 100}
        leap |= given.pop("leap", {})
        engine = {"batches": batches, "max_num_seqs": SEQUENCES, "max_num_batched_tokens": 256, **given}
        chosen[f"{name}, stock"] = {**engine, "stock": True, "additional_config": {}}
        for levers in LEVERS:
            chosen[f"{name}, {levers}"] = {**engine, "armed": True, "leap": {**leap, "levers": levers}}
    return engines(smollm, *parts)


@pytest.mark.parametrize("levers", LEVERS)
@pytest.mark.parametrize("setting", SETTINGS)
def test_outputs_are_those_of_stock_vllm(setting: str, levers: str, runs: dict[str, Any]) -> None:
    stock, ours = runs[f"{setting}, stock"], runs[f"{setting}, {levers}"]
    assert not stock.error
    assert not ours.error
    made = [[(result["tokens"], result["reason"]) for result in run.results] for run in (ours, stock)]
    assert len(made[0]) == 2 * len(QUESTIONS)
    assert made[0] == made[1]
    reasons = [reason for _, reason in made[0]]
    assert reasons[::2] == ["length"] * len(QUESTIONS)
    assert reasons[1::2].count("stop") >= len(QUESTIONS) // 2


@pytest.mark.parametrize("levers", LEVERS)
@pytest.mark.parametrize("setting", SETTINGS)
def test_the_levers_acted(setting: str, levers: str, runs: dict[str, Any]) -> None:
    stock, ours = runs[f"{setting}, stock"].seen, runs[f"{setting}, {levers}"].seen
    assert ours["asynchronous"] == stock["asynchronous"] == (setting == "asynchronous")
    if setting == "order fcfs":
        assert ours["finished"] == stock["finished"]
        assert ours["gated"] == ours["evictions"] == 0
        return
    assert ours["finished"] != stock["finished"]
    assert (ours["gated"] > 0) == ("slots" in levers)
    if setting == "memory":
        assert stock["preemptions"] >= 3
        assert ours["preemptions"] >= 3
        assert (ours["evictions"] > 0) == ("evict" in levers)
    if setting == "wait cap" and "slots" in levers:
        assert ours["promotions"] > 0
