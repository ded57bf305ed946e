"""SIGTERM and SIGHUP: the status names the signal, and nothing is left half written."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from command_process import WORDS, command, write_inputs

# With these each command waits for a pipe's reader, its work done and nothing written yet.
WAITING = {
    "replay": (["--save-result", "--result-filename", "pipe"], "pipe"),
    "trace": (["convert", "t.csv", "--out", "pipe.parquet"], "pipe.parquet"),
    "fit": ([], "r.anchor.safetensors"),
    "calibrate": (["--out", "pipe"], "pipe"),
}

PREPARED = """
import hashlib, os, sys, time
from pathlib import Path
from leap_rs import signals
from leap_rs.writing import replacing

with signals.obeyed(), replacing(Path("out")) as temporary:
    temporary.write_text("half")
    print("ready", flush=True)
"""


# What runs the tests may ignore it, as nohup does, and that is inherited.
BY_DEFAULT = "import signal; signal.signal(signal.SIGHUP, signal.SIG_DFL)"


def prepared(then: str, directory: Path) -> subprocess.Popen[str]:
    """A process in the midst of writing a file, which does `then`; it has printed that it is."""
    process = subprocess.Popen(
        [sys.executable, "-c", f"{BY_DEFAULT}\n{PREPARED}    {then}"],
        cwd=directory,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize("name", WAITING)
def test_a_command_that_is_ended_leaves_nothing_half_written(name: str, tmp_path: Path) -> None:
    write_inputs(tmp_path)
    words, pipe = WAITING[name]
    os.mkfifo(tmp_path / pipe)
    before = sorted(path.name for path in tmp_path.iterdir())
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    process = subprocess.Popen(
        command(name, *(words if name == "trace" else [*WORDS[name], *words])),
        cwd=tmp_path,
        env={**os.environ, "TMPDIR": str(temporary)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    while not any(one.stat().st_size for one in temporary.glob(".leap-*.tmp")):
        time.sleep(0.01)
        assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate()
    assert (process.returncode, out) == (128 + signal.SIGTERM, "")
    assert "Traceback" not in err
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*before, "temporary"])
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize("one", [signal.SIGTERM, signal.SIGHUP])
def test_the_status_names_the_signal(one: signal.Signals, tmp_path: Path) -> None:
    process = prepared("time.sleep(60)", tmp_path)
    process.send_signal(one)
    assert process.communicate() == ("", "")
    assert process.returncode == 128 + one
    assert list(tmp_path.iterdir()) == []


def test_what_python_cannot_interrupt_is_ended_too(tmp_path: Path) -> None:
    """As the core and polars, it computes without the GIL and comes back only when it is done."""
    process = prepared("hashlib.pbkdf2_hmac('sha256', b'', b'', 2**31 - 1)", tmp_path)
    process.send_signal(signal.SIGTERM)
    assert process.communicate() == ("", "")
    assert process.returncode == 128 + signal.SIGTERM
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("one", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_that_comes_up_in_a_destructor_is_not_lost(one: signal.Signals, tmp_path: Path) -> None:
    # Python says of an exception in a destructor that it is ignored, and goes on.
    slow = "{'__del__': lambda _: (print('deleting', flush=True), time.sleep(60))}"
    then = f"x = type('X', (), {slow})(); del x; time.sleep(60)"
    process = prepared(then, tmp_path)
    assert process.stdout is not None
    assert process.stdout.readline() == "deleting\n"
    process.send_signal(one)
    _, err = process.communicate()
    assert process.returncode == (-one if one == signal.SIGINT else 128 + one)
    assert "ignored" not in err
    assert list(tmp_path.iterdir()) == []


def test_who_started_it_with_nohup_means_it(tmp_path: Path) -> None:
    process = subprocess.Popen(
        ["nohup", sys.executable, "-c", f"{PREPARED}    time.sleep(0.5)"],
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGHUP)
    process.communicate()
    assert process.returncode == 0
    assert (tmp_path / "out").read_text() == "half"


def test_a_child_s_signals_do_not_end_its_parent(tmp_path: Path) -> None:
    then = (
        "child = os.fork() or time.sleep(60) or os._exit(1)\n"
        "    os.kill(child, 15)\n"
        "    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)\n"
        "    time.sleep(1.5)"  # longer than the parent would be given to see a signal of its own
    )
    out, err = prepared(then, tmp_path).communicate()
    assert (out, err) == (f"{-signal.SIGTERM}\n", "")
    assert (tmp_path / "out").read_text() == "half"
