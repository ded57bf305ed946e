"""A KV cache that is short, on the real vLLM: stock, admission control alone, and the plugin as it is by default.

All requests are there at once, once with forced lengths, which the plugin knows, and once with answers that end by
themselves, of which it knows what earlier ones of its own have taught it. The engines take turns of a few steps; every
engine answers the same prompts, and the answers are compared token by token.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from vllm_engine import Engine, opened, random_prompts, spread, take_turns

ENGINES: dict[str, dict[str, Any] | None] = {
    "stock": None,
    "admission alone": {"mode": "armed", "levers": ["admission"]},
    "leap": {"mode": "armed"},
}


SUBJECTS = (
    "rivers",
    "bread",
    "the moon",
    "trains",
    "bees",
    "glass",
    "winter",
    "maps",
    "salt",
    "music",
    "bridges",
    "ink",
)
TASKS = (
    "Name one fact about {}.",
    "Write two short sentences about {}.",
    "List {n} words that have to do with {}.",
    "Explain {} to a child in {n} sentences.",
    "Write a story of {n} paragraphs about {}.",
)


def forced(n: int, longest: int, seed: int) -> list[dict[str, Any]]:
    """Lengths as real ones are spread."""
    rng = np.random.default_rng(seed)
    lengths = np.clip(np.rint(80 * np.exp(0.8 * rng.normal(size=n))), 8, longest).astype(int).tolist()
    return [
        {"tokens": prompt, "sampling": {"temperature": 0.0, "max_tokens": length, "ignore_eos": True}}
        for prompt, length in zip(random_prompts(rng, n, 16, 32), lengths, strict=True)
    ]


def natural(engine: Engine, n: int, longest: int, seed: int) -> list[dict[str, Any]]:
    """Questions whose answers end by themselves, short and long ones."""
    rng = np.random.default_rng(seed)
    texts = [str(rng.choice(TASKS)).format(rng.choice(SUBJECTS), n=rng.integers(2, 12)) for _ in range(n)]
    sampling = {"temperature": 0.0, "max_tokens": longest}
    return [{"tokens": tokens, "sampling": sampling} for tokens in engine.tokens(texts)]


def numbers(done: Sequence[dict[str, Any]], report: dict[str, Any]) -> dict[str, float]:
    e2el = [r["end_s"] - r["arrival_s"] for r in done]
    return {
        "mean PTL (ms)": float(np.mean([1e3 * s / r["tokens"] for s, r in zip(e2el, done, strict=True)])),
        "mean E2EL (s)": float(np.mean(e2el)),
        "P99 E2EL (s)": float(np.percentile(e2el, 99)),
        "output tokens/s": sum(r["tokens"] for r in done) / max(r["end_s"] for r in done),
        "preemptions": float(report["preemptions"]),
        "tokens computed again": float(report["recomputed_tokens"]),
    }


def turn(processes: dict[str, Engine], requests: list[dict[str, Any]], *, back: bool) -> dict[str, dict[str, Any]]:
    """One repeat: the numbers of each engine, and what it answered."""
    names = list(processes)[:: -1 if back else 1]
    for name in names:
        processes[name].begin(requests)
    done = dict(zip(names, take_turns([processes[name] for name in names]), strict=True))
    return {
        name: {
            "numbers": numbers(done[name], processes[name].report()),
            "answers": [request["token_ids"] for request in done[name]],
        }
        for name in processes
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="directory of a model")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--blocks", type=int, default=60, help="KV blocks of 32 tokens (default 60)")
    parser.add_argument("--longest", type=int, default=400, help="tokens of the longest answers (default 400)")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()

    console = Console(width=120)
    common = {
        "max_model_len": 32 + arguments.longest,
        "max_num_batched_tokens": 512,
        "max_num_seqs": 64,
        "num_gpu_blocks_override": arguments.blocks,
        "seed": 0,
    }
    with opened(arguments.model, {name: {"leap": leap, **common} for name, leap in ENGINES.items()}) as processes:
        asks = processes["stock"]
        kinds = {
            "forced lengths": lambda seed: forced(arguments.requests, arguments.longest, seed),
            "answers that end by themselves": lambda seed: natural(asks, arguments.requests, arguments.longest, seed),
        }
        for what, requests_of in kinds.items():
            if what != "forced lengths":
                # Lengths of their own to go by, as a server has that has run for a while.
                turn(processes, requests_of(arguments.seed + 100), back=False)
            runs = [
                turn(processes, requests_of(arguments.seed + repeat), back=repeat % 2 == 1)
                for repeat in range(arguments.repeats)
            ]
            title = f"{what}: {arguments.repeats} repeats of {arguments.requests} requests, all there at 0"
            table = Table(title, title=f"{arguments.blocks} KV blocks of 32 tokens: mean and range")
            for name in ENGINES:
                table.add_column(name, justify="right")
            for metric in runs[0]["stock"]["numbers"]:
                table.add_row(metric, *(spread([run[name]["numbers"][metric] for run in runs]) for name in ENGINES))
            table.add_section()
            for name in list(ENGINES)[1:]:
                pairs = [
                    pair for run in runs for pair in zip(run[name]["answers"], run["stock"]["answers"], strict=True)
                ]
                same = sum(ours == stock for ours, stock in pairs)
                table.add_row(f"answers as stock's, {name}", *("" for _ in range(2)), f"{same} of {len(pairs)}")
            console.print(table)


if __name__ == "__main__":
    main()
