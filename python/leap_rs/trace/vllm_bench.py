"""Results of `vllm bench serve --save-detailed`: measured runs for calibration, and the traffic they saw as a trace.

The file holds one JSON object a run (`--append-result` puts another behind it, and `vllm bench sweep` makes a list of them)
with an array a request for each quantity; without `--save-detailed` vLLM removes most of the arrays, and what is left is no trace.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from leap_rs._leap import TraceError
from leap_rs.trace.benchmarks.several import chosen
from leap_rs.trace.foreign import ForeignReader
from leap_rs.trace.jsontext import documents, shown
from leap_rs.trace.model import LeftOut, Raw, ReadOptions
from leap_rs.trace.opening import JSON, JSON_LIST, Fit, Opening, opened
from leap_rs.trace.schema import U32_MAX
from leap_rs.trace.times import MAX_S

_KNOWN_BY = ("backend", "model_id", "tokenizer_id", "num_prompts", "burstiness", "endpoint_type")
_DETAILS = ("input_lens", "output_lens", "ttfts", "itls")
_PER_REQUEST = (*_DETAILS, "latencies", "start_times", "queue_times", "generated_texts", "errors")

F64 = NDArray[np.float64]
U32 = NDArray[np.uint32]


@dataclass(frozen=True)
class BenchRun:
    """One measured run: its requests that succeeded, by planned arrival.

    The planned arrival is the time at which the client meant to send; with `--max-concurrency` it holds requests back
    for `client_queue_s` after it. `ttft_s` and `e2el_s` count from the planned arrival, so that they hold that wait too.
    """

    path: Path
    number: int
    """Which result of its file, counted from 1."""
    summary: dict[str, Any]
    """The result without its arrays; NaN and infinities, which vLLM writes where a mean is undefined, are None."""
    arrival_s: F64
    """Seconds after the first request's."""
    ttft_s: F64
    e2el_s: F64
    prompt_tokens: U32
    output_tokens: U32
    itls_s: list[list[float]]
    """Seconds between the chunks of a request; a chunk may hold several tokens."""
    client_queue_s: F64
    left_out: tuple[LeftOut, ...] = ()
    notes: tuple[str, ...] = ()
    has_times: bool = True
    """False where the vLLM that wrote the file kept no send times; all arrivals are then 0."""


def is_bench_result(path: Path) -> bool:
    """Whether the file begins as a result of `vllm bench serve`, detailed or not, or as a list of them."""
    return VllmBenchReader().fit(opened(path)).whole


def bench_runs(path: Path) -> list[BenchRun]:
    """Every run in the file. `TraceError` where there is none, or where one is a summary without requests or times."""
    runs = [read_run(path, number, result) for number, result in enumerate(results(path), start=1)]
    for run in runs:
        if not run.has_times:
            what = "has no start_times: the vLLM that wrote it did not yet record when requests were sent"
            raise TraceError(f"{path}: run {run.number} {what}")
    return runs


def results(path: Path) -> list[dict[str, Any]]:
    """The results of a file as they stand there."""
    found = documents(path)
    if not found:
        raise TraceError(f"{path}: the file is empty")
    return found


def read_run(path: Path, number: int, result: dict[str, Any]) -> BenchRun:
    """One result of a file, checked. `TraceError` names the run, the array and the request."""
    return _Result(path, number, result).run()


class VllmBenchReader(ForeignReader):
    """The traffic of a benchmark run: planned arrivals, prompt and output tokens of the requests that succeeded."""

    name = "vllm-bench"
    description = "vllm bench serve JSON (saved with --save-detailed)"
    own_options = ("run",)
    kinds = (JSON, JSON_LIST)
    keys = _KNOWN_BY

    def fit(self, opening: Opening) -> Fit:
        """See `Reader`. Releases have different keys, and half of those that tell it suffice."""
        found = super().fit(opening)
        return Fit(found.has) if not found.but and 2 * len(found.has) >= len(_KNOWN_BY) else found

    def raw(self, path: Path, options: ReadOptions) -> Raw:
        """See `ForeignReader`."""
        options.refuse_unit(path, "the times of vllm bench serve are seconds")
        runs = _chosen(path, options)
        left_out = [out for run in runs for out in run.left_out]
        if options.strict and left_out:
            first = left_out[0]
            raise TraceError(f"{path}: {first.first}: {first.reason}, and strict refuses that")
        notes = [note for run in runs for note in run.notes]
        if len(runs) > 1:
            notes.append(f"{len(runs)} runs are joined, each at the end of the one before")
        model = runs[0].summary.get("model_id")
        return Raw(
            iter(_one_after_the_other(runs)),
            {"arrival_s": "start_times", "prompt_tokens": "input_lens", "output_tokens": "output_lens"},
            place="request",
            no_times="" if all(run.has_times for run in runs) else "no key 'start_times'",
            metadata={"source": "vllm bench serve"} | ({"model": model} if isinstance(model, str) else {}),
            left_out=left_out,
            notes=notes,
        )


def _chosen(path: Path, options: ReadOptions) -> list[BenchRun]:
    return [read_run(path, number, result) for number, result in chosen(path, results(path), options)]


def _one_after_the_other(runs: list[BenchRun]) -> list[pl.DataFrame]:
    # Each run has a clock of its own, so that the next one can only be put where the last answer ended.
    begin = 0.0
    parts = []
    for run in runs:
        arrival = begin + run.arrival_s
        if float(arrival.max()) > MAX_S:
            raise TraceError(f"{run.path}: run {run.number}: the runs last over a century, one behind the other")
        parts.append(
            pl.DataFrame(
                {
                    "place": np.arange(len(arrival), dtype=np.uint64),
                    "arrival_ns": np.rint(arrival * 1e9).astype(np.int64),
                    "prompt_tokens": run.prompt_tokens.astype(np.int64),
                    "output_tokens": run.output_tokens.astype(np.int64),
                }
            )
        )
        begin = float((arrival + run.e2el_s).max())
    return parts


class _Result:
    """One result on its way to a `BenchRun`."""

    def __init__(self, path: Path, number: int, result: dict[str, Any]) -> None:
        self._path = path
        self._number = number
        self._result = result

    def run(self) -> BenchRun:
        self._refuse_summary()
        prompt, output = self._tokens("input_lens"), self._tokens("output_lens")
        ttft, itls = self._seconds("ttfts"), self._gaps()
        latency = self._seconds("latencies") if "latencies" in self._result else None
        queue = self._seconds("queue_times", smallest=-math.inf) if "queue_times" in self._result else None
        start = self._seconds("start_times", smallest=-math.inf) if "start_times" in self._result else None
        if latency is None:
            latency = ttft + np.array([math.fsum(gaps) for gaps in itls], dtype=np.float64)
        # Clocks are read one after the other: a request that did not wait can seem to have left before it was due.
        wait = np.maximum(queue, 0.0) if queue is not None else np.zeros(len(prompt))
        kept, left_out = self._kept(prompt, output)

        planned = start - wait if start is not None else np.zeros(len(prompt))
        order = kept[np.argsort(planned[kept], kind="stable")]
        arrival = planned[order] - planned[order[0]]
        return BenchRun(
            path=self._path,
            number=self._number,
            summary=self._summary(),
            arrival_s=arrival,
            ttft_s=(wait + ttft)[order],
            e2el_s=(wait + latency)[order],
            prompt_tokens=prompt[order],
            output_tokens=output[order],
            itls_s=[itls[at] for at in order],
            client_queue_s=wait[order],
            left_out=left_out,
            notes=self._notes(queue is not None, start is not None),
            has_times=start is not None,
        )

    def _refuse_summary(self) -> None:
        missing = [key for key in _DETAILS if key not in self._result]
        if not missing:
            return
        if "input_sequence_throughput" in self._result:
            raise self._error("a benchmark of a pooling model, which generates no tokens")
        what = f"only a summary (no {', '.join(missing)}): save with --save-detailed"
        raise self._error(what)

    def _array(self, key: str) -> list[Any]:
        values = self._result[key]
        if not isinstance(values, list):
            raise self._error(f"key '{key}': expected an array with one value a request, found {shown(values)}")
        expected = len(self._result[_DETAILS[0]])
        if len(values) != expected:
            raise self._error(f"key '{key}' has {len(values)} values, but '{_DETAILS[0]}' has {expected}")
        return values

    def _tokens(self, key: str) -> U32:
        values = self._array(key)
        for at, value in enumerate(values):
            if type(value) is not int or not 0 <= value <= U32_MAX:
                raise self._wrong(key, at, f"a whole number of tokens up to {U32_MAX}", value)
        return np.array(values, dtype=np.uint32)

    def _seconds(self, key: str, smallest: float = 0.0) -> F64:
        values = self._array(key)
        for at, value in enumerate(values):
            if not _is_seconds(value, smallest):
                raise self._wrong(key, at, "a finite number of seconds below 146 years", value)
        return np.array(values, dtype=np.float64)

    def _gaps(self) -> list[list[float]]:
        values = self._array("itls")
        for at, gaps in enumerate(values):
            if not isinstance(gaps, list) or not all(_is_seconds(gap, 0.0) for gap in gaps):
                raise self._wrong("itls", at, "a list of finite numbers of seconds", gaps)
        return [[float(gap) for gap in gaps] for gaps in values]

    def _kept(self, prompt: U32, output: U32) -> tuple[NDArray[np.intp], tuple[LeftOut, ...]]:
        errors = self._array("errors") if "errors" in self._result else [""] * len(output)
        failed = np.array([bool(error) for error in errors], dtype=bool)
        reasons = (
            ("the request failed", failed),
            ("no output tokens, so a failed request", ~failed & (output == 0)),
            ("no prompt tokens", ~failed & (output > 0) & (prompt == 0)),
        )
        left_out = tuple(
            LeftOut(why, int(rows.sum()), f"run {self._number}, request index {int(np.argmax(rows))}")
            for why, rows in reasons
            if rows.any()
        )
        kept = np.flatnonzero(~failed & (output > 0) & (prompt > 0))
        if not kept.size:
            raise self._error(f"no request succeeded ({len(output)} in the file)")
        return kept, left_out

    def _summary(self) -> dict[str, Any]:
        def defined(value: object) -> object:
            return None if isinstance(value, float) and not math.isfinite(value) else value

        return {key: defined(value) for key, value in self._result.items() if key not in _PER_REQUEST}

    def _notes(self, has_queue: bool, has_start: bool) -> tuple[str, ...]:
        limit = self._result.get("max_concurrency")
        if has_start and not has_queue and limit is not None:
            what = f"arrivals are when the client let a request go under --max-concurrency {limit}"
            return (f"run {self._number}: {what}, not when it was due: the file has no queue_times",)
        return ()

    def _wrong(self, key: str, at: int, wanted: str, value: object) -> TraceError:
        return self._error(f"key '{key}', request index {at}: expected {wanted}, found {shown(value)}")

    def _error(self, what: str) -> TraceError:
        return TraceError(f"{self._path}: run {self._number}: {what}")


def _is_seconds(value: object, smallest: float) -> bool:
    # type() and not isinstance(), because true is an int to Python; NaN is in no range.
    return type(value) in (float, int) and max(smallest, -MAX_S) <= value <= MAX_S  # type: ignore[operator]
