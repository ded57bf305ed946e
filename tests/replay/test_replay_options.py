"""Options: what is accepted, what is refused, and that a refusal names the option."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leap_rs._leap import ConfigError
from leap_rs.replay.options import METRICS, SWEPT, Options, build, grid

TEXT = st.text(alphabet="abx:=,.- 013", max_size=8)


def test_defaults_replay_one_point_at_the_times_of_the_trace() -> None:
    options = build({})
    assert options.points() == [
        dict.fromkeys(("load", "request_rate", "decode_slots", "max_num_seqs", "aging", "aging_rate"))
    ]
    assert options.percentile_metrics == METRICS
    assert options.metric_percentiles == (50.0, 90.0, 99.0)


@given(start=st.integers(1, 40), steps=st.integers(0, 60), step=st.integers(1, 20), places=st.integers(0, 3))
def test_a_grid_has_both_ends_and_exact_decimals(start: int, steps: int, step: int, places: int) -> None:
    """Expected values are integers over a power of ten, the float nearest to the decimal that a person would write."""
    scale = 10**places
    text = ":".join(f"{n / scale:.{places}f}" for n in (start, start + steps * step, step))
    assert grid(text) == [float(f"{(start + i * step) / scale:.{places}f}") for i in range(steps + 1)]


def test_a_grid_that_does_not_meet_its_end_stays_below_it() -> None:
    assert grid("0.6:1.55:0.3") == [0.6, 0.9, 1.2, 1.5]
    assert grid("2, 1,4") == [2.0, 1.0, 4.0]


@given(
    loads=st.lists(st.integers(1, 500), min_size=1, max_size=6, unique=True),
    slots=st.lists(st.integers(1, 512), min_size=1, max_size=4, unique=True),
)
def test_several_sweeps_are_a_product(loads: list[int], slots: list[int]) -> None:
    points = build({"sweep": {"load": [n / 100 for n in loads], "decode_slots": slots}}).points()
    assert [(p["load"], p["decode_slots"]) for p in points] == [(n / 100, s) for n in loads for s in slots]
    assert all(isinstance(p["decode_slots"], int) for p in points)


def test_sweep_names_are_read_with_dashes_and_underscores() -> None:
    options = build({"sweep": ["decode-slots=32:96:32", "aging_rate=0,0.05"]})
    assert [(p["decode_slots"], p["aging_rate"]) for p in options.points()] == [
        (slots, rate) for slots in (32, 64, 96) for rate in (0.0, 0.05)
    ]


@given(
    st.dictionaries(st.sampled_from(["ptl", "ttft", "tpot", "e2el"]), st.floats(0, 1e9, allow_nan=False), min_size=1)
)
def test_goodput_is_the_same_in_every_spelling(objectives: dict[str, float]) -> None:
    pairs = [f"{key}:{limit!r}" for key, limit in objectives.items()]
    for spelling in (objectives, pairs, " ".join(pairs), [" ".join(pairs)]):
        assert build({"goodput": spelling}).goodput == objectives


def test_request_rate_inf_becomes_text_that_strict_json_can_carry() -> None:
    for spelling in ("inf", math.inf):
        point = build({"request_rate": spelling}).points()[0]
        assert json.loads(json.dumps(point, allow_nan=False))["request_rate"] == "inf"


def test_burstiness_inf_is_taken() -> None:
    for spelling in ("inf", math.inf):
        assert build({"burstiness": spelling}).burstiness == math.inf


@pytest.mark.parametrize(
    ("values", "option", "part"),
    [
        ({"load": -1.0}, "load", "-1"),
        ({"load": math.nan}, "load", "nan"),
        ({"load": 0}, "load", "greater than 0"),
        ({"request_rate": math.nan}, "request_rate", "nan"),
        ({"request_rate": 0.0}, "request_rate", "greater than 0"),
        ({"burstiness": 0.0}, "burstiness", "greater than 0"),
        ({"burstiness": math.nan}, "burstiness", "nan"),
        ({"burstiness": -math.inf}, "burstiness", "greater than 0"),
        ({"seeds": 0}, "seeds", "0"),
        ({"seed": -1}, "seed", "-1"),
        ({"num_prompts": 0}, "num_prompts", "0"),
        ({"max_num_seqs": 0}, "max_num_seqs", "0"),
        ({"watermark": 1.0}, "watermark", "less than 1"),
        ({"wait_cap_s": math.inf}, "wait_cap_s", "inf"),
        ({"goodput": "speed:3"}, "goodput", "unknown metric 'speed'"),
        ({"goodput": "ttft=3"}, "goodput", "METRIC:MILLISECONDS"),
        ({"goodput": "ttft:fast"}, "goodput", "needs milliseconds"),
        ({"goodput": "ttft:-3"}, "goodput", ">= 0"),
        ({"goodput": "ttft:3 ttft:4"}, "goodput", "twice"),
        ({"percentile_metrics": "ttft,speed"}, "percentile_metrics", "unknown metric 'speed'"),
        ({"metric_percentiles": "50,x"}, "metric_percentiles", "numbers"),
        ({"metric_percentiles": "101"}, "metric_percentiles", "between 0 and 100"),
        ({"metadata": ["gpu"]}, "metadata", "KEY=VALUE"),
        ({"metadata": ["results=1"]}, "metadata", "result itself"),
        ({"sweep": ["load"]}, "sweep", "NAME=START:STOP:STEP"),
        ({"sweep": ["speed=1:2:1"]}, "sweep", "cannot sweep 'speed'"),
        ({"sweep": ["policy=fcfs,leap"]}, "sweep", "cannot sweep 'policy'"),
        ({"sweep": ["load=1:2"]}, "sweep", "START:STOP:STEP"),
        ({"sweep": ["load=1:2:x"]}, "sweep", "START:STOP:STEP"),
        ({"sweep": ["load=2:1:0.1"]}, "sweep", "START <= STOP"),
        ({"sweep": ["load=1:2:0"]}, "sweep", "STEP > 0"),
        ({"sweep": ["load=1:nan:1"]}, "sweep", "START:STOP:STEP"),
        ({"sweep": ["load=0:1:0.5"]}, "sweep", "> 0"),
        ({"sweep": ["load=1:1e9:1"]}, "sweep", "more than"),
        ({"sweep": ["decode-slots=1:2:0.5"]}, "sweep", "whole number"),
        ({"sweep": ["load=1:2:1", "load=3:4:1"]}, "sweep", "twice"),
        ({"sweep": ["aging=1,2", "aging-rate=0.1"]}, "sweep", "exclude each other"),
        ({"sweep": ["aging=-1"]}, "sweep", ">= 0"),
        ({"sweep": ["load=1:2:1"], "load": 1.0}, "sweep", "also given"),
        ({"sweep": ["load=1:2:1"], "request_rate": 1.0}, "load", "request_rate replaces"),
        ({"load": 1.0, "request_rate": 1.0}, "load", "request_rate replaces"),
        ({"policies": ()}, "policies", "at least one"),
        ({"speed": 3}, "speed", "no such option"),
    ],
)
def test_a_wrong_option_is_named(values: dict[str, Any], option: str, part: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build(values)
    message = str(caught.value)
    assert message.startswith(f"{option}: ")
    assert part in message
    assert "\n" not in message


@given(
    st.dictionaries(
        st.sampled_from(sorted(Options.model_fields)),
        st.one_of(
            st.none(),
            st.booleans(),
            st.integers(-3, 3),
            st.floats(),
            TEXT,
            st.lists(TEXT, max_size=3),
        ),
        max_size=3,
    )
)
def test_anything_is_taken_or_refused_with_one_line(values: dict[str, Any]) -> None:
    try:
        points = build(values).points()
    except ConfigError as error:
        points = []
        message = str(error)
    else:
        message = "none"
    assert message
    assert "\n" not in message
    json.dumps(points, allow_nan=False)
    assert all(set(point) == {*SWEPT, "request_rate"} for point in points)
