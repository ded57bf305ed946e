"""Small random models of each family: captured as transformers has it, or refused with the reason."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from captured_rows import check_rows
from engine_requests import CHUNK, SEQUENCES, SMALL_LAYER, captured
from shared_engines import Configuration, Engines

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1800)]

# Of six layers.
DEFAULT_LAYER = 5
TAPPED = ("qwen2", "qwen3", "mistral", "gemma3", "phi3")


@pytest.mark.parametrize("family", TAPPED)
def test_families_are_tapped(
    family: str,
    prompts: dict[str, dict[str, list[list[int]]]],
    model: Callable[[str], Path],
    reference: Callable[..., dict[str, Any]],
    engines: Engines,
) -> None:
    tokens = prompts["small"]["captured"]
    states = reference(model(family), tokens)
    few = {"max_num_seqs": SEQUENCES, "max_num_batched_tokens": CHUNK}
    for layer, asynchronous in ((SMALL_LAYER, False), (None, True)):
        configuration = Configuration(model(family), layer=layer, asynchronous=asynchronous, tokenizer=False)
        run = engines.run(configuration, "rows", *captured(tokens, 3), **few)
        assert run.asynchronous == asynchronous
        check_rows(run.rows, tokens, states, layer or DEFAULT_LAYER)


def test_a_model_of_another_convention_is_refused(
    prompts: dict[str, dict[str, list[list[int]]]], model: Callable[[str], Path], engines: Engines
) -> None:
    assert engines.refused(Configuration(model("gpt2"), tokenizer=False)) == (
        "ConfigError: leap cannot read the hidden states of GPT2LMHeadModel: its decoder layer GPT2Block does not take "
        "hidden_states and residual"
    )
    stock = Configuration(model("gpt2"), tokenizer=False, stock=True)
    run = engines.run(stock, "stock", captured(prompts["small"]["captured"][:1], 3)[0])
    assert [request["tokens"] for request in run.requests] == [3]
