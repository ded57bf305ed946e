"""Prompt features against numpy."""

from pathlib import Path

import numpy as np
import pytest
from prompt_reference import projection

from leap_rs import _leap


@pytest.mark.parametrize(("d", "dim", "seed"), [(30, 256, 0), (17, 40, 12345678901234567890), (64, 1, 3)])
def test_features_match_numpy(d: int, dim: int, seed: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    embedding = rng.normal(size=(700, d)).astype(np.float16)
    features = _leap.PromptFeatures(embedding, dim=dim, seed=seed)
    ids = rng.integers(0, 700, 50).astype(np.uint32)
    r = projection(d, dim, seed)
    mean = embedding[ids].astype(np.float64).mean(0)
    expected = np.concatenate([mean @ r, [np.sqrt(50), np.log1p(50), 50]])
    pooled = features.pool(ids)
    assert pooled.dtype == np.float32
    assert pooled.shape == (dim + 3,) == (features.width,)
    np.testing.assert_allclose(pooled, expected, atol=2e-3)
    np.testing.assert_allclose(features.project(mean, 50), expected, atol=1e-5)
    np.testing.assert_array_equal(features.pool(ids.astype(np.int64)), pooled)
    np.testing.assert_array_equal(features.pool(ids.tolist()), pooled)
    np.testing.assert_array_equal(_leap.PromptFeatures.length_features(50), pooled[-3:])
    features.save(tmp_path / "table")
    np.testing.assert_array_equal(_leap.PromptFeatures.load(tmp_path / "table").pool(ids), pooled)


def test_bad_prompts_are_refused() -> None:
    features = _leap.PromptFeatures(np.ones((10, 4), np.float32), dim=8)
    with pytest.raises(_leap.ReadoutError, match="empty"):
        features.pool(np.array([], np.uint32))
    with pytest.raises(_leap.ReadoutError, match="id 10"):
        features.pool([1, 10])
    with pytest.raises(_leap.ReadoutError, match="-1"):
        features.pool(np.array([-1]))
    with pytest.raises(_leap.ReadoutError, match="whole numbers"):
        features.pool([0.5])
