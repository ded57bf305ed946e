"""One replay from a trace and options to a `ReplayResult`: reads, checks, calls the core, assembles."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import polars as pl

from leap_rs import _leap
from leap_rs._leap import ConfigError, TraceError
from leap_rs.trace import Trace, schema
from leap_rs.trace import load as load_trace

from . import columns, engines, readouts
from .options import Options, build, in_json
from .page import rows as page_rows
from .results import ReplayResult, assemble, requests_frame
from .seats import held_tokens

if TYPE_CHECKING:
    from leap_rs.trace import ReadOptions

Progress = Callable[[float], None]


def replay(
    trace: str | os.PathLike[str] | pl.DataFrame,
    *,
    policies: Sequence[str] | str | None = None,
    load: float | Sequence[float] | None = None,
    seeds: int = 5,
    keep_requests: bool = True,
    progress: Progress | None = None,
    **options: Any,
) -> ReplayResult:
    """Replay a recorded trace under several scheduling policies on a simulated engine.

    trace: a trace file of any format that leap reads, or a frame in the leap trace format (checked as a file would be).
    policies: specifications `NAME[:key=value,...]`; by default every policy that can run on this trace.
    load: offered load as a multiple of the FCFS capacity measured on the same trace (and under `max_concurrency`), one
    or several; the trace's own arrival times without it.
    seeds: runs a policy and load; the first replays the trace as recorded, each further one deals the requests anew
    over the same arrival times. Intervals are 95 % by Student's t over them.
    keep_requests: whether `ReplayResult.requests` holds a row a request, policy and seed.
    progress: called with the share done, from 0 to 1.
    options: those of the `leap-replay` command with underscores (`request_rate`, `engine`, `decode_slots`, `kv_tokens`,
    `goodput`, `sweep`, `readout`, ...).

    Raises `ConfigError` for an option that cannot be used, `TraceError` and `ReadoutError` for the inputs.
    """
    values: dict[str, Any] = {"load": load, "seeds": seeds, **options}
    if policies is not None:
        values["policies"] = (policies,) if isinstance(policies, str) else tuple(policies)
    if isinstance(load, (list, tuple)):
        values["load"] = tuple(load)
    result = run(trace, build(values), keep_requests=keep_requests, progress=progress)
    result.command = _call(trace, values)
    return result


def _call(trace: str | os.PathLike[str] | pl.DataFrame, values: Mapping[str, Any]) -> str:
    """The call of `replay` that gives the same result; a frame has no name here but `frame`."""
    source = "frame" if isinstance(trace, pl.DataFrame) else repr(os.fspath(trace))
    given = {"seed": 0, **{key: value for key, value in values.items() if value is not None}}
    named = ", ".join(f"{key}={_literal(value)}" for key, value in given.items())
    return f"leap_rs.replay({source}, {named})"


def _literal(value: Any) -> str:
    if isinstance(value, os.PathLike):
        return repr(os.fspath(value))
    return 'float("inf")' if value == math.inf else repr(value)


def run(
    source: str | os.PathLike[str] | pl.DataFrame | Trace,
    options: Options,
    *,
    read_options: ReadOptions | None = None,
    keep_requests: bool = False,
    for_page: bool = False,
    progress: Progress | None = None,
) -> ReplayResult:
    """Replay with options that are already validated.

    keep_requests: whether the result holds a row a request, policy and seed.
    for_page: whether it holds what `ReplayResult.report` shows of single requests, in bounded memory.
    """
    core_engine, stated_engine = engines.resolve(options)
    trace, trace_path = open_trace(source, read_options)
    frame = trace.frame
    if not trace.has_times and options.request_rate is None:
        raise TraceError(
            f"{trace.path}: no arrival times ({trace.no_times}): --request-rate (request_rate=) draws them"
        )
    notes = [str(left) for left in trace.left_out] + list(trace.notes) + columns.turns(frame)
    block = schema.block_size(trace.path, trace.metadata)
    arrays, column_notes = columns.to_columns(frame, trace_block=block, engine_block=core_engine["block_size"])
    chosen = readouts.choose(options.readout, frame=frame, metadata=trace.metadata, trace_path=trace_path)
    notes += column_notes + chosen.notes
    named = options.policies
    policies = readouts.default_policies(frame) if named is None else list(dict.fromkeys(named))
    points = options.points()
    request = {
        "policies": policies,
        "points": points,
        "burstiness": in_json(options.burstiness),
        "num_prompts": options.num_prompts,
        "seed": options.seed,
        "seeds": options.seeds,
        "max_concurrency": options.max_concurrency,
        "goodput": options.goodput,
        "percentiles": list(options.metric_percentiles),
        "max_tokens": options.max_tokens,
        "threads": options.threads,
        "wait_cap_s": options.wait_cap_s,
        "engine": core_engine,
    }

    def simulate(wanted: Mapping[str, Any], rows: bool) -> tuple[str, dict[str, Any] | None]:
        return _leap.replay(
            arrays,
            json.dumps(wanted, allow_nan=False),
            {kind: str(file) for kind, file in chosen.files.items()},
            progress,
            rows,
        )

    few = (options.num_prompts or frame.height) * len(policies) * len(points) * options.seeds <= page_rows.MAX_ROWS
    text, rows = simulate(request, keep_requests or (for_page and few))
    answer = json.loads(text)
    policies = list(dict.fromkeys(result["policy"] for result in answer["results"]))
    about = {
        "path": None if trace_path is None else str(trace_path),
        "format": trace.format,
        "recorded_requests": frame.height,
        "kv_tokens_a_resident": held_tokens(frame, core_engine["kv_tokens"], core_engine["block_size"]),
        "model": trace.metadata.get("model"),
        "layer": trace.metadata.get("layer"),
        "features": [name for name in schema.FEATURE_COLUMNS if name in frame.columns],
        "scores": columns.score_names(frame),
    }
    document = assemble(
        answer, options=options, policies=policies, engine=stated_engine, about=about, readouts=chosen.used, notes=notes
    )
    requests = None if rows is None else requests_frame(rows, frame, policies, points)
    result = ReplayResult(document, requests if keep_requests else None)
    if for_page and requests is not None:
        result.details = page_rows.from_requests(document, requests)
    elif for_page:

        def again(point: int, names: Sequence[str]) -> pl.DataFrame:
            """The first seed's rows of some policies, from simulating them once more: its random stream is its own."""
            _, part = simulate({**request, "policies": list(names), "points": [points[point]], "seeds": 1}, True)
            return requests_frame(part or {}, frame, names, [points[point]])

        result.details = page_rows.collect(document, again)
    return result


def open_trace(
    source: str | os.PathLike[str] | pl.DataFrame | Trace, read_options: ReadOptions | None
) -> tuple[Trace, Path | None]:
    """The trace and, where it is a file, its path; one that is open already is taken as it is."""
    if isinstance(source, Trace):
        return source, None if source.format == "frame" else source.path
    if isinstance(source, pl.DataFrame):
        where = Path("<frame>")
        return Trace(schema.checked(source, where, {}), where, "frame"), None
    if not isinstance(source, (str, os.PathLike)):
        raise TraceError(f"a trace is a path or a polars DataFrame, not {type(source).__name__}")
    trace = load_trace(source, read_options)
    return trace, trace.path


__all__ = ["ConfigError", "replay", "run"]
