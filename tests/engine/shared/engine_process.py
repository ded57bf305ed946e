"""The process of the engines that tests share: what benches do with an engine, and schedulers that take each other's place.

Most of a test's time would go into starting Python with vLLM and loading a model. An engine is therefore opened once for
all tests that need its model runner as it is, and what only its scheduler knows (levers, seats, tokens of a step, blocks)
is changed between their requests, by a new scheduler on the same model runner: `schedule`.
"""

from __future__ import annotations

import copy
import os
from dataclasses import replace
from functools import wraps
from typing import Any

from vllm_engine import EngineServer
from vllm_process import serve


class SharedEngineServer(EngineServer):
    """An engine whose scheduler can be replaced, and which counts what the scheduler in force does."""

    def __init__(self) -> None:
        super().__init__()
        self._patched = False
        self._asynchronous = False
        self._seen: dict[str, Any] = {}
        # Of the scheduler that the engine was opened with.
        self._scheduler_arguments: dict[str, Any] = {}

    def open(self, options: dict[str, Any], asynchronous: bool = False, variables: dict[str, str] | None = None) -> str:
        """Opens an engine; returns what it was refused with, or nothing."""
        os.environ |= variables or {}
        self._asynchronous = asynchronous
        self._scheduler_arguments = {}
        self._patch()
        self._start_counting()
        try:
            super().open(options)
        except Exception as raised:
            self._llm = None
            self.clean_up()
            return f"{type(raised).__name__}: {raised}"
        return ""

    def _watch_scheduler(self) -> None:
        """Nothing is timed or counted here, and in a process of its own the scheduler is out of reach."""

    def schedule(self, kind: str, leap: dict[str, Any], limits: dict[str, Any], rows: str) -> None:
        """Puts a new scheduler in the place of the present one, which has been told that the engine stops.

        Args:
            kind: `stock`, `leap`, or `rows` for one that writes hidden states down, into the directory `rows`.
            leap: Options of the plugin.
            limits: `max_num_seqs`, `max_num_batched_tokens`, `max_model_len` and `blocks` where they are to be less than
                what the model runner was made for.
        """
        os.environ["LEAP_TEST_OUT"] = rows
        core = self._core
        # The model runner is told with the step after it that a request has ended.
        while core.scheduler.has_requests() or core.batch_queue:
            core.step_fn()
        core.scheduler.shutdown()
        config, given = self._config(kind, leap, limits), dict(self._scheduler_arguments)
        blocks = limits.get("blocks", given["kv_cache_config"].num_blocks)
        given |= {"vllm_config": config, "kv_cache_config": replace(given["kv_cache_config"], num_blocks=blocks)}
        if kind != "stock":
            self._write_table(config)
        self._start_counting()
        core.scheduler = config.scheduler_config.get_scheduler_cls()(**given)

    def _config(self, kind: str, leap: dict[str, Any], limits: dict[str, Any]) -> Any:
        config = copy.copy(self._core.vllm_config)
        config.scheduler_config, config.model_config = (
            copy.copy(config.scheduler_config),
            copy.copy(config.model_config),
        )
        scheduler = {"stock": None, "leap": "leap_rs.vllm.LeapScheduler", "rows": "row_scheduler.RowScheduler"}[kind]
        config.scheduler_config.scheduler_cls = scheduler
        config.scheduler_config.max_num_scheduled_tokens = None
        for name in ("max_num_seqs", "max_num_batched_tokens"):
            setattr(config.scheduler_config, name, limits.get(name, getattr(config.scheduler_config, name)))
        config.model_config.max_model_len = limits.get("max_model_len", config.model_config.max_model_len)
        config.additional_config = {"leap": leap} if kind == "leap" else {}
        return config

    def _write_table(self, config: Any) -> None:
        """As the worker does after loading: the scheduler before has taken it."""
        from leap_rs.vllm.decoder import language_model
        from leap_rs.vllm.embedding import table_path, write_table

        model = self._core.model_executor.driver_worker.worker.model_runner.get_model()
        write_table(language_model(model), config.model_config.get_vocab_size(), table_path(config))

    def seen(self) -> dict[str, Any]:
        """What the scheduler has done since it is there: who was preempted, who has finished when (by number of the request),
        and the plugin's own counts."""
        scheduler = self._core.scheduler
        seen = {**self._seen, "asynchronous": scheduler.scheduler_config.async_scheduling}
        if hasattr(scheduler, "leap_slots"):
            seen["gated"] = scheduler.leap_slots.slot_waits
            seen["promotions"] = scheduler.leap_slots.promotions
            seen["evictions"] = scheduler.leap_evict.evicted
        return seen

    def _start_counting(self) -> None:
        self._seen |= {"preemptions": 0, "finished": []}

    def _patch(self) -> None:
        """Lets vLLM's scheduler count and tell what it was made of, and CPUs have asynchronous scheduling, which vLLM turns off
        there; it works all the same. A model's class is looked at here: vLLM starts a Python for it, to keep CUDA away."""
        if self._patched:
            return
        self._patched = True
        from vllm.config import SchedulerConfig
        from vllm.model_executor.models import registry
        from vllm.platforms.cpu import CpuPlatform
        from vllm.v1.core.sched.scheduler import Scheduler

        check, choose = CpuPlatform.check_and_update_config.__func__, SchedulerConfig.get_scheduler_cls
        preempt, free = Scheduler._preempt_request, Scheduler._free_request
        server = self

        def checking(cls: type, vllm_config: Any) -> None:
            check(cls, vllm_config)
            vllm_config.scheduler_config.async_scheduling = server._asynchronous

        def choosing(self: Any) -> Any:
            chosen = choose(self)

            def make(**kwargs: Any) -> Any:
                server._scheduler_arguments = server._scheduler_arguments or kwargs
                return chosen(**kwargs)

            return make

        @wraps(preempt)
        def preempting(self: Any, *args: Any, **kwargs: Any) -> Any:
            server._seen["preemptions"] += 1
            return preempt(self, *args, **kwargs)

        @wraps(free)
        def freeing(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
            server._seen["finished"].append(int(request.request_id.split("-")[0]))
            return free(self, request, *args, **kwargs)

        _spare_requests_without_adapter()
        registry._run_in_subprocess = lambda look: look()
        CpuPlatform.check_and_update_config = classmethod(checking)
        SchedulerConfig.get_scheduler_cls = choosing
        Scheduler._preempt_request, Scheduler._free_request = preempting, freeing


def _spare_requests_without_adapter() -> None:
    """Has CPUs give nothing to requests without an adapter, as vLLM's kernels for GPUs do.

    They stand as -1 among the numbers of adapters, which is the last one's place to PyTorch (vLLM's pull request 48421): what
    such a request is answered would depend on the others in its steps, of stock vLLM too.
    """
    from vllm.lora.ops.torch_ops import lora_ops
    from vllm.lora.punica_wrapper import punica_cpu

    def spared(operator: Any) -> Any:
        @wraps(operator)
        def run(inputs: Any, weights: Any, output: Any, adapters: Any, *args: Any, **kwargs: Any) -> Any:
            return operator(inputs.masked_fill((adapters < 0)[:, None], 0), weights, output, adapters, *args, **kwargs)

        return run

    for name in ("bgmv_shrink", "bgmv_expand", "bgmv_expand_slice"):
        operator = spared(getattr(lora_ops, name))
        setattr(lora_ops, name, operator)
        setattr(punica_cpu, name, operator)


if __name__ == "__main__":
    serve(SharedEngineServer())
