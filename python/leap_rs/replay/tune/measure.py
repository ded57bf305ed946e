"""Candidates on one half of a trace: replayed many at a time, each metric kept seed by seed for paired comparison."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from leap_rs.replay.options import Options, build
from leap_rs.replay.remarks import queue_of_client
from leap_rs.replay.run import run
from leap_rs.trace import Trace

from .bound import RATES
from .space import Candidate, fcfs, plain_leap

Values = npt.NDArray[np.float64]
Progress = Callable[[int], None]
# Rows of requests held at a time: tens of bytes each.
MAX_ROWS = 4_000_000


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds with its 95 % interval by Student's t; none for a single seed."""

    mean: float
    ci95: tuple[float, float] | None

    @classmethod
    def of(cls, values: Values) -> Estimate:
        """From one value a seed."""
        mean = float(values.mean())
        if len(values) < 2:
            return cls(mean, None)
        from scipy.stats import t  # type: ignore[import-untyped]

        half = float(t.ppf(0.975, len(values) - 1) * values.std(ddof=1) / np.sqrt(len(values)))
        return cls(mean, (mean - half, mean + half))

    def to_dict(self) -> dict[str, Any]:
        """As result objects have it: what is undefined is null."""
        if not np.isfinite(self.mean):
            return {"mean": None, "ci95": None}
        return {"mean": self.mean, "ci95": None if self.ci95 is None else list(self.ci95)}


@dataclass(frozen=True)
class Measured:
    """One candidate on one half: a value a seed of each metric, NaN where it is undefined."""

    candidate: Candidate
    values: dict[str, Values]

    @property
    def seeds(self) -> int:
        """How many it was run on."""
        return len(next(iter(self.values.values())))

    def ratio(self, base: Measured, metric: str) -> Values:
        """Against another candidate, seed by seed."""
        seeds = min(self.seeds, base.seeds)
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio: Values = self.values[metric][:seeds] / base.values[metric][:seeds]
        return ratio

    def change(self, base: Measured, metric: str) -> Estimate:
        """The same in percent."""
        return Estimate.of(100 * (self.ratio(base, metric) - 1))


class Bench:
    """One half of a trace on the engine; every candidate meets the same requests at the same times."""

    def __init__(self, half: Trace, options: Options, stock: int, metrics: Sequence[str]) -> None:
        self._half = half
        self._metrics = tuple(dict.fromkeys(metrics))
        self._options = options
        self._stock = stock
        self.simulations = 0
        self.capacity: dict[tuple[int, int | None], float] = {}
        """FCFS capacity in requests a second by sequences and decode slots, of every engine that was replayed."""
        first = self._run(half, options, [fcfs(stock), plain_leap(stock)], options.seeds, None)
        document = first.document
        self.fcfs, self.leap = first.measured
        self.queue: dict[str, Any] = document["results"][0]["queue"]
        self.client = queue_of_client(document, [0])
        """That the client's cap is the queue, where it leaves the engine as it is none."""
        rate = document["results"][0]["request_rate"]
        # All at once has no rate.
        self.rate = rate if isinstance(rate, float) else None
        self.notes: list[str] = document["notes"]
        self.readouts: dict[str, Any] = document["config"]["readouts"]
        self.replayed = int(document["trace"]["requests"])
        self.duration_s = float(document["trace"]["duration_s"])
        if options.load is not None and self.rate is not None:
            # Load is a multiple of what this engine can serve. Another number of sequences serves another rate, and
            # would be offered it; so the times are scaled once, for this engine, and then left alone.
            kept = min(options.num_prompts or half.frame.height, half.frame.height)
            kept -= len(document["trace"]["left_out"])
            speed = self.rate / (kept / self.duration_s)
            start = float(half.frame["arrival_s"][0])
            frame = half.frame.with_columns(arrival_s=(pl.col("arrival_s") - start) / speed)
            self._half = replace(half, frame=frame)
            self._options = options.model_copy(update={"load": None})

    def measure(self, candidates: Iterable[Candidate], seeds: int, progress: Progress | None = None) -> list[Measured]:
        """Replay each on the first so many seeds, in the order given; `progress` hears of simulations done."""
        candidates = list(candidates)
        at_once = max(1, MAX_ROWS // (self.replayed * seeds))
        found: dict[Candidate, Measured] = {}
        for engine in dict.fromkeys(candidate.engine for candidate in candidates):
            same = [candidate for candidate in candidates if candidate.engine == engine]
            for start in range(0, len(same), at_once):
                part = self._run(self._half, self._options, same[start : start + at_once], seeds, progress)
                found |= {one.candidate: one for one in part.measured}
        return [found[candidate] for candidate in candidates]

    def _run(
        self, half: Trace, options: Options, candidates: Sequence[Candidate], seeds: int, progress: Progress | None
    ) -> _Run:
        seqs, slots = candidates[0].engine
        # A preset may bring a limit on slots; as many slots as sequences is none.
        given = {
            **options.model_dump(exclude_unset=True),
            "policies": tuple(candidate.policy for candidate in candidates),
            "seeds": seeds,
            "max_num_seqs": seqs,
            "decode_slots": slots or seqs,
        }
        total = len(candidates) * seeds
        before = self.simulations

        def told(share: float) -> None:
            if progress is not None:
                progress(before + int(share * total))

        result = run(half, build(given), keep_requests=True, progress=told)
        self.simulations = before + total
        document = result.to_dict()
        self.capacity[seqs, slots] = document["config"]["capacity_rps"][0]
        measured = by_policy(result.requests, self._metrics, options.goodput)
        return _Run(document, [Measured(candidate, measured[candidate.policy]) for candidate in candidates])


@dataclass(frozen=True)
class _Run:
    document: dict[str, Any]
    measured: list[Measured]


def by_policy(
    requests: pl.DataFrame, metrics: Sequence[str], goodput: dict[str, float]
) -> dict[str, dict[str, Values]]:
    """Metrics of every policy, one value a seed, from the rows of single requests."""
    table = (
        requests.lazy()
        .with_columns(e2el=_ms("finish_s", "arrival_s"), ttft=_ms("first_token_s", "arrival_s"))
        .with_columns(
            ptl=pl.col("e2el") / pl.col("output_tokens"),
            # One token has no time after the first.
            tpot=pl.when(pl.col("output_tokens") > 1).then(
                _ms("finish_s", "first_token_s") / (pl.col("output_tokens").cast(pl.Int64) - 1)
            ),
        )
        .group_by("policy", "seed")
        .agg(_aggregate(metric, goodput).cast(pl.Float64).alias(metric) for metric in metrics)
        .sort("policy", "seed")
        .collect()
    )
    return {
        str(part["policy"][0]): {metric: part[metric].fill_null(np.nan).to_numpy() for metric in metrics}
        for part in table.partition_by("policy")
    }


def _ms(end: str, start: str) -> pl.Expr:
    return (pl.col(end) - pl.col(start)) * 1e3


def _aggregate(metric: str, goodput: dict[str, float]) -> pl.Expr:
    if metric in RATES:
        return _amount(metric, goodput) / pl.col("finish_s").max()
    statistic, _, latency = metric.partition("_")
    column = pl.col(latency)
    if statistic == "mean":
        return column.mean()
    if statistic == "std":
        return column.std(ddof=0)
    share = 0.5 if statistic == "median" else float(statistic[1:]) / 100
    return column.quantile(share, interpolation="linear")


def _amount(metric: str, goodput: dict[str, float]) -> pl.Expr:
    """What a rate counts, over a whole run."""
    if metric == "request_throughput":
        return pl.len()
    if metric == "output_throughput":
        return pl.col("output_tokens").cast(pl.Int64).sum()
    good = pl.all_horizontal([pl.col(name).fill_null(0.0) <= limit for name, limit in goodput.items()])
    return good.sum()
