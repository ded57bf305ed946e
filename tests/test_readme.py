"""What the README shows works: its Python as it stands, and its commands with options that exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import polars as pl
import pytest
from typer.main import get_command

import leap_rs.fit.command as fit
from leap_rs import ReplayResult
from leap_rs.replay.command import app as replay_app
from leap_rs.replay.command import expand as expand_replay

README = Path(__file__).parent.parent / "README.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def commands() -> list[list[str]]:
    """The words of every leap-replay and leap-fit call in the README."""
    text = "\n".join(blocks("")).replace("\\\n", " ")
    text += "\n" + "\n".join(re.findall(r"`(leap-(?:replay|fit) [^`\n]+)`", README.read_text(encoding="utf-8")))
    lines = [line for line in text.splitlines() if line.startswith(("leap-replay ", "leap-fit "))]
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
    command, rest = (
        (get_command(replay_app), expand_replay(rest))
        if name == "leap-replay"
        else (get_command(fit.app), fit.expand(rest))
    )
    # Parses every option with its type and refuses one that does not exist; --help says nothing on values.
    context = command.make_context(name, rest)
    assert context.args == []
    assert context.params
