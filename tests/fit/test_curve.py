"""Windows of a stream and the learning curve, against numpy."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from fit_command import LAM, arrays, fit_json, traffic
from fit_reference import Ridge, spearman

from leap_rs._leap import Readout
from leap_rs.fit.curve import Point, curve, difference_se, learning, windows, within
from leap_rs.fit.data import Labelled
from leap_rs.fit.evaluate import predictions
from leap_rs.fit.folds import assign
from leap_rs.fit.metrics import Predictions
from leap_rs.fit.options import Options

OPTIONS = Options(rls=True)


@pytest.mark.parametrize(
    ("rows", "edges"),
    [
        (100, [(1, 100)]),
        (149, [(1, 149)]),
        (150, [(1, 100), (101, 150)]),
        (30, [(1, 30)]),
        (320, [(1, 100), (101, 200), (201, 320)]),
    ],
)
def test_windows_are_consecutive_and_a_short_rest_joins_the_last(rows: int, edges: list[tuple[int, int]]) -> None:
    data = traffic([3.0, 1.0], rows, 0)
    made = {"frozen": Predictions(data.features[:, 0]), "rls": Predictions(data.features @ np.float32([3, 1]))}
    found = windows(made, data)
    assert [(window.first, window.last) for window in found] == edges
    for window in found:
        part = slice(window.first - 1, window.last)
        assert window.frozen == pytest.approx(spearman(data.features[part, 0], data.lengths[part]))
        assert window.rls == pytest.approx(spearman(made["rls"].lengths[part], data.lengths[part]))


def test_the_learning_curve_is_ridge_with_more_and_more_rows_of_the_other_folds() -> None:
    train, new = traffic([3.0, 1.0, 0.0], 200, 1), traffic([0.0, 1.0, 3.0], 237, 2)
    readout = Readout.fit(train.features, train.lengths, max_tokens=1024, lam=LAM)
    folds = assign(len(new), 5, 0)
    found = learning(readout, new, folds, OPTIONS)
    assert [labels for labels, _ in found] == [0, 50, 100, 150]
    for labels, predicted in found:
        for fold in range(5):
            model = Ridge(train.features.astype(float), train.lengths, LAM, 1024)
            rows = np.flatnonzero(folds != fold)[:labels]
            model.learn(new.features[rows].astype(float), new.lengths[rows])
            np.testing.assert_allclose(
                predicted[folds == fold], model.predict(new.features[folds == fold].astype(float)), rtol=2e-3
            )


def test_a_new_group_is_caught_up_with() -> None:
    """The group's weights are others: frozen it is ranked by chance, after enough labels as by a readout of its own."""
    train, new = traffic([4.0, 0.0, 0.0, 0.0], 60, 3), traffic([0.0, 4.0, 0.0, 0.0], 600, 4)
    readout = Readout.fit(train.features, train.lengths, max_tokens=1024)
    found = curve(readout, predictions(readout, new, OPTIONS), new, OPTIONS)
    assert found.in_domain is not None
    assert found.in_domain > 0.8
    assert [point.labels for point in found.learning] == list(range(0, 451, 50))
    assert found.learning[0].rls is not None
    assert found.learning[0].rls < 0.2
    assert found.learning[-1].rls == pytest.approx(found.in_domain, abs=0.02)
    assert found.within_0_02_after is not None
    assert 50 <= found.within_0_02_after <= 450


def test_lengths_that_nothing_can_be_fitted_to() -> None:
    train, new = traffic([4.0, 1.0], 60, 3), traffic([4.0, 1.0], 120, 4)
    readout = Readout.fit(train.features, train.lengths, max_tokens=1024)
    equal = Labelled(new.features, np.full(120, 30, dtype=np.uint32), new.censored & False, 1024)
    found = curve(readout, predictions(readout, equal, OPTIONS), equal, OPTIONS)
    assert (found.in_domain, found.learning, found.difference_se, found.within_0_02_after) == (None, [], None, None)
    assert [(window.frozen, window.rls) for window in found.windows] == [(None, None)]
    few = new.where(np.arange(120) < 7)
    assert curve(readout, predictions(readout, few, OPTIONS), few, OPTIONS).in_domain is None


@pytest.mark.parametrize(
    ("in_domain", "values", "expected"),
    [
        (0.40, [0.30, 0.35, 0.39], 100),
        (0.40, [0.39, 0.37, 0.39], 100),  # left again, so it had not arrived
        (0.40, [0.45, 0.45, 0.45], 0),
        (0.40, [0.30, 0.39, 0.37], None),
        (0.40, [None, 0.39, 0.39], 50),
        (0.40, [0.39, None, None], None),
        (None, [0.39, 0.39, 0.39], None),
        (0.40, [], None),
    ],
)
def test_within(in_domain: float | None, values: list[float | None], expected: int | None) -> None:
    assert within(in_domain, [Point(50 * i, value) for i, value in enumerate(values)]) == expected


def test_standard_error_of_a_difference() -> None:
    rng = np.random.default_rng(5)
    lengths = rng.permutation(np.arange(1, 801)).astype(np.uint32)
    data = Labelled(np.zeros((800, 1)), lengths, np.zeros(800, dtype=bool), 1024)
    a, b = rng.normal(size=(2, 800)).astype(np.float32)
    # Two rankings by chance: each correlation has a variance of 1 / (n - 1), and they are independent.
    assert difference_se(a, b, data, 0) == pytest.approx(np.sqrt(2 / 799), rel=0.2)
    assert difference_se(a, a, data, 0) == 0
    equal = Labelled(data.features, np.full(800, 3, dtype=np.uint32), data.censored, 1024)
    assert difference_se(a, b, equal, 0) is None


def test_the_command_tells_the_curve(small: Path) -> None:
    judged = small / "judged.parquet"
    (one,) = fit_json(
        small / "train.parquet", "--out", small / "r.safetensors", "--lam", str(LAM), "--eval", judged, "--rls"
    )
    found = one["curves"][str(judged)]
    x, lengths = arrays(judged)
    model = Ridge(*arrays(small / "train.parquet"), LAM, 1024)
    frozen = model.predict(x)
    assert [(window["first"], window["last"]) for window in found["windows"]] == [(1, 100), (101, len(lengths))]
    assert found["windows"][0]["frozen"] == pytest.approx(spearman(frozen[:100], lengths[:100]), abs=3e-3)
    assert found["windows"][1]["frozen"] == pytest.approx(spearman(frozen[100:], lengths[100:]), abs=3e-3)
    assert [point["labels"] for point in found["learning"]] == [0, 50, 100, 150]
    assert found["learning"][0]["rls"] == pytest.approx(one["evaluations"][str(judged)]["frozen"]["spearman"])
    assert 0 < found["difference_se"] < 0.1
    near = [point["labels"] for point in found["learning"] if point["rls"] >= found["in_domain"] - 0.02]
    assert found["within_0_02_after"] is None or found["within_0_02_after"] in near


def test_forgetting_changes_what_rls_predicts_and_nothing_else(small: Path) -> None:
    judged = small / "judged.parquet"
    scores = []
    for words in ((), ("--forgetting", "1"), ("--forgetting", "0.98")):
        (one,) = fit_json(
            small / "other.parquet", "--out", small / "r.safetensors", "--lam", "30", "--eval", judged, "--rls", *words
        )
        scores.append(one["evaluations"][str(judged)])
    assert scores[0] == scores[1]
    assert scores[2]["frozen"] == scores[0]["frozen"]
    assert scores[2]["rls"]["mae_tokens"] != scores[0]["rls"]["mae_tokens"]


def test_forgetting_follows_traffic_that_changes() -> None:
    """Weights that turn round halfway: what forgets ranks the end well, what does not is torn between the two."""
    first, second = traffic([4.0, 1.0], 500, 6), traffic([-4.0, 1.0], 500, 7)
    both = Labelled(
        np.concatenate([first.features, second.features]),
        np.concatenate([first.lengths, second.lengths]),
        np.concatenate([first.censored, second.censored]),
        1024,
    )
    readout = Readout.fit(first.features[:100], first.lengths[:100], max_tokens=1024)
    at_the_end = []
    for forgetting in (1.0, 0.98):
        made = predictions(readout, both, Options(rls=True, forgetting=forgetting))
        at_the_end.append(windows(made, both)[-1].rls)
    assert at_the_end[1] > 0.8
    assert at_the_end[0] < 0.5
