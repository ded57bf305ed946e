"""What the brain keeps of a request from its arrival to its end."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from leap_rs._leap import Learner, RemainingTable

from .labels import Limits

CHUNK = 64


@dataclass(slots=True)
class Known:
    """What one readout knows of a live request."""

    row: npt.NDArray[Any]
    table: RemainingTable
    first: float | None
    """The score when the row came in, before anything of the answer was known; None where no readout gave it."""


@dataclass(slots=True)
class Live:
    """A request from its arrival to its end."""

    limits: Limits
    length: RemainingTable | None = None
    """Where the client has settled it."""
    known: dict[str, Known] = field(default_factory=dict)
    captured: bool = False
    """Whether its hidden state has come in, of use or not."""


def rescore(learner: Learner, live: Sequence[tuple[Live, Known]], rule: Mapping[str, Any]) -> None:
    """Predicts once more what a readout says of live requests."""
    for at in range(0, len(live), CHUNK):
        part = live[at : at + CHUNK]
        rows = np.stack([known.row for _, known in part])
        caps = [one.limits.max_tokens for one, _ in part]
        for (_, known), table in zip(part, learner.tables(rows, caps, **rule, seen=True), strict=True):
            known.table = table


def neutral(finished: int, tokens: int, budget: int, rule: Mapping[str, Any]) -> RemainingTable:
    """What a request without an estimate is ordered by: the running mean, the same for all."""
    mean = tokens / finished if finished else budget / 4
    root = math.sqrt(max(mean, 1.0))
    return RemainingTable(root, root / 2, budget, **rule)
