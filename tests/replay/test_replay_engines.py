"""The engine in force: presets, cost models of the user's own, the null block."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leap_rs._leap import ConfigError
from leap_rs.replay.engines import COST_KEYS, measured_to, presets, resolve
from leap_rs.replay.options import build

COST = dict.fromkeys(COST_KEYS, 0.0) | {"step_s": 0.01, "free_tokens": 64}


def test_the_presets_of_the_documentation_are_there() -> None:
    assert {"h100-llama-8b", "rtx4090-llama-8b", "paper"} <= set(presets())
    core, stated = resolve(build({}))
    assert stated["engine"] == "h100-llama-8b"
    assert set(core["cost"]) == set(COST_KEYS)
    assert stated["cost_model"] == core["cost"]


def test_a_preset_states_the_null_block_that_the_run_counted() -> None:
    """2,588 blocks of 16 in that run's meta.json, of which 2,587 can be used."""
    core, stated = resolve(build({"engine": "rtx4090-llama-8b"}))
    assert (core["kv_tokens"], stated["kv_tokens_usable"], stated["kv_tokens"]) == (41_392, 41_392, 41_408)


@given(st.integers(1, 10_000), st.sampled_from([1, 8, 16, 32, 128]))
def test_kv_tokens_count_the_null_block(tokens: int, block_size: int) -> None:
    options = build({"kv_tokens": tokens, "block_size": block_size})
    if tokens < 2 * block_size:
        with pytest.raises(ConfigError, match="kv_tokens"):
            resolve(options)
    else:
        core, stated = resolve(options)
        assert core["kv_tokens"] == (tokens // block_size - 1) * block_size
        assert stated["kv_tokens"] == tokens // block_size * block_size


def test_paper_has_its_slots_and_options_go_over_the_preset() -> None:
    core, _ = resolve(build({"engine": "paper"}))
    assert (core["max_num_seqs"], core["decode_slots"]) == (512, 64)
    core, _ = resolve(build({"engine": "paper", "decode_slots": 32, "max_num_seqs": 100, "async_scheduling": False}))
    assert (core["max_num_seqs"], core["decode_slots"], core["async_scheduling"]) == (100, 32, False)


def test_the_seats_of_an_api_server_are_those_of_vllm() -> None:
    """vLLM 0.32: 1,024 and 8,192 from 70 GiB on but on the A100, 256 and 2,048 elsewhere; never more than a step has tokens."""
    for name, seats, tokens in (
        ("h100-llama-8b", 1024, 8192),
        ("a100-qwen3-8b", 256, 2048),
        ("l40s-llama-8b", 256, 2048),
    ):
        core, _ = resolve(build({"engine": name}))
        assert (core["max_num_seqs"], core["max_num_batched_tokens"]) == (seats, tokens)
    assert resolve(build({"max_num_batched_tokens": 512}))[0]["max_num_seqs"] == 512
    # Who gives both gets both, and the core refuses what vLLM refuses.
    assert resolve(build({"max_num_batched_tokens": 512, "max_num_seqs": 600}))[0]["max_num_seqs"] == 600


def test_step_times_are_known_as_far_as_they_were_measured() -> None:
    assert measured_to(build({"max_num_seqs": 900})) == presets()["h100-llama-8b"]["measured_to_seqs"] == 256
    assert measured_to(build({"cost_model": {"cost": COST, "max_num_seqs": 7}})) == 7


def test_an_unknown_engine_lists_those_that_exist() -> None:
    with pytest.raises(ConfigError, match=r"no preset 'tpu'.*h100-llama-8b.*paper"):
        resolve(build({"engine": "tpu"}))


def test_a_cost_model_replaces_the_coefficients_and_what_stands_beside_them(tmp_path: Path) -> None:
    file = tmp_path / "cost.json"
    file.write_text(json.dumps(COST))
    core, stated = resolve(build({"cost_model": file}))
    assert core["cost"] == COST
    assert (core["max_num_seqs"], stated["engine"]) == (presets()["h100-llama-8b"]["max_num_seqs"], str(file))
    whole = {"name": "mine", "cost": COST, "kv_tokens": 3200, "block_size": 32, "max_num_seqs": 7, "source": "a run"}
    core, stated = resolve(build({"cost_model": whole, "max_num_seqs": 9}))
    assert (core["kv_tokens"], core["block_size"], core["max_num_seqs"]) == (3200, 32, 9)
    assert (stated["engine"], stated["kv_tokens"]) == ("mine", 3232)


def test_ranks_come_from_a_cost_model_or_an_option() -> None:
    assert resolve(build({}))[0]["data_parallel_size"] == 1
    model = {"cost": COST, "data_parallel_size": 4}
    core, stated = resolve(build({"cost_model": model}))
    assert (core["data_parallel_size"], stated["data_parallel_size"]) == (4, 4)
    assert resolve(build({"cost_model": model, "data_parallel_size": 2}))[0]["data_parallel_size"] == 2


@pytest.mark.parametrize(
    ("content", "part"),
    [
        ("[1]", "expected an object"),
        ("{", "not JSON"),
        (json.dumps({"step_s": 0.01}), "per_decode_seq_s is missing"),
        (json.dumps(COST | {"speed": 1}), "unknown key 'speed'"),
        (json.dumps(COST | {"step_s": -1}), "step_s must be a number >= 0"),
        (json.dumps(COST | {"step_s": "fast"}), "step_s must be a number >= 0"),
        (json.dumps(COST | {"step_s": True}), "step_s must be a number >= 0"),
        (json.dumps(COST).replace("0.01", "NaN"), "step_s must be a number >= 0"),
        (json.dumps({"cost": COST, "max_num_seqs": 0}), "max_num_seqs must be a whole number"),
        (json.dumps({"cost": COST, "data_parallel_size": 0}), "data_parallel_size must be a whole number"),
        (json.dumps({"cost": COST, "async_scheduling": "yes"}), "async_scheduling must be true or false"),
        (json.dumps({"cost": 3}), "cost is not an object"),
    ],
)
def test_a_wrong_cost_model_names_file_and_key(tmp_path: Path, content: str, part: str) -> None:
    file = tmp_path / "cost.json"
    file.write_text(content)
    with pytest.raises(ConfigError) as caught:
        resolve(build({"cost_model": file}))
    assert "cost.json" in str(caught.value)
    assert part in str(caught.value)


def test_a_cost_model_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"missing\.json"):
        resolve(build({"cost_model": tmp_path / "missing.json"}))


def test_switches_reach_the_core() -> None:
    switches: dict[str, Any] = {"enable_chunked_prefill": False, "enable_prefix_caching": False, "watermark": 0.01}
    core, stated = resolve(build({**switches, "scheduler_reserve_full_isl": False}))
    assert {key: core[key] for key in switches} == switches
    assert core["reserve_full_prompt"] is False
    assert {key: stated[key] for key in switches} == switches
