"""Prompt features against numpy and a ChaCha8 written out."""

from pathlib import Path

import numpy as np
import pytest

from leap_rs import _leap


def chacha8(seed: int, words: int) -> list[int]:
    """D. J. Bernstein's stream: key from the seed, nonce 0, 64-bit block counter."""
    mask = 0xFFFFFFFF
    key = np.frombuffer(seed.to_bytes(8, "little") + bytes(24), "<u4").tolist()
    constants = np.frombuffer(b"expand 32-byte k", "<u4").tolist()

    def quarter(s: list[int], a: int, b: int, c: int, d: int) -> None:
        for x, y, z, r in ((a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)):
            s[x] = (s[x] + s[y]) & mask
            v = s[z] ^ s[x]
            s[z] = (v << r | v >> (32 - r)) & mask

    out: list[int] = []
    block = 0
    while len(out) < words:
        start = [*constants, *key, block & mask, block >> 32, 0, 0]
        s = list(start)
        for _ in range(4):
            for i in range(4):
                quarter(s, i, 4 + i, 8 + i, 12 + i)
            for i in range(4):
                quarter(s, i, 4 + (i + 1) % 4, 8 + (i + 2) % 4, 12 + (i + 3) % 4)
        out += [(a + b) & mask for a, b in zip(s, start, strict=True)]
        block += 1
    return out[:words]


def projection(d: int, dim: int, seed: int) -> np.ndarray:
    per_row = -(-dim // 32)
    words = np.array(chacha8(seed, d * per_row), "<u4").reshape(d, per_row)
    bits = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")[:, :dim]
    return np.where(bits == 1, 1.0, -1.0) / np.sqrt(dim)


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
