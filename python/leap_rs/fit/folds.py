"""Predictions for rows that a fit has not seen, fold by fold."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from leap_rs._leap import ConfigError, Moments
from leap_rs.fit.data import Labelled
from leap_rs.fit.metrics import Lengths
from leap_rs.fit.options import Options

Folds = npt.NDArray[np.intp]


def assign(rows: int, folds: int, seed: int, families: Sequence[str] | None = None) -> Folds:
    """The fold of each row: in seeded random order each family goes whole to the fold with the fewest rows.

    Without families each row is one of its own, so folds are equally large. `ConfigError` where there are fewer families
    than folds.
    """
    _, family, sizes = np.unique(
        np.arange(rows) if families is None else families, return_inverse=True, return_counts=True
    )
    if len(sizes) < folds:
        what = "rows" if families is None else "families"
        raise ConfigError(f"{len(sizes)} {what} do not fill {folds} folds")
    filled = np.zeros(folds, dtype=np.intp)
    fold_of = np.empty(len(sizes), dtype=np.intp)
    for one in np.random.default_rng(seed).permutation(len(sizes)):
        fold_of[one] = filled.argmin()
        filled[fold_of[one]] += sizes[one]
    return fold_of[family.reshape(-1)]


def out_of_fold(data: Labelled, assignment: Folds, lam: float, options: Options) -> Lengths | None:
    """Predicted tokens (n,) by fits on the known rows of the other folds; None where those all have one length."""
    predicted = np.empty(len(data), dtype=np.float32)
    for fold in np.unique(assignment):
        part = data.where(data.known & (assignment != fold))
        if len(np.unique(part.lengths)) < 2:
            return None
        moments = Moments(data.features.shape[1], max_tokens=data.max_tokens, target=options.target, lam=lam)
        moments.add(part.features, part.lengths)
        predicted[assignment == fold] = moments.finish().predict(data.features[assignment == fold])
    return predicted
