"""The sentence that the report ends with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Make = Callable[..., dict[str, Any]]


def test_leap_against_fcfs_with_the_tail_and_the_oracle(make_document: Make, core_result: Make, paired: Make) -> None:
    document = make_document(
        [
            core_result("fcfs", ptl=467.0),
            core_result("leap", ptl=63.0, paired=paired((-86.4, (-88.2, -84.6)), p99=12.3, throughput=-0.4)),
            core_result("srpt-oracle", ptl=48.0, paired=paired((-89.7, (-91.0, -88.0)))),
        ],
        load=1.2,
    )
    assert document["conclusions"][0] == (
        "At load 1.2 (2.65 req/s): LEAP cuts mean PTL by 86 % (85 to 88) against FCFS; P99 E2EL changes by +12 %; "
        "the oracle cuts mean PTL by 90 %."
    )


def test_a_price_in_throughput_is_told(make_document: Make, core_result: Make, paired: Make) -> None:
    document = make_document(
        [core_result("fcfs"), core_result("leap", paired=paired((-20.0, (-25.0, -15.0)), throughput=-13.2))], load=1.2
    )
    assert "throughput changes by -13 %" in document["conclusions"][0]


@pytest.mark.parametrize(
    ("change", "interval", "expected"),
    [
        (-3.0, (-9.0, 4.0), "LEAP changes mean PTL by -3.0 % (-9.0 to +4.0) against FCFS, no clear difference"),
        (25.0, (20.0, 31.0), "LEAP raises mean PTL by 25 % (20 to 31) against FCFS"),
        (-25.0, None, "LEAP cuts mean PTL by 25 % against FCFS"),
        (0.0, (0.0, 0.0), "LEAP leaves mean PTL as it is under FCFS"),
    ],
)
def test_what_the_interval_allows_to_say(
    make_document: Make,
    core_result: Make,
    paired: Make,
    change: float,
    interval: tuple[float, float] | None,
    expected: str,
) -> None:
    document = make_document(
        [core_result("fcfs", ptl=100.0), core_result("leap", ptl=90.0, paired=paired((change, interval)))]
    )
    assert expected in document["conclusions"][0]


def test_without_a_queue_no_policy_can_matter(make_document: Make, core_result: Make, paired: Make) -> None:
    same = [
        core_result(name, share=0.0, ptl=12.5, paired=paired((0.0, (0.0, 0.0))))
        for name in ("fcfs", "leap", "srpt-oracle")
    ]
    sentence = make_document(same)["conclusions"][0]
    assert "no policy can matter at this load, because there is no queue" in sentence
    assert "cuts" not in sentence


def test_below_the_seats_the_cap_of_the_client_is_the_queue(
    make_document: Make, core_result: Make, paired: Make
) -> None:
    same = [core_result(name, share=0.0, ptl=12.5, paired=paired((0.0, (0.0, 0.0)))) for name in ("fcfs", "leap")]
    for cap, seats, options in ((16, 256, {}), (255, 256, {}), (64, 64, {"sweep": {"max_num_seqs": [64]}})):
        (sentence,) = make_document(same, max_concurrency=cap, **options)["conclusions"]
        assert sentence.endswith(
            f": no policy can matter, because the client's cap of {cap} in flight (--max-concurrency) is the queue in "
            f"front of the engine's {seats} seats, and no order of the server can act on it (give --max-concurrency above "
            f"{seats}, or leave it out)."
        )
    above = make_document(same, max_concurrency=257)["conclusions"]
    assert above == make_document(same)["conclusions"]
    assert "because there is no queue" in above[0]


def test_what_an_order_still_changes_comes_before_the_cap(make_document: Make, core_result: Make, paired: Make) -> None:
    """Memory or decode slots may leave the server a choice below its seats."""
    fcfs, leap = core_result("fcfs"), core_result("leap", ptl=80.0, paired=paired((-20.0, (-25.0, -15.0))))
    said = (
        " The client's cap of 16 in flight (--max-concurrency) is the queue in front of the engine's 256 seats, and no "
        "order of the server can act on it."
    )
    for results in ([fcfs, leap], [leap], [fcfs], [fcfs, core_result("srpt-oracle", paired=paired((-30.0, None)))]):
        free = make_document(results)["conclusions"][0]
        assert make_document(results, max_concurrency=300)["conclusions"][0] == free
        assert make_document(results, max_concurrency=16)["conclusions"][0] == free + said


def test_slots_can_matter_without_a_queue(make_document: Make, core_result: Make, paired: Make) -> None:
    """Fewer decode slots than residents: nobody waits for admission and the order still changes what happens."""
    document = make_document(
        [
            core_result("fcfs", share=0.0, ptl=100.0),
            core_result("leap-paper", share=0.0, ptl=40.0, paired=paired((-60.0, (-62.0, -58.0)))),
        ]
    )
    assert "leap-paper cuts mean PTL by 60 %" in document["conclusions"][0]
    assert "so little can change" not in document["conclusions"][0]


def test_no_change_is_said_in_words_and_never_as_minus_0(make_document: Make, core_result: Make, paired: Make) -> None:
    leap = core_result("leap", ptl=99.9, paired=paired((-0.01, (-0.02, 0.0)), p99=-0.04))
    oracle = core_result("srpt-oracle", ptl=99.9, paired=paired((-0.01, None)))
    sentence = make_document([core_result("fcfs"), leap, oracle])["conclusions"][0]
    assert "P99 E2EL changes by 0 %; the oracle leaves mean PTL as it is." in sentence
    assert "-0 " not in sentence


def test_a_rare_queue_is_pointed_out(make_document: Make, core_result: Make, paired: Make) -> None:
    document = make_document(
        [core_result("fcfs", share=0.004), core_result("leap", ptl=99.0, paired=paired((-1.0, (-1.5, -0.5))))]
    )
    assert "Only 0.4 % of the steps had a queue" in document["conclusions"][0]


def test_the_sentence_is_about_leap_then_its_relatives_then_the_best(
    make_document: Make, core_result: Make, paired: Make
) -> None:
    def about(*policies: tuple[str, float]) -> str:
        entries = [core_result("fcfs", ptl=100.0)]
        entries += [core_result(name, ptl=ptl, paired=paired((ptl - 100.0, None))) for name, ptl in policies]
        sentence: str = make_document(entries)["conclusions"][0]
        return sentence

    assert "LEAP cuts mean PTL by 30 %" in about(("score:bert", 20.0), ("leap:rls=off", 25.0), ("leap", 70.0))
    assert "leap:rls=off cuts mean PTL by 75 %" in about(
        ("score:bert", 20.0), ("leap:rls=off", 25.0), ("leap:order=survival", 70.0)
    )
    assert "leap-paper cuts mean PTL by 10 %" in about(("score:bert", 20.0), ("leap-paper", 90.0))
    assert "score:bert cuts mean PTL by 80 %" in about(("las", 10.0), ("score:bert", 20.0))
    assert "las cuts mean PTL by 90 %" in about(("mlfq", 50.0), ("las", 10.0), ("srpt-oracle", 5.0))
    assert "no predictor was replayed" in about(("srpt-oracle", 5.0))


def test_nothing_to_compare_with(make_document: Make, core_result: Make) -> None:
    assert "fcfs was not replayed" in make_document([core_result("leap")])["conclusions"][0]
    assert "only fcfs was replayed" in make_document([core_result("fcfs")])["conclusions"][0]


def test_a_sentence_for_every_point_of_a_sweep(make_document: Make, core_result: Make, paired: Make) -> None:
    entries = [
        core_result(name, point=point, load=load, ptl=ptl, share=share, paired=paired((-10.0, None)))
        for point, (load, share) in enumerate([(0.6, 0.0), (1.2, 0.5)])
        for name, ptl in (("fcfs", 10.0), ("leap", 10.0))
    ]
    first, second = make_document(entries, sweep={"load": [0.6, 1.2]})["conclusions"]
    assert first.startswith("At load 0.6 (2.65 req/s): no policy can matter")
    assert second.startswith("At load 1.2 (2.65 req/s): LEAP cuts mean PTL by 10 %")


def test_where_the_load_comes_from(make_document: Make, core_result: Make) -> None:
    fcfs = [core_result("fcfs", load=1.13)]
    assert make_document(fcfs)["conclusions"][0].startswith("At the trace's own times (2.65 req/s, load 1.13): ")
    assert make_document(fcfs, request_rate=3.0)["conclusions"][0].startswith("At 3 req/s (load 1.13): ")
    assert make_document(fcfs, request_rate="inf")["conclusions"][0].startswith("All requests at once: ")
    assert (
        "64 decode slots, aging rate 0.02"
        in make_document(fcfs, sweep={"decode_slots": [64], "aging_rate": [0.02]})["conclusions"][0]
    )
    assert "load 1.13), aging 4: " in make_document(fcfs, sweep={"aging": [4]})["conclusions"][0]
