"""Which vLLM this is, and whether it has the names that the plugin builds on.

`--scheduler-cls` is no stable interface of vLLM, so all of it is looked at once, at start: outside the tested versions a
warning, on a missing name an error that says what is missing.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Container
from dataclasses import dataclass
from types import CodeType, ModuleType
from typing import Any

from leap_rs._leap import ConfigError

OLDEST = (0, 20)
NEWEST = (0, 33)
METHODS = (
    "schedule",
    "update_from_output",
    "add_request",
    "_free_request",
    "_preempt_request",
    "finish_requests",
    "shutdown",
)
ATTRIBUTES = (
    "running",
    "waiting",
    "requests",
    "kv_cache_manager",
    "max_num_running_reqs",
    "max_num_scheduled_tokens",
    "prev_step_scheduled_req_ids",
)
REQUEST = (
    "request_id",
    "num_computed_tokens",
    "num_prompt_tokens",
    "num_output_placeholders",
    "max_tokens",
    "status",
    "spec_token_ids",
    "sampling_params",
    "prompt_token_ids",
)
REQUEST_PROPERTIES = ("num_tokens", "num_tokens_with_spec", "num_output_tokens", "get_finished_reason")

# Below vLLM's own logger, so that lines come out in its format.
LOG = logging.getLogger("vllm.leap_rs")


@dataclass(frozen=True)
class Engine:
    """How this vLLM is talked to."""

    version: tuple[int, int] | None
    gate_by_step: bool
    """Whether a request can be told the step before which it does not decode (from 0.26 on)."""
    skipped_queue: bool
    """Whether requests that cannot be admitted yet wait in a queue of their own (0.18 to 0.31)."""
    gated_adapters: bool
    """Whether LoRA adapters of residents that a step passes over count as in use (from 0.33 on)."""


def version_of(text: str) -> tuple[int, int] | None:
    """Major and minor version; None for a build that says none, such as `dev`."""
    found = re.match(r"v?(\d+)\.(\d+)", text)
    numbers = (int(found[1]), int(found[2])) if found else None
    return None if numbers in (None, (0, 0), (0, 1)) else numbers


def tested(version: tuple[int, int] | None) -> bool:
    """Whether a version lies in the tested range."""
    return version is not None and OLDEST <= version <= NEWEST


def _stored(function: Any) -> set[str]:
    """Names that a function or anything inside it uses, among them the attributes that it sets."""
    names: set[str] = set()
    codes: list[CodeType] = [function.__code__]
    while codes:
        code = codes.pop()
        names.update(code.co_names)
        codes.extend(const for const in code.co_consts if isinstance(const, CodeType))
    return names


def missing(scheduler: Any, request: Any) -> list[str]:
    """What the plugin needs of vLLM's `Scheduler` and `Request` classes and they do not have."""
    lacks = [f"Scheduler.{name}()" for name in METHODS if not callable(getattr(scheduler, name, None))]
    made = _stored(scheduler.__init__)
    lacks += [f"Scheduler.{name}" for name in ATTRIBUTES if name not in made]
    made = _stored(request.__init__)
    lacks += [f"Request.{name}" for name in REQUEST if name not in made]
    return lacks + [f"Request.{name}" for name in REQUEST_PROPERTIES if not hasattr(request, name)]


def check(vllm: ModuleType, scheduler: Any, request: Any) -> Engine:
    """What this vLLM is; a `ConfigError` names what it lacks."""
    text = str(getattr(vllm, "__version__", "unknown"))
    lacks = missing(scheduler, request)
    if lacks:
        raise ConfigError(
            f"vLLM {text} lacks {', '.join(lacks)}: leap-rs was tested with vLLM {_range()}; run without --scheduler-cls"
        )
    version = version_of(text)
    if not tested(version):
        LOG.warning("leap: vLLM %s is outside the versions that leap-rs was tested with (%s)", text, _range())
    by_step = "next_decode_eligible_step"
    return Engine(
        version=version,
        gate_by_step=by_step in _stored(request.__init__) and by_step in _stored(scheduler.schedule),
        skipped_queue="skipped_waiting" in _stored(scheduler.__init__),
        # No name tells; a build that says no version is a later one than most.
        gated_adapters=version is None or version >= (0, 33),
    )


def diffuses(config: Any) -> bool:
    """Whether the model writes several tokens at once and over again; from 0.32 on vLLM has a scheduler for these."""
    diffusion = getattr(config, "diffusion_config", None) is not None
    return diffusion or bool(getattr(config.model_config, "is_diffusion", False))


def paused(scheduler: Any) -> bool:
    """Whether the engine is paused: it lets those inside end, or nobody go on, and admits nobody."""
    return bool(getattr(scheduler, "pause_state", 0))


def seats(scheduler: Any) -> int:
    """Requests that may run at a time. Before 0.32 every seat of the model runner may be taken."""
    return int(getattr(scheduler, "max_num_active_reqs", scheduler.max_num_running_reqs))


def lacks_adapter(scheduler: Any, request: Any, gated: Container[Any]) -> bool:
    """Whether vLLM passes a waiting request over, since others' LoRA adapters have all places: not those of `gated`."""
    lora, adapter = scheduler.lora_config, request.lora_request
    if not lora or adapter is None:
        return False
    in_use = adapters_in_use(scheduler, gated)
    return len(in_use) >= lora.max_loras and adapter.lora_int_id not in in_use


def adapters_in_use(scheduler: Any, gated: Container[Any]) -> set[int]:
    """The LoRA adapters of residents, but for those of `gated`."""
    return {
        running.lora_request.lora_int_id
        for running in scheduler.running
        if running.lora_request and running not in gated
    }


def _range() -> str:
    return f"{OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}"
