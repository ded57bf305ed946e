"""Engines of the real vLLM and models for them. Everything that loads PyTorch runs in a process of its own."""

from __future__ import annotations

import fcntl
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from server_prompts import QUESTIONS
from traffic import Brains, Traffic, real_traffic

HERE = Path(__file__).parent
REPOSITORY = HERE.parent.parent
CACHE = REPOSITORY / ".cache" / "vllm-tests"
# Importing vLLM, as some tests do in this process, sets variables that other processes must not get.
ENVIRONMENT = dict(os.environ)
DEFAULTS = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 512,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "enable_chunked_prefill": True,
    "block_size": 32,
    "seed": 0,
}


def has_vllm() -> bool:
    # This directory's own name makes an empty package of that name for Python.
    found = importlib.util.find_spec("vllm")
    return found is not None and found.origin is not None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("vllm") and not has_vllm():
            item.add_marker(pytest.mark.skip(reason="vLLM is not installed"))


@dataclass(frozen=True)
class Run:
    """What an engine gave: an entry of `results` a prompt, and entries of `rows` for each captured prompt; or an error.

    `seen` is what its scheduler did.
    """

    results: list[dict[str, Any]]
    rows: dict[tuple[int, ...], list[dict[str, Any]]]
    asynchronous: bool
    error: str
    seen: dict[str, Any]
    log: str


@contextmanager
def engine_lock() -> Iterator[None]:
    """Holds other engines of this machine off, where several test runs share it."""
    with Path(os.environ.get("LEAP_ENGINE_LOCK", tempfile.gettempdir() + "/leap-engine.lock")).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@pytest.fixture(scope="session")
def lock() -> Callable[[], AbstractContextManager[None]]:
    """`engine_lock`, for tests that start engines by themselves."""
    return engine_lock


@pytest.fixture(scope="session")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Environment of a process with vLLM and the plugin in it."""
    paths = [str(REPOSITORY / "python"), str(HERE)]
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


def _python(environment: dict[str, str], *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=2700,
        check=False,
    )


@pytest.fixture(scope="session")
def model(environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The directory of a model: `real`, which is kept in the checkout's cache, or a small random one of a family."""

    def make(name: str) -> Path:
        kind = "real" if name == "real" else "small"
        made = CACHE / kind if kind == "real" else tmp_path_factory.getbasetemp() / kind
        if not made.exists():
            made.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=made.parent) as temporary:
                process = _python(environment, HERE / "vllm_models.py", kind, Path(temporary) / "model")
                assert process.returncode == 0, process.stderr
                (Path(temporary) / "model").rename(made)
        return made if kind == "real" else made / name

    return make


@pytest.fixture(scope="session")
def tokenised(environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[list[int]]]:
    """Tokens of user messages in a model's chat template."""

    def tokens(path: Path, texts: Sequence[str]) -> list[list[int]]:
        out = _computed(environment, tmp_path_factory.mktemp("tokens"), "tokens", path, list(texts), "json")
        made: list[list[int]] = json.loads(out.read_text())
        return made

    return tokens


@pytest.fixture(scope="session")
def answers(environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[str]]:
    """transformers' greedy answers of 24 tokens to user messages."""
    known: dict[tuple[str, ...], list[str]] = {}

    def made(path: Path, texts: Sequence[str]) -> list[str]:
        if tuple(texts) not in known:
            out = _computed(environment, tmp_path_factory.mktemp("answers"), "answers", path, list(texts), "json")
            known[tuple(texts)] = json.loads(out.read_text())
        return known[tuple(texts)]

    return made


@pytest.fixture(scope="session")
def expected(answers: Callable[..., list[str]], model: Callable[[str], Path]) -> list[str]:
    """transformers' answers to the questions that servers are asked."""
    return answers(model("real"), QUESTIONS)


@pytest.fixture(scope="session")
def reference(environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, Any]]:
    """transformers' hidden states of prompts and the embedding table."""

    def states(path: Path, prompts: Sequence[Sequence[int]]) -> dict[str, np.ndarray]:
        values = [list(prompt) for prompt in prompts]
        return dict(np.load(_computed(environment, tmp_path_factory.mktemp("states"), "states", path, values, "npz")))

    return states


def _computed(environment: dict[str, str], directory: Path, what: str, model: Path, values: Any, kind: str) -> Path:
    given, out = directory / "in.json", directory / f"out.{kind}"
    given.write_text(json.dumps(values))
    made = _python(environment, HERE / "vllm_models.py", what, model, given, out)
    assert made.returncode == 0, made.stderr
    return out


@pytest.fixture(scope="session")
def engines(environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, Run]]:
    """Runs engines of vLLM and returns what came out of each: those of a part one after the other in one process, the parts
    beside each other.

    An engine is a mapping: `batches` of prompts, `asynchronous`, `stock` (vLLM's own scheduler), `armed` (the plugin's; else
    one that writes rows down), `leap` (options of the plugin), `whole` (the compiled model is kept whole, as is vLLM's
    default: on CPUs it then fails to load what it has kept), and whatever else vLLM's `LLM` takes. Most of the time goes
    into starting Python with vLLM.
    """

    def part(path: Path, engines: dict[str, dict[str, Any]], processes: bool) -> dict[str, Run]:
        out = tmp_path_factory.mktemp("engines")
        entries = []
        for number, engine in enumerate(engines.values()):
            given = dict(engine)
            batches, asynchronous = given.pop("batches"), given.pop("asynchronous", False)
            variables = {"VLLM_USE_AOT_COMPILE": "1" if given.pop("whole", False) else "0"}
            options = {**DEFAULTS, "model": str(path), "additional_config": {"leap": given.pop("leap", {})}}
            if given.pop("armed", False):
                options["scheduler_cls"] = "leap_rs.vllm.LeapScheduler"
            elif not given.pop("stock", False):
                options["scheduler_cls"] = "vllm_scheduler.RowScheduler"
            (out / str(number)).mkdir()
            entry = {"batches": batches, "asynchronous": asynchronous, "environment": variables}
            entries.append({"engine": {**options, **given}, **entry})
        (out / "engines.json").write_text(json.dumps(entries))
        variables = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1" if processes else "0"}
        made = _python({**environment, **variables}, HERE / "vllm_run.py", out / "engines.json", out)
        log = made.stdout + made.stderr
        assert made.returncode == 0, log[-6000:]
        return {name: _run(out / str(number), log) for number, name in enumerate(engines)}

    def run(path: Path, *parts: dict[str, dict[str, Any]], processes: bool = False) -> dict[str, Run]:
        with engine_lock(), ThreadPoolExecutor(len(parts)) as threads:
            made = list(threads.map(lambda engines: part(path, engines, processes), parts))
        return {name: run for runs in made for name, run in runs.items()}

    return run


def _run(out: Path, log: str) -> Run:
    rows: dict[tuple[int, ...], list[dict[str, Any]]] = {}
    for file in sorted(out.glob("row*.npz")):
        entry = dict(np.load(file))
        rows.setdefault(tuple(entry["prompt"].tolist()), []).append(entry)
    result = json.loads((out / "result.json").read_text())
    return Run(result["results"], rows, (out / "_AsyncRows.scheduler").exists(), result["error"], result["seen"], log)


@pytest.fixture(scope="session")
def real(traces: Path) -> Traffic:
    """Real requests, by numbers."""
    return real_traffic(traces)


@pytest.fixture
def brains(tmp_path: Path) -> Iterator[Brains]:
    """Makes brains, which are closed after the test."""
    made = Brains(tmp_path / "metrics")
    yield made
    for brain in made.made:
        brain.close()
