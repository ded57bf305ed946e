"""Read and write traces: the strict leap format, and other public formats through one reader each.

`read_trace` gives the frame alone; `load` gives the frame with its metadata and with everything that the reader left
out or found odd, which is what the commands print.
"""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import polars as pl

from leap_rs._leap import ConfigError, TraceError
from leap_rs.trace.bailian import BailianReader
from leap_rs.trace.chat import AlpacaReader, LmsysReader, ShareGptReader
from leap_rs.trace.csv import Azure2024Reader, AzureReader, BurstGptReader, SplitwiseReader, VidurReader
from leap_rs.trace.files import existing_file, head
from leap_rs.trace.model import LeftOut, Reader, ReadOptions, Stream, Trace, Unit
from leap_rs.trace.mooncake import GmiReader, MooncakeReader, RagPulseReader
from leap_rs.trace.parquet import LeapReader, write_trace
from leap_rs.trace.parts import PartsReader
from leap_rs.trace.vllm_bench import VllmBenchReader

__all__ = [
    "READERS",
    "LeftOut",
    "ReadOptions",
    "Reader",
    "Stream",
    "Trace",
    "TraceWarning",
    "Unit",
    "load",
    "open_stream",
    "read_trace",
    "write_trace",
]

READERS: tuple[Reader, ...] = (
    # Before the leap format, which takes every other Parquet file for its own.
    ShareGptReader(),
    LmsysReader(),
    AlpacaReader(),
    LeapReader(),
    Azure2024Reader(),
    AzureReader(),
    BurstGptReader(),
    SplitwiseReader(),
    VidurReader(),
    MooncakeReader(),
    GmiReader(),
    RagPulseReader(),
    BailianReader(),
    VllmBenchReader(),
)
"""Every format that is read; the first whose `sniff` agrees reads the file."""

_COMPRESSED = {
    b"\x1f\x8b": "gzip",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"BZh": "bzip2",
    b"\xfd7zXZ\x00": "xz",
    b"PK\x03\x04": "zip",
}


class TraceWarning(UserWarning):
    """Rows of a foreign trace were left out, or something about it looks odd."""


def load(path: str | os.PathLike[str], options: ReadOptions | None = None) -> Trace:
    """Read a trace of any known format. Raises `TraceError` that names the file, the place and the fault."""
    file, reader, options = _opened(path, options)
    return reader.read(file, options)


def open_stream(path: str | os.PathLike[str], options: ReadOptions | None = None) -> Stream:
    """The same part by part, for traces that do not fit into memory."""
    file, reader, options = _opened(path, options)
    return reader.stream(file, options)


def read_trace(
    path: str | os.PathLike[str],
    *,
    strict: bool = False,
    sort: bool = False,
    join: bool = False,
    unit: Unit | None = None,
    tokenizer: str | os.PathLike[str] | None = None,
    run: int | None = None,
) -> pl.DataFrame:
    """Read a trace into a frame with the columns, dtypes and units of the leap format, one row a request by arrival.

    The options concern foreign formats only. `strict` refuses failed and zero-length rows instead of leaving them out.
    Where times run backwards the file is refused, unless `sort` orders its rows or `join` takes the place for the
    beginning of another recording, which is put behind the one before by that one's mean gap. `unit` is that of times
    where a format leaves it open, `tokenizer` a `tokenizer.json` (or its directory) for formats that carry text, `run`
    which of several results in one file, from 1. What was left out is told as a `TraceWarning`. Raises `TraceError`
    (file, column or line, first bad row).
    """
    options = ReadOptions(
        strict=strict,
        sort=sort,
        join=join,
        unit=unit,
        tokenizer=None if tokenizer is None else Path(tokenizer),
        run=run,
    )
    trace = load(path, options)
    for line in trace.told():
        warnings.warn(line, TraceWarning, stacklevel=2)
    return trace.frame


def _opened(path: str | os.PathLike[str], options: ReadOptions | None) -> tuple[Path, Reader, ReadOptions]:
    options = options or ReadOptions()
    directory = PartsReader().sniff(Path(path))
    file = Path(path) if directory else existing_file(path)
    reader = PartsReader() if directory else _reader(file)
    if options.run is not None and not isinstance(reader, VllmBenchReader):
        raise ConfigError(f"{file}: run {options.run} cannot be chosen: a {reader.name} file holds one recording")
    return file, reader, options


def _reader(file: Path) -> Reader:
    for reader in READERS:
        if reader.sniff(file):
            return reader
    start = head(file)
    if not start:
        raise TraceError(f"{file}: the file is empty")
    for magic, name in _COMPRESSED.items():
        if start.startswith(magic):
            raise TraceError(f"{file}: is compressed ({name}): unpack it first")
    formats = "; ".join(reader.description for reader in READERS)
    raise TraceError(f"{file}: not a trace format that is read. Formats: {formats}")
