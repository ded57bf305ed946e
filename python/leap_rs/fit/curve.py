"""How fast a readout follows new traffic: ranks along the stream, and how many labels RLS needs there.

The windows show the stream as it came: rank correlation of the predictions for requests 1 to 100, 101 to 200 and so on.
One window of 100 has a standard error of about 0.1, so they cannot tell when RLS has caught up. That is measured by
cross-validation instead, where every point is judged on all rows: for each fold, RLS starts from the fitted readout,
learns the rows of the other folds in order of arrival and, after n labels, predicts the rows of the fold. Beside it
stands a readout that was fitted on those other folds outright, which is what the traffic's own readout can do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from leap_rs._leap import Readout, spearman
from leap_rs.fit.data import Labelled
from leap_rs.fit.evaluate import learner
from leap_rs.fit.folds import Folds, assign, out_of_fold
from leap_rs.fit.metrics import Lengths, Predictions
from leap_rs.fit.options import Options
from leap_rs.fit.readouts import fit

WINDOW = 100
STEP = 50
"""Labels between two points of the learning curve, up to `MOST`."""
MOST = 1000
NEAR = 0.02
DRAWS = 200


@dataclass(frozen=True)
class Window:
    """Rank correlations of the predictions for requests `first` to `last` of the stream, counted from 1."""

    first: int
    last: int
    frozen: float | None
    rls: float | None


@dataclass(frozen=True)
class Point:
    """The rank correlation over all rows once RLS has learned so many labels of the trace's other folds."""

    labels: int
    rls: float | None


@dataclass(frozen=True)
class Curve:
    """How the predictions on one trace change as RLS learns from it."""

    windows: list[Window]
    in_domain: float | None
    """Out-of-fold rank correlation of a readout fitted on this trace itself; None where none can be fitted."""
    learning: list[Point]
    difference_se: float | None
    """Standard error (bootstrap over rows) of in_domain less the last point of the learning curve."""
    within_0_02_after: int | None
    """The fewest labels from which on every point is at most 0.02 below in_domain; None where there are none."""

    def to_dict(self) -> dict[str, Any]:
        """For strict JSON."""
        return asdict(self)


def curve(readout: Readout, made: dict[str, Predictions], data: Labelled, options: Options) -> Curve:
    """The windows of predictions that were made along the stream, and the learning curve beside the own readout."""
    stream = windows(made, data)
    own = own_predictions(data, options)
    if own is None:
        return Curve(stream, None, [], None, None)
    predicted, folds = own
    in_domain = ranked(predicted, data)
    points = learning(readout, data, folds, options)
    learned = [Point(labels, ranked(values, data)) for labels, values in points]
    error = difference_se(predicted, points[-1][1], data, options.seed)
    return Curve(stream, in_domain, learned, error, within(in_domain, learned))


def windows(made: dict[str, Predictions], data: Labelled) -> list[Window]:
    """The rank correlations of both kinds of predictions in every window of the stream."""
    found = []
    for start, end in edges(len(data)):
        rows = np.zeros(len(data), dtype=np.bool_)
        rows[start:end] = True
        part = data.where(rows)
        of = {name: ranked(predicted.lengths[start:end], part) for name, predicted in made.items()}
        found.append(Window(start + 1, end, of["frozen"], of["rls"]))
    return found


def edges(rows: int) -> list[tuple[int, int]]:
    """Consecutive windows of `WINDOW` requests; a rest of less than half a window belongs to the one before it."""
    starts = list(range(0, rows, WINDOW))
    if len(starts) > 1 and rows - starts[-1] < WINDOW / 2:
        starts.pop()
    return list(zip(starts, [*starts[1:], rows], strict=True)) if rows else []


def own_predictions(data: Labelled, options: Options) -> tuple[Lengths, Folds] | None:
    """Out-of-fold predictions of a readout fitted on the trace itself, and the folds; None where none can be fitted."""
    known = data.where(data.known)
    if len(known) < 2 * options.folds or len(np.unique(known.lengths)) < 2:
        return None
    folds = assign(len(data), options.folds, options.seed)
    # One penalty for all folds, from all rows, as for the out-of-fold number that a fit reports of itself.
    lam = fit(known, replace(options, lam=None)).lam
    predicted = out_of_fold(data, folds, lam, options)
    return None if predicted is None else (predicted, folds)


def learning(readout: Readout, data: Labelled, folds: Folds, options: Options) -> list[tuple[int, Lengths]]:
    """Predictions for all rows after 0, `STEP`, 2 `STEP`, ... labels of the other folds, as many as each fold can give."""
    fewest = len(data) - int(np.bincount(folds).max())
    counts = range(0, min(fewest, MOST) + 1, STEP)
    predicted = {labels: np.empty(len(data), dtype=np.float32) for labels in counts}
    for fold in np.unique(folds):
        here = folds == fold
        others = data.where(~here)
        online = learner(readout, options)
        for labels in counts:
            if labels:
                new = slice(labels - STEP, labels)
                online.observe(others.features[new], others.lengths[new], others.censored[new])
                online.flush()
            predicted[labels][here] = online.predict(data.features[here])
    return list(predicted.items())


def ranked(predicted: Lengths, data: Labelled) -> float | None:
    """Rank correlation over the rows with a known length."""
    return spearman(predicted[data.known], data.lengths[data.known])


def difference_se(a: Lengths, b: Lengths, data: Labelled, seed: int) -> float | None:
    """Standard error of the difference of two rank correlations with the same lengths, by bootstrap over the rows."""
    rng = np.random.default_rng(seed)
    rows = np.flatnonzero(data.known)
    differences = []
    for _ in range(DRAWS):
        drawn = rng.choice(rows, len(rows))
        first, second = (spearman(values[drawn], data.lengths[drawn]) for values in (a, b))
        if first is not None and second is not None:
            differences.append(first - second)
    return float(np.std(differences, ddof=1)) if len(differences) > 1 else None


def within(in_domain: float | None, points: Sequence[Point]) -> int | None:
    """The first point from which on all are near: a curve that only touches the line by chance has not arrived."""
    first = None
    for point in reversed(points):
        if in_domain is None or point.rls is None or in_domain - point.rls > NEAR:
            break
        first = point.labels
    return first
