"""Which kind of measured run a path holds, and its requests: LLMServingSim logs, benchmark results, other logs, leap traces."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import polars as pl

from leap_rs._leap import TraceError
from leap_rs.trace import Reader, ReadOptions, Trace, load
from leap_rs.trace.benchmarks.guidellm import GuideLlmReader, benchmarks
from leap_rs.trace.files import existing_file
from leap_rs.trace.otlp import OtlpReader
from leap_rs.trace.reading import reader_of
from leap_rs.trace.requests import CLIENT_QUEUE, E2EL, TTFT
from leap_rs.trace.schema import block_size
from leap_rs.trace.vllm_bench import VllmBenchReader, bench_runs

from . import servingsim
from .measured import EngineFacts, Floats, MeasuredRun

MEASURED = ("measured_queued_s", "measured_first_token_s", "measured_last_token_s")
FORMATS = (
    "an LLMServingSim run (a directory with requests.jsonl, or that file), the JSON of vllm bench serve --save-detailed, "
    "vLLM's OpenTelemetry spans, a file of AIPerf, GuideLLM or inference-perf with a request each, "
    f"or a leap trace with {', '.join(MEASURED)}, or {TTFT} and {E2EL}"
)
_CLIENT = "times are the client's, so network and front end count as time of the engine"
_SERVER = "times are the API server's, so the front end counts as time of the engine"


def read_runs(path: str | os.PathLike[str], workload: Path | None = None) -> list[MeasuredRun]:
    """The runs at `path`, usually one. `workload` is the file with token ids of an LLMServingSim run.

    Raises `TraceError` that names the file, the line and the key.
    """
    path = Path(path)
    if path.is_dir():
        log = path / servingsim.LOG
        if not log.is_file():
            raise TraceError(f"{path}: no {servingsim.LOG} in this directory. Expected {FORMATS}")
        return [servingsim.read(log, workload)]
    existing_file(path)
    reader = _reader(path)
    if isinstance(reader, VllmBenchReader) or (reader is None and path.suffix == ".json"):
        return _benchmarks(path)
    if reader is None and path.suffix == ".jsonl":
        return [servingsim.read(path, workload)]
    if isinstance(reader, GuideLlmReader) and (count := len(benchmarks(path))) > 1:
        traces = [load(path, ReadOptions(run=number)) for number in range(1, count + 1)]
        return [_logged(trace, f"{path.stem} run {number}") for number, trace in enumerate(traces, start=1)]
    trace = load(path)
    columns = trace.frame.columns
    if trace.format == "leap" and any(name in columns for name in MEASURED[1:]):
        return [_trace(trace)]
    if TTFT in columns and E2EL in columns:
        return [_logged(trace, path.stem)]
    raise TraceError(f"{path}: not a measured run. Expected {FORMATS}")


def _reader(path: Path) -> Reader | None:
    """The reader of a trace's format; None where the file is of none, as the log of a run is."""
    try:
        return reader_of(path)
    except TraceError:
        return None


def _benchmarks(path: Path) -> list[MeasuredRun]:
    found = bench_runs(path)
    runs = []
    for bench in found:
        # With --max-concurrency the client holds a request back after its planned time: that is no time of the engine.
        sent = bench.arrival_s + bench.client_queue_s
        order = np.argsort(sent, kind="stable")
        zero = sent[order[0]]
        model = bench.summary.get("model_id")
        notes = [_CLIENT, "prompts are not in the file: shared prefixes are not known, and none are simulated"]
        runs.append(
            MeasuredRun(
                path=path,
                name=path.stem if len(found) == 1 else f"{path.stem} run {bench.number}",
                format="vllm-bench",
                planned_s=(bench.arrival_s - zero)[order],
                sent_s=(sent - zero)[order],
                queued_s=(sent - zero)[order],
                first_token_s=(bench.arrival_s + bench.ttft_s - zero)[order],
                last_token_s=(bench.arrival_s + bench.e2el_s - zero)[order],
                requests=pl.DataFrame(
                    {"prompt_tokens": bench.prompt_tokens[order], "output_tokens": bench.output_tokens[order]}
                ),
                block_size=16,
                facts=EngineFacts(model if isinstance(model, str) else None, path.stem),
                one_loop_clock=False,
                notes=(*(str(out) for out in bench.left_out), *bench.notes, *notes),
            )
        )
    return runs


def _trace(trace: Trace) -> MeasuredRun:
    frame, path = trace.frame, trace.path
    for column in MEASURED:
        if column not in frame.columns:
            raise _fault(path, f"missing; a measured run has {', '.join(MEASURED)}", column=column)
        _require_seconds(frame[column], path)
    queued, first, last = (frame[column].cast(pl.Float64).to_numpy() for column in MEASURED)
    arrival = frame["arrival_s"].to_numpy()
    for column, wrong, rule in (
        (MEASURED[0], queued < arrival, "queued before arrival_s: they must be on one clock"),
        (MEASURED[1], first < queued, f"the first token came before {MEASURED[0]}"),
        (MEASURED[2], last < first, f"the last token came before {MEASURED[1]}"),
    ):
        if wrong.any():
            raise _fault(path, rule, column=column, row=int(np.argmax(wrong)))
    order = np.argsort(queued, kind="stable")

    def from_first(times: Floats) -> Floats:
        since: Floats = (times - queued[order[0]])[order]
        return since

    kept = [name for name in ("prompt_tokens", "output_tokens", "prefix_blocks") if name in frame.columns]
    notes = [] if "prefix_blocks" in kept else ["no prefix_blocks: shared prefixes are not known, none are simulated"]
    return MeasuredRun(
        path=path,
        name=path.stem,
        format="leap",
        planned_s=from_first(arrival),
        sent_s=from_first(arrival),
        queued_s=from_first(queued),
        first_token_s=from_first(first),
        last_token_s=from_first(last),
        requests=frame.select(kept)[order],
        block_size=block_size(path, trace.metadata),
        facts=EngineFacts(trace.metadata.get("model"), f"{path.stem} {trace.metadata.get('source', '')}"),
        notes=tuple(notes),
    )


def _logged(trace: Trace, name: str) -> MeasuredRun:
    """A log of requests, each with its own times from its planned arrival."""
    path = trace.path
    if not trace.has_times:
        raise TraceError(f"{path}: not a measured run: no arrival times ({trace.no_times})")
    frame = trace.frame
    if CLIENT_QUEUE not in frame.columns:
        frame = frame.with_columns(pl.lit(0.0).alias(CLIENT_QUEUE))
    times = [pl.col(name).cast(pl.Float64, strict=False) for name in (CLIENT_QUEUE, TTFT, E2EL)]
    queue, ttft, e2el = times
    known = pl.all_horizontal(queue >= 0, ttft >= queue, e2el >= ttft, e2el.is_finite()).fill_null(value=False)
    kept = frame.filter(known)
    if not kept.height:
        raise TraceError(f"{path}: not a measured run: no request has {TTFT} and {E2EL}")
    notes = [*map(str, trace.left_out), *trace.notes]
    if without := frame.height - kept.height:
        notes.append(f"{without} of {frame.height} requests left out: no measured times that can be right")
    notes.append(_SERVER if trace.format == OtlpReader.name else _CLIENT)
    columns = [name for name in ("prompt_tokens", "output_tokens", "prefix_blocks") if name in kept.columns]
    if "prefix_blocks" not in columns:
        notes.append("prompts are not in the file: shared prefixes are not known, and none are simulated")
    arrival, held, first, last = (
        kept.select(one.alias("s"))["s"].to_numpy() for one in (pl.col("arrival_s"), queue, ttft, e2el)
    )
    sent = arrival + held
    order = np.argsort(sent, kind="stable")
    zero = sent[order[0]]

    def from_first(seconds: Floats) -> Floats:
        since: Floats = (seconds - zero)[order]
        return since

    return MeasuredRun(
        path=path,
        name=name,
        format=trace.format,
        planned_s=from_first(arrival),
        sent_s=from_first(sent),
        queued_s=from_first(sent),
        first_token_s=from_first(arrival + first),
        last_token_s=from_first(arrival + last),
        requests=kept.select(columns)[order],
        block_size=block_size(path, trace.metadata),
        facts=EngineFacts(trace.metadata.get("model"), path.stem),
        one_loop_clock=False,
        notes=tuple(notes),
    )


def _fault(path: Path, what: str, *, column: str, row: int | None = None) -> TraceError:
    where = "" if row is None else f", row {row} (the first row is 0)"
    return TraceError(f"{path}: column '{column}'{where}: {what}")


def _require_seconds(column: pl.Series, path: Path) -> None:
    if not column.dtype.is_numeric():
        raise _fault(path, f"must be seconds as Float64, not {column.dtype}", column=column.name)
    bad = column.is_null() | ~column.cast(pl.Float64).is_finite().fill_null(value=False)
    rows = bad.arg_true()
    if len(rows):
        raise _fault(path, "must be a finite number of seconds", column=column.name, row=int(rows[0]))
