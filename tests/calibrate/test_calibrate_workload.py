"""The workload behind a run: found by name or hash, planned arrivals, shared prefixes, and what does not belong."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from synthetic_run import write_lines

from leap_rs import TraceError
from leap_rs.calibrate import MeasuredRun, read_runs

PLANNED = (0.5, 1.5, 1.75, 4.0)
SENT_LATE = (0.010, 0.0, 0.020, 0.005)
UNIX = 1.7e9
SHARED = list(range(100, 132))  # two blocks of 16
PROMPTS = ([*SHARED, *range(20)], [*range(500, 540)], [*SHARED, *range(900, 910)], SHARED)


def rows_and_plan() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    rows, plan = [], []
    for i, (at, late, prompt) in enumerate(zip(PLANNED, SENT_LATE, PROMPTS, strict=True)):
        queued = 70.0 + at + late + 0.003
        rows.append(
            {
                "request_id": f"bench-{i}",
                "input_toks": len(prompt),
                "output_toks": 4,
                "arrival_time": UNIX + at + late,
                "queued_ts": queued,
                "first_token_ts": queued + 0.2,
                "last_token_ts": queued + 0.3,
            }
        )
        plan.append(
            {
                "input_toks": len(prompt),
                "output_toks": 4,
                "arrival_time_ns": round(at * 1e9),
                "input_tok_ids": prompt,
            }
        )
    return rows, plan


def make(folder: Path, meta: dict[str, Any] | None = None) -> Path:
    rows, _ = rows_and_plan()
    (folder / "run").mkdir(parents=True)
    write_lines(folder / "run" / "requests.jsonl", rows)
    (folder / "run" / "meta.json").write_text(json.dumps(meta or {}))
    return folder / "run"


def read(run: Path, workload: Path | None = None) -> MeasuredRun:
    (found,) = read_runs(run, workload)
    return found


def test_latencies_count_from_the_plan(tmp_path: Path) -> None:
    write_lines(tmp_path / "w.jsonl", rows_and_plan()[1])
    run = read(make(tmp_path), tmp_path / "w.jsonl")
    # The plan's zero is the latest at which nothing was sent early, so the request that was not late defines it.
    np.testing.assert_allclose(run.sent_s - run.planned_s, SENT_LATE, atol=1e-6)
    np.testing.assert_allclose(run.first_token_s - run.planned_s, np.array(SENT_LATE) + 0.2, atol=1e-6)


def test_prompts_that_start_alike_share_their_full_blocks(tmp_path: Path) -> None:
    write_lines(tmp_path / "w.jsonl", rows_and_plan()[1])
    run = read(make(tmp_path), tmp_path / "w.jsonl")
    blocks = run.requests["prefix_blocks"].to_list()
    assert [len(row) for row in blocks] == [3, 2, 2, 2]
    assert blocks[0][:2] == blocks[2][:2] == blocks[3]
    assert set(blocks[1]).isdisjoint(blocks[0])
    # The third prompt shares 32 tokens; the fourth is those 32 alone, and its last token is always computed: 16.
    assert run.shared_prefixes() == (2, 48)


@pytest.mark.parametrize("where", ["", "run"])
def test_a_workload_is_found_by_its_name(tmp_path: Path, where: str) -> None:
    run = make(tmp_path, {"dataset_path": "workloads/sharegpt-300.jsonl"})
    write_lines(tmp_path / where / "sharegpt-300.jsonl", rows_and_plan()[1])
    assert read(run).shared_prefixes() == (2, 48)


def test_a_workload_is_found_by_its_hash(tmp_path: Path) -> None:
    write_lines(tmp_path / "another-name.jsonl", rows_and_plan()[1])
    digest = hashlib.sha256((tmp_path / "another-name.jsonl").read_bytes()).hexdigest()
    run = read(make(tmp_path, {"dataset_path": "workloads/x.jsonl", "dataset_hash": digest}))
    assert run.shared_prefixes() == (2, 48)
    assert "workload another-name.jsonl beside the run" in run.notes


def test_a_workload_that_is_not_there_is_told(tmp_path: Path) -> None:
    run = read(make(tmp_path, {"dataset_path": "workloads/x.jsonl", "dataset_hash": "0" * 64}))
    assert run.shared_prefixes() is None
    assert any("workload x.jsonl not found: shared prefixes are not known" in note for note in run.notes)


def test_a_workload_without_token_ids_still_gives_the_plan(tmp_path: Path) -> None:
    plan = [{k: v for k, v in row.items() if k != "input_tok_ids"} for row in rows_and_plan()[1]]
    write_lines(tmp_path / "w.jsonl", plan)
    run = read(make(tmp_path, {"dataset_path": "w.jsonl"}))
    assert run.shared_prefixes() is None
    np.testing.assert_allclose(run.sent_s - run.planned_s, SENT_LATE, atol=1e-6)
    assert any("holds no token ids" in note for note in run.notes)


@pytest.mark.parametrize(
    ("line", "change", "words"),
    [
        (1, {"input_toks": 7}, "line 2: key 'input_toks': 7, but 40 in"),
        (3, {"output_toks": 9}, "line 4: key 'output_toks': 9, but 4 in"),
        (0, {"arrival_time_ns": 0.5}, "line 1: key 'arrival_time_ns': expected a whole number, found 0.5"),
        (0, {"sub_requests": [], "arrival_time_ns": None}, "line 1: key 'arrival_time_ns'"),
        (2, {"input_tok_ids": [1, 2]}, "line 3: key 'input_tok_ids': 2 ids for 42 input_toks"),
        (2, {"input_tok_ids": [-1] * 42}, "line 3: key 'input_tok_ids': expected a list of token ids"),
    ],
)
def test_a_workload_of_another_run_is_refused_if_given_and_left_alone_if_found(
    tmp_path: Path, line: int, change: dict[str, Any], words: str
) -> None:
    plan = rows_and_plan()[1]
    plan[line].update(change)
    write_lines(tmp_path / "w.jsonl", plan)
    run = make(tmp_path, {"dataset_path": "w.jsonl"})
    with pytest.raises(TraceError, match=r"w\.jsonl: line") as caught:
        read(run, tmp_path / "w.jsonl")
    assert words in str(caught.value)
    found = read(run)
    assert found.shared_prefixes() is None
    assert any(words in note and "not used" in note for note in found.notes)


def test_a_request_that_the_workload_does_not_have_is_named(tmp_path: Path) -> None:
    write_lines(tmp_path / "w.jsonl", rows_and_plan()[1][:3])
    with pytest.raises(TraceError, match=r"line 4: key 'request_id': 'bench-3' names no row of"):
        read(make(tmp_path), tmp_path / "w.jsonl")
