"""The replayer against vLLM's real scheduler and KV-cache manager, step for step: who is scheduled, with how many tokens,
and who is preempted. LEAP_SETTINGS=500 draws more random settings than the usual 12.
"""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm.version")

from fake_setup import VERSION, Job, Setup
from step_logs import (
    Case,
    Logged,
    Read,
    Readouts,
    by_engine,
    by_replayer,
    draw_case,
    draw_jobs,
    draw_scores,
    first_difference,
)

from leap_rs import Readout
from leap_rs.vllm.readouts import Kind

pytestmark = pytest.mark.vllm

STEPS = 2000
LEVERS = (
    *(None, ["queue"], ["slots"], ["queue", "slots"], ["queue", "slots", "evict"]),
    *(["admission"], ["queue", "admission"], ["queue", "slots", "evict", "admission"]),
)
PLAIN = Setup(max_num_batched_tokens=512, max_model_len=400, blocks=400, prefix_caching=False)
SETTINGS: dict[str, Setup] = {
    "default": PLAIN,
    "chunked prefill with 64 tokens": replace(PLAIN, max_num_batched_tokens=64),
    "prefix caching": replace(PLAIN, blocks=120, prefix_caching=True),
    "wait cap": PLAIN,
    "KV pressure": replace(PLAIN, blocks=40, reserve_full_isl=False),
    "KV pressure with prefix caching": replace(PLAIN, blocks=40, prefix_caching=True, max_num_batched_tokens=64),
}


def case_of(setting: str, levers: list[str] | None, *, asynchronous: bool) -> Case:
    rng = random.Random(f"{setting} {levers} {asynchronous}")
    setup = replace(SETTINGS[setting], async_scheduling=asynchronous)
    jobs = draw_jobs(
        rng,
        400,
        rate=11.0,
        families=3 if setup.prefix_caching else 0,
        on_grid=levers is not None,
        natural=not asynchronous,
    )
    leap: dict[str, Any] | None = None
    if levers is not None:
        leap = {"levers": levers}
        if "slots" in levers:
            leap["decode_slots"] = 4
        if setting == "wait cap":
            leap["wait_cap_steps"] = 8
    return Case(setup, jobs, draw_scores(rng, jobs), leap)


def agree(case: Case, least: int, brain: Readouts | None = None) -> list[Logged]:
    if case.setup.prefix_caching and VERSION < (0, 26):
        pytest.skip("vLLM 0.20 hands freed blocks out in the order in which they were freed, and may cache less")
    engine = by_engine(case, brain)
    assert first_difference(engine, by_replayer(case)) is None
    assert len(engine) >= least
    return engine


def preemptions(steps: Sequence[Logged]) -> int:
    return sum(len(step.preempted) for step in steps)


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("levers", LEVERS, ids=lambda levers: "+".join(levers or ["fcfs"]))
@pytest.mark.parametrize("setting", SETTINGS)
def test_no_step_differs(setting: str, levers: list[str] | None, asynchronous: bool) -> None:
    case = case_of(setting, levers, asynchronous=asynchronous)
    steps = agree(case, STEPS)
    # The longest are told apart by their age alone: few are worse than the first of the queue by the factor.
    assert preemptions(steps) >= 3 * setting.startswith("KV pressure")
    assert "evict" not in (levers or ()) or preemptions(steps) > 0
    if case.setup.prefix_caching:
        computed = sum(sum(step.scheduled.values()) for step in steps)
        assert computed < sum(len(job.prompt) + len(job.output) - 1 for job in case.jobs) or preemptions(steps) > 0


# With equal keys, and with tokens under way for who is preempted: rare enough to be missed by a few random settings.
@pytest.mark.parametrize("seed", sorted({*range(int(os.environ.get("LEAP_SETTINGS", "12"))), 50, 211, 306}))
def test_no_step_of_a_random_setting_differs(seed: int) -> None:
    agree(draw_case(seed, 120), 100)


OUTPUTS = (1, 80)
NOISE: dict[Kind, float] = {"prompt": 3.0, "text": 2.0, "state": 1.0}


def readouts_of(
    jobs: Sequence[Job], max_tokens: int, directory: Path, kinds: Sequence[Kind] = ("prompt", "state"), **encoder: float
) -> Read:
    """Readouts that read hints of the lengths, vaguer ones the earlier they come."""
    lengths = np.array([len(job.output) for job in jobs])
    rng = np.random.default_rng(7)
    rows: dict[Kind, np.ndarray] = {}
    for kind in kinds:
        hints = np.sqrt(lengths) + rng.normal(0, NOISE[kind], len(jobs))
        rows[kind] = np.column_stack([hints, rng.normal(size=(len(jobs), 5))]).astype(np.float32)
    read = Read(directory / "x.safetensors", rows, **encoder)
    for kind in kinds:
        seen = np.concatenate([rows["text"], rows["prompt"]], axis=1) if kind == "text" else rows[kind]
        fitted = Readout.fit(seen, np.minimum(lengths, max_tokens), max_tokens=max_tokens, meta={"kind": kind})
        fitted.save(read.file(kind))
    return read


@pytest.mark.parametrize("order", ["countdown", "gittins"])
@pytest.mark.parametrize("blocks", [400, 40])
def test_no_step_differs_where_readouts_order(order: str, blocks: int, tmp_path: Path) -> None:
    """Both readouts, as the plugin uses them with its defaults, but without learning."""
    jobs = some_forced(draw_jobs(random.Random(f"{order} {blocks}"), 300, rate=11.0, outputs=OUTPUTS))
    leap = {"levers": ["queue", "slots"], "decode_slots": 3, "order": order}
    setup = replace(PLAIN, blocks=blocks, async_scheduling=True)
    agree(Case(setup, jobs, leap=leap, read=readouts_of(jobs, 128, tmp_path)), STEPS)


@pytest.mark.parametrize("order", ["countdown", "gittins"])
def test_no_step_differs_where_limits_and_lengths_lie_beyond_the_budget(order: str, tmp_path: Path) -> None:
    """Clients that give no limit get the rest of the context; answers may be longer than any that a readout was fitted to."""
    rng, budget = random.Random(order), 64
    jobs = draw_jobs(rng, 300, rate=5.0, outputs=(1, 150), natural=True)
    jobs = [replace(job, max_tokens=job.max_tokens if i % 4 else 270) for i, job in enumerate(jobs)]
    assert sum(len(job.output) > budget for job in jobs) > 50
    leap = {"levers": ["queue", "slots"], "decode_slots": 3, "order": order}
    agree(Case(replace(PLAIN, blocks=60), jobs, leap=leap, read=readouts_of(jobs, budget, tmp_path)), STEPS)


def settled(job: Job) -> bool:
    """Whether its client has settled the length, so that nobody reads its prompt."""
    return job.ignore_eos or job.max_tokens == 1


def some_forced(jobs: Sequence[Job]) -> list[Job]:
    """Of requests that end at their limit every eighth is one that has to."""
    return [replace(job, ignore_eos=i % 8 == 0) for i, job in enumerate(jobs)]


@dataclass(frozen=True)
class Reads:
    """A case with little memory in which a text encoder reads, with the readouts of `kinds`."""

    kinds: tuple[Kind, ...]
    levers: tuple[str, ...]
    order: str
    encoder_s: float
    rate: float = 11.0

    def case(self, directory: Path) -> Case:
        jobs = some_forced(draw_jobs(random.Random(repr(self)), 400, rate=self.rate, outputs=OUTPUTS))
        read = readouts_of(jobs, 128, directory, self.kinds, encoder_s=self.encoder_s)
        leap: dict[str, Any] = {"levers": list(self.levers), "order": self.order}
        if "slots" in self.levers:
            leap["decode_slots"] = 3
        return Case(replace(PLAIN, blocks=40, async_scheduling=True), jobs, leap=leap, read=read)


ALL: tuple[Kind, ...] = ("prompt", "text", "state")


@pytest.mark.parametrize("order", ["countdown", "gittins"])
@pytest.mark.parametrize("levers", [("queue", "admission"), ("queue", "slots")], ids="+".join)
@pytest.mark.parametrize("kinds", [ALL, ("prompt", "text")], ids="+".join)
@pytest.mark.parametrize("encoder_s", [1 / 128, 5 / 64])
def test_no_step_differs_where_rows_of_a_text_encoder_come_while_requests_wait(
    encoder_s: float, kinds: tuple[Kind, ...], levers: tuple[str, ...], order: str, tmp_path: Path
) -> None:
    case = Reads(kinds, levers, order, encoder_s).case(tmp_path)
    steps, before, after, unread = agree_on_text(case)
    assert preemptions(steps) >= 3 * ("admission" not in levers)
    assert before > 50
    assert after > 5
    assert unread == 0 or encoder_s > 1 / 64


@pytest.mark.parametrize("order", ["countdown", "gittins"])
def test_no_step_differs_where_the_encoder_falls_behind(order: str, tmp_path: Path) -> None:
    """More than it may have waiting come at once: it skips the oldest, and does not read who has ended."""
    case = Reads(ALL, ("queue", "admission"), order, 1 / 8, rate=200.0).case(tmp_path)
    _, before, after, unread = agree_on_text(case, skips=True)
    assert min(before, after, unread) > 5


def agree_on_text(case: Case, *, skips: bool = False) -> tuple[list[Logged], int, int, int]:
    """The steps; of how many the row came before they were admitted, of how many later, of how many never."""
    assert case.read is not None
    brain = Readouts(case, case.read)
    steps = agree(case, STEPS, brain)
    assert brain.encoder is not None
    assert (brain.encoder.skipped > 20) is skips
    admitted: dict[int, float] = {}
    for step in steps:
        for number in step.scheduled:
            admitted.setdefault(number, step.composed_s)
    read = brain.encoder.read_s
    before = sum(job.name in read and read[job.name] <= admitted[i] for i, job in enumerate(case.jobs))
    unread = sum(not settled(job) and job.name not in read for job in case.jobs)
    return steps, before, len(read) - before, unread


def test_the_comparison_sees_a_change_of_what_is_read_and_how_fast(tmp_path: Path) -> None:
    case = Reads(ALL, ("queue", "admission"), "gittins", 5 / 64).case(tmp_path)
    assert case.read is not None
    engine = by_engine(case)
    without = {kind: rows for kind, rows in case.read.rows.items() if kind != "text"}
    for read in (replace(case.read, encoder_s=6 / 64), replace(case.read, rows=without)):
        assert first_difference(engine, by_replayer(replace(case, read=read))) is not None


def test_the_comparison_sees_a_change_of_any_option() -> None:
    case = case_of("wait cap", ["queue", "slots", "evict"], asynchronous=True)
    engine = by_engine(case)
    assert case.leap is not None
    for changed in ({"wait_cap_steps": 9}, {"decode_slots": 5}, {"aging_rate": 0.2}, {"evict_per_s": 0.1}):
        assert first_difference(engine, by_replayer(replace(case, leap={**case.leap, **changed}))) is not None
    for setup in (replace(case.setup, blocks=30), replace(case.setup, async_scheduling=False)):
        assert first_difference(engine, by_replayer(replace(case, setup=setup))) is not None
