"""Options in vLLM's additional_config: what is valid, and the one line that says what is not."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import leap_rs
from leap_rs import ConfigError
from leap_rs._leap import DEFAULT_AGING
from leap_rs.vllm.options import LEVERS, LeapOptions, parse


def test_absent_options_are_none_and_an_empty_object_is_the_defaults() -> None:
    assert parse({}) is None
    assert parse(None) is None
    assert parse({"other": {"levers": "queue"}}) is None
    options = parse({"leap": {}})
    assert options == LeapOptions()
    assert options is not None
    assert (options.levers, options.mode, options.decode_slots) == (("queue", "admission"), "auto", None)
    assert (options.memory_weight, options.order, options.recompute_share) == (1.0, "gittins", 0.01)


@pytest.mark.parametrize("levers", [["slots", "queue"], "queue+slots", "queue, slots", ("queue", "slots", "queue")])
def test_levers_are_a_set_however_they_are_written(levers: object) -> None:
    options = parse({"leap": {"levers": levers}})
    assert options is not None
    assert options.levers == ("queue", "slots")
    assert options.has("slots")
    assert not options.has("evict")


def test_slots_that_are_given_act_unless_the_levers_say_otherwise() -> None:
    for given, levers in [
        ({"decode_slots": 8}, ("queue", "slots", "admission")),
        ({"decode_slots": None}, ("queue", "admission")),
        ({"decode_slots": 8, "levers": "queue"}, ("queue",)),
        ({"levers": ["admission", "evict"]}, ("evict", "admission")),
        ({"levers": []}, ()),
    ]:
        options = parse({"leap": given})
        assert options is not None
        assert options.levers == levers


def test_order_fcfs_acts_nowhere_but_in_admission() -> None:
    options = parse({"leap": {"levers": ["queue", "slots", "evict", "admission"], "order": "fcfs"}})
    assert options is not None
    assert [lever for lever in LEVERS if options.has(lever)] == ["admission"]
    without = parse({"leap": {"levers": ["queue"], "order": "fcfs"}})
    assert without is not None
    assert not without.has("admission")


@pytest.mark.parametrize(
    ("given", "a_second"), [({}, DEFAULT_AGING), ({"aging": 3}, 3.0), ({"aging": 0}, 0.0), ({"aging_rate": 0.5}, 0.5)]
)
def test_the_clock_is_that_of_the_aging_in_force(given: dict[str, float], a_second: float) -> None:
    """A wait that is no queue counts as one second, so that both kinds of aging are the same there."""
    options = parse({"leap": given})
    assert options is not None
    clock = options.clock()
    assert clock.at(7.0) == pytest.approx(7 * a_second)
    # After 10 s in which one a second has ended, 100 wait: of the two only the relative one goes by that.
    for second in range(1, 11):
        clock.finished(50)
        clock.step(float(second), 100 if second == 10 else 0)
    slower = clock.at(11.0) - clock.at(10.0)
    assert slower == pytest.approx(a_second) if "aging_rate" in given else slower <= a_second / 50


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


def test_an_encoder_is_a_name_or_an_object() -> None:
    assert LeapOptions().encoder is None
    for given in ("org/mini", {"model": "org/mini"}):
        options = parse({"leap": {"encoder": given}})
        assert options is not None
        assert options.encoder is not None
        assert options.encoder.model_dump() == {"model": "org/mini", "layer": None, "threads": 1, "device": "cpu"}
    options = parse({"leap": {"encoder": {"model": "mini", "layer": 3, "threads": 2, "device": "cuda:1"}}})
    assert options is not None
    assert options.encoder is not None
    assert (options.encoder.layer, options.encoder.threads, options.encoder.device) == (3, 2, "cuda:1")


def test_what_the_search_prints_can_be_pasted() -> None:
    from leap_rs.replay.options import Options
    from leap_rs.replay.tune.server import server_options
    from leap_rs.replay.tune.space import Candidate

    candidate = Candidate(
        levers=("queue", "evict"),
        order="gittins:e2el",
        aging=0.1,
        aging_key="aging_rate",
        memory_weight=1.0,
        max_num_seqs=64,
        decode_slots=32,
    )
    printed = server_options(candidate, Options(wait_cap_s=9.0))["additional_config"]
    options = parse(printed)
    assert options is not None
    assert (options.levers, options.order, options.objective) == (("queue", "evict"), "gittins", "e2el")
    assert (options.aging_rate, options.decode_slots, options.wait_cap_s) == (0.1, 32, 9.0)
    plain = Candidate(levers=(), order="gittins:ptl", aging=0.0, memory_weight=0.0, max_num_seqs=64, decode_slots=None)
    shadow = parse(server_options(plain, Options())["additional_config"])
    assert shadow is not None
    assert shadow.mode == "shadow"


@pytest.mark.parametrize(
    ("leap", "parts"),
    [
        ({"lever": ["queue"]}, ("lever: no such option", "levers", "state_dir")),
        ({"levers": ["queues"]}, ("levers: unknown lever 'queues'", "queue, slots, evict, admission")),
        ({"levers": 3}, ("levers:", "got 3")),
        ({"decode_slots": 0}, ("decode_slots:", "got 0")),
        ({"mode": "on"}, ("mode:", "'shadow'", "got 'on'")),
        ({"aging_rate": -1}, ("aging_rate:", "got -1")),
        ({"aging_rate": float("nan")}, ("aging_rate:",)),
        ({"aging": -1}, ("aging:", "got -1")),
        ({"aging": 2, "aging_rate": 0.05}, ("aging (a standing wait) and aging_rate (a second) exclude each other",)),
        ({"recompute_share": 0}, ("recompute_share:", "got 0")),
        ({"recompute_share": 0.6}, ("recompute_share:", "got 0.6")),
        ({"evict_factor": 0.5}, ("evict_factor:", "got 0.5")),
        ({"rls": {"lamda": 1}}, ("rls.lamda: no such option", "lambda")),
        ({"rls": {"batch": 0}}, ("rls.batch:",)),
        ({"arm": {"min_correlation": 2}}, ("arm.min_correlation:",)),
        ({"encoder": 5}, ("encoder: expected a model's directory or name", "model, layer, threads, device", "got 5")),
        ({"encoder": ""}, ("encoder.model:", "got ''")),
        ({"encoder": {"layer": 4}}, ("encoder.model: field required",)),
        ({"encoder": {"model": "mini", "thread": 1}}, ("encoder.thread: no such option", "threads")),
        ({"encoder": {"model": "mini", "threads": 0}}, ("encoder.threads:", "got 0")),
        ({"encoder": {"model": "mini", "layer": -1}}, ("encoder.layer:", "got -1")),
        ("queue", ("expected an object", "'queue'")),
    ],
)
def test_a_wrong_option_is_one_line_that_names_it(leap: object, parts: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse({"leap": leap})
    text = str(caught.value)
    assert text.startswith("additional_config: leap: ")
    assert "\n" not in text
    assert ": :" not in text
    for part in parts:
        assert part in text


def test_importing_the_plugin_does_not_import_vllm() -> None:
    code = (
        "import sys; import leap_rs.vllm, leap_rs.vllm.options, leap_rs.vllm.order, leap_rs.vllm.slots, "
        "leap_rs.vllm.compat, leap_rs.vllm.brain; "
        "print([m for m in sys.modules if m == 'vllm' or m.startswith(('vllm.', 'torch'))])"
    )
    root = Path(leap_rs.__file__).parent.parent
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root)
    assert done.stdout.strip() == "[]"
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        leap_rs.vllm.Nothing  # type: ignore[attr-defined]  # noqa: B018
