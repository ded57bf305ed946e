"""What the plugin costs a step of the real vLLM: stock, shadow mode, and armed with a decode slot for every sequence.

The three engines are given the same requests and take turns of a few steps. Half of the requests have forced lengths, half
end by themselves or at their cap, so that predicting, learning and rescoring are part of it; more wait than are seated.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from vllm_engine import opened, random_prompts, spread, take_turns

WARM_UP = 288
"""Requests before it counts: mean and scale of the features come from the first 256."""


def requests_of(n: int, seed: int) -> list[dict[str, Any]]:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(24, 41, n).tolist()
    return [
        {"tokens": prompt, "sampling": {"temperature": 0.0, "max_tokens": length, "ignore_eos": i % 2 == 0}}
        for i, (prompt, length) in enumerate(zip(random_prompts(rng, n, 16, 32), lengths, strict=True))
    ]


def warm_up(seed: int) -> list[dict[str, Any]]:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(2, 5, WARM_UP).tolist()
    prompts = random_prompts(rng, WARM_UP, 4, 12)
    return [
        {"tokens": prompt, "sampling": {"temperature": 0.0, "max_tokens": length}}
        for prompt, length in zip(prompts, lengths, strict=True)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="directory of a model")
    parser.add_argument("--requests", type=int, default=96)
    parser.add_argument("--seats", type=int, default=32, help="max_num_seqs (default 32); as many more wait")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()

    common = {"max_model_len": 128, "max_num_seqs": arguments.seats, "max_num_batched_tokens": 256, "seed": 0}
    engines: dict[str, dict[str, Any]] = {
        "stock": {"leap": None},
        "shadow": {"leap": {"mode": "shadow"}},
        "armed": {"leap": {"mode": "armed", "decode_slots": arguments.seats}},
    }
    reports: dict[str, list[dict[str, float]]] = {name: [] for name in engines}
    with opened(arguments.model, {name: {**common, **options} for name, options in engines.items()}) as processes:
        for repeat in range(-1, arguments.repeats):
            requests = (
                requests_of(arguments.requests, arguments.seed + repeat) if repeat >= 0 else warm_up(arguments.seed)
            )
            for process in processes.values():
                process.begin(requests, 2 * arguments.seats)
            # Who comes first changes, so that nobody always has the same one before it.
            names = list(engines)[repeat % 3 :] + list(engines)[: repeat % 3]
            finished = dict(zip(names, take_turns([processes[name] for name in names]), strict=True))
            for name in names if repeat >= 0 else ():
                report = processes[name].report()
                tokens = sum(request["tokens"] for request in finished[name])
                reports[name].append({**report, "tokens": tokens})
        learned = {name: processes[name].metrics() for name in ("shadow", "armed")}

    table = Table("engine", title=f"{arguments.repeats} repeats of {arguments.requests} requests: mean and range")
    measures = {
        "ms a step": lambda r: 1e3 * r["step_s"] / r["steps"],
        "CPU ms a step": lambda r: 1e3 * r["cpu_s"] / r["steps"],
        "output tokens/s": lambda r: r["tokens"] / r["clock_s"],
    }
    columns = [column for measure in measures for column in (measure, "x stock")]
    columns += ["CPU ms a step in the scheduler", "steps", "tokens"]
    for column in columns:
        table.add_column(column, justify="right")
    for name, rows in reports.items():
        row = []
        for measure in measures.values():
            values, stock = ([measure(r) for r in reports[engine]] for engine in (name, "stock"))
            row += [spread(values, 1), spread([a / b for a, b in zip(values, stock, strict=True)], 2)]
        row.append(spread([1e3 * r["scheduler_s"] / r["steps"] for r in rows]))
        table.add_row(name, *row, *("/".join(f"{r[what]:.0f}" for r in rows) for what in ("steps", "tokens")))
    console = Console(width=200)
    console.print(table)
    for name, numbers in learned.items():
        kinds = ("predictions/prompt", "predictions/state", "updates/state", "rescored_requests")
        console.print(f"{name}: {', '.join(f'{kind} {numbers[kind]:.0f}' for kind in kinds)}")


if __name__ == "__main__":
    main()
