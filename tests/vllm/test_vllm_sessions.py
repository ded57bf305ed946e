"""Requests whose input comes in turns: vLLM ends each turn and goes on, and nothing is learned of any."""

from __future__ import annotations

import inspect
import random
from pathlib import Path

import pytest

pytest.importorskip("vllm.version")

from fake_setup import EOS, Job, Oracle, Setup, prompt_of
from fake_worker import FakeEngine, Request, SamplingParams
from vllm.v1.request import RequestStatus

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(
        "resumable" not in inspect.signature(Request).parameters, reason="this vLLM has no input in turns"
    ),
]

ALL = ["queue", "slots", "evict", "admission"]


def turn(engine: FakeEngine, job: Job, *, more: bool) -> Request:
    sampling = SamplingParams(temperature=0.0, max_tokens=job.max_tokens)
    sampling._eos_token_id = EOS
    return Request(
        request_id=job.name,
        prompt_token_ids=list(job.prompt),
        sampling_params=sampling,
        pooling_params=None,
        block_hasher=engine._hasher,
        resumable=more,
    )


@pytest.mark.parametrize("armed", [False, True], ids=["unarmed", "armed"])
def test_a_session_of_several_turns_gives_no_label(armed: bool) -> None:
    rng = random.Random(0)
    session = Job("session", 0.0, prompt_of(rng, 20), length=12, max_tokens=50)
    plain = [Job(f"r{i}", 0.0, prompt_of(rng, 10), length=30 + i, max_tokens=50) for i in range(4)]
    brain = Oracle([session, *plain], armed=armed)
    leap = {"mode": "armed", "levers": ALL, "decode_slots": 2, "evict_factor": 1.0, "evict_per_s": 100.0}
    engine = FakeEngine(Setup(max_num_seqs=3, blocks=14, leap=leap), brain)
    scheduler = engine.scheduler
    for job in plain:
        engine.add(job)
    engine.jobs[session.name], engine.outcome.tokens[session.name] = session, []
    scheduler.add_request(turn(engine, session, more=True))
    answered = 0
    for _ in range(2000):
        if not scheduler.requests:
            break
        _, output, result = engine._compose()
        engine._take(output, result)
        engine.now += 1.0
        request = scheduler.requests.get(session.name)
        if request is not None and request.status == RequestStatus.WAITING_FOR_STREAMING_REQ:
            answered += 1
            assert engine.outcome.reasons.pop(session.name) == "stop"
            scheduler.add_request(turn(engine, session, more=answered < 3))
    assert not scheduler.requests
    assert engine.outcome.tokens[session.name] == session.output * 3
    # The others are labels; of the session neither the brain nor the ranker knows anything.
    assert brain.ended == {job.name: ("stop", job.length) for job in plain}
    assert session.name not in brain.calls
    assert session.name not in brain.rows
    assert not scheduler.leap._live
    assert scheduler.leap_guard.fault is None


def test_what_is_in_force_is_told_at_start_in_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "vllm.leap_rs"):
        engine = FakeEngine(Setup(leap={"state_dir": str(tmp_path / "state"), "levers": ["queue"]}), None)
    told = [record.getMessage() for record in caplog.records if "levers" in record.getMessage()]
    assert told == [
        "leap: mode auto, levers queue; learned before: 0 labels; "
        "prompt: rank correlation unknown, not armed; state: rank correlation unknown, not armed"
    ]
    engine.scheduler.leap.close()
