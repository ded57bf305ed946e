"""The option `record` on vLLM's own scheduler: every request that came out is in the trace, and nothing else changes."""

from __future__ import annotations

import os
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm.version")

from fake_setup import MODEL, Job, Setup, prompt_of
from fake_worker import FakeEngine

from leap_rs import ConfigError, PromptFeatures, read_trace
from leap_rs.trace import load

pytestmark = pytest.mark.vllm

WIDTH = int(MODEL["hidden_size"])


class Engine(FakeEngine):
    """Its rows say which prompt they are of."""

    def _take(self, output: Any, result: Any) -> None:
        result.leap_rows = {name: row_of(self.jobs[name]) for name in result.leap_rows}
        super()._take(output, result)


def row_of(job: Job) -> Any:
    return np.random.default_rng(list(job.prompt)).normal(size=WIDTH).astype(np.float32)


def jobs(n: int) -> list[Job]:
    rng = random.Random(0)
    arrivals = [float(rng.randrange(60)) for _ in range(n)]
    return [
        Job(
            f"r{i}",
            arrival_s,
            prompt_of(rng, rng.randrange(1, 60)),
            length=rng.randrange(1, 80),
            max_tokens=40 if i % 3 else 100,
            # In the queue still, or in the midst of its answer.
            abort_s=arrival_s + 10 * (i % 40) if i % 4 == 0 else None,
        )
        for i, arrival_s in enumerate(arrivals)
    ]


def serve(setup: Setup, served: list[Job], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Engine:
    # The engine writes its metrics there.
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    engine = Engine(setup)
    engine.run(served)
    engine.check_end()
    engine.scheduler.shutdown()
    return engine


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_every_request_is_recorded_as_it_came_out(
    asynchronous: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = jobs(80)
    setup = Setup(async_scheduling=asynchronous, blocks=60, leap={"record": str(tmp_path / "rec"), "record_every": 16})
    outcome = serve(setup, served, monkeypatch, tmp_path).outcome
    plain = serve(replace(setup, leap={}), served, monkeypatch, tmp_path).outcome
    assert (outcome.tokens, outcome.finish_s) == (plain.tokens, plain.finish_s)
    frame = read_trace(tmp_path / "rec")
    expected = sorted((job for job in served if outcome.tokens[job.name]), key=lambda job: job.arrival_s)
    assert sorted(frame["request_id"]) == sorted(job.name for job in expected)
    by_name = {job.name: job for job in expected}
    for row in frame.iter_rows(named=True):
        job = by_name[row["request_id"]]
        assert row["arrival_s"] >= job.arrival_s
        assert row["prompt_tokens"] == len(job.prompt)
        assert row["max_tokens"] == job.max_tokens
        assert row["finish_reason"] == outcome.reasons[job.name]
        assert row["output_tokens"] >= len(outcome.tokens[job.name])
        if row["finish_reason"] != "abort":
            assert row["output_tokens"] == len(job.output)
        assert not row["forced"]
        np.testing.assert_array_equal(row["features"], row_of(job))
        np.testing.assert_array_equal(row["prompt_features"], PromptFeatures.length_features(len(job.prompt)))
    assert set(frame["finish_reason"]) == {"stop", "length", "abort"}
    assert frame.height < len(served), "who had no token has no place in a trace"
    metadata = load(tmp_path / "rec").metadata
    assert metadata["source"].startswith("served by vLLM")
    assert metadata["layer"] == "1", "the only one of two that another follows"


def test_a_file_in_the_place_of_the_directory_stops_the_start(tmp_path: Path) -> None:
    (tmp_path / "trace.parquet").write_text("")
    with pytest.raises(ConfigError, match=r"record: .*trace\.parquet is a file, and parts need a directory"):
        Engine(Setup(leap={"record": str(tmp_path / "trace.parquet")}))


def test_a_place_that_cannot_be_written_does_not_stop_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if os.geteuid() == 0:
        parent = Path("/proc/self")
    else:
        parent = tmp_path / "closed"
        parent.mkdir(mode=0o500)
    served = jobs(10)
    setup = Setup(leap={"record": str(parent / "rec"), "record_every": 2})
    assert len(serve(setup, served, monkeypatch, tmp_path).outcome.reasons) == 10
