"""The same requests through the replayer and through vLLM's real scheduler: who is scheduled in each step of either.

A step takes 1/64 s in both, so that times are exact and arrivals fall between the same steps. With levers requests arrive
when a step ends: aging counts from the arrival in the replayer, in the plugin from when vLLM's loop hands the request over.
An asynchronous engine does not know that an answer ends by itself and lets it decode once more; the replayer has no such
step, so there all answers end at their limit.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from fake_encoder import TimedEncoder
from fake_setup import BLOCK, Job, Oracle, Setup, prompt_of
from fake_worker import FakeEngine
from traffic import Pooled

from leap_rs import _leap
from leap_rs._leap import DEFAULT_AGING
from leap_rs.replay.readouts import sibling
from leap_rs.vllm.known import Live
from leap_rs.vllm.online import OnlineBrain
from leap_rs.vllm.options import LeapOptions
from leap_rs.vllm.reading import Reading
from leap_rs.vllm.readouts import Kind
from leap_rs.vllm.settings import BrainSettings

STEP_S = 1 / 64
FREE = ("per_decode_seq_s", "per_kv_token_s", "per_token_over_free_s", "free_tokens", "per_prefill_pair_s")
COST = {"step_s": STEP_S, "per_kv_token_with_prefill_s": 0.0, **dict.fromkeys(FREE, 0.0)}


@dataclass(frozen=True)
class Logged:
    """One step: when it was composed, the tokens of each request, and who was preempted since the step before."""

    composed_s: float
    scheduled: dict[int, int]
    preempted: list[int]


COLUMNS: Mapping[Kind, str] = {"prompt": "prompt_features", "text": "text_features", "state": "features"}


@dataclass(frozen=True)
class Read:
    """Readouts, and the features that they read."""

    readout: Path
    """That of the states; the others lie beside it."""
    rows: Mapping[Kind, npt.NDArray[np.float32]]
    """A row a request, in the order of arrival; the text readout reads those of the prompt too."""
    encoder_s: float = 0.0
    """What the text encoder takes for a prompt."""

    def file(self, kind: Kind) -> Path:
        return self.readout if kind == "state" else sibling(self.readout, kind)


@dataclass(frozen=True)
class Case:
    """An engine and its requests; `leap` None is stock vLLM and the replayer's fcfs."""

    setup: Setup
    jobs: Sequence[Job]
    scores: Mapping[str, float] = field(default_factory=dict)
    """Predicted length of each request."""
    leap: Mapping[str, Any] | None = None
    """Options of the plugin."""
    read: Read | None = None
    """Where lengths are predicted by readouts."""

    @property
    def policy(self) -> str:
        """The replayer's name for the options of the plugin."""
        if self.leap is None:
            return "fcfs"
        options = {"hysteresis": LeapOptions().hysteresis, **self.leap, "levers": "+".join(self.leap["levers"])}
        if "aging_rate" not in options:
            options.setdefault("aging", DEFAULT_AGING)
        slots = options.pop("decode_slots", None)
        assert slots is None or slots <= self.setup.max_num_seqs
        name = "score:given:"
        if self.read is not None:
            name = f"leap:rls=off,readouts={'+'.join(self.read.rows)},encoder_s={self.read.encoder_s},"
        return name + ",".join(f"{key}={value}" for key, value in options.items())


class Scores(Oracle):
    """A brain that predicts what it was given."""

    def __init__(self, case: Case) -> None:
        super().__init__(case.jobs)
        self.scores = case.scores

    def remaining(self, request_id: str, generated: int) -> float:
        return max(self.scores[request_id] - generated, 1.0)


class Readouts(OnlineBrain):
    """The plugin's own brain, but nothing that has finished teaches it: the weights of replayer and plugin stay equal."""

    def __init__(self, case: Case, read: Read) -> None:
        numbers = {job.prompt: i for i, job in enumerate(case.jobs)}
        self.encoder: TimedEncoder | None = None
        reading = Reading()
        if "text" in read.rows:
            text = read.rows["text"]
            self.encoder = TimedEncoder(lambda ids: text[numbers[tuple(ids)]], read.encoder_s)
            reading = self.encoder.reading(text.shape[1])
        state = read.rows.get("state")
        settings = BrainSettings(
            model="m",
            width=None if state is None else state.shape[1],
            mode="armed",
            order=(case.leap or {}).get("order", "gittins"),
            readout=read.readout,
            metrics_dir=read.readout.parent / "metrics",
        )
        super().__init__(settings, Pooled(read.rows["prompt"], numbers), reading)  # type: ignore[arg-type]

    def _learn(self, live: Live, reason: str, output_tokens: int) -> None: ...


class ReadEngine(FakeEngine):
    """Its states are those of the case, and its brain knows at each step what has come in by then."""

    def __init__(self, case: Case, setup: Setup, brain: Readouts, states: npt.NDArray[np.float32] | None) -> None:
        super().__init__(setup, brain)
        self.brain = brain
        self.states = {} if states is None else dict(zip((job.name for job in case.jobs), states, strict=True))
        if brain.encoder is not None:
            brain.encoder.now = lambda: self.now

    def _compose(self) -> Any:
        if self.brain.encoder is not None:
            self.brain.encoder.catch_up()
            self.brain.settle()
        return super()._compose()

    def _take(self, output: Any, result: Any) -> None:
        result.leap_rows = {name: self.states[name] for name in result.leap_rows if name in self.states}
        super()._take(output, result)


def by_engine(case: Case, brain: Readouts | None = None) -> list[Logged]:
    """The steps of vLLM's scheduler; `brain` where the caller wants to ask it afterwards."""
    leap = None if case.leap is None else {"mode": "armed", **case.leap}
    if case.read is None:
        if leap is not None:
            # Given lengths are in tokens, as the replayer takes them, and not in the unit of the Gittins order.
            leap["order"] = "countdown"
        engine = FakeEngine(replace(case.setup, leap=leap), Scores(case))
    else:
        brain = Readouts(case, case.read) if brain is None else brain
        engine = ReadEngine(case, replace(case.setup, leap=leap), brain, case.read.rows.get("state"))
    outcome = engine.run(case.jobs, cost=lambda step: STEP_S if step.scheduled else 0.0, most_steps=200_000)
    engine.check_end()
    engine.scheduler.shutdown()
    number = {job.name: i for i, job in enumerate(case.jobs)}
    steps, preempted = [], []
    for step in outcome.steps:
        preempted += [number[name] for name in step.preempted]
        if step.scheduled:
            scheduled = {number[name]: tokens for name, tokens in step.scheduled.items()}
            steps.append(Logged(step.now, scheduled, sorted(preempted)))
            preempted = []
    return steps


def by_replayer(case: Case) -> list[Logged]:
    """The steps of the replayer."""
    setup = case.setup
    engine = {
        "cost": COST,
        "kv_tokens": (setup.blocks - 1) * BLOCK,
        "block_size": BLOCK,
        "max_num_seqs": setup.max_num_seqs,
        "max_num_batched_tokens": setup.max_num_batched_tokens,
        "async_scheduling": setup.async_scheduling,
        "enable_chunked_prefill": setup.chunked,
        "enable_prefix_caching": setup.prefix_caching,
        "decode_slots": (case.leap or {}).get("decode_slots"),
        "reserve_full_prompt": setup.reserve_full_isl,
        "watermark": 0.0,
    }
    blocks = [_hashes(job.prompt) for job in case.jobs]
    columns = {
        "arrival_s": np.array([job.arrival_s for job in case.jobs]),
        "prompt_tokens": np.array([len(job.prompt) for job in case.jobs], np.uint32),
        "output_tokens": np.array([len(job.output) for job in case.jobs], np.uint32),
        "max_tokens": np.array([job.max_tokens for job in case.jobs], np.uint32),
        "prefix_block_offsets": np.cumsum([0, *(len(hashes) for hashes in blocks)]),
        "prefix_block_hashes": np.array([h for hashes in blocks for h in hashes], np.uint64),
        "prefix_block_size": BLOCK,
        "forced": np.array([job.ignore_eos for job in case.jobs]),
        "scores": {"given": np.array([case.scores.get(job.name, 1.0) for job in case.jobs], np.float32)},
    }
    readouts = {}
    if case.read is not None:
        columns |= {COLUMNS[kind]: rows for kind, rows in case.read.rows.items()}
        readouts = {"readouts": {kind: str(case.read.file(kind)) for kind in case.read.rows}}
    log = _leap.simulate(columns, json.dumps(engine), policy=case.policy, steps=True, **readouts)
    steps = []
    for i, composed_s in enumerate(log["step_s"]):
        part = slice(log["step_ends"][i - 1] if i else 0, log["step_ends"][i])
        gone = slice(log["step_preempted_ends"][i - 1] if i else 0, log["step_preempted_ends"][i])
        scheduled = dict(zip(log["step_requests"][part].tolist(), log["step_tokens"][part].tolist(), strict=True))
        steps.append(Logged(float(composed_s), scheduled, sorted(log["step_preempted"][gone].tolist())))
    return steps


def _hashes(prompt: Sequence[int]) -> list[int]:
    """A number for each full block of a prompt, that says what stands in it and before it."""
    return [hash(tuple(prompt[: end + BLOCK])) & (2**63 - 1) for end in range(0, len(prompt) - BLOCK + 1, BLOCK)]


def first_difference(engine: Sequence[Logged], replayer: Sequence[Logged]) -> str | None:
    """What differs first, None if nothing does."""
    for i, (real, simulated) in enumerate(zip(engine, replayer, strict=False)):
        if real != simulated:
            return f"step {i} of {len(engine)}: vLLM {real}, replayer {simulated}"
    if len(engine) != len(replayer):
        return f"vLLM has {len(engine)} steps, the replayer {len(replayer)}"
    return None


def draw_jobs(
    rng: random.Random,
    count: int,
    *,
    rate: float,
    prompts: tuple[int, int] = (1, 120),
    outputs: tuple[int, int] = (1, 80),
    families: int = 0,
    on_grid: bool = True,
    natural: bool = False,
) -> list[Job]:
    """Requests at `rate` a second on average, in order of arrival, some in bursts.

    With `families` many prompts share a long beginning. `natural`: half of the answers end by themselves.
    """
    now, jobs = 0.0, []
    for i in range(count):
        if rng.random() > 0.2:
            now += rng.expovariate(0.8 * rate)
        at = round(now * 64) / 64 if on_grid else round(now * 4096) / 4096
        prompt = prompt_of(rng, rng.randint(*prompts))
        if families and rng.random() < 0.7:
            beginning = tuple(random.Random(f"family {rng.randrange(families)}").choices(range(3, 1000), k=96))
            prompt = beginning[: rng.randint(16, 96)] + prompt
        # Prompts of their own, so that no two answers are the same from their first block on.
        prompt += (3 + i % 997, 3 + i // 997)
        output = min(rng.randint(*outputs), rng.randint(*outputs))
        natural_end = natural and rng.random() < 0.5
        jobs.append(
            Job(
                name=f"r{i:05d}",
                arrival_s=at,
                prompt=prompt,
                length=output if natural_end else output + 1,
                max_tokens=output + rng.randint(0, 20) if natural_end else output,
            )
        )
    return jobs


def draw_scores(rng: random.Random, jobs: Sequence[Job], *, error: float = 0.5) -> dict[str, float]:
    """Predicted lengths, wrong by a factor of about e**error, as the trace keeps them."""
    return {
        job.name: float(np.float32(min(max(len(job.output) * np.exp(rng.gauss(0, error)), 1.0), job.max_tokens)))
        for job in jobs
    }


def draw_case(seed: int, requests: int) -> Case:
    """A random engine with random requests, and levers with random options or none."""
    rng = random.Random(seed)
    levers = rng.choice(
        [
            None,
            ["queue"],
            ["slots"],
            ["evict"],
            ["queue", "slots"],
            ["queue", "evict"],
            ["slots", "evict"],
            ["queue", "slots", "evict"],
            ["admission"],
            ["queue", "admission"],
            ["queue", "slots", "admission"],
            ["queue", "slots", "evict", "admission"],
        ]
    )
    families = rng.choice([0, 3])
    chunked = rng.random() < 0.8
    setup = Setup(
        max_num_seqs=rng.choice([4, 8, 16]),
        max_num_batched_tokens=rng.choice([64, 512]) if chunked else 512,
        max_model_len=400,
        blocks=rng.choice([40, 60, 120, 400]),
        async_scheduling=rng.random() < 0.5,
        chunked=chunked,
        prefix_caching=families > 0 or rng.random() < 0.3,
        reserve_full_isl=rng.random() < 0.7,
    )
    jobs = draw_jobs(rng, requests, rate=rng.choice([6, 12, 20]), families=families, natural=not setup.async_scheduling)
    leap = None
    if levers is not None:
        leap = {
            "levers": levers,
            **({"decode_slots": min(rng.choice([2, 3, 5, 16]), setup.max_num_seqs)} if "slots" in levers else {}),
            **rng.choice([{"aging_rate": 0}, {"aging_rate": 0.05}, {"aging": 2}, {"aging": 0.5}]),
            "memory_weight": rng.choice([0, 1]),
            "hysteresis": rng.choice([1, 1.1]),
            "evict_factor": rng.choice([1, 2]),
            "evict_per_s": rng.choice([1, 100]),
            **({"wait_cap_steps": rng.choice([1, 8, 32])} if rng.random() < 0.4 else {}),
            **({"wait_cap_s": rng.choice([0.25, 2.0])} if "queue" in levers and rng.random() < 0.4 else {}),
        }
    return Case(setup, jobs, draw_scores(rng, jobs), leap)
