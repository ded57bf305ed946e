"""The brain on real rows: what it predicts, what it learns, when it arms."""

import math
from dataclasses import replace

import numpy as np
import pytest
from traffic import Brains, Traffic, stream

from leap_rs._leap import OnlineReadout, RemainingTable
from leap_rs.vllm.readouts import LearnSettings


def test_it_arms_from_zero_on_real_requests(real: Traffic, brains: Brains) -> None:
    brain = brains(real)
    assert not brain.armed
    trusted = np.array(stream(brain, real))
    first_prompt, first_state = int(trusted[:, 0].argmax()), int(trusted[:, 1].argmax())
    # The warm-up is 256 rows, and 50 predicted requests are the least that decides.
    assert 256 + 50 <= first_state < 600
    assert first_state < first_prompt < 900
    assert trusted[first_prompt:].all(), "armed once, it stays"
    assert brain.armed
    assert brain.metrics.get("armed_readout", "state") == brain.metrics.get("armed_readout", "prompt") == 1
    stopped = int(real.stopped.sum())
    assert brain.metrics.get("labels", "exact") == stopped
    assert brain.metrics.get("labels", "censored") == len(real) - stopped
    assert brain.metrics.get("rank_correlation", "state") > 0.2
    assert brain.fault is None


@pytest.mark.parametrize("seed", range(2))
def test_random_features_never_arm(real: Traffic, brains: Brains, seed: int) -> None:
    rng = np.random.default_rng(seed)
    random = replace(
        real,
        state=rng.normal(size=(len(real), 64)).astype(np.float16),
        prompt=rng.normal(size=(len(real), 32)).astype(np.float32),
    )
    brain = brains(random)
    assert not np.array(stream(brain, random)).any()
    assert brain.metrics.get("updates", "state") > 100
    assert not brain.armed


def test_the_modes(real: Traffic, brains: Brains) -> None:
    few = real.head(40)
    armed, shadow = brains(few, mode="armed"), brains(few, mode="shadow")
    assert armed.armed
    stream(shadow, few)
    assert not shadow.armed


def test_the_key_is_the_log_of_the_readouts_own_table(real: Traffic, brains: Brains) -> None:
    few = real.head(400)
    brain = brains(few, mode="armed", order="survival", learn=LearnSettings(warmup=64))
    state = OnlineReadout.from_zero(576, max_tokens=1024, warmup=64, kind="state")
    prompt = OnlineReadout.from_zero(259, max_tokens=1024, warmup=64, kind="prompt")
    for i in range(399):
        brain.arrived(f"r{i}", [i], 1024, 0, False)
        brain.state(f"r{i}", few.state[i])
        brain.settle()
        brain.finished(f"r{i}", few.reason(i), int(few.tokens[i]))
        for online, rows in ((prompt, few.prompt), (state, few.state)):
            online.predict(rows[i])
            online.observe(rows[i], [few.tokens[i]], [not few.stopped[i]])
    brain.settle()
    brain.arrived("last", [399], 700, 0, False)
    for online, rows in ((prompt, few.prompt), (state, few.state)):
        online.flush()
        if online is state:
            brain.state("last", rows[399])
        score = float(online.score(rows[399])[0])
        expected = RemainingTable(score, online.noise(score), 700, kind="survival")
        for generated in (0, 5, 100, 699, 2000):
            key = brain.remaining_key("last", generated)
            assert key == pytest.approx(math.log(expected.remaining(generated)), rel=1e-3)
        assert brain.mean_remaining("last", 50) == pytest.approx(expected.mean_remaining(50), rel=1e-2)


def test_without_an_estimate_all_are_alike(real: Traffic, brains: Brains) -> None:
    brain = brains(real.head(10), mode="armed")
    brain.arrived("a", [0], 1024, 0, False)
    brain.arrived("b", [1], 16, 0, False)
    keys = {brain.remaining_key(name, 0) for name in ("a", "b", "unheard of")}
    assert len(keys) == 1
    assert brain.mean_remaining("a", 0) == pytest.approx(1024 / 4, rel=0.3)
    brain.finished("a", "stop", 900)
    brain.settle()
    assert brain.remaining_key("b", 0) > keys.pop()


def test_a_readout_that_has_not_proven_itself_orders_nothing(real: Traffic, brains: Brains) -> None:
    brain = brains(real, learn=LearnSettings(warmup=32))
    few = real.head(120)
    stream(brain, few)
    assert brain.metrics.get("predictions", "state") > 50
    for i in (130, 131):
        brain.arrived(f"r{i}", [i], 1024, 0, False)
        brain.state(f"r{i}", real.state[i])
    assert not brain.armed
    assert brain.remaining_key("r130", 0) == brain.remaining_key("r131", 0)


@pytest.mark.parametrize("order", ["gittins", "survival", "countdown"])
def test_a_forced_length_is_known_and_teaches_nothing(real: Traffic, brains: Brains, order: str) -> None:
    brain = brains(real, mode="armed", objective="e2el", order=order, learn=LearnSettings(warmup=8))
    for i in range(300):
        brain.arrived(f"r{i}", [i], 100 + i, 0, True)
        brain.state(f"r{i}", np.full(576, np.nan, np.float32))
        assert brain.remaining_key(f"r{i}", 8) == pytest.approx(math.log(92 + i), rel=1e-5)
        brain.finished(f"r{i}", "length", 100 + i)
    brain.settle()
    assert brain.metrics.get("labels", "forced") == 300
    assert brain.metrics.get("updates", "state") == brain.metrics.get("updates", "prompt") == 0
    assert brain.metrics.get("refused_rows", "state") == 0
    # Its rows are no sample of the traffic either: mean and scale still wait for their first row.
    for i in range(8):
        brain.arrived(f"s{i}", [i], 1024, 0, False)
        brain.finished(f"s{i}", "stop", 10 + i)
    brain.settle()
    assert brain.metrics.get("updates", "prompt") == 1


def test_a_benchmark_with_forced_lengths_stays_in_shadow(real: Traffic, brains: Brains) -> None:
    brain = brains(real)
    for i in range(300):
        brain.arrived(f"r{i}", [i], 128, 0, True)
        brain.state(f"r{i}", real.state[i])
        brain.finished(f"r{i}", "length", 128)
    brain.settle()
    assert not brain.armed
    assert brain.version == 0
    assert math.isnan(brain.metrics.get("rank_correlation", "state"))


def test_four_answers_of_one_prompt_are_four_requests(real: Traffic, brains: Brains) -> None:
    brain = brains(real, learn=LearnSettings(warmup=2, batch=1), mode="armed")
    stream(brain, real.head(40))
    before = brain.metrics.get("labels", "exact") + brain.metrics.get("labels", "censored")
    names = [f"{i}_parent" for i in range(4)]
    for name in names:
        brain.arrived(name, [50], 1024, 0, False)
        brain.arrived(name, [50], 1024, 0, False)
        brain.state(name, real.state[50])
    assert len({brain.remaining_key(name, 0) for name in names}) == 1
    for name, tokens in zip(names, (30, 60, 90, 700), strict=True):
        brain.finished(name, "stop", tokens)
        brain.finished(name, "stop", tokens)
    brain.settle()
    assert brain.metrics.get("labels", "exact") + brain.metrics.get("labels", "censored") == before + 4
    aborted = [f"{i}_gone" for i in range(4)]
    for name in aborted:
        brain.arrived(name, [51], 1024, 0, False)
    for name in aborted:
        brain.finished(name, "abort", 3)
    brain.settle()
    assert brain.metrics.get("labels", "aborted") == 4
    assert len(brain._live) == 0


def test_new_weights_renew_each_live_request_once(real: Traffic, brains: Brains) -> None:
    brain = brains(real, mode="armed", order="countdown", learn=LearnSettings(warmup=16, batch=8))
    stream(brain, real.head(64))
    live = range(100, 110)
    for i in live:
        brain.arrived(f"r{i}", [i], 1024, 0, False)
        brain.state(f"r{i}", real.state[i])
    brain.settle()
    version, renewed = brain.version, brain.metrics.get("rescored_requests")
    before = [brain.remaining_key(f"r{i}", 0) for i in live]
    brain.settle()
    assert brain.version == version, "nothing has been learned since"
    for i in range(200, 208):
        brain.arrived(f"r{i}", [i], 1024, 0, False)
        brain.state(f"r{i}", real.state[i])
        brain.finished(f"r{i}", "stop", 900)
    brain.settle()
    assert brain.version > version
    # Both readouts of each of the ten.
    assert brain.metrics.get("rescored_requests") == renewed + 20
    after = [brain.remaining_key(f"r{i}", 0) for i in live]
    assert all(a != b for a, b in zip(after, before, strict=True))
    assert np.mean(after) > np.mean(before), "eight long answers were learned"


def test_the_row_is_copied(real: Traffic, brains: Brains) -> None:
    brain = brains(real, mode="armed", learn=LearnSettings(warmup=16))
    stream(brain, real.head(64))
    buffer = real.state[70].copy()
    brain.arrived("a", [70], 1024, 0, False)
    brain.state("a", buffer)
    buffer[:] = np.nan
    for i in range(200, 208):
        brain.arrived(f"r{i}", [i], 1024, 0, False)
        brain.state(f"r{i}", real.state[i])
        brain.finished(f"r{i}", "stop", 90)
    brain.finished("a", "stop", 50)
    brain.settle()
    assert brain.fault is None
    assert brain.metrics.get("refused_rows", "state") == 0


def test_a_long_prompt_is_pooled_aside_and_the_scheduler_told(brains: Brains) -> None:
    brain = brains(mode="armed", learn=LearnSettings(warmup=32, lam=1.0))
    rng = np.random.default_rng(0)
    for i in range(100):
        n = int(rng.integers(1, 400))
        brain.arrived(f"r{i}", [7] * n, 1024, 0, False)
        brain.finished(f"r{i}", "stop", 2 * n)
    brain.settle()
    neutral = brain.remaining_key("unheard of", 0)
    for name, n in (("long", 5000), ("longer", 50_000)):
        brain.arrived(name, [7] * n, 1024, 0, False)
    brain.settle()
    assert sorted(brain.fresh()) == ["long", "longer"]
    assert brain.fresh() == []
    assert brain.remaining_key("long", 0) > neutral
    assert brain.metrics.get("predictions", "prompt") >= 2


def test_without_a_table_the_length_of_the_prompt_predicts(brains: Brains) -> None:
    brain = brains(mode="armed", learn=LearnSettings(warmup=32, lam=1.0))
    rng = np.random.default_rng(0)
    for i in range(400):
        n = int(rng.integers(1, 400))
        brain.arrived(f"r{i}", [7] * n, 1024, 0, False)
        brain.finished(f"r{i}", "stop", 2 * n)
    brain.settle()
    brain.arrived("short", [7] * 20, 1024, 0, False)
    brain.arrived("long", [7] * 380, 1024, 0, False)
    assert brain.remaining_key("short", 0) < brain.remaining_key("long", 0)
    assert brain.metrics.get("captures_missed") == 0


def test_captures_are_missed_by_labels_alone(real: Traffic, brains: Brains, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither by what is no label, nor by a row that came and was of no use, nor by one that was thrown away."""
    brain = brains(real.head(40), learn=LearnSettings(warmup=16))
    rows = {"with": real.state[0], "nan": np.full(576, np.nan), "wide": np.ones(577)}
    # Name, whether lengths are forced, reason: labels are the exact and the censored ones that are not forced.
    ends = [
        *((name, False, reason) for name in ("with", "nan", "wide", "without") for reason in ("stop", "length")),
        *(("without", forced, reason) for forced in (False, True) for reason in ("abort", "error")),
        *(("without", True, reason) for reason in ("stop", "length")),
        ("with", True, "length"),
    ]
    for i, (name, forced, reason) in enumerate(ends):
        brain.arrived(f"r{i}", [i], 60, 0, forced)
        if name in rows:
            brain.state(f"r{i}", rows[name])
        brain.finished(f"r{i}", reason, 60 if reason == "length" else 20)
    brain.settle()
    assert brain.metrics.get("captures_missed") == 2
    assert brain.metrics.get("refused_rows", "state") == 4
    assert brain.metrics.get("labels", "exact") == brain.metrics.get("labels", "censored") == 4
    monkeypatch.setattr("leap_rs.vllm.online.MOST_WAITING", 0)
    brain.arrived("late", [20], 60, 0, False)
    brain.state("late", real.state[1])
    brain.finished("late", "stop", 20)
    brain.settle()
    assert brain.metrics.get("captures_missed") == 2
    assert brain.metrics.get("dropped_labels", "state") == 1


def test_it_is_what_the_scheduler_asks_for(brains: Brains) -> None:
    protocol = pytest.importorskip("leap_rs.vllm.brain").Brain
    assert isinstance(brains(), protocol)
