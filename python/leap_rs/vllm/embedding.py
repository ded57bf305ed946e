"""The table of projected input embeddings, from the worker that holds the weights to the scheduler that pools prompts.

The worker asks the loaded model itself for the embedding of every token, so that a quantised or sharded table needs no
code of its own. The scheduler maps the file and removes its name at once; `handover` says what becomes of it where no
scheduler comes to that.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from leap_rs._leap import LeapError, PromptFeatures

from .handover import clear, is_awaited
from .places import place

if TYPE_CHECKING:
    import torch
    from torch import nn

# Below vLLM's own logger, so that lines come out in its format.
LOG = logging.getLogger("vllm.leap_rs")
_BATCH = 8192


def engine_number(vllm_config: Any) -> int:
    """Which of the data-parallel engines this is, the same in its worker and in its scheduler."""
    parallel = vllm_config.parallel_config
    return getattr(parallel, "data_parallel_index", None) or getattr(parallel, "data_parallel_rank", 0) or 0


def table_path(vllm_config: Any) -> Path:
    """Where the worker and the scheduler of one engine meet.

    Raises:
        LeapError: There is no such place.
    """
    return place() / f"embedding-{vllm_config.instance_id}-{engine_number(vllm_config)}"


@contextmanager
def _without_adapters(model: nn.Module) -> Iterator[None]:
    """Has wrapped layers answer as the layers that they wrap.

    A wrapper for LoRA looks up which adapter each token of a step belongs to, and before the first step nobody has said.
    """
    wrappers = [module for module in model.modules() if hasattr(module, "base_layer")]
    for wrapper in wrappers:
        wrapper.forward = wrapper.base_layer.forward
    try:
        yield
    finally:
        for wrapper in wrappers:
            del wrapper.forward


def write_table(
    model: nn.Module, vocabulary: int, path: Path | None, budget: int = _BATCH, device: torch.device | None = None
) -> None:
    """Projects a loaded model's input embeddings and writes the table.

    Args:
        model: The text model.
        vocabulary: Tokens that it knows.
        path: The file. None on the ranks that only take part in looking up a sharded table.
        budget: The most tokens that a step can have, and so the most that the model's buffers are made for.
        device: Where the model runs, instead of where its first weights are: they may be offloaded.
    """
    import torch

    embed = getattr(model, "embed_input_ids", None) or model.get_input_embeddings
    device = device or next(model.parameters()).device
    parts, size = [], min(budget, _BATCH)
    with torch.inference_mode(), _without_adapters(model):
        for start in range(0, vocabulary, size):
            ids = torch.arange(start, min(start + size, vocabulary), device=device)
            part = embed(ids)
            if path is not None:
                parts.append(part.cpu())
    if path is None:
        return
    table = torch.cat(parts)
    # NumPy has no bfloat16; the core takes its bits.
    array = table.view(torch.uint16).numpy() if table.dtype == torch.bfloat16 else table.numpy()
    try:
        PromptFeatures(array).save(path)
    except LeapError as error:
        with suppress(OSError):
            path.unlink(missing_ok=True)
        LOG.warning("leap: no prompt features but the length: %s", error)


def leave_table(model: nn.Module, vllm_config: Any, *, answers: bool, device: torch.device | None = None) -> None:
    """Writes the table of a loaded model for the scheduler that waits for it; a model that cannot be asked has none.

    Args:
        model: The text model.
        vllm_config: That of its engine.
        answers: Whether this is the rank that writes; the others take part in looking tokens up.
        device: As in `write_table`.
    """
    path = None
    # Where there is no place for it the scheduler says so, which looks for it.
    with suppress(LeapError):
        path = table_path(vllm_config) if answers else None
    if path is not None and not is_awaited(path):
        path = None
    budget = vllm_config.scheduler_config.max_num_batched_tokens
    try:
        write_table(model, vllm_config.model_config.get_vocab_size(), path, budget, device)
    except Exception as error:
        # Every rank meets the same, so none is left waiting for another.
        LOG.warning("leap: no prompt features but the length: %s: %s", type(error).__name__, error)
    # Who waited may have been killed meanwhile.
    if path is not None and not is_awaited(path):
        clear(path)


def load_table(vllm_config: Any) -> PromptFeatures | None:
    """The table that this engine's worker wrote, mapped; None, and a warning, where there is none."""
    try:
        path = table_path(vllm_config)
        try:
            return PromptFeatures.load(path)
        finally:
            clear(path)
    except LeapError as error:
        LOG.warning("leap: no prompt features but the length: %s", error)
        return None


def prompt_width(prompt_features: PromptFeatures | None) -> int:
    """Features of a prompt."""
    return len(pooled(None, (0,))) if prompt_features is None else prompt_features.width


def pooled(prompt_features: PromptFeatures | None, prompt_token_ids: Sequence[int]) -> npt.NDArray[np.float32]:
    """The features of a prompt; those of its length alone where there is no table to pool from."""
    if prompt_features is None:
        return PromptFeatures.length_features(len(prompt_token_ids))
    return prompt_features.pool(np.asarray(prompt_token_ids, dtype=np.uint32))
