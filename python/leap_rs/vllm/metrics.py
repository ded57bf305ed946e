"""Numbers of the plugin, from the engine's process to the API server's `/metrics`.

The two have no channel for numbers that vLLM does not know, so each engine writes a small memory-mapped file that says
itself what it holds, and every API process reads the files of all engines: each scrape shows the same, whichever process
answers it. A value is 8 aligned bytes that one thread writes and that are therefore never read in halves.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import secrets
import struct
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from leap_rs._leap import LeapError
from leap_rs.trace import schema
from leap_rs.trace.files import reason

from .places import held, hold, place, private, run_name

MAGIC = b"LEAPMET1"
_HEAD = struct.Struct("<8sQ")

READOUTS = tuple(schema.COLUMN_OF)
_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
_SECONDS = tuple(1e-6 * 2**i for i in range(15))


@dataclass(frozen=True)
class Metric:
    """One metric. Counts are of engine requests: a prompt with n answers is n of them."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    label: str | None = None
    values: tuple[str, ...] = ()
    """Values of the label."""
    buckets: tuple[float, ...] = ()

    @property
    def width(self) -> int:
        """Numbers for each value of the label: of a histogram a count a bucket, one above all of them, and the sum."""
        return len(self.buckets) + 2 if self.kind == "histogram" else 1


def _by_readout(name: str, kind: Literal["counter", "gauge", "histogram"], text: str, *buckets: float) -> Metric:
    return Metric(name, kind, text, "readout", READOUTS, buckets)


LABEL_KINDS = ("exact", "censored", "forced", "aborted", "failed")
ENCODER_OUTCOMES = ("read", "seen_before", "skipped")
METRICS = (
    _by_readout("predictions", "counter", "Engine requests whose length a readout has predicted."),
    _by_readout("prediction_seconds", "histogram", "Time that a prediction took.", *_SECONDS),
    _by_readout("predicted_tokens", "histogram", "Predicted output tokens, at most the request's own limit.", *_TOKENS),
    Metric("output_tokens", "histogram", "Output tokens of finished engine requests that are labels.", buckets=_TOKENS),
    _by_readout("absolute_error_tokens", "histogram", "|Predicted - actual| output tokens of labels.", *_TOKENS),
    _by_readout("rank_correlation", "gauge", "Spearman's rank correlation over the window; NaN while undefined."),
    Metric("labels", "counter", "Finished engine requests by what they say of lengths.", "kind", LABEL_KINDS),
    Metric("nothing_to_learn", "gauge", "1 while none of the last 500 requests that finished is a label, else 0."),
    _by_readout("dropped_labels", "counter", "Labels that found the learner's queue full."),
    _by_readout("refused_rows", "counter", "Feature rows that could not be used (NaN, infinite, of another width)."),
    _by_readout("updates", "counter", "Updates of a readout by finished requests, those of a resumed state included."),
    Metric("faults", "counter", "Faults of the plugin: after the first one the schedule is vLLM's own for good."),
    _by_readout("armed_readout", "gauge", "1 where the schedule may follow a readout, else 0."),
    Metric("mode", "gauge", "1 for the mode in force: shadow is vLLM's own order.", "mode", ("shadow", "armed")),
    Metric("readout_version", "gauge", "Times that the predictions of live requests were renewed."),
    Metric("rescored_requests", "counter", "Predictions of live engine requests that were renewed."),
    Metric("state_saves", "counter", "Learned states that were saved.", "outcome", ("saved", "failed")),
    Metric("gated_requests", "gauge", "Resident engine requests without a decode slot in the last step."),
    Metric("slot_waits", "counter", "Steps that resident engine requests spent without a decode slot."),
    Metric("wait_cap_promotions", "counter", "Engine requests that went first because they had waited for too long."),
    Metric("evictions", "counter", "Residents that gave their KV cache to a waiting engine request."),
    Metric("blocked_requests", "gauge", "Waiting engine requests that vLLM has put off (LoRA, grammar, remote KV)."),
    Metric(
        "admission_holds", "counter", "Steps in which the first of the queue had no room for what it will grow into."
    ),
    Metric("recomputed_tokens", "counter", "Tokens that preempted engine requests computed again."),
    Metric("kv_peak_ratio", "gauge", "KV blocks that residents came to hold over those predicted; NaN while unknown."),
    Metric("captures_missed", "counter", "Labels of engine requests whose hidden state never came in."),
    Metric("encoder_prompts", "counter", "Prompts by what became of their text.", "outcome", ENCODER_OUTCOMES),
    Metric("encoder_seconds", "counter", "Time that the text encoder spent on reading prompts."),
    Metric("encoder_backlog", "gauge", "Prompts that wait for the text encoder."),
    Metric("encoder_up", "gauge", "1 while the text encoder runs, else 0."),
)
OF_THE_SCHEDULER = (
    *(("mode", "shadow"), ("mode", "armed"), ("gated_requests", ""), ("slot_waits", "")),
    *(("wait_cap_promotions", ""), ("evictions", ""), ("blocked_requests", "")),
    *(("admission_holds", ""), ("recomputed_tokens", ""), ("kv_peak_ratio", "")),
)
"""Written by the scheduler's thread, with the value of the label; the others are the brain's."""


class MetricsWriter:
    """The engine's side. Each metric is written by one thread."""

    def __init__(self, values: npt.NDArray[np.float64], path: Path | None, mapped: mmap.mmap | None) -> None:
        self._values = values
        self._mapped = mapped
        self._inode = path.stat() if path is not None else None
        self.path = path
        self._places = {(m.name, value): (at, m.buckets) for m, value, at in _places(METRICS)}
        for readout in READOUTS:
            self.set("rank_correlation", float("nan"), readout)
        self.set("kv_peak_ratio", float("nan"))

    @classmethod
    def create(cls, path: Path, *, model_name: str, engine: int) -> MetricsWriter:
        """Writes a file of zeros and maps it.

        Raises:
            LeapError: It cannot be written.
        """
        metrics = [vars(m) for m in METRICS]
        schema = {"model_name": model_name, "engine": str(engine), "metrics": metrics}
        text = json.dumps(schema).encode()
        text += b" " * (-(len(text)) % 8)
        size = 8 * sum(m.width * max(len(m.values), 1) for m in METRICS)
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
        private(path.parent)
        _sweep(path.parent)
        try:
            with temporary.open("x+b") as file:
                # Before it has its name, so that nobody ever finds it without. What is mapped keeps the file open.
                hold(file.fileno())
                file.write(_HEAD.pack(MAGIC, len(text)) + text + bytes(size))
                file.flush()
                mapped = mmap.mmap(file.fileno(), 0)
            temporary.replace(path)
        except OSError as error:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise LeapError(f"{path}: cannot be written: {reason(error)}") from error
        values = np.frombuffer(mapped, dtype=np.float64, offset=_HEAD.size + len(text))
        return cls(values, path, mapped)

    @classmethod
    def nowhere(cls) -> MetricsWriter:
        """One that nobody reads, where there is no place for a file."""
        return cls(np.zeros(sum(m.width * max(len(m.values), 1) for m in METRICS)), None, None)

    def add(self, name: str, amount: float = 1.0, value: str = "") -> None:
        """Adds to a counter or gauge."""
        self._values[self._places[name, value][0]] += amount

    def set(self, name: str, number: float, value: str = "") -> None:
        """Sets a gauge, or a counter that is counted elsewhere."""
        self._values[self._places[name, value][0]] = number

    def observe(self, name: str, number: float, value: str = "") -> None:
        """Adds one observation to a histogram."""
        at, buckets = self._places[name, value]
        self._values[at + bisect_left(buckets, number)] += 1.0
        self._values[at + len(buckets) + 1] += number

    def get(self, name: str, value: str = "") -> float:
        """The number of a counter or gauge; of a histogram how often it was observed."""
        at, buckets = self._places[name, value]
        return float(self._values[at : at + len(buckets) + 1].sum() if buckets else self._values[at])

    def close(self) -> None:
        """Takes the file away; what is still written goes nowhere."""
        with contextlib.suppress(OSError):
            # Another engine of this number may have come since.
            if self.path is not None and self._inode is not None and os.path.samestat(self._inode, self.path.lstat()):
                self.path.unlink()


@dataclass(frozen=True)
class Reading:
    """What one engine's file held at one moment."""

    model_name: str
    engine: str
    metrics: tuple[Metric, ...]
    values: tuple[float, ...]

    def series(self) -> Iterator[tuple[Metric, str, Sequence[float]]]:
        """Each metric with each value of its label and its numbers."""
        for metric, value, at in _places(self.metrics):
            yield metric, value, self.values[at : at + metric.width]


def show_given_up(metrics: MetricsWriter) -> None:
    """What the scheduler shows after a fault: vLLM's own order, and nobody held back."""
    metrics.set("mode", 1.0, "shadow")
    metrics.set("mode", 0.0, "armed")
    metrics.set("gated_requests", 0.0)
    metrics.set("blocked_requests", 0.0)


def read(path: Path) -> Reading | None:
    """An engine's file; None where there is none that is whole, or its engine has ended without taking it away."""
    try:
        with path.open("rb") as file:
            if not held(file.fileno()):
                return None
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError):
        return None
    with mapped:
        if len(mapped) < _HEAD.size:
            return None
        magic, length = _HEAD.unpack_from(mapped)
        if magic != MAGIC:
            return None
        schema = json.loads(mapped[_HEAD.size : _HEAD.size + length])
        numbers = np.frombuffer(mapped, dtype=np.float64, offset=_HEAD.size + length)
        # Number by number, each in one load: a copy of the whole would be one of bytes.
        values = tuple(numbers.tolist())
        del numbers
    return Reading(schema["model_name"], schema["engine"], tuple(_metric(m) for m in schema["metrics"]), values)


def _metric(fields: dict[str, Any]) -> Metric:
    return Metric(**{**fields, "values": tuple(fields["values"]), "buckets": tuple(fields["buckets"])})


def _places(metrics: Sequence[Metric]) -> Iterator[tuple[Metric, str, int]]:
    at = 0
    for metric, value in ((m, v) for m in metrics for v in (m.values or ("",))):
        yield metric, value, at
        at += metric.width


def _sweep(directory: Path) -> None:
    """Takes away the files in a directory of ours whose engines have ended."""
    for path in directory.glob("*.metrics"):
        with contextlib.suppress(OSError):
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                if not held(descriptor):
                    path.unlink()
            finally:
                os.close(descriptor)


def engine_path(engine: int, directory: Path | None = None) -> Path:
    """Where an engine's process writes. Without a `directory`, where the API processes of its run look.

    Raises:
        LeapError: There is no such place.
    """
    return directory / f"engine-{engine}.metrics" if directory else place("metrics") / f"{run_name()}-{engine}.metrics"


def engine_files(directory: Path | None = None) -> list[Path]:
    """The files that an API process reads: of the engines of its run."""
    try:
        found = directory.glob("engine-*.metrics") if directory else place("metrics").glob(f"{run_name()}-*.metrics")
    except LeapError:
        return []
    return sorted(found)
