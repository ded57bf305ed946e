"""Prompts from files, and what is said of files that hold none."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from leap_rs import LeapError
from leap_rs.record.prompts import read_prompts

CHAT = [
    [{"role": "user", "content": "one"}],
    [{"role": "system", "content": "be brief"}, {"role": "user", "content": "two"}],
]
VALUES: dict[str, list[Any]] = {
    "text": ["one", "two", "", "three\nlines"],
    "messages": CHAT,
    "tokens": [[1, 2, 3], [4]],
}


def write(directory: Path, kind: str, columns: dict[str, list[Any]]) -> Path:
    path = directory / "prompts"
    if kind == "parquet":
        pl.DataFrame(columns).write_parquet(path)
    else:
        rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
        path.write_text("".join(json.dumps(row) + "\n\n" for row in rows))
    return path


FILES = pytest.mark.parametrize("file", ["parquet", "jsonl"])


@FILES
@pytest.mark.parametrize(
    ("kind", "column"), [("text", "prompt"), ("messages", "messages"), ("tokens", "prompt_token_ids")]
)
def test_each_kind_is_known_by_its_values(file: str, kind: str, column: str, tmp_path: Path) -> None:
    values = VALUES[kind]
    path = write(tmp_path, file, {"id": list(range(len(values))), column: values})
    found = read_prompts(path)
    assert (found.column, found.kind, found.values) == (column, kind, values)
    assert found.digest == hashlib.sha256(path.read_bytes()).hexdigest()
    assert read_prompts(path, limit=1).values == values[:1]
    renamed = write(tmp_path, file, {"prompt": ["x"] * len(values), "mine": values})
    found = read_prompts(renamed, "mine")
    assert (found.column, found.kind, found.values) == ("mine", kind, values)
    assert read_prompts(renamed).values == ["x"] * len(values)


@FILES
@pytest.mark.parametrize(
    ("columns", "column", "parts"),
    [
        (
            {"id": [1], "text": ["a"]},
            None,
            ("none of the columns 'prompt', 'messages', 'prompt_token_ids'", "id, text"),
        ),
        ({"id": [1], "text": ["a"]}, "prompts", ("no column 'prompts'; there are id, text",)),
        ({"prompt": ["a", None]}, None, ("column 'prompt', row 1", "found None")),
        ({"prompt": [1, 2]}, None, ("column 'prompt', row 0", "expected a text, a list", "found 1")),
        ({"prompt_token_ids": [[1], [-1]]}, None, ("column 'prompt_token_ids', row 1", "[-1]")),
        ({"prompt_token_ids": [[]]}, None, ("row 0", "found []")),
        ({"messages": [[{"role": "user", "text": "a"}]]}, None, ("column 'messages', row 0", "role and content")),
    ],
)
def test_what_is_no_prompt_is_named(
    file: str, columns: dict[str, list[Any]], column: str | None, parts: tuple[str, ...], tmp_path: Path
) -> None:
    path = write(tmp_path, file, columns)
    with pytest.raises(LeapError) as caught:
        read_prompts(path, column)
    assert str(caught.value).startswith(f"{path}: ")
    for part in parts:
        assert part in str(caught.value)


def test_lines_that_differ_are_named(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    for text, what in [
        ('{"prompt": "a"}\n{"prompt": [1]}\n', "row 1 .*expected text as in row 0"),
        ('{"prompt": "a"}\n{"other": "b"}\n', "line 2: no field 'prompt'; there are other"),
        ('{"prompt": "a"}\n{"prompt": \n', "line 2: not JSON"),
        ("\n\n", "holds no prompts"),
        ("", "holds no prompts"),
    ]:
        path.write_text(text)
        with pytest.raises(LeapError, match=what):
            read_prompts(path)
    with pytest.raises(LeapError, match=r"missing: cannot be read"):
        read_prompts(tmp_path / "missing")
    pl.DataFrame({"prompt": ["a"] * 50}).write_parquet(path)
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(LeapError, match="the Parquet file is damaged"):
        read_prompts(path)
    pl.DataFrame({"prompt": pl.Series([], dtype=pl.String)}).write_parquet(path)
    with pytest.raises(LeapError, match="holds no prompts"):
        read_prompts(path)
