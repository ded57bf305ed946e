"""What a replay says of itself: too short a trace, orders that had nothing to order, requests repeated or left out."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from rich.console import Console

from leap_rs.replay import replay
from leap_rs.replay.report import render

Make = Callable[..., dict[str, Any]]


def about(document: dict[str, Any], word: str) -> list[str]:
    return [note for note in document["notes"] if word in note]


def report(document: dict[str, Any], width: int = 120) -> str:
    out = io.StringIO()
    render(document, Console(file=out, width=120, highlight=False), text_width=width)
    return out.getvalue()


@pytest.mark.parametrize(
    ("load", "seats", "requests"),
    [(1.2, 256, 5120), (0.5, 256, 5120), (None, 256, 5120), (1.2, 11, 220), (0.4, 256, None), (1.2, 10, None)],
)
def test_100_requests_are_few_for_more_than_10_seats_under_load(
    make_document: Make, core_result: Make, load: float | None, seats: int, requests: int | None
) -> None:
    document = make_document([core_result("fcfs", load=load)], sweep={"max_num_seqs": [seats]})
    notes = about(document, "100 requests are few")
    assert len(notes) == (requests is not None)
    assert all(f"takes {seats} at a time" in note and f"(--num-prompts {requests} " in note for note in notes)


@pytest.mark.parametrize(("cap", "inside"), [(10, None), (11, 11), (300, 256)])
def test_few_are_counted_against_what_the_client_lets_in(
    make_document: Make, core_result: Make, cap: int, inside: int | None
) -> None:
    notes = about(make_document([core_result("fcfs")], max_concurrency=cap), "100 requests are few")
    assert len(notes) == (inside is not None)
    assert all(f"takes {inside} at a time" in note for note in notes)


def test_the_header_says_that_the_cap_of_the_client_is_the_queue(make_document: Make, core_result: Make) -> None:
    def header(seats: list[int], cap: int | None) -> str:
        entries = [core_result("fcfs", point=point) for point in range(len(seats))]
        document = make_document(entries, max_concurrency=cap, sweep={"max_num_seqs": seats})
        return " ".join(report(document).split("\n\n")[0].split())

    one = (
        "the client's cap of 16 in flight (--max-concurrency) is the queue in front of the engine's 64 seats, and no "
        "order of the server can act on it"
    )
    assert f") {one} " in header([64], 16)
    assert "at 1 of 2 points the client's cap of 16 in flight" in header([8, 64], 16)
    assert "the engine's seats (16 to 64), and no order" in header([16, 32, 64], 16)
    for cap in (None, 65):
        assert "client" not in header([64], cap)


def test_no_queue_in_a_short_trace_is_not_blamed_on_the_load(make_document: Make, core_result: Make) -> None:
    for load, remedy in ((1.2, "--num-prompts 5120 repeats it"), (0.7, "raise --load")):
        entries = [core_result(name, share=0.0, ptl=12.5, load=load) for name in ("fcfs", "leap")]
        assert remedy in make_document(entries, load=load)["conclusions"][0]


def test_orders_of_slots_without_a_choice_of_slots_are_pointed_out(make_document: Make, core_result: Make) -> None:
    def entries(preemptions: float, las: float) -> list[dict[str, Any]]:
        named = [core_result("fcfs"), core_result("las", ptl=las), core_result("leap-paper"), core_result("leap")]
        for one in named:
            one["queue"]["preemptions"] = {"mean": preemptions, "ci95": None}
        return named

    assert about(make_document(entries(0.0, 100.0)), "las and leap-paper do as fcfs does")
    assert about(make_document(entries(0.0, 99.0)), "leap-paper does as fcfs does")
    assert not about(make_document(entries(3.0, 100.0)), "as fcfs does")
    assert not about(make_document(entries(0.0, 100.0), sweep={"decode_slots": [64]}), "as fcfs does")
    assert about(make_document(entries(0.0, 100.0), sweep={"decode_slots": [256]}), "as fcfs does")
    quiet = [core_result(name, share=0.0) for name in ("fcfs", "las")]
    assert not about(make_document(quiet), "as fcfs does")


def test_a_trace_is_repeated_beyond_its_length(few: Path) -> None:
    """120 requests three times over are each served 3 or 4 times, and the report tells the two numbers apart."""
    options: dict[str, Any] = {"policies": "fcfs", "seeds": 1, "load": 1.2, "max_num_seqs": 16}
    result = replay(few, num_prompts=400, **options)
    document = result.to_dict()
    assert (document["trace"]["recorded_requests"], document["trace"]["requests"]) == (120, 400)
    assert set(result.requests["row"].value_counts()["count"]) == {3, 4}
    assert "120 requests over" in report(document)
    assert "repeated to 400" in report(document)
    assert about(document, "over and over")
    assert not about(document, "are few")
    short = replay(few, **options).to_dict()
    assert about(short, "120 requests are few")
    assert "repeated" not in report(short).split("\n\n")[0]


def test_the_first_of_a_trace_and_what_is_left_out_are_told() -> None:
    frame = pl.DataFrame(
        {"arrival_s": [0.0, 1.0, 2.0, 3.0], "prompt_tokens": [9, 9999, 9, 9], "output_tokens": [5] * 4}
    )
    document = replay(frame, policies="fcfs", seeds=1, num_prompts=3, kv_tokens=1024).to_dict()
    assert report(document).startswith("frame: the first 3 of 4 requests over 2 s, 1 of them left out\n")


def test_lines_never_end_in_a_space_and_keep_numbers_with_their_sign(
    make_document: Make, core_result: Make, paired: Make
) -> None:
    leap = core_result("leap", paired=paired((-86.4, (-88.2, -84.6)), p99=12.3, throughput=-13.0))
    document = make_document([core_result("fcfs"), leap], load=1.2)
    for width in range(50, 121):
        text = report(document, width).split("\nnote: ")[-1]
        assert all(line == line.rstrip() and not line.startswith("%") for line in text.splitlines())
        assert max(map(len, text.splitlines())) <= width
        assert document["conclusions"][0] in " ".join(text.split())
