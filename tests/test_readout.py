"""Readouts against numpy."""

import json
import struct
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leap_rs import _leap


def made(n: int, d: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    z = rng.normal(size=(n, d)) @ (np.eye(d) + 0.3 * rng.normal(size=(d, d)) / np.sqrt(d))
    features = (z * rng.uniform(0.5, 4, d) + rng.normal(0, 10, d)).astype(np.float32)
    y = 20 + z @ rng.normal(0, 3 / np.sqrt(d), d) + rng.normal(0, 3, n)
    return features, np.clip(np.round(np.clip(y, 1, 60) ** 2), 1, 4096)


def ridge(features: np.ndarray, y: np.ndarray, lam: float) -> tuple[np.ndarray, float]:
    """Weights of standardised features and the bias; the bias is not penalised."""
    x = features.astype(np.float64)
    u = np.column_stack([(x - x.mean(0)) / x.std(0), np.ones(len(x))])
    penalty = lam * np.eye(u.shape[1])
    penalty[-1, -1] = 0
    theta = np.linalg.solve(u.T @ u + penalty, u.T @ y)
    return theta[:-1], float(theta[-1])


@settings(max_examples=25, deadline=None)
@given(
    st.integers(10, 120),
    st.integers(1, 40),
    st.floats(0.5, 1e4),
    st.sampled_from(["sqrt", "log", "raw"]),
    st.integers(0, 9),
)
def test_fit_and_prediction_match_numpy(n: int, d: int, lam: float, target: str, seed: int) -> None:
    features, lengths = made(n, d, seed)
    forward = {"sqrt": np.sqrt, "log": np.log, "raw": np.asarray}[target]
    backward = {"sqrt": np.square, "log": np.exp, "raw": np.asarray}[target]
    readout = _leap.Readout.fit(features, lengths, max_tokens=4096, target=target, lam=lam)
    weight, bias = ridge(features, forward(lengths), lam)
    size = np.linalg.norm(weight) + 1e-12
    assert np.linalg.norm(readout.weight - weight) < 1e-4 * size
    assert readout.bias == pytest.approx(bias, rel=1e-5)
    x = features.astype(np.float64)
    expected = np.clip((x - x.mean(0)) / x.std(0) @ weight + bias, forward(1.0), forward(4096.0))
    np.testing.assert_allclose(readout.score(features), expected, rtol=1e-4, atol=1e-3)
    np.testing.assert_allclose(readout.predict(features), np.clip(backward(expected), 1, 4096), rtol=2e-3, atol=1e-2)
    assert (readout.d, readout.max_tokens, readout.target, readout.lam) == (d, 4096, target, lam)


def test_moments_in_parts_give_the_same_fit() -> None:
    features, lengths = made(300, 20)
    moments = _leap.Moments(20, max_tokens=4096, lam=10.0)
    for part in np.array_split(np.arange(300), 7):
        moments.add(features[part], lengths[part])
    readout = moments.finish()
    weight, bias = ridge(features, np.sqrt(lengths), 10.0)
    np.testing.assert_allclose(readout.weight, weight, rtol=1e-4, atol=1e-6)
    assert readout.bias == pytest.approx(bias, rel=1e-5)
    with pytest.raises(_leap.ConfigError, match="finished"):
        moments.finish()


def test_lam_is_chosen_where_held_out_rows_are_predicted_best() -> None:
    features, lengths = made(400, 30, 3)
    fresh, truth = features[200:], np.sqrt(lengths[200:])
    features, lengths = features[:200], lengths[:200]
    chosen = _leap.Readout.fit(features, lengths, max_tokens=4096)
    assert 0.1 <= chosen.lam <= 1e6

    def error(lam: float) -> float:
        readout = _leap.Readout.fit(features, lengths, max_tokens=4096, lam=lam)
        return float(np.mean((readout.score(fresh) - truth) ** 2))

    assert error(chosen.lam) < 1.02 * min(error(lam) for lam in 10.0 ** np.arange(-1, 7))
    assert 0 < chosen.meta["train_spearman"] < 1
    assert chosen.noise(20.0) > 0


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, ml_dtypes.bfloat16])
def test_every_number_format(dtype: type) -> None:
    features, lengths = made(100, 33)
    readout = _leap.Readout.fit(features, lengths, max_tokens=4096, lam=5.0)
    rows = features.astype(dtype)
    x = rows.astype(np.float64)
    mean, scale, weight = (v.astype(np.float64) for v in (readout.mean, readout.scale, readout.weight))
    expected = np.clip((x - mean) / scale @ weight + readout.bias, 1, 64)
    np.testing.assert_allclose(readout.score(rows), expected, rtol=2e-5)
    np.testing.assert_array_equal(readout.score(rows[3]), readout.score(rows)[3:4])
    np.testing.assert_array_equal(readout.score(np.asfortranarray(rows)), readout.score(rows))
    if dtype is ml_dtypes.bfloat16:
        np.testing.assert_array_equal(readout.score(rows.view(np.uint16)), readout.score(rows))


def test_bad_features_are_named() -> None:
    features, lengths = made(50, 8)
    readout = _leap.Readout.fit(features, lengths, max_tokens=4096, lam=5.0)
    bad = features.copy()
    bad[17, 3] = np.nan
    with pytest.raises(_leap.ReadoutError, match="row 17, column 3"):
        readout.predict(bad)
    with pytest.raises(_leap.ReadoutError, match="row 17, column 3"):
        _leap.Readout.fit(bad, lengths, max_tokens=4096)
    with pytest.raises(ValueError, match="7 features"):
        readout.predict(features[:, :7])
    with pytest.raises(_leap.ReadoutError, match="int64"):
        readout.predict(features.astype(np.int64))
    with pytest.raises(_leap.ReadoutError, match="shape"):
        readout.predict(features[None])
    with pytest.raises(_leap.ReadoutError, match="no variance"):
        _leap.Readout.fit(features, np.full(50, 9), max_tokens=4096)
    with pytest.raises(_leap.ConfigError, match="target"):
        _leap.Readout.fit(features, lengths, max_tokens=4096, target="cube")  # type: ignore[arg-type]
    assert issubclass(_leap.ReadoutError, _leap.LeapError)


def test_files(tmp_path: Path) -> None:
    features, lengths = made(100, 12)
    meta = {"kind": "prompt", "model": "m", "layer": 20, "trained_on": ["a", "b"], "temperature": 0.7}
    readout = _leap.Readout.fit(features, lengths, max_tokens=4096, meta=meta)
    path = tmp_path / "r.safetensors"
    readout.save(path)
    loaded = _leap.Readout.load(path)
    np.testing.assert_array_equal(loaded.score(features), readout.score(features))
    assert loaded.meta == readout.meta
    assert loaded.meta["temperature"] == "0.7"
    assert loaded.noise(20.0) == readout.noise(20.0)
    assert {p.name for p in tmp_path.iterdir()} == {"r.safetensors", "r.anchor.safetensors"}

    raw = path.read_bytes()
    (size,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + size])
    assert header["__metadata__"]["leap_readout_version"] == "1"
    assert all(isinstance(v, str) for v in header["__metadata__"].values())
    start, end = header["weight"]["data_offsets"]
    stored = np.frombuffer(raw[8 + size + start : 8 + size + end], "<f4")
    np.testing.assert_array_equal(stored, readout.weight)

    path.write_bytes(raw[:-1])
    with pytest.raises(_leap.ReadoutError, match=r"r\.safetensors"):
        _leap.Readout.load(path)
    with pytest.raises(_leap.LeapError, match="none"):
        _leap.Readout.load(tmp_path / "none")
