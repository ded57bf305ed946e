"""Calls of `leap-fit`, and small traces for them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from typer.testing import CliRunner, Result

from leap_rs.fit.command import app, expand
from leap_rs.fit.data import Labelled
from leap_rs.trace import read_trace, write_trace
from leap_rs.trace.schema import FEATURE_COLUMNS

WIDTH = 24
LAM = 30.0
BUDGET = 1024
ROWS = {"train": 284, "judged": 199, "other": 113}
"""The small traces, and how many requests each has."""


def fit(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, expand([str(argument) for argument in arguments]))


def fit_json(*arguments: str | Path) -> list[dict[str, Any]]:
    result = fit(*arguments, "--json")
    assert result.exit_code == 0, result.output
    parsed = json.loads(result.stdout, parse_constant=lambda text: pytest.fail(f"{text} is not strict JSON"))
    assert parsed["leap_fit_version"] == 1
    return parsed["readouts"]


def narrow(source: Path, target: Path, columns: Sequence[str] = ("features", "prompt_features")) -> pl.DataFrame:
    """A committed trace with its first features only, so that a test is quick."""
    frame = read_trace(source)
    arrays = [frame[c].cast(pl.Array(pl.Float32, frame[c].dtype.size)).to_numpy()[:, -WIDTH:] for c in columns]
    frame = frame.drop(FEATURE_COLUMNS, strict=False)
    frame = frame.with_columns(pl.Series(c, values) for c, values in zip(columns, arrays, strict=True))
    write_trace(frame, target, model="m", layer=20)
    return frame


def arrays(path: Path, column: str = "features") -> tuple[Any, Any]:
    frame = read_trace(path)
    return frame[column].to_numpy().astype(np.float64), frame["output_tokens"].to_numpy()


def traffic(weights: list[float], rows: int, seed: int) -> Labelled:
    """Lengths whose square root is linear in the features with these weights and a deviation of 2."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, len(weights)))
    lengths = np.clip(np.round((16 + x @ weights + 2 * rng.normal(size=rows)) ** 2), 1, BUDGET)
    return Labelled(x.astype(np.float32), lengths.astype(np.uint32), lengths >= BUDGET, BUDGET)
