"""What the page needs of single requests, reduced while it is at hand: quantiles, counts and bins, never the rows.

All of it is about the first seed, which replays the trace as recorded; means and intervals over the seeds are in the result
object. Rows of a long replay are asked for a few policies at a time, so that memory holds a bounded number of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

Floats = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]
# (point, policies) -> rows of the first seed, as `ReplayResult.requests` has them.
Rows = Callable[[int, Sequence[str]], pl.DataFrame]

METRICS = ("ptl", "ttft", "e2el")
# Quantiles of a distribution function: even steps, and finer ones where the tails are read.
LEVELS = np.unique(np.round([*np.linspace(0, 1, 81), 0.002, 0.005, 0.99, 0.995, 0.998, 0.999], 4))
INSTANTS = 300
# A long sweep shows single requests of so many points, evenly chosen.
MAX_POINTS = 24
# Rows of requests in memory at a time, about 500 MB in all their copies.
MAX_ROWS = 4_000_000
RANK_BINS = 20


@dataclass(frozen=True)
class Prediction:
    """Requests by predicted and true length. Edges are in tokens, or in percent of the ranks where `ranks`."""

    edges: Floats
    counts: Counts  # (predicted, true)
    ranks: bool


@dataclass(frozen=True)
class PolicyDetail:
    """One policy at one point."""

    quantiles: Mapping[str, Floats]  # by metric in milliseconds, at LEVELS
    waiting: Counts  # at the point's instants
    prediction: Prediction | None


@dataclass(frozen=True)
class PointDetail:
    """All policies at one point of the sweep."""

    point: int
    instants: Floats  # seconds
    policies: Mapping[str, PolicyDetail]


def shown_points(count: int) -> list[int]:
    """The points whose requests the page shows: all, or `MAX_POINTS` of them from the first to the last."""
    if count <= MAX_POINTS:
        return list(range(count))
    return [round(i) for i in np.linspace(0, count - 1, MAX_POINTS)]


def collect(document: Mapping[str, Any], rows: Rows) -> list[PointDetail]:
    """Reduce the rows of every shown point, asking for as many policies at a time as `MAX_ROWS` allows."""
    at_a_time = max(1, MAX_ROWS // max(1, document["trace"]["requests"]))
    found = []
    for point in shown_points(len(document["config"]["points"])):
        results = [result for result in document["results"] if result["point"] == point]
        instants = np.linspace(0, _end(results), INSTANTS)
        details: dict[str, PolicyDetail] = {}
        for names in _chunks([result["policy"] for result in results], at_a_time):
            frame = rows(point, names)
            details |= {name: _reduce(frame.filter(pl.col("policy") == name), name, instants) for name in names}
        found.append(PointDetail(point, instants, details))
    return found


def from_requests(document: Mapping[str, Any], requests: pl.DataFrame) -> list[PointDetail]:
    """`collect` from rows that are all in memory."""
    first = requests.filter(pl.col("seed") == document["config"]["seed"])
    return collect(document, lambda point, names: first.filter(pl.col("point") == point, pl.col("policy").is_in(names)))


def _end(results: Sequence[Mapping[str, Any]]) -> float:
    durations = [result["metrics"]["duration"]["mean"] for result in results]
    return max((duration for duration in durations if duration is not None), default=0.0)


def _chunks(names: Sequence[str], size: int) -> Iterator[Sequence[str]]:
    for start in range(0, len(names), size):
        yield names[start : start + size]


def _reduce(rows: pl.DataFrame, policy: str, instants: Floats) -> PolicyDetail:
    arrival, first, finish = (rows[name].to_numpy() for name in ("arrival_s", "first_token_s", "finish_s"))
    output = rows["output_tokens"].to_numpy().astype(np.float64)
    taken = {"ptl": (finish - arrival) / output, "ttft": first - arrival, "e2el": finish - arrival}
    # The smallest value that at least this share of the requests does not exceed: a latency that one of them had.
    quantiles = {
        name: np.quantile(1e3 * seconds, LEVELS, method="inverted_cdf") if rows.height else np.empty(0)
        for name, seconds in taken.items()
    }
    arrived, served = (np.searchsorted(np.sort(times), instants, side="right") for times in (arrival, first))
    predicted = rows["predicted_tokens"].to_numpy().astype(np.float64)
    return PolicyDetail(quantiles, (arrived - served).astype(np.int64), _bins(predicted, output, policy))


def _bins(predicted: Floats, true: Floats, policy: str) -> Prediction | None:
    known = np.isfinite(predicted)
    if not known.any():
        return None
    predicted, true = predicted[known], true[known]
    # Somebody else's score may have any unit, or none: only its order says something.
    ranks = policy.startswith("score:") or bool(predicted.min() <= 0)
    if ranks:
        edges = np.linspace(0, 100, RANK_BINS + 1)
        predicted, true = (
            100 * (pl.Series(values).rank().to_numpy() - 0.5) / values.size for values in (predicted, true)
        )
    else:
        low = np.floor(2 * np.log2(min(predicted.min(), true.min())))
        high = np.floor(2 * np.log2(max(predicted.max(), true.max()))) + 1
        edges = 2.0 ** (np.arange(low, high + 1) / 2)
    counts, _, _ = np.histogram2d(predicted, true, bins=(edges, edges))
    return Prediction(edges, counts.astype(np.int64), ranks)
