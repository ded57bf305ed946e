"""The arithmetic of `grid.py`: ratios to stock from paired changes, geometric means, and what counts as a bound broken.

A bound is broken where the whole 95 % interval lies beyond it; where the mean alone does, it is called within the
interval. The bound of the tail is on the mean: with few seeds the interval of a P99 would excuse nearly anything.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

# Keys of the report's paired changes, and what the table calls them.
METRICS = {
    "mean_ptl_ms": "mean PTL",
    "mean_e2el_ms": "mean E2EL",
    "p99_e2el_ms": "P99 E2EL",
    "mean_ttft_ms": "mean TTFT",
    "request_throughput": "req/s",
}
HIGHER_IS_BETTER = ("request_throughput",)
ASKED_PTL = 0.60
ASKED_AT_LOAD = 1.2
# What the table shows as 1.000 passes no bound of 1.
ROUNDING = 5e-4


@dataclass(frozen=True)
class Ratio:
    """A policy's number as a multiple of stock's, with the half width of its 95 % interval where there is one."""

    mean: float
    half: float | None = None

    @property
    def low(self) -> float:
        return self.mean - (self.half or 0.0)

    @property
    def high(self) -> float:
        return self.mean + (self.half or 0.0)


@dataclass(frozen=True)
class Bound:
    """A ratio that a policy must not pass: from above, or for a number that should be high from below."""

    metric: str
    limit: float
    by_interval: bool = True


class Verdict(Enum):
    KEPT = ""
    WITHIN = "~"
    BROKEN = "!"


BOUNDS = (
    Bound("mean_ptl_ms", 1.0),
    Bound("mean_e2el_ms", 1.0),
    Bound("p99_e2el_ms", 1.25, by_interval=False),
    Bound("request_throughput", 0.995),
)
# What keeps stock's order has no excuse for a tail.
BOUNDS_IN_ORDER = (
    Bound("mean_ptl_ms", 1.0),
    Bound("mean_e2el_ms", 1.0),
    Bound("p99_e2el_ms", 1.0),
    Bound("request_throughput", 1.0),
)


def bounds_of(policy: str) -> tuple[Bound, ...]:
    """The bounds that a policy has to keep."""
    return BOUNDS_IN_ORDER if policy.split(":")[0] == "fcfs" else BOUNDS


def ratio(change: Mapping[str, Any] | None) -> Ratio | None:
    """The ratio of a change in percent, given as the report gives it; None where it is undefined."""
    if change is None or change["mean"] is None:
        return None
    interval = change.get("ci95")
    half = None if interval is None else (interval[1] - interval[0]) / 200
    return Ratio(1 + change["mean"] / 100, half)


def verdict(of: Ratio, bound: Bound) -> Verdict:
    """Whether a ratio keeps its bound."""
    sign = -1 if bound.metric in HIGHER_IS_BETTER else 1
    beyond = sign * (of.mean - bound.limit)
    if beyond <= ROUNDING:
        return Verdict.KEPT
    if bound.by_interval and beyond - (of.half or 0.0) <= ROUNDING:
        return Verdict.WITHIN
    return Verdict.BROKEN


def geometric_mean(values: Iterable[float]) -> float | None:
    """None of no values; 0 where one of them is."""
    known = list(values)
    if not known:
        return None
    return 0.0 if min(known) <= 0 else math.exp(math.fsum(math.log(value) for value in known) / len(known))


def worst(metric: str, ratios: Mapping[str, Ratio]) -> tuple[str, Ratio] | None:
    """The cell with the worst mean and its ratio."""
    if not ratios:
        return None
    pick = min if metric in HIGHER_IS_BETTER else max
    cell = pick(ratios, key=lambda name: ratios[name].mean)
    return cell, ratios[cell]
