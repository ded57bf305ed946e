"""A fault in any function that vLLM's scheduler runs of the plugin's: it is told and counted once, and vLLM serves on."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm.version")

from fake_setup import Job, Setup, prompt_of
from fake_worker import FakeEngine
from scenarios import Teller
from vllm.v1.request import RequestStatus

from leap_rs.vllm import scheduler
from leap_rs.vllm.admission import Room
from leap_rs.vllm.evicting import Evicting
from leap_rs.vllm.metrics import MetricsWriter
from leap_rs.vllm.online import OnlineBrain
from leap_rs.vllm.order import Ranker
from leap_rs.vllm.settings import BrainSettings
from leap_rs.vllm.slots import Slots
from leap_rs.vllm.waiting import WaitingQueue

pytestmark = pytest.mark.vllm

ALL = ["queue", "slots", "evict", "admission"]
BUSY = Setup(max_num_seqs=8, max_num_batched_tokens=64, blocks=28, max_loras=2)
# Those that make the schedule vLLM's own again, and those of vLLM's that only call what is guarded.
OWN = {
    *(
        "_leap_give_up",
        "_leap_select",
        "_select_waiting_queue_for_scheduling",
        "add_request",
        "update_from_output",
        "_preempt_request",
    ),
    *("_free_request", "finish_requests", "reset_prefix_cache", "shutdown", "schedule"),
}
# vLLM's queue itself, with a note of who comes and goes.
VLLMS = {
    *("add_request", "prepend_request", "prepend_requests", "peek_request", "pop_request", "remove_request"),
    *("remove_requests", "__bool__", "__len__", "__iter__", "_enters", "_leaves", "_note_popped", "_empty"),
    # It is what a fault ends with.
    "give_up",
    # For tests and the like.
    "kept",
}
# What is asked of two queues only, which vLLM has until 0.31.
OLDER = {"_first_by_key", "first_of_all", "urgency"}


class Revising(Teller):
    """A brain that knows lengths, whose predictions change now and then, and which has metrics."""

    asked = 0

    def __init__(self, jobs: list[Job]) -> None:
        super().__init__(jobs)
        self.metrics = MetricsWriter.nowhere()

    def fresh(self) -> list[str]:
        self.asked += 1
        if self.asked % 8:
            return []
        self.version += 1
        return list(self.lengths)[:3]


def busy(seed: int = 0, n: int = 60) -> list[Job]:
    rng = random.Random(seed)
    return [
        Job(
            f"r{i}",
            arrival_s=rng.random() * 60,
            prompt=prompt_of(rng, rng.randint(1, 60)),
            length=rng.randint(1, 100),
            max_tokens=rng.randint(20, 100),
            abort_s=30 + rng.random() * 200 if i % 11 == 0 else None,
            grammar_s=60 + rng.random() * 20 if i % 7 == 0 else None,
            lora=rng.randint(1, 4) if i % 3 == 0 else None,
        )
        for i in range(n)
    ]


def functions(of: type, but: set[str]) -> list[tuple[type, str]]:
    return [
        (of, name)
        for name, value in vars(of).items()
        if callable(value) and name not in but and name not in ("__init__", "__new__", "__module__")
    ]


PLACES: list[tuple[Any, str]] = [
    *functions(scheduler._Levers, OWN),
    *functions(Evicting, set()),
    *functions(WaitingQueue, {*VLLMS, *OLDER}),
    *functions(Room, {"give_up", "lets_in"}),
    *functions(Slots, set()),
    *functions(Ranker, {"close", "give_up", "_ask"}),
    (scheduler, "pass_over"),
]


class Fault:
    """Fails once, before or after what it stands for has done its part, from a number of calls on."""

    def __init__(self, function: Callable[..., Any], after_calls: int, *, late: bool) -> None:
        self._function, self._left, self._late = function, after_calls, late
        self.failed = self.met = 0

    def __get__(self, owner: Any, _: Any = None) -> Any:
        return self if owner is None else lambda *args, **kwargs: self(owner, *args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.met += 1
        self._left -= 1
        if self._left >= 0 or self.failed:
            return self._function(*args, **kwargs)
        self.failed += 1
        if self._late:
            self._function(*args, **kwargs)
        raise RuntimeError("a fault")


@pytest.mark.parametrize(
    ("late", "async_scheduling"), [(False, False), (True, True)], ids=["before-sync", "after-async"]
)
@pytest.mark.parametrize(("of", "name"), PLACES, ids=[f"{of.__name__.split('.')[-1]}.{name}" for of, name in PLACES])
def test_a_fault_anywhere_is_told_once_and_vllm_serves_on(
    of: Any,
    name: str,
    late: bool,
    async_scheduling: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    jobs = busy()
    leap = {
        "mode": "armed",
        "levers": ALL,
        "decode_slots": 4,
        "evict_factor": 1.0,
        "evict_per_s": 100.0,
        "wait_cap_s": 40.0,
    }
    changes = {20: False, 26: True}

    def watch(engine: FakeEngine, _: object) -> None:
        brain.armed = changes.get(len(engine.outcome.steps), brain.armed)

    setup = replace(BUSY, async_scheduling=async_scheduling, leap=leap)
    failed = 0
    for calls in (0, 40):
        caplog.clear()
        brain = Revising(jobs)
        engine = FakeEngine(setup, brain)
        engine.force_old_gate()
        fault = Fault(getattr(of, name), calls, late=late)
        with monkeypatch.context() as patch:
            patch.setattr(of, name, fault)
            engine.run(jobs, watch=watch)
            engine.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
        # Nobody is lost, each ends once and has its tokens, all blocks are back.
        engine.check_end()
        told = [record for record in caplog.records if record.levelno >= logging.ERROR]
        assert len(told) == fault.failed == brain.metrics.get("faults")
        failed += fault.failed
        if not fault.failed:
            continue
        assert told[0].exc_info is not None
        assert engine.scheduler.leap_guard.fault == "RuntimeError: a fault"
        # What comes after it is scheduled as vLLM does it.
        more = [replace(job, name=f"more-{job.name}", arrival_s=0.0, abort_s=None, grammar_s=None) for job in busy(1)]
        steps = len(engine.outcome.steps)
        engine.run(more)
        engine.check_end()
        stock = FakeEngine(replace(setup, leap=None))
        stock.run(more)
        assert [step.scheduled for step in engine.outcome.steps[steps:]] == [s.scheduled for s in stock.outcome.steps]
        assert brain.metrics.get("mode", "shadow") == 1
        assert brain.metrics.get("gated_requests") == 0
        assert not engine.scheduler.leap._live
        assert not engine.scheduler.leap_room._inside
    assert failed


BRAIN = [
    "arrived",
    "state",
    "finished",
    "remaining_key",
    "mean_remaining",
    "fresh",
    "table",
    "_predict",
    "save",
    "settle",
]
THREAD = ["_turn", "_read", "_learn", "_renew", "_save", "_publish", "_trust"]


@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("name", [*BRAIN, *THREAD])
def test_a_fault_anywhere_in_the_brain_is_told_once_and_vllm_serves_on(
    name: str, late: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    jobs = busy()
    settings = BrainSettings("m", width=1, mode="armed", metrics_dir=tmp_path, state_dir=tmp_path / "state")
    brain = OnlineBrain(settings)
    leap = {"mode": "armed", "levers": ALL, "decode_slots": 4, "evict_factor": 1.0, "evict_per_s": 100.0}
    fault = Fault(getattr(OnlineBrain, name), 3 if name in BRAIN and name not in ("save", "settle") else 0, late=late)
    with monkeypatch.context() as patch:
        patch.setattr(OnlineBrain, name, fault)
        # Here, since the ranker looks some of them up when it is made.
        engine = FakeEngine(replace(BUSY, leap=leap), brain)
        engine.run(jobs)
        engine.check_end()
        engine.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
        brain.settle()
    assert fault.failed == 1
    engine.run([replace(job, name=f"more-{job.name}", arrival_s=0.0, abort_s=None, grammar_s=None) for job in busy(1)])
    engine.check_end()
    told = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert len(told) == 1
    assert brain.metrics.get("faults") == 1
    assert brain.fault == "RuntimeError: a fault"
    assert (brain.metrics.get("mode", "shadow"), brain.metrics.get("armed_readout", "prompt")) == (1, 0)
    assert not engine.scheduler.leap._live
    assert not brain._live
    assert not brain._done
    engine.scheduler.leap.close()
    assert not brain._thread.is_alive()
