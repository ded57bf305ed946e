"""`--layers`: every feature column that the traces carry, side by side."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from fit_command import BUDGET, arrays, fit, fit_json
from fit_reference import Ridge, spearman

from leap_rs.trace import read_trace, write_trace

ROWS = {"a": 150, "b": 150, "c": 120}
WEIGHTS = np.array([4.0, -2.0, 1.0, 0.0])


@pytest.fixture
def traces_with_columns(tmp_path: Path) -> Path:
    """Traces a, b and c: `good` holds the length's own features, `blurred` the same in noise, `features` none at all."""
    rng = np.random.default_rng(0)
    for name, rows in ROWS.items():
        x = rng.normal(size=(rows, 4))
        lengths = np.clip(np.round((16 + x @ WEIGHTS + 2 * rng.normal(size=rows)) ** 2), 1, BUDGET)
        frame = pl.DataFrame(
            {
                "arrival_s": np.arange(rows) / 10,
                "prompt_tokens": np.full(rows, 20, dtype=np.uint32),
                "output_tokens": lengths.astype(np.uint32),
                "max_tokens": np.full(rows, BUDGET, dtype=np.uint32),
                "good": x.astype(np.float32),
                "features": rng.normal(size=(rows, 3)).astype(np.float32),
                "blurred": (x + 3 * rng.normal(size=x.shape)).astype(np.float16),
                "score_other": lengths.astype(np.float32),
            }
        )
        write_trace(frame, tmp_path / f"{name}.parquet")
    return tmp_path


def call(directory: Path, *words: str) -> list[Path | str]:
    out = directory / "r.safetensors"
    return [directory / "a.parquet", directory / "b.parquet", "--out", out, "--eval", directory / "c.parquet", *words]


def layers(directory: Path) -> dict[str, dict[str, object]]:
    result = fit(*call(directory, "--layers", "--json"))
    assert result.exit_code == 0, result.output
    return {one["column"]: one for one in json.loads(result.stdout)["layers"]}


def test_each_column_is_scored_out_of_fold_and_on_every_trace(traces_with_columns: Path) -> None:
    found = layers(traces_with_columns)
    assert list(found) == ["good", "features", "blurred"]
    assert [one["d"] for one in found.values()] == [4, 3, 4]
    train = [arrays(traces_with_columns / f"{name}.parquet", "good") for name in "ab"]
    x, lengths = np.concatenate([part[0] for part in train]), np.concatenate([part[1] for part in train])
    unseen, truth = arrays(traces_with_columns / "c.parquet", "good")
    expected = Ridge(x, lengths, found["good"]["lam"], BUDGET).predict(unseen)
    score = found["good"]["evaluations"][str(traces_with_columns / "c.parquet")]
    assert score["spearman"] == pytest.approx(spearman(expected, truth), abs=1e-3)
    assert score["mae_tokens"] == pytest.approx(np.abs(expected - truth).mean(), rel=1e-3)

    # Out of fold by any split: folds differ between seeds by no more than this.
    folds = np.random.default_rng(9).permutation(len(x)) % 5
    predicted = np.empty(len(x))
    for fold in range(5):
        model = Ridge(x[folds != fold], lengths[folds != fold], found["good"]["lam"], BUDGET)
        predicted[folds == fold] = model.predict(x[folds == fold])
    out_of_fold = found["good"]["out_of_fold"]
    assert out_of_fold["rows"] == 300
    assert out_of_fold["spearman"] == pytest.approx(spearman(predicted, lengths), abs=0.01)
    assert out_of_fold["mae_tokens"] == pytest.approx(np.abs(predicted - lengths).mean(), rel=0.03)
    by_rank = [found[name]["out_of_fold"]["spearman"] for name in ("good", "blurred", "features")]
    assert by_rank == sorted(by_rank, reverse=True)
    assert by_rank[0] > 0.8
    assert abs(by_rank[2]) < 0.2


def test_nothing_else_changes(traces_with_columns: Path) -> None:
    plain = fit_json(*call(traces_with_columns))
    written = (traces_with_columns / "r.safetensors").read_bytes()
    assert fit_json(*call(traces_with_columns, "--layers")) == plain
    assert (traces_with_columns / "r.safetensors").read_bytes() == written


def test_the_tables_have_a_row_a_column(traces_with_columns: Path) -> None:
    result = fit(*call(traces_with_columns, "--layers"))
    assert result.exit_code == 0
    blocks = [block.splitlines() for block in result.stdout.split("\n\n") if block.startswith("feature columns")]
    assert [block[0] for block in blocks] == [
        "feature columns, training rows that a fold left out",
        "feature columns, frozen on c",
    ]
    for block in blocks:
        assert [line.split()[0] for line in block[3:]] == ["good", "features", "blurred"]
        assert max(map(len, block)) <= 120


def edit(path: Path, *columns: pl.Expr | pl.Series) -> None:
    write_trace(read_trace(path).with_columns(*columns), path)


def test_a_family_is_never_in_two_folds(traces_with_columns: Path) -> None:
    """Rows of a family that are copies of each other: a fold that held some of them would know the others' lengths."""
    for name in "ab":
        path = traces_with_columns / f"{name}.parquet"
        frame = read_trace(path)
        rng = np.random.default_rng(ord(name))
        copied = np.arange(150) // 10
        family = [f"{name}{number}" for number in copied]
        noise = rng.normal(size=(15, 40)).astype(np.float32)[copied]
        lengths = rng.integers(10, 900, 15).astype(np.uint32)[copied]
        edited = frame.with_columns(
            pl.Series("features", noise), pl.Series("output_tokens", lengths), pl.Series("family", family)
        )
        write_trace(edited, path)
    edit(traces_with_columns / "c.parquet", pl.Series("features", np.zeros((120, 40), dtype=np.float32)))
    together = layers(traces_with_columns)["features"]["out_of_fold"]["spearman"]
    assert together < 0.5
    for name in "ab":
        path = traces_with_columns / f"{name}.parquet"
        write_trace(read_trace(path).drop("family"), path)
    assert layers(traces_with_columns)["features"]["out_of_fold"]["spearman"] > 0.95


def test_columns_are_checked_when_they_are_used(traces_with_columns: Path) -> None:
    path = traces_with_columns / "b.parquet"
    values = read_trace(path)["good"].to_numpy().copy()
    values[7, 2] = np.nan
    edit(path, pl.Series("good", values))
    assert fit(*call(traces_with_columns)).exit_code == 0
    (traces_with_columns / "r.safetensors").unlink()
    result = fit(*call(traces_with_columns, "--layers"))
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == (
        f"leap-fit: {path}: column 'good', row 7 (the first row is 0): feature 2 is nan, not a finite number\n"
    )
    assert not (traces_with_columns / "r.safetensors").exists()


def test_what_traces_do_not_share(traces_with_columns: Path) -> None:
    for name, column in (("a", "blurred"), ("c", "good")):
        path = traces_with_columns / f"{name}.parquet"
        write_trace(read_trace(path).drop(column), path)
    result = fit(*call(traces_with_columns, "--layers", "--json"))
    found = {one["column"]: one for one in json.loads(result.stdout)["layers"]}
    assert list(found) == ["good", "features"]
    assert found["good"]["evaluations"] == {}
    assert f"{traces_with_columns / 'c.parquet'}: no column 'good'" in result.stderr


def test_refusals(traces_with_columns: Path) -> None:
    for name in "ab":
        path = traces_with_columns / f"{name}.parquet"
        edit(path, pl.Series("family", ["one", "two"] * 75))
    result = fit(*call(traces_with_columns, "--layers"))
    assert result.exit_code == 1
    assert "--layers: 2 families do not fill 5 folds" in result.stderr
    edit(traces_with_columns / "a.parquet", pl.Series("family", [None, *["one"] * 149]))
    result = fit(*call(traces_with_columns, "--layers"))
    assert "a.parquet: column 'family', row 0 (the first row is 0): no value (null)" in result.stderr
    edit(traces_with_columns / "c.parquet", pl.Series("blurred", np.zeros((120, 2), dtype=np.float32)))
    for name in "ab":
        path = traces_with_columns / f"{name}.parquet"
        write_trace(read_trace(path).drop("family"), path)
    result = fit(*call(traces_with_columns, "--layers"))
    assert "c.parquet: column 'blurred' is 2 wide" in result.stderr
