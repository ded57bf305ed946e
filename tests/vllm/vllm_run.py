"""Runs prompts through engines of vLLM, one after the other, in a process of its own: `vllm_run.py ENGINES.json OUT`.

Writes OUT/0/result.json, OUT/1/result.json, ... (tokens and finish reason of each prompt, or the error that the engine
failed with); the scheduler of the tests adds rows.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path
from typing import Any


def allow_async(engine: dict[str, Any]) -> None:
    """vLLM turns asynchronous scheduling off on CPUs; it works there all the same."""
    from vllm.platforms.cpu import CpuPlatform

    original = CpuPlatform.check_and_update_config.__func__

    def check(cls: type, vllm_config: Any) -> None:
        original(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = engine["asynchronous"]

    CpuPlatform.check_and_update_config = classmethod(check)


def count(seen: dict[str, Any]) -> None:
    """Keeps in `seen` what vLLM's scheduler does: who is preempted, and who finishes when (by number of the prompt)."""
    from vllm.v1.core.sched.scheduler import Scheduler

    preempt, free = Scheduler._preempt_request, Scheduler._free_request

    def preempting(self: Any, *args: Any, **kwargs: Any) -> Any:
        seen["preemptions"] += 1
        return preempt(self, *args, **kwargs)

    def freeing(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        seen["finished"].append(int(request.request_id.split("-")[0]))
        return free(self, request, *args, **kwargs)

    Scheduler._preempt_request, Scheduler._free_request = preempting, freeing


def look(engine: Any, seen: dict[str, Any]) -> None:
    """What the scheduler says of itself, where it lives in this process."""
    core = getattr(engine.llm_engine.engine_core, "engine_core", None)
    if core is None:
        return
    scheduler = core.scheduler
    seen["asynchronous"] = scheduler.scheduler_config.async_scheduling
    if hasattr(scheduler, "leap_slots"):
        seen["gated"] = scheduler.leap_slots.slot_waits
        seen["promotions"] = scheduler.leap_slots.promotions
        seen["evictions"] = scheduler.leap_evict.evictions


def generate(
    options: dict[str, Any], batches: list[list[dict[str, Any]]], seen: dict[str, Any]
) -> list[dict[str, Any]]:
    from vllm import LLM, SamplingParams

    engine = LLM(**options)
    results: list[dict[str, Any]] = []
    # One after the other: a later batch may find in the cache what an earlier one has left.
    for batch in batches:
        prompts = [{"prompt_token_ids": prompt["tokens"]} for prompt in batch]
        params = [SamplingParams(temperature=0, **prompt["sampling"]) for prompt in batch]
        for output in engine.generate(prompts, params, use_tqdm=False):
            made = output.outputs[0]
            results.append(
                {"tokens": list(made.token_ids), "reason": made.finish_reason, "cached": output.num_cached_tokens}
            )
    look(engine, seen)
    engine.llm_engine.engine_core.shutdown()
    return results


def main() -> None:
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    current: dict[str, Any] = {}
    allow_async(current)
    seen: dict[str, Any] = {}
    count(seen)
    for number, engine in enumerate(json.loads(Path(sys.argv[1]).read_text())):
        out = Path(sys.argv[2]) / str(number)
        os.environ["LEAP_TEST_OUT"] = str(out)
        current["asynchronous"] = engine["asynchronous"]
        seen.clear()
        seen |= {"preemptions": 0, "finished": []}
        os.environ |= engine["environment"]
        results: list[dict[str, Any]] = []
        error = ""
        try:
            results = generate(engine["engine"], engine["batches"], seen)
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
        (out / "result.json").write_text(json.dumps({"results": results, "error": error, "seen": seen}))
        gc.collect()
        cleanup_dist_env_and_memory()


if __name__ == "__main__":
    main()
