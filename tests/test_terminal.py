"""How every command ends, whatever its streams are: one line on stderr and the status that its help promises."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from command_process import C_LOCALE, WORDS, command, run, write_inputs
from typer.testing import CliRunner

FULL = pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
CASES = {**WORDS, "trace --json": ["describe", "t.csv", "--json"], "replay --help": ["--help"]}
REFUSED = "leap-record: p.jsonl: no column 'none'; there are prompt\n"


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("inputs")
    write_inputs(directory)
    return directory


def expected(case: str) -> int:
    return 1 if case == "record" else 0


@FULL
@pytest.mark.parametrize("case", [case for case in CASES if case != "record"])
def test_output_that_cannot_be_written_is_one_line(case: str, inputs: Path) -> None:
    name = case.split()[0]
    done = run(name, CASES[case], inputs, "> /dev/full")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == f"leap-{name}: the output cannot be written: No space left on device"
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("case", CASES)
def test_a_reader_that_goes_away_is_no_fault(case: str, inputs: Path) -> None:
    done = run(case.split()[0], CASES[case], inputs, '| : ; exit "${PIPESTATUS[0]}"')
    assert done.returncode == expected(case)
    assert "Traceback" not in done.stderr
    assert "Broken pipe" not in done.stderr


@pytest.mark.parametrize("case", CASES)
def test_streams_that_are_closed_lead_nowhere(case: str, inputs: Path) -> None:
    name = case.split()[0]
    done = run(name, CASES[case], inputs, ">&-")
    assert (done.returncode, done.stdout) == (expected(case), "")
    assert "Traceback" not in done.stderr
    assert (done.stderr == REFUSED) == (name == "record")
    done = run(name, CASES[case], inputs, "<&- 2>&-")
    assert (done.returncode, done.stderr) == (expected(case), "")
    assert (done.stdout == "") == (name == "record")


def test_what_is_written_does_not_end_up_with_what_is_printed(inputs: Path) -> None:
    """The first file that is opened would have the number of a stream that is closed."""
    done = run("replay", [*WORDS["replay"], "--save-result", "--result-filename", "saved.json"], inputs, "<&- >&- 2>&-")
    assert done.returncode == 0
    assert json.loads((inputs / "saved.json").read_text())["leap_replay_version"] == 1


@pytest.mark.parametrize("case", CASES)
def test_signs_that_a_locale_has_not_are_question_marks(case: str, inputs: Path) -> None:
    name = case.split()[0]
    plain = run(name, CASES[case], inputs, PYTHONIOENCODING="utf-8")
    for environment in (C_LOCALE, {"PYTHONIOENCODING": "latin-1:strict"}):
        done = run(name, CASES[case], inputs, **environment)
        assert done.returncode == expected(case)
        assert "Traceback" not in done.stderr
        if environment is C_LOCALE:
            assert done.stdout == plain.stdout.encode("ascii", "replace").decode()


def test_names_that_are_no_text_are_taken_or_refused_in_one_line(inputs: Path) -> None:
    odd = os.fsdecode(b"odd\xff")
    (inputs / f"{odd}.csv").write_bytes((inputs / "t.csv").read_bytes())
    (inputs / f"{odd}.parquet").write_bytes((inputs / "t.parquet").read_bytes())
    shown = run("trace", ["describe", f"{odd}.csv"], inputs)
    assert (shown.returncode, shown.stdout.splitlines()[0]) == (0, "odd?.csv (vidur)")
    words = ["--policy", "fcfs", "--seeds", "1", "--save-result", "--result-filename", f"{odd}.json", "--json"]
    result = run("replay", [f"{odd}.csv", *words], inputs)
    assert result.returncode == 0
    assert json.loads(result.stdout)["trace"]["path"] == f"{odd}.csv"
    assert json.loads((inputs / f"{odd}.json").read_text()) == json.loads(result.stdout)
    assert run("trace", ["convert", f"{odd}.csv", "--out", f"{odd}2.parquet"], inputs).returncode == 0
    refused = run("fit", [f"{odd}.parquet", "--out", "r.safetensors"], inputs)
    line = "leap-fit: odd\\udcff.parquet: the name of a Parquet file must be UTF-8 in this locale\n"
    assert (refused.returncode, refused.stderr) == (1, line)


@pytest.mark.parametrize(
    ("name", "package"), [*((name, "typer") for name in WORDS), ("replay", "polars"), ("trace", "polars")]
)
def test_ctrl_c_is_one_line_while_a_command_still_imports(
    name: str, package: str, inputs: Path, tmp_path: Path
) -> None:
    (tmp_path / f"{package}.py").write_text(
        "import sys, time\nfrom pathlib import Path\nPath(__file__).with_suffix('.reached').touch()\ntime.sleep(60)\n"
    )
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    process = subprocess.Popen(
        command(name, *WORDS[name]),
        cwd=inputs,
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    while not (tmp_path / f"{package}.reached").exists():
        time.sleep(0.01)
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    out, err = process.communicate()
    assert (process.returncode, out, err) == (130, "", f"leap-{name}: interrupted\n")


@pytest.mark.parametrize("name", WORDS)
def test_help_has_two_spellings(name: str) -> None:
    app = importlib.import_module(f"leap_rs.{name}.command").app
    short, long = (CliRunner().invoke(app, [option]) for option in ("-h", "--help"))
    assert (short.exit_code, short.output) == (0, long.output)
    assert "Usage:" in short.output
    assert "-h, --help" in short.output
