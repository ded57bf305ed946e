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
LENGTHS = (9, 150, 40, 201, 2, 100)
SHARED = 96


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = np.random.default_rng(7)
    made: list[list[int]] = [rng.integers(3, 512, length).tolist() for length in LENGTHS]
    made[5][:SHARED] = made[1][:SHARED]
    return made


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "mistral", "gemma3", "phi3"])
def test_families_are_tapped(
    family: str,
    prompts: list[list[int]],
    model: Callable[[str], Path],
    reference: Callable[..., dict[str, Any]],
    engines: Callable[..., dict[str, Any]],
) -> None:
    path = model(family)
    states = reference(path, prompts)
    engine = {"batches": batches(prompts, 3), "skip_tokenizer_init": True}
    made = engines(path, {"layer": {**engine, "leap": {"layer": LAYER}}, "default": {**engine, "asynchronous": True}})
    for name, layer in (("layer", LAYER), ("default", 5)):
        assert not made[name].error
        check_rows(made[name].rows, prompts, states, layer)


def test_a_model_of_another_convention_is_refused(
    model: Callable[[str], Path], prompts: list[list[int]], engines: Callable[..., dict[str, Any]]
) -> None:
    engine = {"batches": batches(prompts[:1], 3), "skip_tokenizer_init": True}
    made = engines(model("gpt2"), {"leap": engine, "stock": {**engine, "stock": True, "additional_config": {}}})
    assert made["leap"].error == (
        "ConfigError: leap cannot read the hidden states of GPT2LMHeadModel: its decoder layer GPT2Block does not take "
        "hidden_states and residual"
    )
    assert [len(result["tokens"]) for result in made["stock"].results] == [3]
