"""Which reader reads a file, and reading with it: whole, part by part, or as the frame alone."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import polars as pl

from leap_rs._leap import ConfigError, TraceError
from leap_rs.trace.bailian import BailianReader
from leap_rs.trace.benchmarks.aiperf import AiperfReader
from leap_rs.trace.benchmarks.guidellm import GuideLlmReader
from leap_rs.trace.benchmarks.inference_perf import InferencePerfReader
from leap_rs.trace.benchmarks.llmperf import LlmperfReader
from leap_rs.trace.benchmarks.sglang import SglangReader
from leap_rs.trace.chat import AlpacaReader, LmsysReader, MessagesReader, ShareGptReader, WildChatReader
from leap_rs.trace.files import existing_file
from leap_rs.trace.litellm import LiteLlmReader
from leap_rs.trace.model import Reader, ReadOptions, Stream, Trace, Unit
from leap_rs.trace.mooncake import GmiReader, MooncakeReader, RagPulseReader
from leap_rs.trace.opening import opened, refusal
from leap_rs.trace.otlp import OtlpReader
from leap_rs.trace.parquet import LeapReader
from leap_rs.trace.parts import PartsReader
from leap_rs.trace.servingsim import ServingSimReader
from leap_rs.trace.tables import AzureReader, BurstGptReader, SplitwiseReader, VidurReader
from leap_rs.trace.vllm_bench import VllmBenchReader

READERS: tuple[Reader, ...] = (
    LeapReader(),
    AzureReader(),
    BurstGptReader(),
    SplitwiseReader(),
    VidurReader(),
    MooncakeReader(),
    GmiReader(),
    RagPulseReader(),
    BailianReader(),
    VllmBenchReader(),
    OtlpReader(),
    AiperfReader(),
    GuideLlmReader(),
    SglangReader(),
    LiteLlmReader(),
    InferencePerfReader(),
    ServingSimReader(),
    LlmperfReader(),
    ShareGptReader(),
    MessagesReader(),
    LmsysReader(),
    WildChatReader(),
    AlpacaReader(),
)
"""Every format that is read; no two fit one file."""


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
    prefix_block_size: int | None = None,
) -> pl.DataFrame:
    """Read a trace into a frame with the columns, dtypes and units of the leap format, one row a request by arrival.

    The options concern foreign formats only. `strict` refuses failed and zero-length rows instead of leaving them out.
    Where times run backwards the file is refused, unless `sort` orders its rows or `join` takes the place for the
    beginning of another recording, which is put behind the one before by that one's mean gap. `unit` is that of times
    where a format leaves it open, `tokenizer` a `tokenizer.json` (or its directory) for formats that carry text, `run`
    which of several results in one file, from 1, `prefix_block_size` the tokens of a block where a format numbers blocks and does
    not say their size. What was left out is told as a `TraceWarning`. Raises `TraceError`
    (file, column or line, first bad row).
    """
    options = ReadOptions(
        strict=strict,
        sort=sort,
        join=join,
        unit=unit,
        tokenizer=None if tokenizer is None else Path(tokenizer),
        run=run,
        prefix_block_size=prefix_block_size,
    )
    trace = load(path, options)
    for line in trace.told():
        warnings.warn(line, TraceWarning, stacklevel=2)
    return trace.frame


def _opened(path: str | os.PathLike[str], options: ReadOptions | None) -> tuple[Path, Reader, ReadOptions]:
    options = options or ReadOptions()
    file = Path(path)
    reader: Reader = PartsReader() if file.is_dir() else reader_of(existing_file(path))
    if options.run is not None and "run" not in reader.own_options:
        raise ConfigError(f"{file}: run {options.run} cannot be chosen: a {reader.name} file holds one recording")
    if options.prefix_block_size is not None and "prefix_block_size" not in reader.own_options:
        raise ConfigError(f"{file}: a size of prefix blocks cannot be given: a {reader.name} file leaves none open")
    return file, reader, options


def reader_of(file: Path) -> Reader:
    """The reader of a file's format; `TraceError` that says what the file is and which format it is nearest to."""
    if not file.stat().st_size:
        raise TraceError(f"{file}: the file is empty")
    start = opened(file)
    fits = {reader: reader.fit(start) for reader in READERS}
    whole = next((reader for reader, fit in fits.items() if fit.whole), None)
    if whole is None:
        raise TraceError(f"{file}: {refusal(start, {reader.title: fit for reader, fit in fits.items()})}")
    return whole
