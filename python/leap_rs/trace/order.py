"""Order by time of what does not fit into memory: sorted runs, spilled to temporary Parquet, merged part by part."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import polars as pl

from leap_rs._leap import TraceError
from leap_rs.trace.files import reason

ROWS_IN_MEMORY = 2_000_000
SMALLEST_BLOCK = 8192
ROWS_A_PART = 65_536


def in_order(frames: Iterator[pl.DataFrame], key: str, path: Path) -> Iterator[pl.DataFrame]:
    """All rows of the frames by `key`; equal keys keep their order. `path` is named where the disk has no room."""
    first = next(frames, None)
    if first is None:
        return
    second = next(frames, None)
    if second is None:
        yield first.sort(key, maintain_order=True)
        return
    with tempfile.TemporaryDirectory(prefix="leap-trace-") as name:
        runs: list[Path] = []
        for frame in chain((first, second), frames):
            run = Path(name) / f"{len(runs)}.parquet"
            try:
                # Groups as small as the smallest block that is read of them, so that none is decoded twice.
                frame.sort(key, maintain_order=True).write_parquet(
                    run, compression="lz4", row_group_size=SMALLEST_BLOCK
                )
            except (OSError, pl.exceptions.PolarsError) as error:
                raise TraceError(f"{path}: cannot be sorted in {name}: {reason(error)}") from error
            runs.append(run)
        rows = max(SMALLEST_BLOCK, ROWS_IN_MEMORY // len(runs))
        yield from merged([blocks(run, rows) for run in runs], key)


def blocks(path: Path, rows: int) -> Iterator[pl.DataFrame]:
    """A Parquet file in blocks of `rows` rows."""
    lazy = pl.scan_parquet(path, hive_partitioning=False, glob=False)
    total = int(lazy.select(pl.len()).collect().item())
    for start in range(0, total, rows):
        yield lazy.slice(start, rows).collect()


def merged(runs: Sequence[Iterator[pl.DataFrame]], key: str) -> Iterator[pl.DataFrame]:
    """One run of several that are each ordered by `key`; rows with equal keys stay in the order of the runs."""
    heads = {number: head for number, run in enumerate(runs) if (head := _next(run, key)) is not None}
    ready: list[pl.DataFrame] = []
    while heads:
        # Up to the smallest last key nothing can still come but rows equal to it, and those only from that run on.
        bound, limit = min((head.last, number) for number, head in heads.items())
        pieces: list[pl.DataFrame] = []
        for number, head in list(heads.items()):
            if head.first > bound:
                continue
            count = int(head.frame[key].search_sorted(bound, side="right" if number <= limit else "left"))
            pieces.append(head.frame.head(count))
            rest = _head(head.frame.slice(count), key) if count < head.frame.height else _next(runs[number], key)
            if rest is None:
                del heads[number]
            else:
                heads[number] = rest
        ready.append(pl.concat(pieces).sort(key, maintain_order=True))
        if sum(frame.height for frame in ready) >= ROWS_A_PART or not heads:
            yield pl.concat(ready)
            ready = []


@dataclass(frozen=True)
class _Head:
    """The rows of a run that are in memory, with their first and last key at hand."""

    frame: pl.DataFrame
    first: Any
    last: Any


def _head(frame: pl.DataFrame, key: str) -> _Head:
    return _Head(frame, frame[key][0], frame[key][-1])


def _next(run: Iterator[pl.DataFrame], key: str) -> _Head | None:
    return next((_head(frame, key) for frame in run if frame.height), None)
