"""Real requests, by numbers, for tests of what learns from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from leap_rs.vllm.online import OnlineBrain
from leap_rs.vllm.reading import Reading
from leap_rs.vllm.settings import BrainSettings


@dataclass(frozen=True)
class Traffic:
    """Requests in the order in which they come; `state` and `prompt` are their feature rows."""

    state: np.ndarray
    prompt: np.ndarray
    tokens: np.ndarray
    stopped: np.ndarray
    max_tokens: int = 1024

    def __len__(self) -> int:
        return len(self.tokens)

    def head(self, n: int) -> Traffic:
        """The first `n` of them."""
        return Traffic(self.state[:n], self.prompt[:n], self.tokens[:n], self.stopped[:n])

    def reason(self, i: int) -> Any:
        return "stop" if self.stopped[i] else "length"


def real_traffic(traces: Path, names: Sequence[str] = ("smollm2-sharegpt", "smollm2-multilingual")) -> Traffic:
    """The committed traces one after the other."""
    frame = pl.concat([pl.read_parquet(traces / f"{name}.parquet") for name in names], how="diagonal")
    return Traffic(
        frame["features"].to_numpy(),
        frame["prompt_features"].to_numpy(),
        frame["output_tokens"].to_numpy(),
        (frame["finish_reason"] == "stop").to_numpy(),
    )


class Pooled:
    """Stands where PromptFeatures stands.

    Args:
        rows: What it makes of prompts.
        numbers: The row of each prompt; without them the one token of a prompt is the number of its row.
    """

    def __init__(self, rows: np.ndarray, numbers: Mapping[tuple[int, ...], int] | None = None) -> None:
        self.rows = rows
        self.width = rows.shape[1]
        self._numbers = numbers

    def pool(self, token_ids: np.ndarray) -> np.ndarray:
        return self.rows[int(token_ids[0]) if self._numbers is None else self._numbers[tuple(token_ids.tolist())]]


def stream(
    brain: OnlineBrain, traffic: Traffic, *, flying: int = 32, settle: int = 8, start: int = 0
) -> list[tuple[bool, bool]]:
    """Sends the requests through a brain, `flying` at a time. Returns after each end which readouts were trusted."""
    trusted = []

    def end(i: int) -> None:
        brain.finished(f"r{i}", traffic.reason(i), int(traffic.tokens[i]))
        if i % settle == 0:
            brain.settle()
        trusted.append(("prompt" in brain.trusted, "state" in brain.trusted))

    for i in range(start, len(traffic)):
        brain.arrived(f"r{i}", [i], traffic.max_tokens, 0, False)
        brain.state(f"r{i}", traffic.state[i])
        if i - start >= flying:
            end(i - flying)
    for i in range(max(len(traffic) - flying, start), len(traffic)):
        end(i)
    brain.settle()
    return trusted


class Brains:
    """Makes brains and closes them."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.made: list[OnlineBrain] = []

    def __call__(
        self, traffic: Traffic | None = None, *, reading: Reading | None = None, **options: object
    ) -> OnlineBrain:
        defaults: dict[str, object] = {"model": "m", "layer": 20, "max_tokens": 1024, "metrics_dir": self.directory}
        if traffic is not None:
            defaults["width"] = traffic.state.shape[1]
        pooled = None if traffic is None else Pooled(traffic.prompt)
        brain = OnlineBrain(BrainSettings(**{**defaults, **options}), pooled, reading)  # type: ignore[arg-type]
        self.made.append(brain)
        return brain
