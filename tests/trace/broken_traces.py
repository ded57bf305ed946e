"""Broken traces, each with the words that its error must hold: what the readers and both commands have to refuse."""

from __future__ import annotations

import numpy as np
import polars as pl

ROWS = 6
ARRAY = pl.Array(pl.Float32, 3)


def good() -> pl.DataFrame:
    """A trace with every column of the format."""
    return pl.DataFrame(
        {
            "request_id": [f"r{i}" for i in range(ROWS)],
            "arrival_s": [0.0, 0.5, 0.5, 1.0, 2.0, 3.5],
            "prompt_tokens": pl.Series([40, 50, 60, 70, 80, 90], dtype=pl.UInt32),
            "output_tokens": pl.Series([1, 20, 30, 40, 50, 60], dtype=pl.UInt32),
            "max_tokens": pl.Series([64] * ROWS, dtype=pl.UInt32),
            "finish_reason": ["stop", "length", "abort", "stop", "stop", "stop"],
            "domain": ["chat"] * ROWS,
            "tenant": ["a"] * ROWS,
            "temperature": pl.Series([1.0] * ROWS, dtype=pl.Float32),
            "top_p": pl.Series([0.9] * ROWS, dtype=pl.Float32),
            "prefix_tokens": pl.Series([0, 16, 32, 48, 64, 80], dtype=pl.UInt32),
            "features": pl.Series(np.arange(ROWS * 3).reshape(ROWS, 3), dtype=ARRAY),
            "score_other": pl.Series([1.0] * ROWS, dtype=pl.Float32),
        }
    )


def with_value(
    column: str, row: int, value: object, dtype: pl.DataType | type[pl.DataType] | None = None
) -> pl.DataFrame:
    """The good trace with one value replaced."""
    frame = good()
    values = frame[column].to_list()
    values[row] = value
    return frame.with_columns(pl.Series(column, values, dtype=dtype or frame.schema[column]))


def with_feature(row: int, element: int, value: float, dtype: pl.DataType | None = None) -> pl.DataFrame:
    """The good trace with one feature replaced."""
    frame = good()
    values = frame["features"].to_list()
    values[row][element] = value
    return frame.with_columns(pl.Series("features", values, dtype=dtype or ARRAY))


BROKEN: dict[str, tuple[pl.DataFrame, str | None, int | None, str]] = {
    "no arrival": (good().drop("arrival_s"), None, None, "looks like leap, but has no column arrival_s; it has "),
    "no prompt tokens": (
        good().drop("prompt_tokens"),
        None,
        None,
        "looks like leap, but has no column prompt_tokens; it has ",
    ),
    "no output tokens": (
        good().drop("output_tokens"),
        None,
        None,
        "looks like leap, but has no column output_tokens; it has ",
    ),
    "zero rows": (good().clear(), None, None, "no requests"),
    "times run backwards": (with_value("arrival_s", 3, 0.25), "arrival_s", 3, "backwards"),
    "negative time": (with_value("arrival_s", 0, -1.0), "arrival_s", 0, "negative"),
    "NaN time": (with_value("arrival_s", 2, float("nan")), "arrival_s", 2, "finite"),
    "infinite time": (with_value("arrival_s", 5, float("inf")), "arrival_s", 5, "finite"),
    "null time": (with_value("arrival_s", 4, None), "arrival_s", 4, "null"),
    "Unix times": (good().with_columns(pl.col("arrival_s") + 1.7e9), "arrival_s", 0, "Unix time"),
    "times as text": (good().cast({"arrival_s": pl.String}), "arrival_s", None, "Float64"),
    "times as dates": (
        good().with_columns((pl.col("arrival_s") * 1e6).cast(pl.Int64).cast(pl.Datetime("us")).alias("arrival_s")),
        "arrival_s",
        None,
        "Float64",
    ),
    "zero length": (with_value("output_tokens", 1, 0), "output_tokens", 1, "at least 1"),
    "negative length": (with_value("output_tokens", 1, -4, pl.Int64), "output_tokens", 1, "at least 1"),
    "null length": (with_value("output_tokens", 3, None), "output_tokens", 3, "null"),
    "huge length": (with_value("output_tokens", 4, 2**32, pl.UInt64), "output_tokens", 4, "at most 4294967295"),
    "length as a real": (good().cast({"output_tokens": pl.Float64}), "output_tokens", None, "UInt32"),
    "length as a truth value": (good().cast({"output_tokens": pl.Boolean}), "output_tokens", None, "UInt32"),
    "zero prompt": (with_value("prompt_tokens", 0, 0), "prompt_tokens", 0, "at least 1"),
    "huge prompt": (with_value("prompt_tokens", 5, 2**63 - 1, pl.Int64), "prompt_tokens", 5, "at most"),
    "longer than its own maximum": (
        with_value("output_tokens", 5, 65),
        "output_tokens",
        5,
        "more than max_tokens (64)",
    ),
    "zero maximum": (with_value("max_tokens", 2, 0), "max_tokens", 2, "at least 1"),
    "unknown finish reason": (with_value("finish_reason", 1, "eos"), "finish_reason", 1, "stop, length, abort"),
    "null finish reason": (with_value("finish_reason", 1, None), "finish_reason", 1, "null"),
    "request id twice": (with_value("request_id", 4, "r2"), "request_id", 4, "already the id of row 2"),
    "request id as a number": (
        good().with_columns(pl.int_range(ROWS).alias("request_id")),
        "request_id",
        None,
        "String",
    ),
    "negative temperature": (with_value("temperature", 3, -0.1), "temperature", 3, "negative"),
    "top_p above 1": (with_value("top_p", 3, 1.5), "top_p", 3, "at most 1"),
    "more prefix than prompt": (with_value("prefix_tokens", 0, 41), "prefix_tokens", 0, "more than prompt_tokens (40)"),
    "NaN feature": (with_feature(2, 1, float("nan")), "features", 2, "feature 1 is nan"),
    "infinite feature": (with_feature(5, 0, float("-inf")), "features", 5, "feature 0 is -inf"),
    "infinite half feature": (
        with_feature(1, 2, float("inf"), pl.Array(pl.Float16, 3)),
        "features",
        1,
        "feature 2 is inf",
    ),
    "null feature row": (with_value("features", 3, None), "features", 3, "null"),
    "null feature": (with_value("features", 3, [1.0, 2.0, None]), "features", 3, "feature 2 has no value"),
    "features of any length": (good().cast({"features": pl.List(pl.Float32)}), "features", None, "Array(Float32, d)"),
    "features in 64 bits": (good().cast({"features": pl.Array(pl.Float64, 3)}), "features", None, "Array(Float32, d)"),
    "NaN score": (with_value("score_other", 2, float("nan")), "score_other", 2, "finite"),
    "score beyond 32 bits": (with_value("score_other", 2, 1e39, pl.Float64), "score_other", 2, "finite"),
    "both kinds of prefix": (
        good().with_columns(pl.Series("prefix_blocks", [[]] * ROWS, dtype=pl.List(pl.UInt64))),
        "prefix_blocks",
        None,
        "not both",
    ),
    "more blocks than prompt": (
        good().drop("prefix_tokens").with_columns(pl.Series("prefix_blocks", [[]] * 2 + [[1, 2, 3, 4]] + [[]] * 3)),
        "prefix_blocks",
        2,
        "64 tokens in blocks of 16, more than prompt_tokens (60)",
    ),
    "negative block hash": (
        good().drop("prefix_tokens").with_columns(pl.Series("prefix_blocks", [[1], [-1]] + [[]] * 4)),
        "prefix_blocks",
        1,
        "2**64",
    ),
}

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
FIRST = "2023-11-16 18:15:46.6805900,374,44\n"
VIDUR = "arrived_at,num_prefill_tokens,num_decode_tokens\n"
BURST = "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
SPLITWISE = "request_id,arrival_timestamp,prompt_size,token_size\n"

BROKEN_CSV: dict[str, tuple[str, str]] = {
    "only a header": (AZURE, "no requests"),
    "only failed rows": (AZURE + "2023-11-16 18:15:46.6805900,374,0\n", "no requests"),
    "a column is missing": (
        "Timestamp,Request tokens,Model\n3,4,x\n",
        "looks like BurstGPT, but has no column Response tokens",
    ),
    "a column twice": (VIDUR.replace("\n", ",arrived_at\n") + "0.0,1,1,0.5\n", "line 1: column 'arrived_at' stands"),
    "a field too many": (AZURE + FIRST + "2023-11-16 18:15:47.0000000,374,44,1\n", "line 3: 4 fields"),
    "a field is missing": (AZURE + FIRST + "\n2023-11-16 18:15:47.0000000,374\n", "line 4: 2 fields"),
    "two numbers in a field": (VIDUR + "0.0,10,5\n1.0,10,2748 610\n", "line 3: column 'num_decode_tokens'"),
    "a real number of tokens": (VIDUR + "0.0,10.5,5\n", "line 2: column 'num_prefill_tokens'"),
    "a negative number of tokens": (VIDUR + "0.0,10,-5\n", "line 2: column 'num_decode_tokens'"),
    "tokens beyond 32 bits": (VIDUR + "0.0,10,5\n0.1,4294967296,5\n", "line 3: column 'num_prefill_tokens'"),
    "tokens beyond 64 bits": (VIDUR + f"0.0,10,{10**30}\n", "line 2: column 'num_decode_tokens'"),
    "empty fields alone": (VIDUR + "0.0,10,\n", "no requests (1 row left out: no number of output tokens"),
    "NaN time": (VIDUR + "nan,10,5\n", "line 2: column 'arrived_at'"),
    "infinite time": (VIDUR + "0.0,10,5\ninf,10,5\n", "line 3: column 'arrived_at'"),
    "a time that is no time": (AZURE + FIRST + "2023-11-16 18:75:47.0000000,1,1\n", "line 3: column 'TIMESTAMP'"),
    "a date alone": (AZURE + "2023-11-16,374,44\n", "line 2: column 'TIMESTAMP'"),
    "times run backwards": (AZURE + FIRST + "2023-11-16 18:15:46.6805899,1,1\n", "line 3: column 'TIMESTAMP'"),
    "a date of no calendar": (
        AZURE + "2024-05-10 00:00:00.009930+00:00,1,1\n2024-02-30 00:00:01.5,1,1\n",
        "line 3: column 'TIMESTAMP': expected a date and time as ISO 8601 has them, such as 2023-11-16 18:15:46.6805900",
    ),
    "Azure 2024 runs backwards": (
        AZURE + "2024-05-10 00:00:00+00:00,1,1\n2024-05-10 00:00:00+01:00,1,1\n",
        "line 3: column 'TIMESTAMP': times run backwards",
    ),
    "BurstGPT without its answers' lengths": (
        BURST + "5,a,1,GPT-4,10,,10,API log\n",
        "no requests (1 row left out: no number of output tokens, so a failed request (first: line 2))",
    ),
    "BurstGPT with text for a length": (
        BURST + "5,a,1,GPT-4,10,1,11,API log\n6,a,1,GPT-4,ten,1,11,API log\n",
        "line 3: column 'Request tokens': expected a whole number of tokens up to 4294967295, found 'ten'",
    ),
    "BurstGPT without a time": (BURST + "-,a,1,GPT-4,10,1,11,API log\n", "line 2: column 'Timestamp'"),
    "BurstGPT runs backwards": (
        BURST + "5,a,1,GPT-4,10,1,11,API log\n4,a,1,GPT-4,10,1,11,API log\n",
        "line 3: column 'Timestamp': times run backwards",
    ),
    "BurstGPT with failed rows alone": (BURST + "5,a,1,GPT-4,10,0,10,API log\n", "no requests"),
    "an id twice": (
        SPLITWISE + "7,1,10,10\n8,2,10,10\n\n7,3,10,10\n",
        "line 5: column 'request_id': '7' is already the id of line 2",
    ),
    "quotes that do not match": (VIDUR + '0.0,"10,5\n', "line 2: the quotes do not match"),
    "a time beyond all units": (VIDUR + "1700000000000,1,1\n", "--unit says what the times are in"),
    "lengths alone with text": ("num_prefill_tokens,num_decode_tokens\n1,2\nx,3\n", "line 3: column 'num_prefill"),
    "times run backwards in seconds": (VIDUR + "1.0,1,1\n2.0,1,1\n1.5,1,1\n", "line 4: column 'arrived_at'"),
}

FOREIGN: list[tuple[str, bytes, str]] = [
    ("trace.parquet", b"arrival_s\n", "not a trace format that is read: it is neither CSV nor JSON nor Parquet"),
    (
        "records.json",
        b'[{"error": null, "seconds": 0.5}]',
        "it is a JSON list with error, seconds; formats of that kind are ",
    ),
    ("trace.csv", b"when,who\n5,GPT-4\n", "it is CSV with when, who; formats of that kind are Azure, BurstGPT, "),
    ("blob.bin", bytes(range(256)) * 8, "it is neither CSV nor JSON nor Parquet"),
    (
        "burst.csv",
        b"Timestamp,Model,Request tokens,Response length\n5,GPT-4,1,1\n",
        "looks like BurstGPT, but has no column Response tokens; it has Timestamp, Model, Request tokens, Response length",
    ),
    (
        "mooncake.json",
        b'{"timestamp": 1, "input_length": 2}',
        "looks like Mooncake, but has no key output_length; it has",
    ),
    (
        "mooncake-list.json",
        b'[{"timestamp": 1, "input_length": 2, "output_length": 3, "hash_ids": []}]',
        "looks like Mooncake, but is a JSON list, and Mooncake is read from JSON lines",
    ),
]
"""Files of formats that are not read, each with what is said of it."""
