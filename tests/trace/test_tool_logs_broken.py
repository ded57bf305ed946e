"""Logs of tools with anything in them changed: a trace, or an error that names the file, and never anything else."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from leap_rs._leap import ConfigError, TraceError
from leap_rs.trace import READERS, ReadOptions, load
from leap_rs.trace.opening import opened

SAMPLES = sorted((Path(__file__).parent.parent / "cases" / "formats").iterdir())
ODD: list[Any] = [
    None,
    True,
    -1,
    0,
    2**70,
    10**400,
    0.5,
    1e300,
    float("nan"),
    float("-inf"),
    "",
    "x",
    "12",
    "-7",
    "\ud800",
    "{}",
    "[1]",
    [],
    [None],
    [[]],
    {},
    {"value": {}},
    {"": 1},
]
OPTIONS = (ReadOptions(), ReadOptions(strict=True), ReadOptions(run=1), ReadOptions(join=True))


def survives(path: Path, options: ReadOptions) -> None:
    """Nothing but an error of ours comes out, and it names the file; no two readers claim it."""
    trace, fault = None, ""
    try:
        trace = load(path, options)
    except (TraceError, ConfigError) as error:
        fault = str(error)
    if trace is None:
        assert str(path) in fault
        assert "\n" not in fault
    else:
        assert trace.frame.height > 0
        assert trace.frame["output_tokens"].min() > 0
        assert trace.frame["arrival_s"].is_sorted()
    assert sum(reader.fit(opened(path)).whole for reader in READERS) <= 1


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in the depth of a JSON value."""
    keys = value.keys() if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    return [path] + [place for key in keys for place in places(value[key], (*path, key))]


def changed(value: Any, path: tuple[Any, ...], new: Any, *, drop: bool) -> Any:
    """The value with something else, or nothing, at one place."""
    if not path:
        return new
    key, *rest = path
    copy = dict(value) if isinstance(value, dict) else list(value)
    if drop and not rest:
        del copy[key]
    else:
        copy[key] = changed(value[key], tuple(rest), new, drop=drop)
    return copy


def documents(path: Path) -> tuple[list[Any], bool]:
    """The JSON values of a sample, and whether they stand in lines."""
    text = path.read_text()
    lines = path.suffix == ".jsonl"
    return ([json.loads(line) for line in text.splitlines() if line.strip()] if lines else [json.loads(text)]), lines


@pytest.mark.parametrize("sample", [path for path in SAMPLES if path.suffix != ".csv"], ids=lambda path: path.stem)
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data(), options=st.sampled_from(OPTIONS))
def test_any_value_may_be_another_or_missing(sample: Path, data: st.DataObject, options: ReadOptions) -> None:
    values, _ = documents(sample)
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.sampled_from(places(values)))
        new, drop = data.draw(st.sampled_from(ODD)), data.draw(st.booleans())
        found = changed(values, place, new, drop=drop)
        values = found if isinstance(found, list) and found else values
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / sample.name
        path.write_text("\n".join(json.dumps(value) for value in values))
        survives(path, options)


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda path: path.stem)
@settings(max_examples=100, deadline=None)
@example(cut=0.999, at=0.5, byte=b"", options=ReadOptions())
@given(
    cut=st.floats(0, 1),
    at=st.floats(0, 1),
    byte=st.sampled_from([b"", b"\x00", b'"', b"}", b"\xff", b",", b"9" * 30, b"\n"]),
    options=st.sampled_from(OPTIONS),
)
def test_bytes_may_be_missing_or_others(sample: Path, cut: float, at: float, byte: bytes, options: ReadOptions) -> None:
    whole = sample.read_bytes()
    kept = whole[: round(cut * len(whole))]
    place = round(at * len(kept))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / sample.name
        path.write_bytes(kept[:place] + byte + kept[place + len(byte) :])
        survives(path, options)


@pytest.mark.parametrize("value", ["", "null", "-1", "1.0", "x", "9" * 25, "2026-02-30", "0001-01-01 00:00:00", '"'])
@pytest.mark.parametrize("column", range(21))
def test_any_cell_may_be_another(column: int, value: str, tmp_path: Path) -> None:
    sample = next(path for path in SAMPLES if path.suffix == ".csv")
    header, first, *rest = sample.read_text().splitlines()
    cells = first.split(",")
    cells[column] = value
    path = tmp_path / "logs.csv"
    path.write_text("\n".join([header, ",".join(cells), first.replace("chatcmpl-1", "other"), *rest]))
    survives(path, ReadOptions())
