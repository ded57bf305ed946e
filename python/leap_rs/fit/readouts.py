"""Fit one readout, and what it says about itself and where it goes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from leap_rs._leap import Readout
from leap_rs.fit.data import Kind, Labelled
from leap_rs.fit.options import Options
from leap_rs.trace import Trace

SUFFIX = ".safetensors"


def fit(training: Labelled, options: Options, meta: Mapping[str, Any] | None = None) -> Readout:
    """A readout of the rows with a known length."""
    known = training.where(training.known)
    return Readout.fit(
        known.features,
        known.lengths,
        max_tokens=known.max_tokens,
        target=options.target,
        lam=options.lam,
        folds=options.folds,
        seed=options.seed,
        meta=meta,
    )


def train_spearman(readout: Readout) -> float | None:
    """The out-of-fold rank correlation on the training rows, if it is defined."""
    value = readout.meta.get("train_spearman")
    return None if value is None else float(value)


def meta(kind: Kind, training: Sequence[Trace]) -> dict[str, Any]:
    """What the readout says about itself. No date: the same traces and options give the same bytes."""
    values: dict[str, Any] = {"kind": kind, "trained_on": [trace.name for trace in training]}
    # They agree wherever they say it, but need not all say it.
    known = {key: value for trace in reversed(training) for key, value in trace.metadata.items()}
    if "model" in known:
        values["model"] = known["model"]
    if kind == "state" and known.get("layer", "").isdecimal():
        values["layer"] = int(known["layer"])
    return values


def path_of(out: Path, kind: Kind, kinds: Sequence[Kind]) -> Path:
    """The state readout, or the only one, goes to `out`; a prompt readout beside it to NAME.prompt.safetensors."""
    return out if kind == kinds[0] else out.with_name(f"{out.stem}.{kind}{SUFFIX}")
