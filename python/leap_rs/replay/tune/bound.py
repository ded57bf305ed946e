"""The bound of a search: `p99_e2el<=1.1` says that P99 E2EL may be at most 1.1 times what it is under fcfs."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from leap_rs._leap import ConfigError

LATENCIES = ("ptl", "ttft", "tpot", "e2el")
RATES = ("request_throughput", "output_throughput", "request_goodput")
KNOWN = (
    f"mean|median|std|pNN + _ + {'|'.join(LATENCIES)} (as in p99_e2el), at most (<=); {', '.join(RATES)}, at least (>=)"
)
_LATENCY = re.compile(rf"(?:mean|median|std|p(?P<percentile>\d+(?:\.\d+)?))_(?:{'|'.join(LATENCIES)})")


@dataclass(frozen=True)
class Bound:
    """A metric relative to fcfs: latencies at most `factor` times it, rates at least."""

    metric: str
    """As in a result object, a latency without `_ms`."""
    factor: float

    @property
    def at_most(self) -> bool:
        """Whether low is good."""
        return self.metric not in RATES

    @property
    def key(self) -> str:
        """The metric's key in a result object."""
        return key_of(self.metric)

    @property
    def relation(self) -> str:
        """As it is written."""
        return "<=" if self.at_most else ">="

    def __str__(self) -> str:
        return f"{self.metric}{self.relation}{self.factor:g}"

    def to_dict(self) -> dict[str, str | float]:
        """Its entry in a result object."""
        return {"metric": self.metric, "relation": self.relation, "factor": self.factor}

    def excess(self, ratio: float) -> float:
        """How far beyond the bound a ratio to fcfs lies: 1 is just at it, more breaks it."""
        if self.at_most:
            return ratio / self.factor
        return self.factor / ratio if ratio > 0 else math.inf


def key_of(metric: str) -> str:
    """`p99_e2el` as result objects spell it, `p99_e2el_ms`; rates keep their name."""
    return metric if metric in RATES else f"{metric}_ms"


def parse(text: str, goodput: Mapping[str, float] | None = None) -> tuple[Bound, ...]:
    """`"p99_e2el<=1.1,request_throughput>=0.95"` to bounds; a `ConfigError` says what is wrong and what there is."""
    if not isinstance(text, str) or not text.strip():
        raise ConfigError(f"tune: expected METRIC<=FACTOR such as p99_e2el<=1.1, got {text!r}; metrics: {KNOWN}")
    bounds = tuple(_one(part.strip()) for part in text.split(","))
    _require_once(bound.metric for bound in bounds)
    if not goodput and any(bound.metric == "request_goodput" for bound in bounds):
        raise ConfigError("tune: request_goodput needs --goodput")
    return bounds


def _one(part: str) -> Bound:
    found = re.fullmatch(r"([^<>=\s]*)\s*([<>=]+)\s*(\S*)", part)
    if found is None:
        raise ConfigError(f"tune: expected METRIC<=FACTOR such as p99_e2el<=1.1, got {part!r}; metrics: {KNOWN}")
    metric, sign, number = found.groups()
    _require_metric(metric)
    bound = Bound(metric, _factor(metric, number))
    wanted = bound.relation
    if sign != wanted:
        better = "low" if bound.at_most else "high"
        raise ConfigError(f"tune: {metric} is good when it is {better}, so its bound is {metric}{wanted}{number}")
    return bound


def _require_metric(metric: str) -> None:
    if metric in RATES:
        return
    found = _LATENCY.fullmatch(metric)
    if found is not None:
        if float(found["percentile"] or 0) > 100:
            raise ConfigError(f"tune: {metric}: a percentile lies between 0 and 100")
        return
    if metric.endswith("_ms") and _LATENCY.fullmatch(metric.removesuffix("_ms")):
        raise ConfigError(
            f"tune: {metric}: a bound is a factor of what fcfs has, without a unit: {metric.removesuffix('_ms')}"
        )
    if metric.endswith("_itl") or metric == "max_slowdown":
        raise ConfigError(f"tune: {metric} is not kept seed by seed, so it cannot be bound; metrics: {KNOWN}")
    raise ConfigError(f"tune: no metric {metric!r}; metrics: {KNOWN}")


def _factor(metric: str, number: str) -> float:
    try:
        factor = float(number)
    except ValueError:
        factor = math.nan
    if not (math.isfinite(factor) and factor > 0):
        raise ConfigError(f"tune: {metric} needs a factor of fcfs's value, a number > 0, got {number!r}")
    return factor


def _require_once(metrics: Iterable[str]) -> None:
    seen: set[str] = set()
    for metric in metrics:
        if metric in seen:
            raise ConfigError(f"tune: {metric} is bound twice")
        seen.add(metric)
