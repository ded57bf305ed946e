"""Results in the shape that `vllm bench serve` writes."""

from __future__ import annotations

from typing import Any

SUMMARY: dict[str, Any] = {
    "date": "20260818-041350",
    "endpoint_type": "vllm",
    "backend": "vllm",
    "label": None,
    "model_id": "facebook/opt-125m",
    "tokenizer_id": "facebook/opt-125m",
    "num_prompts": 3,
    "request_rate": "inf",
    "burstiness": 1.0,
    "max_concurrency": None,
    "duration": 2.0,
    "completed": 3,
    "failed": 0,
    "mean_ttft_ms": 200.0,
}


def detailed(**changes: Any) -> dict[str, Any]:
    """A detailed result of three requests; a change of None takes the key out."""
    arrays = {
        "input_lens": [40, 32, 48],
        "output_lens": [9, 2, 1],
        "ttfts": [0.2, 0.1, 0.3],
        "itls": [[0.05, 0.05], [0.1], []],
        "latencies": [0.31, 0.21, 0.3],
        "start_times": [100.0, 100.5, 101.0],
        "queue_times": [0.0, 0.0, 0.0],
        "generated_texts": ["a", "b", "c"],
        "errors": ["", "", ""],
    }
    return {key: value for key, value in {**SUMMARY, **arrays, **changes}.items() if value is not None}
