"""The commands as a shell starts them, with small inputs for each."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import polars as pl

from leap_rs.trace import write_trace

WORDS = {
    "replay": ["t.csv", "--policy", "fcfs", "--policy", "sjf-oracle", "--seeds", "1"],
    "trace": ["describe", "t.csv"],
    "fit": ["t.parquet", "--out", "r.safetensors", "--eval", "t.parquet"],
    "calibrate": ["measured.parquet", "--out", "cost.json", "--jitters", "1"],
    "record": ["model", "p.jsonl", "--column", "none", "--out", "o.parquet"],
}
"""What each command does something with; what `leap-record` does without an engine is to refuse."""
C_LOCALE = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


def write_inputs(directory: Path) -> None:
    rng = np.random.default_rng(0)
    features = rng.normal(size=(60, 2)).astype(np.float32)
    arrivals, lengths = np.arange(60) * 0.5, np.arange(1, 61)
    columns = {"arrival_s": arrivals, "prompt_tokens": np.full(60, 5), "output_tokens": lengths}
    write_trace(pl.DataFrame({**columns, "features": features}), directory / "t.parquet")
    first = arrivals + 0.03
    times = {
        "measured_queued_s": arrivals + 0.001,
        "measured_first_token_s": first,
        "measured_last_token_s": first + 0.009 * (lengths - 1),
    }
    write_trace(pl.DataFrame({**columns, **times}), directory / "measured.parquet")
    rows = "".join(f"{i},{5 + i % 3},{1 + i % 9}\n" for i in range(20))
    (directory / "t.csv").write_text(f"arrived_at,num_prefill_tokens,num_decode_tokens\n{rows}")
    (directory / "p.jsonl").write_text('{"prompt": "one"}\n')


def command(name: str, *words: str) -> list[str]:
    """As the script that is installed calls it."""
    return [sys.executable, "-c", f"from leap_rs.commands import {name}; {name}()", *words]


def run(
    name: str, words: list[str], directory: Path, shell: str = "", **environment: str
) -> subprocess.CompletedProcess[str]:
    """Runs a command in a shell, without a terminal; `shell` is what stands behind it on the line."""
    line = ["bash", "-c", f'"$@" {shell}', "bash", *command(name, *words)]
    return subprocess.run(
        line,
        cwd=directory,
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
        encoding="utf-8",
        errors="surrogateescape",
    )
