"""`leap-fit` from end to end, against numpy on the same rows."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from fit_command import BUDGET, LAM, ROWS, WIDTH, arrays, fit, fit_json, narrow
from fit_reference import Ridge, spearman

from leap_rs._leap import Readout
from leap_rs.fit.report import short_names
from leap_rs.trace import read_trace, write_trace


def test_the_readout_is_the_ridge_solution(small: Path) -> None:
    train = [small / "train.parquet", small / "other.parquet"]
    (one,) = fit_json(*train, "--out", small / "r.safetensors", "--lam", str(LAM), "--eval", small / "judged.parquet")
    parts = [arrays(path) for path in train]
    x, lengths = np.concatenate([part[0] for part in parts]), np.concatenate([part[1] for part in parts])
    reference = Ridge(x, lengths, LAM, BUDGET)
    readout = Readout.load(small / "r.safetensors")
    features, truth = arrays(small / "judged.parquet")
    expected = reference.predict(features)
    np.testing.assert_allclose(readout.predict(features), expected, rtol=1e-3)

    scores = one["evaluations"][str(small / "judged.parquet")]
    assert set(scores) == {"frozen"}
    assert scores["frozen"]["spearman"] == pytest.approx(spearman(expected, truth), abs=1e-3)
    assert scores["frozen"]["mae_tokens"] == pytest.approx(np.abs(expected - truth).mean(), rel=1e-3)
    assert (one["kind"], one["rows"], one["d"], one["max_tokens"], one["lam"]) == ("state", len(x), WIDTH, BUDGET, LAM)


def test_out_of_fold_spearman_is_that_of_rows_left_out(small: Path) -> None:
    (one,) = fit_json(small / "train.parquet", "--out", small / "r.safetensors", "--lam", str(LAM))
    x, lengths = arrays(small / "train.parquet")
    values = []
    for seed in range(20):
        folds = np.random.default_rng(seed).permutation(len(x)) % 5
        predicted = np.empty(len(x))
        for fold in range(5):
            model = Ridge(x[folds != fold], lengths[folds != fold], LAM * 0.8, BUDGET)
            predicted[folds == fold] = model.predict(x[folds == fold])
        values.append(spearman(predicted, lengths))
    assert min(values) - 0.03 < one["train_spearman"] < max(values) + 0.03


def test_lambda_by_k_fold_is_near_the_best(small: Path) -> None:
    (one,) = fit_json(small / "train.parquet", "--out", small / "r.safetensors")
    x, lengths = arrays(small / "train.parquet")

    def error(lam: float) -> float:
        total = 0.0
        for seed in range(5):
            folds = np.random.default_rng(seed).permutation(len(x)) % 5
            for fold in range(5):
                model = Ridge(x[folds != fold], lengths[folds != fold], lam, BUDGET)
                total += ((np.sqrt(model.predict(x[folds == fold])) - np.sqrt(lengths[folds == fold])) ** 2).sum()
        return total

    assert error(one["lam"]) < 1.02 * min(error(10.0**power) for power in np.arange(-1, 5.1, 0.5))


@pytest.mark.parametrize("batch", [1, 8])
def test_rls_predicts_first_and_learns_after(batch: int, small: Path) -> None:
    train, judged = small / "train.parquet", small / "judged.parquet"
    # Rows at the budget count with the budget as their length, so that numpy needs no imputation here.
    (one,) = fit_json(
        train, "--out", small / "r.safetensors", "--lam", str(LAM), "--eval", judged, "--rls", "--batch", str(batch)
    )
    model = Ridge(*arrays(train), LAM, BUDGET)
    features, lengths = arrays(judged)
    frozen = model.predict(features)
    predicted = np.empty(len(features))
    for row in range(len(features)):
        if row and row % batch == 0:
            model.learn(features[row - batch : row], lengths[row - batch : row])
        predicted[row] = model.predict(features[row : row + 1])[0]
    half = len(features) // 2
    scores = one["evaluations"][str(judged)]
    expected = {
        "frozen": (frozen, lengths),
        "rls": (predicted, lengths),
        "frozen_second_half": (frozen[half:], lengths[half:]),
        "rls_second_half": (predicted[half:], lengths[half:]),
    }
    assert set(scores) == set(expected)
    for name, (values, truth) in expected.items():
        assert scores[name]["spearman"] == pytest.approx(spearman(values, truth), abs=2e-3)
        assert scores[name]["mae_tokens"] == pytest.approx(np.abs(values - truth).mean(), rel=2e-3)


def test_two_kinds_go_to_two_files_each_with_its_anchor(tmp_path: Path, traces: Path) -> None:
    narrow(traces / "gpt-4-0613-arenahard.parquet", tmp_path / "both.parquet")
    readouts = fit_json(tmp_path / "both.parquet", "--out", tmp_path / "r.safetensors", "--lam", "30")
    assert [(one["kind"], one["path"]) for one in readouts] == [
        ("state", str(tmp_path / "r.safetensors")),
        ("prompt", str(tmp_path / "r.prompt.safetensors")),
    ]
    assert sorted(path.name for path in tmp_path.glob("*.safetensors")) == [
        "r.anchor.safetensors",
        "r.prompt.anchor.safetensors",
        "r.prompt.safetensors",
        "r.safetensors",
    ]
    state = Readout.load(tmp_path / "r.safetensors").meta
    assert (state["kind"], state["trained_on"], state["model"], state["layer"]) == ("state", ["both"], "m", 20)
    assert Readout.load(tmp_path / "r.prompt.safetensors").meta["kind"] == "prompt"


def test_one_kind_goes_to_the_given_file(tmp_path: Path, traces: Path) -> None:
    narrow(traces / "gpt-4-0613-arenahard.parquet", tmp_path / "prompt.parquet", ("prompt_features",))
    (one,) = fit_json(tmp_path / "prompt.parquet", "--out", tmp_path / "r.safetensors", "--lam", "30")
    assert (one["kind"], one["path"]) == ("prompt", str(tmp_path / "r.safetensors"))
    assert sorted(path.name for path in tmp_path.glob("*.safetensors")) == ["r.anchor.safetensors", "r.safetensors"]


def test_the_same_seed_gives_the_same_bytes(small: Path) -> None:
    contents = []
    for name in ("a", "b"):
        assert fit(small / "train.parquet", "--out", small / f"{name}.safetensors").exit_code == 0
        contents.append([(small / f"{name}{kind}.safetensors").read_bytes() for kind in ("", ".anchor")])
    assert contents[0] == contents[1]


def test_rows_without_a_known_length_are_left_out(small: Path) -> None:
    frame = read_trace(small / "train.parquet")
    row = pl.int_range(pl.len())
    edited = frame.with_columns(
        finish_reason=pl.when(row < 20)
        .then(pl.lit("abort"))
        .when(row < 50)
        .then(pl.lit("length"))
        .otherwise("finish_reason"),
        output_tokens=pl.when(row < 50).then(7).otherwise("output_tokens"),
        max_tokens=pl.when(row < 50).then(7).otherwise("max_tokens"),
    )
    write_trace(edited, small / "edited.parquet", layer=20)
    result = fit(small / "edited.parquet", "--out", small / "r.safetensors", "--lam", str(LAM))
    assert result.exit_code == 0
    assert "30 answers were cut before 1024 tokens" in result.stderr
    x, lengths = arrays(small / "train.parquet")
    expected = Ridge(x[50:], lengths[50:], LAM, BUDGET).predict(x)
    np.testing.assert_allclose(Readout.load(small / "r.safetensors").predict(x), expected, rtol=1e-3)


def test_the_report_tells_the_numbers(small: Path) -> None:
    result = fit(small / "train.parquet", "--out", small / "r.safetensors", "--eval", small / "train.parquet", "--rls")
    assert result.exit_code == 0
    for text in (
        "state readout",
        "lambda",
        "rows that a fold left out",
        "RLS, 2nd half",
        "MAE",
        "targets side by side",
    ):
        assert text in result.stdout
    assert "fitted on this trace" in result.stderr


def test_all_files_after_eval_are_judged_on_and_none_of_them_is_trained_on(small: Path) -> None:
    train, judged, other = (small / f"{name}.parquet" for name in ROWS)
    out = ("--out", small / "r.safetensors", "--lam", str(LAM))
    (alone,) = fit_json(train, *out)
    expected = (small / "r.safetensors").read_bytes()
    for words in (
        (train, *out, "--eval", judged, other),
        (train, "--eval", judged, other, *out),
        (train, *out, "--eval", judged, "--eval", other),
        (train, *out, f"--eval={judged}", other, "--rls"),
        ("--eval", judged, other, *out, "--", train),
    ):
        # `--` ends the options, so --json goes in front of them all.
        (one,) = fit_json(*words) if "--" not in words else json.loads(fit("--json", *words).stdout)["readouts"]
        assert one["rows"] == alone["rows"]
        assert list(one["evaluations"]) == [str(judged), str(other)]
        assert (small / "r.safetensors").read_bytes() == expected
        assert Readout.load(small / "r.safetensors").meta["trained_on"] == ["train"]


def test_files_after_eval_leave_none_to_train_on(small: Path) -> None:
    """`--eval A B` takes B as well, so that what is missing is told instead of trained on."""
    result = fit("--out", small / "r.safetensors", "--eval", small / "judged.parquet", small / "other.parquet")
    assert result.exit_code == 2
    assert "TRACE" in result.stderr
    assert not (small / "r.safetensors").exists()


def test_the_tables_name_traces_by_stem_within_120_columns(small: Path) -> None:
    long = small / f"{'long-name-' * 9}.parquet"
    long.write_bytes((small / "other.parquet").read_bytes())
    result = fit(
        small / "train.parquet", "--out", small / "r.safetensors", "--rls", "--eval", small / "judged.parquet", long
    )
    blocks = result.stdout.split("\n\n")[1:]
    assert [block.splitlines()[0].split(" (")[0] for block in blocks[:4]] == [
        "state readout, target sqrt",
        "state readout, targets side by side",
        "state readout, Spearman over 100 requests from the one named",
        "state readout, Spearman after that many labels of the trace, rows of another fold",
    ]
    table = blocks[0].splitlines()
    assert table[2].split()[:4] == ["trace", "predictions", "Spearman", "tau-b"]
    assert [line.split()[0] for line in table[3:7]] == ["judged"] * 4
    assert len({line.split()[0] for line in table[7:]}) == 1
    assert len(table) == 11
    # The first lines name the file, whose path may be long.
    assert max(len(line) for block in blocks for line in block.splitlines()) <= 120


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (["a/x.parquet", "b/y.csv"], ["x", "y"]),
        (["a/x.parquet", "b/x.parquet", "c/y.csv"], ["a/x", "b/x", "y"]),
        (["x.parquet", "b/x.parquet"], ["x", "b/x"]),
        (["a/x.parquet", "a/x.csv"], ["x.parquet", "x.csv"]),
        (["a/x.parquet", "a/x.parquet"], ["x", "x"]),
    ],
)
def test_short_names_tell_traces_apart(paths: list[str], names: list[str]) -> None:
    found = short_names(paths)
    assert [found[path] for path in paths] == names


def refused(directory: Path, *arguments: str | Path) -> str:
    """The one line on stderr of a refused call that wrote nothing."""
    before = sorted(directory.iterdir())
    result = fit(*arguments, "--out", directory / "r.safetensors")
    assert result.exit_code == 1, result.output
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    assert result.stderr.startswith("leap-fit: ")
    assert sorted(directory.iterdir()) == before
    return result.stderr


def test_equal_lengths_have_no_variance(tmp_path: Path, small: Path, cases: Path) -> None:
    equal = cases / "36-all_lengths_equal.csv"
    assert f"{equal}: the target has no variance: all 60 lengths are 30 tokens" in refused(tmp_path, equal)
    frame = read_trace(small / "other.parquet").with_columns(pl.lit(30, pl.UInt32).alias("output_tokens"))
    write_trace(frame, tmp_path / "equal.parquet")
    assert "the target has no variance" in refused(tmp_path, tmp_path / "equal.parquet")
    assert "no variance" in refused(tmp_path, small / "judged.parquet", "--max-tokens", "1")


def test_refusals(small: Path, tmp_path: Path) -> None:
    csv = tmp_path / "t.csv"
    csv.write_text("arrived_at,num_prefill_tokens,num_decode_tokens\n0,1,1\n1,1,2\n")
    assert f"{csv}: nothing to fit" in refused(tmp_path, csv)
    assert "missing.parquet: cannot be read" in refused(tmp_path, tmp_path / "missing.parquet")
    assert "missing.parquet: cannot be read" in refused(
        tmp_path, small / "other.parquet", "--eval", tmp_path / "missing.parquet"
    )
    frame = read_trace(small / "other.parquet")
    write_trace(frame, tmp_path / "layer.parquet", layer=10)
    assert "layer 10" in refused(tmp_path, small / "judged.parquet", tmp_path / "layer.parquet")
    assert "layer 10" in refused(tmp_path, small / "judged.parquet", "--eval", tmp_path / "layer.parquet")
    write_trace(
        frame.with_columns(frame["features"].cast(pl.List(pl.Float32)).list.head(3).cast(pl.Array(pl.Float32, 3))),
        tmp_path / "three.parquet",
    )
    assert "3 wide" in refused(tmp_path, small / "judged.parquet", tmp_path / "three.parquet")
    assert "three.parquet" in refused(tmp_path, small / "judged.parquet", "--eval", tmp_path / "three.parquet")


def test_a_missing_directory_is_told_before_anything_is_fitted(small: Path) -> None:
    result = fit(small / "other.parquet", "--out", small / "no" / "r.safetensors")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "there is no directory" in result.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["t.parquet"],
        ["t.parquet", "--out", "r.bin"],
        ["t.parquet", "--out", "r.safetensors", "--folds", "1"],
        ["t.parquet", "--out", "r.safetensors", "--forgetting", "0"],
        ["t.parquet", "--out", "r.safetensors", "--forgetting", "1.01"],
        ["t.parquet", "--out", "r.safetensors", "--forgetting", "nan"],
    ],
)
def test_wrong_usage(arguments: list[str]) -> None:
    result = fit(*arguments)
    assert result.exit_code == 2
    assert "Traceback" not in result.output


def test_the_installed_command_ends_with_one_line(tmp_path: Path) -> None:
    code = "from leap_rs.fit.command import main; main()"
    call = [sys.executable, "-c", code, "missing.parquet", "--out", "r.safetensors"]
    done = subprocess.run(call, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 1
    assert done.stderr == "leap-fit: missing.parquet: cannot be read: No such file or directory\n"
    assert done.stdout == ""
