"""Options in vLLM's additional_config: what is valid, and the one line that says what is not."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import leap_rs
from leap_rs import ConfigError
from leap_rs.vllm.options import LeapOptions, parse


def test_absent_options_are_none_and_an_empty_object_is_the_defaults() -> None:
    assert parse({}) is None
    assert parse(None) is None
    assert parse({"other": {"levers": "queue"}}) is None
    options = parse({"leap": {}})
    assert options == LeapOptions()
    assert options is not None
    assert (options.levers, options.mode, options.decode_slots) == (("queue", "slots"), "auto", None)
    assert (options.aging_rate, options.memory_weight, options.order) == (0.05, 1.0, "gittins")


@pytest.mark.parametrize("levers", [["slots", "queue"], "queue+slots", "queue, slots", ("queue", "slots", "queue")])
def test_levers_are_a_set_however_they_are_written(levers: object) -> None:
    options = parse({"leap": {"levers": levers}})
    assert options is not None
    assert options.levers == ("queue", "slots")
    assert options.has("slots")
    assert not options.has("evict")


def test_order_fcfs_acts_nowhere() -> None:
    options = parse({"leap": {"levers": ["queue", "slots", "evict"], "order": "fcfs"}})
    assert options is not None
    assert not any(options.has(lever) for lever in ("queue", "slots", "evict"))


def test_json_of_a_command_line_is_read_whole() -> None:
    text = """{"leap": {"levers": ["queue", "slots", "evict"], "decode_slots": 64, "layer": 20, "readout": "r.safetensors",
        "mode": "armed", "order": "survival", "objective": "e2el", "aging_rate": 0.02, "memory_weight": 0,
        "wait_cap_steps": 128, "wait_cap_s": 60, "rls": {"batch": 4, "forgetting": 0.999, "lambda": 10},
        "state_dir": "/var/lib/leap", "record": "trace.parquet",
        "arm": {"window": 100, "min_correlation": 0.3, "hysteresis": 0.1}}}"""
    options = parse(json.loads(text))
    assert options is not None
    assert options.rls.lam == 10
    assert options.arm.window == 100
    assert options.readout == Path("r.safetensors")
    assert options.wait_cap_steps == 128


def test_what_the_search_prints_can_be_pasted() -> None:
    from leap_rs.replay.options import Options
    from leap_rs.replay.tune.server import server_options
    from leap_rs.replay.tune.space import Candidate

    candidate = Candidate(
        levers=("queue", "evict"),
        order="gittins:e2el",
        aging_rate=0.1,
        memory_weight=1.0,
        max_num_seqs=64,
        decode_slots=32,
    )
    printed = server_options(candidate, Options(wait_cap_s=9.0))["additional_config"]
    options = parse(printed)
    assert options is not None
    assert (options.levers, options.order, options.objective) == (("queue", "evict"), "gittins", "e2el")
    assert (options.aging_rate, options.decode_slots, options.wait_cap_s) == (0.1, 32, 9.0)
    plain = Candidate(
        levers=(), order="gittins:ptl", aging_rate=0.0, memory_weight=0.0, max_num_seqs=64, decode_slots=None
    )
    shadow = parse(server_options(plain, Options())["additional_config"])
    assert shadow is not None
    assert shadow.mode == "shadow"


@pytest.mark.parametrize(
    ("leap", "parts"),
    [
        ({"lever": ["queue"]}, ("lever: no such option", "levers", "state_dir")),
        ({"levers": ["queues"]}, ("levers: unknown lever 'queues'", "queue, slots, evict")),
        ({"decode_slots": 0}, ("decode_slots:", "got 0")),
        ({"mode": "on"}, ("mode:", "'shadow'", "got 'on'")),
        ({"aging_rate": -1}, ("aging_rate:", "got -1")),
        ({"aging_rate": float("nan")}, ("aging_rate:",)),
        ({"evict_factor": 0.5}, ("evict_factor:", "got 0.5")),
        ({"rls": {"lamda": 1}}, ("rls.lamda: no such option", "lambda")),
        ({"rls": {"batch": 0}}, ("rls.batch:",)),
        ({"arm": {"min_correlation": 2}}, ("arm.min_correlation:",)),
        ("queue", ("expected an object", "'queue'")),
    ],
)
def test_a_wrong_option_is_one_line_that_names_it(leap: object, parts: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse({"leap": leap})
    text = str(caught.value)
    assert text.startswith("additional_config: leap: ")
    assert "\n" not in text
    for part in parts:
        assert part in text


def test_importing_the_plugin_does_not_import_vllm() -> None:
    code = (
        "import sys; import leap_rs.vllm, leap_rs.vllm.options, leap_rs.vllm.waiting, leap_rs.vllm.slots, "
        "leap_rs.vllm.compat, leap_rs.vllm.brain; "
        "print([m for m in sys.modules if m == 'vllm' or m.startswith(('vllm.', 'torch'))])"
    )
    root = Path(leap_rs.__file__).parent.parent
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root)
    assert done.stdout.strip() == "[]"
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        leap_rs.vllm.Nothing  # type: ignore[attr-defined]  # noqa: B018
