"""When a readout's ranking counts as proven: on numbers with a known correlation, and on none."""

import numpy as np
import pytest
from scipy.stats import spearmanr

from leap_rs.vllm.auto import FEWEST, LEAD, PREFERENCE, ArmSettings, Judge, Judged, preferred


def judged(scores: np.ndarray, tokens: np.ndarray) -> list[Judged]:
    return [Judged(float(s), int(t), False) for s, t in zip(scores, tokens, strict=True)]


def correlated(n: int, rho: float, seed: int) -> list[Judged]:
    rng = np.random.default_rng(seed)
    truth = rng.normal(size=n)
    scores = rho * truth + np.sqrt(1 - rho**2) * rng.normal(size=n)
    return judged(scores, np.round(200 * np.exp(truth)) + 1)


def test_the_correlation_is_that_of_the_window() -> None:
    judge = Judge(ArmSettings(window=100))
    all_of_them = correlated(260, 0.5, 1)
    for one in all_of_them:
        judge.add(one)
    last = all_of_them[-100:]
    expected = spearmanr([j.score for j in last], [j.tokens for j in last]).statistic
    assert judge.correlation == pytest.approx(expected, abs=1e-12)
    assert judge.armed


def test_what_is_random_never_arms() -> None:
    # One window alone passes the threshold about once in 400 looks.
    passed = 0
    for seed in range(20):
        judge = Judge(ArmSettings(window=200))
        for one in correlated(3000, 0.0, seed):
            judge.add(one)
            passed += (judge.correlation or 0.0) >= 0.2
            assert not judge.armed
    assert passed > 0


def test_lengths_that_all_are_equal_never_arm() -> None:
    judge = Judge(ArmSettings(window=50))
    for score in np.random.default_rng(0).normal(size=300):
        judge.add(Judged(float(score), 30, False))
    assert judge.correlation is None
    assert not judge.armed


def test_it_disarms_where_the_ranking_is_lost_and_arms_again() -> None:
    judge = Judge(ArmSettings(window=200))
    turns = []
    for one in [*correlated(600, 0.5, 2), *correlated(600, 0.0, 3), *correlated(600, 0.5, 4)]:
        before = judge.armed
        judge.add(one)
        if judge.armed != before:
            turns.append(judge.armed)
    assert turns == [True, False, True]


def test_a_ranking_above_the_threshold_does_not_flap() -> None:
    for seed in range(10):
        judge = Judge(ArmSettings(window=200))
        turns = 0
        for one in correlated(3000, 0.35, 100 + seed):
            before = judge.armed
            judge.add(one)
            turns += judge.armed != before
        assert turns == 1
        assert judge.armed


def test_undefined_disarms() -> None:
    judge = Judge(ArmSettings(window=50))
    for one in correlated(200, 0.9, 5):
        judge.add(one)
    assert judge.armed
    for _ in range(60):
        judge.add(Judged(10.0, 30, False))
    assert not judge.armed


def test_limits_of_the_client_earn_no_credit() -> None:
    # Scores that know nothing but lengths cut at limits of which the scores know: uncut, they rank nothing.
    rng = np.random.default_rng(6)
    judge = Judge(ArmSettings(window=200))
    for _ in range(1500):
        limit = int(rng.choice([8, 64, 512]))
        length = int(rng.integers(1, 700))
        judge.add(Judged(float(rng.normal()), min(length, limit), length > limit))
    assert not judge.armed
    assert abs(judge.correlation or 0.0) < 0.2


def test_a_low_limit_is_no_miss() -> None:
    # A long answer cut at 4 tokens was not predicted wrongly.
    rng = np.random.default_rng(7)
    judge = Judge(ArmSettings(window=200))
    for _ in range(400):
        length = int(rng.integers(10, 1000))
        cut = rng.random() < 0.5
        judge.add(Judged(float(np.sqrt(length)), 4 if cut else length, bool(cut)))
    assert judge.correlation == pytest.approx(1.0)


def test_it_goes_on_from_what_was_saved() -> None:
    first = Judge(ArmSettings(window=100))
    stream = correlated(400, 0.5, 8)
    for one in stream[:300]:
        first.add(one)
    second = Judge(ArmSettings(window=100), first.seen, armed=first.armed)
    assert second.correlation == first.correlation
    for one in stream[300:]:
        first.add(one)
        second.add(one)
    assert (second.armed, second.correlation) == (first.armed, first.correlation)


@pytest.mark.parametrize(
    ("order", "standings", "expected"),
    [
        # Nobody is ahead by enough: all stay.
        ("state text prompt", (0.0, 0.0, 0.0), "state text prompt"),
        ("state text prompt", (0.50, 0.549, 0.53), "state text prompt"),
        ("prompt text state", (0.549, 0.53, 0.50), "prompt text state"),
        # One is ahead of the first by enough, and takes its place; the others keep theirs.
        ("state text prompt", (0.50, 0.56, 0.40), "text state prompt"),
        ("state text prompt", (0.50, 0.40, 0.56), "prompt state text"),
        # The best of two that are ahead; behind it the same rule again.
        ("state text prompt", (0.40, 0.50, 0.52), "prompt text state"),
        ("state text prompt", (0.40, 0.50, 0.47), "text prompt state"),
        # It is ahead of the first by enough, though not of the one between.
        ("state text prompt", (0.50, 0.52, 0.56), "prompt state text"),
        # What ranks backwards comes last.
        ("state text prompt", (-0.5, 0.1, 0.0), "text prompt state"),
    ],
)
def test_who_ranks_best_is_preferred(order: str, standings: tuple[float, ...], expected: str) -> None:
    stand = dict(zip(("state", "text", "prompt"), standings, strict=True))
    found = preferred(order.split(), stand)
    assert found == tuple(expected.split())
    assert preferred(found, stand) == found, "what has been decided stays"


def test_the_preferred_one_is_never_far_behind() -> None:
    rng = np.random.default_rng(9)
    order = PREFERENCE
    stand = dict.fromkeys(PREFERENCE, 0.0)
    changes = 0
    for _ in range(2000):
        stand = {name: float(np.clip(rho + rng.normal(0, 0.01), -1, 1)) for name, rho in stand.items()}
        before, order = order, preferred(order, stand)
        changes += order != before
        for place, name in enumerate(order):
            assert all(stand[behind] <= stand[name] + LEAD for behind in order[place:])
    assert 5 < changes < 500


def test_a_few_requests_are_no_standing() -> None:
    judge = Judge(ArmSettings(window=200))
    for number, one in enumerate(correlated(60, 0.9, 10), start=1):
        judge.add(one)
        decided = number >= FEWEST and number % (200 // 64) == 0
        assert judge.standing == (judge.correlation if decided or judge.standing else 0.0)
    assert judge.standing > 0.7
    assert Judge(ArmSettings(window=200), judge.seen).standing == pytest.approx(judge.standing, abs=0.05)
