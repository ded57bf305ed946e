"""Small files in the exact shape of public ones, each with a fault that has cost somebody a wrong result."""

from __future__ import annotations

import json
from pathlib import Path

import polars as pl
import pytest

from leap_rs._leap import TraceError
from leap_rs.replay.command import main as replay_main
from leap_rs.trace import ReadOptions, load
from leap_rs.trace.command import main

CASES = Path(__file__).parent.parent / "cases"


def run(words: list[str | Path]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([str(word) for word in words])
    assert caught.value.code == 0


def test_burstgpt_with_failures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out = CASES / "01-burstgpt_with_fails.csv", tmp_path / "out.parquet"
    trace = load(path)
    assert trace.format == "burstgpt"
    assert trace.frame["output_tokens"].to_list() == [35, 214, 301, 512]
    assert trace.frame["arrival_s"].to_list() == [0.0, 45.0, 183.0, 183.0]
    assert trace.frame["prompt_tokens"].to_list() == [412, 88, 655, 1730]
    assert trace.frame["model"].to_list() == ["ChatGPT", "ChatGPT", "GPT-4", "ChatGPT"]
    assert [(out.count, out.first) for out in trace.left_out] == [(2, "line 3")]

    run(["convert", path, "--out", out])
    assert "2 rows left out: no output tokens, so a failed request (first: line 3)" in capsys.readouterr().out
    assert pl.read_parquet(out).equals(trace.frame)
    run(["describe", path])
    assert "2 rows left out: no output tokens" in capsys.readouterr().out


def test_azure_with_crlf_and_no_last_newline(tmp_path: Path) -> None:
    path, out = CASES / "08-azure2023_submillisecond_crlf.csv", tmp_path / "out.parquet"
    content = path.read_bytes()
    assert content.count(b"\r\n") == 5
    assert not content.endswith(b"\n")
    run(["convert", path, "--out", out])
    frame = load(out).frame
    assert frame["arrival_s"].to_list() == pytest.approx([0, 0.00015, 0.0009, 0.0094001, 0.0859], abs=1e-9)
    assert frame["output_tokens"].to_list() == [44, 109, 55, 16, 7]
    assert frame.schema["output_tokens"] == pl.UInt32
    assert frame.equals(load(path).frame)


def test_a_quiet_head_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(["describe", "--json", CASES / "16-no_queue.csv"])
    quiet = json.loads(capsys.readouterr().out)
    assert quiet["requests"] == 20
    assert quiet["request_rate"] == pytest.approx(20 / 570)
    assert quiet["arrivals"]["gap_cv"] == pytest.approx(0.0, abs=1e-12)
    assert quiet["head"] is None

    # The same and 92 times as fast afterwards, as in BurstGPT.
    path = tmp_path / "long.csv"
    times = [30.0 * i for i in range(20)] + [570 + 30 / 92 * i for i in range(1, 2000)]
    rows = [f"{at:.9f},{100},{50 if i < 20 else 60}" for i, at in enumerate(times)]
    path.write_text("\n".join(["arrived_at,num_prefill_tokens,num_decode_tokens", *rows]))
    run(["describe", "--json", path, "--num-prompts", "20"])
    head = json.loads(capsys.readouterr().out)["head"]
    assert head["requests"] == 20
    assert head["request_rate"] == pytest.approx(20 / 570)
    assert head["mean_output_tokens"] == 50.0
    assert head["differs_in"] == ["request_rate"]
    run(["describe", path, "--num-prompts", "20"])
    whole = 2019 / times[-1]
    assert f"0.0351 requests/s against {whole:.3g}" in capsys.readouterr().out


def test_dates_of_azure_with_a_z_and_a_column_more() -> None:
    trace = load(CASES / "38-azure_lmm_2025_iso_z.csv")
    assert trace.format == "azure"
    assert trace.frame["arrival_s"].to_list() == pytest.approx([0, 0.25, 0.9, 6.775], abs=1e-9)
    assert trace.frame["NumImages"].to_list() == [0, 2, 1, 0]
    assert trace.told() == []


def test_columns_without_their_times(capsys: pytest.CaptureFixture[str]) -> None:
    path = CASES / "39-azure_columns_without_times.csv"
    trace = load(path)
    assert trace.frame.select("prompt_tokens", "output_tokens").rows() == [(374, 44), (396, 109)]
    assert trace.told() == [f"{path}: no arrival times (no column 'TIMESTAMP'): all requests arrive at 0"]
    with pytest.raises(SystemExit) as caught:
        replay_main([str(path)])
    assert caught.value.code == 1
    told = f"leap-replay: {path}: no arrival times (no column 'TIMESTAMP'): --request-rate (request_rate=) draws them\n"
    assert capsys.readouterr().err == told
    with pytest.raises(SystemExit) as caught:
        replay_main([str(path), "--request-rate", "1", "--seeds", "1"])
    assert caught.value.code == 0
    shown = capsys.readouterr()
    assert "no arrival times" not in shown.out + shown.err


def test_mooncake_rows_of_other_tools(capsys: pytest.CaptureFixture[str]) -> None:
    path = CASES / "40-dynamo_mooncake_rows.jsonl"
    with pytest.raises(
        TraceError, match=r"line 1: key 'hash_ids': 130 tokens need 1 block of 512, 3 given.*--prefix-block-size"
    ):
        load(path)
    trace = load(path, ReadOptions(prefix_block_size=64))
    assert trace.frame["arrival_s"].to_list() == pytest.approx([0, 1.2505, 1.3], abs=1e-9)
    assert trace.frame.select("prompt_tokens", "output_tokens").rows() == [(130, 20), (200, 31), (64, 7)]
    assert trace.frame["session"].to_list() == ["ana", "ana", "ben"]
    assert trace.frame["request_id"].to_list() == ["q-1", "q-2", "q-3"]
    first, second, _ = trace.frame["prefix_blocks"].to_list()
    assert trace.metadata["block_size"] == "64"
    # 128 tokens are shared.
    assert first[:2] == second[:2]
    run(["describe", path, "--prefix-block-size", "64"])
    assert "shared prefixes" in capsys.readouterr().out
    nothing = load(CASES / "40-dynamo_null_hashes.jsonl")
    assert nothing.frame["arrival_s"].to_list() == pytest.approx([0, 1.2505, 1.3], abs=1e-9)
    assert nothing.frame["prefix_blocks"].to_list() == [[], [], []]


def test_a_data_set_of_spark() -> None:
    trace = load(CASES / "42-spark")
    assert trace.frame["arrival_s"].to_list() == [0.0, 0.5, 1.25, 2.0, 2.5, 7.75]
    assert trace.frame["domain"].to_list() == ["chat", "code", "chat", "chat", "code", "code"]


def test_half_a_surrogate_pair(tmp_path: Path) -> None:
    path, out = CASES / "47-ragpulse_lone_surrogate.jsonl", tmp_path / "out.parquet"
    assert load(path).frame["session"].to_list() == ["u\ufffd"]
    run(["convert", path, "--out", out])
    assert pl.read_parquet(out)["session"].to_list() == ["u\ufffd"]


def test_a_list_of_results() -> None:
    path = CASES / "50-vllm_sweep_summary.json"
    with pytest.raises(TraceError, match="two results; choose with --run N or --join"):
        load(path)
    trace = load(path, ReadOptions(run=1))
    assert trace.frame.select("prompt_tokens", "output_tokens").rows() == [(10, 3), (20, 2), (30, 4)]
    assert trace.frame["arrival_s"].to_list() == pytest.approx([0, 0.2, 0.9], abs=1e-9)
    both = load(path, ReadOptions(join=True))
    assert both.frame.height == 3 + load(path, ReadOptions(run=2)).frame.height


def test_line_ends_in_quotes(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text('arrived_at,num_prefill_tokens,num_decode_tokens,text\n0.0,10,5,"a\nb, ""c"""\n\n1.5,20,x,"x"\n')
    with pytest.raises(TraceError, match="line 5: column 'num_decode_tokens': expected a whole number"):
        load(path)
    path.write_text(path.read_text().replace("20,x", "20,7"))
    assert load(path).frame.rows() == [(0.0, 10, 5, 'a\nb, "c"'), (1.5, 20, 7, "x")]


@pytest.mark.parametrize("blank", ["", "null", "NaN", "-"])
def test_a_row_without_token_counts_is_a_failed_one(blank: str, tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    lines = ["0.0,10,5", f"0.5,{blank},7", f"0.75,8,{blank}", f"1.0,9,{blank}", "1.5,20,7"]
    path.write_text("\n".join(["arrived_at,num_prefill_tokens,num_decode_tokens", *lines]))
    trace = load(path)
    assert trace.frame.rows() == [(0.0, 10, 5), (1.5, 20, 7)]
    assert [str(out) for out in trace.left_out] == [
        "2 rows left out: no number of output tokens, so a failed request (first: line 4)",
        "1 row left out: no number of prompt tokens, so a failed request (first: line 3)",
    ]
    with pytest.raises(TraceError, match=r"line 4: column 'num_decode_tokens': no number of output tokens.*strict"):
        load(path, ReadOptions(strict=True))


def test_a_foreign_table_saved_as_parquet_is_read_as_what_it_is(tmp_path: Path) -> None:
    path = tmp_path / "azure.parquet"
    times = pl.Series(["2024-05-10T00:00:00Z", "2024-05-10T00:00:01.5Z"]).str.to_datetime(
        time_unit="us", time_zone="UTC"
    )
    frame = pl.DataFrame({"TIMESTAMP": times, "ContextTokens": [3, 4], "GeneratedTokens": [5, 6], "NumImages": [0, 1]})
    frame.write_parquet(path)
    trace = load(path)
    assert trace.format == "azure"
    assert trace.frame.rows() == [(0.0, 3, 5, 0), (1.5, 4, 6, 1)]
    frame.drop("GeneratedTokens").write_parquet(path)
    with pytest.raises(
        TraceError, match="looks like Azure, but has no column GeneratedTokens; it has TIMESTAMP, Context"
    ):
        load(path)
    frame.with_columns(GeneratedTokens=pl.Series([5, -1])).write_parquet(path)
    with pytest.raises(
        TraceError, match=r"row 1 \(the first row is 0\): column 'GeneratedTokens': expected a whole num"
    ):
        load(path)


def test_folders_called_name_and_value_are_columns(tmp_path: Path) -> None:
    def part(*times: float) -> pl.DataFrame:
        return pl.DataFrame({"arrival_s": times, "prompt_tokens": [1] * len(times), "output_tokens": [2] * len(times)})

    for folder, times in (("tenant=a%2Fb/day=1", [0.0, 2.0]), ("tenant=c/day=2", [1.0]), ("tenant=c/day=3", [])):
        directory = tmp_path / "set" / folder
        directory.mkdir(parents=True)
        part(*times).cast({"prompt_tokens": pl.UInt32, "arrival_s": pl.Float64}).write_parquet(directory / "0.parquet")
    (tmp_path / "set" / "_metadata").write_bytes(b"PAR1")
    (tmp_path / "set" / ".crc.parquet").write_bytes(b"x")
    frame = load(tmp_path / "set").frame
    assert frame["arrival_s"].to_list() == [0.0, 1.0, 2.0]
    assert frame["tenant"].to_list() == ["a/b", "c", "a/b"]
    assert frame["day"].to_list() == ["1", "2", "1"]
    (tmp_path / "set" / "other.parquet").write_bytes(b"a,b\n")
    with pytest.raises(
        TraceError, match=r"other\.parquet: not a trace format.*a directory holds parts in leap's format"
    ):
        load(tmp_path / "set")


def test_what_exceeds_the_models_length_is_left_out_and_counted(capsys: pytest.CaptureFixture[str]) -> None:
    path = CASES / "08-azure2023_submillisecond_crlf.csv"
    with pytest.raises(SystemExit) as caught:
        replay_main([str(path), "--max-model-len", "500", "--seeds", "1", "--json"])
    assert caught.value.code == 0
    told = json.loads(capsys.readouterr().out)
    frame = load(path).frame
    longer = [row for row, (p, o) in enumerate(frame.select("prompt_tokens", "output_tokens").rows()) if p + o > 500]
    assert [out["row"] for out in told["trace"]["left_out"]] == longer
    assert "tokens with its answer, max_model_len is 500" in told["trace"]["left_out"][0]["reason"]
    assert told["config"]["max_model_len"] == 500
