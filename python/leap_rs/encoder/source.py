"""Which model an encoder is, and where it is read: from its config.json alone."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from leap_rs._leap import LeapError
from leap_rs.trace.files import reason

Kind = Literal["bert", "causal"]

KINDS: dict[str, Kind] = {
    **dict.fromkeys(("bert", "mpnet", "roberta", "xlm-roberta"), "bert"),
    **dict.fromkeys(("gemma3_text", "llama", "mistral", "phi3", "qwen2", "qwen3", "smollm3"), "causal"),
}
"""How a `model_type` is read: the mean over the tokens of an encoder, the last token of a causal model."""

LARGEST = 2_000_000_000
"""Parameters of the largest causal model that is taken: it is to cost next to nothing beside the model that is served."""

_CONFIG = "config.json"
_CACHE_PREFIX = "models--"


@dataclass(frozen=True)
class EncoderInfo:
    """A frozen encoder: what its rows are called, and what makes them."""

    name: str
    """The bare published name."""
    source: str
    """The directory, or the name that transformers finds in its cache."""
    kind: Kind
    depth: int
    layer: int
    """After how many of the `depth` layers it is read."""
    width: int


def inspect(source: str | Path, layer: int | None = None) -> EncoderInfo:
    """What the model in a directory, or of that name in transformers' own cache, is as an encoder. Loads no weights.

    Args:
        source: The directory, or a name of the hub that has been downloaded before.
        layer: After how many layers it is read, 0 being the input embeddings; two thirds of them where not given.

    Raises:
        LeapError: There is no such model, it is neither a text encoder nor a small causal model, or it has no such layer.
    """
    if (directory := Path(source).expanduser()).is_dir():
        # The libraries that load it do not know what ~ is.
        source = directory
    file = _config_file(str(source))
    config = _read(file)
    kind = KINDS.get(str(config.get("model_type")))
    if kind is None:
        raise LeapError(
            f"{source}: model_type {config.get('model_type')!r} is no text encoder or small causal model that leap reads; "
            f"it reads {', '.join(sorted(KINDS))}"
        )
    depth, width = (_positive(file, config, key) for key in ("num_hidden_layers", "hidden_size"))
    if kind == "causal":
        _refuse_large(source, config, depth, width)
    if layer is None:
        layer = round(depth * 2 / 3)
    if not 0 <= layer <= depth:
        raise LeapError(
            f"{source}: has no layer {layer}; an encoder of {depth} layers is read after 0 to {depth} of them"
        )
    return EncoderInfo(_bare(str(source)), str(source), kind, depth, layer, width)


def _config_file(source: str) -> Path:
    directory = Path(source)
    if directory.is_dir():
        if not (directory / _CONFIG).is_file():
            raise LeapError(f"{source}: is a directory without a {_CONFIG}, not a model")
        return directory / _CONFIG
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError as error:
        raise LeapError(
            f'{source}: no such directory; names need transformers: pip install "leap-rs[encoder]"'
        ) from error
    try:
        found = try_to_load_from_cache(source, _CONFIG)
    except ValueError:
        found = None
    if not isinstance(found, str):
        raise LeapError(
            f"{source}: no such directory, and no model of that name has been downloaded (hf download {source})"
        )
    return Path(found)


def _read(file: Path) -> dict[str, Any]:
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise LeapError(f"{file}: cannot be read: {reason(error)}") from error
    if not isinstance(config, dict):
        raise LeapError(f"{file}: expected an object, found {type(config).__name__}")
    return config


def _positive(file: Path, config: dict[str, Any], key: str) -> int:
    value = config.get(key)
    if type(value) is not int or value < 1:
        raise LeapError(f"{file}: {key} must be a whole number from 1 on, not {value!r}")
    return value


def _refuse_large(source: str | Path, config: dict[str, Any], depth: int, width: int) -> None:
    inner, vocabulary = config.get("intermediate_size") or 4 * width, config.get("vocab_size") or 0
    parameters = depth * (3 * inner + 4 * width) * width + vocabulary * width
    if parameters > LARGEST:
        raise LeapError(
            f"{source}: has some {parameters / 1e9:.1f} billion parameters; a causal model that reads prompts beside the "
            f"engine has at most {LARGEST / 1e9:.0f} billion"
        )


def _bare(source: str) -> str:
    path = Path(source).absolute()
    # A snapshot in transformers' cache: models--OWNER--NAME/snapshots/REVISION.
    if path.parent.name == "snapshots" and path.parent.parent.name.startswith(_CACHE_PREFIX):
        return path.parent.parent.name.split("--")[-1]
    return path.name
