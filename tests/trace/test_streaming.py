"""Part by part gives what the whole gives, whatever the size of the parts."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from leap_rs._leap import TraceError
from leap_rs.trace import ReadOptions, load, open_stream, order, parquet, table, write_trace
from leap_rs.trace.order import in_order, merged
from leap_rs.trace.times import nanoseconds

VIDUR = "arrived_at,num_prefill_tokens,num_decode_tokens"


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "PART_BYTES", 64)
    monkeypatch.setattr(order, "ROWS_IN_MEMORY", 20)
    monkeypatch.setattr(order, "SMALLEST_BLOCK", 2)
    monkeypatch.setattr(order, "ROWS_A_PART", 3)
    monkeypatch.setattr(parquet, "PART_ROWS", 7)


@pytest.fixture
def rows() -> list[str]:
    rng = np.random.default_rng(5)
    ticks = np.sort(rng.integers(0, 400, 300)) / 4
    outputs = rng.integers(0, 8, 300)
    return [f"{at},{i + 1},{output}" for i, (at, output) in enumerate(zip(ticks, outputs, strict=True))]


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_parts_are_the_whole(rows: list[str], end: str, tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_bytes(("\ufeff" + end.join([VIDUR, *rows])).encode())
    stream = open_stream(path)
    parts = list(stream.frames)
    assert len(parts) > 30
    kept = [row.split(",") for row in rows if not row.endswith(",0")]
    first = float(kept[0][0])
    assert pl.concat(parts).rows() == [(float(at) - first, int(prompt), int(output)) for at, prompt, output in kept]
    assert [(out.count, out.reason) for out in stream.left_out] == [
        (300 - len(kept), "no output tokens, so a failed request")
    ]
    assert load(path).frame.equals(pl.concat(parts))


@pytest.mark.usefixtures("small_parts")
def test_faults_in_later_parts_have_their_line(rows: list[str], tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    for fault, what in (("x,1,1", "'arrived_at'"), ("1e9,1", "2 fields"), ("0.0,1,1", "backwards"), ('"9,1', "quotes")):
        path.write_text("\n".join([VIDUR, *rows[:250], "", fault, *rows[250:]]))
        with pytest.raises(TraceError, match=rf"line 253: .*{what}"):
            load(path)
    path.write_bytes("\n".join([VIDUR, *rows[:250]]).encode() + b"\n99,1,\xff\n")
    with pytest.raises(TraceError, match="line 252: not UTF-8 text"):
        load(path)


@pytest.mark.usefixtures("small_parts")
def test_a_file_without_line_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "t.csv"
    path.write_text("\n".join([VIDUR, "0.0,1,1", "1.0,1," + "0" * 300 + "7", "2.0,1,1"]))
    assert load(path).frame["output_tokens"].to_list() == [1, 7, 1]
    monkeypatch.setattr(table, "LONGEST_LINE", 200)
    with pytest.raises(TraceError, match="line 3: longer than 200 bytes"):
        load(path)


@pytest.mark.usefixtures("small_parts")
def test_what_was_left_out_up_to_an_early_end(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("\n".join([VIDUR, "0.0,1,0", *(f"{i}.0,1,1" for i in range(1, 90)), "90.0,1,0"]))
    stream = open_stream(path)
    next(stream.frames)
    stream.close()
    assert [(out.count, out.first) for out in stream.left_out] == [(1, "line 2")]


@pytest.mark.usefixtures("small_parts")
def test_sort_of_what_does_not_fit(rows: list[str], tmp_path: Path) -> None:
    shuffled = [rows[i] for i in np.random.default_rng(1).permutation(300)]
    path = tmp_path / "t.csv"
    path.write_text("\n".join([VIDUR, *shuffled]))
    kept = [row.split(",") for row in shuffled if not row.endswith(",0")]
    kept.sort(key=lambda row: float(row[0]))  # stable, so equal times keep the order of the file
    first = float(kept[0][0])
    frame = load(path, ReadOptions(sort=True)).frame
    assert frame.rows() == [(float(at) - first, int(prompt), int(output)) for at, prompt, output in kept]


@pytest.mark.usefixtures("small_parts")
def test_join_over_parts(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    recordings = [[float(i * 2) for i in range(40)], [7.0 + i for i in range(33)], [0.0], [0.5 * i for i in range(21)]]
    path.write_text("\n".join([VIDUR, *(f"{at},1,1" for one in recordings for at in one)]))
    expected: list[float] = []
    start = 0.0
    for one in recordings:
        expected += [start + at - one[0] for at in one]
        gap = (one[-1] - one[0]) / (len(one) - 1) if len(one) > 1 else 0.0
        start = expected[-1] + gap
    assert load(path, ReadOptions(join=True)).frame["arrival_s"].to_list() == expected


@pytest.mark.usefixtures("small_parts")
def test_a_leap_trace_in_parts(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    frame = pl.DataFrame(
        {
            "arrival_s": np.arange(50) / 3,
            "prompt_tokens": pl.Series(range(1, 51), dtype=pl.UInt32),
            "output_tokens": pl.Series([1] * 50, dtype=pl.UInt32),
        }
    )
    write_trace(frame, path, model="m")
    stream = open_stream(path)
    parts = list(stream.frames)
    assert [part.height for part in parts] == [7] * 7 + [1]
    assert pl.concat(parts).equals(frame)
    assert stream.metadata == {"leap_trace_version": "1", "model": "m"}

    times = frame["arrival_s"].to_list()
    for row, value, what in ((28, 1.0, "backwards"), (30, float("nan"), "finite"), (49, -1.0, "negative")):
        broken = frame.with_columns(pl.Series("arrival_s", [*times[:row], value, *times[row + 1 :]]))
        broken.write_parquet(path)
        with pytest.raises(TraceError, match=rf"column 'arrival_s', row {row} .*{what}"):
            list(open_stream(path).frames)


@given(st.lists(st.lists(st.lists(st.integers(0, 6), max_size=5), max_size=4), max_size=4))
def test_merge_against_a_stable_sort(runs: list[list[list[int]]]) -> None:
    number = 0
    sources: list[list[pl.DataFrame]] = []
    every: list[tuple[int, int]] = []
    for run in runs:
        keys = sorted(key for part in run for key in part)
        source = []
        for part in run:
            own, keys = keys[: len(part)], keys[len(part) :]
            pairs = [(key, number + i) for i, key in enumerate(own)]
            number += len(own)
            every += pairs
            source.append(pl.DataFrame(pairs, schema={"key": pl.Int64, "id": pl.Int64}, orient="row"))
        sources.append(source)
    found = [row for frame in merged([iter(source) for source in sources], "key") for row in frame.rows()]
    assert found == sorted(every, key=lambda pair: pair[0])


def test_a_disk_that_cannot_hold_the_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    frames = (pl.DataFrame({"key": [i]}) for i in range(3))

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pl.DataFrame, "write_parquet", full)
    with pytest.raises(TraceError, match=r"in\.csv: cannot be sorted in .*: No space left"):
        list(in_order(frames, "key", tmp_path / "in.csv"))


@given(st.decimals(-(10**9), 10**9, places=10), st.sampled_from(["s", "ms", "us", "ns"]))
def test_decimal_text_is_exact(value: Decimal, unit: str) -> None:
    scale = {"s": 9, "ms": 6, "us": 3, "ns": 0}[unit]
    expected = int(value.scaleb(scale).quantize(Decimal(1), ROUND_HALF_UP))
    assert nanoseconds(pl.Series([f"{value:f}"]), unit).to_list() == [expected]  # type: ignore[arg-type]


def test_numbers_that_are_no_times() -> None:
    text = pl.Series(["nan", "inf", "", "1e30", "99999999999999999999", "1:30", "1e-05", ".5", "5.", "+2"])
    assert nanoseconds(text, "s").to_list() == [None] * 6 + [10_000, 500_000_000, 5_000_000_000, 2_000_000_000]
    assert nanoseconds(pl.Series([1.5, float("nan"), 1e300]), "ms").to_list() == [1_500_000, None, None]
    assert nanoseconds(pl.Series([3, 2**62, -(2**62)]), "us").to_list() == [3000, None, None]


def _lines(count: int) -> Iterator[str]:
    yield VIDUR
    for i in range(count):
        yield f"{i * 0.004:.6f},{1000 + i % 3000},{1 + i % 700}"


@pytest.mark.slow
def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    script = (
        "import resource, sys\n"
        "from leap_rs.trace.command import main\n"
        "try:\n    main(sys.argv[1:])\n"
        "except SystemExit as end:\n    assert end.code == 0\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)\n"
    )
    peaks = []
    for count in (1_500_000, 6_000_000):
        path = tmp_path / f"{count}.csv"
        with path.open("w") as file:
            file.writelines(f"{line}\n" for line in _lines(count))
        words = ["convert", str(path), "--out", str(tmp_path / f"{count}.parquet")]
        done = subprocess.run([sys.executable, "-c", script, *words], capture_output=True, text=True, check=True)
        peaks.append(int(done.stdout.splitlines()[-1]))
    # Four times the rows hold 120 MB more of text alone, and several times that once split into fields.
    assert peaks[1] < peaks[0] + 150
