"""What the README shows works: its Python as it stands, and its commands with options that exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import polars as pl
import pytest
from typer.main import get_command

from leap_rs import ReplayResult
from leap_rs.calibrate import command as calibrate
from leap_rs.fit import command as fit
from leap_rs.record import command as record
from leap_rs.replay import command as replay
from leap_rs.trace import command as trace

README = Path(__file__).parent.parent / "README.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


COMMANDS = {
    "leap-trace": (trace.app, trace.expand),
    "leap-calibrate": (calibrate.app, list),
    "leap-fit": (fit.app, fit.expand),
    "leap-record": (record.app, list),
    "leap-replay": (replay.app, replay.expand),
}


def commands() -> list[list[str]]:
    """The words of every call of a command in the README."""
    readme = README.read_text(encoding="utf-8")
    text = "\n".join(blocks("")).replace("\\\n", " ")
    text += "\n" + "\n".join(re.findall(rf"`((?:{'|'.join(COMMANDS)}) [^`\n]+)`", readme))
    lines = [line for line in text.splitlines() if line.partition(" ")[0] in COMMANDS]
    return [shlex.split(line.split(" > ")[0], comments=True) for line in lines]


def test_python(tmp_path: Path, traces: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "traces").symlink_to(traces)
    (code,) = blocks("python")
    names: dict[str, object] = {}
    exec(compile(code, str(README), "exec"), names)
    result = names["result"]
    assert isinstance(result, ReplayResult)
    assert result.summary["policy"].to_list() == ["fcfs", "leap"]
    assert isinstance(names["trace"], pl.DataFrame)
    assert (tmp_path / "readout.safetensors").exists()


@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_commands_are_spelled_right(words: list[str]) -> None:
    name, *rest = words
    app, expand = COMMANDS[name]
    # Parses every option with its type and refuses one that does not exist; --help says nothing on values.
    command = get_command(app)
    if name == "leap-trace":
        name, *rest = rest
        command = command.commands[name]
    context = command.make_context(name, expand(rest))
    assert context.args == []
    assert context.params
