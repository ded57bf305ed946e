"""A small engine with step times that can be followed by hand, and the options of a replay of one run on it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

COST = {
    "step_s": 0.0067,
    "per_decode_seq_s": 5e-5,
    "per_kv_token_s": 1.2e-6,
    "per_token_over_free_s": 1.7e-5,
    "free_tokens": 24.0,
    "per_prefill_pair_s": 1e-8,
    "per_kv_token_with_prefill_s": 3e-7,
}
ENGINE: dict[str, Any] = {
    "cost": COST,
    "kv_tokens": 6400,
    "block_size": 16,
    "max_num_seqs": 12,
    "max_num_batched_tokens": 512,
    "async_scheduling": True,
    "enable_chunked_prefill": True,
    "enable_prefix_caching": True,
    "reserve_full_prompt": True,
    "watermark": 0.0,
}


def asked(policies: Sequence[str], engine: dict[str, Any], **changes: Any) -> str:
    """What the core is asked, as JSON."""
    usual = {"points": [{}], "burstiness": 1.0, "seed": 0, "seeds": 1, "percentiles": [99.0], "threads": 1}
    return json.dumps({"policies": list(policies), "engine": engine, **usual, **changes})
