"""`leap-trace convert` and `merge`: the right requests at the right times, whole or not at all."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from leap_rs.trace import TraceWarning, load, parquet, read_trace, table, write_trace
from leap_rs.trace.command import main

VIDUR = "arrived_at,num_prefill_tokens,num_decode_tokens"
LENGTHS = "num_prefill_tokens,num_decode_tokens"


def run(words: list[str | Path], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    with pytest.raises(SystemExit) as caught:
        main([*(str(word) for word in words), "--json"])
    found = capsys.readouterr()
    assert (caught.value.code, found.err) == (0, "")
    return json.loads(found.out, parse_constant=lambda text: pytest.fail(f"{text} is no JSON"))  # type: ignore[no-any-return]


def refuse(words: list[str | Path], capsys: pytest.CaptureFixture[str], code: int = 1) -> str:
    with pytest.raises(SystemExit) as caught:
        main([str(word) for word in words])
    found = capsys.readouterr()
    assert (caught.value.code, found.out) == (code, "")
    return found.err


def lengths_file(path: Path, count: int) -> Path:
    path.write_text("\n".join([LENGTHS, *(f"{i + 1},{i % 9 + 1}" for i in range(count))]))
    return path


def csv_file(path: Path, times: list[float], prompt: int = 5) -> Path:
    path.write_text("\n".join([VIDUR, *(f"{at},{prompt},{i + 1}" for i, at in enumerate(times))]))
    return path


def test_arrivals_are_gamma_and_seeded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(table, "PART_BYTES", 4096)
    path, out = lengths_file(tmp_path / "t.csv", 20_000), tmp_path / "out.parquet"
    words: list[str | Path] = ["convert", path, "--out", out, "--request-rate", "8", "--burstiness", "0.5"]
    written = run([*words, "--seed", "3"], capsys)
    assert written["requests"] == 20_000
    assert written["inputs"][0]["notes"] == []
    assert "Gamma, 8 requests/s, burstiness 0.5, seed 3" in written["notes"][0]
    times = read_trace(out)["arrival_s"].to_numpy()
    gaps = np.diff(times, prepend=0.0)
    # The first request has a gap of its own, and the last of n comes at n / rate.
    assert times[0] > 0.0
    assert times[-1] == written["duration_s"] == 20_000 / 8
    # Gamma of shape 0.5 has the coefficient of variation sqrt(2).
    assert gaps.std() * 8 == pytest.approx(np.sqrt(2), rel=0.06)
    run([*words, "--seed", "3"], capsys)
    assert read_trace(out)["arrival_s"].to_numpy().tolist() == times.tolist()
    run([*words, "--seed", "4"], capsys)
    assert read_trace(out)["arrival_s"].to_numpy().tolist() != times.tolist()
    run(["convert", path, "--out", out, "--request-rate", "inf"], capsys)
    assert set(read_trace(out)["arrival_s"]) == {0.0}


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("rate", "burstiness"), [("0.3", "1"), ("7", "0.5"), ("100", "8")])
def test_the_last_arrival_is_at_n_over_the_rate_for_every_seed(
    seed: int, rate: str, burstiness: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = lengths_file(tmp_path / "t.csv", 40), tmp_path / "out.parquet"
    words: list[str | Path] = ["convert", path, "--out", out, "--burstiness", burstiness, "--seed", str(seed)]
    for head in (1, 3, 40):
        written = run([*words, "--request-rate", rate, "--head", str(head)], capsys)
        times = read_trace(out)["arrival_s"].to_numpy()
        assert len(times) == head
        assert (times[-1], written["duration_s"]) == pytest.approx((head / float(rate),) * 2, rel=1e-15)
        assert times[0] > 0.0
        assert (np.diff(times) >= 0).all()


def test_the_first_gap_is_drawn_like_the_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out = lengths_file(tmp_path / "t.csv", 2), tmp_path / "out.parquet"
    first = []
    for seed in range(300):
        run(["convert", path, "--out", out, "--request-rate", "2", "--seed", str(seed)], capsys)
        first.append(read_trace(out)["arrival_s"][0])
    # The first of two exponential gaps that sum to 1 is uniform on [0, 1]: no more than 1.95 / sqrt(n) off, one in a thousand.
    assert np.abs(np.sort(first) - (np.arange(300) + 0.5) / 300).max() < 1.95 / np.sqrt(300)


def test_an_infinite_shape_is_a_constant_gap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(table, "PART_BYTES", 32)
    path, out = lengths_file(tmp_path / "t.csv", 64), tmp_path / "out.parquet"
    run(["convert", path, "--out", out, "--request-rate", "4", "--burstiness", "inf"], capsys)
    assert read_trace(out)["arrival_s"].to_list() == [i / 4 for i in range(1, 65)]


def test_parts_change_no_arrival_and_no_other_column(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = lengths_file(tmp_path / "t.csv", 500)
    for name in ("whole", "parts"):
        words = ["convert", path, path, "--out", tmp_path / f"{name}.parquet", "--request-rate", "3", "--model", "m"]
        written = run(words, capsys)
        monkeypatch.setattr(table, "PART_BYTES", 64)
        monkeypatch.setattr(parquet, "PART_ROWS", 7)
    whole, parts = (read_trace(tmp_path / f"{name}.parquet") for name in ("whole", "parts"))
    assert whole.equals(parts)
    assert whole["prompt_tokens"].to_list() == [*range(1, 501)] * 2
    assert (written["duration_s"], whole["arrival_s"][-1]) == pytest.approx((1000 / 3, 1000 / 3), rel=1e-15)
    assert pl.read_parquet_metadata(tmp_path / "parts.parquet")["model"] == "m"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["parts.parquet", "t.csv", "whole.parquet"]


def test_without_a_rate_all_arrive_at_once_and_that_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out = lengths_file(tmp_path / "t.csv", 30), tmp_path / "out.parquet"
    written = run(["convert", path, "--out", out, "--model", "m", "--domain", "d", "--tenant", "t"], capsys)
    assert "no arrival times" in written["inputs"][0]["notes"][0]
    # What is written keeps the fact.
    assert pl.read_parquet_metadata(out)["arrivals"] == "none"
    with pytest.warns(TraceWarning, match="no arrival times"):
        frame = read_trace(out)
    assert set(frame["arrival_s"]) == {0.0}
    assert (set(frame["domain"]), set(frame["tenant"])) == ({"d"}, {"t"})
    assert pl.read_parquet_metadata(out)["model"] == "m"
    assert pl.read_parquet_metadata(out)["leap_trace_version"] == "1"


@pytest.mark.parametrize("head", [1, 29, 30, 31])
def test_head(head: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(table, "PART_BYTES", 32)
    path, out = lengths_file(tmp_path / "t.csv", 30), tmp_path / "out.parquet"
    written = run(["convert", path, "--out", out, "--head", str(head)], capsys)
    assert written["requests"] == min(head, 30)
    assert load(out).frame["prompt_tokens"].to_list() == list(range(1, min(head, 30) + 1))


def test_several_files_of_one_recording(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = csv_file(tmp_path / "1.csv", [5, 6, 9]), csv_file(tmp_path / "2.csv", [100, 101])
    run(["convert", first, second, "--out", tmp_path / "out.parquet"], capsys)
    frame = read_trace(tmp_path / "out.parquet")
    assert frame["arrival_s"].to_list() == [0, 1, 4, 6, 7]
    assert frame.columns == ["arrival_s", "prompt_tokens", "output_tokens"]


def test_a_fault_late_in_the_file_keeps_the_older_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(table, "PART_BYTES", 64)
    path, out = csv_file(tmp_path / "t.csv", [float(i) for i in range(500)]), tmp_path / "out.parquet"
    run(["convert", path, "--out", out], capsys)
    before = out.read_bytes()
    path.write_text(path.read_text() + "\n500.0,5,two")
    error = refuse(["convert", path, "--out", out], capsys)
    assert error.startswith(f"leap-trace: {path}: line 502: column 'num_decode_tokens': expected a whole number")
    assert error.count("\n") == 1
    assert out.read_bytes() == before
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["out.parquet", "t.csv"]


def test_ids_are_unique_over_all_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(table, "PART_BYTES", 64)
    monkeypatch.setattr(parquet, "IDS_A_PASS", 10)
    path, out = tmp_path / "t.csv", tmp_path / "out.parquet"
    rows = [f"{i},{i},10,1" for i in range(60)]
    header = "request_id,arrival_timestamp,prompt_size,token_size"
    path.write_text("\n".join([header, *rows]))
    assert run(["convert", path, "--out", out], capsys)["requests"] == 60
    out.unlink()
    path.write_text("\n".join([header, *rows, "17,60,10,1"]))
    error = refuse(["convert", path, "--out", out], capsys)
    assert "column 'request_id', row 60 (the first row is 0): '17' is already the id of row 17" in error
    assert not out.exists()


def test_a_trace_with_features_in_parts(
    traces: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(parquet, "PART_ROWS", 100)
    out = tmp_path / "out.parquet"
    run(["convert", traces / "gpt-4-0613-arenahard.parquet", "--out", out], capsys)
    assert read_trace(out).equals(read_trace(traces / "gpt-4-0613-arenahard.parquet"))
    ours, theirs = pl.read_parquet_metadata(out), pl.read_parquet_metadata(traces / "gpt-4-0613-arenahard.parquet")
    assert {key: ours[key] for key in ("model", "layer", "source")} == {
        key: theirs[key] for key in ("model", "layer", "source")
    }


@pytest.mark.parametrize(
    ("words", "code", "what"),
    [
        (["--request-rate", "3"], 1, "--request-rate: "),
        (["--burstiness", "0"], 1, "--burstiness: must be above 0"),
        (["--burstiness", "nan"], 1, "--burstiness: must be above 0, not nan"),
        (["--request-rate", "-1"], 1, "--request-rate: must be above 0"),
        (["--head", "0"], 2, "--head"),
        (["--run", "0"], 2, "--run"),
        (["--run", "2"], 1, "t.csv: run 2 cannot be chosen: a vidur file holds one recording"),
        (["--sort", "--join"], 1, "sort and join"),
        (["--unit", "hours"], 2, "--unit"),
        (["--out", "out.csv"], 2, "must end with .parquet"),
        (["--out", "missing/out.parquet"], 1, "no directory"),
    ],
)
def test_options_that_cannot_be_used(
    words: list[str | Path], code: int, what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = csv_file(tmp_path / "t.csv", [0, 1])
    assert what in refuse(["convert", path, "--out", tmp_path / "out.parquet", *words], capsys, code)
    assert [entry.name for entry in tmp_path.iterdir()] == ["t.csv"]


def merged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], *words: str | Path
) -> tuple[pl.DataFrame, dict[str, Any]]:
    written = run(["merge", *words, "--out", tmp_path / "m.parquet"], capsys)
    return read_trace(tmp_path / "m.parquet"), written


def test_merge_interleaves_from_own_starts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = csv_file(tmp_path / "one.csv", [100, 102, 105], prompt=1)
    two = csv_file(tmp_path / "two.csv", [7, 9, 9, 20], prompt=2)
    frame, written = merged(tmp_path, capsys, one, two)
    assert frame["arrival_s"].to_list() == [0, 0, 2, 2, 2, 5, 13]
    assert frame["prompt_tokens"].to_list() == [1, 2, 1, 2, 2, 1, 2]
    assert frame["tenant"].to_list() == [{1: "one", 2: "two"}[prompt] for prompt in frame["prompt_tokens"]]
    assert written["metadata"]["source"] == "one.csv; two.csv"

    frame, _ = merged(tmp_path, capsys, two, one, "--label", "a", "b")
    assert frame["tenant"].to_list() == ["a", "b", "a", "a", "b", "b", "a"]
    frame, _ = merged(tmp_path, capsys, one, two, "--join")
    assert frame["arrival_s"].to_list() == [0, 2, 5, 7.5, 9.5, 9.5, 20.5]


def leap_trace(path: Path, metadata: dict[str, object] | None = None, **columns: Any) -> Path:
    frame = pl.DataFrame(
        {
            "arrival_s": [0.0, 1.0],
            "prompt_tokens": pl.Series([64, 64], dtype=pl.UInt32),
            "output_tokens": pl.Series([1, 2], dtype=pl.UInt32),
            **columns,
        }
    )
    write_trace(frame, path, **(metadata or {}))
    return path


def test_merge_keeps_what_all_have_and_tells_the_rest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = leap_trace(
        tmp_path / "one.parquet",
        {"model": "m"},
        request_id=["a", "b"],
        tenant=["x", "y"],
        domain=["d", "d"],
        note=[1, 2],
    )
    two = leap_trace(tmp_path / "two.parquet", {"model": "n"}, request_id=["a", "c"], note=["u", "v"])
    frame, written = merged(tmp_path, capsys, one, two)
    assert frame["request_id"].to_list() == ["one/a", "two/a", "one/b", "two/c"]
    assert frame["tenant"].to_list() == ["x", "two", "y", "two"]
    assert set(frame.columns) == {"arrival_s", "prompt_tokens", "output_tokens", "request_id", "tenant"}
    assert written["notes"] == [
        "metadata that differ from file to file are left out: model",
        f"column domain is dropped: not in {two}",
        "column note is dropped: Int64, String",
    ]
    assert "already the id" in refuse(["merge", one, two, "--one-recording", "--out", tmp_path / "n.parquet"], capsys)


def test_merge_shares_no_prefix_between_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def blocks(*rows: list[int]) -> pl.Series:
        return pl.Series(list(rows), dtype=pl.List(pl.UInt64))

    one = leap_trace(tmp_path / "one.parquet", prefix_blocks=blocks([1, 2], [1, 3]), session=["s", None])
    two = leap_trace(tmp_path / "two.parquet", prefix_blocks=blocks([1, 2], []), session=["s", "t"])
    frame, _ = merged(tmp_path, capsys, one, two)
    found = frame["prefix_blocks"].to_list()
    assert found[0][0] == found[2][0]
    assert len({*found[0], *found[1], *found[2]}) == 5
    assert found[3] == []
    assert frame["session"].to_list() == ["one/s", "two/s", None, "two/t"]
    frame, _ = merged(tmp_path, capsys, one, two, "--one-recording")
    assert frame["prefix_blocks"].to_list() == [[1, 2], [1, 2], [1, 3], []]
    assert frame["session"].to_list() == ["s", "s", None, "t"]

    other = leap_trace(tmp_path / "other.parquet", {"block_size": 32}, prefix_blocks=blocks([1], [1]))
    frame, written = merged(tmp_path, capsys, one, other)
    assert "prefix_blocks" not in frame.columns
    assert "column prefix_blocks is dropped: blocks of 16, 32 tokens" in written["notes"]


def features(width: int) -> pl.Series:
    return pl.Series([[0.5] * width] * 2, dtype=pl.Array(pl.Float32, width))


@pytest.mark.parametrize(
    ("metadata", "width", "what"),
    [
        ({"model": "m", "layer": 3}, 5, r"Array\(Float32.*5.*but .*one\.parquet has Array\(Float32.*4"),
        ({"model": "n", "layer": 3}, 4, "from model n, but those of .*one.parquet are from model m"),
        ({"model": "m", "layer": 4}, 4, "from layer 4, but those of .*one.parquet are from layer 3"),
        ({}, 4, "from model unknown, but"),
    ],
)
def test_merge_refuses_features_of_something_else(
    metadata: dict[str, object], width: int, what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = leap_trace(tmp_path / "one.parquet", {"model": "m", "layer": 3}, features=features(4))
    two = leap_trace(tmp_path / "two.parquet", metadata, features=features(width))
    error = refuse(["merge", one, two, "--out", tmp_path / "m.parquet"], capsys)
    assert error.startswith(f"leap-trace: {two}: column 'features': ")
    assert re.search(what, error)
    assert not (tmp_path / "m.parquet").exists()


def test_merge_of_one_or_with_equal_labels(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = csv_file(tmp_path / "one.csv", [0, 1])
    out = tmp_path / "m.parquet"
    assert "at least two" in refuse(["merge", one, "--out", out], capsys)
    assert "labels must differ" in refuse(["merge", one, one, "--out", out], capsys)
    assert "--label: give one a trace" in refuse(["merge", one, one, "--out", out, "--label", "a"], capsys)
    frame, _ = merged(tmp_path, capsys, one, one, "--label", "a", "b")
    assert frame["arrival_s"].to_list() == [0, 0, 1, 1]


def test_merge_of_numbered_sessions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The leap format leaves the type of a column open that it does not know."""
    one = leap_trace(tmp_path / "one.parquet", session=pl.Series([7, 7], dtype=pl.Int64))
    two = leap_trace(tmp_path / "two.parquet", session=pl.Series([7, None], dtype=pl.Int64))
    frame, _ = merged(tmp_path, capsys, one, two)
    assert frame.sort("tenant")["session"].to_list() == ["one/7", "one/7", "two/7", None]


def test_labels_end_where_the_files_begin(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = csv_file(tmp_path / "one.csv", [0, 1]), csv_file(tmp_path / "two.csv", [0, 1])
    frame, _ = merged(tmp_path, capsys, "--label", "x", "y", one, two)
    assert set(frame["tenant"]) == {"x", "y"}


def test_merge_reads_one_of_several_results(cases: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = cases / "12-vllm_appended_nan.json"
    words = ["merge", path, path, "--label", "x", "y", "--out", tmp_path / "m.parquet"]
    assert "choose with --run N" in refuse(words, capsys)
    assert run([*words, "--run", "2"], capsys)["requests"] == 4
