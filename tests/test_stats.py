"""The core's rank statistics against scipy and brute force."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st

from leap_rs._leap import ConfigError, kendall_tau_b, pairwise_accuracy, spearman

PAIRS = st.lists(st.tuples(st.integers(-5, 5), st.integers(1, 60)), min_size=2, max_size=50)


def accuracy_by_pairs(predicted: np.ndarray, lengths: np.ndarray, ratio: float) -> float | None:
    """Every pair looked at, in numpy."""
    apart = lengths[:, None] / lengths[None, :] >= ratio
    right = (predicted[:, None] > predicted[None, :]) + 0.5 * (predicted[:, None] == predicted[None, :])
    return float(right[apart].mean()) if apart.any() else None


@given(PAIRS)
def test_correlations_equal_scipy(pairs: list[tuple[int, int]]) -> None:
    a, b = np.array(pairs).T
    if len(set(a)) < 2 or len(set(b)) < 2:
        assert (spearman(a, b), kendall_tau_b(a, b)) == (None, None)
        return
    assert spearman(a, b) == pytest.approx(scipy.stats.spearmanr(a, b).statistic, abs=1e-12)
    assert kendall_tau_b(a, b) == pytest.approx(scipy.stats.kendalltau(a, b).statistic, abs=1e-12)


@given(PAIRS, st.sampled_from([1.001, 1.2, 2.0, 5.0]))
def test_pairwise_accuracy_equals_brute_force(pairs: list[tuple[int, int]], ratio: float) -> None:
    predicted, lengths = np.array(pairs, dtype=float).T
    expected = accuracy_by_pairs(predicted, lengths, ratio)
    assert pairwise_accuracy(predicted, lengths, ratio) == (expected if expected is None else pytest.approx(expected))


@pytest.mark.parametrize("dtype", ["float32", "float16", "uint32", "int64"])
def test_many_rows_of_any_number_format(dtype: str) -> None:
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 1024, 3000).astype(np.uint32)
    predicted = np.clip(lengths / 2 + rng.normal(0, 100, 3000), 1, 1024).astype(dtype)
    wide = predicted.astype(float)
    assert spearman(predicted, lengths) == pytest.approx(scipy.stats.spearmanr(wide, lengths).statistic)
    assert kendall_tau_b(predicted, lengths) == pytest.approx(scipy.stats.kendalltau(wide, lengths).statistic)
    for ratio in (1.2, 2.0):
        assert pairwise_accuracy(predicted, lengths, ratio) == pytest.approx(accuracy_by_pairs(wide, lengths, ratio))


def test_undefined_is_none() -> None:
    assert spearman([], []) is None
    assert spearman([1.0], [2.0]) is None
    assert kendall_tau_b([3, 3, 3], [1, 2, 3]) is None
    assert spearman([1.0, np.nan], [1.0, 2.0]) is None
    assert pairwise_accuracy([1, 2, 3], [30, 30, 30], 1.2) is None
    assert pairwise_accuracy([1, 2], [10, 20], 1.0) is None


def test_two_lengths_are_refused() -> None:
    for call in (spearman, kendall_tau_b, lambda a, b: pairwise_accuracy(a, b, 2.0)):
        with pytest.raises(ConfigError, match="2 values beside 3"):
            call([1.0, 2.0], [1.0, 2.0, 3.0])
