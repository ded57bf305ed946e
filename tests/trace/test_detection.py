"""A file of all but one column or key of a format is told which format it is nearest to, and what it lacks."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from pathlib import Path

import polars as pl
import pytest
from broken_json import BAILIAN, GMI, MOONCAKE, PULSE
from broken_traces import AZURE, BURST, FIRST, SPLITWISE, VIDUR, good

from leap_rs._leap import LeapError, TraceError
from leap_rs.trace import READERS, load
from leap_rs.trace.opening import Described, opened, present

CASES = Path(__file__).parent.parent / "cases"
TABLES = {
    "azure": AZURE + FIRST,
    "burstgpt": BURST + "5,a,1,GPT-4,10,1,11,API log\n",
    "splitwise-sim": SPLITWISE + "7,1,10,10\n",
    "vidur": VIDUR + "0.0,10,5\n",
}
LINES = {"mooncake": MOONCAKE, "gmi": GMI, "ragpulse": PULSE, "qwen-bailian": BAILIAN}
TEXTS = {
    "sharegpt": {"conversations": []},
    "messages": {"messages": []},
    "lmsys-chat": {"conversation_id": "a", "conversation": [], "model": "m", "turn": 1},
    "wildchat": {"conversation_hash": "a", "timestamp": "2024-03-01T10:00:00Z", "conversation": []},
    "alpaca": {"instruction": "a", "input": "b", "output": "c"},
}


def reader_named(name: str) -> Described:
    return next(reader for reader in READERS if reader.name == name and isinstance(reader, Described))


def samples() -> Iterator[tuple[str, str, dict[str, object]]]:
    """A format, a kind of file, and its first row or object."""
    for name, text in TABLES.items():
        row: dict[str, object] = next(csv.DictReader(io.StringIO(text)))  # type: ignore[assignment]
        yield name, "csv", row
        yield name, "parquet", row
    for name, line in LINES.items():
        yield name, "jsonl", json.loads(line)
    for name, entry in TEXTS.items():
        for kind in ("json", "jsonl"):
            yield name, kind, entry


def write(path: Path, kind: str, row: dict[str, object]) -> None:
    if kind == "csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(row))
            writer.writeheader()
            writer.writerow(row)
    elif kind == "parquet":
        pl.DataFrame([row]).write_parquet(path)
    else:
        path.write_text(json.dumps([row] if kind == "json" else row))


SAMPLES = list(samples())


@pytest.mark.parametrize(("name", "kind", "row"), SAMPLES, ids=[f"{name}-{kind}" for name, kind, _ in SAMPLES])
def test_one_reader_fits_and_without_a_name_the_nearest_is_told(
    name: str, kind: str, row: dict[str, object], tmp_path: Path
) -> None:
    path = tmp_path / "trace"
    write(path, kind, row)
    assert [reader.name for reader in READERS if reader.fit(opened(path)).whole] == [name]
    reader = reader_named(name)
    told = 0
    for key in reader.keys:
        less = {column: value for column, value in row.items() if column != present(key, row)}
        write(path, kind, less)
        fits = [reader.name for reader in READERS if reader.fit(opened(path)).whole]
        if fits:
            # Rows of one tool without a key are rows of another's, with times or without.
            assert name not in fits
            continue
        with pytest.raises(TraceError) as caught:
            load(path)
        text = str(caught.value)
        first = key if isinstance(key, str) else key[0]
        share = (len(row) - 1) / len(row)
        # Of a format of one or two keys nothing is left to be near to.
        if len(reader.keys) > 2 or share > 0.5:
            assert (
                f": looks like {reader.title}, but has no {'column' if kind in ('csv', 'parquet') else 'key'}" in text
            )
            assert f" {first}" in text.partition("; it has")[0]
        told += 1
    assert told or name in ("qwen-bailian", "gmi", "ragpulse")


def test_three_kinds_of_parquet_are_told_apart(tmp_path: Path) -> None:
    leap, azure, wild = tmp_path / "leap", tmp_path / "azure", tmp_path / "wild"
    good().write_parquet(leap)
    write(azure, "parquet", dict(next(csv.DictReader(io.StringIO(TABLES["azure"])))))
    write(wild, "parquet", TEXTS["wildchat"])
    found = {
        path.name: [reader.name for reader in READERS if reader.fit(opened(path)).whole] for path in (leap, azure, wild)
    }
    assert found == {"leap": ["leap"], "azure": ["azure"], "wild": ["wildchat"]}


@pytest.mark.parametrize("path", sorted(path for path in CASES.rglob("*") if path.is_file() and path.stat().st_size))
def test_no_reader_raises_for_another_ones_file(path: Path) -> None:
    opening = opened(path)
    assert sum(reader.fit(opening).whole for reader in READERS) <= 1


@pytest.mark.parametrize(
    "content", [b"[1, 2]", b"[]", b"{}", b'"text"', b"null\n", b"a\nb\n", b"{", b"PAR1", b"\xff\xfe,\x00"]
)
def test_what_is_nothing_is_told_in_a_line(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_bytes(content)
    with pytest.raises(LeapError) as caught:
        load(path)
    text = str(caught.value)
    assert text.startswith(f"{path}: ")
    assert "\n" not in text
    assert len(text) < len(str(path)) + 320
