"""The three scales on which lengths can be fitted, side by side on the same rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from leap_rs._leap import Readout
from leap_rs.fit import evaluate
from leap_rs.fit.data import Labelled
from leap_rs.fit.metrics import Score
from leap_rs.fit.options import TARGETS, Options, TargetName
from leap_rs.fit.readouts import fit, train_spearman


@dataclass(frozen=True)
class TargetScores:
    """A readout of one target, with the penalty that k-fold chose for it, and its scores by trace."""

    lam: float
    train_spearman: float | None
    evaluations: dict[str, dict[str, Score]]

    def to_dict(self) -> dict[str, Any]:
        """One entry of `targets` in `--json`."""
        return {
            "lam": self.lam,
            "train_spearman": self.train_spearman,
            "evaluations": {
                path: {name: score.to_dict() for name, score in scores.items()}
                for path, scores in self.evaluations.items()
            },
        }


def compare(
    fitted: Readout, training: Labelled, judging: Mapping[str, Labelled], options: Options
) -> dict[TargetName, TargetScores]:
    """Each target's readout on every trace; that of the target in use is `fitted`, so that a penalty given holds for it."""
    found = {}
    for target in TARGETS:
        readout = fitted if target == fitted.target else fit(training, replace(options, target=target, lam=None))
        evaluations = {
            path: evaluate.scores(evaluate.predictions(readout, data, options), data, halves=False)
            for path, data in judging.items()
        }
        found[target] = TargetScores(readout.lam, train_spearman(readout), evaluations)
    return found
