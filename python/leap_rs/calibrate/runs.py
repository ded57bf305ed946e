"""Which kind of measured run a path holds, and its requests: LLMServingSim logs, benchmark results, leap traces."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import polars as pl

from leap_rs._leap import TraceError
from leap_rs.trace import Trace, load
from leap_rs.trace.files import existing_file
from leap_rs.trace.schema import block_size

from . import servingsim
from .measured import EngineFacts, Floats, MeasuredRun

MEASURED = ("measured_queued_s", "measured_first_token_s", "measured_last_token_s")
FORMATS = (
    "an LLMServingSim run (a directory with requests.jsonl, or that file), the JSON of vllm bench serve --save-detailed, "
    f"or a leap trace with {', '.join(MEASURED)}"
)


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
    if path.suffix == ".jsonl":
        return [servingsim.read(path, workload)]
    if path.suffix == ".json":
        return _benchmarks(path)
    trace = load(path)
    if trace.format != "leap" or MEASURED[1] not in trace.frame.columns:
        raise TraceError(f"{path}: not a measured run. Expected {FORMATS}")
    return [_trace(trace)]


def _benchmarks(path: Path) -> list[MeasuredRun]:
    from leap_rs.trace.vllm_bench import bench_runs

    found = bench_runs(path)
    runs = []
    for bench in found:
        # With --max-concurrency the client holds a request back after its planned time: that is no time of the engine.
        sent = bench.arrival_s + bench.client_queue_s
        order = np.argsort(sent, kind="stable")
        zero = sent[order[0]]
        model = bench.summary.get("model_id")
        notes = ["times are the client's, so network and front end count as time of the engine"]
        notes.append("prompts are not in the file: shared prefixes are not known, and none are simulated")
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
