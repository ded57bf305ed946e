"""The search: a coarse grid on one seed, twice the better ones with their neighbours, the best and its own on all seeds.

The best of many noisy numbers flatters, so the bound must hold with the far end of its 95 % interval, among candidates replayed
on all seeds. Seeds deal the same requests anew and say nothing of other traffic, so it must hold in that way on each part of
the searched half as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from leap_rs._leap import ConfigError

from .bound import Bound, key_of
from .measure import Bench, Estimate, Measured
from .space import Candidate, Space

# Candidates that go on after a round, and those replayed on all seeds at a time.
KEPT = 16
FINALISTS = 12
# Seeds of each refinement.
REFINED_ON = (1, 2)
# How far beyond the bound a candidate may lie in a round on few seeds and still go on, and how far inside it no longer
# counts as an advantage.
NEAR = 0.05


@dataclass(frozen=True)
class Check:
    """One bound on one candidate: the ratio to fcfs and its interval."""

    bound: Bound
    ratio: Estimate

    @property
    def holds(self) -> bool:
        """Whether the mean keeps the bound."""
        return self.bound.excess(self.ratio.mean) <= 1

    @property
    def excess(self) -> float:
        """How far beyond the bound the far end of the interval lies; 1 is just at it."""
        ends = self.ratio.ci95 or (self.ratio.mean, self.ratio.mean)
        return self.bound.excess(ends[1] if self.bound.at_most else ends[0])

    def to_dict(self) -> dict[str, Any]:
        """Its entry in a result object."""
        far = self.excess <= 1
        return {"bound": str(self.bound), "ratio": self.ratio.to_dict(), "holds": self.holds, "holds_with_ci95": far}


@dataclass
class Found:
    """What a search ends with."""

    chosen: Measured | None = None
    """The lowest objective that keeps the bound and is below fcfs."""
    at_stock: Measured | None = None
    """The same among those that leave the number of sequences as it is, where the chosen one does not."""
    nearest: Measured | None = None
    """Where none keeps it: the least beyond it."""
    finalists: list[Measured] = field(default_factory=list)
    """Those replayed on all seeds, those not found to break the bound first, then by objective."""
    parts: dict[Candidate, list[list[Check]]] = field(default_factory=dict)
    """The bounds on each part, of finalists that keep them on the whole half and came to be checked."""
    rounds: list[dict[str, int]] = field(default_factory=list)
    """Candidates replayed and seeds of each round."""
    tried: int = 0
    """Distinct candidates replayed."""


def checks(one: Measured, base: Measured, bounds: Sequence[Bound]) -> list[Check]:
    """Every bound on a candidate against fcfs on the same seeds."""
    return [Check(bound, Estimate.of(one.ratio(base, bound.metric))) for bound in bounds]


class Search:
    """A search on one half of a trace; `parts` are that half in pieces, on which a finalist must keep the bound too."""

    def __init__(
        self,
        bench: Bench,
        space: Space,
        bounds: Sequence[Bound],
        objective: str,
        seeds: int,
        progress: Callable[[float], None] | None = None,
        parts: Sequence[Bench] = (),
    ) -> None:
        self._bench, self._space, self._bounds, self._objective, self._seeds = bench, space, bounds, objective, seeds
        self._parts = parts
        self._measured: dict[Candidate, Measured] = {}
        self._found = Found()
        self._progress = progress
        # A guess: how many neighbours are new is known only on the way.
        self._planned = len(space.coarse()) + 6 * KEPT * sum(REFINED_ON) + 3 * FINALISTS * seeds
        for metric in (objective, *(bound.metric for bound in bounds)):
            for one in (bench, *parts):
                if not np.all(np.isfinite(one.fcfs.values[metric])) or np.any(one.fcfs.values[metric] <= 0):
                    where = "this trace" if one is bench else f"part {parts.index(one) + 1} of the searched half"
                    raise ConfigError(
                        f"tune: {key_of(metric)} is 0 or undefined under fcfs on {where}, so nothing can be related to it"
                    )

    @property
    def simulations(self) -> int:
        """Done so far, on the half and its parts."""
        return sum(one.simulations for one in (self._bench, *self._parts))

    def run(self) -> Found:
        """Search the space; a small one is replayed whole, on all seeds."""
        found, base = self._found, self._bench.fcfs
        pool = self._space.candidates()
        if len(pool) > FINALISTS:
            pool = self._round(self._space.coarse(), 1)
            for seeds, stride in zip(REFINED_ON, self._space.strides, strict=True):
                kept = self._kept(pool)
                wider = [other for one in kept for other in self._space.neighbours(one, stride)]
                pool = self._round(dict.fromkeys([*kept, *wider]), seeds)
            best = self._climbed(self._final(pool))
        else:
            best = self._final(pool)
        if best is None:
            found.nearest = min(found.finalists, key=self._excess)
        elif self._value(best) < self._value(base):
            found.chosen = best
            if best.candidate.max_num_seqs != self._space.stock:
                stock = self._final([one for one in pool if one.max_num_seqs == self._space.stock])
                found.at_stock = stock if stock is not None and self._value(stock) < self._value(base) else None
        found.finalists.sort(key=lambda one: (self._excess(one) > 1, self._value(one)))
        found.finalists = distinct(found.finalists)
        found.tried = len(self._measured)
        return found

    def _kept(self, pool: Sequence[Candidate]) -> list[Candidate]:
        """The first of a ranking, half of them with the number of sequences that the engine has."""
        stock = [one for one in pool if one.max_num_seqs == self._space.stock][: KEPT // 2]
        others = [one for one in pool if one not in stock]
        return [*stock, *others[: KEPT - len(stock)]]

    def _round(self, candidates: Iterable[Candidate], seeds: int) -> list[Candidate]:
        """Replay what this needs and give back the promising ones, best first, one of each that do the same."""
        candidates = list(candidates)
        missing = [one for one in candidates if one not in self._measured or self._measured[one].seeds < seeds]
        for one in self._replay(self._bench, missing, seeds):
            self._measured[one.candidate] = one
        self._found.rounds.append({"candidates": len(missing), "seeds": seeds})
        return [one.candidate for one in self._ranked(distinct([self._measured[one] for one in candidates]))]

    def _replay(self, bench: Bench, candidates: Iterable[Candidate], seeds: int) -> list[Measured]:
        before = self.simulations - bench.simulations

        def told(simulations: int) -> None:
            if self._progress is not None:
                self._progress(min((before + simulations) / self._planned, 1.0))

        return bench.measure(candidates, seeds, told)

    def _mean_excess(self, one: Measured) -> float:
        base = self._bench.fcfs
        return max(bound.excess(float(one.ratio(base, bound.metric).mean())) for bound in self._bounds)

    def _ranked(self, measured: Sequence[Measured]) -> list[Measured]:
        """By how many others are at least as good in objective and in bound; where none is near the bound, the nearest."""
        excess = np.array([self._mean_excess(one) for one in measured])
        if not np.any(excess <= 1 + NEAR):
            return [measured[i] for i in np.argsort(excess, kind="stable")]
        near = [i for i in range(len(measured)) if excess[i] <= 1 + NEAR]
        bound = np.maximum(excess[near], 1 - NEAR)
        value = np.array([measured[i].values[self._objective].mean() for i in near])
        better = (bound[None, :] <= bound[:, None]) & (value[None, :] <= value[:, None])
        return [measured[near[i]] for i in np.lexsort((value, better.sum(axis=1)))]

    def _final(self, pool: Sequence[Candidate], *, at_once: bool = False) -> Measured | None:
        """All seeds, some candidates at a time, until one keeps the bound; the best that does."""
        final: list[Measured] = []
        each = len(pool) if at_once else FINALISTS
        for start in range(0, len(pool), each):
            part = list(pool[start : start + each])
            missing = [one for one in part if all(one != other.candidate for other in self._found.finalists)]
            for one in self._replay(self._bench, missing, self._seeds):
                self._measured[one.candidate] = one
                self._found.finalists.append(one)
            self._found.rounds.append({"candidates": len(missing), "seeds": self._seeds})
            final += [self._measured[one] for one in part]
            for one in sorted(final, key=self._value):
                if self._excess(one) <= 1 and self._keeps_on_parts(one.candidate):
                    return one
        return None

    def _climbed(self, best: Measured | None) -> Measured | None:
        """The chosen or the best of its neighbours: few seeds may have sorted one out that keeps the bound on all."""
        beside = [] if best is None else list(dict.fromkeys(self._space.neighbours(best.candidate, 1)))
        if best is None or not beside:
            return best
        return self._final([best.candidate, *beside], at_once=True)

    def _keeps_on_parts(self, candidate: Candidate) -> bool:
        """Whether a candidate keeps the bound on each part; replays it there once."""
        if candidate not in self._found.parts:
            self._found.parts[candidate] = [
                checks(self._replay(part, [candidate], self._seeds)[0], part.fcfs, self._bounds) for part in self._parts
            ]
        return all(check.excess <= 1 for part in self._found.parts[candidate] for check in part)

    def _value(self, one: Measured) -> float:
        # As in `distinct`: of those that did the same the first stays first.
        return float(np.float32(one.values[self._objective].mean()))

    def _excess(self, one: Measured) -> float:
        """The most on the half or, as far as it was replayed there, on a part."""
        found = [checks(one, self._bench.fcfs, self._bounds), *self._found.parts.get(one.candidate, [])]
        return max(check.excess for part in found for check in part)


def distinct(measured: Sequence[Measured]) -> list[Measured]:
    """The first of those that did the same, in single precision: in what order a mean was summed is no difference."""
    seen: dict[bytes, Measured] = {}
    for one in measured:
        seen.setdefault(b"".join(values.astype(np.float32).tobytes() for values in one.values.values()), one)
    return list(seen.values())
