"""The encoder itself: a row for each text, from as many layers as it takes and no more."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from leap_rs._leap import LeapError
from leap_rs.trace.files import reason

from .source import EncoderInfo

Rows = npt.NDArray[np.float32]

TOKENS = 256
"""Of a text no more than so many tokens are read."""
_CHARACTERS = 64 * TOKENS
"""What so many tokens come from; a tokenizer would go through the rest for nothing."""
_AT_ONCE = 1024
"""Tokens in one forward pass, padding included: more no longer fit into a core's cache."""
_MARK = "QUESTION"


def precision(device: str) -> str:
    """The fastest of the precisions that rank alike: bfloat16 where the processor multiplies it, else float32."""
    if device != "cpu":
        return "bfloat16"
    flags = set(Path("/proc/cpuinfo").read_text().split())
    return "bfloat16" if flags & {"avx512_bf16", "amx_bf16"} else "float32"


class Encoder:
    """A frozen encoder in memory; `load` makes one."""

    def __init__(self, info: EncoderInfo, model: Any, tokenizer: Any) -> None:
        self.info = info
        self._model = model
        self._tokenizer = tokenizer
        self._before, self._behind = _template(tokenizer) if info.kind == "causal" else ([], [])

    @classmethod
    def load(cls, info: EncoderInfo, threads: int = 1, device: str = "cpu", dtype: str | None = None) -> Encoder:
        """Loads the weights; `LeapError` where that cannot be done. Nothing is downloaded.

        Args:
            info: What `inspect` says of the model.
            threads: Of the whole process.
            device: As torch names it.
            dtype: `float32` or `bfloat16`; what `precision` says where not given.
        """
        try:
            import torch
            import transformers
        except ImportError as error:
            raise LeapError(
                f'{error.name} is missing, which an encoder needs: pip install "leap-rs[encoder]"'
            ) from error
        torch.set_num_threads(threads)
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        kind = getattr(torch, dtype or precision(device))
        try:
            tokenizer = transformers.AutoTokenizer.from_pretrained(info.source, local_files_only=True)
            model = transformers.AutoModel.from_pretrained(info.source, local_files_only=True, dtype=kind)
            _shorten(model, info)
            model.eval().to(device)
        except Exception as error:
            raise LeapError(f"{info.source}: cannot be loaded: {reason(error)[:300]}") from error
        if device == "cpu" and kind == torch.float32 and torch.backends.mkldnn.is_available():
            _multiply_with_onednn(model)
        return cls(info, model, tokenizer)

    def encode(self, texts: Sequence[str]) -> Rows:
        """The rows (n, width), in the order of the texts."""
        rows = np.zeros((len(texts), self.info.width), dtype=np.float32)
        for places, part in self.parts(texts):
            rows[places] = part
        return rows

    def parts(self, texts: Sequence[str]) -> Iterator[tuple[list[int], Rows]]:
        """The rows part by part, the shortest texts first, with their places among the texts."""
        for places, tokens in self._sorted(texts):
            yield places, self._read(tokens)[-1]

    def layers(self, texts: Sequence[str]) -> Rows:
        """The rows of every layer up to the one that is read, from 0 on: (layers + 1, n, width)."""
        rows = np.zeros((self.info.layer + 1, len(texts), self.info.width), dtype=np.float32)
        for places, tokens in self._sorted(texts):
            rows[:, places] = self._read(tokens, every_layer=True)
        return rows

    def _sorted(self, texts: Sequence[str]) -> Iterator[tuple[list[int], list[list[int]]]]:
        tokens = self._tokens(texts) if texts else []
        part: list[int] = []
        for place in sorted(range(len(tokens)), key=lambda i: len(tokens[i])):
            # Sorted, the newcomer is the longest, and all others are padded to it.
            if part and (len(part) + 1) * len(tokens[place]) > _AT_ONCE:
                yield part, [tokens[i] for i in part]
                part = []
            part.append(place)
        if part:
            yield part, [tokens[i] for i in part]

    def _tokens(self, texts: Sequence[str]) -> list[list[int]]:
        cut = [text[:_CHARACTERS] for text in texts]
        if self.info.kind == "bert":
            found = self._tokenizer(cut, truncation=True, max_length=TOKENS)["input_ids"]
            return [list(ids) for ids in found]
        found = self._tokenizer(cut, truncation=True, max_length=TOKENS, add_special_tokens=False)["input_ids"]
        return [[*self._before, *ids, *self._behind] or [0] for ids in found]

    def _read(self, tokens: Sequence[Sequence[int]], *, every_layer: bool = False) -> list[Rows]:
        """The rows of the layer that is read, or of each up to it."""
        import torch

        sizes = torch.tensor([len(ids) for ids in tokens])
        padded = torch.zeros(len(tokens), int(sizes.max()), dtype=torch.long)
        for row, ids in enumerate(tokens):
            padded[row, : len(ids)] = torch.tensor(ids)
        mask = torch.arange(padded.shape[1]) < sizes[:, None]
        if self.info.kind == "causal":
            # What stands behind a token does not change its state: padding needs no mask.
            given = {"use_cache": False}
            weights = torch.nn.functional.one_hot(sizes - 1, padded.shape[1]).float()
        else:
            given = {"attention_mask": mask.long().to(self._model.device)}
            weights = mask / sizes[:, None]
        weights = weights.to(self._model.device)
        with torch.inference_mode():
            out = self._model(padded.to(self._model.device), output_hidden_states=every_layer, **given)
            states = out.hidden_states if every_layer else [out.last_hidden_state]
            return [torch.einsum("nt,ntd->nd", weights, state.float()).cpu().numpy() for state in states]


def _shorten(model: Any, info: EncoderInfo) -> None:
    """Takes out what comes after the layer that is read."""
    import torch

    if info.kind == "bert":
        model.encoder.layer = model.encoder.layer[: info.layer]
        model.pooler = None
        return
    model.layers = model.layers[: info.layer]
    # The states between layers are not normed; transformers norms the last ones alone.
    if info.layer < info.depth:
        model.norm = torch.nn.Identity()


def _multiply_with_onednn(model: Any) -> None:
    """Has oneDNN do the matrix products: torch's default library is half as fast on processors of AMD."""
    import torch

    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.forward = _product(module.weight, module.bias)
            module.weight = module.bias = None


def _product(weight: Any, bias: Any) -> Callable[[Any], Any]:
    import torch

    held = weight.detach().to_mkldnn()
    added = None if bias is None else bias.detach().to_mkldnn()
    return lambda given: torch.ops.aten.mkldnn_linear(given.to_mkldnn(), held, added).to_dense()


def _template(tokenizer: Any) -> tuple[list[int], list[int]]:
    """The tokens around a user's message up to where the answer begins: there a causal model looks ahead."""
    if not getattr(tokenizer, "chat_template", None):
        return [], []
    message = [{"role": "user", "content": _MARK}]
    text = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
    before, _, behind = text.partition(_MARK)
    return tuple(tokenizer.encode(part, add_special_tokens=False) for part in (before, behind))
