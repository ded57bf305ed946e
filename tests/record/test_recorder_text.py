"""The recorder beside a text encoder: a request is written once its prompt has been read, and lost where it never is."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from served import Request, traffic

from leap_rs import read_trace
from leap_rs._leap import TraceError
from leap_rs.trace import load
from leap_rs.trace.parts import part_files
from leap_rs.vllm.recorder import Recorder

ABOUT = {"model": "org/model", "layer": 20, "encoder": "mini", "encoder_layer": 4}
TEXT_WIDTH = 5


def text_of(request: Request) -> np.ndarray:
    return np.random.default_rng([1, request.number]).normal(size=TEXT_WIDTH).astype(np.float32)


def recorder_of(directory: Path, part_requests: int = 8) -> Recorder:
    return Recorder(directory, 0, ABOUT, None, part_requests, text=True)


def test_rows_come_when_they_come(tmp_path: Path) -> None:
    """Before a request ends, long after it, and after the server was told to shut down."""
    recorder = recorder_of(tmp_path / "rec")
    served = traffic(60)
    for request in served:
        recorder.expect_text(str(request.name))
    for request in served[:20]:
        recorder.text(str(request.name), text_of(request))
    for request in served:
        request.hand_to(recorder)
    deadline = time.monotonic() + 30
    while recorder.recorded < 16 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert recorder.recorded == 16, "two whole parts of those that have been read"
    for request in reversed(served[20:40]):
        recorder.text(str(request.name), text_of(request))
    closing = threading.Thread(target=recorder.close)
    closing.start()
    for request in served[40:]:
        time.sleep(0.02)
        recorder.text(str(request.name), text_of(request))
    closing.join()
    assert (recorder.recorded, recorder.lost) == (60, 0)
    frame = read_trace(tmp_path / "rec")
    assert frame["text_features"].dtype == pl.Array(pl.Float32, TEXT_WIDTH)
    by_name = {str(request.name): request for request in served}
    assert set(frame["request_id"]) == by_name.keys()
    for row in frame.iter_rows(named=True):
        request = by_name[row["request_id"]]
        np.testing.assert_array_equal(row["text_features"], text_of(request))
        np.testing.assert_array_equal(row["features"], request.row)
    for file in part_files(tmp_path / "rec"):
        assert load(file).metadata.items() >= {"encoder": "mini", "encoder_layer": "4"}.items()
    assert not recorder._texts


def test_what_the_encoder_will_never_read_is_lost_and_told(tmp_path: Path, told: list[str]) -> None:
    recorder = recorder_of(tmp_path / "rec")
    served = traffic(30)
    for request in served:
        recorder.expect_text(str(request.name))
        request.hand_to(recorder)
    for i, request in enumerate(served):
        recorder.text(str(request.name), text_of(request) if i % 3 == 0 else None)
    recorder.close()
    assert (recorder.recorded, recorder.lost) == (10, 20)
    assert [line for line in told if "not recorded" in line] == [
        line for line in told if "the text encoder has not read their prompts" in line
    ]
    assert len(told) == 1
    assert read_trace(tmp_path / "rec")["text_features"].null_count() == 0


def test_a_silent_encoder_holds_no_shutdown_up(
    tmp_path: Path, told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("leap_rs.vllm.recorder.TEXT_S", 0.05)
    recorder = recorder_of(tmp_path / "rec")
    served = traffic(10)
    for request in served:
        recorder.expect_text(str(request.name))
        request.hand_to(recorder)
    recorder.text(str(served[0].name), text_of(served[0]))
    recorder.close()
    assert not recorder._thread.is_alive()
    assert (recorder.recorded, recorder.lost) == (1, 9)
    assert "the text encoder has not read their prompts" in told[0]


def test_nothing_is_kept_of_those_that_are_not_recorded(tmp_path: Path) -> None:
    recorder = recorder_of(tmp_path / "rec")
    for i in range(20):
        recorder.expect_text(f"r{i}")
        if i % 2:
            recorder.text(f"r{i}", np.ones(TEXT_WIDTH, np.float32))
        Request(i, float(i), 0, reason="abort").hand_to(recorder)
        recorder.text(f"r{i}", np.ones(TEXT_WIDTH, np.float32))
    assert not recorder._texts
    recorder.close()
    assert (recorder.recorded, recorder.lost) == (0, 0)


def test_no_more_wait_for_their_rows_than_may(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("leap_rs.vllm.recorder.MOST_WAITING", 12)
    monkeypatch.setattr("leap_rs.vllm.recorder.TEXT_S", 0.0)
    recorder = recorder_of(tmp_path / "rec")
    for request in traffic(30):
        recorder.expect_text(str(request.name))
        request.hand_to(recorder)
    assert len(recorder._texts) == 12
    recorder.close()
    assert (recorder.recorded, recorder.lost) == (0, 30)


def test_parts_of_two_encoders_are_no_one_trace(tmp_path: Path) -> None:
    for layer in (4, 5):
        recorder = Recorder(tmp_path / "rec", 0, {**ABOUT, "encoder_layer": layer}, None, 8, text=True)
        for request in traffic(4):
            recorder.expect_text(str(request.name))
            recorder.text(str(request.name), text_of(request))
            request.hand_to(recorder)
        recorder.close()
    with pytest.raises(TraceError, match=r"is of encoder_layer 5, but .* of 4"):
        read_trace(tmp_path / "rec")
