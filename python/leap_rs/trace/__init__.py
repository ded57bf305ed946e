"""Read and write traces: the strict leap format, and other public formats through one reader each.

`read_trace` gives the frame alone; `load` gives the frame with its metadata and with everything that the reader left
out or found odd, which is what the commands print.
"""

from __future__ import annotations

import os
import warnings

import polars as pl

from leap_rs._leap import TraceError
from leap_rs.trace.bailian import BailianReader
from leap_rs.trace.chat import AlpacaReader, LmsysReader, ShareGptReader
from leap_rs.trace.csv import AzureReader, VidurReader
from leap_rs.trace.files import existing_file
from leap_rs.trace.model import LeftOut, Reader, ReadOptions, Trace, Unit
from leap_rs.trace.mooncake import GmiReader, MooncakeReader, RagPulseReader
from leap_rs.trace.parquet import LeapReader, write_trace
from leap_rs.trace.vllm_bench import VllmBenchReader

__all__ = [
    "READERS",
    "LeftOut",
    "ReadOptions",
    "Reader",
    "Trace",
    "TraceWarning",
    "Unit",
    "load",
    "read_trace",
    "write_trace",
]

READERS: tuple[Reader, ...] = (
    # Before the leap format, which takes every other Parquet file for its own.
    ShareGptReader(),
    LmsysReader(),
    AlpacaReader(),
    LeapReader(),
    AzureReader(),
    VidurReader(),
    MooncakeReader(),
    GmiReader(),
    RagPulseReader(),
    BailianReader(),
    VllmBenchReader(),
)
"""Every format that is read; the first whose `sniff` agrees reads the file."""


class TraceWarning(UserWarning):
    """Rows of a foreign trace were left out, or something about it looks odd."""


def load(path: str | os.PathLike[str], options: ReadOptions | None = None) -> Trace:
    """Read a trace of any known format. Raises `TraceError` that names the file, the place and the fault."""
    file = existing_file(path)
    for reader in READERS:
        if reader.sniff(file):
            return reader.read(file, options or ReadOptions())
    formats = "; ".join(reader.description for reader in READERS)
    what = "the file is empty" if file.stat().st_size == 0 else "not a trace format that is read"
    raise TraceError(f"{file}: {what}. Formats: {formats}")


def read_trace(
    path: str | os.PathLike[str], *, strict: bool = False, sort: bool = False, unit: Unit | None = None
) -> pl.DataFrame:
    """Read a trace into a frame with the columns, dtypes and units of the leap format, one row a request by arrival.

    `strict`, `sort` and `unit` concern foreign formats only: refuse failed and zero-length rows instead of leaving them
    out, order rows whose times run backwards instead of refusing them, and the unit of times where a format leaves it
    open. What was left out is told as a `TraceWarning`. Raises `TraceError` (file, column or line, first bad row).
    """
    trace = load(path, ReadOptions(strict=strict, sort=sort, unit=unit))
    for line in trace.told():
        warnings.warn(line, TraceWarning, stacklevel=2)
    return trace.frame
