"""Foreign formats: the right requests at the right times, and everything that was left out is told."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from leap_rs._leap import TraceError
from leap_rs.trace import ReadOptions, TraceWarning, load, read_trace

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens"
VIDUR = "arrived_at,num_prefill_tokens,num_decode_tokens"


def write(path: Path, lines: list[str], end: str = "\n") -> Path:
    path.write_bytes(end.join(lines).encode())
    return path


def test_azure_keeps_gaps_below_a_millisecond(tmp_path: Path) -> None:
    rows = [
        "2023-11-16 18:15:46.9991000,374,44",
        "2023-11-16 18:15:46.9992500,396,109",
        "2023-11-16 18:15:47.0000000,879,55",
        "2023-11-16 18:15:47.0085001,91,16",
        "2023-11-16 18:15:47.0850000,2,7",
    ]
    path = write(tmp_path / "azure.txt", [AZURE, *rows], "\r\n")
    trace = load(path)
    assert trace.format == "azure-2023"
    assert trace.frame.schema == {"arrival_s": pl.Float64, "prompt_tokens": pl.UInt32, "output_tokens": pl.UInt32}
    assert trace.frame["arrival_s"].to_list() == pytest.approx([0, 0.00015, 0.0009, 0.0094001, 0.0859], abs=1e-9)
    assert trace.frame["output_tokens"].to_list() == [44, 109, 55, 16, 7]
    assert trace.told() == []


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("last", ["", "\n", "\r\n\r\n"])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_line_ends_and_byte_order_marks_do_not_matter(end: str, last: str, mark: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_bytes((mark + end.join([VIDUR, "0.0,10,1", "0.25,20,2"]) + last).encode())
    assert load(path).frame.rows() == [(0.0, 10, 1), (0.25, 20, 2)]


def test_columns_are_found_by_name(tmp_path: Path) -> None:
    path = write(
        tmp_path / "t.csv",
        ['"num_decode_tokens",deadline,"arrived_at",num_prefill_tokens', "7,9,0.0,3", '"8",9,1.5,4.0'],
    )
    assert load(path).frame.rows() == [(0.0, 3, 7), (1.5, 4, 8)]


def test_equal_times_keep_the_order_of_the_file(tmp_path: Path) -> None:
    lines = [f"2023-11-16 18:15:46.5000000,{n},{n}" for n in range(1, 400)]
    frame = load(write(tmp_path / "t.csv", [AZURE, *lines])).frame
    assert frame["prompt_tokens"].to_list() == list(range(1, 400))
    assert set(frame["arrival_s"]) == {0.0}


def test_failed_rows_are_left_out_counted_and_told(tmp_path: Path) -> None:
    lines = ["5.0,10,0", "7.0,472,35", "7.0,1087,214", "52.0,1204,0", "190.0,417,301", "191.0,0,5", "250.0,3,512"]
    path = write(tmp_path / "t.csv", [VIDUR, *lines])
    trace = load(path)
    assert trace.frame["arrival_s"].to_list() == [0.0, 0.0, 183.0, 243.0]
    assert trace.frame["output_tokens"].to_list() == [35, 214, 301, 512]
    assert [(out.count, out.first) for out in trace.left_out] == [(2, "line 2"), (1, "line 7")]
    assert trace.told() == [
        f"{path}: 2 rows left out: no output tokens, so a failed request (first: line 2)",
        f"{path}: 1 row left out: no prompt tokens (first: line 7)",
    ]
    with pytest.warns(TraceWarning, match="rows? left out") as caught:
        assert read_trace(path).equals(trace.frame)
    assert len(caught) == 2
    with pytest.raises(TraceError, match=r"line 2: column 'num_decode_tokens' is 0 .* 2 such rows, and strict"):
        read_trace(path, strict=True)


def test_a_failed_row_out_of_order_does_not_matter(tmp_path: Path) -> None:
    path = write(tmp_path / "t.csv", [VIDUR, "1.0,1,1", "0.5,1,0", "2.0,1,1"])
    assert load(path).frame["arrival_s"].to_list() == [0.0, 1.0]


def test_sort_orders_times_that_run_backwards(tmp_path: Path) -> None:
    path = write(tmp_path / "t.csv", [VIDUR, "2.0,1,1", "0.5,2,1", "2.0,3,1", "0.5,4,1"])
    with pytest.raises(TraceError, match="line 3"):
        load(path)
    frame = load(path, ReadOptions(sort=True)).frame
    assert frame.rows() == [(0.0, 2, 1), (0.0, 4, 1), (1.5, 1, 1), (1.5, 3, 1)]


def test_a_unit_can_be_given_and_an_implausible_one_is_told(tmp_path: Path) -> None:
    slow = write(tmp_path / "ms.csv", [VIDUR, *(f"{i * 2000},1,1" for i in range(20))])
    assert any("really in seconds" in line for line in load(slow).told())
    given_unit = load(slow, ReadOptions(unit="ms"))
    assert given_unit.told() == []
    assert given_unit.frame["arrival_s"].to_list() == pytest.approx([i * 2.0 for i in range(20)])
    fast = write(tmp_path / "s.csv", [VIDUR, *(f"{i * 1e-6:.6f},1,1" for i in range(20))])
    assert any("really in seconds" in line for line in load(fast).told())
    quiet = write(tmp_path / "quiet.csv", [VIDUR, *(f"{i * 30}.0,1,1" for i in range(20))])
    assert load(quiet).told() == []


def test_a_unix_time_is_counted_from_the_first_request(tmp_path: Path) -> None:
    path = write(tmp_path / "t.csv", [VIDUR, "1700000000.25,1,1", "1700000001.5,1,1"])
    assert load(path).frame["arrival_s"].to_list() == [0.0, 1.25]


@given(
    st.lists(
        st.tuples(st.integers(0, 10**12), st.integers(0, 2**32 - 1), st.integers(0, 5000)), min_size=1, max_size=30
    )
)
def test_azure_against_decimal_arithmetic(
    tmp_path_factory: pytest.TempPathFactory, drawn: list[tuple[int, int, int]]
) -> None:
    drawn.sort(key=lambda row: row[0])
    kept = [row for row in drawn if row[1] > 0 and row[2] > 0]
    lines = []
    for ticks, prompt, output in drawn:  # a tick is the format's last digit, 100 ns; 10**12 of them are 27.8 hours
        seconds, fraction = divmod(ticks, 10**7)
        day, clock = divmod(seconds, 86400)
        stamp = f"2024-02-{28 + day:02d} {clock // 3600:02d}:{clock // 60 % 60:02d}:{clock % 60:02d}.{fraction:07d}"
        lines.append(f"{stamp},{prompt},{output}")
    path = write(tmp_path_factory.mktemp("azure") / "t.csv", [AZURE, *lines], "\r\n")
    if not kept:
        with pytest.raises(TraceError, match="no requests"):
            load(path)
        return
    trace = load(path)
    assert sum(out.count for out in trace.left_out) == len(drawn) - len(kept)
    expected = [float(Decimal(ticks - kept[0][0]) / 10**7) for ticks, _, _ in kept]
    assert trace.frame["arrival_s"].to_list() == pytest.approx(expected, abs=1e-9)
    assert trace.frame["prompt_tokens"].to_list() == [row[1] for row in kept]
    assert trace.frame["output_tokens"].to_list() == [row[2] for row in kept]
