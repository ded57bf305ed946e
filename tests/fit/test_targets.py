"""The three targets side by side, each with its own penalty."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from fit_command import BUDGET, LAM, arrays, fit_json
from fit_reference import Ridge, spearman

from leap_rs._leap import Readout

SCALES = {"sqrt": (np.sqrt, np.square), "log": (np.log, np.exp), "raw": (lambda y: y, lambda y: y)}


def test_each_target_is_ridge_on_its_own_scale(small: Path) -> None:
    train, judged = small / "train.parquet", small / "judged.parquet"
    (one,) = fit_json(train, "--out", small / "r.safetensors", "--eval", judged, "--rls")
    assert list(one["targets"]) == ["sqrt", "log", "raw"]
    x, lengths = arrays(train)
    features, truth = arrays(judged)
    for target, (to, back) in SCALES.items():
        found = one["targets"][target]
        # Ridge on the square root of to(L)^2, as far as the reference goes, is ridge on to(L).
        model = Ridge(x, to(lengths.astype(float)) ** 2, found["lam"], BUDGET)
        scores = model.rows(features) @ np.linalg.solve(model.gram, model.right)
        expected = np.clip(back(scores), 1, BUDGET)
        frozen = found["evaluations"][str(judged)]["frozen"]
        assert set(found["evaluations"][str(judged)]) == {"frozen", "rls"}
        assert frozen["spearman"] == pytest.approx(spearman(expected, truth), abs=2e-3)
        assert frozen["mae_tokens"] == pytest.approx(np.abs(expected - truth).mean(), rel=2e-3)
        own = Readout.fit(x, lengths, max_tokens=BUDGET, target=target)
        assert (found["lam"], found["train_spearman"]) == (own.lam, own.meta["train_spearman"])


def test_the_target_in_use_is_the_readout_that_is_written(small: Path) -> None:
    train, judged = small / "other.parquet", small / "judged.parquet"
    words = ("--out", small / "r.safetensors", "--eval", judged, "--target", "log", "--lam", str(LAM), "--rls")
    (one,) = fit_json(train, *words)
    assert one["targets"]["log"]["lam"] == LAM
    assert one["targets"]["sqrt"]["lam"] != LAM
    for name in ("frozen", "rls"):
        assert one["targets"]["log"]["evaluations"][str(judged)][name] == one["evaluations"][str(judged)][name]
