"""JSON as text: a list read through a window of any size is the list that json reads, and damage has its line."""

from __future__ import annotations

import json
import tracemalloc
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leap_rs._leap import TraceError
from leap_rs.trace import jsontext

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=6,
)
LISTS = st.lists(st.dictionaries(st.text(max_size=5), VALUES, max_size=3), max_size=4)


def read(path: Path, *, is_list: bool) -> list[dict[str, Any]]:
    return [entry.value for entry in jsontext.entries(path, is_list=is_list)]


@given(LISTS, st.sampled_from([None, 0, 3]), st.booleans(), st.integers(1, 50))
def test_a_list_through_a_window_is_what_json_reads(
    tmp_path_factory: pytest.TempPathFactory,
    drawn: list[dict[str, Any]],
    indent: int | None,
    ascii_only: bool,
    size: int,
) -> None:
    path = tmp_path_factory.mktemp("list") / "t.json"
    path.write_text(json.dumps(drawn, indent=indent, ensure_ascii=ascii_only), "utf-8", errors="surrogatepass")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jsontext, "_WINDOW_BYTES", size)
        try:
            expected = json.loads(path.read_bytes())
        except UnicodeDecodeError:  # half of a surrogate pair, which is no UTF-8
            with pytest.raises(TraceError, match="not UTF-8"):
                read(path, is_list=True)
            return
        found = list(jsontext.entries(path, is_list=True))
    assert [entry.value for entry in found] == expected
    assert [entry.number for entry in found] == list(range(1, len(drawn) + 1))


@pytest.mark.parametrize("size", [1, 7, 1 << 20])
def test_a_list_cut_anywhere_is_refused(size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jsontext, "_WINDOW_BYTES", size)
    whole = '[\n {"a": "ü\\u00fc \\" ", "b": [1, -2.5e3, true]},\n {"c": null}\n]'.encode()
    path = tmp_path / "t.json"
    path.write_bytes(whole)
    assert read(path, is_list=True) == [{"a": 'üü " ', "b": [1, Decimal("-2.5e3"), True]}, {"c": None}]
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(TraceError) as caught:
            read(path, is_list=True)
        line = 1 + whole[:length].count(b"\n")
        assert any(f": line {at}: " in str(caught.value) for at in (line, line - 1))


@pytest.mark.parametrize("size", [1, 16, 1 << 20])
@pytest.mark.parametrize(
    ("text", "what"),
    [
        ('[{"a": 1}\n{"b": 2}]', "line 2: expected ']', found"),
        ('[{"a": 1},\n]', "line 2: entry 2: not valid JSON: expected value, found"),
        ('[{"a": 1},\n\n3]', "line 3: entry 2: expected a JSON object, found 3"),
        (
            '[{"a": 1},\n{"b": 1 2}, {"c": "' + "x" * 500 + '"}]',
            "line 2: entry 2: not valid JSON: expected ',' delimiter",
        ),
        ('[{"a": 1}]\n x', "line 2: text after the end of the list"),
        ('[\n{"a": "\n"}]', "line 2: entry 1: not valid JSON: invalid control character"),
        ("[\n" + "[" * 200_000, "line 2: entry 1: not valid JSON: nested too deeply"),
    ],
)
def test_a_broken_list_names_the_line_and_the_entry(
    size: int, text: str, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jsontext, "_WINDOW_BYTES", size)
    path = tmp_path / "t.json"
    path.write_text(text)
    with pytest.raises(TraceError) as caught:
        read(path, is_list=True)
    assert str(caught.value).startswith(f"{path}: {what}")


def test_a_byte_that_is_no_text_has_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jsontext, "_WINDOW_BYTES", 4)
    path = tmp_path / "t.json"
    path.write_bytes(b'[{"a": 1},\n{"b": 2},\n{"c": "\xff"}]')
    with pytest.raises(TraceError, match="line 3: not UTF-8"):
        read(path, is_list=True)


def test_an_error_early_in_a_big_list_does_not_read_the_rest(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text('[{"a": 1 1},' + '{"text": "word"},' * 500_000)
    tracemalloc.start()
    with pytest.raises(TraceError, match="line 1: entry 1"):
        read(path, is_list=True)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert path.stat().st_size > 8_000_000
    assert peak < 4_000_000


@pytest.mark.parametrize("is_list", [True, False])
def test_memory_does_not_grow_with_the_file(is_list: bool, tmp_path: Path) -> None:
    path = tmp_path / "t"
    entry = json.dumps({"text": "x" * 5000})
    path.write_text("[" + ",\n".join([entry] * 3000) + "]" if is_list else f"{entry}\n" * 3000)
    assert path.stat().st_size > 14_000_000
    tracemalloc.start()
    count = sum(1 for _ in jsontext.entries(path, is_list=is_list))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count == 3000
    assert peak < 6_000_000


@pytest.mark.parametrize("is_list", [True, False])
def test_an_entry_without_end_is_not_read_into_memory(
    is_list: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jsontext, "LONGEST_BYTES", 1 << 16)
    monkeypatch.setattr(jsontext, "_WINDOW_BYTES", 1 << 10)
    path = tmp_path / "t"
    path.write_text('[{"a": "' * is_list + "x" * 10_000_000)
    tracemalloc.start()
    with pytest.raises(TraceError, match="line 1: "):
        read(path, is_list=is_list)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2_000_000


@given(LISTS.filter(bool), st.sampled_from(["\n", "\r\n"]))
def test_the_opening_has_the_first_object(
    tmp_path_factory: pytest.TempPathFactory, drawn: list[dict[str, Any]], end: str
) -> None:
    path = tmp_path_factory.mktemp("opening") / "t"
    path.write_bytes(end.join(json.dumps(entry) for entry in drawn).encode())
    assert jsontext.opening(path) == jsontext.Opening(is_list=False, first=drawn[0])
    path.write_bytes(json.dumps(drawn, indent=1).encode())
    assert jsontext.opening(path) == jsontext.Opening(is_list=True, first=drawn[0])


@pytest.mark.parametrize(
    "content", [b"", b" ", b"a,b\n1,2\n", b"PAR1", b"\xff\xfe{\x00", b"[1, 2]", b'["{"]', b'"{}"', bytes(range(256))]
)
def test_what_is_no_json_of_objects_has_no_opening(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "t"
    path.write_bytes(content)
    assert jsontext.opening(path) is None
