"""Make the committed traces from the measured data: numbers only, never a prompt's text.

    python scripts/make_traces.py DATA_DIR OUT_DIR [--all-columns DIR]

DATA_DIR holds `smollm2.parquet` (a row a prompt: hidden states and sampled lengths of SmolLM2-135M-Instruct),
`prompts.parquet` (used for the source of each prompt alone), `traces/azure2023` and `traces/llmservingsim`. The same
data give the same bytes.
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
from rich.table import Table

from leap_rs._leap import PromptFeatures, spearman
from leap_rs.calibrate.workload import block_hashes
from leap_rs.trace import load, write_trace

Floats = npt.NDArray[np.float64]

SEED = 0
MODEL = "SmolLM2-135M-Instruct"
SAMPLING = "temperature 1.0, top_k 50, max_tokens 1024"
MAX_TOKENS = 1024
LAYERS = (10, 15, 20, 25, 28, 30)
PROMPT_DIM = 256
BLOCK_SIZE = 16
FEATURES = (*(f"h{layer}" for layer in LAYERS), "mean10", "mean30", "egtp", "emb_mean")

# Mean requests per second. The first three lie where one H100 with an 8B model is lightly to fully loaded.
RATES = {"sharegpt": 20.0, "chat": 20.0, "instruct": 20.0, "multilingual": 10.0, "math": 10.0, "code": 10.0}

LAYER_GROUPS = ("chat", "instruct")
LAMBDAS = (100.0, 300.0, 1000.0, 3000.0, 10000.0)
FOLDS = 5
REPEATS = 10

# Sources that hold the same or translated questions: they go to one side of a split together.
FAMILIES = {
    "vicuna-bench": ("vicuna_bench", "mt_bench", "LLMZoo", "spec_bench"),
    "alpaca-eval": ("alpaca_eval", "koala", "self-instruct", "WizardLM", "flask"),
    "oasst": ("oasst", "Open-Assistant", "OASST"),
}

RUNS = {
    "rtx4090-llama-8b": ("vllm_RTX4090_Llama-3.1-8B", "sharegpt-llama-3.1-8b-300-sps10.jsonl", "RTX 4090"),
    "rtxpro6000-llama-8b": ("vllm_RTXPRO6000_Llama-3.1-8B", "sharegpt-llama-3.1-8b-300-sps10.jsonl", "RTX PRO 6000"),
}
FASTEST_FRONT_END_S = 0.0015  # what the quickest request is taken to spend between arrival and the engine's queue

console = Console()


def main(
    data_dir: Annotated[Path, typer.Argument(exists=True, file_okay=False)],
    out_dir: Annotated[Path, typer.Argument()],
    all_columns: Annotated[Path | None, typer.Option(help="Also write traces with all feature columns here.")] = None,
) -> None:
    """Make the committed traces of OUT_DIR from DATA_DIR."""
    rows = pl.read_parquet(data_dir / "smollm2.parquet")
    sources = pl.read_parquet(data_dir / "prompts.parquet", columns=["id", "source"])
    rows = rows.join(sources, left_on="prompt_id", right_on="id", how="left", maintain_order="left")
    arrivals = load(data_dir / "traces/azure2023/AzureLLMInferenceTrace_conv.csv").frame["arrival_s"].to_numpy()

    scores = layer_scores(rows.filter(pl.col("group").is_in(LAYER_GROUPS)))
    layer = max(scores, key=lambda score: score.spearman).layer
    show(scores, layer)

    for group, rate in RATES.items():
        frame = domain_trace(rows.filter(pl.col("group") == group), rate, layer, arrivals)
        about = f"{group} prompts, lengths sampled with vLLM; gaps of the Azure 2023 conversation trace, {rate:g}/s"
        written = {out_dir: frame.drop("family", *FEATURES)} | ({all_columns: frame} if all_columns else {})
        for directory, kept in written.items():
            directory.mkdir(parents=True, exist_ok=True)
            path = directory / f"{group}.parquet"
            write_trace(kept, path, model=MODEL, layer=layer, sampling=SAMPLING, source=about)
            tell(path)
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


def domain_trace(rows: pl.DataFrame, rate: float, layer: int, arrivals: Floats) -> pl.DataFrame:
    """The rows of one group in seeded random order, arriving with the real trace's gaps at `rate` requests/s."""
    order = np.random.default_rng(SEED).permutation(rows.height)
    rows = rows[order]
    prompt = prompt_features(rows["emb_mean"].to_numpy(), rows["prompt_tokens"].to_numpy())
    return pl.DataFrame(
        [
            rows["prompt_id"].alias("request_id"),
            pl.Series("arrival_s", rescaled(arrivals[: rows.height], rate)),
            rows["prompt_tokens"].cast(pl.UInt32),
            rows["output_tokens"].cast(pl.UInt32),
            pl.Series("max_tokens", np.full(rows.height, MAX_TOKENS, dtype=np.uint32)),
            rows["finish_reason"],
            rows["group"].alias("domain"),
            rows[f"h{layer}"].alias("features"),
            pl.Series("prompt_features", prompt),
            pl.Series("family", [family(source) for source in rows["source"]]),
            *(rows[name] for name in FEATURES),
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


@dataclass(frozen=True)
class LayerScore:
    """How well a readout of one layer ranks prompts whose source it has not seen."""

    layer: int
    lam: float
    spearman: float
    deviation: float


def layer_scores(rows: pl.DataFrame) -> list[LayerScore]:
    """Rank correlation of ridge on sqrt(length), k-fold over families of sources, for each layer at its best lambda."""
    target = np.sqrt(rows["output_tokens"].to_numpy().astype(np.float64))
    families = np.array([family(source) for source in rows["source"]])
    scores = []
    for layer in LAYERS:
        features = rows[f"h{layer}"].to_numpy().astype(np.float64)
        by_lambda = np.array([out_of_fold_spearman(features, target, families, seed) for seed in range(REPEATS)])
        best = int(by_lambda.mean(axis=0).argmax())
        scores.append(LayerScore(layer, LAMBDAS[best], by_lambda[:, best].mean(), by_lambda[:, best].std()))
    return scores


def family(source: str) -> str:
    """The group of sources that a prompt's source belongs to."""
    for name, marks in FAMILIES.items():
        if any(mark in source for mark in marks):
            return name
    return source


def out_of_fold_spearman(features: Floats, target: Floats, families: npt.NDArray[np.str_], seed: int) -> list[float]:
    """For each lambda, the rank correlation of predictions made for the folds that were left out."""
    names = np.unique(families)
    fold_of = dict(zip(names, np.random.default_rng(seed).permutation(len(names)) % FOLDS, strict=True))
    folds = np.array([fold_of[name] for name in families])
    predicted = np.empty((len(LAMBDAS), len(target)))
    for fold in range(FOLDS):
        train, test = folds != fold, folds == fold
        mean, scale = features[train].mean(axis=0), features[train].std(axis=0) + 1e-6
        x, y = (features[train] - mean) / scale, target[train]
        values, vectors = np.linalg.eigh(x.T @ x)
        along = vectors.T @ (x.T @ (y - y.mean()))
        for index, lam in enumerate(LAMBDAS):
            weight = vectors @ (along / (values + lam))
            predicted[index, test] = (features[test] - mean) / scale @ weight + y.mean()
    # Undefined only where all predictions are the same.
    return [spearman(row, target) or 0.0 for row in predicted]


def json_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSON lines file."""
    return [json.loads(line) for line in path.read_text().splitlines() if line]


def show(scores: list[LayerScore], chosen: int) -> None:
    """Print the table that the choice of the layer rests on."""
    title = f"Out-of-source rank correlation, {' + '.join(LAYER_GROUPS)}"
    table = Table("layer", "lambda", "Spearman", "sd over splits", "", title=title)
    for score in scores:
        mark = "chosen" if score.layer == chosen else ""
        table.add_row(str(score.layer), f"{score.lam:g}", f"{score.spearman:.3f}", f"{score.deviation:.3f}", mark)
    console.print(table)


def tell(path: Path) -> None:
    """Print what was written."""
    frame = load(path).frame
    console.print(f"{path}: {frame.height} rows, {path.stat().st_size / 1e6:.2f} MB, {frame['arrival_s'][-1]:.1f} s")


if __name__ == "__main__":
    typer.run(main)
