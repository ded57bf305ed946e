"""The bound of a search: what it reads, what it refuses, and how far beyond it a ratio lies."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leap_rs._leap import ConfigError
from leap_rs.replay.tune.bound import Bound, parse

STATISTICS = st.one_of(st.sampled_from(["mean", "median", "std"]), st.integers(0, 100).map(lambda p: f"p{p}"))
LATENCIES = st.builds(lambda s, m: f"{s}_{m}", STATISTICS, st.sampled_from(["ptl", "ttft", "tpot", "e2el"]))
RATES = st.sampled_from(["request_throughput", "output_throughput"])
FACTORS = st.floats(0.01, 100).map(lambda x: float(f"{x:.4g}"))
BLANKS = st.sampled_from(["", " ", "  "])


@given(st.lists(st.tuples(st.one_of(LATENCIES, RATES), FACTORS, BLANKS), min_size=1, unique_by=lambda one: one[0]))
def test_what_is_written_is_read(wanted: list[tuple[str, float, str]]) -> None:
    text = ",".join(
        f"{blank}{metric}{blank}{'>=' if metric.endswith('throughput') else '<='}{blank}{factor!r}{blank}"
        for metric, factor, blank in wanted
    )
    found = parse(text)
    assert [(one.metric, one.factor) for one in found] == [(metric, factor) for metric, factor, _ in wanted]
    assert parse(",".join(str(one) for one in found)) == found


@given(st.text(alphabet="p9_e2l<>=1.,am nan", max_size=20))
def test_anything_else_is_one_clear_error(text: str) -> None:
    try:
        found = parse(text)
    except ConfigError:
        with pytest.raises(ConfigError, match=r"^tune: "):
            parse(text)
    else:
        assert all(one.factor > 0 and math.isfinite(one.factor) for one in found)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "expected METRIC<=FACTOR"),
        ("p99_e2el", "expected METRIC<=FACTOR"),
        ("<=1.1", "no metric ''"),
        ("p99_latency<=1.1", "no metric 'p99_latency'; metrics: mean|median|std|pNN + _ + ptl|ttft|tpot|e2el"),
        ("p101_e2el<=1.1", "between 0 and 100"),
        ("p99_e2el_ms<=1.1", "without a unit: p99_e2el"),
        ("p99_itl<=1.1", "p99_itl is not kept seed by seed"),
        ("max_slowdown<=1", "not kept seed by seed"),
        ("p99_e2el>=1.1", "p99_e2el<=1.1"),
        ("p99_e2el=1.1", "p99_e2el<=1.1"),
        ("p99_e2el<1.1", "p99_e2el<=1.1"),
        ("request_throughput<=1", "request_throughput>=1"),
        ("p99_e2el<=fast", "a number > 0, got 'fast'"),
        ("p99_e2el<=0", "a number > 0"),
        ("p99_e2el<=-1", "a number > 0"),
        ("p99_e2el<=inf", "a number > 0"),
        ("p99_e2el<=nan", "a number > 0"),
        ("p99_e2el<=", "a number > 0, got ''"),
        ("p99_e2el<=1.1,", "expected METRIC<=FACTOR"),
        ("p99_e2el<=1.1,p99_e2el<=1.2", "bound twice"),
        ("request_goodput>=1", "needs --goodput"),
    ],
)
def test_what_is_wrong_is_named(text: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(text)
    assert says in str(caught.value)


def test_goodput_can_be_bound_where_it_is_defined() -> None:
    assert parse("request_goodput>=1", {"ttft": 500.0}) == (Bound("request_goodput", 1.0),)


@given(FACTORS, FACTORS)
def test_excess_is_1_at_the_bound_and_more_beyond_it(factor: float, ratio: float) -> None:
    latency, rate = Bound("p99_e2el", factor), Bound("request_throughput", factor)
    assert (latency.excess(ratio) <= 1) == (ratio <= factor)
    assert (rate.excess(ratio) <= 1) == (ratio >= factor)
    assert latency.excess(factor) == rate.excess(factor) == 1


def test_no_throughput_is_infinitely_beyond() -> None:
    assert Bound("request_throughput", 0.9).excess(0.0) == math.inf
