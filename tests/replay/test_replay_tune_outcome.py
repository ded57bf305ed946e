"""What is recommended where the chosen setting breaks the bound on the half that it was not chosen on."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest

from leap_rs.replay.tune.bound import parse
from leap_rs.replay.tune.measure import Bench, Measured
from leap_rs.replay.tune.outcome import quarters, verdict
from leap_rs.replay.tune.search import Found, checks
from leap_rs.replay.tune.space import Candidate, fcfs

NOISE = np.array([-0.001, 0.0, 0.001])
BOUNDS = parse("p99_e2el<=1.1")
CHOSEN = Candidate(("queue",), "countdown", 0.01, 1.0, None, 64)
AT_STOCK = Candidate(("evict",), "countdown", 0.0, 1.0, None, 256)


def measured(candidate: Candidate, ptl: float, p99: float) -> Measured:
    return Measured(candidate, {"mean_ptl": ptl + NOISE, "p99_e2el": p99 + NOISE})


FCFS = measured(fcfs(256), 1.0, 1.0)


@pytest.mark.parametrize(
    ("chosen", "plain", "at_stock", "recommend", "says"),
    [
        ((0.5, 1.05), (0.8, 0.9), (0.9, 1.0), "leap", "held there too"),
        ((0.5, 1.2), (0.8, 0.9), (0.9, 1.0), "max_num_seqs", "not recommended: fcfs at 64 sequences held and is"),
        (
            (0.5, 1.2),
            (0.95, 0.9),
            (0.9, 1.0),
            "leap_at_stock",
            "not recommended: the best at 256 sequences held and is",
        ),
        ((0.5, 1.2), (0.8, 1.3), (0.9, 1.0), "leap_at_stock", "the best at 256 sequences held and is"),
        ((0.5, 1.2), (0.8, 1.3), (0.9, 1.3), "fcfs", "not recommended: stay with fcfs"),
        ((0.5, 1.2), (1.2, 0.9), (0.995, 1.0), "fcfs", "stay with fcfs"),
        ((0.5, 1.2), (1.2, 0.9), None, "fcfs", "stay with fcfs"),
    ],
)
def test_only_what_held_is_recommended(
    chosen: tuple[float, float],
    plain: tuple[float, float],
    at_stock: tuple[float, float] | None,
    recommend: str,
    says: str,
) -> None:
    unseen = {
        "fcfs": FCFS,
        "chosen": measured(CHOSEN, *chosen),
        "fcfs_at_chosen": measured(fcfs(64), *plain),
        **({} if at_stock is None else {"at_stock": measured(AT_STOCK, *at_stock)}),
    }
    # The searched half plays no part once something was chosen.
    found = verdict(Found(chosen=unseen["chosen"]), cast(Bench, None), unseen, BOUNDS, "mean_ptl", 256)
    assert (found.status, found.recommend) == ("gain", recommend)
    assert found.bound_held == (chosen[1] <= 1.1)
    assert says in " ".join(found.sentences)


def test_quarters_are_reported_of_what_was_replayed_there() -> None:
    one, other = measured(CHOSEN, 0.5, 1.05), measured(AT_STOCK, 0.5, 1.0)
    parts = [checks(measured(CHOSEN, 0.5, p99), FCFS, BOUNDS) for p99 in (1.02, 1.0999)]
    found = Found(finalists=[one, other], parts={CHOSEN: parts})
    told: Any = quarters(found, one, [(0, 10), (10, 20)])
    assert [part["rows"] for part in told] == [[0, 10], [10, 20]]
    assert [part["bounds"][0]["ratio"]["mean"] for part in told] == pytest.approx([1.02, 1.0999], rel=1e-5)
    # The mean keeps it on both, the far end of the interval only on the first.
    assert [part["bounds"][0]["holds"] for part in told] == [True, True]
    assert [part["bounds"][0]["holds_with_ci95"] for part in told] == [True, False]
    assert quarters(found, other, [(0, 10), (10, 20)]) is None
