"""A scheduler of vLLM that only asks for the rows of prompts and writes down what comes back."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from leap_rs.vllm.embedding import load_table


def RowScheduler(*args: Any, **kwargs: Any) -> Scheduler:  # noqa: N802
    """One name for the synchronous and the asynchronous engine, as the plugin's own scheduler has."""
    config = kwargs["vllm_config"] if "vllm_config" in kwargs else args[0]
    return (_AsyncRows if config.scheduler_config.async_scheduling else _SyncRows)(*args, **kwargs)


RowScheduler.leap_reads_table = True  # type: ignore[attr-defined]


class _Rows:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.out = Path(os.environ["LEAP_TEST_OUT"])
        self.table = load_table(self.vllm_config)
        if self.table is not None:
            self.table.save(self.out / "table")
        (self.out / f"{type(self).__name__}.scheduler").touch()

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        step = super().schedule(*args, **kwargs)
        step.leap_positions = {}
        for request_id, tokens in step.num_scheduled_tokens.items():
            request = self.requests[request_id]
            position = request.num_prompt_tokens - 1 - (request.num_computed_tokens - tokens)
            if 0 <= position < tokens:
                step.leap_positions[request_id] = position
        return step

    def update_from_output(self, step: Any, output: Any) -> Any:
        rows = getattr(output, "leap_rows", {})
        assert set(rows) <= set(step.leap_positions)
        for request_id, row in rows.items():
            request = self.requests[request_id]
            prompt, adapter = request.prompt_token_ids, request.lora_request.lora_name if request.lora_request else ""
            pooled = self.table.pool(np.array(prompt, np.uint32)) if self.table is not None else np.zeros(0)
            tokens = step.num_scheduled_tokens[request_id]
            number = len(list(self.out.glob("row*.npz")))
            entry = {"prompt": prompt, "adapter": adapter, "row": row, "pooled": pooled, "chunk": tokens}
            np.savez(self.out / f"row{number}.npz", **entry)
        return super().update_from_output(step, output)


class _SyncRows(_Rows, Scheduler):
    pass


class _AsyncRows(_Rows, AsyncScheduler):
    pass
