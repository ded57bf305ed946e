"""The brain with a real text encoder, without an engine: more prompts at once than can be read, and one longer than any context."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from leap_rs._leap import PromptFeatures
from leap_rs.encoder.client import BATCH, ENCODER_BACKLOG, ClientSettings
from leap_rs.encoder.source import inspect
from leap_rs.vllm.online import OnlineBrain
from leap_rs.vllm.reading import Reading
from leap_rs.vllm.readouts import LearnSettings
from leap_rs.vllm.settings import BrainSettings

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]

FIRST = 1000
"""Tokens from here on are words."""
BURST = 10_000


@pytest.fixture(scope="module")
def brain(smollm: Path, minilm: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OnlineBrain]:
    directory = tmp_path_factory.mktemp("brain")
    settings = BrainSettings(
        model="m", max_tokens=1024, mode="armed", learn=LearnSettings(warmup=2), metrics_dir=directory / "metrics"
    )
    made = OnlineBrain(settings, None, Reading(ClientSettings(inspect(minilm), tokenizer=str(smollm))))
    yield made
    made.close()


def wait_for(brain: OnlineBrain, reached: Callable[[], bool]) -> None:
    until = time.monotonic() + 300
    while not reached() and time.monotonic() < until:
        brain.settle()
        time.sleep(0.05)
    assert reached()


def count(brain: OnlineBrain, outcome: str) -> int:
    return int(brain.metrics.get("encoder_prompts", outcome))


def test_a_prompt_of_100_000_tokens_is_read(brain: OnlineBrain) -> None:
    tokens = [FIRST + i % 5000 for i in range(100_000)]
    brain.arrived("long", tokens, 1024, 0, False)
    wait_for(brain, lambda: "text" in brain._live["long"].known)
    row = brain._live["long"].known["text"].row
    assert row[-3:] == pytest.approx(PromptFeatures.length_features(100_000))
    assert len(row) == 384 + 3
    brain.finished("long", "abort", 0)


def test_of_10_000_at_once_the_newest_are_read_and_none_is_lost_sight_of(brain: OnlineBrain) -> None:
    names = [f"r{i}" for i in range(BURST)]
    read, skipped = count(brain, "read"), count(brain, "skipped")
    # It stands still meanwhile, so that it does not hang on the machine how many it reads.
    process = brain._reading._client._process.pid  # type: ignore[union-attr]
    os.kill(process, signal.SIGSTOP)
    for i, name in enumerate(names):
        brain.arrived(name, [FIRST + i % 3000, FIRST + i // 3000, FIRST], 1024, 0, False)
    os.kill(process, signal.SIGCONT)
    wait_for(brain, lambda: count(brain, "read") + count(brain, "skipped") - read - skipped == BURST)
    wait_for(brain, lambda: brain.metrics.get("encoder_backlog") == 0)
    known = [name for name in names if "text" in brain._live[name].known]
    assert len(known) == count(brain, "read") - read
    assert set(names[-ENCODER_BACKLOG:]) <= set(known)
    assert ENCODER_BACKLOG <= len(known) <= ENCODER_BACKLOG + BATCH
    # What has been read before is known at once, and not read again.
    before = count(brain, "read")
    for name in known[-5:]:
        i = int(name[1:])
        brain.arrived(f"again {name}", [FIRST + i % 3000, FIRST + i // 3000, FIRST], 1024, 0, False)
    wait_for(brain, lambda: all("text" in brain._live[f"again {name}"].known for name in known[-5:]))
    assert (count(brain, "read"), count(brain, "seen_before")) == (before, 5)
    for name in names:
        brain.finished(name, "abort", 0)
    brain.settle()
    assert brain.fault is None
