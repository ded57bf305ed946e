"""Fit one readout, and what it says about itself and where it goes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from leap_rs._leap import Readout
from leap_rs.fit import joined
from leap_rs.fit.data import Kind, Labelled
from leap_rs.fit.options import SUFFIX, Options
from leap_rs.trace import Trace, schema

_READ: Mapping[Kind, tuple[str, ...]] = {
    "state": ("features",),
    "prompt": (joined.PROMPT,),
    "text": (joined.TEXT, joined.PROMPT),
}
"""The columns whose identity a readout has. That of the prompt features names the model even where there are none: the
prompt's length counts its tokens."""


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
    known = {
        key: value
        for trace in reversed(training)
        for column in _READ[kind]
        for key, value in schema.identity(column, trace.metadata).items()
    }
    layer = known.pop("layer", "")
    if layer.isdecimal():
        values["layer"] = int(layer)
    return {**values, **known}


def path_of(out: Path, kind: Kind, kinds: Sequence[Kind]) -> Path:
    """The first kind that there is goes to `out`, each other one beside it to NAME.KIND.safetensors."""
    return out if kind == kinds[0] else out.with_name(f"{out.stem}.{kind}{SUFFIX}")
