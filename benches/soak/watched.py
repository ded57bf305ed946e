"""The schedulers that a soak runs: vLLM's own and the plugin's, each with a thread that writes down what is kept at
rest.

While no request is there, the thread walks over all that the plugin keeps and appends a line of JSON to the file that
`LEAP_SOAK_SIZES` names: entries of every container by its owner and name, and objects alive by their class.
"""

from __future__ import annotations

import gc
import json
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler

from leap_rs.vllm.scheduler import _AsyncLeapScheduler

POLL_S = 0.5
_CONTAINERS = (dict, list, set, deque)


def _ours(value: object) -> bool:
    return type(value).__module__.split(".")[0] == "leap_rs"


def _attributes(value: object) -> dict[str, Any]:
    slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
    return {**{name: getattr(value, name) for name in slots if hasattr(value, name)}, **getattr(value, "__dict__", {})}


def entries(scheduler: Any) -> Counter[str]:
    """Entries of every container that can be reached from the plugin's attributes of a scheduler, by owner and name."""
    found: Counter[str] = Counter()
    todo = [(f"scheduler.{name}", value) for name, value in vars(scheduler).items() if "leap" in name[:5]]
    seen = {id(scheduler)}
    while todo:
        name, value = todo.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, _CONTAINERS):
            found[name] += len(value)
        if isinstance(value, (*_CONTAINERS, tuple)):
            inside = value.values() if isinstance(value, Mapping) else value
            todo += [(f"{name}[]", one) for one in list(inside)]
        elif _ours(value):
            # Of the extension's types only a queue has a length.
            if hasattr(value, "__len__") and not isinstance(value, type):
                found[f"{name} ({type(value).__name__})"] += len(value)
            todo += [(f"{type(value).__name__}.{attribute}", one) for attribute, one in _attributes(value).items()]
    return found


def vllms_own(scheduler: Any) -> dict[str, int]:
    """The same of vLLM's own bookkeeping, by which rest is known to be rest."""
    managers = scheduler.kv_cache_manager.coordinator.single_type_managers
    pool = scheduler.kv_cache_manager.block_pool
    return {
        "requests": len(scheduler.requests),
        "running": len(scheduler.running),
        "waiting": len(scheduler.waiting),
        "req_to_blocks": sum(len(manager.req_to_blocks) for manager in managers),
        "blocks in use": pool.num_gpu_blocks - 1 - pool.get_num_free_blocks(),
    }


def alive() -> Counter[str]:
    """Objects of the plugin's classes and vLLM's requests, after a collection."""
    gc.collect()
    kinds = [type(value) for value in gc.get_objects()]
    ours = (kind for kind in kinds if kind.__module__.startswith("leap_rs") or kind.__name__ == "Request")
    return Counter(kind.__name__ for kind in ours)


class _Watched:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._soak_out = Path(os.environ["LEAP_SOAK_SIZES"])
        threading.Thread(target=self._soak_watch, daemon=True).start()

    def _soak_watch(self) -> None:
        rested = 0
        while True:
            time.sleep(POLL_S)
            rested = 0 if self.requests else rested + 1  # type: ignore[attr-defined]
            if rested < 2 or rested % 4 != 2:
                continue
            try:
                line = {"at": time.time(), "vllm": vllms_own(self), "entries": entries(self), "alive": alive()}
            except RuntimeError:
                # A request came meanwhile, and what was walked over has changed.
                continue
            with self._soak_out.open("a") as file:
                file.write(json.dumps(line) + "\n")


class Stock(_Watched, AsyncScheduler):  # type: ignore[misc]
    """vLLM's own scheduler."""


class Leap(_Watched, _AsyncLeapScheduler):  # type: ignore[misc]
    """The plugin's."""
