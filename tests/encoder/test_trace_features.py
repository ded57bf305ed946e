"""`leap-trace features`: rows of an encoder beside a trace's other columns."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl
import pytest
from commands import Run, runner, strict_json

from leap_rs.trace import describe, load, write_trace
from leap_rs.trace.command import main

TEXTS = ["Write a haiku.", "Is 7 prime?\nYes or no", "", 'Tell me, at length, of "Rome"; say all.', "word " * 500]
IDS = ["17", "b", "c", "d", "e"]
NEEDS_TORCH = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    return runner(main, capsys)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    frame = pl.DataFrame(
        {
            "request_id": IDS,
            "arrival_s": [0.0, 0.5, 1.0, 1.5, 2.0],
            "prompt_tokens": [4, 9, 1, 12, 501],
            "output_tokens": [20, 2, 30, 400, 7],
        }
    )
    write_trace(frame, tmp_path / "t.parquet", model="some-model", source="made up")
    return tmp_path / "t.parquet"


@pytest.fixture
def minilm_like(tmp_path: Path) -> Path:
    """What says that it is an encoder, and has no weights."""
    directory = tmp_path / "encoder"
    directory.mkdir()
    (directory / "config.json").write_text('{"model_type": "bert", "num_hidden_layers": 6, "hidden_size": 384}')
    return directory


def frame_of(kind: str) -> dict[str, list[str]]:
    """Texts in the trace's order, or in another one beside ids, with a row that the trace does not have."""
    if kind == "order":
        return {"text": TEXTS}
    order = [3, 0, 4, 1, 2]
    return {"prompt": ["no such request", *(TEXTS[i] for i in order)], "request_id": ["x", *(IDS[i] for i in order)]}


def texts_file(directory: Path, suffix: str, columns: dict[str, Any]) -> Path:
    path = directory / f"texts{suffix}"
    frame = pl.DataFrame(columns)
    if suffix == ".parquet":
        frame.write_parquet(path)
    elif suffix == ".csv":
        frame.write_csv(path, quote_style="non_numeric")
    else:
        path.write_text("".join(f"{json.dumps(row)}\n" for row in frame.to_dicts()))
    return path


def states(minilm: Path) -> npt.NDArray[np.float32]:
    """transformers' own, in float32: the mean over the tokens of each text after each layer."""
    import torch
    import transformers

    model = transformers.AutoModel.from_pretrained(minilm).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(minilm)
    rows = []
    with torch.inference_mode():
        for text in TEXTS:
            given = tokenizer(text, truncation=True, max_length=256, return_tensors="pt")
            rows.append([s[0].mean(dim=0).numpy() for s in model(**given, output_hidden_states=True).hidden_states])
    return np.array(rows).swapaxes(0, 1)


def close(series: pl.Series, expected: npt.NDArray[np.float32]) -> bool:
    """Alike but for rounding, which on some processors is that of bfloat16."""
    return bool(np.allclose(series.to_numpy().astype(np.float32), expected, atol=0.05))


@NEEDS_TORCH
@pytest.mark.parametrize("suffix", [".parquet", ".csv", ".jsonl"])
@pytest.mark.parametrize("kind", ["order", "ids"])
def test_rows_are_the_texts_own(run: Run, trace: Path, minilm: Path, tmp_path: Path, suffix: str, kind: str) -> None:
    named = tmp_path / "all-MiniLM-L6-v2"
    named.symlink_to(minilm)
    out = tmp_path / "out.parquet"
    texts = texts_file(tmp_path, suffix, frame_of(kind))
    status, printed, told = run("features", trace, "--texts", texts, "--encoder", named, "--out", out, "--json")
    assert (status, told) == (0, "")
    assert strict_json(printed)["requests"] == 5
    made = load(out)
    assert made.metadata["encoder"] == "all-MiniLM-L6-v2"
    assert made.metadata["encoder_layer"] == "4"
    assert made.metadata["model"] == "some-model"
    assert made.frame.drop("text_features").equals(load(trace).frame)
    assert made.frame["text_features"].dtype == pl.Array(pl.Float16, 384)
    assert close(made.frame["text_features"], states(minilm)[4])


@NEEDS_TORCH
def test_every_layer(run: Run, trace: Path, minilm: Path, tmp_path: Path) -> None:
    texts = texts_file(tmp_path, ".csv", frame_of("order"))
    given = ("--texts", texts, "--encoder", minilm)
    assert run("features", trace, *given, "--out", tmp_path / "a.parquet", "--layers", "--layer", 5)[0] == 0
    made = load(tmp_path / "a.parquet").frame
    expected = states(minilm)
    assert len(expected) == 7
    assert all(close(made[f"text_layer_{layer}"], expected[layer]) for layer in range(7))
    assert made["text_features"].equals(made["text_layer_5"].alias("text_features"))
    assert load(tmp_path / "a.parquet").metadata["encoder_layer"] == "5"
    # What was there gives way.
    assert run("features", tmp_path / "a.parquet", *given, "--out", tmp_path / "b.parquet")[0] == 0
    again = load(tmp_path / "b.parquet").frame
    assert again.columns == [name for name in made.columns if not name.startswith("text_layer_")]
    assert close(again["text_features"], expected[4])


@NEEDS_TORCH
def test_states_of_a_causal_model_have_32_bits(run: Run, trace: Path, smollm: Path, tmp_path: Path) -> None:
    texts = texts_file(tmp_path, ".csv", frame_of("order"))
    out = tmp_path / "out.parquet"
    assert run("features", trace, "--texts", texts, "--encoder", smollm, "--out", out)[0] == 0
    made = load(out)
    assert made.frame["text_features"].dtype == pl.Array(pl.Float32, 576)
    assert made.metadata["encoder_layer"] == "20"


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({"text": TEXTS[:3]}, "holds 3 texts, and none for row 3 of"),
        ({"text": [*TEXTS, "more"]}, "holds 6 texts, but"),
        ({"prompt": TEXTS, "request_id": ["17", "b", "c", "x", "e"]}, "has no text for row 3 of"),
        ({"prompt": TEXTS, "request_id": ["17", "b", "c", "b", "e"]}, "column 'request_id', row 3"),
        ({"words": TEXTS}, "has no column 'text' or 'prompt'; there are words"),
        ({"text": ["a", None, "c", "d", "e"]}, "column 'text', row 1"),
        ({"text": [1, 2, 3, 4, 5]}, "must be texts, not Int64"),
    ],
)
def test_texts_that_do_not_fit(
    run: Run, trace: Path, minilm_like: Path, tmp_path: Path, columns: dict[str, list[Any]], said: str
) -> None:
    texts = texts_file(tmp_path, ".parquet", columns)
    out = tmp_path / "out.parquet"
    status, printed, told = run("features", trace, "--texts", texts, "--encoder", minilm_like, "--out", out)
    assert (status, printed) == (1, "")
    assert told.startswith(f"leap-trace: {texts}: ")
    assert said in told
    assert told.count("\n") == 1
    assert not out.exists()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "the file is empty"),
        ('{"text": "a"}\n{"prompt": "b"}\n', "line 2: 'text' must be a text, and is missing"),
        ('{"text": "a"}\n{"text": 5}\n', "line 2: 'text' must be a text, and is 5"),
        ('{"text": "a"}\n{"text": \n', "line 2: not JSON"),
        ('{"words": "a"}\n', "has no column 'text' or 'prompt'; there are words"),
        ('text\na\n"b', "cannot be read"),
        ("PAR1 and no more", "cannot be read"),
    ],
)
def test_files_that_hold_no_texts(
    run: Run, trace: Path, minilm_like: Path, tmp_path: Path, content: str, said: str
) -> None:
    texts = tmp_path / "texts"
    texts.write_text(content)
    out = tmp_path / "out.parquet"
    status, _, told = run("features", trace, "--texts", texts, "--encoder", minilm_like, "--out", out)
    assert status == 1
    assert told.startswith(f"leap-trace: {texts}: ")
    assert said in told
    assert told.count("\n") == 1


def test_an_encoder_that_cannot_be_loaded_is_one_line(run: Run, trace: Path, minilm_like: Path, tmp_path: Path) -> None:
    texts = texts_file(tmp_path, ".csv", {"text": TEXTS[:2] * 2 + ["x"]})
    status, _, told = run(
        "features", trace, "--texts", texts, "--encoder", minilm_like, "--out", tmp_path / "o.parquet"
    )
    assert status == 1
    assert told.count("\n") == 1
    assert (
        "encoder: cannot be loaded" in told
        or 'is missing, which an encoder needs: pip install "leap-rs[encoder]"' in told
    )


def test_what_a_description_says_of_text_features(trace: Path, tmp_path: Path) -> None:
    assert any("text_features" in line for line in describe.describe(trace)["missing"]["leap-replay"])
    rows = np.zeros((5, 4), dtype=np.float16)
    frame = load(trace).frame.with_columns(pl.Series("text_features", rows, dtype=pl.Array(pl.Float16, 4)))
    write_trace(frame, tmp_path / "with.parquet", encoder="some-encoder", encoder_layer=4)
    found = describe.describe(tmp_path / "with.parquet")
    assert not any("text_features" in line for line in found["missing"]["leap-replay"])
    assert not any("nothing to fit" in line for line in found["missing"]["leap-fit"])
