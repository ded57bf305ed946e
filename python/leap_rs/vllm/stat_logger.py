"""The entry point `vllm.stat_logger_plugins`: shows the engines' metrics on vLLM's own `/metrics`.

vLLM makes one in each API process of every run of the environment. It records nothing itself; where a run does not use
leap-rs there are no files to read, and nothing is registered.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import Any

from prometheus_client import REGISTRY, CollectorRegistry
from vllm.v1.metrics.loggers import AggregateStatLoggerBase

from .collector import register

_MARK = "leap_registered"
_MAKER = "get_prometheus_registry"


class LeapStatLogger(AggregateStatLoggerBase):  # type: ignore[misc]
    """Registers the collector of `leap:` metrics."""

    def __init__(self, vllm_config: Any, engine_indexes: list[int] | None = None) -> None:
        self.engine_indexes = engine_indexes or [0]
        if not _selected(vllm_config):
            return
        register(REGISTRY)
        if "PROMETHEUS_MULTIPROC_DIR" in os.environ:
            _show_with_several_servers()

    def record(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: the engine's process has written its numbers already."""

    def log_engine_initialized(self) -> None:
        """Nothing to say."""


def _selected(vllm_config: Any) -> bool:
    scheduler = vllm_config.scheduler_config.scheduler_cls
    module = scheduler if isinstance(scheduler, str) else getattr(scheduler, "__module__", "")
    return str(module).startswith("leap_rs.vllm")


def _show_with_several_servers() -> None:
    """Adds the collector to the registry that vLLM makes anew for `/metrics` where there are several API processes.

    The server is built after its stat loggers, so the function that makes the registry can still be replaced.
    """
    # Looked up in what a module holds: asking a lazy one for a name would import half of its package.
    for name, module in list(sys.modules.items()):
        make = vars(module).get(_MAKER) if name.startswith("vllm.") else None
        if make is not None and not hasattr(make, _MARK):
            setattr(module, _MAKER, _registering(make))


def _registering(make: Callable[[], CollectorRegistry]) -> Callable[[], CollectorRegistry]:
    @functools.wraps(make)
    def get_prometheus_registry() -> CollectorRegistry:
        registry = make()
        register(registry)
        return registry

    setattr(get_prometheus_registry, _MARK, True)
    return get_prometheus_registry
