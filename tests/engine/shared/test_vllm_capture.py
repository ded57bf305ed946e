"""Hidden states captured in the real vLLM against transformers' own."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
from captured_rows import check_rows, cosine
from engine_requests import BLOCK, CHUNK, SEQUENCES, TEXTS, captured, model_of
from prompt_reference import projection
from shared_engines import Configuration, Engines, Run

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1800)]

CONFIGURATIONS = ("eager", "asynchronous", "asynchronous processes", "compiled", "compiled asynchronous")
# The engine in processes is tapped where the plugin does by default; there a layer changes real prompts little.
DEFAULT_LAYER, DEFAULT_APART = 25, 0.9995
Runs = Callable[[str], Run]
Prompts = Callable[[str], list[list[int]]]
States = Callable[[str], dict[str, Any]]


@pytest.fixture(scope="module")
def tokens(prompts: dict[str, dict[str, list[list[int]]]]) -> Prompts:
    """The prompts that an engine is given."""
    for made in prompts.values():
        assert [len(prompt) > CHUNK for prompt in made["captured"]] == [False, True, False, True, False, True]
    return lambda configuration: prompts[model_of(configuration)]["captured"]


@pytest.fixture(scope="module")
def states(
    configurations: dict[str, Configuration], tokens: Prompts, reference: Callable[..., dict[str, Any]]
) -> States:
    """transformers' states of them."""
    by_model = cache(lambda kind: reference(configurations[kind].model, tokens(kind)))
    return lambda configuration: by_model("compiled" if model_of(configuration) == "small" else "eager")


@pytest.fixture(scope="module")
def runs(
    engines: Engines,
    configurations: dict[str, Configuration],
    tokens: Prompts,
    stock: Callable[[str], dict[str, Run]],
) -> Runs:
    """What an engine makes of them."""

    @cache
    def run(name: str) -> Run:
        configuration = configurations[name]
        # Compiled first, stock vLLM's leaves a graph without the operator behind, under what would be the same key.
        stock(name)
        few = {"max_num_seqs": SEQUENCES, "max_num_batched_tokens": CHUNK}
        return engines.run(configuration, "rows", *captured(tokens(name)), **({} if configuration.processes else few))

    return run


@pytest.mark.parametrize("configuration", CONFIGURATIONS)
def test_captured_states_are_transformers_own(
    configuration: str, configurations: dict[str, Configuration], tokens: Prompts, states: States, runs: Runs
) -> None:
    run, given = runs(configuration), tokens(configuration)
    assert run.asynchronous == ("asynchronous" in configuration)
    if (layer := configurations[configuration].layer) is not None:
        check_rows(run.rows, given, states(configuration), layer)
    else:
        check_rows(run.rows, given, states(configuration), DEFAULT_LAYER, DEFAULT_APART)
    shared = next(i for i, (a, b) in enumerate(zip(given[1], given[5], strict=False)) if a != b)
    assert run.requests[5]["cached"] == shared // BLOCK * BLOCK > CHUNK
    for prompt in (1, 3):
        assert run.rows[tuple(given[prompt])][0]["chunk"] < len(given[prompt])


@pytest.mark.parametrize("configuration", CONFIGURATIONS)
def test_outputs_are_those_of_stock_vllm(
    configuration: str, runs: Runs, stock: Callable[[str], dict[str, Run]]
) -> None:
    expected = stock(configuration)["captured"]
    assert len(expected.answers) == len(TEXTS)
    assert runs(configuration).answers == expected.answers


@pytest.mark.parametrize("configuration", ["asynchronous processes"])
def test_default_layer(configuration: str, tokens: Prompts, states: States, runs: Runs) -> None:
    for i, prompt in enumerate(tokens(configuration)):
        (entry,) = runs(configuration).rows[tuple(prompt)]
        likeness = [cosine(entry["row"], layer[-1]) for layer in states(configuration)[f"hidden_{i}"]]
        assert np.argmax(likeness) == DEFAULT_LAYER
        assert likeness[DEFAULT_LAYER] > 0.999


@pytest.mark.parametrize("configuration", ["asynchronous processes"])
def test_prompt_features_are_numpys_on_the_same_embedding(
    configuration: str, tokens: Prompts, states: States, runs: Runs
) -> None:
    embedding = states(configuration)["embedding"]
    project = projection(embedding.shape[1], 256, seed=0)
    for prompt in tokens(configuration):
        (entry,) = runs(configuration).rows[tuple(prompt)]
        mean, n = embedding[prompt].astype(np.float64).mean(0), len(prompt)
        expected = np.concatenate([mean @ project, [np.sqrt(n), np.log1p(n), n]])
        np.testing.assert_allclose(entry["pooled"], expected, atol=2e-3)
