"""Predictions on a trace that a readout was not fitted on, frozen and with recursive least squares, and their scores."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from leap_rs._leap import OnlineReadout, Readout
from leap_rs.fit.data import Labelled
from leap_rs.fit.metrics import Predictions, Score, score
from leap_rs.fit.options import Options


def predictions(readout: Readout, data: Labelled, options: Options) -> dict[str, Predictions]:
    """Those of the frozen readout and, where RLS is wanted, of the one that learns."""
    made = {"frozen": Predictions(readout.predict(data.features), readout.pit(data.features, data.lengths))}
    if options.rls:
        made["rls"], _ = stream(learner(readout, options), data)
    return made


def scores(made: dict[str, Predictions], data: Labelled, *, halves: bool = True) -> dict[str, Score]:
    """The score of each; where one of them learns, of the stream's second half too."""
    found = {}
    half = len(data) // 2
    later = np.arange(len(data)) >= half
    for name, predicted in made.items():
        found[name] = score(predicted, data)
        if halves and half and len(made) > 1:
            found[f"{name}_second_half"] = score(predicted.rows(later), data.where(later))
    return found


def stream(online: OnlineReadout, data: Labelled) -> tuple[Predictions, npt.NDArray[np.bool_]]:
    """Predictions made before the request's own length is learned from, in order of arrival, and which a readout gave."""
    predicted, known = np.empty(len(data), dtype=np.float32), np.zeros(len(data), dtype=np.bool_)
    low, high = np.zeros(len(data)), np.zeros(len(data))
    for row in range(len(data)):
        one = slice(row, row + 1)
        predicted[row] = online.predict(data.features[one])[0]
        known[row] = online.known
        if online.known:
            # Not before: a row that is asked for twice would count twice towards mean and scale.
            low[one], high[one] = online.pit(data.features[one], data.lengths[one])
        online.observe(data.features[one], data.lengths[one], data.censored[one])
    return Predictions(predicted, (low, high)), known


def learner(readout: Readout, options: Options) -> OnlineReadout:
    """A copy of the readout that learns as the options say."""
    return OnlineReadout(readout, batch=options.batch, forgetting=options.forgetting)
