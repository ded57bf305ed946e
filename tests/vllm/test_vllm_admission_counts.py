"""What admission counts, against counts made from the steps alone, and the KV caches that it takes vLLM's for."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm.version")

import torch
from fake_setup import BLOCK, Job, Oracle, Setup
from fake_worker import FakeEngine, Step
from scenarios import Teller
from test_vllm_admission import BOTH, SHORT, jobs_of, run
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from leap_rs.vllm.admission import groups_of
from leap_rs.vllm.metrics import MetricsWriter

pytestmark = pytest.mark.vllm


def measured(brain: Any) -> Any:
    brain.metrics = MetricsWriter.nowhere()
    return brain


class Recounted:
    """Makes the counts from what each step scheduled, and compares them with what is shown after it.

    A step has tokens for everybody, so that whoever comes back computes in that very step all that it lacks.
    """

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.lost: set[str] = set()
        self.recomputed = 0
        self.holds = 0
        self.refused = 0
        self.ratios: list[float] = []

    def __call__(self, engine: FakeEngine, step: Step) -> None:
        metrics, scheduler = engine.scheduler.leap.metrics, engine.scheduler
        back = self.lost & set(step.admitted)
        self.recomputed += sum(step.scheduled[name] for name in back)
        self.lost = (self.lost - back) | set(step.preempted)
        assert metrics.get("recomputed_tokens") == self.recomputed
        held = metrics.get("admission_holds") - self.holds
        self.holds += int(held)
        assert held in (0, 1)
        waiting = [name for name in step.waiting if name not in step.admitted and name in scheduler.requests]
        seat = len(scheduler.running) < self.setup.max_num_seqs
        if held:
            assert waiting
            assert seat
            assert scheduler.running
            assert not step.preempted
        elif waiting and seat and not step.preempted:
            # Nobody was held, so whoever is first now found no blocks, or has tokens under way.
            first = scheduler.requests[next(iter(scheduler.waiting)).request_id]
            needs = -(-(first.num_tokens + 1) // BLOCK)
            assert getattr(first, "num_stale_output_tokens", 0) or needs > engine._free()
            self.refused += 1
        self.ratios.append(metrics.get("kv_peak_ratio"))


@BOTH
@pytest.mark.parametrize("prefix_caching", [False, True], ids=["plain", "cached"])
def test_holds_and_tokens_computed_again_are_those_of_the_steps(async_scheduling: bool, prefix_caching: bool) -> None:
    setup = replace(SHORT, async_scheduling=async_scheduling, prefix_caching=prefix_caching)
    setup = replace(setup, max_num_batched_tokens=4096)
    jobs = jobs_of(90, 20, every_s=3.0)
    counts = Recounted(setup)
    run(jobs, setup, {"mode": "auto"}, measured(Oracle(jobs, armed=False)), counts)
    assert counts.recomputed > 500
    assert counts.holds > 50
    assert counts.refused > 5
    known = [ratio for ratio in counts.ratios if not math.isnan(ratio)]
    assert math.isnan(counts.ratios[0])
    # Once known it stays known.
    assert not any(math.isnan(ratio) for ratio in counts.ratios[-len(known) :])
    assert 0.3 < known[-1] < 3


def test_without_the_lever_tokens_computed_again_are_counted_and_nothing_else() -> None:
    setup, jobs = replace(SHORT, max_num_batched_tokens=4096), jobs_of(60, 21)
    brain = measured(Oracle(jobs))
    lost: set[str] = set()
    recomputed = 0

    def watch(_: FakeEngine, step: Step) -> None:
        nonlocal recomputed, lost
        recomputed += sum(step.scheduled[name] for name in lost & set(step.admitted))
        lost = (lost - set(step.admitted)) | set(step.preempted)

    run(jobs, setup, {"mode": "armed", "levers": ["queue", "slots"]}, brain, watch)
    assert brain.metrics.get("recomputed_tokens") == recomputed > 0
    assert brain.metrics.get("admission_holds") == 0
    assert math.isnan(brain.metrics.get("kv_peak_ratio"))


def test_where_lengths_are_known_what_is_held_is_what_was_predicted() -> None:
    # What a request has made is taken from the start of a block, so that some of those that will have ended still count:
    # few, where answers are many blocks long.
    jobs = [replace(job, length=8 * job.length, max_tokens=1600) for job in jobs_of(90, 22, every_s=24.0)]
    counts = Recounted(replace(SHORT, max_num_batched_tokens=4096, max_model_len=2048, blocks=8 * SHORT.blocks))
    run(jobs, counts.setup, {"mode": "auto"}, measured(Teller(jobs, armed=False)), counts)
    # Half a block for the last one, and middles of strides, are what else it can be off by.
    assert counts.ratios[-1] == pytest.approx(1.0, abs=0.1)
    assert counts.holds > 50


FULL: dict[str, Any] = {"block_size": 16, "num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}
MAMBA: dict[str, Any] = {"shapes": ((2, 2),), "dtypes": (torch.float32,)}


def config(*specs: Any) -> Any:
    return SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec) for spec in specs])


def test_one_cache_grows_by_the_blocks_that_the_scheduler_counts_in() -> None:
    assert groups_of(config(FullAttentionSpec(**FULL)), 16) == [(16, None)]
    # Four ranks share the blocks of a context.
    assert groups_of(config(FullAttentionSpec(**FULL)), 64) == [(64, None)]
    assert groups_of(config(), 16) == [(16, None)]
    assert groups_of(FakeEngine(Setup(leap={}), Oracle()).scheduler.kv_cache_config, BLOCK) == [(BLOCK, None)]


def touched(window: int, block: int) -> int:
    """Blocks in which the last `window` tokens lie, at most."""
    ends = range(window + 4 * block)
    return max(len({token // block for token in range(max(end - window + 1, 0), end + 1)}) for end in ends)


@pytest.mark.parametrize("window", [1, 15, 16, 17, 33, 64, 100, 4096])
def test_a_window_bounds_a_cache(window: int) -> None:
    for spec in (
        SlidingWindowSpec(**FULL, sliding_window=window),
        ChunkedLocalAttentionSpec(**FULL, attention_chunk_size=window),
    ):
        ((size, most),) = groups_of(config(spec), 16)
        assert size == 16
        assert most is not None
        assert touched(window, 16) <= most <= touched(window, 16) + 1
        wrapped = UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs={"layer": spec})
        assert groups_of(config(wrapped), 16) == [(16, most)]


def test_a_window_whose_tokens_are_all_kept_bounds_nothing() -> None:
    """So vLLM manages hybrid models without its hybrid manager: the spec still says what the window is."""
    for spec in (FullAttentionSpec(**FULL, sliding_window=64), FullAttentionSpec(**FULL, attention_chunk_size=64)):
        assert groups_of(config(spec), 16) == [(16, None)]


@pytest.mark.parametrize(("mode", "most"), [("none", 1 + 3), ("align", 2 + 3), ("all", None)])
def test_a_state_does_not_grow_unless_all_of_them_are_kept(mode: str, most: int | None) -> None:
    spec = MambaSpec(**MAMBA, block_size=400, mamba_cache_mode=mode, num_speculative_blocks=3)
    assert groups_of(config(spec), 400) == [(400, most)]
    # What vLLM says of the same, in pages of one block.
    vllm_config = SimpleNamespace(
        cache_config=SimpleNamespace(mamba_cache_mode=mode), model_config=SimpleNamespace(max_model_len=4000)
    )
    if most is not None:
        assert spec.max_memory_usage_bytes(vllm_config) == most * spec.page_size_bytes


def test_several_caches_have_their_own_blocks() -> None:
    specs = FullAttentionSpec(**FULL), SlidingWindowSpec(**{**FULL, "block_size": 32}, sliding_window=128)
    assert groups_of(config(*specs), 16) == [(16, None), (32, 5)]


def test_an_engine_with_two_caches_is_asked_for_both() -> None:
    """Blocks of both come from one pool: of those that fit with one cache only some do with two."""
    from leap_rs._leap import Admission

    length = 200
    jobs = [Job("r", 0.0, (5,) * 16, length=length, max_tokens=300)]
    table = Teller(jobs).table("r")
    rooms = []
    for groups in ([(16, None)], [(16, None), (16, None)], [(16, None), (16, 5)]):
        blocks = next(b for b in range(1, 200) if _two_fit(Admission(groups, b, 0.01), table))
        rooms.append(blocks)
    # At 192 tokens ahead, the last that is looked at before 200: 16 + 8 + 192 tokens and half a block, of two requests.
    one = 2 * ((16 + 8 + 192) / 16 + 0.5)
    assert rooms == [math.ceil(one), math.ceil(2 * one), math.ceil(one + 2 * 5)]


def _two_fit(room: Any, table: Any) -> bool:
    room.admitted(1, prompt=16, cap=300, shared_blocks=0, table=table)
    room.progressed([1], [0])
    return bool(room.has_room(prompt=16, generated=0, cap=300, shared_blocks=0, table=table))
