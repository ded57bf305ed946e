"""The order on the real vLLM against stock: all requests there at once, with forced lengths, which the plugin then knows.

First the queue lever, 8 sequences with 64 requests waiting; then the slots lever, 8 decode slots among 64 residents. Both
engines of a setting are given the same requests and take turns of a few steps; each repeat has requests of its own.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from vllm_engine import opened, random_prompts, spread, take_turns

Finished = Sequence[dict[str, Any]]

SETTINGS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "queue lever: 8 sequences, 64 waiting": (72, {"max_num_seqs": 8}, {"levers": ["queue"]}),
    "slots lever: 8 slots, 64 residents": (64, {"max_num_seqs": 64}, {"levers": ["slots"], "decode_slots": 8}),
}
METRICS: dict[str, Callable[[Finished], float]] = {
    "mean PTL (ms)": lambda done: float(np.mean([1e3 * (r["end_s"] - r["arrival_s"]) / r["tokens"] for r in done])),
    "mean TTFT (s)": lambda done: float(np.mean([r["first_s"] - r["arrival_s"] for r in done])),
    "mean E2EL (s)": lambda done: float(np.mean([r["end_s"] - r["arrival_s"] for r in done])),
    "P99 E2EL (s)": lambda done: float(np.percentile([r["end_s"] - r["arrival_s"] for r in done], 99)),
    "output tokens/s": lambda done: sum(r["tokens"] for r in done) / max(r["end_s"] for r in done),
}


def requests_of(n: int, longest: int, seed: int) -> list[dict[str, Any]]:
    """Lengths as real ones are spread: most are short, and a few make up much of the work."""
    rng = np.random.default_rng(seed)
    lengths = np.clip(np.rint(32 * np.exp(rng.normal(size=n))), 4, longest).astype(int).tolist()
    return [
        {"tokens": prompt, "sampling": {"temperature": 0.0, "max_tokens": length, "ignore_eos": True}}
        for prompt, length in zip(random_prompts(rng, n, 16, 32), lengths, strict=True)
    ]


def quartiles(done: Finished) -> list[list[dict[str, Any]]]:
    ranked = sorted(done, key=lambda request: request["tokens"])
    return [[ranked[i] for i in part] for part in np.array_split(np.arange(len(ranked)), 4)]


def add_rows(table: Table, name: str, call: Callable[[Finished], float], runs: dict[str, list[Finished]]) -> None:
    stock, ours = ([call(done) for done in runs[engine]] for engine in ("stock", "leap"))
    table.add_row(name, spread(stock), spread(ours), spread([b / a for a, b in zip(stock, ours, strict=True)]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="directory of a model")
    parser.add_argument("--longest", type=int, default=160, help="tokens of the longest answers (default 160)")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()

    console = Console(width=120)
    for title, (n, options, leap) in SETTINGS.items():
        common = {"max_model_len": 32 + arguments.longest, "max_num_batched_tokens": 512, "seed": 0, **options}
        engines = {"stock": {"leap": None, **common}, "leap": {"leap": {"mode": "armed", **leap}, **common}}
        runs: dict[str, list[Finished]] = {name: [] for name in engines}
        with opened(arguments.model, engines) as processes:
            for process in processes.values():
                process.run(requests_of(8, 8, arguments.seed))
            for repeat in range(arguments.repeats):
                names = list(engines) if repeat % 2 == 0 else list(engines)[::-1]
                for name in names:
                    processes[name].begin(requests_of(n, arguments.longest, arguments.seed + repeat))
                for name, done in zip(names, take_turns([processes[name] for name in names]), strict=True):
                    runs[name].append(done)
        table = Table(title, title=f"{arguments.repeats} repeats of {n} requests, all there at 0: mean and range")
        for column in ("stock", "leap", "leap / stock"):
            table.add_column(column, justify="right")
        for name, call in METRICS.items():
            add_rows(table, name, call, runs)
        table.add_section()
        for i in range(4):
            parts = [quartiles(done)[i] for done in runs["stock"]]
            span = f"{min(p[0]['tokens'] for p in parts)} to {max(p[-1]['tokens'] for p in parts)} tokens"
            for metric in ("mean PTL (ms)", "mean E2EL (s)"):
                add_rows(
                    table,
                    f"{metric}, {span}",
                    lambda d, m=metric, q=i: METRICS[m](quartiles(d)[q]),
                    runs,
                )
        console.print(table)


if __name__ == "__main__":
    main()
