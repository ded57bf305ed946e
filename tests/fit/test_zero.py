"""`--from-zero`: readouts that start with a trace, against ridge in numpy on the labels that had come by then."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from fit_command import BUDGET, fit, traffic
from fit_reference import Floats, spearman

from leap_rs.fit.options import Options
from leap_rs.fit.zero import LAM
from leap_rs.trace import write_trace
from leap_rs.vllm.readouts import LearnSettings

SERVER = LearnSettings()
"""How a server learns from zero."""


def write(path: Path, rows: int, seed: int, **columns: Any) -> Path:
    data = traffic([3.0, 1.0, 0.0], rows, seed)
    frame = pl.DataFrame(
        {
            "arrival_s": np.arange(rows) / 10,
            "prompt_tokens": np.full(rows, 20, dtype=np.uint32),
            "output_tokens": data.lengths,
            "max_tokens": np.full(rows, BUDGET, dtype=np.uint32),
            "features": data.features,
        }
    )
    write_trace(frame.with_columns(**columns), path)
    return path


def zero(*words: str | Path) -> list[dict[str, Any]]:
    result = fit(*words, "--from-zero", "--json")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert document["readouts"] == []
    return document["from_zero"]


def reference(rows: int, seed: int, lam: float, batch: int) -> tuple[Floats, Floats]:
    """Predictions of each request from the first whole batches before it, NaN where mean and scale are not known yet."""
    data = traffic([3.0, 1.0, 0.0], rows, seed)
    x, lengths = data.features.astype(float), data.lengths.astype(float)
    first = x[: SERVER.warmup]
    u = np.column_stack([np.clip((x - first.mean(axis=0)) / first.std(axis=0), -8, 8), np.ones(rows)])
    penalty = np.diag([lam] * x.shape[1] + [0.0])
    predicted = np.full(rows, np.nan)
    for row in range(SERVER.warmup - 1, rows):
        seen = slice(0, row - row % batch)
        theta = np.linalg.solve(u[seen].T @ u[seen] + penalty, u[seen].T @ np.sqrt(lengths[seen]))
        predicted[row] = np.clip(u[row] @ theta, 1.0, np.sqrt(BUDGET)) ** 2
    return predicted, lengths


@pytest.mark.parametrize(("words", "lam", "batch"), [((), 1000.0, 8), (("--lam", "30", "--batch", "32"), 30.0, 32)])
def test_predictions_are_ridge_on_the_labels_before(
    words: tuple[str, ...], lam: float, batch: int, tmp_path: Path
) -> None:
    path = write(tmp_path / "t.parquet", 430, 1)
    (one,) = zero(path, *words)
    assert (one["kind"], one["trace"], one["rows"], one["d"]) == ("state", str(path), 430, 3)
    assert one["max_tokens"] == BUDGET
    assert one["first_predicted"] == SERVER.warmup
    predicted, lengths = reference(430, 1, lam, batch)
    known = ~np.isnan(predicted)
    assert [(window["first"], window["last"]) for window in one["windows"]] == [
        (1, 100),
        (101, 200),
        (201, 300),
        (301, 430),
    ]
    for window in one["windows"]:
        rows = np.flatnonzero(known)
        rows = rows[(rows >= window["first"] - 1) & (rows < window["last"])]
        assert window["predicted"] == len(rows)
        expected = spearman(predicted[rows], lengths[rows]) if len(rows) else None
        assert window["spearman"] == (expected if expected is None else pytest.approx(expected, abs=2e-3))
    late = known & (np.arange(430) >= 215)
    for name, rows in (("from_zero", known), ("from_zero_second_half", late)):
        score = one["scores"][name]
        assert score["rows"] == rows.sum()
        assert score["spearman"] == pytest.approx(spearman(predicted[rows], lengths[rows]), abs=2e-3)
        assert score["mae_tokens"] == pytest.approx(np.abs(predicted - lengths)[rows].mean(), rel=2e-3)
    assert list(tmp_path.iterdir()) == [path]


def test_it_learns_as_a_server_does() -> None:
    assert (SERVER.lam, SERVER.batch, SERVER.forgetting) == (LAM, Options().batch, Options().forgetting)


def test_every_trace_is_learned_by_itself_and_every_kind_of_features_in_it(tmp_path: Path) -> None:
    text = pl.Series("text_features", traffic([1.0] * 5, 300, 5).features)
    one, other = write(tmp_path / "one.parquet", 300, 1), write(tmp_path / "other.parquet", 300, 2, text_features=text)
    both = zero(one, other)
    assert [(found["trace"], found["kind"], found["d"]) for found in both] == [
        (str(one), "state", 3),
        (str(other), "state", 3),
        (str(other), "text", 8),
    ]
    assert both == zero(one) + zero(other)


def test_too_few_lengths_are_told_and_leave_dashes(tmp_path: Path) -> None:
    path = write(tmp_path / "t.parquet", SERVER.warmup - 1, 1)
    result = fit(path, "--from-zero")
    assert result.exit_code == 0
    assert result.stderr == f"leap-fit: {path}: 255 lengths are too few for a readout from zero: no predictions\n"
    assert "no prediction\n" in result.stdout
    assert "-: undefined" in result.stdout
    (one,) = zero(path)
    assert one["first_predicted"] is None
    assert {window["predicted"] for window in one["windows"]} == {0}
    assert {window["spearman"] for window in one["windows"]} == {None}


def test_the_tables(tmp_path: Path) -> None:
    rows = 1230
    text = pl.Series("text_features", traffic([1.0] * 5, rows, 5).features)
    long = write(tmp_path / f"{'long-name-' * 5}.parquet", rows, 1, text_features=text)
    short = write(tmp_path / "short.parquet", 300, 2)
    blocks = [block.splitlines() for block in fit(long, short, "--from-zero").stdout.split("\n\n")]
    found = zero(long, short)
    windows, scores = blocks[1:3]
    assert "3 windows more in --json" in " ".join(windows)
    table = windows[-3:]
    assert [line.split()[1] for line in table] == ["state", "text", "state"]
    for line, one in zip(table, found, strict=True):
        values = [window["spearman"] for window in one["windows"][:9]]
        assert line.split()[2:] == ["-" if value is None else f"{value:.3f}" for value in values]
    assert [line.split()[1].rstrip(",") for line in scores[-6:]] == ["state", "state", "text", "text", "state", "state"]
    assert max(len(line) for block in blocks[1:] for line in block) <= 120


@pytest.mark.parametrize(
    "words",
    [
        ["--out", "r.safetensors"],
        ["--eval", "t.parquet"],
        ["--rls"],
        ["--layers"],
        ["--target", "log"],
        ["--folds", "3"],
    ],
)
def test_options_that_say_nothing_here_are_wrong_usage(words: list[str]) -> None:
    result = fit("t.parquet", "--from-zero", *words)
    assert result.exit_code == 2
    assert f"Invalid value for {words[0]}: has no meaning with --from-zero" in result.stderr


def test_errors_name_the_trace(tmp_path: Path) -> None:
    bare = write(tmp_path / "bare.parquet", 20, 1)
    result = fit(bare, "--from-zero", "--lam", "0")
    assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
    assert result.stderr.startswith(f"leap-fit: {bare}: lam is 0")
