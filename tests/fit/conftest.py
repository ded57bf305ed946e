"""Small traces that the tests of `leap-fit` share."""

from __future__ import annotations

from pathlib import Path

import pytest
from fit_command import ROWS, narrow

from leap_rs.trace import write_trace


@pytest.fixture
def small(tmp_path: Path, traces: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the traces that `ROWS` names, which have no request in common."""
    whole = tmp_path_factory.mktemp("whole") / "whole.parquet"
    frame = narrow(traces / "smollm2-sharegpt.parquet", whole, ("features",))
    for name, rows in ROWS.items():
        write_trace(frame.head(rows), tmp_path / f"{name}.parquet", model="m", layer=20)
        frame = frame.slice(rows)
    return tmp_path
