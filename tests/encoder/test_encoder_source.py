"""What an encoder is, from its config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from leap_rs import LeapError
from leap_rs.encoder.source import inspect

BERT: dict[str, Any] = {"model_type": "bert", "num_hidden_layers": 6, "hidden_size": 384}
# SmolLM2-135M's and Llama-3-8B's.
SMALL: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 30,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "vocab_size": 49152,
}
LARGE: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "vocab_size": 128256,
}


def model(directory: Path, config: object) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.mark.parametrize(
    ("config", "kind", "depth", "layer", "width"),
    [
        (BERT, "bert", 6, 4, 384),
        ({**BERT, "num_hidden_layers": 12}, "bert", 12, 8, 384),
        (SMALL, "causal", 30, 20, 576),
    ],
)
def test_two_thirds_of_the_layers(
    tmp_path: Path, config: dict[str, Any], kind: str, depth: int, layer: int, width: int
) -> None:
    info = inspect(model(tmp_path / "some-encoder", config))
    assert (info.name, info.kind, info.depth, info.layer, info.width) == ("some-encoder", kind, depth, layer, width)


@pytest.mark.parametrize("layer", [0, 6])
def test_any_layer(tmp_path: Path, layer: int) -> None:
    assert inspect(model(tmp_path, BERT), layer).layer == layer


def test_a_directory_below_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What loads it is given a path that needs no shell."""
    monkeypatch.setenv("HOME", str(tmp_path))
    model(tmp_path / "mini", BERT)
    found = inspect("~/mini")
    assert (found.source, found.name) == (str(tmp_path / "mini"), "mini")


def test_the_published_name_of_a_snapshot_in_the_cache(tmp_path: Path) -> None:
    directory = model(tmp_path / "models--sentence-transformers--all-MiniLM-L6-v2" / "snapshots" / "0123abcd", BERT)
    assert inspect(directory).name == "all-MiniLM-L6-v2"


@pytest.mark.parametrize(
    ("config", "layer", "said"),
    [
        (BERT, 7, "has no layer 7; an encoder of 6 layers is read after 0 to 6 of them"),
        (BERT, -1, "has no layer -1"),
        (
            {**BERT, "model_type": "t5"},
            None,
            "model_type 't5' is no text encoder or small causal model that leap reads",
        ),
        ({"hidden_size": 384}, None, "model_type None"),
        ({**BERT, "hidden_size": 0}, None, "hidden_size must be a whole number from 1 on, not 0"),
        ({"model_type": "bert", "hidden_size": 384}, None, "num_hidden_layers must be a whole number"),
        (LARGE, None, "has some 8.3 billion parameters"),
        ([1, 2], None, "expected an object, found list"),
    ],
)
def test_what_is_no_encoder(tmp_path: Path, config: object, layer: int | None, said: str) -> None:
    directory = model(tmp_path, config)
    with pytest.raises(LeapError, match=said) as caught:
        inspect(directory, layer)
    assert str(directory) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_directory_that_holds_no_model(tmp_path: Path) -> None:
    with pytest.raises(LeapError, match=r"is a directory without a config\.json, not a model"):
        inspect(tmp_path)


def test_a_config_that_is_no_json(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(LeapError, match=r"config\.json: cannot be read"):
        inspect(tmp_path)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of downloaded models."""
    pytest.importorskip("huggingface_hub")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    return tmp_path


def test_a_name_that_was_downloaded(cache: Path) -> None:
    directory = cache / "models--someone--some-encoder"
    model(directory / "snapshots" / "0123abcd", BERT)
    (directory / "refs").mkdir()
    (directory / "refs" / "main").write_text("0123abcd")
    info = inspect("someone/some-encoder")
    assert (info.name, info.source, info.layer) == ("some-encoder", "someone/some-encoder", 4)


@pytest.mark.parametrize("name", ["someone/some-encoder", "/no/such/directory", "a/b/c"])
def test_a_name_that_was_never_downloaded(cache: Path, name: str) -> None:
    assert not any(cache.iterdir())
    with pytest.raises(LeapError, match=f"{name}: no such directory, and no model of that name"):
        inspect(name)
