"""The traces of `grid.py`: the committed ones, and those that it converts from measured data into a directory of its own.

What is converted has no readout of its own, and is replayed on prompt length alone, from zero.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import polars as pl

from leap_rs import write_trace
from leap_rs.fit.options import Options
from leap_rs.fit.run import run as fit
from leap_rs.trace import load

COMMITTED = Path(__file__).parents[1] / "traces"
SHAREGPT = COMMITTED / "sharegpt.parquet"
ALPACAEVAL = COMMITTED / "llama-3-8b-alpacaeval.parquet"
READOUT = COMMITTED / "readout.safetensors"
RUNS = ("rtx4090-llama-8b", "rtxpro6000-llama-8b")

CONVERTED = {
    "azure-conv": "azure2023/AzureLLMInferenceTrace_conv.csv",
    "azure-code": "azure2023/AzureLLMInferenceTrace_code.csv",
}
HELD_OUT = {"mooncake": "mooncake/conversation_trace.jsonl", "gmi": "gmi_lmbench/gmi_trace.jsonl"}


@dataclass(frozen=True)
class Source:
    """A trace, what predicts on it, and how it may be replayed."""

    name: str
    trace: Path
    readout: str | Path = "none"
    repeat: bool = True
    """Whether more requests than it has may be asked of it."""
    own_times: bool = False
    """Whether it is replayed once, as recorded."""

    def requests(self, wanted: int) -> int | None:
        """How many requests to replay; None for the whole trace once."""
        if self.own_times:
            return None
        return wanted if self.repeat else min(wanted, load(self.trace).frame.height)


def sharegpt() -> Source:
    """The committed trace with the committed readouts, which were fitted on another model's answers to other prompts."""
    return Source("sharegpt", SHAREGPT, READOUT)


def recorded(engine: str) -> Source:
    """The committed run of an engine, at its own times."""
    return Source("recorded", COMMITTED / f"{engine}.parquet", own_times=True)


def converted(name: str, data: Path, cache: Path) -> Source:
    """A public trace of lengths and times, in the leap format."""
    found = load(data / "traces" / (CONVERTED | HELD_OUT)[name])
    path = cache / f"{name}.parquet"
    write_trace(found.frame, path, **{"source": name, **found.metadata})
    return Source(name, path, repeat=name not in HELD_OUT)


def alpacaeval(cache: Path) -> Source:
    """One half of a committed trace with readouts that are fitted on the other: the same model, other prompts."""
    found = load(ALPACAEVAL)
    # Its rows are in random order.
    fitted, kept = found.frame.head(found.frame.height // 2), found.frame.tail((found.frame.height + 1) // 2)
    training, path = cache / "alpacaeval-fitted.parquet", cache / "alpacaeval.parquet"
    readout = cache / "alpacaeval.readout.safetensors"
    write_trace(fitted, training, **found.metadata)
    fit([training], [], readout, Options())
    write_trace(kept.with_columns(pl.col("arrival_s") - kept["arrival_s"][0]), path, **found.metadata)
    return Source("alpacaeval", path, readout)


def dealt(source: Source, requests: int, seed: int, cache: Path) -> Source:
    """The same requests dealt anew over the same arrivals, so that a first run with another seed is another run."""
    if seed == 0:
        return source
    found = load(source.trace)
    frame = found.frame.head(source.requests(requests) or found.frame.height)
    order = np.random.default_rng(seed).permutation(frame.height)
    path = cache / f"{source.name}-{source.trace.stem}.seed{seed}.parquet"
    write_trace(frame[order].with_columns(frame["arrival_s"]), path, **found.metadata)
    return replace(source, trace=path)
