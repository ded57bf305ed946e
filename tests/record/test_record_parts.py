"""Interrupted recordings: what counts as answered, which options may go on, and the one trace at the end."""

from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from served import Request

from leap_rs import ConfigError, LeapError
from leap_rs.record.options import Options, engine_args
from leap_rs.record.parts import Parts, open_parts
from leap_rs.trace import load
from leap_rs.vllm.recorder import Recorder

OPTIONS = Options("org/model").identity("prompt", "0" * 64)
SAMPLING = "temperature 1.0, seed 0"


def record(parts: Parts, rows: list[int], *, reason: str = "stop", suffix: str = "-1a2b3c4d", every: int = 4) -> None:
    """What the engine's recorder writes for prompts of these rows."""
    recorder = Recorder(parts.directory, 0, {"model": "org/model", "layer": 5, "source": "vLLM"}, None, every)
    for number, row in enumerate(rows):
        Request(number, 10.0 + number, 5 + row, reason, name=f"{row}{suffix}", prompt=(1,) * (row + 1)).hand_to(
            recorder
        )
    recorder.close()


def opened(out: Path, **changes: Any) -> Parts:
    return open_parts(out, {**OPTIONS, **changes})


def test_it_goes_on_where_it_was_interrupted(tmp_path: Path) -> None:
    out = tmp_path / "trace.parquet"
    rows = np.random.default_rng(0).permutation(40).tolist()
    parts = opened(out)
    assert parts.done() == set()
    parts.settle_sampling(SAMPLING)
    record(parts, rows[:21])
    parts.close()
    parts = opened(out)
    assert parts.done() == set(rows[:21])
    parts.settle_sampling(SAMPLING)
    # What was cut off in the middle is answered once more, and what an engine left over answered twice counts once.
    record(parts, rows[21:25], reason="abort")
    assert parts.done() == set(rows[:21])
    record(parts, rows[15:], suffix="")
    assert parts.done() == set(range(40))
    assert parts.finish("prompts.jsonl") == 40
    parts.close()
    assert [path.name for path in tmp_path.iterdir()] == ["trace.parquet"]
    trace = load(out)
    frame = trace.frame
    assert frame["request_id"].to_list() == [str(row) for row in range(40)]
    assert frame["output_tokens"].to_list() == [5 + row for row in range(40)]
    assert frame["prompt_tokens"].to_list() == [1 + row for row in range(40)]
    assert set(frame["arrival_s"]) == {0.0}
    assert set(frame["finish_reason"]) == {"stop"}
    assert "forced" not in frame.columns
    assert trace.metadata == {
        "model": "org/model", "layer": "5", "source": "prompts.jsonl; vLLM", "sampling": SAMPLING, "arrivals": "none",
        "leap_trace_version": "1",
    }  # fmt: skip
    assert any("no arrival times" in line for line in trace.told())


def test_interrupted_or_not_the_bytes_are_the_same(tmp_path: Path) -> None:
    contents = []
    for name, cuts in (("a", [0, 30]), ("b", [0, 7, 8, 30])):
        parts = opened(tmp_path / f"{name}.parquet")
        parts.settle_sampling(SAMPLING)
        for start, end in pairwise(cuts):
            # Prompts that finish in another order come into the trace in the same.
            rows = range(start, end) if name == "a" else reversed(range(start, end))
            recorder = Recorder(parts.directory, 0, {"model": "m"}, None, 4)
            for number, row in enumerate(rows):
                row_of = np.random.default_rng(row).normal(size=6).astype(np.float32)
                Request(number, float(number), 5 + row, name=str(row), row=row_of).hand_to(recorder)
            recorder.close()
        parts.finish("p.jsonl")
        parts.close()
        contents.append((tmp_path / f"{name}.parquet").read_bytes())
    assert contents[0] == contents[1]


def test_a_recorded_trace_can_be_given_times(tmp_path: Path) -> None:
    from leap_rs.trace.command import main

    parts = opened(tmp_path / "t.parquet")
    record(parts, list(range(10)))
    parts.finish("p.jsonl")
    parts.close()
    with pytest.raises(SystemExit) as caught:
        main(["convert", str(tmp_path / "t.parquet"), "--out", str(tmp_path / "timed.parquet"), "--request-rate", "5"])
    assert caught.value.code == 0
    timed = load(tmp_path / "timed.parquet")
    assert timed.frame["arrival_s"].n_unique() == 10
    assert timed.metadata["arrivals"].startswith("Gamma, 5 requests/s")
    assert not timed.notes


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"temperature": 0.7}, "begun with temperature None, not 0.7"),
        ({"prompts": "sha256:1"}, f"begun with prompts sha256:{'0' * 64}, not sha256:1"),
        (
            {"seed": 1, "layer": 3},
            "begun with seed 0, not 1; layer None, not 3",
        ),
        ({"engine_args": {"quantization": "fp8"}}, r"begun with engine_args \{\}, not \{'quantization': 'fp8'\}"),
    ],
)
def test_other_options_are_refused_with_the_difference(changes: dict[str, Any], what: str, tmp_path: Path) -> None:
    out = tmp_path / "trace.parquet"
    parts = opened(out)
    record(parts, [1, 2])
    parts.close()
    with pytest.raises(ConfigError, match=rf"trace\.parquet\.parts: was {what}"):
        opened(out, **changes)
    again = opened(out)
    assert again.done() == {1, 2}
    again.close()


def test_every_option_is_part_of_it_but_those_that_leave_answers_alone() -> None:
    named = set(Options("m").identity("prompt", "0")) - {"prompts", "column"}
    assert set(Options.__dataclass_fields__) - named == {"max_num_seqs", "save_every"}


def test_another_sampling_of_the_model_is_refused(tmp_path: Path) -> None:
    parts = opened(tmp_path / "trace.parquet")
    parts.settle_sampling(SAMPLING)
    record(parts, [1])
    parts.close()
    parts = opened(tmp_path / "trace.parquet")
    with pytest.raises(ConfigError, match=r"was sampled with .*, now it would be temperature 0\.6"):
        parts.settle_sampling("temperature 0.6")
    parts.close()


def test_before_the_first_answer_options_may_change(tmp_path: Path) -> None:
    opened(tmp_path / "trace.parquet").close()
    assert not list(tmp_path.iterdir())
    parts = opened(tmp_path / "trace.parquet")
    # As after a kill.
    os.close(parts._lock)
    parts = opened(tmp_path / "trace.parquet", dtype="float32")
    record(parts, [1])
    parts.close()
    with pytest.raises(ConfigError, match="begun with dtype float32, not None"):
        opened(tmp_path / "trace.parquet")


def test_two_at_a_time_are_refused(tmp_path: Path) -> None:
    parts = opened(tmp_path / "trace.parquet")
    with pytest.raises(LeapError, match="another leap-record is writing it"):
        opened(tmp_path / "trace.parquet")
    parts.close()
    opened(tmp_path / "trace.parquet").close()


def test_nothing_of_the_users_is_overwritten(tmp_path: Path) -> None:
    out = tmp_path / "trace.parquet"
    out.write_text("precious")
    with pytest.raises(ConfigError, match=r"trace\.parquet: is there already"):
        opened(out)
    out.unlink()
    other = tmp_path / "trace.parquet.parts"
    other.mkdir()
    (other / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match=r"is no recording that was interrupted"):
        opened(out)
    assert (other / "notes.txt").read_text() == "mine"
    with pytest.raises(LeapError, match="there is no directory"):
        opened(tmp_path / "missing" / "trace.parquet")


def test_a_broken_manifest_or_part_is_named(tmp_path: Path) -> None:
    out = tmp_path / "trace.parquet"
    parts = opened(out)
    record(parts, [1, 2, 3])
    (file,) = parts.directory.glob("*/part-*.parquet")
    content = file.read_bytes()
    file.write_bytes(content[:-3])
    with pytest.raises(LeapError, match=r"part-00001\.parquet: the Parquet file is truncated"):
        parts.done()
    with pytest.raises(LeapError, match=r"part-00001\.parquet: the Parquet file is truncated"):
        parts.finish("p.jsonl")
    assert not out.exists()
    assert file.exists()
    parts.close()
    (parts.directory / "options.json").write_text('{"options": ')
    with pytest.raises(LeapError, match=r"options\.json: cannot be read"):
        opened(out)


def test_nothing_recorded_is_no_trace(tmp_path: Path) -> None:
    parts = opened(tmp_path / "trace.parquet")
    with pytest.raises(LeapError, match="nothing was recorded"):
        parts.finish("p.jsonl")
    record(parts, [1], reason="abort")
    with pytest.raises(LeapError, match="nothing was recorded"):
        parts.finish("p.jsonl")
    parts.close()


def test_engine_arguments() -> None:
    assert engine_args(None) == {}
    assert engine_args('{"enforce-eager": true, "kv_cache_dtype": "fp8"}') == {
        "enforce_eager": True,
        "kv_cache_dtype": "fp8",
    }
    for text, what in [
        ("{", "engine_args: not JSON"),
        ("[1]", r"engine_args: expected a JSON object, not \[1\]"),
        ('{"scheduler-cls": "x"}', "engine_args: scheduler_cls cannot be given"),
        ('{"model": "x"}', "engine_args: model cannot be given"),
    ]:
        with pytest.raises(ConfigError, match=what):
            engine_args(text)


@pytest.mark.parametrize("bytes_in_name", [249, 250, 255])
def test_a_name_may_be_as_long_as_the_file_system_allows(bytes_in_name: int, tmp_path: Path) -> None:
    out = tmp_path / f"{'x' * (bytes_in_name - len('.parquet'))}.parquet"
    parts = opened(out)
    parts.settle_sampling(SAMPLING)
    record(parts, list(range(6)))
    assert parts.finish("prompts.jsonl") == 6
    parts.close()
    assert [path.name for path in tmp_path.iterdir()] == [out.name]
    assert load(out).frame.height == 6
