"""The recorder on requests that finish: what lies in the parts, what is left out, and that no disk stops it."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from served import WIDTH, Request, traffic

import leap_rs
from leap_rs import PromptFeatures, read_trace, write_trace
from leap_rs.fit import data
from leap_rs.replay.columns import to_columns
from leap_rs.trace import load
from leap_rs.trace.parts import part_files
from leap_rs.vllm.recorder import MOST_ROWS, MOST_WAITING, PART_REQUESTS, Recorder

ABOUT = {"model": "org/model", "layer": 20, "source": "a test"}
TABLE = PromptFeatures(np.random.default_rng(7).normal(size=(50, 8)).astype(np.float32), dim=4)


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    # Once vLLM is imported, its loggers hand nothing on to those above.
    logger = logging.getLogger("vllm.leap_rs")
    logger.addHandler(caplog.handler)
    yield caplog
    logger.removeHandler(caplog.handler)


def warnings(log: pytest.LogCaptureFixture) -> list[str]:
    return list(dict.fromkeys(r.getMessage() for r in log.records if r.levelno >= logging.WARNING))


def record(directory: Path, requests: list[Request], *, engine: int = 0, part_requests: int = 256) -> Recorder:
    recorder = Recorder(directory, engine, ABOUT, TABLE, part_requests)
    for request in requests:
        request.hand_to(recorder)
    recorder.close()
    return recorder


def wait_for(what: object) -> None:
    while not what():  # type: ignore[operator]
        time.sleep(0.01)


def test_what_was_served_is_what_the_trace_says(tmp_path: Path) -> None:
    served = traffic(40)
    recorder = record(tmp_path / "rec", served, part_requests=16)
    assert (recorder.recorded, recorder.lost) == (40, 0)
    files = part_files(tmp_path / "rec")
    assert [file.relative_to(tmp_path).as_posix() for file in files] == [
        f"rec/engine-0/part-0000{i}.parquet" for i in (1, 2, 3)
    ]
    for file in files:
        assert load(file).metadata.items() >= {"model": "org/model", "layer": "20", "leap_trace_version": "1"}.items()
    frame = read_trace(tmp_path / "rec")
    expected = sorted(served, key=lambda one: one.arrival_s)
    assert frame["request_id"].to_list() == [one.name for one in expected]
    assert frame["arrival_s"].to_list() == [one.arrival_s for one in expected]
    assert frame["prompt_tokens"].to_list() == [len(one.prompt) for one in expected]
    assert frame["output_tokens"].to_list() == [one.output_tokens for one in expected]
    assert set(frame["max_tokens"]) == {100}
    assert set(frame["finish_reason"]) == {"stop"}
    assert not frame["forced"].any()
    assert set(frame["temperature"]) == {0.5}
    assert set(frame["top_p"]) == {0.75}
    assert frame["features"].dtype == pl.Array(pl.Float16, WIDTH)
    np.testing.assert_array_equal(frame["features"].to_numpy(), [one.row for one in expected])
    pooled = [TABLE.pool(np.array(one.prompt, np.uint32)) for one in expected]
    np.testing.assert_array_equal(frame["prompt_features"].to_numpy(), pooled)


def test_a_directory_converts_into_one_trace(tmp_path: Path) -> None:
    from leap_rs.trace.command import main

    record(tmp_path / "rec", traffic(100), part_requests=7)
    with pytest.raises(SystemExit) as caught:
        main(["convert", str(tmp_path / "rec"), "--out", str(tmp_path / "one.parquet"), "--json"])
    assert caught.value.code == 0
    assert read_trace(tmp_path / "one.parquet").equals(read_trace(tmp_path / "rec"))
    metadata = load(tmp_path / "one.parquet").metadata
    assert metadata == {"model": "org/model", "layer": "20", "source": "a test", "leap_trace_version": "1"}


def test_only_what_overlaps_is_in_memory(tmp_path: Path) -> None:
    from leap_rs.trace import open_stream

    # One arrives a second, and no answer takes longer than a tenth of the recording.
    requests = sorted(
        (Request(i, float(i), 5 + i * 37 % 90) for i in range(1000)), key=lambda r: r.arrival_s + r.output_tokens
    )
    record(tmp_path / "rec", requests, part_requests=50)
    sizes = [frame.height for frame in open_stream(tmp_path / "rec").frames]
    assert sum(sizes) == 1000
    assert max(sizes) <= 200


def test_engines_and_restarts_come_onto_one_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = iter([1000.0, 1000.5, 5000.25])
    monkeypatch.setattr("leap_rs.vllm.recorder.time.time", lambda: next(started))
    for engine, name in ((0, "a"), (1, "b"), (0, "c")):
        record(tmp_path / "rec", [Request(i, 2.0 * i, 5, name=f"{name}{i}") for i in range(2)], engine=engine)
    assert sorted(path.name for path in (tmp_path / "rec").iterdir()) == ["engine-0", "engine-0-2", "engine-1"]
    frame = read_trace(tmp_path / "rec")
    assert dict(zip(frame["request_id"], frame["arrival_s"], strict=True)) == {
        "a0": 0.0, "b0": 0.5, "a1": 2.0, "b1": 2.5, "c0": 4000.25, "c1": 4002.25,
    }  # fmt: skip


def test_parts_of_another_model_are_refused(tmp_path: Path) -> None:
    record(tmp_path / "rec", traffic(4))
    other = read_trace(tmp_path / "rec").with_columns(pl.lit("x").alias("domain"))
    (tmp_path / "rec" / "engine-7").mkdir()
    write_trace(other, tmp_path / "rec" / "engine-7" / "part-00001.parquet", model="other", layer=20)
    with pytest.raises(leap_rs.TraceError, match=r"engine-7/part-00001\.parquet: is of model other, but .*org/model"):
        read_trace(tmp_path / "rec")
    write_trace(other, tmp_path / "rec" / "engine-7" / "part-00001.parquet", model="org/model", layer=20)
    with pytest.raises(leap_rs.TraceError, match=r"engine-7/part-00001\.parquet: has the columns .*domain"):
        read_trace(tmp_path / "rec")


FORCED = [
    Request(1, 1.0, 100, "length", sampling={"ignore_eos": True}),
    Request(2, 2.0, 80, "stop", sampling={"min_tokens": 79}),
    Request(3, 3.0, 1, "length", max_tokens=1),
    Request(4, 4.0, 100, "length", sampling={"min_tokens": 2}),
]
NATURAL = [Request(10 + i, 10.0 + i, 20 + i) for i in range(12)] + [Request(30, 30.0, 100, "length")]


def test_forced_lengths_are_told_apart_and_no_readout_learns_from_them(tmp_path: Path) -> None:
    aborted = [Request(40, 40.0, 7, "abort"), Request(41, 41.0, 8, "error"), Request(42, 42.0, 0, "abort")]
    record(tmp_path / "rec", [*FORCED, *NATURAL, *aborted])
    frame = read_trace(tmp_path / "rec")
    assert frame.filter("forced")["request_id"].to_list() == [one.name for one in FORCED]
    # They say how they ended all the same: a replay needs them as they were.
    assert frame["finish_reason"].to_list() == [
        *(one.reason for one in FORCED), *(one.reason for one in NATURAL), "abort", "abort",
    ]  # fmt: skip
    trace = load(tmp_path / "rec")
    rows = data.labelled(trace, "features", 100)
    np.testing.assert_array_equal(rows.features, [one.row for one in NATURAL])
    assert rows.lengths.tolist() == [one.output_tokens for one in NATURAL]
    arrays, _ = to_columns(frame, trace_block=16, engine_block=16)
    # 0 stop, 1 length; 2 aborted, from which a replay learns nothing, nor from what was forced.
    ends = {"stop": 0, "length": 1}
    assert arrays["finish"].tolist() == [ends[one.reason] for one in FORCED] + [0] * 12 + [1] + [2] * 2
    assert arrays["forced"].tolist() == [1] * 4 + [0] * 15


def test_fitting_says_how_many_were_left_out(tmp_path: Path) -> None:
    from leap_rs.fit.options import Options
    from leap_rs.fit.run import run

    record(tmp_path / "rec", [*FORCED, *NATURAL])
    result = run([tmp_path / "rec"], [], tmp_path / "readout.safetensors", Options(folds=2))
    assert [one.rows for one in result.readouts] == [13, 13]
    assert any("4 answers had a length that their client had settled" in note for note in result.notes)


def test_a_row_that_cannot_be_used_is_left_out_and_told_once(tmp_path: Path, log: pytest.LogCaptureFixture) -> None:
    bad = [
        Request(1, 1.0, 5, row=np.full(WIDTH, np.nan, np.float16)),
        Request(2, 2.0, 5, row=np.full(WIDTH, np.inf, np.float16)),
        Request(3, 3.0, 5, row=False),
        Request(4, 4.0, 5, prompt=()),
        Request(5, 5.0, 5, prompt=(1, 50)),
    ]
    recorder = record(tmp_path / "rec", [*bad, Request(6, 6.0, 5)])
    assert read_trace(tmp_path / "rec")["request_id"].to_list() == ["r6"]
    assert (recorder.recorded, recorder.lost) == (1, 5)
    hidden, prompts = warnings(log)
    assert "hidden state" in hidden
    assert "prompts have no features" in prompts


def test_what_is_there_is_written_at_once_when_the_engine_is_about_to_end(tmp_path: Path) -> None:
    """It may be killed while it waits for its workers, long before it closes its scheduler."""
    recorder = Recorder(tmp_path / "rec", 0, ABOUT, TABLE)
    Request(1, 1.0, 5).hand_to(recorder)
    wait_for(lambda: len(recorder._rows) == 1)
    assert part_files(tmp_path / "rec") == []
    Request(2, 2.0, 5).hand_to(recorder)
    recorder.save()
    wait_for(lambda: part_files(tmp_path / "rec"))
    assert read_trace(tmp_path / "rec").height == 2
    # What comes later waits for a part to be full again.
    Request(3, 3.0, 5).hand_to(recorder)
    wait_for(lambda: len(recorder._rows) == 1)
    assert len(part_files(tmp_path / "rec")) == 1
    recorder.close()
    assert read_trace(tmp_path / "rec").height == 3


def test_a_part_is_written_after_a_while_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("leap_rs.vllm.recorder.PART_S", 0.0)
    recorder = Recorder(tmp_path / "rec", 0, ABOUT, TABLE)
    Request(1, 1.0, 5).hand_to(recorder)
    wait_for(lambda: part_files(tmp_path / "rec"))
    assert read_trace(tmp_path / "rec").height == 1
    recorder.close()
    assert len(part_files(tmp_path / "rec")) == 1


def test_a_disk_that_hangs_holds_nobody_up_and_memory_stays_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    held, hanging = threading.Event(), threading.Event()

    def hang(*arguments: object, **metadata: object) -> None:
        hanging.set()
        held.wait()
        write_trace(*arguments, **metadata)  # type: ignore[arg-type]

    monkeypatch.setattr("leap_rs.vllm.recorder.write_trace", hang)
    recorder = Recorder(tmp_path / "rec", 0, ABOUT, TABLE)
    for i in range(PART_REQUESTS):
        Request(i, float(i), 5).hand_to(recorder)
    assert hanging.wait(60)
    for i in range(MOST_WAITING + 30):
        Request(PART_REQUESTS + i, 1e3 + i, 5).hand_to(recorder)
    held.set()
    recorder.close()
    assert (recorder.recorded, recorder.lost) == (PART_REQUESTS + MOST_WAITING, 30)
    assert read_trace(tmp_path / "rec").height == PART_REQUESTS + MOST_WAITING
    assert ["faster than the disk" in text for text in warnings(log)] == [True]


def test_a_place_that_cannot_be_written_keeps_the_newest_rows_until_it_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("leap_rs.vllm.recorder.MOST_ROWS", 20)
    (tmp_path / "rec").write_text("a file where a directory should be")
    recorder = Recorder(tmp_path / "rec", 0, ABOUT, TABLE, part_requests=4)
    for request in traffic(30):
        request.hand_to(recorder)
    wait_for(lambda: recorder.lost == 10)
    (tmp_path / "rec").unlink()
    recorder.close()
    assert recorder.recorded == 20 < MOST_ROWS
    assert read_trace(tmp_path / "rec").height == 20
    failing, full = warnings(log)
    assert "nothing is recorded for now, and the server goes on" in failing
    assert str(tmp_path / "rec") in failing
    assert "faster than the disk" in full


def test_a_fault_of_its_own_ends_the_recording_and_nothing_else(tmp_path: Path, log: pytest.LogCaptureFixture) -> None:
    recorder = Recorder(tmp_path / "rec", 0, ABOUT, TABLE)
    recorder.finished(object(), "stop", 0, 0.0, None)
    Request(1, 1.0, 5).hand_to(recorder)
    recorder.close()
    (told,) = warnings(log)
    assert "recording has stopped, and the server goes on" in told
    assert not (tmp_path / "rec").exists()


FULL_DISK = """
import contextlib, logging, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from served import traffic
from leap_rs import read_trace
from leap_rs.vllm.recorder import Recorder
logging.basicConfig(format="%(levelname)s %(message)s", stream=sys.stdout)
disk = Path({disk!r})
recorder = Recorder(disk / "rec", 0, {{"model": "m"}}, None, 10)
requests = traffic(200)
with (disk / "ballast").open("wb", buffering=0) as ballast, contextlib.suppress(OSError):
    while True:
        ballast.write(bytes(1024))
for request in requests:
    request.hand_to(recorder)
while not recorder._failing:
    pass
print("parts", [path.name for path in disk.rglob("*") if path.is_file()])
(disk / "ballast").unlink()
recorder.close()
print("recorded", recorder.recorded, recorder.lost, read_trace(disk / "rec").height)
"""


def test_a_full_disk(tmp_path: Path) -> None:
    """On a small file system of its own, where the machine lets one be mounted."""
    disk = tmp_path / "disk"
    disk.mkdir()
    script = FULL_DISK.format(tests=str(Path(__file__).parent), disk=str(disk))
    mount = f'mount -t tmpfs -o size=256k leap-test "{disk}" || exit 77; exec "$0" -c "$1"'
    space = ["unshare", "--mount", *([] if os.geteuid() == 0 else ["--user", "--map-root-user"])]
    try:
        done = run_python([*space, "sh", "-c", mount, sys.executable, script])
    except FileNotFoundError:
        pytest.skip("no unshare")
    if done.returncode == 77 or "unshare:" in done.stderr:
        pytest.skip("no file system can be mounted here")
    assert done.returncode == 0, done.stderr
    # The recorder's thread tells of it in its own time, so that line may stand before or after the first one here.
    told = [line for line in done.stdout.splitlines() if line.startswith("WARNING")]
    assert len(told) == 1
    assert "No space left on device" in told[0]
    assert [line for line in done.stdout.splitlines() if line not in told] == [
        "parts ['ballast']",
        "recorded 200 0 200",
    ]


KILLED = """
import sys
sys.path.insert(0, {tests!r})
from itertools import count
from served import Request
from leap_rs.vllm.recorder import Recorder
recorder = Recorder({directory!r}, 0, {{"model": "m"}}, None, 5)
for i in count():
    Request(i, float(i), 5).hand_to(recorder)
    while i - recorder.recorded > 50:
        pass
    print(recorder.recorded, flush=True)
"""


def test_killed_at_any_moment_it_leaves_whole_parts(tmp_path: Path) -> None:
    script = KILLED.format(tests=str(Path(__file__).parent), directory=tmp_path / "rec").replace(
        "PosixPath", "__import__('pathlib').Path"
    )
    for lines in (60, 250):
        with subprocess.Popen(
            [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env=environment()
        ) as process:
            assert process.stdout is not None
            recorded = [int(next(process.stdout)) for _ in range(lines)][-1]
            process.send_signal(signal.SIGKILL)
        newest = max((tmp_path / "rec").iterdir(), key=lambda path: path.stat().st_mtime)
        numbers = [int(name[1:]) for name in read_trace(newest)["request_id"]]
        assert len(numbers) >= recorded > 0
        assert numbers == list(range(len(numbers)))


def environment() -> dict[str, str]:
    package = str(Path(leap_rs.__file__).parent.parent)
    return {**os.environ, "PYTHONPATH": os.pathsep.join([package, os.environ.get("PYTHONPATH", "")])}


def run_python(words: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, capture_output=True, text=True, check=False, env=environment())


def test_describing_a_recording(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from leap_rs.trace.command import main

    record(tmp_path / "rec", traffic(30), part_requests=8)
    with pytest.raises(SystemExit):
        main(["describe", str(tmp_path / "rec"), "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["requests"] == 30
    assert found["metadata"]["layer"] == "20"
