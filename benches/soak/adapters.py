"""Two small LoRA adapters of a model, made on the fly: random weights of fixed seeds, in peft's format."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

NAMES = ("adapter-a", "adapter-b")
RANK = 4
# Large enough that answers differ from those without, small enough that they stay words.
SCALE = 0.02


def make(model: Path, directory: Path) -> dict[str, Path]:
    """Writes both; returns their directories by name."""
    config = json.loads((model / "config.json").read_text())
    width, layers = config["hidden_size"], config["num_hidden_layers"]
    heads = {"q_proj": config["num_attention_heads"], "v_proj": config["num_key_value_heads"]}
    made = {}
    for seed, name in enumerate(NAMES):
        rng = np.random.default_rng(seed)
        tensors = {}
        for layer in range(layers):
            for module, count in heads.items():
                key = f"base_model.model.model.layers.{layer}.self_attn.{module}"
                for part, shape in (("A", (RANK, width)), ("B", (count * config["head_dim"], RANK))):
                    tensors[f"{key}.lora_{part}.weight"] = rng.normal(0, SCALE, shape).astype(np.float32)
        out = made[name] = directory / name
        out.mkdir()
        save_file(tensors, out / "adapter_model.safetensors")
        settings = {"peft_type": "LORA", "r": RANK, "lora_alpha": 4 * RANK, "target_modules": list(heads)}
        (out / "adapter_config.json").write_text(json.dumps(settings))
    return made
