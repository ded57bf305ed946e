"""Make the committed traces from measured and published data: numbers only, never a prompt's text.

    python scripts/make_traces.py DATA_DIR REAL_DIR OUT_DIR [--all-columns DIR]

REAL_DIR holds `lengths.parquet` and `sharegpt.parquet`: lengths of published answers, and the features of their prompts.
DATA_DIR holds `smollm2.parquet` (hidden states and sampled lengths of SmolLM2-135M-Instruct), `traces/azure2023` and
`traces/llmservingsim`. The same data give the same bytes.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import polars as pl
import typer
from rich.console import Console

from leap_rs._leap import PromptFeatures
from leap_rs.calibrate.workload import block_hashes
from leap_rs.trace import load, write_trace

Floats = npt.NDArray[np.float64]

SEED = 0
READER = "SmolLM2-135M-Instruct"
"""The model whose states and embeddings the features are."""
LAYER = 20
ENCODER = {"encoder": "all-MiniLM-L6-v2", "encoder_layer": 4}
FEATURES = ("h10", "h15", "h20", "h25", "h28", "h30", "mean10", "mean30", "egtp", "emb_mean")
PROMPT_DIM = 256
BLOCK_SIZE = 16
# FLASK holds 198 prompts of AlpacaEval that are spelled otherwise ("Input:" before an input, a page's number in front) and
# not marked. All of them are nearer than this to one of AlpacaEval, and no other prompt is.
TWIN_COSINE = 0.89
ARRIVALS = "gaps of the Azure 2023 conversation trace"


@dataclass(frozen=True)
class Answers:
    """Lengths that one model's published answers to one set of prompts have."""

    model: str
    column: str
    group: str
    published: str


# Requests a second: where one H100 with an 8B model is lightly to fully loaded.
RATE = 20.0
ANSWERS = {
    "llama-3-8b-alpacaeval": Answers(
        "Llama-3-8B-Instruct", "len_llama_3_8b", "alpacaeval", "AlpacaEval 2 (tatsu-lab/alpaca_eval)"
    ),
    "llama-2-70b-flask": Answers("Llama-2-70B-chat", "len_llama_2_70b", "flask", "FLASK (kaistAI/FLASK)"),
    "vicuna-33b-flask": Answers("Vicuna-33B", "len_vicuna_33b", "flask", "FLASK (kaistAI/FLASK)"),
    "gpt-4-0613-arenahard": Answers(
        "GPT-4-0613", "len_gpt4_0613", "arenahard", "Arena-Hard v0.1 (lmarena/arena-hard-auto)"
    ),
}
JUDGED = "alpacaeval"
"""The set that readouts fitted on another one are judged on."""
ANSWERS_SAMPLING = "the leaderboard's own, mostly temperature 0.7 and budgets of 1,024 to 2,048 tokens"
CHATS_SAMPLING = "ChatGPT's own of early 2023, several versions of the model"

SMOLLM2_RATES = {"sharegpt": 20.0, "multilingual": 10.0}
SMOLLM2_SAMPLING = "temperature 1.0, top_k 50, max_tokens 1024"
SMOLLM2_MAX_TOKENS = 1024

RUNS = {
    "rtx4090-llama-8b": ("vllm_RTX4090_Llama-3.1-8B", "sharegpt-llama-3.1-8b-300-sps10.jsonl", "RTX 4090"),
    "rtxpro6000-llama-8b": ("vllm_RTXPRO6000_Llama-3.1-8B", "sharegpt-llama-3.1-8b-300-sps10.jsonl", "RTX PRO 6000"),
}
FASTEST_FRONT_END_S = 0.0015  # what the quickest request is taken to spend between arrival and the engine's queue

console = Console()


def main(
    data_dir: Annotated[Path, typer.Argument(exists=True, file_okay=False)],
    real_dir: Annotated[Path, typer.Argument(exists=True, file_okay=False)],
    out_dir: Annotated[Path, typer.Argument()],
    all_columns: Annotated[Path | None, typer.Option(help="Also write traces with all feature columns here.")] = None,
) -> None:
    """Make the committed traces of OUT_DIR from DATA_DIR and REAL_DIR."""
    arrivals = load(data_dir / "traces/azure2023/AzureLLMInferenceTrace_conv.csv").frame["arrival_s"].to_numpy()

    def write(name: str, frame: pl.DataFrame, **metadata: object) -> None:
        kept = frame.drop(FEATURES, strict=False)
        for directory, columns in {out_dir: kept, **({all_columns: frame} if all_columns else {})}.items():
            directory.mkdir(parents=True, exist_ok=True)
            path = directory / f"{name}.parquet"
            write_trace(columns, path, layer=LAYER, **metadata)
            tell(path)

    lengths = pl.read_parquet(real_dir / "lengths.parquet")
    for name, of in ANSWERS.items():
        write(
            name,
            answers_trace(lengths, of, arrivals),
            model=of.model,
            features_model=READER,
            **ENCODER,
            sampling=ANSWERS_SAMPLING,
            source=f"answers published with {of.published}; {ARRIVALS}, {RATE:g}/s",
        )
    write(
        "sharegpt",
        chats_trace(pl.read_parquet(real_dir / "sharegpt.parquet"), real_dir / "sharegpt.parquet", arrivals),
        model="ChatGPT",
        features_model=READER,
        **ENCODER,
        block_size=BLOCK_SIZE,
        sampling=CHATS_SAMPLING,
        source=f"ShareGPT92k, as Marugannwg/ShareGPT92k_user_linguistic_mining samples it; {ARRIVALS}, {RATE:g}/s",
    )
    rows = pl.read_parquet(data_dir / "smollm2.parquet")
    for group, rate in SMOLLM2_RATES.items():
        write(
            f"smollm2-{group}",
            smollm2_trace(rows.filter(pl.col("group") == group), rate, arrivals),
            model=READER,
            sampling=SMOLLM2_SAMPLING,
            source=f"{group} prompts, lengths sampled with vLLM; {ARRIVALS}, {rate:g}/s",
        )
    for name, (run, workload, card) in RUNS.items():
        path = out_dir / f"{name}.parquet"
        base = data_dir / "traces/llmservingsim"
        write_trace(
            measured_run(base / run / "requests.jsonl", base / workload),
            path,
            model="Llama-3.1-8B",
            block_size=BLOCK_SIZE,
            sampling="lengths forced",
            source=f"vLLM 0.19 on one {card}, published with LLMServingSim; measured_* on the clock of arrival_s",
        )
        tell(path)


def answers_trace(lengths: pl.DataFrame, of: Answers, arrivals: Floats) -> pl.DataFrame:
    """The prompts of one set that a model has answered; of another set than AlpacaEval none that it holds too."""
    rows = lengths.filter((pl.col("set") == of.group) & ~pl.col("duplicate") & (pl.col(of.column) > 0))
    if of.group != JUDGED:
        rows = rows.filter(~twins(rows["encoder"], lengths.filter(pl.col("set") == JUDGED)["encoder"]))
    rows = rows[dealt(np.arange(rows.height))]
    ids = pl.Series([f"{of.group}-{row}" for row in rows["row"]])
    return trace(rows, ids, of.column, of.group, RATE, arrivals).with_columns(rows["encoder"].alias("text_features"))


def twins(encoded: pl.Series, others: pl.Series) -> npt.NDArray[np.bool_]:
    """Which texts say the same as one of the others: their features, less the others' mean, point the same way."""
    of_others = others.to_numpy().astype(np.float64)
    mean = of_others.mean(axis=0)

    def directions(rows: Floats) -> Floats:
        return (rows - mean) / np.linalg.norm(rows - mean, axis=1, keepdims=True)

    cosines = directions(encoded.to_numpy().astype(np.float64)) @ directions(of_others).T
    return cosines.max(axis=1) > TWIN_COSINE


def chats_trace(rows: pl.DataFrame, path: Path, arrivals: Floats) -> pl.DataFrame:
    """Conversations, each with its turns in order; a turn's prompt is all that was said before it."""
    rows = rows.sort("conversation", "turn")
    require_histories(rows, path)
    rows = rows[dealt(rows["conversation"].to_numpy())]
    ids = pl.Series([f"sharegpt-{chat}-{turn}" for chat, turn in rows.select("conversation", "turn").iter_rows()])
    # Each history begins with the one before, so a block's place in its conversation says what it holds.
    chats = rows.select("conversation", "prompt_tokens").iter_rows()
    blocks = [[chat << 32 | index for index in range(tokens // BLOCK_SIZE)] for chat, tokens in chats]
    return trace(rows, ids, "output_tokens", "sharegpt", RATE, arrivals).with_columns(
        rows["encoder"].alias("text_features"),
        pl.Series("session", [str(chat) for chat in rows["conversation"]]),
        pl.Series("prefix_blocks", blocks, dtype=pl.List(pl.UInt64)),
    )


def require_histories(rows: pl.DataFrame, path: Path) -> None:
    """End where a turn's prompt is shorter than the prompt and the answer before it: it could not hold them."""
    before = (pl.col("prompt_tokens") + pl.col("output_tokens")).shift(1).over("conversation")
    wrong = rows.filter(pl.col("prompt_tokens") < before)
    if wrong.height:
        chat, turn = wrong.select("conversation", "turn").row(0)
        raise SystemExit(f"{path}: conversation {chat}, turn {turn}: the prompt is shorter than the turn before it")


def smollm2_trace(rows: pl.DataFrame, rate: float, arrivals: Floats) -> pl.DataFrame:
    """The prompts of one group with the lengths that the model whose features they have sampled for them."""
    rows = rows[dealt(np.arange(rows.height))]
    return trace(rows, rows["prompt_id"], "output_tokens", rows["group"][0], rate, arrivals).with_columns(
        rows["finish_reason"], pl.lit(SMOLLM2_MAX_TOKENS, pl.UInt32).alias("max_tokens")
    )


def dealt(sessions: npt.NDArray[Any]) -> npt.NDArray[np.intp]:
    """Which row comes at each arrival: a seeded random order in which the rows of a session keep theirs.

    sessions: that of each row, in ascending order.
    """
    slots = np.random.default_rng(SEED).permutation(sessions)
    order = np.empty(len(sessions), dtype=np.intp)
    order[np.argsort(slots, kind="stable")] = np.arange(len(sessions))
    return order


def trace(rows: pl.DataFrame, ids: pl.Series, length: str, domain: str, rate: float, arrivals: Floats) -> pl.DataFrame:
    """What all traces have in common, with every column of states that the rows have."""
    prompt = prompt_features(rows["emb_mean"].to_numpy(), rows["prompt_tokens"].to_numpy())
    return pl.DataFrame(
        [
            ids.alias("request_id"),
            pl.Series("arrival_s", rescaled(arrivals[: rows.height], rate)),
            rows["prompt_tokens"].cast(pl.UInt32),
            rows[length].cast(pl.UInt32).alias("output_tokens"),
            pl.Series("finish_reason", ["stop"] * rows.height),
            pl.Series("domain", [domain] * rows.height),
            rows[f"h{LAYER}"].alias("features"),
            pl.Series("prompt_features", prompt.astype(np.float16)),
            *(rows[name] for name in FEATURES if name in rows.columns and not rows[name].has_nulls()),
        ]
    )


def rescaled(arrivals: Floats, rate: float) -> Floats:
    """Arrivals from 0 on with the same gaps in proportion and a mean gap of 1 / rate; whole microseconds."""
    since = arrivals - arrivals[0]
    return np.round(since * ((len(since) - 1) / rate / since[-1]), 6)


def prompt_features(emb_mean: npt.NDArray[np.float16], tokens: npt.NDArray[np.uint32]) -> npt.NDArray[np.float32]:
    """The project's own prompt features of each row: the projected mean embedding and three terms of the length."""
    # The projection depends on the width and the seed alone, so an embedding of one row stands for the real one.
    prompts = PromptFeatures(np.zeros((1, emb_mean.shape[1]), dtype=np.float32), dim=PROMPT_DIM, seed=SEED)
    return np.stack([prompts.project(mean, int(n)) for mean, n in zip(emb_mean, tokens, strict=True)])


def measured_run(requests: Path, workload: Path) -> pl.DataFrame:
    """A real vLLM run: planned arrivals, forced lengths, shared prefixes, and what was measured, all on one clock.

    The log mixes Unix time (`arrival_time`) and the engine's monotonic clock (`*_ts`). Both are put on the plan's
    clock: its zero is the latest at which no request was sent before its plan, and the engine's zero follows from
    the request that reached its queue fastest.
    """
    plan = {f"bench-{index}": row for index, row in enumerate(json_lines(workload))}
    log = json_lines(requests)
    zero = min(row["arrival_time"] - plan[row["request_id"]]["arrival_time_ns"] / 1e9 for row in log)
    offset = min(row["queued_ts"] - row["arrival_time"] for row in log) - FASTEST_FRONT_END_S

    def measured(key: str) -> list[float]:
        return [round(row[key] - offset - zero, 6) for row in log]

    planned = [plan[row["request_id"]] for row in log]
    for row, was in zip(log, planned, strict=True):
        if (row["input_toks"], row["output_toks"]) != (len(was["input_tok_ids"]), was["output_toks"]):
            raise SystemExit(f"{requests}: {row['request_id']} is not the request of {workload}")
    frame = pl.DataFrame(
        {
            "request_id": [row["request_id"] for row in log],
            "arrival_s": [was["arrival_time_ns"] / 1e9 for was in planned],
            "prompt_tokens": [row["input_toks"] for row in log],
            "output_tokens": [row["output_toks"] for row in log],
            "finish_reason": ["length"] * len(log),
            "prefix_blocks": [block_hashes(was["input_tok_ids"], BLOCK_SIZE) for was in planned],
            "measured_queued_s": measured("queued_ts"),
            "measured_first_token_s": measured("first_token_ts"),
            "measured_last_token_s": measured("last_token_ts"),
        },
        schema_overrides={"prefix_blocks": pl.List(pl.UInt64)},
    )
    return frame.sort("arrival_s", maintain_order=True)


def json_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSON lines file."""
    return [json.loads(line) for line in path.read_text().splitlines() if line]


def tell(path: Path) -> None:
    """Print what was written."""
    frame = load(path).frame
    console.print(f"{path}: {frame.height} rows, {path.stat().st_size / 1e6:.2f} MB, {frame['arrival_s'][-1]:.1f} s")


if __name__ == "__main__":
    typer.run(main)
