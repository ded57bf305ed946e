"""The encoder itself: a row for each text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from leap_rs._leap import LeapError
from leap_rs.trace.files import reason

from .source import EncoderInfo

TOKENS = 256
"""Of a text no more than so many tokens are read."""


class Encoder:
    """A frozen encoder in memory."""

    def __init__(self, info: EncoderInfo, model: Any, tokenizer: Any) -> None:
        self.info = info
        self._model = model
        self._tokenizer = tokenizer

    @classmethod
    def load(cls, info: EncoderInfo, threads: int = 1, device: str = "cpu") -> Encoder:
        """Loads the weights; `LeapError` where that cannot be done. Nothing is downloaded."""
        try:
            import torch
            import transformers
        except ImportError as error:
            raise LeapError(
                f'{error.name} is missing, which an encoder needs: pip install "leap-rs[encoder]"'
            ) from error
        torch.set_num_threads(threads)
        try:
            tokenizer = transformers.AutoTokenizer.from_pretrained(info.source, local_files_only=True)
            model = transformers.AutoModel.from_pretrained(info.source, local_files_only=True, dtype=torch.float32)
            return cls(info, model.eval().to(device), tokenizer)
        except Exception as error:
            raise LeapError(f"{info.source}: cannot be loaded: {reason(error)[:300]}") from error

    def encode(self, texts: Sequence[str]) -> npt.NDArray[np.float32]:
        """The rows (n, width), in the order of the texts."""
        import torch

        rows = np.zeros((len(texts), self.info.width), dtype=np.float32)
        with torch.inference_mode():
            for row, ids in enumerate(self._tokenizer(list(texts), truncation=True, max_length=TOKENS)["input_ids"]):
                given = torch.tensor([ids], device=self._model.device)
                hidden = self._model(given, output_hidden_states=True).hidden_states[self.info.layer][0]
                rows[row] = (hidden.mean(0) if self.info.kind == "bert" else hidden[-1]).float().cpu().numpy()
        return rows
