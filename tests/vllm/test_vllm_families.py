"""Small random models of each family: captured as transformers has it, or refused with the reason."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_vllm_capture import batches, check_rows

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(3000)]

# Of six layers; the default is 5.
LAYER = 3
TAPPED = ("qwen2", "qwen3", "mistral", "gemma3", "phi3")
LENGTHS = (9, 150, 40, 201, 2, 100)
SHARED = 96


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = np.random.default_rng(7)
    made: list[list[int]] = [rng.integers(3, 512, length).tolist() for length in LENGTHS]
    made[5][:SHARED] = made[1][:SHARED]
    return made


@pytest.fixture(scope="module")
def runs(
    model: Callable[[str], Path], prompts: list[list[int]], engines: Callable[..., dict[str, Any]]
) -> dict[str, Any]:
    """In two processes: a family's engine takes less time than Python with vLLM takes to start."""
    parts: tuple[dict[str, Any], dict[str, Any]] = ({}, {})
    for number, family in enumerate(TAPPED):
        chosen = parts[number % 2]
        engine = {"model": str(model(family)), "batches": batches(prompts, 3), "skip_tokenizer_init": True}
        chosen[f"{family}, layer"] = {**engine, "leap": {"layer": LAYER}}
        chosen[f"{family}, default"] = {**engine, "asynchronous": True}
    engine = {"model": str(model("gpt2")), "batches": batches(prompts[:1], 3), "skip_tokenizer_init": True}
    parts[1]["gpt2, leap"] = engine
    parts[1]["gpt2, stock"] = {**engine, "stock": True, "additional_config": {}}
    return engines(model("gpt2"), *parts)


@pytest.mark.parametrize("family", TAPPED)
def test_families_are_tapped(
    family: str,
    prompts: list[list[int]],
    model: Callable[[str], Path],
    reference: Callable[..., dict[str, Any]],
    runs: dict[str, Any],
) -> None:
    states = reference(model(family), prompts)
    for name, layer in (("layer", LAYER), ("default", 5)):
        made = runs[f"{family}, {name}"]
        assert not made.error
        check_rows(made.rows, prompts, states, layer)


def test_a_model_of_another_convention_is_refused(runs: dict[str, Any]) -> None:
    assert runs["gpt2, leap"].error == (
        "ConfigError: leap cannot read the hidden states of GPT2LMHeadModel: its decoder layer GPT2Block does not take "
        "hidden_states and residual"
    )
    assert [len(result["tokens"]) for result in runs["gpt2, stock"].results] == [3]
