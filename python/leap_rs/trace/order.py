"""Order by time of what does not fit into memory: sorted runs, spilled to temporary Parquet, merged part by part."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path

import polars as pl

from leap_rs._leap import TraceError
from leap_rs.trace.files import reason

ROWS_IN_MEMORY = 2_000_000
SMALLEST_BLOCK = 8192


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
    heads = {number: head for number, run in enumerate(runs) if (head := _filled(run)) is not None}
    while heads:
        # Up to the smallest last key nothing can still come but rows equal to it, and those only from that run on.
        bound, limit = min((head[key][-1], number) for number, head in heads.items())
        pieces: list[pl.DataFrame] = []
        for number, head in list(heads.items()):
            count = int(head[key].search_sorted(bound, side="right" if number <= limit else "left"))
            if count == 0:
                continue
            pieces.append(head.head(count))
            rest = head.slice(count) if count < head.height else _filled(runs[number])
            if rest is None:
                del heads[number]
            else:
                heads[number] = rest
        yield pl.concat(pieces).sort(key, maintain_order=True)


def _filled(run: Iterator[pl.DataFrame]) -> pl.DataFrame | None:
    return next((frame for frame in run if frame.height), None)
