"""What readouts would have known of a trace had they started with it: nothing fitted, predict first and learn after."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from leap_rs._leap import LeapError, OnlineReadout
from leap_rs.fit import data, joined
from leap_rs.fit.curve import edges, ranked
from leap_rs.fit.evaluate import stream
from leap_rs.fit.metrics import Predictions, Score, score
from leap_rs.fit.options import Options
from leap_rs.trace import Trace

LAM = 1000.0
"""The ridge penalty of a server's readouts that start from zero (`vllm/readouts.py`)."""


@dataclass(frozen=True)
class Window:
    """Rank correlation of the predictions for requests `first` to `last` of the stream, counted from 1."""

    first: int
    last: int
    predicted: int
    """For how many of them a readout gave a prediction."""
    spearman: float | None


@dataclass(frozen=True)
class FromZero:
    """One readout that learned along one trace. Only requests for which it gave a prediction are scored."""

    kind: data.Kind
    trace: Path
    rows: int
    d: int
    max_tokens: int
    first_predicted: int | None
    """The first request with a prediction, counted from 1: those before it give mean and scale."""
    scores: dict[str, Score]
    windows: list[Window]

    def to_dict(self) -> dict[str, Any]:
        """One entry of `from_zero` in `--json`."""
        return {**asdict(self), "trace": str(self.trace)}


def learn(traces: Sequence[Trace], options: Options) -> tuple[list[FromZero], list[str]]:
    """Every readout that a trace has features for, each trace by itself, and what a user should be told."""
    found, notes = [], []
    for trace in traces:
        max_tokens = options.max_tokens or data.output_budget([trace])
        notes += data.settled(trace)
        for kind, column in data.columns([trace]).items():
            rows = data.labelled(joined.with_column(trace, column), column, max_tokens)
            notes += [f"{trace.path}: {what}" for what in data.remarks(rows)]
            try:
                one = judged(kind, trace.path, rows, options)
            except LeapError as error:
                raise type(error)(f"{trace.path}: {error}") from None
            if one.first_predicted is None:
                notes.append(f"{trace.path}: {len(rows)} lengths are too few for a readout from zero: no predictions")
            found.append(one)
    return found, notes


def judged(kind: data.Kind, path: Path, rows: data.Labelled, options: Options) -> FromZero:
    """One readout along one trace."""
    made, known = stream(learner(kind, rows, options), rows)

    def part(start: int, end: int) -> tuple[Predictions, data.Labelled]:
        here = known & (np.arange(len(rows)) >= start) & (np.arange(len(rows)) < end)
        return made.rows(here), rows.where(here)

    windows = []
    for start, end in edges(len(rows)):
        predicted, here = part(start, end)
        windows.append(Window(start + 1, end, len(here), ranked(predicted.lengths, here)))
    scores = {
        "from_zero": score(*part(0, len(rows))),
        "from_zero_second_half": score(*part(len(rows) // 2, len(rows))),
    }
    first = int(known.argmax()) + 1 if known.any() else None
    return FromZero(kind, path, len(rows), rows.features.shape[1], rows.max_tokens, first, scores, windows)


def learner(kind: data.Kind, rows: data.Labelled, options: Options) -> OnlineReadout:
    """A readout that knows nothing; where no penalty is given, with that of a server."""
    return OnlineReadout.from_zero(
        rows.features.shape[1],
        max_tokens=rows.max_tokens,
        lam=LAM if options.lam is None else options.lam,
        kind=kind,
        batch=options.batch,
        forgetting=options.forgetting,
    )
