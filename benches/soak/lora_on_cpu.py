"""A worker's extension that gives requests without an adapter none, on the CPU.

vLLM's torch kernels take the adapter of such a request, number -1, as an index, which is the last of them: what it
answers hangs on which adapter happens to be loaded, with stock vLLM too, and no two runs could be compared.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.lora.ops.torch_ops import lora_ops
from vllm.lora.punica_wrapper import punica_cpu

_original = lora_ops.bgmv_shrink


def bgmv_shrink(
    inputs: torch.Tensor, weights: torch.Tensor, output: torch.Tensor, adapters: torch.Tensor, *args: Any, **kwargs: Any
) -> None:
    _original(inputs, weights, output, adapters, *args, **kwargs)
    output[: len(adapters)][adapters < 0] = 0.0


lora_ops.bgmv_shrink = punica_cpu.bgmv_shrink = bgmv_shrink


class Extension:
    """Imported by each worker, which is all that it is for."""
