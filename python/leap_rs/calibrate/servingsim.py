"""Runs in the format of LLMServingSim's benchmark: `requests.jsonl` with `meta.json` and `timeseries.csv` beside it.

A row mixes two clocks, the client's Unix time (`arrival_time`) and the engine's monotonic one (`*_ts`). The engine's is
the one that counts here; the fastest request is taken to have had no lag between the two.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from leap_rs._leap import TraceError
from leap_rs.trace.files import reason
from leap_rs.trace.jsonlines import json_lines
from leap_rs.trace.schema import U32_MAX

from . import workload as workloads
from .measured import EngineFacts, Floats, MeasuredRun, Observed

LOG = "requests.jsonl"
META = "meta.json"
SERIES = "timeseries.csv"
TIMES = ("arrival_time", "queued_ts", "first_token_ts", "last_token_ts")
COUNTS = ("input_toks", "output_toks")

# Ten minutes between client and queue, or a day for one answer, are no latencies but the difference of two clocks.
LONGEST_LAG_S = 600.0
LONGEST_REQUEST_S = 86_400.0
DEFAULT_BLOCK_SIZE = 16


def read(log: Path, workload: Path | None = None) -> MeasuredRun:
    """The run whose requests are in `log`."""
    rows, notes = _rows(log)
    meta = _meta(log.with_name(META))
    name = log.parent.name if log.name == LOG else log.stem
    if not meta:
        notes.append(f"no {META}: model, card and limits of the engine are not known from the run")
    arrival, queued, first, last = (np.array([row[key] for row in rows], dtype=np.float64) for key in TIMES)
    facts = _facts(meta, name)
    if (facts.data_parallel_size or 1) > 1 and _inside(meta, "engine_kwargs").get("enable_expert_parallel") is False:
        notes.append("ranks without expert parallelism do not wait for each other, but are simulated in lock-step")
    # Numbers near 1.8e9 have no room for microseconds' differences with small ones: each clock gets its own zero first.
    unix_zero, engine_zero = arrival.min(), queued.min()
    sent = arrival - unix_zero
    queued, first, last = queued - engine_zero, first - engine_zero, last - engine_zero
    offset = queued - sent
    _require_one_clock(log, rows, offset)
    order = np.argsort(queued, kind="stable")
    sent = sent + offset.min()

    block = int(_limits(meta).get("block_size") or DEFAULT_BLOCK_SIZE)
    planned = sent
    requests = pl.DataFrame(
        {
            "prompt_tokens": [row["input_toks"] for row in rows],
            "output_tokens": [row["output_toks"] for row in rows],
        },
        schema={"prompt_tokens": pl.UInt32, "output_tokens": pl.UInt32},
    )
    plan, told = workloads.find(log, meta, rows, workload, block)
    notes.extend(told)
    if plan is not None:
        # The plan's zero is the latest at which no request was sent before its time.
        planned = plan.arrival_s + (sent - plan.arrival_s).min()
        if plan.blocks is not None:
            requests = requests.with_columns(plan.blocks)
    return MeasuredRun(
        path=log,
        name=name,
        format="llmservingsim",
        planned_s=planned[order],
        sent_s=sent[order],
        queued_s=queued[order],
        first_token_s=first[order],
        last_token_s=last[order],
        requests=requests[order],
        block_size=block,
        facts=facts,
        observed=_observed(log.with_name(SERIES), meta, unix_zero, float(offset.min())),
        notes=tuple(notes),
    )


def _rows(log: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """The requests that gave tokens, checked, each with its line number under `line`."""
    rows: list[dict[str, Any]] = []
    empty: list[int] = []
    ids: dict[str, int] = {}
    for line, row in json_lines(log):
        for key in ("request_id", *COUNTS, *TIMES):
            if key not in row:
                raise TraceError(f"{log}: line {line}: key '{key}' is missing")
        ident = row["request_id"]
        if not isinstance(ident, str):
            raise TraceError(f"{log}: line {line}: key 'request_id': expected text, found {ident!r}")
        if ident in ids:
            raise TraceError(f"{log}: line {line}: key 'request_id': {ident!r} is already that of line {ids[ident]}")
        ids[ident] = line
        for key in COUNTS:
            _require_count(log, line, key, row[key])
        if row["output_toks"] == 0 or row["input_toks"] == 0:
            empty.append(line)
            continue
        for key in TIMES:
            _require_time(log, line, key, row[key])
        _require_order(log, line, row)
        rows.append({**row, "line": line})
    if not rows:
        raise TraceError(f"{log}: the file holds no requests")
    notes = [f"{len(empty)} requests without tokens left out (first: line {empty[0]})"] if empty else []
    return rows, notes


def _require_count(log: Path, line: int, key: str, value: object) -> None:
    if type(value) is not int or not 0 <= value <= U32_MAX:
        raise TraceError(f"{log}: line {line}: key '{key}': expected a whole number of tokens, found {value!r}")


def _require_time(log: Path, line: int, key: str, value: object) -> None:
    # type() and not isinstance(): true is an int to Python. The bound: a float cannot hold every int.
    number = type(value) is float or (type(value) is int and abs(value) < 2**63)
    if not number or not math.isfinite(value):  # type: ignore[arg-type]
        raise TraceError(f"{log}: line {line}: key '{key}': expected a finite number of seconds, found {value!r}")


def _require_order(log: Path, line: int, row: Mapping[str, Any]) -> None:
    for key, before in (("first_token_ts", "queued_ts"), ("last_token_ts", "first_token_ts")):
        if row[key] < row[before]:
            what = f"{row[key]} is before {before} ({row[before]})"
            raise TraceError(f"{log}: line {line}: key '{key}': {what}")
        if row[key] - row[before] > LONGEST_REQUEST_S:
            what = f"{row[key]} is {row[key] - row[before]:.0f} s after {before}: is it on another clock?"
            raise TraceError(f"{log}: line {line}: key '{key}': {what}")


def _require_one_clock(log: Path, rows: list[dict[str, Any]], offset: Floats) -> None:
    """Refuse a row whose clocks lie otherwise than the others'; the message names the line."""
    away = np.abs(offset - np.median(offset))
    row = int(np.argmax(away))
    if away[row] > LONGEST_LAG_S:
        what = f"lies {away[row]:.0f} s otherwise against arrival_time than in the other rows: is it on another clock?"
        raise TraceError(f"{log}: line {rows[row]['line']}: key 'queued_ts': {what}")


def _meta(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_bytes())
    except (ValueError, OSError, RecursionError) as error:
        raise TraceError(f"{path}: not JSON: {reason(error)}") from None
    if not isinstance(found, dict):
        raise TraceError(f"{path}: expected an object, found {type(found).__name__}")
    return found


def _inside(meta: Mapping[str, Any], *keys: str) -> Mapping[str, Any]:
    found: object = meta
    for key in keys:
        found = found.get(key) if isinstance(found, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def _limits(meta: Mapping[str, Any]) -> dict[str, Any]:
    """Limits that the run states: what vLLM resolved where the file has it, else what it was started with."""
    scheduler, cache = _inside(meta, "resolved_config", "scheduler_config"), _inside(meta, "kv_cache")
    asked, resolved_cache = _inside(meta, "engine_kwargs"), _inside(meta, "resolved_config", "cache_config")
    limits: dict[str, Any] = {}
    for key in ("max_num_seqs", "max_num_batched_tokens", "block_size"):
        found = (part.get(key) for part in (scheduler, cache, resolved_cache, asked))
        limits[key] = next((v for v in found if type(v) is int and v > 0), None)
    for key in (
        "async_scheduling",
        "enable_chunked_prefill",
        "enable_prefix_caching",
        "scheduler_reserve_full_isl",
    ):
        found = (part.get(key) for part in (scheduler, cache, resolved_cache, asked))
        limits[key] = next((v for v in found if isinstance(v, bool)), None)
    blocks, size = cache.get("num_gpu_blocks"), limits["block_size"]
    if type(cache.get("num_kv_tokens")) is int:
        limits["kv_tokens"] = cache["num_kv_tokens"]
    elif type(blocks) is int and size:
        limits["kv_tokens"] = blocks * size
    return {key: value for key, value in limits.items() if value is not None}


def _facts(meta: Mapping[str, Any], name: str) -> EngineFacts:
    model, device = meta.get("model"), _inside(meta, "hardware").get("device_name")
    ranks = _inside(meta, "engine_kwargs").get("data_parallel_size")
    return EngineFacts(
        model=model if isinstance(model, str) else None,
        hardware=f"{device if isinstance(device, str) else ''} {name}".strip(),
        limits=_limits(meta),
        data_parallel_size=ranks if type(ranks) is int and ranks > 0 else None,
    )


def _observed(path: Path, meta: Mapping[str, Any], unix_zero: float, shift: float) -> Observed | None:
    """Running and waiting over time. The file counts from `started_at`, or else from the first request."""
    if not path.is_file():
        return None
    columns = ("t", "running", "waiting")
    try:
        frame = pl.read_csv(path, columns=list(columns), schema_overrides=dict.fromkeys(columns, pl.Float64))
    except (pl.exceptions.PolarsError, OSError, ValueError) as error:
        raise TraceError(f"{path}: {reason(error)[:200]}") from None
    for column in columns:
        bad = (~frame[column].is_finite().fill_null(value=False)).arg_true()
        if len(bad):
            raise TraceError(f"{path}: line {int(bad[0]) + 2}: column '{column}': expected a finite number")
    start = unix_zero
    if isinstance(meta.get("started_at"), str):
        try:
            start = datetime.fromisoformat(meta["started_at"].replace("Z", "+00:00")).timestamp()
        except ValueError:
            raise TraceError(f"{path.with_name(META)}: key 'started_at': {meta['started_at']!r} is no time") from None
    at, running, waiting = (frame[column].to_numpy() for column in columns)
    return Observed(at + (start - unix_zero) + shift, running, waiting)
