"""The command without an engine: what it refuses before it starts one."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest
from commands import Run, runner

import leap_rs
from leap_rs.record.command import main, text_of
from leap_rs.record.run import Result


@pytest.fixture
def leap_record(capsys: pytest.CaptureFixture[str]) -> Run:
    return runner(main, capsys)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"id": 1, "prompt": "one"}\n{"id": 2, "prompt": "two"}\n')
    return path


@pytest.fixture(autouse=True)
def no_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec

    def find(name: str, *arguments: Any) -> ModuleSpec | None:
        return None if name == "vllm" else found(name, *arguments)

    monkeypatch.setattr(importlib.util, "find_spec", find)


def test_without_vllm_one_line_says_how_to_get_it(leap_record: Run, prompts: Path, tmp_path: Path) -> None:
    status, out, err = leap_record("m", prompts, "--out", tmp_path / "t.parquet")
    assert (status, out) == (1, "")
    assert err.count("\n") == 1
    assert "pip install vllm" in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["prompts.jsonl"]


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["--column", "text"], "prompts.jsonl: no column 'text'; there are id, prompt"),
        (["--column", "id"], "prompts.jsonl: column 'id', row 0 (the first row is 0): expected a text"),
        (["--engine-args", "{"], "--engine-args: not JSON"),
        (["--encoder", "."], "--encoder: .: is a directory without a config.json, not a model"),
        (["--engine-args", '{"additional-config": {}}'], "--engine-args: additional_config cannot be given"),
    ],
)
def test_an_error_is_one_line_that_names_it(
    leap_record: Run, prompts: Path, tmp_path: Path, words: list[str], what: str
) -> None:
    status, out, err = leap_record("m", prompts, "--out", tmp_path / "t.parquet", *words)
    assert (status, out) == (1, "")
    assert err.count("\n") == 1
    assert err.startswith("leap-record: ")
    assert what in err


@pytest.mark.parametrize("option", ["--chat", "--no-chat"])
def test_a_chat_has_its_template_and_tokens_have_none(leap_record: Run, tmp_path: Path, option: str) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt_token_ids": [1, 2]}\n')
    status, _, err = leap_record("m", path, "--out", tmp_path / "t.parquet", option)
    assert status == 1
    assert f"{option}: {path}: column 'prompt_token_ids' holds tokens" in err


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["--out", "t.csv"], "must end with .parquet"),
        (["--out", "t.parquet", "--top-p", "0"], "0.0 is not above 0"),
        (["--out", "t.parquet", "--temperature", "-1"], "--temperature"),
        (["--out", "t.parquet", "--seed", str(2**31)], "--seed"),
        ([], "--out"),
    ],
)
def test_wrong_usage(leap_record: Run, prompts: Path, words: list[str], what: str) -> None:
    status, out, err = leap_record("m", prompts, *words)
    assert (status, out) == (2, "")
    assert what in err


def test_it_is_installed_as_a_command() -> None:
    project = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    scripts = project.split("[project.scripts]")[1].split("[")[0]
    assert 'leap-record = "leap_rs.commands:record"' in scripts.splitlines()


def test_asking_for_help_loads_neither_vllm_nor_pytorch() -> None:
    code = (
        "import sys; from leap_rs.record.command import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: print([m for m in sys.modules if m.split('.')[0] in ('vllm', 'torch', 'transformers')])"
    )
    root = Path(leap_rs.__file__).parent.parent
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root)
    assert "--max-tokens" in done.stdout
    assert done.stdout.splitlines()[-1] == "[]"


def test_what_was_left_out_is_said() -> None:
    result = Result(
        path=Path("t.parquet"), prompts=10, requests=6, already=2, too_long=2, empty=1, unrecorded=1, prompt_tokens=60,
        output_tokens=90, cut=4, duration_s=3.2, bytes=123_456, metadata={"model": "m", "layer": "5", "sampling": "greedy"},
    )  # fmt: skip
    text = text_of(result)
    assert "t.parquet: 6 requests (2 of them by an earlier run), 60 prompt and 90 output tokens, 0.1 MB, 3 s" in text
    assert "2 answers ended by themselves, 4 were cut" in text
    assert "left out: 2 of 10 prompts: too long" in text
    assert "left out: 1 of 10 prompts: without tokens" in text
    assert "left out: 1 of 10 prompts: answered, but without usable features" in text
    assert "model m, layer 5; greedy" in text
