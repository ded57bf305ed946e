"""What a fit and its evaluation depend on besides the traces."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

TargetName = Literal["sqrt", "log", "raw"]

SUFFIX = ".safetensors"
"""What the name of a readout's file ends with."""

TARGETS: tuple[TargetName, ...] = ("sqrt", "log", "raw")


@dataclass(frozen=True)
class Options:
    """The options of `leap-fit` that decide on numbers."""

    lam: float | None = None
    folds: int = 5
    target: TargetName = "sqrt"
    max_tokens: int | None = None
    seed: int = 0
    batch: int = 8
    rls: bool = False
    forgetting: float = 1.0
    layers: bool = False
