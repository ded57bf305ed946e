"""`leap-record` on the real engine: killed and resumed, held against transformers, and on into the other commands."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from commands import Run, runner, strict_json

from leap_rs import read_trace
from leap_rs.fit.command import main as fit
from leap_rs.replay.command import main as replay
from leap_rs.trace import load

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(3000)]

LAYER, SAVE_EVERY, MAX_TOKENS, MAX_MODEL_LEN = 20, 4, 32, 256
# Not all that may start together fit into a step.
ENGINE = '{"enforce-eager": true, "max_num_batched_tokens": 256}'
NOUNS = ("river", "lamp", "harbour", "engine", "garden", "letter", "copper", "window")
TEXTS = [
    f"{('Name', 'Describe in one sentence', 'Say yes or no: do you like')[i % 3]} "
    f"{' and '.join(NOUNS[(i + j) % 8] for j in range(i % 5 + 1))}{'?' if i % 3 == 2 else '.'}"
    for i in range(24)
]
TOO_LONG = "river " * MAX_MODEL_LEN


@dataclass
class Recorded:
    killed_after: int
    """Answers that lay in parts when the process was killed."""
    refused: subprocess.CompletedProcess[str]
    """What was said to other options in between."""
    resumed: dict[str, Any]
    told: str
    parts_left: bool
    path: Path
    whole: Path
    """The same without an interruption."""


@pytest.fixture(scope="module")
def recorded(
    smollm: Path, minilm: Path, environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Recorded:
    directory = tmp_path_factory.mktemp("record")
    prompts, out, parts = directory / "prompts.jsonl", directory / "trace.parquet", directory / "trace.parquet.parts"
    prompts.write_text(
        "".join(json.dumps({"id": i, "prompt": text}) + "\n" for i, text in enumerate([TOO_LONG, *TEXTS]))
    )

    def words(to: Path, seed: int = 0) -> list[str]:
        return [
            str(smollm), str(prompts),
            "--out", str(to), "--max-tokens", str(MAX_TOKENS), "--max-model-len", str(MAX_MODEL_LEN), "--layer", str(LAYER),
            "--dtype", "float32", "--max-num-seqs", "8", "--engine-args", ENGINE,
            "--encoder", str(minilm), "--save-every", str(SAVE_EVERY), "--seed", str(seed), "--json",
        ]  # fmt: skip

    def command(to: Path, seed: int = 0) -> list[str]:
        return [sys.executable, "-c", "from leap_rs.record.command import main; main()", *words(to, seed)]

    def finished(*commands: list[str]) -> subprocess.CompletedProcess[str]:
        """Commands in one process, since most of their time goes into starting Python with vLLM."""
        code = "import json, sys; from leap_rs.record.command import app\n"
        code += "for words in json.loads(sys.argv[1]):\n    if status := app(args=words, standalone_mode=False): sys.exit(status)"
        words = [sys.executable, "-c", code, json.dumps(commands)]
        return subprocess.run(words, env=environment, capture_output=True, text=True, check=False)

    with (directory / "log").open("w") as log:
        killed = subprocess.Popen(command(out), env=environment, stdout=log, stderr=log)
        while killed.poll() is None and not list(parts.glob("*/part-*.parquet")):
            time.sleep(0.02)
        killed.send_signal(signal.SIGKILL)
        killed.wait()
    assert not out.exists(), (directory / "log").read_text()[-4000:]
    there = read_trace(parts).height
    refused = subprocess.run(command(out, seed=1), env=environment, capture_output=True, text=True, check=False)
    both = finished(words(out), words(directory / "whole.parquet"))
    assert both.returncode == 0, both.stderr[-4000:]
    resumed, _ = both.stdout.splitlines()
    return Recorded(there, refused, strict_json(resumed), both.stderr, parts.exists(), out, directory / "whole.parquet")


def test_other_options_are_refused_with_the_difference(recorded: Recorded) -> None:
    assert recorded.refused.returncode == 1
    (line,) = recorded.refused.stderr.splitlines()
    assert "trace.parquet.parts: was begun with seed 0, not 1" in line


def test_a_recording_goes_on_where_it_was_killed(recorded: Recorded) -> None:
    result = recorded.resumed
    assert SAVE_EVERY <= recorded.killed_after == result["already"] < len(TEXTS)
    assert f"{recorded.killed_after} of 25 prompts are answered already" in recorded.told
    assert (result["prompts"], result["requests"], result["too_long"]) == (25, 24, 1)
    assert (result["empty"], result["unrecorded"]) == (0, 0)
    assert not recorded.parts_left
    frame = load(recorded.path).frame
    assert frame["request_id"].to_list() == [str(row) for row in range(1, 25)]
    assert result["output_tokens"] == frame["output_tokens"].sum()
    assert set(frame["max_tokens"]) == {MAX_TOKENS}
    assert (frame.filter(pl.col("finish_reason") == "length")["output_tokens"] == MAX_TOKENS).all()
    assert (frame.filter(pl.col("finish_reason") == "stop")["output_tokens"] <= MAX_TOKENS).all()
    assert set(frame["temperature"]) == {1.0}


def test_the_answers_are_those_of_a_recording_without_an_interruption(recorded: Recorded) -> None:
    ours, whole = load(recorded.path).frame, load(recorded.whole).frame
    assert ours["request_id"].equals(whole["request_id"])
    # In another batch a sum may round otherwise, and one token in many thousands with it.
    assert (ours["output_tokens"] == whole["output_tokens"]).sum() >= 23
    assert load(recorded.path).metadata == load(recorded.whole).metadata
    np.testing.assert_allclose(ours["features"].to_numpy(), whole["features"].to_numpy(), rtol=1e-2, atol=1e-2)
    np.testing.assert_array_equal(ours["prompt_features"].to_numpy(), whole["prompt_features"].to_numpy())


def test_features_are_transformers_own(
    recorded: Recorded,
    smollm: Path,
    tokenised: Callable[..., list[list[int]]],
    reference: Callable[..., dict[str, Any]],
) -> None:
    frame = load(recorded.path).frame
    tokens = tokenised(smollm, TEXTS)
    assert frame["prompt_tokens"].to_list() == [len(prompt) for prompt in tokens]
    states = reference(smollm, tokens)
    for i, row in enumerate(frame["features"].to_numpy().astype(np.float64)):
        hidden = states[f"hidden_{i}"].astype(np.float64)
        likeness = [row @ layer[-1] / np.linalg.norm(row) / np.linalg.norm(layer[-1]) for layer in hidden]
        assert likeness[LAYER] > 0.999
        assert likeness[LAYER - 1] < 0.999 > likeness[LAYER + 1]
    metadata = load(recorded.path).metadata
    assert metadata["layer"] == str(LAYER)
    assert (metadata["encoder"], metadata["encoder_layer"]) == ("model", "4")
    assert metadata["sampling"] == f"temperature 1.0, top_p 1.0, max_tokens {MAX_TOKENS}, seed 0, chat template"


def test_text_features_are_transformers_own(recorded: Recorded, minilm: Path, text_states: Callable[..., Any]) -> None:
    """The mean over the tokens after 4 of 6 layers, of the user's words alone."""
    rows = load(recorded.path).frame["text_features"].to_numpy().astype(np.float64)
    for row, expected in zip(rows, text_states(minilm, TEXTS, 4), strict=True):
        likeness = expected @ row / np.linalg.norm(expected, axis=-1) / np.linalg.norm(row)
        assert likeness > 0.9999


@pytest.fixture
def leap_fit(capsys: pytest.CaptureFixture[str]) -> Run:
    return runner(fit, capsys)


@pytest.fixture
def leap_replay(capsys: pytest.CaptureFixture[str]) -> Run:
    return runner(replay, capsys)


def test_it_goes_straight_into_the_other_commands(
    recorded: Recorded, leap_fit: Run, leap_replay: Run, tmp_path: Path
) -> None:
    status, out, err = leap_fit(recorded.path, "--out", tmp_path / "readout.safetensors", "--folds", 2, "--json")
    assert status == 0, err
    fitted = {one["kind"]: one for one in strict_json(out)["readouts"]}
    assert {kind: (one["rows"], one["d"]) for kind, one in fitted.items()} == {
        "state": (24, 576),
        "prompt": (24, 256 + 3),
        "text": (24, 384 + 256 + 3),
    }
    readout = tmp_path / "readout.safetensors"
    status, out, err = leap_replay(recorded.path, "--request-rate", 20, "--readout", readout, "--seeds", 1, "--json")
    assert status == 0, err
    result = strict_json(out)
    assert "leap-frozen" in {one["policy"] for one in result["results"]}
    assert result["trace"]["requests"] == 24
    # A rate was given, so that there are none is nothing to tell; without one it is refused.
    assert not any("no arrival times" in note for note in result["notes"])
    status, _, err = leap_replay(recorded.path, "--readout", readout, "--seeds", 1)
    assert status == 1
    assert "no arrival times (metadata arrivals is none): --request-rate" in err
