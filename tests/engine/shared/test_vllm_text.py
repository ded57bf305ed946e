"""The text encoder beside the real engine: what it reads, and that its end, in whatever way, changes no answer."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_requests import LAYER, SEQUENCES, Request
from shared_engines import Configuration, Engines, Run
from vllm_engine import Engine

from leap_rs import Readout

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1800)]

WIDTH = 384


@pytest.fixture(scope="module")
def readout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a text readout is that predicts from the first request on, whatever it predicts."""
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(900, WIDTH + 259)).astype(np.float32)
    meta = {"kind": "text", "encoder": "model", "encoder_layer": 4}
    path = tmp_path_factory.mktemp("readouts") / "x.safetensors"
    Readout.fit(rows, rng.integers(1, 30, 900), max_tokens=512, lam=1.0, meta=meta).save(
        path.with_name("x.text.safetensors")
    )
    return path


def encoders(engine: Engine) -> list[int]:
    """Processes of text encoders that the engine's process has started."""
    found = []
    for place in Path("/proc").iterdir():
        if place.name.isdigit():
            try:
                parent = int((place / "stat").read_text().rsplit(")", 1)[1].split()[1])
                words = (place / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if parent == engine._process.pid and b"leap_rs.encoder.process" in words:
                found.append(int(place.name))
    return found


def finish(engine: Engine, part: dict[str, Any]) -> list[dict[str, Any]]:
    """All that ended, those of a first part among them."""
    done: list[dict[str, Any]] = part["finished"]
    while True:
        part = engine.steps(8)
        done += part["finished"]
        if part["done"]:
            return sorted(done, key=lambda request: request["number"])


@dataclass(frozen=True)
class Read:
    """What came of the requests of a setting, all at once: all read, then some, then none."""

    first: dict[str, float]
    """Numbers once all have been read."""
    whole: list[dict[str, Any]]
    processes: list[int]
    after_kill: dict[str, float]
    killed: list[dict[str, Any]]
    left: list[int]
    log: str
    without: list[dict[str, Any]]
    numbers_without: dict[str, float]
    log_without: str


@pytest.fixture(scope="module")
def read(
    engines: Engines,
    configurations: dict[str, Configuration],
    asked: Callable[[str, str], list[Request]],
    minilm: Path,
    readout: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Read:
    requests = asked("eager", "default")
    leap = {"mode": "armed", "encoder": str(minilm), "readout": str(readout), "layer": LAYER}
    engine = engines.scheduled(configurations["eager"], "leap", leap, max_num_seqs=SEQUENCES)
    began = len(engine.log)
    engine.begin(requests)
    begun = engine.steps(1)
    # The engine stands still meanwhile: it starts faster than its encoder.
    natural = sum("ignore_eos" not in request["sampling"] for request in requests)
    first = engine.wait_for(lambda now: now["encoder_prompts/read"] + now["encoder_prompts/seen_before"] == natural)
    first = engine.wait_for(lambda now: now["predictions/text"] == natural)
    whole = finish(engine, begun)
    processes = encoders(engine)
    engine.begin(requests)
    begun = engine.steps(3)
    for pid in processes:
        os.kill(pid, signal.SIGKILL)
    after_kill = engine.wait_for(lambda now: now["encoder_up"] == 0)
    killed = finish(engine, begun)
    left, log = encoders(engine), engine.log[began:]
    # A directory, and no model.
    began = len(engine.log)
    leap["encoder"] = str(tmp_path_factory.mktemp("nothing"))
    engine = engines.scheduled(configurations["eager"], "leap", leap, max_num_seqs=SEQUENCES)
    without = engine.run(requests)
    return Read(first, whole, processes, after_kill, killed, left, log, without, engine.metrics(), engine.log[began:])


def test_every_prompt_whose_length_is_open_is_read(read: Read) -> None:
    """There are 12, each once with a length of its own choice and once with a settled one."""
    assert read.first["encoder_prompts/read"] == 12
    assert read.first["encoder_prompts/skipped"] == 0
    assert read.first["encoder_up"] == 1
    assert read.first["encoder_seconds"] > 0
    assert read.first["refused_rows/text"] == 0
    assert len(read.processes) == 1


def test_answers_are_those_of_stock(read: Read, stock: Callable[[str], dict[str, Run]]) -> None:
    expected = stock("eager")["default"].answers
    for done in (read.whole, read.killed, read.without):
        assert [(request["token_ids"], request["reason"]) for request in done] == expected


def test_killed_it_is_told_once_and_missed_by_nobody(read: Read) -> None:
    assert read.left == []
    assert read.after_kill["mode/armed"] == 1
    told = [line for line in read.log.splitlines() if "WARNING" in line and "encoder" in line]
    (line,) = told
    assert "the text encoder model reads no prompts: its process was ended by SIGKILL" in line


def test_a_directory_that_is_no_model_is_told_once(read: Read) -> None:
    told = [line for line in read.log_without.splitlines() if "WARNING" in line and "encoder" in line]
    (line,) = told
    assert "no text readout: encoder:" in line
    assert "is a directory without a config.json, not a model" in line
    assert read.numbers_without["encoder_up"] == 0
    assert read.numbers_without["predictions/text"] == 0
