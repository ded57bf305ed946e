"""The scheduler's own time a step: vLLM's real scheduler under the tests' worker, with 5,000 requests waiting.

Stock, the plugin in shadow and the plugin armed (its default levers, lengths known) are given the same requests and take
turns of a step, each timed in CPU time of its thread. Every seat taken; a KV cache that is short, where admission holds the
first of the queue back in every step and stock lets in twice as many; half of the residents without a decode slot; new
weights with every step; texts read of those who wait; and all who wait put off, by a limit of adapters or by grammars that
are not ready. The bound is what the plugin may add: a tenth of stock's time, or 0.3 ms where that is more.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
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
SHARE, LEAST_MS = 0.1, 0.3
"""What a step may take over stock's: a share of it, or so many milliseconds where that is more."""
READ_A_STEP = 4
"""Texts that an encoder on one core reads in a step of some 40 ms."""
NEVER_S = 1e9


class Telling(Teller):
    """Knows the lengths, and says of some requests that more is known."""

    def __init__(self, jobs: list[Job]) -> None:
        super().__init__(jobs)
        self.told: list[str] = []

    def fresh(self) -> list[str]:
        told, self.told = self.told, []
        return told


@dataclass(frozen=True)
class Case:
    """What a run is about."""

    name: str
    residents: int
    short: bool = False
    gated: bool = False
    publishes: bool = False
    """Whether all predictions change with every step."""
    reads: bool = False
    """Whether more becomes known of some who wait with every step."""
    adapters: bool = False
    grammars: bool = False

    def setup(self) -> Setup:
        # Short: all that are inside grow into the whole cache, and no more.
        blocks = self.residents * -(-(PROMPT + OUTPUT) // BLOCK) + 2 if self.short else 10**6
        seats = 2 * self.residents if self.short or self.adapters or self.grammars else self.residents
        return Setup(
            max_num_seqs=seats,
            max_num_batched_tokens=8192,
            max_model_len=PROMPT + OUTPUT + 8,
            blocks=blocks,
            prefix_caching=False,
            max_loras=1 if self.adapters else None,
        )

    def options(self, options: dict[str, Any] | None) -> dict[str, Any] | None:
        return options if options is None or not self.gated else {**options, "decode_slots": self.residents // 2}

    def jobs(self, waiting: int) -> list[Job]:
        rng = random.Random(self.residents + waiting)
        jobs = [
            Job(f"r{i}", 0.0, prompt_of(rng, PROMPT), length=OUTPUT, max_tokens=OUTPUT)
            for i in range(self.residents + waiting)
        ]
        inside, outside = jobs[: self.residents], jobs[self.residents :]
        if self.adapters:
            inside = [replace(job, lora=1) for job in inside]
            outside = [replace(job, lora=2 + i % 7) for i, job in enumerate(outside)]
        if self.grammars:
            outside = [replace(job, grammar_s=NEVER_S) for job in outside]
        return inside + outside


CASES = [
    Case(f"{residents}, {name}", residents, **what)
    for residents in (256, 1024)
    for name, what in (
        ("every seat taken", {}),
        ("KV cache short", {"short": True}),
        ("half gated", {"gated": True}),
        ("KV cache short, half gated", {"short": True, "gated": True}),
        ("new weights", {"publishes": True}),
        ("KV cache short, new weights", {"short": True, "publishes": True}),
        ("texts read", {"reads": True}),
    )
] + [
    Case("64, all put off by max_loras", 64, adapters=True),
    Case("64, all put off by grammars", 64, grammars=True),
    Case("64, put off by max_loras, new weights", 64, adapters=True, publishes=True),
]


class Timed:
    """An engine of which `schedule` is timed."""

    def __init__(self, case: Case, options: dict[str, Any] | None, jobs: list[Job]) -> None:
        setup = replace(case.setup(), leap=case.options(options))
        self.case = case
        self.brain = None if options is None else Telling(jobs)
        self.engine = FakeEngine(setup, self.brain)
        for job in jobs:
            self.engine.add(job)
        self.seconds: list[float] = []
        schedule: Callable[[], Any] = self.engine.scheduler.schedule

        def timed() -> Any:
            began = time.thread_time()
            output = schedule()
            self.seconds.append(time.thread_time() - began)
            return output

        self.engine.scheduler.schedule = timed

    def step(self) -> int:
        """Runs a step; returns how many are inside."""
        if self.brain is not None:
            self.brain.version += self.case.publishes
            if self.case.reads:
                at = len(self.seconds) * READ_A_STEP
                self.brain.told = [f"r{-1 - i % 1000 + len(self.engine.jobs)}" for i in range(at, at + READ_A_STEP)]
        _, output, result = self.engine._compose()
        self.engine.now += 1.0
        self.engine._take(output, result)
        return len(self.engine.scheduler.running)


def measure(case: Case, waiting: int, steps: int) -> list[str]:
    jobs = case.jobs(waiting)
    runs = {name: Timed(case, options, jobs) for name, options in ENGINES.items()}
    # All are prefilled, and some steps more.
    for _ in range(2 * case.residents * PROMPT // 8192 + 8):
        inside = [run.step() for run in runs.values()]
    for run in runs.values():
        run.seconds.clear()
    for _ in range(steps):
        inside = [run.step() for run in runs.values()]
    faults = [fault for name in ("shadow", "armed") if (fault := runs[name].engine.scheduler.leap_guard.fault)]
    if faults:
        raise RuntimeError(f"{case.name}: after a fault the plugin costs nothing: {', '.join(faults)}")
    times = {name: np.percentile(np.array(run.seconds) * 1e3, (50, 25, 75)) for name, run in runs.items()}
    stock = times["stock"][0]
    bound = stock + max(SHARE * stock, LEAST_MS)
    over = ["yes" if times[name][0] <= bound else f"{times[name][0] - bound:+.2f}" for name in ("shadow", "armed")]
    shown = [f"{m:.2f} [{low:.2f}, {high:.2f}]" for m, low, high in times.values()]
    return [case.name, " / ".join(map(str, dict.fromkeys(inside))), *shown, f"{bound:.2f}", *over]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--waiting", type=int, default=5000)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--only", default="", help="the cases whose name has this in it")
    arguments = parser.parse_args()

    table = Table(title=f"schedule(), ms of CPU time: median and quartiles of {arguments.steps} steps")
    for column in ("case", "inside", *ENGINES, "bound", "shadow within", "armed within"):
        table.add_column(column, justify="right")
    for case in CASES:
        if arguments.only in case.name:
            table.add_row(*measure(case, arguments.waiting, arguments.steps))
    Console(width=160).print(table)


if __name__ == "__main__":
    main()
