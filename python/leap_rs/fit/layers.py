"""Every feature column that the traces carry, each as if a readout were fitted on it: which layer to read, and how."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import polars as pl

from leap_rs._leap import ConfigError
from leap_rs.fit import data, evaluate
from leap_rs.fit.folds import Folds, assign, out_of_fold
from leap_rs.fit.metrics import Predictions, Score, score
from leap_rs.fit.options import Options
from leap_rs.fit.readouts import fit
from leap_rs.trace import Trace
from leap_rs.trace.schema import Rows, checked_features

FAMILY = "family"


@dataclass(frozen=True)
class Layer:
    """One column: its width, the penalty that k-fold chose, and its scores."""

    column: str
    d: int
    lam: float
    out_of_fold: Score
    """On the training rows, by fits on the other folds."""
    evaluations: dict[str, Score]
    """Frozen, by trace."""

    def to_dict(self) -> dict[str, Any]:
        """One entry of `layers` in `--json`."""
        return {
            "column": self.column,
            "d": self.d,
            "lam": self.lam,
            "out_of_fold": self.out_of_fold.to_dict(),
            "evaluations": {path: one.to_dict() for path, one in self.evaluations.items()},
        }


def compare(
    training: Sequence[Trace], judging: Sequence[Trace], max_tokens: int, options: Options
) -> tuple[list[Layer], list[str]]:
    """A readout on each column that all training traces have, and what a user should be told."""
    columns = feature_columns(training)
    training = [checked(trace, columns) for trace in training]
    judging = [checked(trace, columns) for trace in judging]
    folds = folds_of(training, options)
    notes = []
    layers = []
    for column in columns:
        rows = data.stacked(column, training, [data.labelled(trace, column, max_tokens) for trace in training])
        readout = fit(rows, replace(options, lam=None))
        predicted = out_of_fold(rows, folds, readout.lam, options)
        if predicted is None:
            raise ConfigError(f"{training[0].path}: --layers: outside one of the folds all lengths are the same")
        evaluations = {}
        for trace in judging:
            if told := data.not_judged(trace, column):
                notes.append(told)
                continue
            part = data.labelled(trace, column, max_tokens)
            data.require_width(column, trace, part, readout.d, training[0])
            made = evaluate.predictions(readout, part, replace(options, rls=False))
            evaluations[str(trace.path)] = score(made["frozen"], part)
        layers.append(Layer(column, readout.d, readout.lam, score(Predictions(predicted), rows), evaluations))
    return layers, notes


def feature_columns(traces: Sequence[Trace]) -> list[str]:
    """The columns of Array(Float16 or Float32, d) that every trace has, in the order of the first."""
    return [
        name
        for name in traces[0].frame.columns
        if all(name in trace.frame.columns and _is_features(trace.frame[name].dtype) for trace in traces)
    ]


def checked(trace: Trace, columns: Sequence[str]) -> Trace:
    """The trace with these columns as strict as `features`: reading it leaves columns unchecked that it does not know."""
    found = [checked_features(trace.frame[name], Rows(trace.path)) for name in columns if name in trace.frame.columns]
    return replace(trace, frame=trace.frame.with_columns(found))


def folds_of(traces: Sequence[Trace], options: Options) -> Folds:
    """The fold of each labelled row; where every trace says which `family` a row is of, none is in two folds."""
    families: list[str] | None = None
    rows = sum(len(data.finished(trace, FAMILY)) for trace in traces)
    if all(FAMILY in trace.frame.columns for trace in traces):
        families = []
        for trace in traces:
            missing = trace.frame[FAMILY].is_null().arg_true()
            if len(missing):
                raise Rows(trace.path).fault("no value (null)", column=FAMILY, row=int(missing[0]))
            families.extend(data.finished(trace, FAMILY)[FAMILY].cast(pl.String).to_list())
    try:
        return assign(rows, options.folds, options.seed, families)
    except ConfigError as error:
        raise ConfigError(f"{traces[0].path}: --layers: {error}") from None


def _is_features(dtype: pl.DataType) -> bool:
    return isinstance(dtype, pl.Array) and dtype.inner in (pl.Float16, pl.Float32) and len(dtype.shape) == 1
