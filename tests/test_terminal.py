"""How every command ends: one line on stderr and the status that its help promises."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

COMMANDS = {
    "leap-trace": ["describe", "t.csv"],
    "leap-trace --json": ["describe", "t.csv", "--json"],
    "leap-fit": ["t.parquet", "--out", "r.safetensors", "--eval", "t.parquet"],
}


def write_inputs(directory: Path) -> None:
    import numpy as np
    import polars as pl

    from leap_rs.trace import write_trace

    (directory / "t.csv").write_text("arrived_at,num_prefill_tokens,num_decode_tokens\n0,1,1\n1,1,1\n")
    x = np.random.default_rng(0).normal(size=(40, 2)).astype(np.float32)
    columns = {
        "arrival_s": np.arange(40.0),
        "prompt_tokens": np.full(40, 5),
        "output_tokens": np.arange(1, 41),
        "features": x,
    }
    write_trace(pl.DataFrame(columns), directory / "t.parquet")


def call(name: str, directory: Path, then: str) -> subprocess.CompletedProcess[str]:
    module = {"leap-trace": "leap_rs.trace.command", "leap-fit": "leap_rs.fit.command"}[name.split()[0]]
    command = [sys.executable, "-c", f"from {module} import main; main()", *COMMANDS[name]]
    shell = ["bash", "-c", f'"$@" {then}', "bash", *command]
    return subprocess.run(shell, capture_output=True, text=True, cwd=directory, check=False)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
@pytest.mark.parametrize("name", COMMANDS)
def test_output_that_cannot_be_written_is_one_line(name: str, tmp_path: Path) -> None:
    write_inputs(tmp_path)
    done = call(name, tmp_path, "> /dev/full")
    lines = done.stderr.splitlines()
    assert done.returncode == 1
    assert lines[-1] == f"{name.split()[0]}: the output cannot be written: No space left on device"
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("name", COMMANDS)
def test_a_reader_that_goes_away_is_no_fault(name: str, tmp_path: Path) -> None:
    write_inputs(tmp_path)
    done = call(name, tmp_path, '| : ; exit "${PIPESTATUS[0]}"')
    assert done.returncode == 0
    assert "Traceback" not in done.stderr
    assert "Broken pipe" not in done.stderr


@pytest.mark.parametrize("name", ["calibrate", "fit", "record", "replay", "trace"])
def test_help_has_two_spellings(name: str) -> None:
    app = importlib.import_module(f"leap_rs.{name}.command").app
    short, long = (CliRunner().invoke(app, [option]) for option in ("-h", "--help"))
    assert (short.exit_code, short.output) == (0, long.output)
    assert "Usage:" in short.output
    assert "-h, --help" in short.output
