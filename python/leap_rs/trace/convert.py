"""Traces of any known format into the leap format, part by part: what changes on the way, and what was left out."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from leap_rs._leap import ConfigError
from leap_rs.trace import open_stream
from leap_rs.trace.combine import Combined, combine
from leap_rs.trace.model import LeftOut, ReadOptions, Stream, without_times
from leap_rs.trace.parquet import ARRIVALS_KEY, NO_ARRIVALS, check_target, write_parts


@dataclass(frozen=True)
class Changes:
    """What a conversion puts into the trace besides what the file says."""

    request_rate: float | None = None
    """Requests per second with Gamma arrivals, for formats without times; inf sends all at once."""
    burstiness: float = 1.0
    """Shape of the Gamma arrivals; inf makes all gaps equal."""
    seed: int = 0
    head: int | None = None
    model: str | None = None
    domain: str | None = None
    tenant: str | None = None

    def __post_init__(self) -> None:
        for name in ("request_rate", "burstiness"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"{name}: must be above 0, not {value}")
        if self.head is not None and self.head < 1:
            raise ConfigError(f"head: must be at least 1, not {self.head}")

    @property
    def drawn_rate(self) -> float | None:
        """The rate, where arrivals are to be drawn: all at once is what a trace without times has already."""
        return None if self.request_rate is None or math.isinf(self.request_rate) else self.request_rate


@dataclass
class Written:
    """One trace that was written."""

    path: Path
    inputs: list[Stream]
    requests: int = 0
    duration_s: float = 0.0
    columns: list[str] = field(default_factory=list)
    metadata: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """One JSON object."""
        return {
            "leap_trace_version": 1,
            "path": str(self.path),
            "requests": self.requests,
            "duration_s": self.duration_s,
            "columns": self.columns,
            "metadata": self.metadata,
            "inputs": [
                {
                    "path": str(stream.path),
                    "format": stream.format,
                    "left_out": [left_out_dict(out) for out in stream.left_out],
                    "notes": [*stream.notes, *without_times(stream)],
                }
                for stream in self.inputs
            ],
            "notes": self.notes,
        }


def left_out_dict(out: LeftOut) -> dict[str, Any]:
    """As in `--json`."""
    return {"reason": out.reason, "count": out.count, "first": out.first}


def convert(paths: Sequence[Path], out: Path, options: ReadOptions, changes: Changes) -> Written:
    """One trace in the leap format from one file, or from the files of one recording, one behind the other."""
    check_target(out)
    streams = [open_stream(path, options) for path in paths]
    if changes.request_rate is not None:
        for stream in streams:
            if stream.has_times:
                raise ConfigError(
                    f"request_rate: {stream.path} has arrival times of its own; leap-replay --request-rate replaces them"
                )
    if len(streams) == 1:
        stream = streams[0]
        whole = Combined(stream.frames, {"source": f"{stream.path.name} ({stream.format})", **stream.metadata})
    else:
        whole = combine(streams, [str(number) for number in range(len(streams))], join=True, one_recording=True)
        if changes.tenant is None:
            whole.frames = (frame.drop("tenant") for frame in whole.frames)
    if changes.model is not None:
        whole.metadata["model"] = changes.model
    if changes.request_rate is not None:
        whole.metadata[ARRIVALS_KEY] = (
            f"Gamma, {changes.request_rate:g} requests/s, burstiness {changes.burstiness:g}, seed {changes.seed}"
        )
    elif not any(stream.has_times for stream in streams):
        whole.metadata[ARRIVALS_KEY] = NO_ARRIVALS
    whole.frames = _changed(whole.frames, changes)
    written = write(whole, out, streams, rate=changes.drawn_rate)
    if changes.request_rate is not None:
        for stream in streams:
            stream.no_times = ""
        written.notes.append(f"arrival times are drawn: {whole.metadata[ARRIVALS_KEY]}")
    if changes.head is not None and written.requests == changes.head:
        written.notes.append(f"the first {changes.head} requests; anything after them was not read")
    return written


def merge(
    paths: Sequence[Path],
    out: Path,
    options: ReadOptions,
    *,
    labels: Sequence[str] = (),
    behind: bool = False,
    one_recording: bool = False,
) -> Written:
    """Interleave traces by arrival, or put them one behind the other."""
    check_target(out)
    if len(paths) < 2:
        raise ConfigError(f"merge needs at least two traces, not {len(paths)}")
    if labels and len(labels) != len(paths):
        raise ConfigError(f"label: give one a trace, {len(paths)} and not {len(labels)}")
    streams = [open_stream(path, options) for path in paths]
    names = list(labels) or [path.stem for path in paths]
    return write(combine(streams, names, join=behind, one_recording=one_recording), out, streams)


def write(whole: Combined, out: Path, streams: Sequence[Stream], *, rate: float | None = None) -> Written:
    """Write the parts and say what was written; `rate` as in `write_parts`."""
    written = Written(out, list(streams), metadata=whole.metadata, notes=whole.notes)

    def watched() -> Iterator[pl.DataFrame]:
        for frame in whole.frames:
            written.duration_s = float(frame["arrival_s"][-1])
            written.columns = frame.columns
            yield frame

    written.requests = write_parts(watched(), out, whole.metadata, rate=rate)
    if rate is not None and written.duration_s > 0:
        written.duration_s = written.requests / rate
    for stream in streams:
        stream.close()
    return written


def _changed(frames: Iterator[pl.DataFrame], changes: Changes) -> Iterator[pl.DataFrame]:
    constants = [
        pl.lit(text).alias(name) for name, text in (("domain", changes.domain), ("tenant", changes.tenant)) if text
    ]
    arrivals = _GammaArrivals(changes) if changes.drawn_rate is not None else None
    wanted = changes.head
    for frame in frames:
        part = frame if wanted is None else frame.head(wanted)
        part = part.with_columns(constants)
        if arrivals is not None:
            part = part.with_columns(arrivals.next(part.height))
        yield part
        if wanted is not None:
            wanted -= part.height
            if wanted == 0:
                return


class _GammaArrivals:
    """Arrivals with gaps of shape `burstiness`, the first request's own among them, as in `vllm bench serve`.

    Their mean is 1: whoever knows how many there are scales them to the rate.
    """

    def __init__(self, changes: Changes) -> None:
        self._random = np.random.default_rng(changes.seed)
        self._shape = changes.burstiness
        self._last = 0.0

    def next(self, count: int) -> pl.Series:
        gaps = np.ones(count) if math.isinf(self._shape) else self._random.gamma(self._shape, 1 / self._shape, count)
        # Added in before the sum, so that the size of the parts changes no rounding.
        gaps[0] += self._last
        times = np.cumsum(gaps)
        self._last = float(times[-1])
        return pl.Series("arrival_s", times)
