"""Where vLLM keeps what it was given for the plugin. Every run asks, so nothing is imported for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

KEY, _ASIDE = "leap", "leap_options"


def given(vllm_config: Any) -> object:
    """What vLLM was given as options of the plugin; None where there are none."""
    additional = vllm_config.additional_config
    values = additional.get(KEY) if isinstance(additional, Mapping) else None
    return getattr(vllm_config, _ASIDE, None) if values is None else values


def set_aside(vllm_config: Any) -> None:
    """Takes the options out of `additional_config`, where `given` still finds them. The user's own object stays whole."""
    setattr(vllm_config, _ASIDE, given(vllm_config))
    vllm_config.additional_config = {k: v for k, v in vllm_config.additional_config.items() if k != KEY}
