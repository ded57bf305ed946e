"""The forward model: runs simulated under given coefficients, over a few seeded jitters of their arrivals.

Under preemption the scheduler is chaotic: a request that comes a millisecond later may move another one's tokens by seconds.
Averages over jitters are what a fit can follow.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from leap_rs import _leap
from leap_rs.replay.columns import to_columns

from .measured import Floats, MeasuredRun

Cost = Mapping[str, float]
LEAD_S = 1.0  # room before the first request, so that no jittered arrival is negative


@dataclass(frozen=True)
class Simulated:
    """One simulation of one run, in the order and on the clock of the run."""

    admitted_s: Floats
    first_token_s: Floats
    last_token_s: Floats
    preemptions: int
    timeline: tuple[Floats, Floats, Floats] | None = None
    """Times, requests waiting and requests resident from each time on."""


class Forward:
    """Simulates every run under every jitter, in threads (the core gives the GIL away). Use it in a `with` block.

    `known` are the requests of each run whose measured times may be used.
    """

    def __init__(
        self,
        runs: Sequence[MeasuredRun],
        cores: Sequence[Mapping[str, Any]],
        known: Sequence[npt.NDArray[np.bool_]],
        *,
        jitters: int,
        jitter_s: float,
        seed: int,
    ) -> None:
        self.runs = runs
        self._cores = cores
        self.jitters = jitters
        self._jitter_s = jitter_s
        self._seed = seed
        self._columns: list[dict[str, Any]] = []
        self.notes: list[str] = []
        for run, core, rows in zip(runs, cores, known, strict=True):
            frame = run.requests.with_columns(arrival_s=run.engine_arrivals(rows))
            columns, notes = to_columns(frame, trace_block=run.block_size, engine_block=int(core["block_size"]))
            self._columns.append(columns)
            self.notes.extend(f"{run.name}: {note}" for note in notes)
        self._pool = ThreadPoolExecutor(os.cpu_count() or 1)

    def __enter__(self) -> Forward:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        self._pool.shutdown(cancel_futures=True)

    def simulate(
        self, costs: Sequence[Sequence[Cost]], *, fresh: bool = False, timeline: bool = False
    ) -> list[list[list[Simulated]]]:
        """For each entry of `costs` and each run, one simulation a jitter under its own cost (or the one that is given).

        `fresh`: jitters that no fit has seen.
        """
        arrivals = [self._arrivals(i, fresh) for i in range(len(self.runs))]
        jobs = [
            [
                [
                    self._pool.submit(self._one, i, each[j % len(each)], times, timeline)
                    for j, times in enumerate(arrivals[i])
                ]
                for i in range(len(self.runs))
            ]
            for each in costs
        ]
        return [[[job.result() for job in row] for row in rows] for rows in jobs]

    def _arrivals(self, run: int, fresh: bool) -> list[Floats]:
        random = np.random.default_rng([self._seed, run, int(fresh)])
        times: Floats = self._columns[run]["arrival_s"]
        noise = random.normal(0.0, self._jitter_s, (self.jitters, len(times)))
        # The engine's order is that of its queue, whatever the jitter: sorted times keep each request's place.
        return list(np.maximum(np.sort(times + LEAD_S + noise, axis=1), 0.0))

    def _one(self, run: int, cost: Cost, arrival_s: Floats, timeline: bool) -> Simulated:
        columns = {**self._columns[run], "arrival_s": arrival_s}
        engine = json.dumps({**self._cores[run], "cost": dict(cost)}, allow_nan=False)
        out = _leap.simulate(columns, engine, timeline=timeline)

        def back(name: str) -> Floats:
            times: Floats = out[name] - LEAD_S
            return times

        return Simulated(
            admitted_s=back("admitted_s"),
            first_token_s=back("first_token_s"),
            last_token_s=back("finish_s"),
            preemptions=int(out["preemptions"].sum()),
            timeline=(back("timeline_s"), out["timeline_waiting"], out["timeline_resident"]) if timeline else None,
        )


def step_values(times: Floats, values: npt.NDArray[Any], at: Floats) -> Floats:
    """The value of a step function at each time; 0 before its first entry."""
    index = np.searchsorted(times, at, side="right") - 1
    found: Floats = np.where(index >= 0, values[np.maximum(index, 0)], 0).astype(np.float64)
    return found
