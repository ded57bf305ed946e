"""The scheduler's own time a step: vLLM's real scheduler under the tests' worker, with 5,000 requests waiting.

Stock, the plugin in shadow and the plugin armed (its default levers, lengths known) are given the same requests and take
turns of a step, each timed in CPU time of its thread: once with every seat taken, and once with seats free and a KV cache
that is short, where admission holds the first of the queue back in every step and stock lets in twice as many.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "vllm"))

from fake_setup import BLOCK, Job, Setup, prompt_of
from fake_worker import FakeEngine
from scenarios import Teller

PROMPT, OUTPUT = 64, 400
ENGINES: dict[str, dict[str, Any] | None] = {"stock": None, "shadow": {"mode": "shadow"}, "armed": {"mode": "armed"}}


def jobs_of(n: int) -> list[Job]:
    rng = random.Random(n)
    return [Job(f"r{i}", 0.0, prompt_of(rng, PROMPT), length=OUTPUT, max_tokens=OUTPUT) for i in range(n)]


class Timed:
    """An engine of which `schedule` is timed."""

    def __init__(self, setup: Setup, jobs: list[Job]) -> None:
        self.engine = FakeEngine(setup, None if setup.leap is None else Teller(jobs))
        for job in jobs:
            self.engine.add(job)
        self.seconds: list[float] = []
        schedule = self.engine.scheduler.schedule

        def timed() -> Any:
            began = time.thread_time()
            output = schedule()
            self.seconds.append(time.thread_time() - began)
            return output

        self.engine.scheduler.schedule = timed

    def step(self) -> int:
        """Runs a step; returns how many are inside."""
        _, output, result = self.engine._compose()
        self.engine.now += 1.0
        self.engine._take(output, result)
        return len(self.engine.scheduler.running)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--waiting", type=int, default=5000)
    parser.add_argument("--steps", type=int, default=60)
    arguments = parser.parse_args()

    table = Table(title=f"schedule(), ms of CPU time: median and quartiles of {arguments.steps} steps")
    for column in ("residents", *ENGINES, "shadow / stock", "armed / stock"):
        table.add_column(column, justify="right")
    for residents in (256, 1024):
        for what in ("every seat taken", "KV cache short"):
            short = what == "KV cache short"
            # Short: all that are inside grow into the whole cache, and no more.
            blocks = residents * -(-(PROMPT + OUTPUT) // BLOCK) + 2 if short else 10**6
            setup = Setup(
                max_num_seqs=2 * residents if short else residents,
                max_num_batched_tokens=8192,
                max_model_len=PROMPT + OUTPUT + 8,
                blocks=blocks,
                prefix_caching=False,
            )
            jobs = jobs_of(residents + arguments.waiting)
            runs = {name: Timed(replace(setup, leap=leap), jobs) for name, leap in ENGINES.items()}
            # All are prefilled, and some steps more.
            for _ in range(2 * residents * PROMPT // 8192 + 8):
                inside = [run.step() for run in runs.values()]
            for run in runs.values():
                run.seconds.clear()
            for _ in range(arguments.steps):
                inside = [run.step() for run in runs.values()]
            times = {name: np.percentile(np.array(run.seconds) * 1e3, (50, 25, 75)) for name, run in runs.items()}
            counts = " / ".join(map(str, dict.fromkeys(inside)))
            shown = [f"{m:.2f} [{low:.2f}, {high:.2f}]" for m, low, high in times.values()]
            ratios = [f"{times[name][0] / times['stock'][0]:.2f}" for name in ("shadow", "armed")]
            table.add_row(f"{counts}, {what}", *shown, *ratios)
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
