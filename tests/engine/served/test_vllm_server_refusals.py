"""A server that cannot be had as it was asked for: one line, before a model is loaded."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from vllm_server import CLI, DEFAULTS, START_S

from leap_rs.vllm.options import LEVERS

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]

LOADS = ("Starting to load model", "Loading weights", "Loading safetensors")
"""What vLLM says where a model's worker loads it."""


@pytest.mark.parametrize(
    ("leap", "options", "line"),
    [
        (
            {"levers": ["all"]},
            (),
            f"additional_config: leap: levers: unknown lever 'all', expected some of {', '.join(LEVERS)}",
        ),
        (
            {},
            ("--scheduling-policy", "priority"),
            "scheduling policy 'priority': leap-rs has an order of its own and needs fcfs",
        ),
    ],
    ids=["option", "setting"],
)
def test_what_is_wrong_is_told_in_one_line_before_the_model_is_loaded(
    leap: dict[str, object],
    options: tuple[str, ...],
    line: str,
    environment: dict[str, str],
    model: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    command = [sys.executable, CLI, "serve", str(model("qwen2")), "--enforce-eager", "--skip-tokenizer-init"]
    command += [part for name, value in DEFAULTS.items() for part in (f"--{name}", value)]
    command += ["--additional-config", json.dumps({"leap": leap}), *options]
    done = subprocess.run(
        command,
        env={**environment, "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=START_S,
        check=False,
    )
    assert done.returncode != 0
    told = [text for text in done.stdout.splitlines() if line in text]
    assert len(told) == 1, done.stdout[-4000:]
    assert told[0].endswith(f"ConfigError: {line}")
    assert not [text for text in done.stdout.splitlines() if any(loads in text for loads in LOADS)]
