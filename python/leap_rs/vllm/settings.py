"""What the plugin's options mean to the brain."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from .auto import ArmSettings
from .readouts import LearnSettings

BUDGET = 8192
"""Output budget M of a readout that starts from zero, where the model can write more: longer answers count as this."""


@dataclass(frozen=True)
class BrainSettings:
    """What a brain is for, and how it predicts and learns."""

    model: str
    """The name that the model is served under, which may change."""
    weights: str | None = None
    """What the model itself is called: a saved state goes by it, and a readout may."""
    layer: int | None = None
    width: int | None = None
    """Features of the hidden state; None where none is captured."""
    max_tokens: int = BUDGET
    mode: Literal["shadow", "armed", "auto"] = "auto"
    order: Literal["gittins", "survival", "countdown"] = "gittins"
    objective: Literal["ptl", "e2el"] = "ptl"
    readout: Path | None = None
    learn: LearnSettings = field(default_factory=LearnSettings)
    arm: ArmSettings = field(default_factory=ArmSettings)
    state_dir: Path | None = None
    state_every: int = 64
    engine: int = 0
    metrics_dir: Path | None = None

    @classmethod
    def from_options(
        cls,
        options: Any,
        *,
        model: str,
        weights: str | None = None,
        layer: int | None,
        width: int | None,
        max_model_len: int,
        engine: int = 0,
    ) -> BrainSettings:
        """From the plugin's options."""
        rls, arm = options.rls, options.arm
        return cls(
            model=model,
            weights=weights,
            layer=layer,
            width=width,
            max_tokens=min(max_model_len, BUDGET),
            mode=options.mode,
            order="gittins" if options.order == "fcfs" else options.order,
            objective=options.objective,
            readout=options.readout,
            learn=LearnSettings(rls.batch, rls.forgetting, rls.lam),
            arm=ArmSettings(arm.window, arm.min_correlation, arm.hysteresis),
            state_dir=options.state_dir,
            state_every=options.state_every,
            engine=engine,
        )
