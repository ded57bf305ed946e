"""Online readouts against numpy."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leap_rs import _leap


def made(n: int, d: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    z = rng.normal(size=(n, d))
    y = 20 + z @ rng.normal(0, 3 / np.sqrt(d), d) + rng.normal(0, 3, n)
    features = (z * rng.uniform(0.5, 4, d) + rng.normal(0, 10, d)).astype(np.float32)
    return features, np.clip(np.round(np.clip(y, 1, 60) ** 2), 1, 4096)


def standardised(readout: _leap.Readout, features: np.ndarray) -> np.ndarray:
    u = (features.astype(np.float64) - readout.mean.astype(np.float64)) / readout.scale.astype(np.float64)
    return np.column_stack([u, np.ones(len(u))])


@settings(max_examples=20, deadline=None)
@given(
    st.integers(1, 30),
    st.integers(1, 80),
    st.integers(1, 12),
    st.floats(1.0, 1e3),
    st.sampled_from(["float32", "float64"]),
    st.booleans(),
)
def test_updates_equal_one_solve(d: int, n: int, batch: int, lam: float, dtype: str, anchored: bool) -> None:
    features, lengths = made(100 + n, d, d)
    fitted = _leap.Readout.fit(features[:100], lengths[:100], max_tokens=4096, lam=lam)
    readout = fitted if anchored else _leap.OnlineReadout(fitted).readout()
    online = _leap.OnlineReadout(readout, batch=batch, dtype=dtype)
    assert online.anchored == anchored
    assert online.observe(features[100:], lengths[100:]) == n // batch
    assert online.waiting == n % batch
    online.flush()

    old, new = standardised(fitted, features[:100]), standardised(fitted, features[100:])
    theta0 = np.append(fitted.weight, fitted.bias).astype(np.float64)
    penalty = lam * np.eye(d + 1)
    if anchored:
        penalty[-1, -1] = 0
        penalty += old.T @ old
    information = penalty + new.T @ new
    expected = np.linalg.solve(information, penalty @ theta0 + new.T @ np.sqrt(lengths[100:]))
    got = online.readout()
    theta = np.append(got.weight, got.bias)
    assert np.linalg.norm(theta - expected) < (1e-4 if dtype == "float32" else 1e-6) * np.linalg.norm(expected)


def test_refused_rows_change_nothing(tmp_path: Path) -> None:
    features, lengths = made(120, 6, 1)
    online = _leap.OnlineReadout.from_zero(6, max_tokens=4096, warmup=30, batch=8)
    online.predict(features[:50])
    online.observe(features[:60], lengths[:60])
    online.save(tmp_path / "before")
    bad = features[60:70].copy()
    bad[9, 2] = np.inf
    with pytest.raises(_leap.ReadoutError, match="row 9, column 2"):
        online.observe(bad, lengths[60:70])
    with pytest.raises(_leap.ReadoutError, match="row 9, column 2"):
        online.predict(bad)
    for wrong in (0.0, -3.0, 1.5, np.nan):
        with pytest.raises(_leap.ReadoutError, match="row 1"):
            online.observe(features[60:62], [5.0, wrong])
    with pytest.raises(_leap.ReadoutError, match="lengths"):
        online.observe(features[60:62], [5.0])
    with pytest.raises(_leap.ReadoutError, match="censoring"):
        online.observe(features[60:62], [5, 6], [True])
    online.save(tmp_path / "after")
    assert (tmp_path / "before").read_bytes() == (tmp_path / "after").read_bytes()


def test_from_zero_learns(tmp_path: Path) -> None:
    features, lengths = made(1000, 20, 5)
    online = _leap.OnlineReadout.from_zero(20, max_tokens=4096, warmup=50, lam=10.0)
    assert not online.known
    predicted = []
    for row, length in zip(features, lengths, strict=True):
        predicted.append(online.predict(row)[0])
        online.observe(row, [length])
    assert online.known
    error = np.abs(np.sqrt(predicted) - np.sqrt(lengths))
    constant = np.abs(np.sqrt(lengths[500:]) - np.sqrt(lengths).mean())
    assert error[500:].mean() < 0.85 * constant.mean()
    assert 2 < online.noise(20.0) < 5
    online.save(tmp_path / "state")
    again = _leap.OnlineReadout.load(tmp_path / "state")
    np.testing.assert_array_equal(again.score(features), online.score(features))


def test_censored_labels_push_up_and_never_down() -> None:
    features, lengths = made(300, 5, 6)
    readout = _leap.Readout.fit(features, lengths, max_tokens=4096, lam=5.0)
    row = features[:1]
    score = float(readout.score(row)[0])
    for limit in (1, int(score**2), 3000):
        online = _leap.OnlineReadout(readout, batch=1, dtype="float64")
        online.observe(row, [limit], [True])
        assert online.score(row)[0] >= score - 1e-6
        exact = _leap.OnlineReadout(readout, batch=1, dtype="float64")
        exact.observe(row, [limit])
        assert online.score(row)[0] > exact.score(row)[0] - 1e-6


def test_learner_predicts_what_it_learned(tmp_path: Path) -> None:
    features, lengths = made(400, 10, 7)
    readout = _leap.Readout.fit(features[:100], lengths[:100], max_tokens=4096, lam=5.0)
    readout.save(tmp_path / "r.safetensors")
    loaded = _leap.Readout.load(tmp_path / "r.safetensors")
    online = _leap.OnlineReadout(loaded)
    assert online.anchored
    learner = _leap.Learner(online)
    assert learner.observe(features[100:], lengths[100:]) == 300
    learner.flush()
    online.observe(features[100:], lengths[100:])
    online.flush()
    np.testing.assert_array_equal(learner.predict(features), online.predict(features))
    assert learner.updates == online.updates == 38
    assert learner.noise(20.0) == online.noise(20.0)
    assert learner.dropped == 0
    assert learner.fault is None


def test_tables_carry_the_learners_own_score_and_noise() -> None:
    features, lengths = made(400, 10, 9)
    learner = _leap.Learner(_leap.OnlineReadout.from_zero(10, max_tokens=4096, warmup=100))
    caps = np.arange(1, 101) * 10
    before = learner.tables(features[:100], caps, kind="survival")
    assert [table.cap for table in before] == caps.tolist()
    assert not any(table.known for table in before)
    assert {table.score for table in before} == {32.0}, "a quarter of the budget before anything has finished"
    learner.observe(features, lengths)
    learner.flush()
    after = learner.tables(features[:100], np.full(100, 500), kind="survival")
    assert all(table.known for table in after)
    np.testing.assert_array_equal([table.score for table in after], learner.score(features[:100]))
    for table in after[:10]:
        expected = _leap.remaining(table.score, learner.noise(table.score), 40, 500)[0]
        assert table.remaining(40) == pytest.approx(expected, rel=1e-6)
    with pytest.raises(_leap.ReadoutError, match="100 rows of features, 2 caps"):
        learner.tables(features[:100], [5, 5])
    bad = features[:1].copy()
    bad[0, 3] = np.nan
    with pytest.raises(_leap.ReadoutError, match="column 3"):
        learner.tables(bad, [5])


def test_rows_that_were_seen_do_not_end_the_warm_up() -> None:
    features, lengths = made(100, 6, 10)
    learner = _leap.Learner(_leap.OnlineReadout.from_zero(6, max_tokens=4096, warmup=20))
    for row in features:
        learner.tables(row, [100], seen=True)
    learner.observe(features[:16], lengths[:16])
    learner.flush()
    assert learner.updates == 0
    learner.tables(features[:20], np.full(20, 100))
    learner.flush()
    assert learner.updates == 2
