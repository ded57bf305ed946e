"""Statistics of a trace that are kept while its parts pass by, exact where memory allows it."""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

QUANTILES = {"p10": 0.1, "p25": 0.25, "p50": 0.5, "p75": 0.75, "p90": 0.9, "p99": 0.99}

_COUNT, _VALUE, _GROUP = "count", "value", "group"


class Lengths:
    """How often each length occurs, by group: distinct lengths are few, so the quantiles are exact."""

    MOST_GROUPS = 1_000

    def __init__(self, column: str, group: str | None = None) -> None:
        self.column, self.group = column, group
        self.overflown = False
        self._counts: pl.DataFrame | None = None

    def see(self, frame: pl.DataFrame) -> None:
        """The next part."""
        if self.overflown:
            return
        group = pl.lit("") if self.group is None else pl.col(self.group).cast(pl.String).fill_null("")
        pairs = frame.select(group.alias(_GROUP), pl.col(self.column).cast(pl.Int64).alias(_VALUE))
        new = pairs.group_by(_GROUP, _VALUE).agg(pl.len().cast(pl.Int64).alias(_COUNT))
        if self._counts is not None:
            new = pl.concat([self._counts, new]).group_by(_GROUP, _VALUE).agg(pl.col(_COUNT).sum())
        self._counts = new
        self.overflown = new[_GROUP].n_unique() > self.MOST_GROUPS

    def groups(self) -> list[tuple[str, int]]:
        """The groups and their requests, the largest first."""
        if self._counts is None:
            return []
        sums = self._counts.group_by(_GROUP).agg(pl.col(_COUNT).sum()).sort(_COUNT, _GROUP, descending=[True, False])
        return [(str(group), int(count)) for group, count in sums.iter_rows()]

    def summary(self, group: str = "") -> dict[str, float]:
        """Mean, extremes and quantiles (linear between order statistics, as numpy has them)."""
        if self._counts is None:
            return {}
        own = self._counts.filter(pl.col(_GROUP) == group).sort(_VALUE)
        values, ends = own[_VALUE].to_numpy(), own[_COUNT].cum_sum().to_numpy()
        total = int(ends[-1])
        mean = float((values.astype(np.float64) * own[_COUNT].to_numpy()).sum() / total)
        named = {"mean": mean, "min": float(values[0]), "max": float(values[-1])}
        for name, share in QUANTILES.items():
            at = share * (total - 1)
            low, high = (values[np.searchsorted(ends, int(rank), side="right")] for rank in (at, np.ceil(at)))
            named[name] = float(low + (high - low) * (at - int(at)))
        return named


class Arrivals:
    """Requests per bin of time, and the moments of the gaps between requests."""

    BINS = 2**21
    FINEST_S = (
        2.0**-10
    )  # doubled whenever the bins do not suffice: a power of two, so that whole seconds are whole bins
    FEWEST_WINDOWS = 10

    def __init__(self) -> None:
        self.count = 0
        self.first_s = self.last_s = 0.0
        self.width_s = self.FINEST_S
        self._bins: NDArray[np.int64] = np.zeros(0, dtype=np.int64)
        self._gaps = 0
        self._mean = self._squares = 0.0

    def see(self, times: NDArray[np.float64]) -> None:
        """The next part of `arrival_s`."""
        if self.count == 0:
            self.first_s = self.last_s = float(times[0])
            gaps = np.diff(times)
        else:
            gaps = np.diff(times, prepend=self.last_s)
        self.count += len(times)
        self.last_s = float(times[-1])
        self._add_gaps(gaps)
        while (self.last_s - self.first_s) / self.width_s >= self.BINS:
            self._bins = rebinned(self._bins, 2)
            self.width_s *= 2
        bins = np.bincount(((times - self.first_s) / self.width_s).astype(np.int64), minlength=len(self._bins))
        bins[: len(self._bins)] += self._bins
        self._bins = bins

    @property
    def duration_s(self) -> float:
        """From the first request to the last."""
        return self.last_s - self.first_s

    @property
    def rate(self) -> float | None:
        """Requests per second: requests over duration, as `leap-replay` and vLLM count them."""
        return self.count / self.duration_s if self.duration_s > 0 else None

    def gap_cv(self) -> float | None:
        """Standard deviation over mean of the gaps: 1 for Poisson arrivals."""
        return float(np.sqrt(self._squares / self._gaps) / self._mean) if self._mean > 0 else None

    def dispersion(self, window_s: float) -> float | None:
        """Variance over mean of the requests per window: 1 for Poisson arrivals at any window."""
        if window_s % self.width_s:
            return None
        per_window = round(window_s / self.width_s)
        whole = int(self.duration_s // window_s)
        if whole < self.FEWEST_WINDOWS:
            return None
        counts = self._bins[: whole * per_window].reshape(whole, per_window).sum(axis=1)
        return float(counts.var() / counts.mean())

    def rates(self, windows: int) -> tuple[float, list[float]]:
        """The width of equal windows over the duration, and the rate in each; none where the bins are too coarse."""
        if self.duration_s < windows * self.width_s:
            return 0.0, []
        edges = np.linspace(0, self.duration_s / self.width_s, windows + 1)
        # A bin that an edge cuts is shared out by its parts.
        below = np.interp(edges, np.arange(len(self._bins) + 1), np.concatenate([[0], np.cumsum(self._bins)]))
        below[-1] = self.count
        width = self.duration_s / windows
        return width, [float(rate) for rate in np.diff(below) / width]

    def _add_gaps(self, gaps: NDArray[np.float64]) -> None:
        if len(gaps) == 0:
            return
        mean, squares = float(gaps.mean()), float(((gaps - gaps.mean()) ** 2).sum())
        total = self._gaps + len(gaps)
        apart = mean - self._mean
        self._squares += squares + apart**2 * self._gaps * len(gaps) / total
        self._mean += apart * len(gaps) / total
        self._gaps = total


class Prefixes:
    """The share of prompt tokens that an endless prefix cache would have held already."""

    MOST_BLOCKS = 20_000_000

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.prompt_tokens = self.shared_tokens = 0
        self.overflown = False
        self._seen = pl.Series("block", [], dtype=pl.UInt64)

    def see(self, frame: pl.DataFrame) -> None:
        """The next part."""
        self.prompt_tokens += int(frame["prompt_tokens"].cast(pl.Int64).sum())
        if "prefix_tokens" in frame.columns:
            self.shared_tokens += int(frame["prefix_tokens"].cast(pl.Int64).sum())
        elif not self.overflown:
            self._see_blocks(frame["prefix_blocks"])

    def share(self) -> float | None:
        """None where there were too many blocks to remember."""
        return None if self.overflown else self.shared_tokens / self.prompt_tokens

    def _see_blocks(self, blocks: pl.Series) -> None:
        rows = pl.DataFrame({"row": pl.int_range(len(blocks), eager=True), "block": blocks})
        every = rows.filter(pl.col("block").list.len() > 0).explode("block")
        every = every.with_columns(
            (pl.col("block").is_first_distinct() & ~pl.col("block").is_in(self._seen.implode())).alias("new")
        )
        # A cache serves the leading blocks up to the first new one.
        led = every.select((pl.col("new").cast(pl.Int64).cum_sum().over("row") == 0).sum()).item()
        self.shared_tokens += int(led) * self.block_size
        self._seen = pl.concat([self._seen, every.filter("new")["block"]])
        self.overflown = len(self._seen) > self.MOST_BLOCKS


class Sessions:
    """Requests that continue a conversation: all of a session but its first."""

    MOST = 20_000_000

    def __init__(self) -> None:
        self.requests = 0
        self.overflown = False
        self._seen = pl.Series("session", [], dtype=pl.UInt64)

    def see(self, frame: pl.DataFrame) -> None:
        """The next part."""
        sessions = frame["session"].drop_nulls()
        self.requests += len(sessions)
        if not self.overflown:
            self._seen = pl.concat([self._seen, sessions.hash().alias("session")]).unique()
            self.overflown = len(self._seen) > self.MOST

    def to_dict(self) -> dict[str, Any]:
        """As in `--json`."""
        sessions = None if self.overflown else len(self._seen)
        later = None if sessions is None else self.requests - sessions
        return {"requests": self.requests, "sessions": sessions, "continuations": later}


def rebinned(bins: NDArray[np.int64], factor: int) -> NDArray[np.int64]:
    """Each `factor` bins added up."""
    padded = np.pad(bins, (0, -len(bins) % factor))
    sums: NDArray[np.int64] = padded.reshape(-1, factor).sum(axis=1)
    return sums
