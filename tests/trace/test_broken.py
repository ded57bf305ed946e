"""Every way in which a trace file is broken has its own clear error, which names the file, the column and the row."""

from __future__ import annotations

import bz2
import contextlib
import gzip
import lzma
import os
import random
import re
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import zstandard
from broken_json import MOONCAKE
from broken_traces import AZURE, BROKEN, BROKEN_CSV, FIRST, FOREIGN, ROWS, VIDUR, good, with_value

from leap_rs._leap import ConfigError, LeapError, TraceError
from leap_rs.trace import ReadOptions, load, read_trace, write_trace


def assert_names(error: TraceError, path: Path, column: str | None, row: int | None, what: str) -> None:
    text = str(error)
    assert text.startswith(f"{path}: ")
    assert "\n" not in text
    if column is not None:
        assert f"column '{column}'" in text
    assert re.findall(r", row (\d+) \(the first row is 0\)", text) == ([] if row is None else [str(row)])
    assert what in text


@pytest.mark.parametrize("name", BROKEN)
def test_broken_frame_is_refused_by_the_reader_and_by_the_writer(name: str, tmp_path: Path) -> None:
    frame, column, row, what = BROKEN[name]
    path = tmp_path / "broken.parquet"
    frame.write_parquet(path)
    with pytest.raises(TraceError) as caught:
        read_trace(path)
    assert_names(caught.value, path, column, row, what)

    target = tmp_path / "out" / "written.parquet"
    target.parent.mkdir()
    with pytest.raises(TraceError) as caught:
        write_trace(frame, target)
    # The writer takes what it is given for the format; the reader has to find out.
    lacks = re.fullmatch(r"looks like leap, but has no column (\w+); it has ", what)
    found = (lacks[1], row, "missing; the file has ") if lacks else (column, row, what)
    assert_names(caught.value, target, *found)
    assert list(target.parent.iterdir()) == []


def test_the_good_trace_is_good(tmp_path: Path) -> None:
    write_trace(good(), tmp_path / "good.parquet")
    assert read_trace(tmp_path / "good.parquet").equals(good())


def test_a_refused_write_keeps_the_older_file(tmp_path: Path) -> None:
    path = tmp_path / "trace.parquet"
    write_trace(good(), path)
    before = path.read_bytes()
    with pytest.raises(TraceError, match="column 'output_tokens', row 1"):
        write_trace(with_value("output_tokens", 1, 0), path)
    assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["trace.parquet"]


@pytest.mark.parametrize("version", ["0", "2", "", "1.0"])
def test_another_version_is_refused(version: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.parquet"
    good().write_parquet(path, metadata={"leap_trace_version": version})
    with pytest.raises(TraceError, match=rf"trace\.parquet: leap_trace_version is '{version}'; .* version 1"):
        read_trace(path)


@pytest.mark.parametrize("size", ["0", "-16", "x", "1.5", ""])
def test_a_block_size_that_is_none_is_refused(size: str, tmp_path: Path) -> None:
    frame = good().drop("prefix_tokens").with_columns(pl.Series("prefix_blocks", [[]] * ROWS, dtype=pl.List(pl.UInt64)))
    path = tmp_path / "trace.parquet"
    frame.write_parquet(path, metadata={"block_size": size})
    with pytest.raises(TraceError, match="metadata block_size"):
        read_trace(path)


def test_truncated_files_are_refused_at_every_length(tmp_path: Path) -> None:
    whole, path = tmp_path / "whole.parquet", tmp_path / "cut.parquet"
    write_trace(good(), whole)
    content = whole.read_bytes()
    for length in (0, 3, 4, 5, 8, 11, 12, 100, len(content) // 2, len(content) - 5, len(content) - 1):
        path.write_bytes(content[:length])
        expected = "empty" if length == 0 else "not a trace format" if length < 4 else "truncated"
        with pytest.raises(TraceError, match=rf"cut\.parquet: .*{expected}"):
            read_trace(path)


def test_a_damaged_footer_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.parquet"
    write_trace(good(), path)
    content = bytearray(path.read_bytes())
    content[-400:-8] = bytes(392)
    path.write_bytes(content)
    with pytest.raises(TraceError, match=r"trace\.parquet: the Parquet file is damaged"):
        read_trace(path)


def test_flipped_bytes_never_escape_the_exception_family(tmp_path: Path) -> None:
    path = tmp_path / "trace.parquet"
    write_trace(good(), path)
    content = path.read_bytes()
    refused = 0
    rng = np.random.default_rng(0)
    for at in rng.choice(len(content), size=150, replace=False):
        path.write_bytes(content[:at] + bytes([content[at] ^ int(rng.integers(1, 256))]) + content[at + 1 :])
        # Damage to a value alone cannot be seen; anything that can be seen must be a TraceError.
        with contextlib.suppress(TraceError):
            read_trace(path)
            continue
        refused += 1
    assert refused > 50


def test_files_that_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"missing\.parquet: cannot be read: No such file"):
        read_trace(tmp_path / "missing.parquet")
    with pytest.raises(TraceError, match="is a directory"):
        read_trace(tmp_path)


@pytest.mark.parametrize(("name", "content", "what"), FOREIGN, ids=[name for name, _, _ in FOREIGN])
def test_another_format_is_told_what_it_is_and_which_is_nearest(
    name: str, content: bytes, what: str, tmp_path: Path
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(TraceError) as caught:
        read_trace(path)
    text = str(caught.value)
    assert text.startswith(f"{path}: ")
    assert what in text
    assert len(text) < len(str(path)) + 320


@pytest.mark.parametrize("name", BROKEN_CSV)
def test_broken_csv_names_the_line(name: str, tmp_path: Path) -> None:
    text, what = BROKEN_CSV[name]
    path = tmp_path / "trace.csv"
    path.write_text(text)
    with pytest.raises(TraceError) as caught:
        read_trace(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert what in str(caught.value)


def test_csv_that_is_not_text(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_bytes(VIDUR.encode() + b"0.0,1,1\n0.5,\xff,1\n")
    with pytest.raises(TraceError, match="line 3: not UTF-8"):
        read_trace(path)


def test_a_unit_for_dates_is_a_contradiction(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(AZURE + FIRST)
    with pytest.raises(ConfigError, match=r"trace\.csv: a unit \(ms\) cannot be given"):
        load(path, ReadOptions(unit="ms"))
    write_trace(good(), tmp_path / "trace.parquet")
    with pytest.raises(ConfigError, match=r"trace\.parquet: a unit \(s\) cannot be given"):
        read_trace(tmp_path / "trace.parquet", unit="s")
    with pytest.raises(ConfigError, match="'minutes' is not one of s, ms, us, ns"):
        ReadOptions(unit="minutes")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "write",
    [
        lambda at: write_trace(good(), at / "missing" / "trace.parquet"),
        lambda at: write_trace(good(), at),
        lambda at: write_trace(good(), at / "trace.parquet", leap_trace_version=2),
        lambda at: write_trace(good().to_dict(), at / "trace.parquet"),
    ],
    ids=["no directory", "a directory", "another version", "no frame"],
)
def test_writes_that_cannot_be(write: Callable[[Path], None], tmp_path: Path) -> None:
    with pytest.raises(LeapError, match=re.escape(str(tmp_path))):
        write(tmp_path)
    assert list(tmp_path.iterdir()) == []


def zstd(content: bytes) -> bytes:
    return zstandard.ZstdCompressor().compress(content)


PACKED = {"gzip": gzip.compress, "bzip2": bz2.compress, "xz": lzma.compress, "zstd": zstd}


@pytest.mark.parametrize("name", PACKED)
@pytest.mark.parametrize("content", [VIDUR + "0.0,10,1\n0.25,20,2\n", MOONCAKE.decode() * 2])
def test_a_compressed_file_is_read_as_it_is(name: str, content: str, tmp_path: Path) -> None:
    plain, packed = tmp_path / "plain", tmp_path / "packed"
    plain.write_text(content)
    packed.write_bytes(PACKED[name](content.encode()))
    assert load(packed).frame.equals(load(plain).frame)
    # Cut off it is told so.
    whole = PACKED[name](
        (content + content.split("\n")[-2] + "\n" * 70_000).encode() + random.Random(0).randbytes(9000).hex().encode()
    )
    for broken in (whole[: len(whole) // 2], whole[:-3]):
        packed.write_bytes(broken)
        with pytest.raises(
            TraceError, match=rf"packed: cannot be read: the {name} data is damaged or cut off: |: line "
        ):
            load(packed)


def test_what_has_to_be_unpacked_by_hand_is_told(tmp_path: Path) -> None:
    path = tmp_path / "trace.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("trace.csv", VIDUR)
    with pytest.raises(TraceError, match=r"trace\.zip: is a zip archive: unpack it first$"):
        load(path)
    write_trace(good(), tmp_path / "t.parquet")
    (tmp_path / "t.gz").write_bytes(gzip.compress((tmp_path / "t.parquet").read_bytes()))
    with pytest.raises(TraceError, match=r"t\.gz: is Parquet that is packed once more \(gzip\): unpack it first$"):
        load(tmp_path / "t.gz")


def test_an_empty_file_is_not_answered_with_all_formats(tmp_path: Path) -> None:
    (tmp_path / "t.csv").touch()
    with pytest.raises(TraceError, match=r"t\.csv: the file is empty$"):
        load(tmp_path / "t.csv")


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(TraceError, match=r"pipe: is a pipe or a device: .* save it to a file first"):
        load(tmp_path / "pipe")
