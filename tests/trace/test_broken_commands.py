"""What a user sees of a broken trace: one line on stderr with file, column and row, status 1, and nothing written."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

import polars as pl
import pytest
from broken_json import BROKEN_JSON
from broken_traces import BROKEN, BROKEN_CSV, FOREIGN, ROWS, good

from leap_rs.fit.command import main as fit
from leap_rs.replay.command import main as replay
from leap_rs.trace import write_trace
from leap_rs.trace.command import main as trace

Write = Callable[[Path], Path]
Case = tuple[Write, Sequence[str]]


def _frame(frame: pl.DataFrame) -> Write:
    def write(directory: Path) -> Path:
        frame.write_parquet(directory / "broken.parquet")
        return directory / "broken.parquet"

    return write


def _bytes(name: str, content: bytes) -> Write:
    def write(directory: Path) -> Path:
        (directory / name).write_bytes(content)
        return directory / name

    return write


def _edited(edit: Callable[[bytes], bytes]) -> Write:
    def write(directory: Path) -> Path:
        path = directory / "broken.parquet"
        write_trace(good(), path)
        path.write_bytes(edit(path.read_bytes()))
        return path

    return write


def _version(directory: Path) -> Path:
    good().write_parquet(directory / "broken.parquet", metadata={"leap_trace_version": "2"})
    return directory / "broken.parquet"


def _block_size(directory: Path) -> Path:
    blocks = pl.Series("prefix_blocks", [[]] * ROWS, dtype=pl.List(pl.UInt64))
    frame = good().drop("prefix_tokens").with_columns(blocks)
    frame.write_parquet(directory / "broken.parquet", metadata={"block_size": "0"})
    return directory / "broken.parquet"


def _where(column: str | None, row: int | None) -> list[str]:
    return [f"column '{column}'"] * (column is not None) + [f"row {row} (the first row is 0)"] * (row is not None)


CASES: dict[str, Case] = {
    **{name: (_frame(frame), [*_where(column, row), what]) for name, (frame, column, row, what) in BROKEN.items()},
    **{f"csv: {name}": (_bytes("broken.csv", text.encode()), [what]) for name, (text, what) in BROKEN_CSV.items()},
    **{f"json: {name}": (_bytes("broken.txt", content), [what]) for name, (content, what) in BROKEN_JSON.items()},
    **{f"foreign: {name}": (_bytes(name, content), [what]) for name, content, what in FOREIGN},
    "csv: not text": (
        _bytes("broken.csv", b"arrived_at,num_prefill_tokens,num_decode_tokens\n0.0,1,1\n0.5,\xff,1\n"),
        ["line 3: not UTF-8"],
    ),
    "empty": (_bytes("broken.parquet", b""), ["empty"]),
    "a third of the file": (_edited(lambda content: content[: len(content) // 3]), ["truncated"]),
    "all but the last byte": (_edited(lambda content: content[:-1]), ["truncated"]),
    "zeros in the footer": (_edited(lambda content: content[:-400] + bytes(392) + content[-8:]), ["damaged"]),
    "another version": (_version, ["leap_trace_version is '2'"]),
    "no block size": (_block_size, ["metadata block_size"]),
    "missing": (lambda directory: directory / "missing.parquet", ["No such file"]),
    "a directory": (lambda directory: directory, ["is a directory"]),
}


def refuse(main: Callable[[list[str]], None], words: Sequence[str | Path], output: pytest.CaptureFixture[str]) -> str:
    """Run a command that must fail, and give its one line on stderr."""
    with pytest.raises(SystemExit) as caught:
        main([str(word) for word in words])
    found = output.readouterr()
    assert caught.value.code == 1
    assert found.out == ""
    assert re.fullmatch(r"leap-(replay|fit|trace): [^\n]+\n", found.err)
    return found.err


@pytest.mark.parametrize("name", CASES)
def test_a_broken_trace_ends_every_command_with_one_line(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write, parts = CASES[name]
    directory = tmp_path / "traces"
    directory.mkdir()
    path = write(directory)
    out = tmp_path / "out"
    out.mkdir()
    sound = tmp_path / "sound.parquet"
    write_trace(good(), sound)
    readout = out / "r.safetensors"
    before = sorted(tmp_path.rglob("*"))
    for command, main, words in (
        ("leap-replay", replay, [path, "--save-result", "--result-dir", out]),
        ("leap-replay", replay, [path, "--json", "--load", "1.2"]),
        ("leap-fit", fit, [path, "--out", readout]),
        ("leap-fit", fit, [sound, path, "--out", readout]),
        ("leap-fit", fit, [sound, "--out", readout, "--eval", path]),
        ("leap-trace", trace, ["convert", path, "--out", out / "t.parquet"]),
        ("leap-trace", trace, ["describe", path]),
        ("leap-trace", trace, ["describe", path, "--json"]),
        ("leap-trace", trace, ["merge", sound, path, "--out", out / "t.parquet"]),
    ):
        line = refuse(main, words, capsys)
        assert line.startswith(f"{command}: {path}: ")
        for part in parts:
            assert part in line
    assert sorted(tmp_path.rglob("*")) == before
