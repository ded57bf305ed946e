"""The limits of an engine that a run, a preset or the user states: the replayer's options of those names."""

LIMITS = (
    "max_num_seqs",
    "max_num_batched_tokens",
    "kv_tokens",
    "block_size",
    "async_scheduling",
    "enable_chunked_prefill",
    "enable_prefix_caching",
    "scheduler_reserve_full_isl",
)
