"""What must hold of rows that an engine has written down, beside transformers' states of the same prompts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    a, b = a.astype(np.float64), b.astype(np.float64)
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


def check_rows(
    rows: dict[tuple[int, ...], list[dict[str, Any]]],
    tokens: list[list[int]],
    states: dict[str, Any],
    layer: int,
    apart: float = 0.99,
) -> None:
    """A row of each prompt: that of its last token after the layer, and neither of the layers beside nor of the token before,
    of which no cosine is above `apart`."""
    assert len(rows) == len(tokens)
    for i, prompt in enumerate(tokens):
        (entry,) = rows[tuple(prompt)]
        hidden = states[f"hidden_{i}"]
        assert entry["row"].shape == hidden.shape[2:]
        assert entry["row"].dtype == np.float32
        assert cosine(entry["row"], hidden[layer, -1]) > max(0.999, apart)
        assert np.linalg.norm(entry["row"]) == pytest.approx(np.linalg.norm(hidden[layer, -1]), rel=1e-3)
        assert cosine(entry["row"], hidden[layer - 1, -1]) < apart
        assert cosine(entry["row"], hidden[layer + 1, -1]) < apart
        assert cosine(entry["row"], hidden[layer, -2]) < apart
