"""Random scenarios for the fake engine, and what must hold of every step when the plugin is armed."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from aging_model import AgingModel, boosted
from fake_setup import BLOCK, VERSION, Job, Oracle, Setup, prompt_of
from fake_worker import FakeEngine, Step

from leap_rs._leap import DEFAULT_AGING, RemainingTable

LEVERS = (
    ["queue"],
    ["slots"],
    ["queue", "slots"],
    ["queue", "slots"],
    ["queue", "slots", "evict"],
    ["slots", "evict"],
    ["queue", "evict"],
    ["evict"],
    [],
    ["admission"],
    ["admission"],
    ["queue", "admission"],
    ["queue", "admission"],
    ["slots", "admission"],
    ["queue", "slots", "admission"],
    ["queue", "slots", "evict", "admission"],
    ["evict", "admission"],
)
AGING: tuple[dict[str, float], ...] = (
    *({"aging_rate": rate} for rate in (0.0, 0.01, 0.05, 1.0)),
    *({"aging": alpha} for alpha in (0.0, 0.5, 2.0)),
    {},
)
TOLERANCE = 1e-9


@dataclass
class Scenario:
    """One engine and its requests, drawn from a seed."""

    seed: int
    setup: Setup
    jobs: list[Job]
    flips: list[int] = field(default_factory=list)
    """Steps at which the brain arms or disarms."""
    revisions: list[int] = field(default_factory=list)
    """Steps at which it changes what it predicts of everybody."""
    gate_by_step: bool = True
    tells: bool = False
    """Whether the brain says lengths, and not just an order: admission goes by them from the first request on."""
    reads: bool = False
    """Whether the brain knows a length only a while after the request has arrived, or never."""

    @property
    def leap(self) -> Mapping[str, Any]:
        return self.setup.leap or {}


def draw(seed: int) -> Scenario:
    rng = random.Random(seed)
    longest = rng.choice([40, 120, 300])
    most = rng.choice([8, 40, 100])
    seats = rng.choice([1, 2, 3, 4, 6, 8, 12])
    chunked = rng.random() < 0.8
    max_model_len = longest + most + 8
    budget = max(seats, rng.choice([16, 48, 128])) if chunked else max(max_model_len, seats)
    alone = -(-max_model_len // BLOCK) + 2
    blocks = rng.choice([alone, 2 * alone, seats * alone + 8])
    adapters = rng.random() < 0.25
    span = rng.choice([0.0, 20.0, 120.0])
    jobs = []
    for i in range(rng.randint(5, 40)):
        arrival = round(rng.random() * span, 1)
        jobs.append(
            Job(
                name=f"r{i}",
                arrival_s=arrival,
                prompt=prompt_of(rng, rng.randint(1, longest), shared=rng.choice([0, 0, 32, 64])),
                length=rng.randint(1, most),
                max_tokens=rng.randint(1, most),
                abort_s=arrival + rng.random() * 60 if rng.random() < 0.1 else None,
                grammar_s=arrival + rng.random() * 20 if rng.random() < 0.1 else None,
                lora=rng.randint(1, 4) if adapters and rng.random() < 0.7 else None,
            )
        )
    leap = {
        "mode": "armed",
        "levers": rng.choice(LEVERS),
        "decode_slots": rng.randint(1, max(1, seats * 2 // 3)) if rng.random() < 0.8 else None,
        **rng.choice(AGING),
        "order": rng.choice(["gittins", "countdown"]),
        "recompute_share": rng.choice([0.0001, 0.01, 0.5]),
        "memory_weight": rng.choice([0.0, 1.0]),
        "wait_cap_steps": rng.choice([None, None, None, 1, 4, 16]),
        "wait_cap_s": rng.choice([None, None, 5.0, 30.0]),
        "hysteresis": rng.choice([1.0, 1.0, 1.1, 2.0]),
        "evict_factor": rng.choice([1.0, 2.0, 5.0]),
        "evict_per_s": rng.choice([0.0, 0.1, 1.0, 100.0]),
    }
    setup = Setup(
        max_num_seqs=seats,
        max_num_batched_tokens=budget,
        max_model_len=max_model_len,
        blocks=blocks,
        async_scheduling=rng.random() < 0.5,
        chunked=chunked,
        prefix_caching=rng.random() < 0.6,
        long_prefill_token_threshold=rng.choice([0, 0, 8]) if chunked else 0,
        reserve_full_isl=rng.random() < 0.7,
        max_loras=rng.randint(1, 2) if adapters else None,
        leap=leap,
    )
    flips = sorted(rng.sample(range(1, 200), rng.randint(0, 4))) if rng.random() < 0.2 else []
    revisions = sorted(rng.sample(range(1, 200), 5)) if rng.random() < 0.3 else []
    # With adapters, a connector and an asynchronous engine stock vLLM itself may schedule more than max_loras, and stops.
    if "evict" not in leap["levers"] and not adapters and rng.random() < 0.3:
        setup = replace(setup, remote_kv_s=rng.choice([0.5, 5.0, 30.0]))
        # In 0.20 stock vLLM itself hangs once loads hold all blocks and one who needs some is ahead of them.
        if VERSION < (0, 21):
            setup = replace(setup, blocks=blocks + len(jobs) * alone)
        jobs = [
            job if job.abort_s is not None or rng.random() < 0.5 else replace(job, name=f"remote {job.name}")
            for job in jobs
        ]
    old, tells, reads = rng.random() < 0.7, rng.random() < 0.5, rng.random() < 0.4
    return Scenario(seed, setup, jobs, flips, revisions, gate_by_step=old, tells=tells, reads=reads)


class Teller(Oracle):
    """Knows the lengths, and tells admission."""

    def table(self, request_id: str) -> RemainingTable:
        return RemainingTable.of_length(self.lengths[request_id])


class Reader(Oracle):
    """Takes all for equally long until their texts have been read, of which it tells by name."""

    def __init__(self, jobs: Iterable[Job] = (), *, armed: bool = True) -> None:
        super().__init__(jobs, armed=armed)
        self.unread = self.lengths
        self.lengths = dict.fromkeys(self.unread, 20)
        self.told: list[str] = []

    def read(self, name: str) -> None:
        self.lengths[name] = self.unread.pop(name)
        self.told.append(name)

    def fresh(self) -> list[str]:
        told, self.told = self.told, []
        return told


class TellingReader(Reader, Teller):
    """Does both."""


class Watch:
    """Looks at every step of an armed engine, with keys made here from the formula and the oracle's lengths."""

    def __init__(self, scenario: Scenario, brain: Oracle) -> None:
        self.scenario = scenario
        self.brain = brain
        self.rng = random.Random(scenario.seed)
        self.queued_s: dict[str, float] = {}
        self.unserved: Counter[str] = Counter()
        self.steps = 0
        self.checked: Counter[str] = Counter()
        leap = scenario.leap
        self.rate: float | None = leap.get("aging_rate")
        self.clock = AgingModel(leap.get("aging", DEFAULT_AGING))
        # What the clock showed at each arrival, and the mean length by then.
        self.arrivals: dict[str, tuple[float, float]] = {}
        self.ended: set[str] = set()
        self.weight = leap["memory_weight"]
        self.slots = min(leap["decode_slots"] or scenario.setup.max_num_seqs, scenario.setup.max_num_seqs)

    def __call__(self, engine: FakeEngine, step: Step) -> None:
        for name, added_s in engine.added_s.items():
            if name not in self.arrivals:
                self.arrivals[name] = self.clock.at(added_s), self.clock.mean_tokens
        if self.brain.armed and "slots" in self.scenario.leap["levers"]:
            self.look_at_slots(engine, step)
        else:
            self.unserved.clear()
        if self.brain.armed and "queue" in self.scenario.leap["levers"]:
            self.look_at_queue(engine, step)
        for name in step.preempted:
            self.queued_s[name] = step.now
        self.tick(engine, step)
        # What the brain now does differently the next step shows.
        self.steps += 1
        if self.steps in self.scenario.flips:
            self.brain.armed = not self.brain.armed
        if self.steps in self.scenario.revisions:
            self.brain.version += 1
            self.brain.lengths = {
                name: max(1, round(length * self.rng.choice([0.5, 1, 2])))
                for name, length in self.brain.lengths.items()
            }
        if isinstance(self.brain, Reader):
            for name in [name for name in engine.scheduler.requests if name in self.brain.unread]:
                if self.rng.random() < 0.1:
                    self.brain.read(name)
                    self.checked["read"] += 1

    def tick(self, engine: FakeEngine, step: Step) -> None:
        """What the clock is told of a step: who ended before it, and who waits after it."""
        outcome = engine.outcome
        ended = [name for name in outcome.reasons if name not in self.ended]
        self.ended.update(ended)
        lengths = [len(outcome.tokens[name]) for name in ended if outcome.reasons[name] in ("stop", "length")]
        waiting = len(engine.queued()) + engine.scheduler.leap_slots.gated_requests
        self.clock.step(step.now, waiting, len(ended), lengths)

    def key(self, engine: FakeEngine, step: Step, name: str, *, weight: float) -> float:
        generated = step.generated[name]
        remaining = self.brain.remaining(name, generated)
        mean = min(remaining, max(engine.jobs[name].max_tokens - generated, 1))
        held = len(engine.jobs[name].prompt) + generated + mean / 2
        aged, mean_tokens = self.arrivals[name]
        if self.rate is not None:
            aged = self.rate * engine.added_s[name]
        else:
            remaining = boosted(remaining, mean_tokens, squared=self.scenario.leap["order"] == "gittins")
        return math.log(remaining) + weight * math.log(max(held, 1)) + aged

    def look_at_slots(self, engine: FakeEngine, step: Step) -> None:
        assert len(step.decoding) <= self.slots
        cap, leap = self.scenario.leap["wait_cap_steps"], self.scenario.leap
        waited = Counter({name: self.unserved[name] + 1 for name in step.gated if name not in step.preempted})
        if cap is not None:
            most = cap + -(-self.scenario.setup.max_num_seqs // self.slots)
            for name, steps in waited.items():
                assert steps <= most, f"{name} has not decoded for {steps} steps, bound {most}"
        self.unserved = waited
        plain = cap is None and leap["hysteresis"] == 1 and self.scenario.setup.max_loras is None
        if plain and not step.preempted and step.gated and step.decoding:
            worst = max(self.key(engine, step, name, weight=0) for name in step.decoding)
            best = min(self.key(engine, step, name, weight=0) for name in step.gated)
            assert worst <= best + TOLERANCE
            self.checked["slots"] += 1

    def look_at_queue(self, engine: FakeEngine, step: Step) -> None:
        """Everybody admitted was first, by key or by its wait, among those who could be."""
        left = [name for name in step.waiting if name in engine.scheduler.requests]
        blocked = {
            name
            for name in left
            if engine.jobs[name].lora is not None
            or ((grammar_s := engine.jobs[name].grammar_s) is not None and grammar_s > step.now)
            or name.startswith("remote")
            or getattr(engine.scheduler.requests[name], "num_stale_output_tokens", 0) > 0
        }
        cap = self.scenario.leap["wait_cap_s"]

        def urgency(name: str) -> tuple[bool, float]:
            since = self.queued_s.get(name, engine.added_s[name])
            if cap is not None and step.now - since >= cap:
                return False, since
            return True, self.key(engine, step, name, weight=self.weight)

        for name in step.admitted:
            if name in left:
                left.remove(name)
                # Who holds blocks for remote KV comes in when that is there.
                for other in left if not name.startswith("remote") else ():
                    if other not in blocked:
                        mine, theirs = urgency(name), urgency(other)
                        assert (mine[0], mine[1] - TOLERANCE) <= theirs, f"{name} overtook {other}"
                        self.checked["queue"] += 1


def play(scenario: Scenario) -> tuple[FakeEngine, Oracle, Watch]:
    """Runs a scenario to its end and checks the end."""
    kinds = ((Oracle, Teller), (Reader, TellingReader))
    brain: Oracle = kinds[scenario.reads][scenario.tells](scenario.jobs)
    engine = FakeEngine(scenario.setup, brain)
    if not scenario.gate_by_step:
        engine.force_old_gate()
    watch = Watch(scenario, brain)
    rng = random.Random(scenario.seed)
    engine.run(scenario.jobs, cost=lambda _: rng.choice([0.5, 1.0, 1.5]), watch=watch)
    engine.check_end()
    return engine, brain, watch
