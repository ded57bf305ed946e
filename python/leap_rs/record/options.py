"""What a recording depends on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from leap_rs._leap import ConfigError

OURS = ("model", "scheduler_cls", "additional_config")
"""Engine arguments that are not the user's to give."""


@dataclass(frozen=True)
class Options:
    """The options of `leap-record`."""

    model: str
    max_tokens: int = 1024
    temperature: float | None = None
    """None: what the model's generation config says, as vLLM does."""
    top_p: float | None = None
    seed: int = 0
    layer: int | None = None
    encoder: str | None = None
    """The text encoder whose rows are recorded too."""
    chat: bool | None = None
    """Whether texts go in the model's chat template; None: where it has one."""
    limit: int | None = None
    max_num_seqs: int | None = None
    max_model_len: int | None = None
    dtype: str | None = None
    engine_args: Mapping[str, Any] = field(default_factory=dict)
    save_every: int = 256

    def identity(self, column: str, digest: str) -> dict[str, Any]:
        """All that decides on what is recorded: parts with another one are of another recording."""
        return {
            "prompts": f"sha256:{digest}",
            "column": column,
            "limit": self.limit,
            "model": self.model,
            "chat": self.chat,
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "seed": self.seed,
            "layer": self.layer,
            "encoder": self.encoder,
            "max_model_len": self.max_model_len,
            "dtype": self.dtype,
            "engine_args": dict(self.engine_args),
        }


def engine_args(text: str | None) -> dict[str, Any]:
    """The arguments of vLLM's engine in `--engine-args`, a JSON object; dashes in names are read as underscores."""
    if text is None:
        return {}
    try:
        given = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"engine_args: not JSON: {error}") from None
    if not isinstance(given, dict):
        raise ConfigError(f"engine_args: expected a JSON object, not {text}")
    values = {key.replace("-", "_"): value for key, value in given.items()}
    for key in OURS:
        if key in values:
            raise ConfigError(f"engine_args: {key} cannot be given: leap-record sets it")
    return values
