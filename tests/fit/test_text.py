"""The text readout: what it reads, against numpy on rows joined by hand; where it goes, and what it says of itself."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from fit_command import BUDGET, LAM, fit, fit_json
from fit_reference import Floats, Ridge, spearman

from leap_rs._leap import OnlineReadout, Readout
from leap_rs.trace import read_trace, write_trace

OF = {"model": "answering", "features_model": "small", "layer": 20, "encoder": "MiniLM", "encoder_layer": 4}
TEXT, PROMPT, STATE = 5, 4, 3


def write(path: Path, rows: int, seed: int, *left_out: str, **metadata: object) -> Path:
    """A trace whose sqrt lengths are linear in what the encoder and the embeddings each know a half of."""
    rng = np.random.default_rng(seed)
    text, prompt = rng.normal(size=(rows, TEXT)).astype(np.float16), rng.normal(size=(rows, PROMPT)).astype(np.float32)
    tokens = rng.integers(1, 400, rows)
    y = 16 + text @ [3.0, -1.0, 0.5, 0.0, 0.0] + prompt @ [0.0, 2.0, 0.0, 1.0] + tokens / 100 + rng.normal(size=rows)
    columns = {
        "arrival_s": np.arange(rows) / 10,
        "prompt_tokens": tokens.astype(np.uint32),
        "output_tokens": np.clip(np.round(y**2), 1, BUDGET).astype(np.uint32),
        "max_tokens": np.full(rows, BUDGET, dtype=np.uint32),
        "prompt_features": prompt,
        "features": rng.normal(size=(rows, STATE)).astype(np.float32),
        "text_features": text,
    }
    frame = pl.DataFrame({name: values for name, values in columns.items() if name not in left_out})
    write_trace(frame, path, **{**OF, **metadata})
    return path


def joined(path: Path) -> tuple[Floats, Floats]:
    """The rows by the definition, and the lengths."""
    frame = read_trace(path)
    n = frame["prompt_tokens"].to_numpy().astype(float)
    known = (
        frame["prompt_features"].to_numpy()
        if "prompt_features" in frame.columns
        else np.column_stack([np.sqrt(n), np.log1p(n), n])
    )
    return np.column_stack([frame["text_features"].to_numpy(), known]).astype(float), frame["output_tokens"].to_numpy()


def solution(model: Ridge) -> Floats:
    return np.linalg.solve(model.gram, model.right)


@pytest.mark.parametrize(("left_out", "d"), [((), TEXT + PROMPT), (("prompt_features",), TEXT + 3)])
def test_the_readout_is_the_ridge_solution_on_the_joined_rows(tmp_path: Path, left_out: tuple[str], d: int) -> None:
    train = [write(tmp_path / f"{seed}.parquet", 120, seed, *left_out) for seed in (1, 2)]
    judged = write(tmp_path / "judged.parquet", 150, 3, *left_out)
    one = fit_json(*train, "--out", tmp_path / "r.safetensors", "--lam", str(LAM), "--eval", judged)[-1]
    rows, lengths = (np.concatenate(parts) for parts in zip(*map(joined, train), strict=True))
    reference = Ridge(rows, lengths, LAM, BUDGET)
    readout = Readout.load(tmp_path / "r.text.safetensors")
    assert (one["kind"], one["path"], one["d"], readout.d) == ("text", str(tmp_path / "r.text.safetensors"), d, d)
    # Weights that differ from each other tell the order of the columns.
    np.testing.assert_allclose([*readout.weight, readout.bias], solution(reference), rtol=1e-3, atol=1e-4)
    unseen, truth = joined(judged)
    expected = reference.predict(unseen)
    np.testing.assert_allclose(readout.predict(unseen), expected, rtol=1e-3)
    frozen = one["evaluations"][str(judged)]["frozen"]
    assert frozen["spearman"] == pytest.approx(spearman(expected, truth), abs=1e-3)
    assert frozen["mae_tokens"] == pytest.approx(np.abs(expected - truth).mean(), rel=1e-3)


def test_rls_on_the_joined_rows(tmp_path: Path) -> None:
    train, judged = write(tmp_path / "train.parquet", 120, 1), write(tmp_path / "judged.parquet", 150, 2)
    words = [train, "--out", tmp_path / "r.safetensors", "--lam", str(LAM), "--eval", judged, "--rls"]
    one = fit_json(*words)[-1]
    model = Ridge(*joined(train), LAM, BUDGET)
    rows, lengths = joined(judged)
    predicted = np.empty(len(rows))
    for row in range(len(rows)):
        if row and row % 8 == 0:
            model.learn(rows[row - 8 : row], lengths[row - 8 : row])
        predicted[row] = model.predict(rows[row : row + 1])[0]
    scores, curve = one["evaluations"][str(judged)], one["curves"][str(judged)]
    assert scores["rls"]["spearman"] == pytest.approx(spearman(predicted, lengths), abs=2e-3)
    assert [(window["first"], window["last"]) for window in curve["windows"]] == [(1, 100), (101, 150)]
    assert curve["windows"][1]["rls"] == pytest.approx(spearman(predicted[100:], lengths[100:]), abs=3e-3)
    assert [point["labels"] for point in curve["learning"]] == [0, 50, 100]
    assert set(one["targets"]) == {"sqrt", "log", "raw"}
    heads = [block.splitlines()[0] for block in fit(*words).stdout.split("\n\n")]
    for what in (
        "target sqrt",
        "targets side by side",
        "Spearman over 100 requests",
        "Spearman after that many labels",
    ):
        assert any(head.startswith(f"text readout, {what}") for head in heads)


def test_three_kinds_go_to_three_files_each_with_its_anchor(tmp_path: Path) -> None:
    train = write(tmp_path / "train.parquet", 120, 1)
    contents = []
    for name in ("a", "b"):
        directory = tmp_path / name
        directory.mkdir()
        readouts = fit_json(train, "--out", directory / "r.safetensors", "--lam", str(LAM))
        assert [(one["kind"], Path(one["path"]).name) for one in readouts] == [
            ("state", "r.safetensors"),
            ("prompt", "r.prompt.safetensors"),
            ("text", "r.text.safetensors"),
        ]
        contents.append({path.name: path.read_bytes() for path in directory.iterdir()})
    assert contents[0] == contents[1]
    assert set(contents[0]) == {f"r{kind}{a}.safetensors" for kind in ("", ".prompt", ".text") for a in ("", ".anchor")}

    online = OnlineReadout(Readout.load(tmp_path / "a" / "r.text.safetensors"))
    assert online.anchored
    model = Ridge(*joined(train), LAM, BUDGET)
    new, lengths = joined(write(tmp_path / "new.parquet", 80, 2))
    online.observe(new, lengths)
    model.learn(new, lengths)
    np.testing.assert_allclose(online.predict(new), model.predict(new), rtol=2e-3)


@pytest.mark.parametrize(
    ("left_out", "names"),
    [
        (("features", "prompt_features"), {"text": "r"}),
        (("features",), {"prompt": "r", "text": "r.text"}),
        (("prompt_features",), {"state": "r", "text": "r.text"}),
        (("text_features",), {"state": "r", "prompt": "r.prompt"}),
    ],
)
def test_the_first_kind_goes_to_the_given_file(tmp_path: Path, left_out: tuple[str], names: dict[str, str]) -> None:
    train = write(tmp_path / "train.parquet", 60, 1, *left_out)
    readouts = fit_json(train, "--out", tmp_path / "r.safetensors", "--lam", str(LAM))
    assert {one["kind"]: one["path"] for one in readouts} == {
        kind: str(tmp_path / f"{name}.safetensors") for kind, name in names.items()
    }


def test_what_a_readout_says_of_itself(tmp_path: Path) -> None:
    fit_json(write(tmp_path / "train.parquet", 60, 1), "--out", tmp_path / "r.safetensors", "--lam", str(LAM))
    state, prompt, text = (Readout.load(tmp_path / f"r{kind}.safetensors").meta for kind in ("", ".prompt", ".text"))
    assert (state["kind"], state["model"], state["layer"]) == ("state", "small", 20)
    assert (prompt["kind"], prompt["model"], prompt["layer"]) == ("prompt", "small", None)
    assert (text["kind"], text["model"], text["layer"]) == ("text", "small", None)
    assert (text["encoder"], text["encoder_layer"], text["trained_on"]) == ("MiniLM", "4", ["train"])
    assert "encoder" not in state
    assert "encoder" not in prompt


def test_without_a_model_of_the_features_it_is_the_one_that_answered(tmp_path: Path) -> None:
    path = write(tmp_path / "train.parquet", 60, 1)
    write_trace(read_trace(path), path, model="answering", encoder="MiniLM")
    fit_json(path, "--out", tmp_path / "r.safetensors", "--lam", str(LAM))
    text = Readout.load(tmp_path / "r.text.safetensors").meta
    assert (text["model"], text["encoder"], "encoder_layer" in text) == ("answering", "MiniLM", False)


def test_answers_of_several_models_are_fitted_together_on_features_of_one(tmp_path: Path) -> None:
    one, other = write(tmp_path / "one.parquet", 60, 1), write(tmp_path / "other.parquet", 60, 2, model="another")
    assert [readout["rows"] for readout in fit_json(one, other, "--out", tmp_path / "r.safetensors")] == [120] * 3
    assert Readout.load(tmp_path / "r.safetensors").meta["model"] == "small"


@pytest.mark.parametrize(
    ("metadata", "left_out", "told"),
    [
        ({"encoder": "bge"}, (), "its text_features are of encoder bge, those of {one} of MiniLM"),
        ({"encoder_layer": 6}, (), "its text_features are of encoder_layer 6, those of {one} of 4"),
        ({"layer": 10}, (), "its features are of layer 10, those of {one} of 20"),
        ({"features_model": "big"}, ("features",), "its prompt_features are of model big, those of {one} of small"),
        (
            {},
            ("prompt_features",),
            "no column 'prompt_features', but {one} has it: a text readout reads it in all traces or in none",
        ),
    ],
)
def test_traces_that_disagree(metadata: dict[str, object], left_out: tuple[str], told: str, tmp_path: Path) -> None:
    one = write(tmp_path / "one.parquet", 60, 1)
    other = write(tmp_path / "other.parquet", 60, 2, *left_out, **metadata)
    result = fit(one, other, "--out", tmp_path / "r.safetensors")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == f"leap-fit: {other}: {told.format(one=one)}\n"
    assert not list(tmp_path.glob("*.safetensors"))


def test_traces_may_differ_in_features_that_one_of_them_lacks(tmp_path: Path) -> None:
    one = write(tmp_path / "one.parquet", 60, 1, "features", layer=10)
    other = write(tmp_path / "other.parquet", 60, 2)
    readouts = fit_json(one, other, "--out", tmp_path / "r.safetensors", "--lam", str(LAM))
    assert [readout["kind"] for readout in readouts] == ["prompt", "text"]


def test_evaluation_traces_that_lack_a_part(tmp_path: Path) -> None:
    train = write(tmp_path / "train.parquet", 60, 1)
    judged = {
        name: write(tmp_path / f"{name}.parquet", 60, seed, *left_out)
        for seed, (name, left_out) in enumerate(
            {"whole": (), "bare": ("prompt_features",), "wordless": ("text_features",)}.items(), start=2
        )
    }
    words = [train, "--out", tmp_path / "r.safetensors", "--lam", str(LAM), "--eval", *judged.values()]
    result = fit(*words, "--json")
    text = json.loads(result.stdout)["readouts"][-1]
    assert list(text["evaluations"]) == [str(judged["whole"])]
    for told in (
        f"{judged['bare']}: no column 'prompt_features', so not evaluated for it",
        f"{judged['bare']}: no column 'prompt_features', so not evaluated for 'text_features + prompt_features'",
        f"{judged['wordless']}: no column 'text_features', so not evaluated for 'text_features + prompt_features'",
    ):
        assert f"leap-fit: {told}\n" in result.stderr


def test_a_readout_on_length_terms_reads_them_of_any_trace(tmp_path: Path) -> None:
    train = write(tmp_path / "train.parquet", 60, 1, "prompt_features")
    whole, bare = write(tmp_path / "whole.parquet", 80, 2), write(tmp_path / "bare.parquet", 80, 2, "prompt_features")
    one = fit_json(train, "--out", tmp_path / "r.safetensors", "--lam", str(LAM), "--eval", whole, bare)[-1]
    assert one["evaluations"][str(whole)] == one["evaluations"][str(bare)]


def test_layers_show_each_column_alone_and_both_together(tmp_path: Path) -> None:
    train, judged = write(tmp_path / "train.parquet", 200, 1), write(tmp_path / "judged.parquet", 150, 2)
    words = [train, "--out", tmp_path / "r.safetensors", "--lam", str(LAM), "--eval", judged, "--layers"]
    found = {one["column"]: one for one in json.loads(fit(*words, "--json").stdout)["layers"]}
    both = "text_features + prompt_features"
    assert {column: one["d"] for column, one in found.items()} == {
        "prompt_features": PROMPT,
        "features": STATE,
        "text_features": TEXT,
        both: TEXT + PROMPT,
    }
    rows, lengths = joined(train)
    unseen, truth = joined(judged)
    expected = Ridge(rows, lengths, found[both]["lam"], BUDGET).predict(unseen)
    score = found[both]["evaluations"][str(judged)]["spearman"]
    assert score == pytest.approx(spearman(expected, truth), abs=1e-3)
    for alone in ("prompt_features", "text_features"):
        assert found[alone]["out_of_fold"]["spearman"] < found[both]["out_of_fold"]["spearman"]

    tables = [block.splitlines() for block in fit(*words).stdout.split("\n\n") if block.startswith("feature columns")]
    assert len(tables) == 2
    for table in tables:
        assert [line.strip() for line in table[-2:-1]] == ["text_features +"]
        assert table[-1].split()[:2] == ["prompt_features", str(TEXT + PROMPT)]
        assert max(map(len, table)) <= 120
