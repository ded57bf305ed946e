"""LoRA adapters with random weights, and the same models with an adapter's weights added to their own."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

RANK, ALPHA = 8, 16
MODULES = ("embed_tokens", "q_proj", "v_proj")
SHARE = 0.5
"""Size of what an adapter adds, in that of the weight."""


def make(model: Path, out: Path, seed: int) -> None:
    """Writes an adapter of the model as PEFT does."""
    rng = np.random.default_rng(seed)
    tensors: dict[str, np.ndarray] = {}
    for name, weight in load_file(model / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] not in MODULES:
            continue
        # Of an embedding, whose rows are looked up, PEFT names both parts otherwise; they are those of its transpose.
        a, b = ("lora_embedding_A", "lora_embedding_B") if "embed" in name else ("lora_A.weight", "lora_B.weight")
        rows, columns = weight.T.shape if "embed" in name else weight.shape
        size = np.sqrt(SHARE * weight.std() / np.sqrt(RANK) * RANK / ALPHA)
        for part, shape in ((a, (RANK, columns)), (b, (rows, RANK))):
            tensors[f"base_model.model.{module}.{part}"] = rng.normal(0, size, shape).astype(np.float32)
    out.mkdir(parents=True)
    save_file(tensors, out / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": MODULES, "bias": "none"}
    (out / "adapter_config.json").write_text(json.dumps(config))


def merge(model: Path, adapter: Path, out: Path) -> None:
    """Writes the model whose weights W are W + alpha / r * B A."""
    shutil.copytree(model, out)
    weights = load_file(model / "model.safetensors")
    parts = load_file(adapter / "adapter_model.safetensors")
    for name, a in parts.items():
        if ".lora_A" not in name and "embedding_A" not in name:
            continue
        module = name.removeprefix("base_model.model.").split(".lora_")[0]
        added = ALPHA / RANK * (parts[name.replace("_A", "_B")] @ a)
        weights[f"{module}.weight"] += added.T if "embedding" in name else added
    save_file(weights, out / "model.safetensors", {"format": "pt"})
