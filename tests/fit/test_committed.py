"""The committed readouts are what their metadata say: ridge on the committed chat and instruct traces."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from fit_reference import Ridge, spearman

from leap_rs._leap import OnlineReadout, Readout
from leap_rs.trace import read_trace

FILES = {"features": "readout.safetensors", "prompt_features": "readout.prompt.safetensors"}
KINDS = {"features": "state", "prompt_features": "prompt"}


@pytest.mark.parametrize("column", FILES)
def test_committed_readout(column: str, traces: Path) -> None:
    readout = Readout.load(traces / FILES[column])
    meta = readout.meta
    assert (meta["kind"], meta["model"], meta["trained_on"]) == (
        KINDS[column],
        "SmolLM2-135M-Instruct",
        ["chat", "instruct"],
    )
    assert meta["layer"] == (20 if column == "features" else None)
    parts = [read_trace(traces / f"{name}.parquet") for name in ("chat", "instruct")]
    x = np.concatenate([part[column].to_numpy().astype(np.float64) for part in parts])
    lengths = np.concatenate([part["output_tokens"].to_numpy() for part in parts])
    reference = Ridge(x, lengths, readout.lam, 1024)
    unseen = read_trace(traces / "sharegpt.parquet")
    features = unseen[column].to_numpy().astype(np.float64)
    expected = reference.predict(features)
    np.testing.assert_allclose(readout.predict(features), expected, rtol=1e-3)
    # On prompts of another source the order is better than chance by far: the standard error is about 0.04.
    assert spearman(expected, unseen["output_tokens"].to_numpy()) > (0.3 if column == "features" else 0.12)


@pytest.mark.parametrize("column", FILES)
def test_committed_anchor(column: str, traces: Path) -> None:
    """Learning starts from the training data itself, not from a penalty alone."""
    online = OnlineReadout(Readout.load(traces / FILES[column]), batch=8)
    assert online.anchored
    parts = [read_trace(traces / f"{name}.parquet") for name in ("chat", "instruct", "math")]
    x = [part[column].to_numpy().astype(np.float64) for part in parts]
    lengths = [part["output_tokens"].to_numpy() for part in parts]
    reference = Ridge(np.concatenate(x[:2]), np.concatenate(lengths[:2]), online.readout().lam, 1024)
    online.observe(x[2], lengths[2])
    online.flush()
    reference.learn(x[2], lengths[2])
    np.testing.assert_allclose(online.predict(x[2]), reference.predict(x[2]), rtol=5e-3)


def test_committed_files_are_small(traces: Path) -> None:
    sizes = [path.stat().st_size for path in traces.glob("*.safetensors")]
    assert len(sizes) == 4
    assert sum(sizes) < 4e6
