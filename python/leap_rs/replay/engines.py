"""The engine that a replay simulates: a preset, a cost model of the user's own, and the options that override either.

KV capacity has two spellings. vLLM counts the null block that no request can use (`num_gpu_blocks * block_size`), and
so does `--kv-tokens`; presets state what is usable. This module is the one place that converts.
"""

from __future__ import annotations

import json
import math
from functools import lru_cache
from pathlib import Path
from typing import Any

from leap_rs import _leap
from leap_rs._leap import ConfigError

from .options import Options

COST_KEYS = (
    "step_s",
    "per_decode_seq_s",
    "per_kv_token_s",
    "per_token_over_free_s",
    "free_tokens",
    "per_prefill_pair_s",
    "per_kv_token_with_prefill_s",
)
LIMITS = (
    "kv_tokens",
    "block_size",
    "max_num_seqs",
    "max_num_batched_tokens",
    "async_scheduling",
    "decode_slots",
    "data_parallel_size",
)


@lru_cache(maxsize=1)
def presets() -> dict[str, dict[str, Any]]:
    """Engine presets by name, in the order in which the core lists them."""
    return {preset["name"]: preset for preset in json.loads(_leap.engine_presets())}


def _read_cost_model(source: Path | dict[str, Any]) -> dict[str, Any]:
    """The seven coefficients, or a preset-like object that holds them under `cost` and limits beside them."""
    if isinstance(source, dict):
        where, found = "cost_model", source
    else:
        where = str(source)
        try:
            found = json.loads(source.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"cost model {where}: {error.strerror or error}") from None
        except ValueError as error:
            raise ConfigError(f"cost model {where}: not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"cost model {where}: expected an object with {', '.join(COST_KEYS)}")
    whole = dict(found) if "cost" in found else {"cost": found}
    cost = whole["cost"]
    if not isinstance(cost, dict):
        raise ConfigError(f"cost model {where}: cost is not an object")
    missing = [key for key in COST_KEYS if key not in cost]
    unknown = [key for key in cost if key not in COST_KEYS]
    if missing or unknown:
        problem = f"{missing[0]} is missing" if missing else f"unknown key {unknown[0]!r}"
        raise ConfigError(f"cost model {where}: {problem}, expected {', '.join(COST_KEYS)}")
    for key in COST_KEYS:
        value = cost[key]
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value < 0:
            raise ConfigError(f"cost model {where}: {key} must be a number >= 0, got {value!r}")
    for key in LIMITS:
        value = whole.get(key)
        if value is None:
            whole.pop(key, None)
        elif key == "async_scheduling":
            if not isinstance(value, bool):
                raise ConfigError(f"cost model {where}: {key} must be true or false, got {value!r}")
        elif isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"cost model {where}: {key} must be a whole number >= 1, got {value!r}")
    whole["cost"] = {key: cost[key] for key in COST_KEYS}
    return whole


def measured_to(options: Options) -> int:
    """Running sequences up to which the step times of the cost model are known; beyond they are extrapolated."""
    preset = presets()[options.engine]
    if options.cost_model is None:
        return int(preset["measured_to_seqs"])
    own = _read_cost_model(options.cost_model)
    return int(own.get("measured_to_seqs") or own.get("max_num_seqs") or preset["max_num_seqs"])


def resolve(options: Options) -> tuple[dict[str, Any], dict[str, Any]]:
    """The engine in force, as the core takes it (`kv_tokens` usable) and as a report states it (as vLLM counts)."""
    known = presets()
    if options.engine not in known:
        raise ConfigError(f"engine: no preset {options.engine!r}, there are {', '.join(known)}")
    base = dict(known[options.engine])
    name = str(base["name"])
    if options.cost_model is not None:
        own = _read_cost_model(options.cost_model)
        base.update({key: own[key] for key in ("cost", "gpu", "model", *LIMITS) if key in own})
        name = str(own.get("name", "cost model" if isinstance(options.cost_model, dict) else options.cost_model))
    # A cost model may bring a block size of its own; the null block is one of that size.
    counted = options.kv_tokens or int(base["kv_tokens"]) + int(base["block_size"])
    block_size = options.block_size or int(base["block_size"])
    blocks = counted // block_size
    if blocks < 2:
        raise ConfigError(
            f"kv_tokens: {counted} tokens are {blocks} blocks of {block_size}, and one is never usable; give at least 2"
        )
    tokens = options.max_num_batched_tokens or int(base["max_num_batched_tokens"])
    limits: dict[str, Any] = {
        "block_size": block_size,
        # As vLLM does it where nobody says how many sequences: no more than the tokens of a step.
        "max_num_seqs": options.max_num_seqs or min(int(base["max_num_seqs"]), tokens),
        "max_num_batched_tokens": tokens,
        "async_scheduling": bool(base["async_scheduling"])
        if options.async_scheduling is None
        else options.async_scheduling,
        "enable_chunked_prefill": options.enable_chunked_prefill,
        "enable_prefix_caching": options.enable_prefix_caching,
        "decode_slots": options.decode_slots or base.get("decode_slots"),
        "max_model_len": options.max_model_len,
        "watermark": options.watermark,
        "data_parallel_size": options.data_parallel_size or int(base.get("data_parallel_size", 1)),
    }
    usable = (blocks - 1) * block_size
    core = {
        "cost": {key: base["cost"][key] for key in COST_KEYS},
        "kv_tokens": usable,
        "reserve_full_prompt": options.scheduler_reserve_full_isl,
        **limits,
    }
    stated = {
        "engine": name,
        "gpu": base.get("gpu"),
        "model": base.get("model"),
        "cost_model": core["cost"],
        "kv_tokens": blocks * block_size,
        "kv_tokens_usable": usable,
        "scheduler_reserve_full_isl": options.scheduler_reserve_full_isl,
        **limits,
    }
    return core, stated
