"""Hidden states captured in the real vLLM against transformers' own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prompt_reference import projection

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(3000)]

# Of 30 layers. The default is 25; around 20 a layer changes the state of real prompts more.
LAYER = 20
CHUNK, BLOCK = 64, 32
STORY = (
    "The harbour master kept two ledgers. In the first he wrote down every ship that came in, its flag, its cargo and the "
    "hour of its arrival, in a hand so even that the clerks in the capital took it for print. In the second, which nobody "
    "had ever seen, he wrote down the ships that had not come: the ones that were late by a day, by a week, by a winter. "
    "Beside each he noted the weather on the night when it should have rounded the cape, and sometimes a single word."
)
TEXTS = (
    "What is the capital of France?",
    f"{STORY}\n\nWho wrote the two ledgers, and what is the difference between them?",
    "List five fruits.",
    "Explain to a child of six why the sky is blue in the day, red in the evening and black at night. Use no word of more "
    "than three syllables, give one example from a kitchen and one from a garden, and end with a question that the child "
    "can answer by looking out of the window. Then say the same once more for an engineer, in two sentences.",
    "Translate 'good morning' into Spanish.",
    f"{STORY}\n\nContinue the story.",
)


def batches(tokens: list[list[int]], generate: int = 6) -> list[list[dict[str, Any]]]:
    entries = [{"tokens": prompt, "sampling": {"max_tokens": generate, "ignore_eos": True}} for prompt in tokens]
    return [entries[:5], entries[5:]]


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    a, b = a.astype(np.float64), b.astype(np.float64)
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


def check_rows(
    rows: dict[tuple[int, ...], list[dict[str, Any]]], tokens: list[list[int]], states: dict[str, Any], layer: int
) -> None:
    assert len(rows) == len(tokens)
    for i, prompt in enumerate(tokens):
        (entry,) = rows[tuple(prompt)]
        hidden = states[f"hidden_{i}"]
        assert entry["row"].shape == hidden.shape[2:]
        assert entry["row"].dtype == np.float32
        assert cosine(entry["row"], hidden[layer, -1]) > 0.999
        assert np.linalg.norm(entry["row"]) == pytest.approx(np.linalg.norm(hidden[layer, -1]), rel=1e-3)
        assert cosine(entry["row"], hidden[layer - 1, -1]) < 0.99
        assert cosine(entry["row"], hidden[layer + 1, -1]) < 0.99
        assert cosine(entry["row"], hidden[layer, -2]) < 0.99


@pytest.fixture(scope="module")
def smollm(model: Callable[[str], Path]) -> Path:
    return model("real")


@pytest.fixture(scope="module")
def tokens(smollm: Path, tokenised: Callable[..., list[list[int]]]) -> list[list[int]]:
    made = tokenised(smollm, TEXTS)
    assert [len(prompt) > CHUNK for prompt in made] == [False, True, False, True, False, True]
    return made


@pytest.fixture(scope="module")
def states(smollm: Path, tokens: list[list[int]], reference: Callable[..., dict[str, Any]]) -> dict[str, Any]:
    return reference(smollm, tokens)


@pytest.fixture(scope="module")
def runs(smollm: Path, tokens: list[list[int]], engines: Callable[..., dict[str, Any]]) -> dict[str, Any]:
    plain = {"batches": batches(tokens), "leap": {"layer": LAYER}}
    late = {**plain, "asynchronous": True}
    compiled = {"enforce_eager": False}
    stock = {**plain, "stock": True, "additional_config": {}}
    # The first of these leaves a compiled graph without the operator behind, under what would be the same key.
    return {
        **engines(
            smollm,
            {
                "stock compiled": {**stock, **compiled},
                "compiled": {**plain, **compiled},
                "compiled asynchronous": {**late, **compiled, "whole": True},
            },
            {
                "stock": stock,
                "eager": plain,
                "asynchronous": late,
                "default layer": {**plain, "leap": {}},
            },
        ),
        **engines(smollm, {"asynchronous processes": late}, processes=True),
    }


SETTINGS = ("eager", "asynchronous", "asynchronous processes", "compiled", "compiled asynchronous")


@pytest.mark.parametrize("setting", SETTINGS)
def test_captured_states_are_transformers_own(
    setting: str, tokens: list[list[int]], states: dict[str, Any], runs: dict[str, Any]
) -> None:
    run = runs[setting]
    assert run.asynchronous == ("asynchronous" in setting)
    check_rows(run.rows, tokens, states, LAYER)
    shared = next(i for i, (a, b) in enumerate(zip(tokens[1], tokens[5], strict=False)) if a != b)
    assert run.results[5]["cached"] == shared // BLOCK * BLOCK > CHUNK
    for prompt in (1, 3):
        assert run.rows[tuple(tokens[prompt])][0]["chunk"] < len(tokens[prompt])


@pytest.mark.parametrize("setting", SETTINGS)
def test_outputs_are_those_of_stock_vllm(setting: str, runs: dict[str, Any]) -> None:
    stock = runs["stock compiled" if "compiled" in setting else "stock"]
    made = [[(result["tokens"], result["reason"]) for result in run.results] for run in (runs[setting], stock)]
    assert len(made[0]) == len(TEXTS)
    assert made[0] == made[1]


def test_default_layer(tokens: list[list[int]], states: dict[str, Any], runs: dict[str, Any]) -> None:
    for i, prompt in enumerate(tokens):
        (entry,) = runs["default layer"].rows[tuple(prompt)]
        likeness = [cosine(entry["row"], layer[-1]) for layer in states[f"hidden_{i}"]]
        assert np.argmax(likeness) == 25
        assert likeness[25] > 0.999


def test_prompt_features_are_numpys_on_the_same_embedding(
    tokens: list[list[int]], states: dict[str, Any], runs: dict[str, Any]
) -> None:
    project = projection(states["embedding"].shape[1], 256, seed=0)
    for prompt in tokens:
        (entry,) = runs["asynchronous processes"].rows[tuple(prompt)]
        mean, n = states["embedding"][prompt].astype(np.float64).mean(0), len(prompt)
        expected = np.concatenate([mean @ project, [np.sqrt(n), np.log1p(n), n]])
        np.testing.assert_allclose(entry["pooled"], expected, atol=2e-3)
