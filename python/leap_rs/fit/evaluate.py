"""How well predicted lengths rank and match the true ones, frozen and with recursive least squares."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import polars as pl

from leap_rs._leap import OnlineReadout, Readout
from leap_rs.fit.data import Labelled

Predicted = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Score:
    """Spearman's rank correlation (None where it is undefined) and the mean absolute error in tokens."""

    spearman: float | None
    mae_tokens: float

    def to_dict(self) -> dict[str, float | None]:
        """For strict JSON."""
        return {"spearman": self.spearman, "mae_tokens": self.mae_tokens}


def score(predicted: Predicted, lengths: npt.NDArray[np.uint32]) -> Score:
    """Compare predictions with true lengths, both in tokens."""
    error = np.abs(predicted.astype(np.float64) - lengths)
    return Score(spearman(predicted, lengths), float(error.mean()))


def spearman(a: npt.NDArray[np.generic], b: npt.NDArray[np.generic]) -> float | None:
    """Spearman's rank correlation with ties at their mean rank; None where one side has a single value."""
    ranks = [pl.Series(values).rank(method="average").to_numpy() for values in (a, b)]
    if any(len(rank) < 2 or rank.min() == rank.max() for rank in ranks):
        return None
    return float(np.corrcoef(ranks)[0, 1])


def evaluate(readout: Readout, data: Labelled, *, rls: bool, batch: int) -> Mapping[str, Score]:
    """Scores of the frozen readout and, with `rls`, of the one that learns; then also of the stream's second half."""
    predicted = {"frozen": readout.predict(data.features)}
    if rls:
        predicted["rls"] = stream(readout, data, batch)
    scores = {}
    for name, values in predicted.items():
        scores[name] = score(values, data.lengths)
        half = len(data) // 2
        if rls and half:
            scores[f"{name}_second_half"] = score(values[half:], data.lengths[half:])
    return scores


def stream(readout: Readout, data: Labelled, batch: int) -> Predicted:
    """Predictions made before the request's own length is learned from, in order of arrival."""
    online = OnlineReadout(readout, batch=batch)
    predicted = np.empty(len(data), dtype=np.float32)
    for row in range(len(data)):
        one = slice(row, row + 1)
        predicted[row] = online.predict(data.features[one])[0]
        online.observe(data.features[one], data.lengths[one], data.censored[one])
    return predicted
