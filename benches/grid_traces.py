"""The traces of `grid.py`: the committed ones, and those that it converts from measured data into a directory of its own.

What is converted has no readout of its own, and is replayed on prompt length alone, from zero. The exception are real
lengths with features of their prompts: there one half of the rows fits a prompt readout, and the other half is replayed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import polars as pl

from leap_rs import LeapError, Readout, write_trace
from leap_rs.trace import load

COMMITTED = Path(__file__).parents[1] / "traces"
SHAREGPT = COMMITTED / "sharegpt.parquet"
READOUT = COMMITTED / "readout.safetensors"
RUNS = ("rtx4090-llama-8b", "rtxpro6000-llama-8b")

CONVERTED = {
    "azure-conv": "azure2023/AzureLLMInferenceTrace_conv.csv",
    "azure-code": "azure2023/AzureLLMInferenceTrace_code.csv",
}
HELD_OUT = {"mooncake": "mooncake/conversation_trace.jsonl", "gmi": "gmi_lmbench/gmi_trace.jsonl"}

LENGTHS = "alpacaeval"
LENGTHS_MODEL = "Llama-3-8B"
LENGTHS_BUDGET = 2048
SPLIT_SEED = 0


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
    """The committed trace with the committed readouts."""
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


def real_lengths(real: Path, cache: Path) -> Source:
    """Lengths of an 8B model on public prompts with a text encoder's features: one half is fitted, one replayed."""
    rows = pl.read_parquet(real / "lengths.parquet", columns=["set", "prompt_tokens", "len_llama_3_8b", "encoder"])
    rows = rows.filter(
        (pl.col("set") == LENGTHS) & (pl.col("len_llama_3_8b") > 0) & (pl.col("len_llama_3_8b") <= LENGTHS_BUDGET)
    )
    if rows.height < 4:
        raise LeapError(f"{real / 'lengths.parquet'}: holds no lengths of {LENGTHS}")
    rows = rows[np.random.default_rng(SPLIT_SEED).permutation(rows.height)]
    half = rows.height // 2
    fitted, kept = rows[:half], rows[half:]

    path, readout = cache / f"{LENGTHS}.parquet", cache / f"{LENGTHS}.readout.safetensors"
    Readout.fit(
        fitted["encoder"].to_numpy(),
        fitted["len_llama_3_8b"].to_numpy(),
        max_tokens=LENGTHS_BUDGET,
        meta={"kind": "prompt", "model": LENGTHS_MODEL, "trained_on": [f"{LENGTHS}-fitted"]},
    ).save(readout)
    # The committed trace has the gaps of the same recording that all other traces of this project have.
    arrivals = load(SHAREGPT).frame["arrival_s"]
    if len(arrivals) < kept.height:
        raise LeapError(f"{SHAREGPT}: {len(arrivals)} arrivals are too few for {kept.height} requests")
    trace = pl.DataFrame(
        [
            arrivals[: kept.height],
            kept["prompt_tokens"],
            kept["len_llama_3_8b"].alias("output_tokens"),
            pl.Series("max_tokens", np.full(kept.height, LENGTHS_BUDGET, dtype=np.uint32)),
            pl.Series("finish_reason", ["stop"] * kept.height),
            kept["encoder"].alias("prompt_features"),
        ]
    )
    write_trace(
        trace, path, model=LENGTHS_MODEL, source=f"{LENGTHS} prompts, gaps of the Azure 2023 conversation trace"
    )
    return Source(LENGTHS, path, readout)


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
