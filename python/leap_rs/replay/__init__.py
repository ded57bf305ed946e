"""Replay a recorded trace under several scheduling policies: `leap_rs.replay(...)` and the `leap-replay` command."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .results import ReplayResult
    from .run import replay

__all__ = ["ReplayResult", "replay"]


def __getattr__(name: str) -> Any:
    # Loaded on first use: the command's --help should not wait for polars and pydantic.
    if name == "replay":
        from .run import replay

        return replay
    if name == "ReplayResult":
        from .results import ReplayResult

        return ReplayResult
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class _CallableModule(ModuleType):
    """`leap_rs.replay` is this package and the function at once, whichever of the two was imported first."""

    def __call__(self, *args: Any, **kwargs: Any) -> ReplayResult:
        from .run import replay

        return replay(*args, **kwargs)


sys.modules[__name__].__class__ = _CallableModule
