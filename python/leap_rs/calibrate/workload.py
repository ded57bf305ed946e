"""The workload behind an LLMServingSim run: planned arrivals, and prompts as hashes of their blocks."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import polars as pl

from leap_rs._leap import TraceError
from leap_rs.trace.jsonlines import json_lines
from leap_rs.trace.nested import placed
from leap_rs.trace.servingsim import ARRIVAL, IDS, OUTPUT, PROMPT, block_hashes, token_ids

from .measured import Floats

NS_PER_S = 1e9
PARENTS = 2  # directories above the run in which a workload is looked for
_NUMBERED = re.compile(r"bench-(\d+)")


@dataclass(frozen=True)
class Plan:
    """What the client meant to send, in the order of the log's rows."""

    arrival_s: Floats
    blocks: pl.Series | None
    """`prefix_blocks`, or None where the file holds no token ids."""


def find(
    log: Path, meta: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], given: Path | None, block_size: int
) -> tuple[Plan | None, list[str]]:
    """The plan from the file given, or from the one that `meta.json` names, and what a user should know about it.

    A file that was given must be that of the run (`TraceError`); one that was only found is left alone if it is not.
    """
    if given is not None:
        return read(given, log, rows, block_size), []
    unknown = "shared prefixes are not known, and none are simulated (--workload FILE gives the prompts)"
    named = meta.get("dataset_path")
    path = _beside(log, meta) if isinstance(named, str) else None
    if path is None:
        what = f"workload {PurePosixPath(named).name} not found" if isinstance(named, str) else "no workload named"
        return None, [f"{what}: {unknown}"]
    try:
        plan = read(path, log, rows, block_size)
    except TraceError as error:
        return None, [f"{error}: not used; {unknown}"]
    told = [f"workload {path.name} beside the run"]
    return plan, told if plan.blocks is not None else [*told, f"it holds no token ids: {unknown}"]


def _beside(log: Path, meta: Mapping[str, Any]) -> Path | None:
    """The workload beside the run or above it: by its name, or any file with the hash that the run recorded."""
    name, digest = PurePosixPath(meta["dataset_path"]).name, meta.get("dataset_hash")
    folders = list(log.resolve().parents)[: PARENTS + 1]
    for folder in folders:
        if (folder / name).is_file():
            return folder / name
    if isinstance(digest, str):
        for folder in folders:
            for path in sorted(folder.glob("*.jsonl")):
                if path.name != log.name and hashlib.sha256(path.read_bytes()).hexdigest() == digest:
                    return path
    return None


def read(path: Path, log: Path, rows: Sequence[Mapping[str, Any]], block_size: int) -> Plan:
    """The plan of the requests of `log`, which are rows of `path` by number (`bench-7` is row 7, the first is 0)."""
    planned = list(json_lines(path))
    arrival = np.empty(len(rows))
    blocks: list[list[int]] = []
    for i, row in enumerate(rows):
        numbered = _NUMBERED.fullmatch(row["request_id"])
        if numbered is None or int(numbered[1]) >= len(planned):
            where = f"{log}: line {row['line']}: key 'request_id'"
            raise TraceError(f"{where}: {row['request_id']!r} names no row of {path} (expected bench-0, bench-1, ...)")
        line, plan = planned[int(numbered[1])]
        _require_same(path, line, plan, log, row)
        arrival[i] = plan[ARRIVAL] / NS_PER_S
        if IDS in plan:
            with placed(path, "line", line):
                blocks.append(block_hashes(token_ids(plan), block_size))
    if len(blocks) not in (0, len(rows)):
        raise TraceError(f"{path}: key '{IDS}': in some rows only")
    series = pl.Series("prefix_blocks", blocks, dtype=pl.List(pl.UInt64)) if blocks else None
    return Plan(arrival, series)


def _require_same(path: Path, line: int, plan: Mapping[str, Any], log: Path, row: Mapping[str, Any]) -> None:
    for key in (PROMPT, OUTPUT, ARRIVAL):
        if type(plan.get(key)) is not int or plan[key] < 0:
            found = repr(plan[key]) if key in plan else "nothing"
            raise TraceError(f"{path}: line {line}: key '{key}': expected a whole number, found {found}")
    for key in (PROMPT, OUTPUT):
        if plan[key] != row[key]:
            what = f"{plan[key]}, but {row[key]} in {log} line {row['line']}: not the workload of this run"
            raise TraceError(f"{path}: line {line}: key '{key}': {what}")
