"""Readouts that do not fit, a row that is no row, and a full disk, on a server that goes on and says so."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from server_prompts import ANSWER, QUESTIONS, check_every_metric
from vllm_server import Server, at, served, together

from leap_rs import Readout

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]

# Rows from which a readout that starts from zero takes mean and scale, before it learns.
WARM = 256


def _namespace() -> list[str]:
    return ["unshare", "--mount", *([] if os.geteuid() == 0 else ["--user", "--map-root-user"])]


def _can_mount(directory: Path) -> bool:
    try:
        done = subprocess.run(
            [*_namespace(), "mount", "-t", "tmpfs", "leap-test", str(directory)], capture_output=True, check=False
        )
    except FileNotFoundError:
        return False
    return done.returncode == 0


def _write_readout(path: Path, width: int, **meta: object) -> None:
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(80, width)).astype(np.float32)
    Readout.fit(rows, rng.integers(1, 400, 80), max_tokens=512, meta=meta).save(path)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("faults")


@pytest.fixture(scope="module")
def disk(directory: Path) -> Path:
    """Where a small file system is mounted for the server, if that can be done."""
    disk = directory / "disk"
    disk.mkdir()
    return disk


@pytest.fixture(scope="module")
def full(disk: Path) -> bool:
    return _can_mount(disk)


@pytest.fixture(scope="module")
def server(
    environment: dict[str, str],
    smollm: Path,
    directory: Path,
    disk: Path,
    full: bool,
) -> Iterator[Server]:
    _write_readout(directory / "readout.safetensors", 32, kind="state", model="SmolLM2-135M-Instruct")
    _write_readout(directory / "readout.prompt.safetensors", 259, kind="prompt", model="owner/Another-7B")
    info = directory / "leap_faults.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: leap-faults\nVersion: 0\n")
    (info / "entry_points.txt").write_text("[vllm.general_plugins]\nleap_faults = server_faults:register\n")
    variables = {**environment, "PYTHONPATH": os.pathsep.join([environment["PYTHONPATH"], str(directory)])}
    fill = (
        f'mount -t tmpfs -o size=8m leap-test "{disk}" && ! cat /dev/zero > "{disk}/ballast" 2>/dev/null && exec "$@"'
    )
    within = [*_namespace(), "sh", "-c", fill, "sh"] if full else []
    leap = {
        "mode": "armed",
        "decode_slots": 3,
        "readout": str(directory / "readout.safetensors"),
        "rls": {"batch": 4},
        "state_dir": str(disk / "state"),
        "state_every": 1,
    }
    with served(variables, smollm, directory, leap, within=within) as running:
        yield running


def warned(server: Server, *parts: str) -> int:
    """How many warnings hold all the parts."""
    return sum("WARNING" in line and all(part in line for part in parts) for line in server.log.splitlines())


def ask(server: Server, name: str) -> list[str]:
    return together([partial(server.text, q, ANSWER, f"{name}-{i}") for i, q in enumerate(QUESTIONS)])


def test_readouts_that_do_not_fit(server: Server, directory: Path, expected: list[str]) -> None:
    """The server starts, says of each what is wrong and what it does instead, and answers."""
    state, prompt = directory / "readout.safetensors", directory / "readout.prompt.safetensors"
    assert warned(server, f"{state}: reads 32 features, the model gives 576; the state readout learns from zero") == 1
    wrong = (
        f"{prompt}: is for model owner/Another-7B, not for SmolLM2-135M-Instruct; the prompt readout learns from zero"
    )
    assert warned(server, wrong) == 1
    assert ask(server, "plain") == expected
    samples = server.wait("leap:output_tokens_count", len(QUESTIONS))
    check_every_metric(samples)
    for readout in ("prompt", "state"):
        assert at(samples, "leap:updates_total", readout=readout) == 0
        assert at(samples, "leap:predictions_total", readout=readout) == 0


def test_rows_that_are_no_numbers(server: Server, expected: list[str]) -> None:
    before = server.metrics()
    assert ask(server, "spoil") == expected
    done = at(before, "leap:output_tokens_count") + len(QUESTIONS)
    samples = server.wait("leap:output_tokens_count", done)
    check_every_metric(samples)
    assert at(samples, "leap:refused_rows_total", readout="state") == len(QUESTIONS)
    assert at(samples, "leap:refused_rows_total", readout="prompt") == 0
    assert warned(server, "a row of state features is not used") == 1


def test_a_full_disk(server: Server, disk: Path, full: bool, expected: list[str]) -> None:
    """Once the readouts have learned there is something to save, and no place for it; then there is."""
    if not full:
        pytest.skip("no file system can be mounted here")
    texts = [f"Item {i}" for i in range(WARM)]
    server.post("/v1/completions", {"prompt": texts, "max_tokens": 2})
    samples = server.until(lambda s: at(s, "leap:state_saves_total", outcome="failed") > 0, "a save fails")
    assert ask(server, "full") == expected
    check_every_metric(samples)
    assert at(samples, "leap:state_saves_total", outcome="saved") == 0
    assert warned(server, "the state is not saved, and the server goes on", "No space left on device") == 1
    learned = at(samples, "leap:updates_total", readout="state")
    assert learned > 0
    (Path(f"/proc/{server.process.pid}/root{disk}") / "ballast").unlink()
    assert ask(server, "free") == expected
    samples = server.until(lambda s: at(s, "leap:state_saves_total", outcome="saved") > 0, "a save succeeds")
    assert at(samples, "leap:updates_total", readout="state") > learned
    assert server.log.count("leap: the state is saved again") == 1
    # Told once while it lasted, however often it was tried.
    assert warned(server, "the state is not saved, and the server goes on") == 1
