"""Saved states: an engine goes on where it was, also after a kill; what does not fit is left alone and told."""

import json
import logging
import math
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from state_engine import EVERY, WIDTH, settings, teach

import leap_rs
from leap_rs._leap import LeapError, OnlineReadout
from leap_rs.vllm.online import OnlineBrain
from leap_rs.vllm.state import MANIFEST, Identity, _digest, open_store

ENGINE = Path(__file__).with_name("state_engine.py")
PACKAGE = str(Path(leap_rs.__file__).parent.parent)


@contextmanager
def brain_of(state_dir: Path, **others: object) -> Iterator[OnlineBrain]:
    brain = OnlineBrain(settings(state_dir, **others))
    try:
        yield brain
    finally:
        brain.close()


def updates(brain: OnlineBrain) -> list[int]:
    return [learner.updates for learner in brain._learners.values()]


def key_of(brain: OnlineBrain, name: str, row: np.ndarray) -> float:
    brain.arrived(name, [1] * 9, 1024, 0, False)
    brain.state(name, row)
    return brain.remaining_key(name, 5)


def test_it_resumes_where_it_was(tmp_path: Path) -> None:
    row = np.linspace(-1, 1, WIDTH, dtype=np.float32)
    state = tmp_path / "state"
    with brain_of(state, mode="auto") as brain:
        for turn in range(60):
            teach(brain, 8, turn)
        learned, judged = updates(brain), {n: j.seen for n, j in brain._judges.items()}
        armed = brain.armed, brain.trusted
        key = key_of(brain, "probe", row)
        brain.finished("probe", "abort", 0)
    assert armed[0], "the lengths follow the first feature"
    with brain_of(state, mode="auto") as brain:
        assert updates(brain) == learned
        assert {n: j.seen for n, j in brain._judges.items()} == judged
        assert (brain.armed, brain.trusted) == armed
        assert key_of(brain, "probe", row) == pytest.approx(key, abs=1e-6)
        teach(brain, 8, 99)
        assert updates(brain) > learned


def test_it_is_saved_every_so_many_updates(tmp_path: Path) -> None:
    with brain_of(tmp_path / "state") as brain:
        for turn in range(40):
            teach(brain, 2, turn)
            for name, learner in brain._learners.items():
                files = list((tmp_path / "state" / "engine-0").glob(f"{name}-*"))
                on_disk = OnlineReadout.load(files[0]).updates if files else 0
                assert learner.updates - on_disk < EVERY
        assert 3 < brain.metrics.get("state_saves", "saved") <= updates(brain)[0] // EVERY
        names = sorted(p.name for p in (tmp_path / "state" / "engine-0").iterdir())
    assert [n.split("-")[0] for n in names] == ["prompt", "state", MANIFEST], names


def test_it_is_saved_when_asked(tmp_path: Path) -> None:
    with brain_of(tmp_path / "state", state_every=10_000) as brain:
        teach(brain, 20, 0)
        assert brain.metrics.get("state_saves", "saved") == 0
        for _ in range(2):
            brain.save()
            (saved,) = (tmp_path / "state" / "engine-0").glob("state-*")
            assert OnlineReadout.load(saved).updates == brain._learners["state"].updates > 0
            assert brain.metrics.get("state_saves", "saved") == 1
        assert brain.fault is None


def test_nothing_is_written_where_nothing_was_learned(tmp_path: Path) -> None:
    with brain_of(tmp_path / "state"):
        pass
    assert not (tmp_path / "state" / "engine-0" / MANIFEST).exists()


def started(state_dir: Path, seed: int) -> "subprocess.Popen[str]":
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([PACKAGE, os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, str(ENGINE), str(state_dir), str(seed)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment)


@pytest.mark.slow
def test_a_kill_loses_at_most_what_was_not_saved(tmp_path: Path) -> None:
    """Killed at five random moments, each time the next one goes on; what a turn had printed bounds what may be lost."""
    state = tmp_path / "state"
    moment = random.Random(0)
    resumed = [0, 0]
    for kill in range(5):
        process = started(state, kill)
        assert process.stdout is not None
        printed = [0, 0, 0]
        try:
            for _ in range(moment.randrange(5, 12)):
                printed = [int(number) for number in process.stdout.readline().split()]
            # Somewhere in the next turns: while learning, while a file is written, or between two of them.
            time.sleep(moment.random() * 0.05)
        finally:
            process.kill()
            process.wait()
            process.stdout.close()
        assert printed[2] >= 1, "it was to be killed after a save"
        assert all(now >= before for now, before in zip(printed, resumed, strict=False))
        with brain_of(state) as brain:
            resumed = updates(brain)
            # A turn of 8 requests is at most 4 updates; it saves once EVERY of them are there.
            assert min(resumed) >= max(printed[:2]) - (EVERY + 4)
            assert not (state / "engine-0-2").exists()


def copied(source: Path, tmp_path: Path, name: str) -> Path:
    return Path(shutil.copytree(source, tmp_path / name))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    state = tmp_path_factory.mktemp("saved") / "state"
    with brain_of(state) as brain:
        for turn in range(10):
            teach(brain, 8, turn)
    return state


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(bytes(content))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-40])


def edit(path: Path) -> None:
    path.write_text(path.read_text().replace('"finished": [', '"finished": [1'))


@pytest.mark.parametrize(
    ("others", "why"),
    [
        ({"model": "another"}, "was learned with model m, now it is another"),
        ({"layer": 25}, "was learned with layer 20, now it is 25"),
        ({"width": 32}, 'was learned with widths {"prompt": 3, "state": 24}, now it is {"prompt": 3, "state": 32}'),
        ({"max_tokens": 512}, "was learned with max_tokens 1024, now it is 512"),
        ({"width": None}, "was learned with widths"),
    ],
)
def test_a_state_of_something_else_is_left_alone_and_told(
    saved: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, others: dict[str, object], why: str
) -> None:
    state = copied(saved, tmp_path, "state")
    before = {p.name: p.read_bytes() for p in (state / "engine-0").iterdir()}
    with brain_of(state, **others) as brain:
        assert updates(brain)[0] == 0
        assert why in caplog.text
        brain.arrived("a", [1, 2], 64, 0, False)
        assert math.isfinite(brain.remaining_key("a", 0))
        for i in range(40):
            brain.arrived(f"r{i}", [1] * (i + 1), 64, 0, False)
            brain.finished(f"r{i}", "stop", 5)
    assert {p.name: p.read_bytes() for p in (state / "engine-0").iterdir()} == before
    assert (state / "engine-0-2" / MANIFEST).exists(), "it learns beside it"
    with brain_of(state, **others) as brain:
        assert updates(brain)[0] > 0
    with brain_of(state) as brain:
        assert min(updates(brain)) > 0, "the first one finds its own again"


@pytest.mark.parametrize(
    ("what", "how", "why"),
    [
        ("state-*", damage, "the checksum does not match"),
        ("prompt-*", cut, "were saved"),
        ("state-*", Path.unlink, "is missing"),
        (MANIFEST, cut, "cannot be read"),
        (MANIFEST, edit, "the checksum does not match"),
    ],
)
def test_a_damaged_state_is_refused_and_learning_starts_beside_it(
    saved: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, what: str, how: object, why: str
) -> None:
    state = copied(saved, tmp_path, "state")
    (path,) = (state / "engine-0").glob(what)
    how(path)  # type: ignore[operator]
    with brain_of(state) as brain:
        assert updates(brain) == [0, 0]
        (told,) = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
        assert why in told
        assert path.name in told
        teach(brain, 40, 1)
    with brain_of(state) as brain:
        assert min(updates(brain)) > 0


def test_a_readout_of_another_width_in_a_fitting_manifest(
    saved: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = copied(saved, tmp_path, "state")
    (path,) = (state / "engine-0").glob("state-*")
    OnlineReadout.from_zero(3, max_tokens=1024).save(path)
    manifest = state / "engine-0" / MANIFEST
    content = json.loads(manifest.read_text())
    content["files"]["state"]["bytes"] = path.stat().st_size
    manifest.write_text(json.dumps({**content, "checksum": _digest(content)}))
    with brain_of(state) as brain:
        assert updates(brain) == [0, 0]
    assert "reads 3 features" in caplog.text


def test_a_state_from_before_there_were_encoders_is_used_without_one(saved: Path, tmp_path: Path) -> None:
    state = copied(saved, tmp_path, "state")
    manifest = state / "engine-0" / MANIFEST
    content = json.loads(manifest.read_text())
    for key in ("encoder", "encoder_layer"):
        del content[key]
    del content["extra"]["preferred"]
    manifest.write_text(json.dumps({**content, "checksum": _digest(content)}))
    with brain_of(state) as brain:
        assert min(updates(brain)) > 0


def test_two_writers_are_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    state = tmp_path / "state"
    with brain_of(state) as first:
        teach(first, 40, 1)
        with brain_of(state) as second:
            assert f"process {os.getpid()} has this state open" in caplog.text
            teach(second, 40, 2)
            assert updates(second)[0] > 0, "it learns all the same"
            assert second.metrics.get("state_saves", "saved") == 0
        with brain_of(state, engine=1) as other:
            teach(other, 40, 3)
            assert other.metrics.get("state_saves", "saved") > 0
        learned = updates(first)
    with brain_of(state) as again:
        assert updates(again) == learned


def test_a_killed_engine_holds_no_lock(tmp_path: Path) -> None:
    process = started(tmp_path / "state", 1)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        identity = Identity("m", 20, 1024, {"prompt": 3, "state": WIDTH})
        with pytest.raises(LeapError, match=f"process {process.pid} has this state open"):
            open_store(tmp_path / "state", 0, identity)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()  # type: ignore[union-attr]
    open_store(tmp_path / "state", 0, identity).close()


def test_a_directory_that_cannot_be_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    with brain_of(tmp_path / "file" / "state", metrics_dir=tmp_path / "metrics") as brain:
        teach(brain, 60, 1)
        assert min(updates(brain)) > EVERY
    told = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert len(told) == 1
    assert "the state is not saved, and the server goes on" in told[0]
    assert "file" in told[0]


def test_a_save_that_fails_is_told_once_and_leaves_the_one_before(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = tmp_path / "state"
    with brain_of(state) as brain:
        teach(brain, 40, 1)
        before = {p.name: p.read_bytes() for p in (state / "engine-0").iterdir()}
        # The next files cannot be created: directories have their names.
        generation = max(int(name[-20:-12]) for name in before if name.endswith(".safetensors"))
        for later in range(generation + 1, generation + 60):
            (state / "engine-0" / f"prompt-{later:08d}.safetensors").mkdir()
        for turn in range(5):
            teach(brain, 20, 10 + turn)
        assert brain.metrics.get("state_saves", "failed") > 1
        told = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
        assert len(told) == 1
        assert "the state is not saved, and the server goes on" in told[0]
        assert {p.name: p.read_bytes() for p in (state / "engine-0").iterdir() if p.is_file()} == before
        for path in (state / "engine-0").iterdir():
            if path.is_dir():
                path.rmdir()
        teach(brain, 20, 30)
        learned = updates(brain)
    with brain_of(state) as brain:
        assert updates(brain) == learned


FULL_DISK = """
import contextlib, logging, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from state_engine import settings, teach
from leap_rs.vllm.online import OnlineBrain
logging.basicConfig(format="%(levelname)s %(message)s", stream=sys.stdout)
disk = Path({disk!r})
brain = OnlineBrain(settings(disk / "state", metrics_dir=Path({metrics!r})))
teach(brain, 40, 1)
print("saved", brain.metrics.get("state_saves", "saved") > 0)
with (disk / "ballast").open("wb", buffering=0) as ballast, contextlib.suppress(OSError):
    while True:
        ballast.write(bytes(1024))
for turn in range(6):
    teach(brain, 20, 10 + turn)
print("failed", brain.metrics.get("state_saves", "failed") > 1)
brain.arrived("a", [1], 64, 0, False)
print("serves", brain.remaining_key("a", 0) > 0, brain.fault)
(disk / "ballast").unlink()
teach(brain, 20, 30)
learned = [learner.updates for learner in brain._learners.values()]
brain.close()
again = OnlineBrain(settings(disk / "state", metrics_dir=Path({metrics!r})))
print("resumed", [learner.updates for learner in again._learners.values()] == learned)
again.close()
"""


def test_a_full_disk(tmp_path: Path) -> None:
    """On a small file system of its own, where the machine lets one be mounted."""
    disk = tmp_path / "disk"
    disk.mkdir()
    script = FULL_DISK.format(tests=str(ENGINE.parent), disk=str(disk), metrics=str(tmp_path / "metrics"))
    mount = f'mount -t tmpfs -o size=256k leap-test "{disk}" || exit 77; exec "$0" -c "$1"'
    space = ["unshare", "--mount", *([] if os.geteuid() == 0 else ["--user", "--map-root-user"])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([PACKAGE, os.environ.get("PYTHONPATH", "")])}
    try:
        done = subprocess.run(
            [*space, "sh", "-c", mount, sys.executable, script],
            capture_output=True,
            text=True,
            check=False,
            env=environment,
        )
    except FileNotFoundError:
        pytest.skip("no unshare")
    if done.returncode == 77 or "unshare:" in done.stderr:
        pytest.skip("no file system can be mounted here")
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stderr
    warnings = [line for line in lines if line.startswith("WARNING")]
    assert len(warnings) == 1
    assert "No space left on device" in warnings[0]
    assert [line for line in lines if not line.startswith("WARNING")] == [
        "saved True",
        "failed True",
        "serves True None",
        "resumed True",
    ]
