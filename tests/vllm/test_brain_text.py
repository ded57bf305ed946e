"""The text readout of the brain: rows that come a moment after their requests, or never."""

import logging
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from fake_encoder import FakeEncoder, settings_of
from traffic import Brains, Traffic

from leap_rs._leap import OnlineReadout, PromptFeatures, Readout, RemainingTable
from leap_rs.vllm.online import LONG, OnlineBrain
from leap_rs.vllm.reading import Reading, Row
from leap_rs.vllm.readouts import LearnSettings

LEARN = LearnSettings(warmup=64)


def reader(real: Traffic) -> FakeEncoder:
    """Its rows are real ones, of another kind: here it only matters that they say something of the length."""
    return FakeEncoder(lambda ids: real.state[ids[0]])


def serve(brain: OnlineBrain, encoder: FakeEncoder, real: Traffic, numbers: range) -> None:
    """One at a time, each read before it ends; no hidden state comes."""
    for i in numbers:
        brain.arrived(f"r{i}", [i], 1024, 0, False)
        encoder.deliver(f"r{i}")
        brain.settle()
        brain.finished(f"r{i}", real.reason(i), int(real.tokens[i]))
    brain.settle()


def brain_of(brains: Brains, real: Traffic, reading: Reading, **options: object) -> OnlineBrain:
    return brains(real, reading=reading, **{"width": None, "learn": LEARN, **options})


@pytest.mark.parametrize("table", [True, False], ids=["embeddings", "length"])
def test_it_reads_the_joined_row(real: Traffic, brains: Brains, table: bool) -> None:
    """Predictions are those of a readout that learns on rows joined here: the encoder's, then the prompt's."""
    encoder = reader(real)
    reading = encoder.reading(576)
    options = {"width": None, "learn": LEARN, "mode": "armed", "order": "survival"}
    brain = brains(real if table else None, reading=reading, **options)
    prompt = real.prompt if table else np.tile(PromptFeatures.length_features(1), (400, 1))
    rows = np.concatenate([real.state[:400].astype(np.float32), prompt[:400]], axis=1)
    text = OnlineReadout.from_zero(rows.shape[1], max_tokens=1024, warmup=64, kind="text")
    serve(brain, encoder, real, range(399))
    for i in range(399):
        text.predict(rows[i])
        text.observe(rows[i], [real.tokens[i]], [not real.stopped[i]])
    text.flush()
    brain.arrived("last", [399], 700, 0, False)
    encoder.deliver("last")
    brain.settle()
    score = float(text.score(rows[399])[0])
    expected = RemainingTable(score, text.noise(score), 700, kind="survival")
    known = brain._live["last"].known["text"]
    assert known.first == pytest.approx(score, rel=1e-4)
    for generated in (0, 100, 699):
        assert known.table.remaining(generated) == pytest.approx(expected.remaining(generated), rel=1e-3)
    assert brain.metrics.get("predictions", "text") == 400 - 64


def test_it_arms_and_orders_where_nothing_else_is_as_good(real: Traffic, brains: Brains) -> None:
    encoder = reader(real)
    brain = brain_of(brains, real, encoder.reading(576))
    assert "text" not in brain.trusted
    serve(brain, encoder, real, range(700))
    assert brain.trusted[0] == "text"
    assert brain.armed
    assert brain.metrics.get("armed_readout", "text") == 1
    assert brain.metrics.get("rank_correlation", "text") > brain.metrics.get("rank_correlation", "prompt")
    brain.arrived("new", [701], 1024, 0, False)
    assert brain.table("new") is not brain._live["new"].known.get("text")
    before = brain.remaining_key("new", 0)
    encoder.deliver("new")
    brain.settle()
    assert brain.table("new") is brain._live["new"].known["text"].table
    assert brain.remaining_key("new", 0) != before


def test_the_scheduler_is_told_of_those_alone_that_were_read(real: Traffic, brains: Brains) -> None:
    encoder = reader(real)
    brain = brain_of(brains, real, encoder.reading(576), mode="armed")
    serve(brain, encoder, real, range(200))
    brain.fresh()
    version = brain.version
    for i in range(300, 310):
        brain.arrived(f"r{i}", [i], 1024, 0, False)
    assert brain.fresh() == [], "they are asked for when they arrive"
    encoder.deliver("r301", "r305")
    encoder.skip("r302")
    brain.finished("r303", "abort", 0)
    brain.settle()
    assert brain.fresh() == ["r301", "r305"]
    assert brain.fresh() == []
    assert brain.version == version
    assert encoder.forgotten[-1] == "r303"
    assert brain.metrics.get("encoder_prompts", "skipped") == 1
    assert brain.metrics.get("encoder_prompts", "read") == 202
    assert brain.metrics.get("encoder_backlog") == 6
    assert brain.metrics.get("encoder_seconds") == pytest.approx(2.02)
    # A row whose request has just ended is nobody's.
    encoder.deliver("r304")
    brain.finished("r304", "stop", 9)
    brain.settle()
    assert brain.fault is None


def test_a_readout_that_orders_nothing_is_no_news(real: Traffic, brains: Brains) -> None:
    encoder = reader(real)
    brain = brain_of(brains, real, encoder.reading(576), learn=LearnSettings(warmup=16))
    serve(brain, encoder, real, range(60))
    assert brain.metrics.get("predictions", "text") > 30
    assert brain.trusted == ()
    assert brain.fresh() == []


def test_what_is_settled_is_not_read(real: Traffic, brains: Brains) -> None:
    encoder = reader(real)
    brain = brain_of(brains, real, encoder.reading(576))
    brain.arrived("forced", [1], 50, 0, True)
    brain.arrived("empty", [], 50, 0, False)
    brain.arrived("free", [2], 50, 0, False)
    assert list(encoder.asked) == ["free"]
    assert encoder.settings.backlog == settings_of(576).backlog


def test_a_row_may_come_before_the_brain_has_read_its_long_prompt(real: Traffic, brains: Brains) -> None:
    """As that of a prompt that came before does, while the brain's thread takes in others."""
    encoder = reader(real)
    made: list[OnlineBrain] = []

    class Meanwhile(Reading):
        def rows(self) -> Iterator[tuple[str, Row]]:
            for name, row in super().rows():
                if name == "first":
                    made[0].arrived("long", [7] * (LONG + 1), 1024, 0, False)
                    encoder.deliver("long")
                yield name, row

    made.append(brain_of(brains, real, Meanwhile(settings_of(576), client=encoder), mode="armed"))  # type: ignore[arg-type]
    made[0].arrived("first", [1], 1024, 0, False)
    encoder.deliver("first")
    made[0].settle()
    assert set(made[0]._live["long"].known) == {"prompt", "text"}


@pytest.mark.parametrize("row", [np.full(576, np.nan), np.ones(577)], ids=["nan", "width"])
def test_a_row_of_no_use_is_told_once(
    real: Traffic, brains: Brains, caplog: pytest.LogCaptureFixture, row: np.ndarray
) -> None:
    encoder = FakeEncoder(lambda _: row)
    brain = brain_of(brains, real, encoder.reading(576), mode="armed")
    serve(brain, encoder, real, range(10))
    assert brain.metrics.get("refused_rows", "text") == 10
    assert brain.metrics.get("refused_rows", "prompt") == 0
    told = [r.getMessage() for r in caplog.records if "a row of text features is not used" in r.getMessage()]
    assert len(told) == 1
    assert brain.fault is None


def test_a_dead_encoder_leaves_the_others_as_they_were(
    real: Traffic, brains: Brains, caplog: pytest.LogCaptureFixture
) -> None:
    encoder = reader(real)
    brain = brain_of(brains, real, encoder.reading(576), mode="armed")
    serve(brain, encoder, real, range(200))
    assert brain.metrics.get("encoder_up") == 1
    brain.arrived("waits", [300], 1024, 0, False)
    encoder.die()
    brain.settle()
    assert brain.metrics.get("encoder_up") == 0
    assert "the text encoder mini reads no prompts: it was killed" in caplog.text
    before = brain.metrics.get("predictions", "prompt")
    for i in range(310, 340):
        brain.arrived(f"r{i}", [i], 1024, 0, False)
        assert brain.table(f"r{i}") is brain._live[f"r{i}"].known["prompt"].table
        brain.finished(f"r{i}", real.reason(i), int(real.tokens[i]))
    brain.settle()
    assert brain.metrics.get("predictions", "prompt") == before + 30
    assert math.isfinite(brain.remaining_key("waits", 0))
    assert brain.fault is None


def test_its_state_is_kept_for_its_encoder(
    real: Traffic, brains: Brains, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = {"state_dir": tmp_path / "state"}
    encoder = reader(real)
    brain = brain_of(brains, real, encoder.reading(576), **options)
    serve(brain, encoder, real, range(700))
    trusted, seen = brain.trusted, brain._judges["text"].seen
    updates = brain._learners["text"].updates
    assert updates > 50
    brain.close()
    assert encoder.closed
    again = brain_of(brains, real, encoder.reading(576), **options)
    assert again.trusted == trusted
    assert again._judges["text"].seen == seen
    assert again._learners["text"].updates == updates
    again.close()
    for other, why in (
        ({"name": "maxi"}, "was learned with encoder mini, now it is maxi"),
        ({"layer": 5}, "was learned with encoder_layer 4, now it is 5"),
    ):
        different = brain_of(brains, real, encoder.reading(576, **other), **options)
        assert different._learners["text"].updates == 0
        assert why in caplog.text
        different.close()


def fitted(path: Path, **meta: object) -> None:
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(200, 8 + 3)).astype(np.float32)
    lengths = np.clip((12 + 4 * rows[:, 0]) ** 2, 1, 1000).astype(np.uint32)
    Readout.fit(rows, lengths, max_tokens=1024, meta={"kind": "text", **meta}).save(path)


@pytest.mark.parametrize(
    ("meta", "why"),
    [
        ({"model": "m", "encoder": "owner/Mini", "encoder_layer": 4}, None),
        ({"model": "m", "encoder": "maxi", "encoder_layer": 4}, "is for the encoder maxi, not for mini"),
        ({"model": "m", "encoder": "mini", "encoder_layer": 3}, "is for layer 3 of the encoder, not for layer 4"),
        ({"model": "other", "encoder": "mini", "encoder_layer": 4}, "is for model other, not for m"),
    ],
)
def test_a_fitted_one_lies_beside_the_state_readout(
    brains: Brains, tmp_path: Path, caplog: pytest.LogCaptureFixture, meta: dict[str, object], why: str | None
) -> None:
    fitted(tmp_path / "x.text.safetensors", **meta)
    encoder = FakeEncoder(lambda ids: np.full(8, ids[0]))
    with caplog.at_level(logging.WARNING):
        brain = brains(reading=encoder.reading(8), mode="armed", readout=tmp_path / "x.safetensors")
    brain.arrived("a", [1], 1024, 0, False)
    encoder.deliver()
    brain.settle()
    told = [
        r.getMessage() for r in caplog.records if "x.text.safetensors" in r.getMessage() and "zero" in r.getMessage()
    ]
    assert bool(told) is (why is not None)
    assert why is None or why in told[0]
    assert brain.metrics.get("predictions", "text") == (why is None)
