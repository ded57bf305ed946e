"""Small traces that the tests of `leap-fit` share."""

from __future__ import annotations

from pathlib import Path

import pytest
from fit_command import narrow


@pytest.fixture
def small(tmp_path: Path, traces: Path) -> Path:
    for name in ("instruct", "math", "code"):
        narrow(traces / f"{name}.parquet", tmp_path / f"{name}.parquet", ("features",))
    return tmp_path
