"""Rows of the encoder against transformers' own hidden states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from leap_rs import LeapError  # noqa: E402
from leap_rs.encoder.model import Encoder  # noqa: E402
from leap_rs.encoder.source import KINDS, inspect  # noqa: E402

TEXTS = [
    "Write a haiku about rain.",
    "Yes or no: is 7 prime?",
    "",
    "Explain, step by step and with examples, how a compiler turns source text into machine code. " * 3,
    "word " * 1000,
    "Schreib mir bitte einen langen Aufsatz über die Geschichte der Eisenbahn. 鉄道の歴史",
]
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 30522,
    "max_position_embeddings": 320,
    # Wider than usual: else a layer of a random model hardly changes the state.
    "initializer_range": 0.1,
    "pad_token_id": 0,
}
Rows = npt.NDArray[np.float32]


def hidden(directory: Path, tokens: Sequence[Sequence[int]]) -> list[list[Rows]]:
    """All layers' states of each prompt alone, in float32."""
    model = transformers.AutoModel.from_pretrained(directory, dtype=torch.float32).eval()
    with torch.inference_mode():
        return [
            [state[0].numpy() for state in model(torch.tensor([list(ids)]), output_hidden_states=True).hidden_states]
            for ids in tokens
        ]


def small(directory: Path, kind: str, tokenizer: Path) -> Path:
    """A random model of that kind, with another's tokenizer."""
    torch.manual_seed(0)
    config = transformers.CONFIG_MAPPING[kind](**SMALL)
    transformers.AutoModel.from_config(config).float().save_pretrained(directory)
    transformers.AutoTokenizer.from_pretrained(tokenizer).save_pretrained(directory)
    return directory


@pytest.mark.parametrize("layer", [0, 4, 6])
def test_the_mean_over_the_tokens_of_minilm(minilm: Path, layer: int) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(minilm)
    tokens = tokenizer(TEXTS, truncation=True, max_length=256)["input_ids"]
    assert max(map(len, tokens)) == 256
    expected = np.stack([states[layer].mean(axis=0) for states in hidden(minilm, tokens)])
    rows = Encoder.load(inspect(minilm, layer), dtype="float32").encode(TEXTS)
    assert rows.dtype == np.float32
    np.testing.assert_allclose(rows, expected, atol=2e-5)


@pytest.mark.parametrize("layer", [20, 30])
def test_the_last_token_of_a_causal_model_in_its_own_chat_template(smollm: Path, layer: int) -> None:
    texts = [text for text in TEXTS if len(text) < 1000]
    tokenizer = transformers.AutoTokenizer.from_pretrained(smollm)
    messages = [[{"role": "user", "content": text}] for text in texts]
    tokens = [
        tokenizer.apply_chat_template(m, add_generation_prompt=True, return_dict=True).input_ids for m in messages
    ]
    expected = np.stack([states[layer][-1] for states in hidden(smollm, tokens)])
    rows = Encoder.load(inspect(smollm, layer), dtype="float32").encode(texts)
    np.testing.assert_allclose(rows, expected, atol=1e-3 * np.abs(expected).max())


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_every_kind_that_is_taken(tmp_path: Path, minilm: Path, kind: str) -> None:
    directory = small(tmp_path / kind, kind, minilm)
    info = inspect(directory)
    assert (info.layer, info.width) == (2, 64)
    bert = info.kind == "bert"
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    tokens = tokenizer(TEXTS, truncation=True, max_length=256, add_special_tokens=bert)["input_ids"]
    # A text of no tokens has no last one either.
    states = hidden(directory, [ids or [0] for ids in tokens])
    expected = np.stack([state[2].mean(axis=0) if bert else state[2][-1] for state in states])
    rows = Encoder.load(info, dtype="float32").encode(TEXTS)
    np.testing.assert_allclose(rows, expected, atol=1e-4)


@pytest.mark.parametrize("kind", ["bert", "llama"])
def test_nothing_above_the_layer_is_computed(tmp_path: Path, minilm: Path, kind: str) -> None:
    directory = small(tmp_path / kind, kind, minilm)
    rows = Encoder.load(inspect(directory), dtype="float32").encode(TEXTS)
    model = transformers.AutoModel.from_pretrained(directory)
    above = [model.encoder.layer[2]] if kind == "bert" else [model.layers[2], model.norm]
    for module in above:
        for weight in module.parameters():
            torch.nn.init.constant_(weight, float("nan"))
    model.save_pretrained(directory)
    np.testing.assert_array_equal(Encoder.load(inspect(directory), dtype="float32").encode(TEXTS), rows)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 2e-5), ("bfloat16", 0.05)])
def test_company_and_order_change_nothing(minilm: Path, dtype: str, tolerance: float) -> None:
    encoder = Encoder.load(inspect(minilm), dtype=dtype)
    rows = encoder.encode(TEXTS)
    alone = np.concatenate([encoder.encode([text]) for text in TEXTS])
    np.testing.assert_allclose(rows, alone, atol=tolerance)
    np.testing.assert_allclose(encoder.encode([*TEXTS[::-1], *TEXTS])[: len(TEXTS)][::-1], alone, atol=tolerance)
    assert encoder.encode([]).shape == (0, 384)


def test_bfloat16_points_where_float32_does(minilm: Path) -> None:
    exact, fast = (Encoder.load(inspect(minilm), dtype=dtype).encode(TEXTS) for dtype in ("float32", "bfloat16"))
    cosine = (exact * fast).sum(axis=1) / np.linalg.norm(exact, axis=1) / np.linalg.norm(fast, axis=1)
    assert cosine.min() > 0.999


def test_weights_that_are_missing(tmp_path: Path, minilm: Path) -> None:
    directory: Any = small(tmp_path / "bert", "bert", minilm)
    info = inspect(directory)
    (directory / "model.safetensors").unlink()
    with pytest.raises(LeapError, match="bert: cannot be loaded"):
        Encoder.load(info)
    with pytest.raises(LeapError, match="gone: cannot be loaded"):
        Encoder.load(replace(info, source=str(tmp_path / "gone")))
