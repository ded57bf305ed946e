"""What a search comes down to for a server: the plugin's options, and the command that replays the same policy."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

from leap_rs.replay.options import Options

from .space import Candidate

SCHEDULER = "leap_rs.vllm.LeapScheduler"
# What the commands say themselves, and what changes no result.
_OWN = ("policies", "load", "sweep", "max_num_seqs", "decode_slots", "num_prompts", "threads")


def server_options(candidate: Candidate, options: Options) -> dict[str, Any]:
    """What to give to vLLM for a candidate; fcfs is a plugin that only watches."""
    leap: dict[str, Any] = {"mode": "shadow"}
    if candidate.levers:
        leap = {
            "levers": list(candidate.levers),
            **candidate.ordering(),
            **candidate.numbers(),
        }
        if candidate.decode_slots is not None:
            leap["decode_slots"] = candidate.decode_slots
        if options.wait_cap_s is not None:
            leap["wait_cap_s"] = options.wait_cap_s
    config = {"leap": leap}
    plain = ["vllm", "serve", "MODEL", "--max-num-seqs", str(candidate.max_num_seqs)]
    words = [*plain, "--scheduler-cls", SCHEDULER, "--additional-config", json.dumps(config)]
    return {
        "max_num_seqs": candidate.max_num_seqs,
        "additional_config": config,
        "command": shlex.join(words),
        "plain_command": shlex.join(plain),
    }


def replay_command(
    trace: Path | None, candidate: Candidate, options: Options, *, load: float | None, num_prompts: int | None
) -> str | None:
    """The `leap-replay` call that shows a candidate beside fcfs on the whole trace; none for what no file holds."""
    if trace is None or isinstance(options.cost_model, dict):
        return None
    words = ["leap-replay", str(trace)]
    if load is not None:
        words += ["--load", f"{load:.4g}"]
    if num_prompts is not None:
        words += ["--num-prompts", str(num_prompts)]
    words += ["--policy", "fcfs"] if candidate.levers else []
    words += ["--policy", candidate.policy, "--max-num-seqs", str(candidate.max_num_seqs)]
    if candidate.decode_slots is not None:
        words += ["--decode-slots", str(candidate.decode_slots)]
    for name, field in Options.model_fields.items():
        value = getattr(options, name)
        if name not in _OWN and value != field.get_default(call_default_factory=True):
            words += _spelled(f"--{name.replace('_', '-')}", value)
    return shlex.join(words)


def _spelled(option: str, value: Any) -> list[str]:
    if isinstance(value, bool):
        return [option if value else option.replace("--", "--no-", 1)]
    if isinstance(value, dict):
        sign = ":" if option == "--goodput" else "="
        return [word for key, item in value.items() for word in (option, f"{key}{sign}{_number(item)}")]
    if isinstance(value, tuple):
        return [option, ",".join(_number(item) for item in value)]
    return [option, _number(value)]


def _number(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
