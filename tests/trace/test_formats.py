"""Foreign formats: the right requests at the right times, and everything that was left out is told."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from leap_rs._leap import ConfigError, TraceError
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
    assert trace.format == "azure"
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
    assert load(path).frame.rows(named=True) == [
        {"arrival_s": 0.0, "prompt_tokens": 3, "output_tokens": 7, "deadline": 9},
        {"arrival_s": 1.5, "prompt_tokens": 4, "output_tokens": 8, "deadline": 9},
    ]


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
    with pytest.raises(TraceError, match=r"line 2: column 'num_decode_tokens': no output.* 2 such rows, and strict"):
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
    wrong = load(slow, ReadOptions(unit="ns"))
    assert any("really in nanoseconds" in line for line in wrong.told())
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


AZURE_2024 = [
    "2024-05-10 00:00:00.009930+00:00,2162,5",
    "2024-05-10 00:00:00.017335+00:00,2399,6",
    "2024-05-10 00:00:01+00:00,76,15",
    "2024-05-10 01:00:01.5+01:00,5,1",
]


def test_azure_2024_has_offsets_and_whole_seconds(tmp_path: Path) -> None:
    trace = load(write(tmp_path / "t.csv", [AZURE, *AZURE_2024]))
    assert trace.format == "azure"
    assert trace.frame["arrival_s"].to_list() == pytest.approx([0, 0.007405, 0.99007, 1.49007], abs=1e-9)
    assert trace.frame["prompt_tokens"].to_list() == [2162, 2399, 76, 5]
    quoted = [f'"{stamp}",{rest}' for stamp, rest in (row.split(",", 1) for row in AZURE_2024)]
    assert load(write(tmp_path / "q.csv", [AZURE, *quoted])).frame.equals(trace.frame)


def test_burstgpt_with_sessions(tmp_path: Path) -> None:
    header = "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type"
    rows = ["5,17,1.5,ChatGPT,10,5,15,Conversation log", "5.25,,,GPT-4,11,6,17,API log", "9,17,2,ChatGPT,12,7,19,x"]
    trace = load(write(tmp_path / "t.csv", [header, *rows]))
    assert trace.format == "burstgpt"
    assert trace.frame.to_dict(as_series=False) == {
        "arrival_s": [0.0, 0.25, 4.0],
        "prompt_tokens": [10, 11, 12],
        "output_tokens": [5, 6, 7],
        "session": ["17", None, "17"],
        "elapsed_time_s": [1.5, None, 2.0],
        "model": ["ChatGPT", "GPT-4", "ChatGPT"],
        "domain": ["Conversation log", "API log", "x"],
        "Total tokens": [15, 17, 19],
    }


def test_a_file_of_lengths_alone_has_no_times(tmp_path: Path) -> None:
    path = write(
        tmp_path / "t.csv", ["num_prefill_tokens,num_decode_tokens,pd_ratio", "3772,54,69.9", "9,0,0", "7,8,1"]
    )
    trace = load(path)
    assert trace.frame.rows() == [(0.0, 3772, 54, 69.9), (0.0, 7, 8, 1.0)]
    assert f"{path}: no arrival times (no column 'arrived_at'): all requests arrive at 0" in trace.told()
    with pytest.raises(ConfigError, match="a unit \\(ms\\) cannot be given: the file has no times"):
        load(path, ReadOptions(unit="ms"))


def test_splitwise_sim(tmp_path: Path) -> None:
    header = "request_id,request_type,application_id,arrival_timestamp,batch_size,prompt_size,token_size"
    trace = load(write(tmp_path / "t.csv", [header, "0,2,0,1,1,4096,32", "1,2,1,3.5,1,2048,8"]))
    assert trace.format == "splitwise-sim"
    assert trace.frame.rows() == [(0.0, 4096, 32, "0", "0", 2, 1), (2.5, 2048, 8, "1", "1", 2, 1)]
    assert trace.frame.columns[3:] == ["request_id", "tenant", "request_type", "batch_size"]


def test_a_comma_in_quotes_separates_nothing(tmp_path: Path) -> None:
    header = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type"
    rows = ["1,GPT-4,1,2,3,API log", '2,"GPT-4, turbo",3,4,7,"API ""log"""', "3,GPT-4,5,6,11,API log"]
    frame = load(write(tmp_path / "t.csv", [header, *rows])).frame
    assert frame["model"].to_list() == ["GPT-4", "GPT-4, turbo", "GPT-4"]
    assert frame["domain"].to_list() == ["API log", 'API "log"', "API log"]
    assert frame["prompt_tokens"].to_list() == [1, 3, 5]


def test_join_puts_recordings_one_behind_the_other(tmp_path: Path) -> None:
    # Recordings 10, 11, 14 (mean gap 2), then 3, 4 (mean gap 1), then 2 alone (no gap), then 1.
    path = write(tmp_path / "t.csv", [VIDUR, *(f"{at},{at},1" for at in (10, 11, 14, 3, 4, 2, 1))])
    trace = load(path, ReadOptions(join=True))
    assert trace.frame["arrival_s"].to_list() == [0, 1, 4, 6, 7, 8, 8]
    assert trace.frame["prompt_tokens"].to_list() == [10, 11, 14, 3, 4, 2, 1]
    assert [line for line in trace.told() if "4 recordings" in line and "line 5, 7, 8" in line]
    with pytest.raises(TraceError, match="line 5: column 'arrived_at': times run backwards"):
        load(path)
    with pytest.raises(ConfigError, match="sort and join"):
        ReadOptions(sort=True, join=True)


def test_join_refuses_a_file_without_any_order(tmp_path: Path) -> None:
    path = write(tmp_path / "t.csv", [VIDUR, *(f"{i % 2},1,1" for i in range(4000))])
    with pytest.raises(TraceError, match="no recordings one behind the other"):
        load(path, ReadOptions(join=True))
