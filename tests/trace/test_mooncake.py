"""JSON lines with Mooncake's keys and Qwen-Bailian's: units, blocks and sessions, and no format taken for another."""

from __future__ import annotations

import json
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from broken_json import BAILIAN, BROKEN_JSON, GMI, MOONCAKE, PULSE
from hypothesis import given
from hypothesis import strategies as st

from leap_rs._leap import LeapError, TraceError
from leap_rs.trace import READERS, ReadOptions, load, write_trace
from leap_rs.trace.opening import opened

BLOCKS = pl.List(pl.UInt64)


def write(path: Path, rows: Sequence[dict[str, Any]], end: str = "\n") -> Path:
    path.write_bytes("".join(json.dumps(row) + end for row in rows).encode())
    return path


def mooncake(time: float, prompt: int, output: int, ids: Sequence[int]) -> dict[str, Any]:
    return {"timestamp": time, "input_length": prompt, "output_length": output, "hash_ids": list(ids)}


@pytest.mark.parametrize("name", BROKEN_JSON)
def test_broken_json_names_the_place(name: str, tmp_path: Path) -> None:
    content, what = BROKEN_JSON[name]
    path = tmp_path / "trace"
    path.write_bytes(content)
    with pytest.raises(LeapError) as caught:
        load(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert what in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "Extra data" not in str(caught.value)


def test_two_numbers_in_one_field_are_refused(cases: Path) -> None:
    with pytest.raises(TraceError, match=r"03-mooncake_two_numbers\.jsonl: line 3: not valid JSON: expected ',' deli"):
        load(cases / "03-mooncake_two_numbers.jsonl")


def test_blocks_that_disagree_with_the_length_are_refused(cases: Path) -> None:
    with pytest.raises(TraceError, match=r"blocks_disagree\.jsonl: line 2: .*20 tokens need 1 block of 512, 2 given"):
        load(cases / "05-mooncake_blocks_disagree.jsonl")


def test_a_trace_of_less_than_a_millisecond_is_pointed_out(tmp_path: Path) -> None:
    rows = [mooncake(0.0, 12, 5, [0]), mooncake(0.2, 20, 8, [0]), mooncake(0.4, 1600, 6, [0, 1, 2, 3])]
    path = write(tmp_path / "t.jsonl", rows)
    trace = load(path)
    assert trace.frame["arrival_s"].to_list() == pytest.approx([0, 0.0002, 0.0004], abs=1e-12)
    (line,) = trace.told()
    assert "0.4 ms" in line
    assert "seconds?" in line
    seconds = load(path, ReadOptions(unit="s"))
    assert seconds.frame["arrival_s"].to_list() == pytest.approx([0, 0.2, 0.4], abs=1e-12)
    assert seconds.told() == []


def test_nanosecond_strings_are_subtracted_as_integers(cases: Path) -> None:
    trace = load(cases / "06-gmi_nanosecond_strings.jsonl")
    assert trace.format == "gmi"
    arrival = trace.frame["arrival_s"].to_list()
    assert arrival == pytest.approx([0, 1.25, 1.250000001, 86400], abs=1e-12)
    assert arrival[1] < arrival[2]
    assert trace.frame["prompt_tokens"].to_list() == [70, 36, 108, 35]
    assert trace.frame["output_tokens"].to_list() == [14, 1, 230, 9]
    assert trace.frame.columns == ["arrival_s", "prompt_tokens", "output_tokens"]
    assert trace.told() == [f"{trace.path}: 'hash_ids' is not read: the blocks have no fixed size"]


def test_only_full_blocks_are_kept(tmp_path: Path) -> None:
    rows = [
        mooncake(0, 511, 1, [7]),
        mooncake(0, 512, 1, [7]),
        mooncake(1, 513, 1, [7, 2**64 - 1]),
        mooncake(1, 1024, 1, [2**64 - 1, 0]),
        mooncake(2, 1100, 1, [1, 2]),
    ]
    trace = load(write(tmp_path / "t.jsonl", rows))
    assert trace.frame.schema["prefix_blocks"] == BLOCKS
    assert trace.frame["prefix_blocks"].to_list() == [[], [7], [7], [2**64 - 1, 0], [1, 2]]
    assert trace.metadata["block_size"] == "512"
    write_trace(trace.frame, tmp_path / "t.parquet", **trace.metadata)
    assert load(tmp_path / "t.parquet").frame.equals(trace.frame)


def test_a_trace_without_blocks_is_read(tmp_path: Path) -> None:
    trace = load(write(tmp_path / "t.jsonl", [{"input_length": 7, "timestamp": 5, "output_length": 2, "x": None}]))
    assert trace.frame.rows() == [(0.0, 7, 2)]
    assert "block_size" not in trace.metadata


def test_failed_requests_are_left_out(tmp_path: Path) -> None:
    rows = [mooncake(9, 600, 0, [1, 2]), mooncake(10, 600, 3, [1, 2]), mooncake(3, 0, 3, []), mooncake(2010, 1, 1, [1])]
    path = write(tmp_path / "t.jsonl", rows)
    trace = load(path)
    assert trace.frame["arrival_s"].to_list() == [0.0, 2.0]
    assert [(out.count, out.first) for out in trace.left_out] == [(1, "line 1"), (1, "line 3")]
    with pytest.raises(TraceError, match="line 1: column 'output_length': no output tokens"):
        load(path, ReadOptions(strict=True))


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\n\n \t\r\n"])
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("line", [MOONCAKE, GMI, PULSE, BAILIAN])
def test_line_ends_and_byte_order_marks_do_not_matter(end: bytes, mark: bytes, line: bytes, tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_bytes(line)
    once = load(path).frame
    path.write_bytes(mark + end + line.replace(b"\n", end) + line.rstrip())
    assert load(path).frame.equals(pl.concat([once, once]))


def test_two_recordings_in_one_file(tmp_path: Path) -> None:
    def row(time: str, session: str) -> dict[str, Any]:
        return {**mooncake(0, 10, 2, []), "timestamp": time, "hash_ids": {"history": [1]}, "session_id": session}

    path = write(tmp_path / "t.jsonl", [row("3", "a"), row("5", "b"), row("0", "a"), row("4.5", "c")])
    with pytest.raises(TraceError, match="line 3: column 'timestamp': times run backwards"):
        load(path)
    ordered = load(path, ReadOptions(sort=True)).frame
    assert ordered["arrival_s"].to_list() == [0.0, 3.0, 4.5, 5.0]
    assert ordered["session"].to_list() == ["a", "a", "c", "b"]
    joined = load(path, ReadOptions(join=True)).frame
    assert joined["session"].to_list() == ["a", "b", "a", "c"]
    assert joined["arrival_s"].diff().to_list()[1::2] == [2.0, 4.5]


def test_a_chat_and_what_continues_it_are_one_session(tmp_path: Path) -> None:
    def row(chat: int, parent: int, time: float, kind: str) -> dict[str, Any]:
        turn = {"chat_id": chat, "parent_chat_id": parent, "type": kind, "turn": 1 if parent < 0 else 2}
        return {**turn, **mooncake(time, 33, 4, [1, 2, 3])}

    # Chat 55 began before the recording; 162 continues 161, which continues 159.
    rows = [(159, -1, "text"), (160, 55, "file"), (161, 159, "text"), (162, 161, "search"), (163, -1, "text")]
    path = write(tmp_path / "t.jsonl", [row(chat, at, 61.114 + n, kind) for n, (chat, at, kind) in enumerate(rows)])
    trace = load(path)
    assert trace.format == "qwen-bailian"
    assert trace.frame["arrival_s"].to_list() == pytest.approx([0, 1, 2, 3, 4], abs=1e-9)
    assert trace.frame["session"].to_list() == ["159", "55", "159", "159", "163"]
    assert trace.frame["domain"].to_list() == ["text", "file", "text", "search", "text"]
    assert trace.frame["prefix_blocks"].to_list() == [[1, 2]] * 5
    assert trace.metadata["block_size"] == "16"


@pytest.mark.parametrize(
    ("line", "name"), [(MOONCAKE, "mooncake"), (GMI, "gmi"), (PULSE, "ragpulse"), (BAILIAN, "qwen-bailian")]
)
def test_a_long_first_line_is_recognised_by_one_reader(line: bytes, name: str, tmp_path: Path) -> None:
    entry = json.loads(line)
    entry["input_length"] = 512 * 4000
    if name == "mooncake":
        entry["hash_ids"] = list(range(4000))
    if name == "qwen-bailian":
        entry["hash_ids"] = list(range(512 * 4000 // 16))
    entry["padding"] = "x" * 9000
    for order in (list(entry), list(reversed(entry))):
        path = write(tmp_path / "t", [{key: entry[key] for key in order}])
        assert path.stat().st_size > 8192
        assert [reader.name for reader in READERS if reader.fit(opened(path)).whole] == [name]
        assert load(path).frame.height == 1


@pytest.mark.parametrize("time", [0, 0.5, None, "82", "1753694362340138614"])
@pytest.mark.parametrize("ids", [[1], {"history": [1]}, None])
@pytest.mark.parametrize("more", [{}, {"session_id": "a"}, {"chat_id": 1, "parent_chat_id": -1}])
def test_every_mixture_of_keys_is_one_format(time: object, ids: object, more: dict[str, Any], tmp_path: Path) -> None:
    entry = {"timestamp": time, "input_length": 5, "output_length": 5, "hash_ids": ids, **more}
    path = write(tmp_path / "t", [{key: value for key, value in entry.items() if value is not None}])
    assert len([reader.name for reader in READERS if reader.fit(opened(path)).whole]) == 1


times = st.one_of(st.integers(0, 4 * 10**12), st.decimals(0, 4 * 10**12, places=6))


@given(st.lists(st.tuples(times, st.integers(0, 6000), st.integers(0, 2**32 - 1)), min_size=1, max_size=20))
def test_mooncake_against_decimal_arithmetic(
    tmp_path_factory: pytest.TempPathFactory, drawn: list[tuple[int | Decimal, int, int]]
) -> None:
    drawn.sort(key=lambda row: row[0])
    kept = [row for row in drawn if row[1] > 0 and row[2] > 0]
    path = tmp_path_factory.mktemp("mooncake") / "t.jsonl"
    lines = [
        f'{{"timestamp": {time:f}, "input_length": {prompt}, "output_length": {output}, '
        f'"hash_ids": {list(range(-(-prompt // 512)))}}}'
        if isinstance(time, Decimal)
        else json.dumps(mooncake(time, prompt, output, range(-(-prompt // 512))))
        for time, prompt, output in drawn
    ]
    path.write_text("\n".join(lines))
    if not kept:
        with pytest.raises(TraceError, match="no requests"):
            load(path)
        return
    frame = load(path).frame
    expected = [float((Decimal(time) - Decimal(kept[0][0])) / 1000) for time, _, _ in kept]
    assert frame["arrival_s"].to_list() == pytest.approx(expected, rel=1e-15, abs=1e-12)
    assert frame["prompt_tokens"].to_list() == [prompt for _, prompt, _ in kept]
    assert frame["output_tokens"].to_list() == [output for _, _, output in kept]
    assert frame["prefix_blocks"].to_list() == [list(range(prompt // 512)) for _, prompt, _ in kept]


@given(st.integers(0, len(MOONCAKE + BAILIAN) - 1), st.binary(max_size=3), st.integers(0, 5))
def test_damaged_lines_never_escape_the_exception_family(
    tmp_path_factory: pytest.TempPathFactory, at: int, put: bytes, cut: int
) -> None:
    path = tmp_path_factory.mktemp("damaged") / "t.jsonl"
    for line in (MOONCAKE, BAILIAN, GMI, PULSE):
        content = line + line + line
        path.write_bytes(content[:at] + put + content[at + cut :])
        try:
            outcome = load(path).frame.height <= 3
        except LeapError as error:
            outcome = str(error).startswith(f"{path}: ")
        assert outcome
