"""The numbers of an evaluation against scipy, brute force and distributions that are known."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.stats

from leap_rs._leap import OnlineReadout, Readout, ReadoutError
from leap_rs.fit.data import Labelled
from leap_rs.fit.evaluate import predictions, scores
from leap_rs.fit.metrics import Predictions, score, share_inside
from leap_rs.fit.options import Options


def labelled(lengths: np.ndarray, censored: np.ndarray | None = None, budget: int = 1024) -> Labelled:
    cut = np.zeros(len(lengths), dtype=bool) if censored is None else censored
    return Labelled(np.zeros((len(lengths), 1), dtype=np.float32), lengths.astype(np.uint32), cut, budget)


def linear(rows: int, budget: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Features, and lengths whose square root is linear in them with a deviation of 4, cut at the budget."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, 3)).astype(np.float32)
    root = 17 + x @ [3.0, 2.0, -1.0] + 4 * rng.normal(size=rows)
    return x, np.clip(np.round(np.clip(root, 1, None) ** 2), 1, budget).astype(np.uint32)


def test_scores_are_those_of_the_rows_with_a_known_length() -> None:
    rng = np.random.default_rng(1)
    lengths = rng.integers(1, 3000, 400)
    predicted = (lengths * rng.uniform(0.3, 2, 400)).astype(np.float32)
    # A cut answer says nothing of its length unless it was cut at the budget.
    lengths[:50] = 3000
    cut = np.arange(400) < 90
    found = score(Predictions(predicted), labelled(lengths, cut, budget=3000))
    kept = (np.arange(400) < 50) | (np.arange(400) >= 90)
    p, truth = predicted[kept].astype(float), lengths[kept].astype(float)
    assert found.rows == 360
    assert found.spearman == pytest.approx(scipy.stats.spearmanr(p, truth).statistic)
    assert found.kendall_tau_b == pytest.approx(scipy.stats.kendalltau(p, truth).statistic)
    for ratio, value in ((1.2, found.pairwise_accuracy_1_2), (2.0, found.pairwise_accuracy_2)):
        right = [
            0.5 + 0.5 * np.sign(p[i] - p[j]) for i in range(360) for j in range(360) if truth[i] / truth[j] >= ratio
        ]
        assert value == pytest.approx(np.mean(right))
    error = np.abs(p - truth)
    assert found.mae_tokens == pytest.approx(error.mean())
    assert found.mae_tokens_to_256 == pytest.approx(error[truth <= 256].mean())
    assert found.mae_tokens_257_to_1024 == pytest.approx(error[(truth > 256) & (truth <= 1024)].mean())
    assert found.mae_tokens_above_1024 == pytest.approx(error[truth > 1024].mean())
    assert (found.inside_50, found.inside_90) == (None, None)


def test_edges_of_the_length_ranges() -> None:
    predicted = Predictions(np.array([0, 0, 0, 0], dtype=np.float32))
    found = score(predicted, labelled(np.array([256, 257, 1024, 1025]), budget=4096))
    assert (found.mae_tokens_to_256, found.mae_tokens_257_to_1024, found.mae_tokens_above_1024) == (256, 640.5, 1025)


def test_without_known_rows_everything_is_undefined() -> None:
    found = score(Predictions(np.ones(3, dtype=np.float32)), labelled(np.array([5, 6, 7]), np.ones(3, dtype=bool)))
    assert found.to_dict().pop("rows") == 0
    assert {value for name, value in found.to_dict().items() if name != "rows"} == {None}


def test_share_inside_by_hand() -> None:
    # Wholly inside, wholly outside, half of the range inside, a point on the edge, a range over everything.
    low, high = np.array([0.3, 0.0, 0.65, 0.25, 0.0]), np.array([0.5, 0.2, 0.85, 0.25, 1.0])
    data = labelled(np.full(5, 10))
    assert share_inside(Predictions(np.ones(5, np.float32), (low, high)), data, 0.5) == pytest.approx(
        (1 + 0 + 0.5 + 1 + 0.5) / 5
    )
    # A cut answer may lie anywhere above: [0.3, 1], [0, 1] and [0.65, 1].
    cut = labelled(np.full(5, 10), np.array([True, True, True, False, False]))
    assert share_inside(Predictions(np.ones(5, np.float32), (low, high)), cut, 0.5) == pytest.approx(
        (0.45 / 0.7 + 0.5 + 0.1 / 0.35 + 1 + 0.5) / 5
    )


@pytest.mark.parametrize("mean", [0.8, 4.0, 60.0])
@pytest.mark.parametrize("limit", [3, 10**6])
def test_true_distributions_are_calibrated_however_coarse_and_wherever_cut(mean: float, limit: int) -> None:
    rng = np.random.default_rng(2)
    lengths = rng.poisson(mean, 40_000)
    cut = lengths >= limit
    written = np.minimum(lengths, limit)
    pit = scipy.stats.poisson.cdf(written - 1, mean), scipy.stats.poisson.cdf(written, mean)
    data = labelled(written, cut, budget=10**7)
    for level in (0.5, 0.9):
        found = share_inside(Predictions(np.ones(len(written), np.float32), pit), data, level)
        assert found == pytest.approx(level, abs=4 * 0.5 / np.sqrt(40_000))


@pytest.mark.parametrize("target", ["sqrt", "log", "raw"])
def test_noise_of_a_right_model_is_calibrated(target: str) -> None:
    x, lengths = linear(6000, 1024)
    readout = Readout.fit(x[:3000], lengths[:3000], max_tokens=1024, target=target)
    data = Labelled(x[3000:], lengths[3000:], lengths[3000:] >= 1024, 1024)
    made = predictions(readout, data, Options(rls=True))
    for found in scores(made, data, halves=False).values():
        # Exact for sqrt only, where the standard errors are 0.009 and 0.005; the noise is learned in coarse levels.
        assert found.inside_50 == pytest.approx(0.5, abs=0.04)
        assert found.inside_90 == pytest.approx(0.9, abs=0.025)


def test_a_readout_that_is_sure_of_too_little_is_told_apart() -> None:
    x, lengths = linear(3000, 1024)
    readout = Readout.fit(x, lengths, max_tokens=1024)
    # The same prompts, but every answer a quarter as long: the truth lies at the lower ends of the intervals.
    short = np.maximum(lengths // 4, 1)
    found = score(Predictions(readout.predict(x), readout.pit(x, short)), Labelled(x, short, short < 0, 1024))
    assert found.inside_50 is not None
    assert found.inside_50 < 0.2


def test_the_place_of_a_length() -> None:
    x, lengths = linear(2000, 400)
    readout = Readout.fit(x, lengths, max_tokens=400)
    for one in (readout, OnlineReadout(readout)):
        places = [one.pit(x[:20], np.full(20, length)) for length in (1, 50, 100, 200, 399, 400, 10_000)]
        assert all(place is not None for place in places)
        low, high = np.array([place[0] for place in places]), np.array([place[1] for place in places])
        assert (low <= high).all()
        assert (np.diff(low, axis=0) >= 0).all()
        np.testing.assert_array_equal(low[0], 0)
        # The budget has a mass of its own, and lengths above it count as it.
        np.testing.assert_allclose(high[-2:], 1, atol=1e-12)
        np.testing.assert_array_equal(low[-1], low[-2])
        assert (high[-1] - low[-1] >= 1e-3 - 1e-12).all()
        with pytest.raises(ReadoutError, match="20 rows of features, 3 lengths"):
            one.pit(x[:20], [1, 2, 3])
        with pytest.raises(ReadoutError):
            one.pit(x[:20, :2], np.ones(20))
