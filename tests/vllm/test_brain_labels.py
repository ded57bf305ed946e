"""Which finished requests are labels, by the rules stated for forced, limited and broken-off answers."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leap_rs.vllm.labels import Kind, Limits, label


def limits(row: dict[str, object]) -> Limits:
    return Limits(int(row["max_tokens"]), int(row.get("min_tokens", 0)), bool(row.get("ignore_eos", False)))  # type: ignore[call-overload]


def test_forced_lengths_are_told_from_natural_ones(cases: Path) -> None:
    lines = (cases / "34-forced_length_requests.jsonl").read_text().splitlines()
    ignoring, equal, at_least, plain, short = (limits(json.loads(line)) for line in lines)
    for forced in (ignoring, equal):
        assert forced.forced
        assert label(forced, "length", 512).kind is Kind.FORCED
        assert label(forced, "stop", 300).kind is Kind.FORCED
    assert not at_least.forced
    assert label(at_least, "stop", 300).kind is Kind.EXACT
    for about in (100, 101, 110, 125):
        assert label(at_least, "stop", about).kind is Kind.FORCED
    # It reached its limit, but not by itself as far as one can know.
    assert label(at_least, "length", 512).kind is Kind.FORCED
    assert label(plain, "stop", 40).kind is Kind.EXACT
    assert label(plain, "length", 512).kind is Kind.CENSORED
    cut = label(short, "length", 4)
    assert (cut.kind, cut.tokens, cut.censored, cut.taught) == (Kind.CENSORED, 4, True, True)


@pytest.mark.parametrize(
    ("reason", "tokens", "kind"),
    [
        ("abort", 20, Kind.ABORTED),
        ("abort", 0, Kind.ABORTED),
        ("error", 20, Kind.FAILED),
        ("repetition", 20, Kind.FAILED),
        ("stop", 0, Kind.FAILED),
        ("length", 0, Kind.FAILED),
    ],
)
def test_what_was_broken_off_is_no_label(reason: str, tokens: int, kind: Kind) -> None:
    got = label(Limits(512), reason, tokens)
    assert got.kind is kind
    assert not got.taught


def test_one_token_at_most_says_nothing() -> None:
    # Every answer has one, so a limit of one (what a prefill instance is asked for) is no lower bound either.
    assert label(Limits(1), "length", 1).kind is Kind.FORCED


def test_min_tokens_of_one_changes_nothing() -> None:
    assert label(Limits(512, 1), "stop", 1).kind is Kind.EXACT
    assert label(Limits(512, 1), "length", 512).kind is Kind.CENSORED


@given(
    st.integers(1, 5000),
    st.integers(0, 5000),
    st.booleans(),
    st.sampled_from(["stop", "length", "abort", "error"]),
    st.integers(0, 5000),
)
def test_only_answers_that_nobody_pushed_are_taught(
    longest: int, least: int, ignoring: bool, reason: str, tokens: int
) -> None:
    asked = Limits(longest, least, ignoring)
    got = label(asked, reason, tokens)
    assert got.tokens == tokens
    if got.taught:
        assert tokens >= 1
        assert not ignoring
        assert least < longest
        assert reason == ("length" if got.censored else "stop")
        assert not got.censored or least <= 1
