"""The committed readouts are what their metadata say: ridge on the committed trace that they name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl
import pytest
from fit_reference import Ridge, spearman

from leap_rs._leap import OnlineReadout, Readout
from leap_rs.trace import read_trace

FILES = {"state": "readout.safetensors", "prompt": "readout.prompt.safetensors", "text": "readout.text.safetensors"}
COLUMNS = {
    "state": ("features",),
    "prompt": ("prompt_features",),
    "text": ("text_features", "prompt_features"),
}
OF = {
    "state": {"model": "SmolLM2-135M-Instruct", "layer": 20},
    "prompt": {"model": "SmolLM2-135M-Instruct", "layer": None},
    "text": {"model": "SmolLM2-135M-Instruct", "layer": None, "encoder": "all-MiniLM-L6-v2", "encoder_layer": "4"},
}
TRAINED_ON = "llama-2-70b-flask"


def joined(frame: pl.DataFrame, kind: str) -> npt.NDArray[Any]:
    """The rows that a readout of a kind reads."""
    return np.concatenate([frame[column].to_numpy().astype(np.float64) for column in COLUMNS[kind]], axis=1)


@pytest.mark.parametrize("kind", FILES)
def test_committed_readout(kind: str, traces: Path) -> None:
    readout = Readout.load(traces / FILES[kind])
    assert (readout.meta["kind"], readout.meta["trained_on"]) == (kind, [TRAINED_ON])
    assert {key: readout.meta[key] for key in OF[kind]} == OF[kind]
    frame = read_trace(traces / f"{TRAINED_ON}.parquet")
    lengths = frame["output_tokens"].to_numpy()
    # No answer says what it was allowed, so the longest is the budget.
    assert readout.max_tokens == lengths.max()
    reference = Ridge(joined(frame, kind), lengths, readout.lam, readout.max_tokens)
    unseen = read_trace(traces / "llama-3-8b-alpacaeval.parquet")
    features = joined(unseen, kind)
    expected = reference.predict(features)
    np.testing.assert_allclose(readout.predict(features), expected, rtol=1e-3)
    # Another model on prompts of another source: still better than chance by far, whose standard error is about 0.035.
    assert spearman(expected, unseen["output_tokens"].to_numpy()) > {"state": 0.5, "text": 0.3, "prompt": 0.105}[kind]


@pytest.mark.parametrize("kind", FILES)
def test_committed_anchor(kind: str, traces: Path) -> None:
    """Learning starts from the training data itself, not from a penalty alone."""
    online = OnlineReadout(Readout.load(traces / FILES[kind]), batch=8)
    assert online.anchored
    readout = online.readout()
    trained, new = (read_trace(traces / f"{name}.parquet") for name in (TRAINED_ON, "vicuna-33b-flask"))
    x, lengths = joined(new.head(200), kind), new["output_tokens"].head(200).to_numpy()
    reference = Ridge(joined(trained, kind), trained["output_tokens"].to_numpy(), readout.lam, readout.max_tokens)
    online.observe(x, lengths)
    online.flush()
    reference.learn(x, lengths)
    np.testing.assert_allclose(online.predict(x), reference.predict(x), rtol=5e-3)


def test_committed_files_are_small(traces: Path) -> None:
    assert len(list(traces.glob("*.safetensors"))) == 2 * len(FILES)
    assert sum(path.stat().st_size for path in traces.iterdir()) < 25e6
