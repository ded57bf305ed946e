"""What predicted lengths are measured by: how they rank requests, how far they miss, and how honest their noise is.

Ranks and errors are taken over the rows whose length is known; answers that were cut before the output budget are left
out there, as they are from a fit, and answers that reached the budget count with it. A number that nothing defines (no
such rows or pairs, all values equal) is None.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np
import numpy.typing as npt

from leap_rs._leap import kendall_tau_b, pairwise_accuracy, spearman
from leap_rs.fit.data import Labelled

Lengths = npt.NDArray[np.float32]
Shares = npt.NDArray[np.float64]

SHORT, LONG = 256, 1024
"""Where the mean absolute error is parted, in tokens of the true length."""


@dataclass(frozen=True)
class Predictions:
    """Predicted tokens (n,), and the mass that each predicted distribution has below and up to the true length (n,)."""

    lengths: Lengths
    pit: tuple[Shares, Shares] | None = None

    def rows(self, chosen: slice | npt.NDArray[np.bool_]) -> Predictions:
        """Some of the rows."""
        return Predictions(self.lengths[chosen], self.pit and (self.pit[0][chosen], self.pit[1][chosen]))


@dataclass(frozen=True)
class Score:
    """The numbers of one evaluation; those in tokens say so in their names, the others have no unit."""

    rows: int
    """Rows with a known length."""
    spearman: float | None
    kendall_tau_b: float | None
    pairwise_accuracy_1_2: float | None
    """Share of the pairs whose true lengths differ by a factor of 1.2 or more that are ordered rightly; ties count 1/2."""
    pairwise_accuracy_2: float | None
    mae_tokens: float | None
    """Mean absolute error."""
    mae_tokens_to_256: float | None
    mae_tokens_257_to_1024: float | None
    mae_tokens_above_1024: float | None
    inside_50: float | None
    """Share of true lengths inside the central 50 % interval of their predicted distribution."""
    inside_90: float | None

    def to_dict(self) -> dict[str, float | int | None]:
        """For strict JSON."""
        return asdict(self)


def score(predicted: Predictions, data: Labelled) -> Score:
    """Compare predictions with the true lengths of the same rows."""
    known = data.known
    values, lengths = predicted.lengths[known].astype(np.float64), data.lengths[known].astype(np.float64)
    error = np.abs(values - lengths)
    return Score(
        rows=len(lengths),
        spearman=spearman(values, lengths),
        kendall_tau_b=kendall_tau_b(values, lengths),
        pairwise_accuracy_1_2=pairwise_accuracy(values, lengths, 1.2),
        pairwise_accuracy_2=pairwise_accuracy(values, lengths, 2.0),
        mae_tokens=_mean(error),
        mae_tokens_to_256=_mean(error[lengths <= SHORT]),
        mae_tokens_257_to_1024=_mean(error[(lengths > SHORT) & (lengths <= LONG)]),
        mae_tokens_above_1024=_mean(error[lengths > LONG]),
        inside_50=share_inside(predicted, data, 0.5),
        inside_90=share_inside(predicted, data, 0.9),
    )


def share_inside(predicted: Predictions, data: Labelled, level: float) -> float | None:
    """Share of true lengths inside the central interval of this level.

    A length takes up the range from the mass below it to the mass up to it, and counts with the part of the range that
    is central (the non-randomised probability integral transform of Czado, Gneiting and Held 2009): where the
    distributions are right this gives `level` on average, however much of their mass is at the output budget. An answer
    that was cut may have had any length from there on, so its range goes on to 1.
    """
    if predicted.pit is None:
        return None
    low, high = predicted.pit[0], np.where(data.censored, 1.0, predicted.pit[1])
    first, last = (1.0 - level) / 2.0, (1.0 + level) / 2.0
    width = high - low
    overlap = np.clip(np.minimum(high, last) - np.maximum(low, first), 0.0, None)
    inside = np.where(width > 0.0, overlap / np.where(width > 0.0, width, 1.0), (low >= first) & (low <= last))
    return _mean(inside)


def _mean(values: Shares) -> float | None:
    return float(values.mean()) if len(values) else None
