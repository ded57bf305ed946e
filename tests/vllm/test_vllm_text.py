"""The text readout on vLLM's own scheduler: the order follows rows as they come, and whatever the encoder does, all is served."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm.version")

from fake_encoder import FakeEncoder, settings_of
from fake_setup import MODEL, Job, Setup, config_of, prompt_of
from fake_worker import FakeEngine, Step

from leap_rs import Readout, read_trace
from leap_rs.trace import load
from leap_rs.vllm.admission import Room
from leap_rs.vllm.online import OnlineBrain
from leap_rs.vllm.order import Ranker
from leap_rs.vllm.reading import Reading
from leap_rs.vllm.settings import BrainSettings

pytestmark = pytest.mark.vllm

WIDTH = 8
LEAP = {"mode": "armed", "aging_rate": 0, "memory_weight": 0, "order": "countdown"}


@pytest.fixture(scope="module")
def readout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text readout that knows the length from the first feature of the encoder, which is its square root."""
    rng = np.random.default_rng(0)
    rows = np.concatenate([rng.uniform(1, 30, (400, WIDTH)), rng.uniform(1, 50, (400, 3))], axis=1).astype(np.float32)
    path = tmp_path_factory.mktemp("readouts") / "x.safetensors"
    fitted = Readout.fit(
        rows, (rows[:, 0] ** 2).astype(np.uint32).clip(1), max_tokens=1024, lam=1e-3, meta={"kind": "text"}
    )
    fitted.save(path.with_name("x.text.safetensors"))
    return path


def jobs_of(lengths: Sequence[int], **changes: Any) -> list[Job]:
    """Each has a prompt of its own, which tells it apart."""
    return [Job(f"r{i}", 0.0, (100 + i, 5, 6, 7), n, 900, **changes) for i, n in enumerate(lengths)]


class Text:
    """A brain with a fitted text readout, and its encoder."""

    def __init__(self, jobs: Sequence[Job], readout: Path, tmp_path: Path) -> None:
        by_token = {job.prompt[0]: job.length for job in jobs}
        self.encoder = FakeEncoder(lambda ids: np.full(WIDTH, np.sqrt(by_token[ids[0]])))
        settings = BrainSettings(
            model="m",
            max_tokens=1024,
            mode="armed",
            order="countdown",
            readout=readout,
            metrics_dir=tmp_path / "metrics",
        )
        self.brain = OnlineBrain(settings, None, self.encoder.reading(WIDTH))

    def serve(self, jobs: Sequence[Job], watch: Callable[[FakeEngine, Step], None], **leap: Any) -> FakeEngine:
        engine = FakeEngine(Setup(max_num_seqs=1, leap={**LEAP, **leap}), self.brain)
        engine.run(jobs, watch=watch)
        engine.check_end()
        engine.scheduler.shutdown()
        assert self.brain.fault is None
        return engine


def test_the_order_follows_the_rows_that_have_come(
    readout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """New keys are given to those alone who have been read, and their residents are told to admission."""
    jobs = jobs_of([40, 200, 100, 50, 90, 30])
    text = Text(jobs, readout, tmp_path)
    ranked: list[str] = []
    learned: list[str] = []
    ranks, learn = Ranker.ranks, Room.learned
    monkeypatch.setattr(
        Ranker,
        "ranks",
        lambda self, requests: (ranked.extend(r.request_id for r in requests), ranks(self, requests))[1],
    )
    monkeypatch.setattr(Room, "learned", lambda self, name: (learned.append(name), learn(self, name))[1])

    def watch(engine: FakeEngine, _: Step) -> None:
        steps = len(engine.outcome.steps)
        if steps == 10:
            ranked.clear()
            learned.clear()
            text.encoder.deliver("r0", "r1", "r2", "r3")
            text.encoder.skip("r4")
            text.brain.settle()
        elif steps == 11:
            # The resident, and the one that was skipped, have no place that a key could change.
            assert sorted(ranked) == ["r1", "r2", "r3"]
            assert sorted(learned) == ["r0", "r1", "r2", "r3"]

    engine = text.serve(jobs, watch, levers=["queue", "admission"])
    # Who is not read goes by the mean of those that have finished.
    unknown = [name for name in engine.outcome.finish_order if name in ("r4", "r5")]
    assert [name for name in engine.outcome.finish_order if name not in unknown] == ["r0", "r3", "r2", "r1"]
    assert unknown == ["r4", "r5"]
    assert text.encoder.closed


def test_a_death_in_between_loses_nobody(readout: Path, tmp_path: Path, told: list[str]) -> None:
    jobs = jobs_of([40, 200, 100, 50, 90, 30])
    text = Text(jobs, readout, tmp_path)

    def watch(engine: FakeEngine, _: Step) -> None:
        if len(engine.outcome.steps) == 10:
            text.encoder.deliver("r2", "r3")
            text.encoder.die()
            text.brain.settle()

    engine = text.serve(jobs, watch, levers=["queue"])
    assert len(engine.outcome.reasons) == 6
    order = [name for name in engine.outcome.finish_order if name in ("r2", "r3")]
    assert order == ["r3", "r2"]
    assert [line for line in told if "encoder" in line] == [
        "leap: the text encoder mini reads no prompts: it was killed"
    ]


def test_without_the_option_nothing_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    engine = FakeEngine(Setup(leap={}))
    brain = engine.scheduler.leap._brain
    assert set(brain._learners) == {"prompt", "state"}
    assert brain.metrics.get("encoder_up") == 0
    engine.scheduler.shutdown()


@pytest.mark.parametrize("tokenizer", [True, False])
def test_an_encoder_that_cannot_be_does_not_stop_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: list[str], tokenizer: bool
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def with_tokenizer(setup: Setup) -> Any:
        made = config_of(setup)
        made.model_config.skip_tokenizer_init = not tokenizer
        return made

    monkeypatch.setattr("fake_worker.config_of", with_tokenizer)
    (tmp_path / "empty").mkdir()
    engine = FakeEngine(Setup(leap={"encoder": str(tmp_path / "empty")}))
    engine.run(jobs_of([5, 6]))
    engine.check_end()
    assert set(engine.scheduler.leap._brain._learners) == {"prompt", "state"}
    engine.scheduler.shutdown()
    (line,) = [line for line in told if "text readout" in line]
    assert ("empty: is a directory without a config.json" if tokenizer else "has no tokenizer") in line
    assert "\n" not in line


class RowEngine(FakeEngine):
    """Its hidden states can be recorded."""

    def _take(self, output: Any, result: Any) -> None:
        result.leap_rows = {name: np.ones(int(MODEL["hidden_size"]), np.float32) for name in result.leap_rows}
        super()._take(output, result)


def test_what_is_recorded_has_the_rows_of_all_that_was_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those with settled lengths, too, and those that were read after they had ended."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    rng = random.Random(0)
    jobs = [
        Job(
            f"r{i}",
            float(rng.randrange(40)),
            prompt_of(rng, rng.randrange(1, 60)),
            rng.randrange(1, 60),
            # Of one token: its length is settled.
            1 if i % 5 == 0 else 50,
            abort_s=30.0 if i % 7 == 0 else None,
        )
        for i in range(50)
    ]
    encoder = FakeEncoder(lambda ids: np.random.default_rng(ids).normal(size=WIDTH))
    monkeypatch.setattr("leap_rs.vllm.start.encoder_of", lambda *_: settings_of(WIDTH))
    monkeypatch.setattr(
        "leap_rs.vllm.start.Reading",
        lambda settings, recorder: Reading(settings, recorder, encoder),  # type: ignore[arg-type]
    )
    engine = RowEngine(Setup(leap={"record": str(tmp_path / "rec"), "record_every": 8}))
    assert encoder.settings.backlog is None

    def watch(_: FakeEngine, step: Step) -> None:
        due = [name for name in encoder.waiting if int(name[1:]) % 2 == 0]
        if int(step.now) % 3 == 0 and due:
            encoder.deliver(*due)

    outcome = engine.run(jobs, watch=watch)
    engine.check_end()
    late = set(encoder.waiting)
    assert late
    encoder.deliver()
    engine.scheduler.shutdown()
    assert encoder.forgotten == []
    frame = read_trace(tmp_path / "rec")
    expected = {job.name: job for job in jobs if outcome.tokens[job.name]}
    assert set(frame["request_id"]) == expected.keys()
    assert late & expected.keys()
    assert frame["forced"].any()
    for row in frame.iter_rows(named=True):
        wanted = encoder.row_of(list(expected[row["request_id"]].prompt)).astype(np.float32)
        np.testing.assert_array_equal(row["text_features"], wanted)
    metadata = load(tmp_path / "rec").metadata
    assert (metadata["encoder"], metadata["encoder_layer"]) == ("mini", "4")
