"""`LeapScheduler` on vLLM's own scheduler: one name for both engines, what it refuses, and what it does step by step."""

from __future__ import annotations

import copy
import math
import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm.version")

from fake_setup import Job, Oracle, Setup, prompt_of
from fake_worker import AsyncScheduler, FakeEngine, Scheduler, Step
from vllm.config import KVTransferConfig
from vllm.v1.request import RequestStatus

from leap_rs import ConfigError
from leap_rs.vllm import LeapScheduler
from leap_rs.vllm.metrics import read
from leap_rs.vllm.online import OnlineBrain
from leap_rs.vllm.options import LeapOptions, RlsOptions
from leap_rs.vllm.scheduler import (
    _AsyncLeapScheduler,
    _Levers,
    _SyncLeapScheduler,
)
from leap_rs.vllm.start import prefills_only, refuse, settings_of
from leap_rs.vllm.waiting import WaitingQueue

pytestmark = pytest.mark.vllm

BOTH = pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])


def jobs_of(lengths: list[int], *, prompt: int = 8, arrival_s: float = 0.0, seed: int = 0) -> list[Job]:
    rng = random.Random(seed)
    return [
        Job(f"r{i}", arrival_s, prompt_of(rng, prompt), length=length, max_tokens=1000)
        for i, length in enumerate(lengths)
    ]


def serve(jobs: list[Job], setup: Setup, brain: Any = None, **options: Any) -> FakeEngine:
    leap = {"mode": "armed", "aging_rate": 0, **options}
    engine = FakeEngine(replace(setup, leap=leap), brain if brain is not None else Oracle(jobs))
    engine.run(jobs)
    engine.check_end()
    return engine


@BOTH
def test_one_name_is_the_scheduler_that_the_engine_runs_with(async_scheduling: bool) -> None:
    scheduler = FakeEngine(Setup(async_scheduling=async_scheduling, leap={}), Oracle()).scheduler
    assert isinstance(scheduler, LeapScheduler)
    assert isinstance(scheduler, AsyncScheduler if async_scheduling else Scheduler)
    assert isinstance(scheduler, AsyncScheduler) is async_scheduling
    assert type(scheduler) is (_AsyncLeapScheduler if async_scheduling else _SyncLeapScheduler)
    assert isinstance(scheduler.waiting, WaitingQueue)


def test_it_hides_nothing_of_vllms_but_what_it_means_to() -> None:
    """vLLM's scheduler has many private names; one of ours that is the same would break it without a word."""
    plain = FakeEngine(Setup(), None).scheduler
    ours = FakeEngine(Setup(leap={"levers": ["queue", "slots", "evict"]}), Oracle()).scheduler
    new = {name for name in vars(ours) if name not in vars(plain)}
    assert all(name.startswith(("leap", "_leap")) for name in new)
    assert not any(hasattr(plain, name) for name in new)
    methods = {name for name in vars(_Levers) if not name.startswith("__")}
    # Until 0.31 vLLM asks by this name which queue is next.
    replaced = {name for name in methods if hasattr(plain, name)} - {"_select_waiting_queue_for_scheduling"}
    assert replaced == {
        "add_request",
        "schedule",
        "update_from_output",
        "shutdown",
        "_preempt_request",
        "_free_request",
        "finish_requests",
        "reset_prefix_cache",
    }
    assert all(
        name.startswith("_leap") or name == "_select_waiting_queue_for_scheduling" for name in methods - replaced
    )


def test_what_was_learned_is_saved_when_all_requests_are_ended() -> None:
    """So does vLLM when an engine is told to shut down, before it lets signals kill it."""
    brain = Oracle()
    scheduler = FakeEngine(Setup(leap={}), brain).scheduler
    scheduler.finish_requests(["nobody"], RequestStatus.FINISHED_ABORTED)
    assert brain.saved == 0
    scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
    assert brain.saved == 1


def test_without_the_plugins_options_its_defaults_hold_and_nothing_is_armed() -> None:
    engine = FakeEngine(Setup(leap={}), None)
    assert engine.scheduler.leap_options.levers == ("queue", "admission")
    assert isinstance(engine.scheduler.leap._brain, OnlineBrain)
    assert engine.scheduler.leap.armed is False
    engine.scheduler.leap.close()


def test_a_state_is_of_the_model_and_not_of_the_name_that_it_is_served_under(tmp_path: Path) -> None:
    config = FakeEngine(Setup()).scheduler.vllm_config
    options = LeapOptions(state_dir=tmp_path / "state", rls=RlsOptions(batch=1))
    hub = "/cache/hub/models--org--some-model/snapshots/0a1b"
    learned: dict[str, float] = {}
    # Served under another name, found in the hub's cache, another model, and the first one again.
    for model, served, weights in [
        ("org/some-model", "chat", "org/some-model"),
        ("org/some-model", "chat-2", "org/some-model"),
        (hub, hub, "org/some-model"),
        ("org/other", "chat", "org/other"),
        ("org/some-model", "chat", "org/some-model"),
    ]:
        config.model_config = copy.copy(config.model_config)
        config.model_config.model, config.model_config.served_model_name = model, served
        brain = OnlineBrain(settings_of(config, options))
        assert brain.metrics.path is not None
        reading = read(brain.metrics.path)
        assert reading is not None
        assert reading.model_name == served
        assert brain.metrics.get("updates", "prompt") == learned.get(weights, 0)
        for i in range(300):
            brain.arrived(f"r{i}", [1] * (1 + i), 99, 0, False)
            brain.finished(f"r{i}", "stop", 5 + i % 50)
        brain.close()
        assert brain.metrics.get("updates", "prompt") > learned.get(weights, 0)
        learned[weights] = brain.metrics.get("updates", "prompt")


def test_priority_pooling_and_evict_with_a_connector_are_refused() -> None:
    scheduler = FakeEngine(Setup(leap={"levers": ["evict"]}), Oracle()).scheduler
    config, options = scheduler.vllm_config, scheduler.leap_options

    class Changed:
        def __init__(self, part: str, **values: Any) -> None:
            self.part, self.values = part, values

        def __getattr__(self, name: str) -> Any:
            if name == self.part:
                return type("Part", (), {**vars(getattr(config, name)), **self.values}) if self.values else object()
            return getattr(config, name)

    refuse(config, options)
    with pytest.raises(ConfigError, match=r"policy 'priority': .* needs fcfs"):
        refuse(Changed("scheduler_config", policy="priority"), options)
    with pytest.raises(ConfigError, match="runner 'pooling'"):
        refuse(Changed("model_config", runner_type="pooling"), options)
    with pytest.raises(ConfigError, match="evict cannot be used with a KV connector"):
        refuse(Changed("kv_transfer_config"), options)


@pytest.mark.parametrize(
    ("role", "only"), [("kv_producer", True), ("kv_consumer", False), ("kv_both", False), (None, False)]
)
def test_a_prefill_instance_is_known_by_its_role(role: str | None, only: bool) -> None:
    transfer = None if role is None else KVTransferConfig(kv_connector="NixlConnector", kv_role=role)
    assert prefills_only(SimpleNamespace(kv_transfer_config=transfer)) is only


def test_a_wrong_option_stops_the_start() -> None:
    with pytest.raises(ConfigError, match="additional_config: leap: levers: unknown lever 'all'"):
        FakeEngine(Setup(leap={"levers": ["all"]}), Oracle())


@BOTH
@pytest.mark.parametrize("levers", [["queue"], ["queue", "slots"]])
def test_one_at_a_time_requests_finish_in_the_order_of_their_keys(async_scheduling: bool, levers: list[str]) -> None:
    lengths = [40, 3, 25, 8, 60, 17, 5, 33]
    jobs = jobs_of(lengths)
    setup = Setup(max_num_seqs=1, async_scheduling=async_scheduling)
    order = [f"r{i}" for i in sorted(range(len(lengths)), key=lambda i: lengths[i])]
    assert serve(jobs, setup, levers=levers, memory_weight=0).outcome.finish_order == order


@BOTH
def test_one_slot_among_residents_finishes_in_the_order_of_length(async_scheduling: bool) -> None:
    lengths = [40, 3, 25, 8, 60, 17, 5, 33]
    setup = Setup(max_num_seqs=8, async_scheduling=async_scheduling)
    engine = serve(jobs_of(lengths), setup, levers=["slots"], decode_slots=1)
    assert engine.outcome.finish_order == [f"r{i}" for i in sorted(range(8), key=lambda i: lengths[i])]
    assert all(len(step.decoding) <= 1 for step in engine.outcome.steps)
    assert engine.scheduler.leap_slots.slot_waits > 0


@BOTH
def test_under_memory_pressure_the_longest_gives_way(async_scheduling: bool) -> None:
    """Five residents whose answers do not fit together: stock vLLM preempts the last admitted, the shortest here."""
    jobs = jobs_of([300, 250, 200, 100, 50], prompt=16)
    setup = Setup(max_num_seqs=5, max_num_batched_tokens=128, blocks=26, async_scheduling=async_scheduling)
    stock = FakeEngine(setup)
    stock.run(jobs)
    stock.check_end()
    engine = serve(jobs, setup, levers=["slots"])
    victims = [name for step in engine.outcome.steps for name in step.preempted]
    first = next(name for step in stock.outcome.steps for name in step.preempted)
    assert first != "r0"
    assert victims[0] == "r0"
    assert engine.outcome.finish_order[:4] == ["r4", "r3", "r2", "r1"]


@BOTH
def test_evict_gives_the_place_of_a_long_one_to_a_short_one(async_scheduling: bool) -> None:
    long, short = jobs_of([400, 400, 10])[:2], replace(jobs_of([10, 10, 10])[2], arrival_s=20.0)
    setup = Setup(max_num_seqs=2, async_scheduling=async_scheduling)
    options = {"memory_weight": 0, "evict_factor": 2.0, "evict_per_s": 1.0}
    waits = serve([*long, short], setup, levers=["queue"], memory_weight=0)
    assert waits.outcome.finish_s["r2"] > 400
    engine = serve([*long, short], setup, levers=["queue", "evict"], **options)
    assert engine.scheduler.leap_evict.evicted == 1
    assert engine.outcome.finish_s["r2"] < 40
    assert sum("r0" in step.preempted or "r1" in step.preempted for step in engine.outcome.steps) == 1


@BOTH
def test_nobody_gives_way_in_a_paused_engine(async_scheduling: bool) -> None:
    """A pause that waits is over once those inside have ended; nobody may be left behind in the queue."""
    long, short = jobs_of([400, 400, 10])[:2], replace(jobs_of([10, 10, 10])[2], arrival_s=20.0)
    setup = Setup(max_num_seqs=2, async_scheduling=async_scheduling)
    leap = {"mode": "armed", "levers": ["queue", "evict"], "memory_weight": 0, "aging_rate": 0}
    engine = FakeEngine(replace(setup, leap=leap), Oracle([*long, short]))
    if not hasattr(engine.scheduler, "set_pause_state"):
        pytest.skip("this vLLM cannot be paused")
    state = type(engine.scheduler.pause_state)

    def pause(engine: FakeEngine, step: Step) -> None:
        if step.now == 10.0:
            engine.scheduler.set_pause_state(state.PAUSED_NEW)

    engine.run([*long, short], watch=pause)
    assert set(engine.outcome.reasons) == {"r0", "r1"}
    assert engine.scheduler.leap_evict.evicted == 0
    engine.scheduler.set_pause_state(state.UNPAUSED)
    engine.run([])
    engine.check_end()


@BOTH
def test_a_reset_for_new_weights_is_no_sign_of_short_memory(async_scheduling: bool) -> None:
    class Reset(FakeEngine):
        def _take(self, *args: Any) -> None:
            super()._take(*args)
            if self.now == 20.0:
                assert self.scheduler.reset_prefix_cache(reset_running_requests=True)

    jobs = jobs_of([60, 60, 60])
    leap = {"mode": "armed", "levers": ["queue", "admission"]}
    engine = Reset(Setup(async_scheduling=async_scheduling, leap=leap), Oracle(jobs))
    engine.run(jobs)
    engine.check_end()
    assert sum(len(step.admitted) for step in engine.outcome.steps) == 6
    assert engine.scheduler.leap_recomputed_tokens == 0


def test_a_request_is_overtaken_only_within_the_bound_of_aging() -> None:
    """One seat, a long request among a stream of short ones at twice what the seat can serve."""
    rate, long, short = 0.05, 100, 10
    rng = random.Random(3)
    jobs = [Job("long", 5.0, prompt_of(rng, 4), length=long, max_tokens=1000)]
    jobs += [Job(f"s{i}", i * 5.0, prompt_of(rng, 4), length=short, max_tokens=1000) for i in range(60)]
    engine = serve(jobs, Setup(max_num_seqs=1), levers=["queue"], aging_rate=rate, memory_weight=0)
    bound = math.log(long / short) / rate
    done = engine.outcome.finish_s["long"]
    overtook = [job.arrival_s for job in jobs if job.name != "long" and engine.outcome.finish_s[job.name] < done]
    assert max(overtook) <= 5.0 + bound + 1.0
    assert max(overtook) > 5.0 + bound - 6.0
    without = serve(jobs, Setup(max_num_seqs=1), levers=["queue"], aging_rate=0, memory_weight=0)
    assert without.outcome.finish_order[-1] == "long"


def test_a_wait_cap_in_seconds_ends_the_wait() -> None:
    rng = random.Random(3)
    jobs = [Job("long", 1.0, prompt_of(rng, 4), length=100, max_tokens=1000)]
    jobs += [Job(f"s{i}", i * 5.0, prompt_of(rng, 4), length=10, max_tokens=1000) for i in range(60)]
    engine = serve(jobs, Setup(max_num_seqs=1), levers=["queue"], wait_cap_s=30.0)
    admitted = next(step.now for step in engine.outcome.steps if "long" in step.admitted)
    assert 31.0 <= admitted <= 31.0 + 11.0
    assert engine.scheduler.leap_promotions >= 1


@BOTH
def test_it_arms_and_disarms_in_the_middle_and_loses_nobody(async_scheduling: bool) -> None:
    jobs = jobs_of([20] * 5 + [3, 90, 45, 7, 12] * 4)
    brain = Oracle(jobs, armed=False)
    engine = FakeEngine(Setup(max_num_seqs=2, async_scheduling=async_scheduling, leap={}), brain)
    changes = {10: True, 60: False, 90: True}
    armed = []

    def watch(engine: FakeEngine, _: object) -> None:
        armed.append(engine.scheduler.waiting.armed)
        brain.armed = changes.get(len(armed), brain.armed)

    engine.run(jobs, watch=watch)
    engine.check_end()
    assert armed[:10] == [False] * 10
    assert all(armed[10:60])
    assert not any(armed[60:90])
    assert all(armed[90:])


@pytest.mark.parametrize("call", ["arrived", "state", "remaining_key", "mean_remaining", "finished", "close"])
@BOTH
def test_a_brain_that_fails_at_any_call_does_not_stop_the_server(
    async_scheduling: bool, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = jobs_of([20, 3, 90, 45, 7, 12] * 3)
    brain = Oracle(jobs)
    real, calls = getattr(brain, call), [0]

    def fails_later(*args: Any) -> Any:
        calls[0] += 1
        if calls[0] > (0 if call == "close" else 5):
            raise RuntimeError("full disk")
        return real(*args)

    monkeypatch.setattr(brain, call, fails_later)
    setup = Setup(max_num_seqs=3, async_scheduling=async_scheduling)
    engine = serve(jobs, setup, brain, levers=["queue", "slots", "evict"], decode_slots=2)
    engine.scheduler.shutdown()
    assert engine.scheduler.leap.fault == "RuntimeError: full disk"
    assert engine.scheduler.leap.armed is False


def test_shutdown_closes_the_brain() -> None:
    brain = Oracle()
    FakeEngine(Setup(leap={}), brain).scheduler.shutdown()
    assert brain.closed


@BOTH
def test_rows_are_asked_for_once_also_across_chunks_cached_prefixes_and_preemptions(async_scheduling: bool) -> None:
    """The fake worker checks each position; here it is that every request is read, and once."""
    rng = random.Random(1)
    jobs = [
        Job(f"r{i}", float(i), prompt_of(rng, 20 + 17 * i, shared=40), length=60 + i, max_tokens=1000) for i in range(8)
    ]
    setup = Setup(max_num_seqs=8, max_num_batched_tokens=32, blocks=24, async_scheduling=async_scheduling)
    brain = Oracle(jobs)
    engine = serve(jobs, setup, brain, levers=["queue", "slots"])
    assert set(brain.rows) == {job.name for job in jobs}
    assert any(step.preempted for step in engine.outcome.steps)


def test_new_predictions_change_the_order_of_those_who_wait() -> None:
    jobs = jobs_of([50, 20, 30, 40])
    brain = Oracle(jobs)
    brain.lengths.update(r1=400, r2=300, r3=200)
    brain.lengths["r0"] = 1

    def watch(engine: FakeEngine, _: object) -> None:
        if len(engine.outcome.steps) == 10:
            brain.lengths.update(r1=20, r2=30, r3=40)
            brain.version += 1

    engine = FakeEngine(Setup(max_num_seqs=1, leap={"mode": "armed", "levers": ["queue"]}), brain)
    engine.run(jobs, watch=watch)
    engine.check_end()
    assert engine.outcome.finish_order == ["r0", "r1", "r2", "r3"]


def test_steps_without_a_slot_count_from_arming() -> None:
    """Where all decode in between, nobody is overdue the sooner for what was before."""
    cap, disarmed = 6, 7
    jobs = [Job(f"r{i}", 0.0, (5, 6, 7, 8), 60 + 10 * i, 200) for i in range(4)]
    brain = Oracle(jobs)
    engine = FakeEngine(
        Setup(leap={"mode": "armed", "levers": "slots", "decode_slots": 2, "wait_cap_steps": cap}), brain
    )
    gated: list[tuple[str, ...]] = []

    def watch(_: FakeEngine, step: Any) -> None:
        gated.append(step.gated)
        # What is set here holds from the next step on.
        brain.armed = len(gated) != disarmed

    engine.run(jobs, watch=watch)
    engine.check_end()
    assert gated[disarmed - 1] == ("r2", "r3")
    assert gated[disarmed] == ()
    assert gated[disarmed + 1 : disarmed + 1 + cap] == [("r2", "r3")] * cap
    assert gated[disarmed + 1 + cap] == ("r0", "r1")
