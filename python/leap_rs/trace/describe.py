"""What a trace holds: counts, rates over time, lengths by group, burstiness, and what is missing for which command."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import polars as pl

from leap_rs.trace import open_stream, schema
from leap_rs.trace.convert import left_out_dict
from leap_rs.trace.labels import finish_reason
from leap_rs.trace.model import ReadOptions, Stream
from leap_rs.trace.requests import E2EL, TTFT
from leap_rs.trace.tally import Arrivals, Lengths, Prefixes, Sessions
from leap_rs.trace.vllm_bench import VllmBenchReader

TOKENS = ("prompt_tokens", "output_tokens")
GROUPS = ("domain", "tenant", "model")
WINDOWS = 32
DISPERSION_S = (1, 10, 60)
HEAD = 1000
MEASURED = ("measured_queued_s", "measured_first_token_s", "measured_last_token_s")

RATE_FACTOR = 1.5
LENGTH_FACTOR = 1.2


@dataclass
class _Head:
    """The first requests, which `--num-prompts` of a replay takes."""

    wanted: int
    arrivals: Arrivals = field(default_factory=Arrivals)
    sums: dict[str, int] = field(default_factory=lambda: dict.fromkeys(TOKENS, 0))

    def see(self, frame: pl.DataFrame) -> None:
        part = frame.head(self.wanted - self.arrivals.count)
        if part.height:
            self.arrivals.see(part["arrival_s"].to_numpy())
            for column in TOKENS:
                self.sums[column] += int(part[column].cast(pl.Int64).sum())


class Description:
    """Sees a trace once, part by part."""

    def __init__(self, stream: Stream, *, num_prompts: int = HEAD) -> None:
        self.stream = stream
        self.columns = pl.Schema()
        self.arrivals = Arrivals()
        self.lengths = {column: Lengths(column) for column in TOKENS}
        self.grouped: dict[str, dict[str, Lengths]] = {}
        self.censored: int | None = None
        self.prefixes: Prefixes | None = None
        self.sessions: Sessions | None = None
        self.head = _Head(num_prompts)
        for frame in stream.frames:
            self._see(frame)

    def _see(self, frame: pl.DataFrame) -> None:
        if not self.columns:
            self._begin(frame.schema)
        self.arrivals.see(frame["arrival_s"].to_numpy())
        self.head.see(frame)
        for lengths in (self.lengths, *self.grouped.values()):
            for one in lengths.values():
                one.see(frame)
        if self.censored is not None:
            self.censored += int(frame.select((finish_reason(frame.columns) == "length").sum()).item())
        if self.prefixes is not None:
            self.prefixes.see(frame)
        if self.sessions is not None:
            self.sessions.see(frame)

    def _begin(self, columns: pl.Schema) -> None:
        self.columns = columns
        groups = [name for name in GROUPS if columns.get(name) == pl.String]
        self.grouped = {group: {column: Lengths(column, group) for column in TOKENS} for group in groups}
        if "finish_reason" in columns or "max_tokens" in columns:
            self.censored = 0
        if "prefix_tokens" in columns or "prefix_blocks" in columns:
            self.prefixes = Prefixes(schema.block_size(self.stream.path, self.stream.metadata))
        if "session" in columns:
            self.sessions = Sessions()

    def to_dict(self) -> dict[str, Any]:
        """The object of `--json`; what is undefined or unknown is null."""
        requests = self.arrivals.count
        width, rates = self.arrivals.rates(WINDOWS)
        timed = self.stream.has_times
        return {
            "leap_trace_version": 1,
            "path": str(self.stream.path),
            "format": self.stream.format,
            "requests": requests,
            "left_out": [left_out_dict(out) for out in self.stream.left_out],
            "notes": list(self.stream.notes),
            "columns": {name: str(dtype) for name, dtype in self.columns.items()},
            "metadata": self.stream.metadata,
            "duration_s": self.arrivals.duration_s if timed else None,
            "request_rate": self.arrivals.rate,
            "arrivals": {
                "gap_cv": self.arrivals.gap_cv(),
                "dispersion": {f"{seconds}s": self.arrivals.dispersion(seconds) for seconds in DISPERSION_S},
                "window_s": width if rates else None,
                "request_rates": rates,
            },
            **{column: self.lengths[column].summary() for column in TOKENS},
            "groups": {group: self._groups(group) for group in self.grouped},
            "cut_by_budget": None
            if self.censored is None
            else {"requests": self.censored, "share": self.censored / requests},
            "conversations": None if self.sessions is None else self.sessions.to_dict(),
            "shared_prefix": None if self.prefixes is None else {"token_share": self.prefixes.share()},
            "head": self._head(),
            "missing": self._missing(),
        }

    def _groups(self, group: str) -> list[dict[str, Any]] | None:
        """None where there are too many."""
        one = self.grouped[group]
        if any(lengths.overflown for lengths in one.values()):
            return None
        return [
            {"value": value, "requests": count, **{column: one[column].summary(value) for column in TOKENS}}
            for value, count in one[TOKENS[0]].groups()
        ]

    def _head(self) -> dict[str, Any] | None:
        """None where the head is the whole."""
        count = self.head.arrivals.count
        if count == self.arrivals.count:
            return None
        means = {column: self.head.sums[column] / count for column in TOKENS}
        differs = []
        if _factor(self.head.arrivals.rate, self.arrivals.rate) > RATE_FACTOR:
            differs.append("request_rate")
        whole = {column: self.lengths[column].summary()["mean"] for column in TOKENS}
        differs += [column for column in TOKENS if _factor(means[column], whole[column]) > LENGTH_FACTOR]
        return {
            "requests": count,
            "request_rate": self.head.arrivals.rate,
            **{f"mean_{column}": mean for column, mean in means.items()},
            "differs_in": differs,
        }

    def _missing(self) -> dict[str, list[str]]:
        have = self.columns
        replay, fit, calibrate = [], [], []
        if not self.stream.has_times:
            replay.append("arrival times: --request-rate draws them")
        if "features" not in have:
            replay.append("features: without them leap, leap-paper and leap-frozen have no state readout")
        if "prompt_features" not in have:
            replay.append("prompt_features: without them the prompt readout of leap reads the prompt's length alone")
        if "text_features" not in have:
            replay.append(
                "text_features: without them leap has no text readout; leap-trace features makes them of texts"
            )
        if not any(column in have for column in schema.FEATURE_COLUMNS):
            *others, last = schema.FEATURE_COLUMNS
            fit.append(f"{', '.join(others)} or {last}: there is nothing to fit a readout on")
        if self.censored is None:
            cut = "finish_reason or max_tokens: an answer that was cut counts as one that ended by itself"
            replay.append(cut)
            fit.append(cut)
        elif self.censored == self.arrivals.count:
            fit.append("answers that ended by themselves: all of these were cut by their budget, or forced to a length")
        lacking = [name for name in MEASURED if name not in have]
        if self.stream.format == VllmBenchReader.name:
            # leap-calibrate reads the measured times from such a file itself.
            if not self.stream.has_times:
                calibrate.append("start_times: the vLLM that wrote the file did not record when requests were sent")
        elif TTFT in have and E2EL in have:
            if not self.stream.has_times:
                calibrate.append("arrival times: the tool that wrote the file kept none")
        elif lacking:
            calibrate.append(f"{', '.join(lacking)}: what a real run measured")
        return {"leap-replay": replay, "leap-fit": fit, "leap-calibrate": calibrate}


def describe(path: Path, options: ReadOptions | None = None, *, num_prompts: int = HEAD) -> dict[str, Any]:
    """What the trace holds; `num_prompts` is the head that is compared with the whole."""
    return Description(open_stream(path, options), num_prompts=num_prompts).to_dict()


def _factor(one: float | None, other: float | None) -> float:
    """How many times as large the larger is; 1 where one is unknown."""
    if not one or not other:
        return 1.0
    return max(one, other) / min(one, other)
