"""The plugin for vLLM: `--scheduler-cls leap_rs.vllm.LeapScheduler`. Nothing here imports vLLM before it is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .options import LeapOptions

if TYPE_CHECKING:
    from .scheduler import LeapScheduler

__all__ = ["LeapOptions", "LeapScheduler"]


def __getattr__(name: str) -> Any:
    if name == "LeapScheduler":
        from .scheduler import LeapScheduler

        return LeapScheduler
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
