"""When the schedule may follow a readout: once its ranking of requests that have finished has proven itself.

Only predictions that were made before anything of the answer was known count, and a limit of the client earns none of the
credit: scores are compared before they are cut to `max_tokens`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from leap_rs._leap import spearman

FEWEST = 50
"""Requests below which nothing is decided."""
PROOF = 4.0
"""Standard errors by which the correlation has to exceed 0 before it arms; by chance alone that is one look in 30,000."""
EVIDENCE = 4
"""Windows over which that proof is sought: one window is too short for it where the correlation is weak."""
DOUBT = 2.0
"""Standard errors by which it has to lie below the threshold before it disarms: a window is a small sample."""
_LOOKS = 64
PREFERENCE = ("state", "text", "prompt")
"""Which readout a request goes by where none has done better than another: the one that is told the most."""
LEAD = 0.05
"""Rank correlation by which a readout has to be ahead to be preferred: windows differ by chance."""


@dataclass(frozen=True)
class ArmSettings:
    """When to arm: at `min_correlation` over the last `window` requests. It disarms `hysteresis` below."""

    window: int = 200
    min_correlation: float = 0.2
    hysteresis: float = 0.05


@dataclass(frozen=True, slots=True)
class Judged:
    """A finished request: the score that was predicted, and its length or, where censored, its limit."""

    score: float
    tokens: int
    censored: bool


def preferred(order: Sequence[str], standings: Mapping[str, float]) -> tuple[str, ...]:
    """The readouts by how well they rank; a request goes by the first of them that knows it.

    Place by place, who stands there stays unless another of those behind is ahead of it by more than `LEAD`; the best of
    them then takes the place.

    Args:
        order: The order so far.
        standings: `Judge.standing` of each of them.
    """
    left, found = list(order), []
    while left:
        best = max(left, key=lambda name: standings[name])
        first = best if standings[best] > standings[left[0]] + LEAD else left[0]
        left.remove(first)
        found.append(first)
    return tuple(found)


def told(judges: Mapping[str, Judge]) -> str:
    """What is known of each readout, for a log."""

    def one(name: str, judge: Judge) -> str:
        known = "unknown" if judge.correlation is None else f"{judge.correlation:.2f}"
        return f"{name}: rank correlation {known}, {'armed' if judge.armed else 'not armed'}"

    return "; ".join(one(name, judge) for name, judge in judges.items())


class Judge:
    """Compares one readout's predictions with what came, over a sliding window of finished requests."""

    def __init__(self, settings: ArmSettings, seen: Iterable[Judged] = (), *, armed: bool = False) -> None:
        self._settings = settings
        self._fewest = min(FEWEST, settings.window)
        self._kept = EVIDENCE * settings.window
        # Columns of score, tokens and mark; twice as long as what is kept, so that they move only once in as many rows.
        self._rows = np.zeros((3, 2 * self._kept))
        self._end = 0
        self._since = 0
        self.armed = armed
        for judged in seen:
            self._append(judged)
        self.correlation, n = self._over(settings.window)
        self._standing = self._stands(self.correlation, n)

    @classmethod
    def resumed(cls, settings: ArmSettings, saved: Mapping[str, Any]) -> Judge:
        """One that goes on from what `saved` gave; where that is empty, from nothing."""
        seen = [Judged(float(score), int(tokens), bool(censored)) for score, tokens, censored in saved.get("seen", ())]
        return cls(settings, seen, armed=bool(saved.get("armed", False)))

    def saved(self) -> dict[str, Any]:
        """The verdict and what it rests on, as JSON."""
        return {"armed": self.armed, "seen": [[one.score, one.tokens, one.censored] for one in self.seen]}

    @property
    def standing(self) -> float:
        """How well it ranks, comparable between readouts: the correlation, 0 where it is undefined or of too few."""
        return self._standing

    def _stands(self, correlation: float | None, n: int) -> float:
        return correlation or 0.0 if n >= self._fewest else 0.0

    @property
    def seen(self) -> tuple[Judged, ...]:
        """What the verdict rests on, oldest first."""
        rows = self._rows[:, max(self._end - self._kept, 0) : self._end].T.tolist()
        return tuple(Judged(score, int(tokens), bool(censored)) for score, tokens, censored in rows)

    def add(self, judged: Judged) -> None:
        """Takes in a request that has finished, and decides anew."""
        self._append(judged)
        self._since += 1
        # Ranking a long window costs more than a step of it changes.
        if self._since >= max(self._settings.window // _LOOKS, 1):
            self._since = 0
            self._decide()

    def _append(self, judged: Judged) -> None:
        if self._end == self._rows.shape[1]:
            self._rows[:, : self._kept] = self._rows[:, self._kept :]
            self._end = self._kept
        self._rows[:, self._end] = judged.score, judged.tokens, judged.censored
        self._end += 1

    def _decide(self) -> None:
        correlation, n = self._over(self._settings.window)
        self.correlation, self._standing = correlation, self._stands(correlation, n)
        if n < self._fewest:
            return
        # Undefined where all predictions or all lengths are equal: there is nothing to rank.
        rho = correlation or 0.0
        least = self._settings.min_correlation
        if not self.armed:
            self.armed = rho > 0 and rho >= least and self._proof() >= PROOF
        else:
            doubt = rho + DOUBT / math.sqrt(max(n - 1, 1)) < least or correlation is None
            self.armed = not (rho < least - self._settings.hysteresis and doubt)

    def _proof(self) -> float:
        """How many standard errors the correlation over all that is kept lies above 0."""
        rho, n = self._over(self._kept)
        return (rho or 0.0) * math.sqrt(max(n - 1, 0))

    def _over(self, window: int) -> tuple[float | None, int]:
        """Rank correlation of the last requests, and of how many.

        A censored one ranks among the long where its limit is that of a long answer; a lower one does not tell its place.
        """
        scores, tokens, censored = self._rows[:, max(self._end - window, 0) : self._end]
        exact = np.sort(tokens[censored == 0])
        long = exact[(3 * len(exact)) // 4] if len(exact) else 0.0
        placed = (censored == 0) | (tokens >= long)
        n = int(placed.sum())
        return (spearman(scores[placed], tokens[placed]) if n > 1 else None), n
