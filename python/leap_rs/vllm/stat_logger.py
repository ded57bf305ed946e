"""The entry point `vllm.stat_logger_plugins`: shows the engines' metrics on vLLM's own `/metrics`.

vLLM makes one in each API process of every run of the environment. It records nothing itself; where a run does not use
leap-rs there are no files to read, and nothing is registered.
"""

from __future__ import annotations

import functools
import os
from typing import Any

from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.multiprocess import MultiProcessCollector
from vllm.v1.metrics.loggers import AggregateStatLoggerBase

from .collector import register
from .plugin import selected

_MARK = "leap_registered"


class LeapStatLogger(AggregateStatLoggerBase):  # type: ignore[misc]
    """Registers the collector of `leap:` metrics."""

    def __init__(self, vllm_config: Any, engine_indexes: list[int] | None = None) -> None:
        self.engine_indexes = engine_indexes or [0]
        if not selected(vllm_config):
            return
        register(REGISTRY)
        if "PROMETHEUS_MULTIPROC_DIR" in os.environ:
            _show_with_several_servers()

    def record(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: the engine's process has written its numbers already."""

    def log_engine_initialized(self) -> None:
        """Nothing to say."""


def _show_with_several_servers() -> None:
    """Adds the collector to each registry that shows what several API processes have counted.

    Such registries are made anew: by vLLM when it builds its server, and at every scrape by the library that answers it.
    """
    collector: Any = MultiProcessCollector
    original = collector.__init__
    if hasattr(original, _MARK):
        return

    @functools.wraps(original)
    def init(self: Any, registry: CollectorRegistry | None, *args: Any, **kwargs: Any) -> None:
        original(self, registry, *args, **kwargs)
        if registry is not None:
            register(registry)

    setattr(init, _MARK, True)
    collector.__init__ = init
