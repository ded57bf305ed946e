"""Random scenarios for the fake engine, and what must hold of every step when the plugin is armed."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fake_setup import BLOCK, Job, Oracle, Setup, prompt_of
from fake_worker import FakeEngine, Step

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
        "aging_rate": rng.choice([0.0, 0.01, 0.05, 1.0]),
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
    return Scenario(seed, setup, jobs, flips, revisions, gate_by_step=rng.random() < 0.7)


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
        self.rate = leap["aging_rate"]
        self.weight = leap["memory_weight"]
        self.slots = min(leap["decode_slots"] or scenario.setup.max_num_seqs, scenario.setup.max_num_seqs)

    def __call__(self, engine: FakeEngine, step: Step) -> None:
        if self.brain.armed and "slots" in self.scenario.leap["levers"]:
            self.look_at_slots(engine, step)
        else:
            self.unserved.clear()
        if self.brain.armed and "queue" in self.scenario.leap["levers"]:
            self.look_at_queue(engine, step)
        for name in step.preempted:
            self.queued_s[name] = step.now
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

    def key(self, engine: FakeEngine, step: Step, name: str, *, weight: float) -> float:
        generated = step.generated[name]
        remaining = self.brain.remaining(name, generated)
        mean = min(remaining, max(engine.jobs[name].max_tokens - generated, 1))
        held = len(engine.jobs[name].prompt) + generated + mean / 2
        return math.log(remaining) + weight * math.log(max(held, 1)) + self.rate * engine.added_s[name]

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
                for other in left:
                    if other not in blocked:
                        mine, theirs = urgency(name), urgency(other)
                        assert (mine[0], mine[1] - TOLERANCE) <= theirs, f"{name} overtook {other}"
                        self.checked["queue"] += 1


def play(scenario: Scenario) -> tuple[FakeEngine, Oracle, Watch]:
    """Runs a scenario to its end and checks the end."""
    brain = Oracle(scenario.jobs)
    engine = FakeEngine(scenario.setup, brain)
    if not scenario.gate_by_step:
        engine.force_old_gate()
    watch = Watch(scenario, brain)
    rng = random.Random(scenario.seed)
    engine.run(scenario.jobs, cost=lambda _: rng.choice([0.5, 1.0, 1.5]), watch=watch)
    engine.check_end()
    return engine, brain, watch
