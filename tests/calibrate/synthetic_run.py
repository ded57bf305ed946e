"""Measured runs made by the simulator itself, in the files of a real one, so that the true coefficients are known; and small
ones by hand."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from leap_rs import _leap
from leap_rs.calibrate.measured import EngineFacts, MeasuredRun, Observed
from leap_rs.replay.engines import presets, resolve
from leap_rs.replay.options import build

TRUTH = "a100-llama-8b"
LIMITS = {"max_num_seqs": 48, "max_num_batched_tokens": 2048}
KV_TOKENS = 160_016  # as vLLM counts: 10,001 blocks of 16
UNIX_ZERO, ENGINE_ZERO = 1_787_267_980.25, 27_536.5


def true_cost() -> dict[str, float]:
    return dict(presets()[TRUTH]["cost"])


def write_run(
    folder: Path, arrival_s: np.ndarray, prompt: np.ndarray, output: np.ndarray, *, lag_s: np.ndarray | float = 0.0
) -> Path:
    """The run of an engine with the true coefficients that had each request `lag_s` after the client sent it."""
    folder.mkdir(parents=True, exist_ok=True)
    queued = arrival_s + lag_s
    order = np.argsort(queued, kind="stable")
    columns = {
        "arrival_s": queued[order],
        "prompt_tokens": prompt[order].astype(np.uint32),
        "output_tokens": output[order].astype(np.uint32),
    }
    core, _ = resolve(build({"engine": TRUTH, "kv_tokens": KV_TOKENS, **LIMITS}))
    out = _leap.simulate(columns, json.dumps(core))
    first, last = np.empty(len(order)), np.empty(len(order))
    first[order], last[order] = out["first_token_s"], out["finish_s"]
    rows = [
        {
            "request_id": f"bench-{i}",
            "input_toks": int(prompt[i]),
            "output_toks": int(output[i]),
            "arrival_time": UNIX_ZERO + float(arrival_s[i]),
            "queued_ts": ENGINE_ZERO + float(queued[i]),
            "scheduled_ts": ENGINE_ZERO + float(queued[i]),
            "first_token_ts": ENGINE_ZERO + float(first[i]),
            "last_token_ts": ENGINE_ZERO + float(last[i]),
        }
        for i in range(len(arrival_s))
    ]
    write_lines(folder / "requests.jsonl", rows)
    meta = {
        "model": "meta-llama/Llama-3.1-8B",
        "engine_kwargs": {**LIMITS, "data_parallel_size": 1},
        "kv_cache": {"num_gpu_blocks": KV_TOKENS // 16, "block_size": 16, "num_kv_tokens": KV_TOKENS},
        "hardware": {"device_name": "NVIDIA A100-SXM4-80GB"},
    }
    (folder / "meta.json").write_text(json.dumps(meta))
    return folder


def write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def loaded(seed: int = 1, count: int = 160) -> dict[str, np.ndarray]:
    """Bursts that fill the engine and pauses in which it drains, twice, so that both halves see every load."""
    random = np.random.default_rng(seed)
    gaps = np.where(np.arange(count) % 80 < 55, random.exponential(0.05, count), random.exponential(1.2, count))
    return {
        "arrival_s": np.cumsum(gaps),
        "prompt": random.integers(20, 3500, count),
        "output": random.integers(20, 500, count),
    }


def alone(seed: int = 2, count: int = 24) -> dict[str, np.ndarray]:
    """Requests so far apart that no two are ever in the engine together."""
    random = np.random.default_rng(seed)
    return {
        "arrival_s": 20.0 * np.arange(count),
        "prompt": random.integers(20, 3500, count),
        "output": random.integers(20, 500, count),
    }


def off_by(factors: Mapping[str, float]) -> dict[str, float]:
    """The true coefficients, each times a factor."""
    return {key: value * factors[key] for key, value in true_cost().items()}


def run_of(
    first: list[float],
    last: list[float],
    tokens: list[int],
    observed: Observed | None = None,
    late: float = 0.0,
    lag: float = 0.0,
) -> MeasuredRun:
    n = len(first)
    queued = np.arange(n, dtype=np.float64)
    return MeasuredRun(
        path=Path("run"),
        name="run",
        format="test",
        planned_s=queued - late - lag,
        sent_s=queued - lag,
        queued_s=queued,
        first_token_s=np.array(first),
        last_token_s=np.array(last),
        requests=pl.DataFrame({"prompt_tokens": [1] * n, "output_tokens": tokens}),
        block_size=16,
        facts=EngineFacts(),
        observed=observed,
    )


def good_rows() -> list[dict[str, Any]]:
    return [
        {
            "request_id": f"bench-{i}",
            "input_toks": 100 + i,
            "output_toks": 5,
            "arrival_time": 1.7e9 + i,
            "queued_ts": 500.0 + i + 0.002,
            "first_token_ts": 500.3 + i,
            "last_token_ts": 500.5 + i,
        }
        for i in range(6)
    ]
