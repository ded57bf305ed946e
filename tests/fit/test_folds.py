"""Folds, and predictions for rows that a fit has not seen, against numpy."""

from __future__ import annotations

import numpy as np
import pytest
from fit_reference import Ridge

from leap_rs._leap import ConfigError
from leap_rs.fit.data import Labelled
from leap_rs.fit.folds import assign, out_of_fold
from leap_rs.fit.options import Options


@pytest.mark.parametrize(("rows", "folds"), [(5, 5), (23, 5), (100, 7)])
def test_rows_are_spread_evenly_and_by_seed(rows: int, folds: int) -> None:
    found = assign(rows, folds, 3)
    sizes = np.bincount(found, minlength=folds)
    assert (sizes.sum(), sizes.max() - sizes.min() <= 1) == (rows, True)
    np.testing.assert_array_equal(found, assign(rows, folds, 3))
    assert rows < 20 or (found != assign(rows, folds, 4)).any()


def test_a_family_stays_together() -> None:
    rng = np.random.default_rng(0)
    families = [f"family {rng.integers(30)}" for _ in range(600)]
    found = assign(600, 5, 0, families)
    assert len(set(zip(families, found, strict=True))) == len(set(families))
    # No fold can be fuller than an even share and the largest family.
    assert np.bincount(found).max() <= 600 / 5 + max(families.count(name) for name in families)


def test_too_few_families() -> None:
    with pytest.raises(ConfigError, match="2 families do not fill 5 folds"):
        assign(40, 5, 0, ["a", "b"] * 20)
    with pytest.raises(ConfigError, match="4 rows do not fill 5 folds"):
        assign(4, 5, 0)


def test_out_of_fold_predictions_are_those_of_fits_without_the_fold() -> None:
    rng = np.random.default_rng(1)
    x = rng.normal(size=(120, 4))
    lengths = np.clip(np.round((15 + x @ [3, -2, 1, 0] + rng.normal(size=120)) ** 2), 1, 500).astype(np.uint32)
    # Rows with an unknown length are predicted but not learned from.
    cut = (rng.random(120) < 0.2) & (lengths < 500)
    folds = assign(120, 5, 0)
    found = out_of_fold(Labelled(x, lengths, cut, 500), folds, 10.0, Options())
    assert found is not None
    for fold in range(5):
        train = (folds != fold) & ~cut
        expected = Ridge(x[train], lengths[train], 10.0, 500).predict(x[folds == fold])
        np.testing.assert_allclose(found[folds == fold], expected, rtol=1e-4)


def test_folds_that_leave_one_length_to_learn_give_none() -> None:
    lengths = np.full(10, 30, dtype=np.uint32)
    lengths[4] = 31
    data = Labelled(np.arange(10.0)[:, None], lengths, np.zeros(10, dtype=bool), 100)
    assert out_of_fold(data, assign(10, 5, 0), 1.0, Options()) is None
