"""Which preset a run starts from, and whose limits are in force."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from synthetic_run import good_rows, write_lines

from leap_rs import ConfigError
from leap_rs.calibrate import MeasuredRun, read_runs
from leap_rs.calibrate.setup import choose, match
from leap_rs.replay.engines import presets


def run_with(folder: Path, meta: dict[str, Any]) -> MeasuredRun:
    folder.mkdir(parents=True)
    write_lines(folder / "requests.jsonl", good_rows())
    (folder / "meta.json").write_text(json.dumps(meta))
    (run,) = read_runs(folder)
    return run


@pytest.mark.parametrize(
    ("name", "device", "model", "preset"),
    [
        ("run", "NVIDIA GeForce RTX 4090", "meta-llama/Llama-3.1-8B", "rtx4090-llama-8b"),
        ("run", "NVIDIA GeForce RTX 4090", "meta-llama/Llama-3.1-8B-Instruct", "rtx4090-llama-8b"),
        ("run", "NVIDIA A100-SXM4-80GB", "/models/Qwen3-8B/", "a100-qwen3-8b"),
        ("vllm_RTXPRO6000_Qwen3-32B", None, "Qwen/Qwen3-32B", "rtxpro6000-qwen3-32b-tp2"),
        ("run", "NVIDIA GeForce RTX 4090", "Qwen/Qwen3-32B", "h100-llama-8b"),
        ("run", None, "meta-llama/Llama-3.1-8B", "h100-llama-8b"),
        ("run", "NVIDIA A100-SXM4-80GB", None, "h100-llama-8b"),
    ],
)
def test_the_preset_is_that_of_card_and_model(
    tmp_path: Path, name: str, device: str | None, model: str | None, preset: str
) -> None:
    meta = {"model": model, "hardware": {"device_name": device}}
    found, why = match(run_with(tmp_path / name, meta))
    assert found == preset
    assert ("no preset fits" in why) == (preset == "h100-llama-8b")


def test_limits_of_the_user_go_before_the_runs_and_those_before_the_presets(tmp_path: Path) -> None:
    meta = {
        "engine_kwargs": {"max_num_seqs": 100, "max_num_batched_tokens": 1000, "data_parallel_size": 2},
        "resolved_config": {"scheduler_config": {"max_num_batched_tokens": 1024, "async_scheduling": False}},
        "kv_cache": {"num_gpu_blocks": 500, "block_size": 32, "enable_prefix_caching": False},
    }
    run = run_with(tmp_path / "run", meta)
    (core,) = choose([run], engine="h100-llama-8b", limits={"max_num_seqs": 64}).cores
    assert core["max_num_seqs"] == 64
    assert core["max_num_batched_tokens"] == 1024
    assert core["block_size"] == 32
    assert core["kv_tokens"] == 499 * 32  # the null block is never usable
    assert core["async_scheduling"] is False
    assert core["enable_prefix_caching"] is False
    assert core["data_parallel_size"] == 2
    (single,) = choose([run], engine="h100-llama-8b", limits={"data_parallel_size": 1}).cores
    assert single.get("data_parallel_size", 1) == 1


def test_num_kv_tokens_counts_the_null_block(tmp_path: Path) -> None:
    """As in the real run of a 24 GB card: 2,588 blocks of 16 are stated as 41,408 tokens, and one block is lost."""
    meta = {"kv_cache": {"num_gpu_blocks": 2588, "block_size": 16, "num_kv_tokens": 41_408}}
    (core,) = choose([run_with(tmp_path / "run", meta)]).cores
    assert core["kv_tokens"] == 41_392


def test_what_the_run_does_not_state_is_told(tmp_path: Path) -> None:
    setup = choose([run_with(tmp_path / "run", {"engine_kwargs": {"max_num_seqs": 8}})])
    usable = presets()["h100-llama-8b"]["kv_tokens"]
    told = " ".join(setup.notes)
    assert "no preset fits" in told
    assert f"kv_tokens {usable:,} usable" in told
    assert "max_num_batched_tokens 8,192" in told
    assert "max_num_seqs" not in told


def test_runs_of_two_models_are_refused(tmp_path: Path) -> None:
    runs = [run_with(tmp_path / name, {"model": model}) for name, model in (("a", "x/Llama-3.1-8B"), ("b", "Qwen3-8B"))]
    with pytest.raises(ConfigError, match="of one engine"):
        choose(runs)


def test_an_unknown_preset_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no preset 'b200'"):
        choose([run_with(tmp_path / "run", {})], engine="b200")


@pytest.mark.parametrize(("together", "told"), [(True, False), (False, True)])
def test_ranks_that_do_not_wait_for_each_other_are_told(tmp_path: Path, together: bool, told: bool) -> None:
    run = run_with(tmp_path / "run", {"engine_kwargs": {"data_parallel_size": 2, "enable_expert_parallel": together}})
    assert run.facts.data_parallel_size == 2
    assert any("simulated in lock-step" in note for note in run.notes) == told


def test_what_a_cost_model_cannot_state_is_told_as_options_of_the_replay(tmp_path: Path) -> None:
    off = {"enable_prefix_caching": False, "scheduler_reserve_full_isl": False}
    other = choose([run_with(tmp_path / "other", {"engine_kwargs": off})])
    assert other.replay_options() == "--no-enable-prefix-caching --no-scheduler-reserve-full-isl"
    assert any(other.replay_options() in note for note in other.notes)
    plain = choose([run_with(tmp_path / "plain", {"engine_kwargs": dict.fromkeys(off, True)})])
    assert plain.replay_options() == ""
    assert not any("give it" in note for note in plain.notes)


def test_runs_of_two_cards_are_not_fitted_together(tmp_path: Path) -> None:
    model = "meta-llama/Llama-3.1-8B"
    devices = ("NVIDIA GeForce RTX 4090", "NVIDIA A100-SXM4-80GB", "a card of the future", "NVIDIA A100 80GB PCIe")
    one, two, unknown, same = (
        run_with(tmp_path / str(i), {"model": model, "hardware": {"device_name": device}})
        for i, device in enumerate(devices)
    )
    with pytest.raises(
        ConfigError, match=r"1/requests.jsonl is of NVIDIA A100-SXM4-80GB, .*0/requests.jsonl of .*4090"
    ):
        choose([one, two])
    assert len(choose([two, unknown, same]).cores) == 3
