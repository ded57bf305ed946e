"""The plugin for vLLM: `--scheduler-cls leap_rs.vllm.LeapScheduler`. Nothing here imports vLLM before it is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from leap_rs import lazy

if TYPE_CHECKING:
    from .options import LeapOptions
    from .scheduler import LeapScheduler

__all__ = ["LeapOptions", "LeapScheduler"]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy.names(
        __name__, {"LeapOptions": "leap_rs.vllm.options", "LeapScheduler": "leap_rs.vllm.scheduler"}
    )
