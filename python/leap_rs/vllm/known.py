"""What the brain keeps of a request from its arrival to its end."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy.typing as npt

from leap_rs._leap import RemainingTable

from .labels import Limits


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
