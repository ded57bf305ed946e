"""What cannot be used, what stands still and what breaks: the brain says so, waits for nobody and goes on."""

import logging
import math
import threading
from collections import deque
from pathlib import Path

import numpy as np
import pytest
from fake_encoder import FakeEncoder
from stand_ins import Clock, StandIn, options_of
from traffic import Brains, Traffic, stream

from leap_rs._leap import Learner, OnlineReadout, PromptFeatures
from leap_rs.vllm.online import LONG, OnlineBrain
from leap_rs.vllm.order import Ranker
from leap_rs.vllm.readouts import LearnSettings
from leap_rs.vllm.recorder import Recorder
from leap_rs.vllm.settings import BrainSettings


def test_rows_that_cannot_be_used_are_refused_counted_and_told_once(
    real: Traffic, brains: Brains, caplog: pytest.LogCaptureFixture
) -> None:
    brain = brains(real, mode="armed", learn=LearnSettings(warmup=16))
    stream(brain, real.head(64))
    caplog.clear()
    updates = brain.metrics.get("updates", "state")
    bad = [np.full(576, np.nan), np.full(575, 1.0), np.full(576, np.inf)]
    for i, row in enumerate(bad):
        brain.arrived(f"bad{i}", [100 + i], 1024, 0, False)
        by_prompt = brain.remaining_key(f"bad{i}", 0)
        brain.state(f"bad{i}", row.astype(np.float32))
        assert brain.remaining_key(f"bad{i}", 0) == by_prompt
        brain.finished(f"bad{i}", "stop", 50)
    brain.settle()
    assert brain.metrics.get("refused_rows", "state") == 3
    assert brain.metrics.get("updates", "state") == updates
    assert brain.metrics.get("updates", "prompt") > updates
    told = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert len(told) == 1
    assert "NaN" in told[0] or "nan" in told[0]
    # Whoever comes next is served as ever.
    brain.arrived("good", [110], 1024, 0, False)
    brain.state("good", real.state[110])
    assert math.isfinite(brain.remaining_key("good", 0))


def test_a_token_that_the_table_lacks_is_told(brains: Brains, caplog: pytest.LogCaptureFixture) -> None:
    table = PromptFeatures(np.random.default_rng(0).normal(size=(50, 8)).astype(np.float32), dim=4)
    brain = OnlineBrain(BrainSettings("m", metrics_dir=brains.directory), table)
    brains.made.append(brain)
    brain.arrived("a", [1, 2, 49], 64, 0, False)
    brain.arrived("b", [1, 50], 64, 0, False)
    brain.arrived("c", [-1], 64, 0, False)
    brain.arrived("d", [], 64, 0, False)
    brain.settle()
    assert brain.metrics.get("refused_rows", "prompt") == 2
    assert math.isfinite(brain.remaining_key("b", 3))
    assert sum("prompt features" in r.getMessage() for r in caplog.records) == 1


def test_a_fault_of_the_brains_thread_disarms_and_shows_it(
    real: Traffic, brains: Brains, caplog: pytest.LogCaptureFixture
) -> None:
    brain = brains(real, mode="armed")
    stream(brain, real.head(4))
    assert brain.metrics.get("armed_readout", "state") == 1
    # Not a number of tokens: the label of a request that a later vLLM counts otherwise.
    brain.arrived("odd", [5], 60, 0, False)
    with caplog.at_level(logging.ERROR, "vllm.leap_rs"):
        brain.finished("odd", "stop", "many")  # type: ignore[arg-type]
        brain.settle()
    assert brain.fault is not None
    assert not brain.armed
    assert brain.metrics.get("armed_readout", "state") == brain.metrics.get("armed_readout", "prompt") == 0
    assert "nothing is learned" in caplog.text


def test_after_a_fault_nothing_is_kept_of_what_is_served_on(real: Traffic, brains: Brains) -> None:
    encoder = FakeEncoder(lambda _: np.ones(8))
    reading = encoder.reading(8)
    brain = brains(real, mode="armed", reading=reading)
    brain.arrived("early", [5], 60, 0, False)
    brain.arrived("odd", [5], 60, 0, False)
    brain.finished("odd", "stop", "many")  # type: ignore[arg-type]
    brain.settle()
    assert brain.fault is not None
    for i in range(100):
        brain.arrived(f"r{i}", [i] * (LONG + 1 if i % 2 else 1), 60, 0, False)
        brain.state(f"r{i}", real.state[i])
        brain.finished(f"r{i}", "stop", 5)
    brain.finished("early", "stop", 5)
    kept = (brain._live, brain._done, brain._long, brain._predicted, brain._fresh, reading._rows)
    assert [len(part) for part in kept] == [0] * len(kept)
    brain.close()
    assert encoder.closed


def test_the_scheduler_waits_for_nobody(real: Traffic, brains: Brains) -> None:
    """Every call comes back while the brain's own thread stands still and the learners' queues are full."""
    brain = brains(real, mode="armed", learn=LearnSettings(warmup=16))
    stream(brain, real.head(64))
    held, standing = threading.Event(), threading.Event()

    def stand(_: object) -> None:
        standing.set()
        held.wait()

    brain._learn, learn = (lambda *_: stand(None)), brain._learn  # type: ignore[method-assign, assignment]
    brain.arrived("a", [70], 1024, 0, False)
    brain.finished("a", "stop", 5)
    assert standing.wait(60)
    for i in range(100, 200):
        brain.arrived(f"r{i}", [i], 1024, 0, False)
        brain.state(f"r{i}", real.state[i])
        assert math.isfinite(brain.remaining_key(f"r{i}", 3))
        brain.finished(f"r{i}", "stop", 5)
    assert brain.armed
    labels = brain.metrics.get("labels", "exact")
    brain._learn = learn  # type: ignore[method-assign]
    held.set()
    brain.settle()
    assert brain.metrics.get("labels", "exact") == labels + 100


def test_a_full_queue_drops_the_label_and_goes_on() -> None:
    online = OnlineReadout.from_zero(4, max_tokens=64, warmup=2)
    learner = Learner(online, capacity=1)
    rows = np.random.default_rng(0).normal(size=(5000, 4)).astype(np.float32)
    taken = sum(learner.observe(row, [5]) for row in rows)
    learner.flush()
    assert taken + learner.dropped == 5000


def test_memory_stays_bounded_where_learning_stands_still(
    real: Traffic, brains: Brains, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("leap_rs.vllm.online.MOST_WAITING", 10)
    brain = brains(real)
    held = threading.Event()
    brain._turn, turn = (lambda *_: held.wait() and None), brain._turn  # type: ignore[method-assign, assignment, func-returns-value]
    for i in range(30):
        brain.arrived(f"r{i}", [i], 1024, 0, False)
        brain.state(f"r{i}", real.state[i])
        brain.finished(f"r{i}", "stop", 5)
    assert len(brain._done) == 10
    brain._turn = turn  # type: ignore[method-assign]
    held.set()
    brain.settle()
    assert brain.metrics.get("labels", "exact") == 30
    assert brain.metrics.get("dropped_labels", "state") == 20


def fail_to_learn(brain: OnlineBrain, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault of the brain's own thread, by the first request that ends."""

    def broken(*_: object) -> None:
        raise RuntimeError("out of luck")

    monkeypatch.setattr(brain, "_learn", broken)
    brain.arrived("a", [0], 64, 0, False)
    brain.finished("a", "stop", 5)
    brain.settle()


def test_a_fault_in_learning_disarms_and_serves_on(
    real: Traffic, brains: Brains, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    brain = brains(real, mode="armed")
    fail_to_learn(brain, monkeypatch)
    assert brain.fault == "RuntimeError: out of luck"
    assert not brain.armed
    assert "first come first served" in caplog.text
    brain.arrived("b", [1], 64, 0, False)
    assert math.isfinite(brain.remaining_key("b", 0))
    brain.finished("b", "stop", 5)


@pytest.mark.parametrize("late", [False, True], ids=["at once", "in the middle"])
def test_after_a_fault_nothing_is_kept_of_any_request(
    real: Traffic, brains: Brains, tmp_path: Path, late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    brain = brains(real, mode="armed", learn=LearnSettings(warmup=16))
    recorder = Recorder(tmp_path / "record", 0, {})
    ranker = Ranker(brain, options_of(), Clock(), recorder=recorder)
    if late:
        stream(brain, real.head(64))
    fail_to_learn(brain, monkeypatch)
    ranker.give_up()
    assert brain.metrics.get("faults") == 1
    for i in range(2000):
        request = StandIn(f"r{i}", prompt_token_ids=(0,) * (5000 if i % 9 == 0 else 1), num_output_tokens=5)
        ranker.guard.call(ranker.arrived, request)
        ranker.guard.call(ranker.state, request.request_id, real.state[i % 8])
        ranker.guard.call(ranker.finished, request)
        # Whoever asks the brain itself leaves nothing there either.
        brain.arrived(request.request_id, request.prompt_token_ids, 64, 0, False)
        brain.state(request.request_id, real.state[i % 8])
        brain.finished(request.request_id, "stop", 5)
    assert brain.metrics.get("faults") == 1
    for part in (brain, ranker, recorder, brain._reading):
        kept = {name: len(value) for name, value in vars(part).items() if isinstance(value, deque)}
        kept |= {name: len(getattr(part, name)) for name in ("_live", "_texts", "_unread") if hasattr(part, name)}
        assert not any(kept.values()), kept
    recorder.close()


def test_queues_of_the_brain_are_bounded_while_its_thread_stands_still(
    real: Traffic, brains: Brains, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("leap_rs.vllm.online.MOST_WAITING", 10)
    monkeypatch.setattr("leap_rs.vllm.online.LONG", 0)
    brain = brains(real)
    held = threading.Event()
    brain._turn, turn = (lambda *_: held.wait() and None), brain._turn  # type: ignore[method-assign, assignment, func-returns-value]
    for i in range(100):
        brain.arrived(f"r{i}", [i], 1024, 0, False)
        brain.state(f"r{i}", real.state[i])
        brain.finished(f"r{i}", "stop" if i % 2 else "abort", 5)
    assert not {name: value for name, value in vars(brain).items() if isinstance(value, deque) and len(value) > 10}
    brain._turn = turn  # type: ignore[method-assign]
    held.set()
    brain.settle()
    assert (brain.metrics.get("labels", "exact"), brain.metrics.get("labels", "aborted")) == (50, 50)


def test_traffic_without_a_label_is_told_once_and_shown(
    real: Traffic, brains: Brains, caplog: pytest.LogCaptureFixture
) -> None:
    brain = brains(real)

    def end(first: int, count: int, reason: str, *, ignore_eos: bool = False) -> None:
        for i in range(first, first + count):
            brain.arrived(f"r{i}", [i % 8], 64, 0, ignore_eos)
            brain.finished(f"r{i}", reason, 64)  # type: ignore[arg-type]
        brain.settle()

    end(0, 499, "abort")
    assert brain.metrics.get("nothing_to_learn") == 0
    assert "stop string" not in caplog.text
    end(499, 1, "length", ignore_eos=True)
    assert brain.metrics.get("nothing_to_learn") == 1
    assert "the last 500 requests that finished say nothing of natural lengths (499 aborted, 1 forced)" in caplog.text
    end(500, 600, "abort")
    assert caplog.text.count("stop string") == 1
    end(1100, 1, "stop")
    assert brain.metrics.get("nothing_to_learn") == 0
    end(1101, 499, "abort")
    assert brain.metrics.get("nothing_to_learn") == 0
