"""Output-length prediction and length-aware scheduling for vLLM."""

import sys
from types import ModuleType

from leap_rs import lazy
from leap_rs.lazy import TYPE_CHECKING

if TYPE_CHECKING:
    from leap_rs._leap import (
        AgingQueue,
        ConfigError,
        LeapError,
        OnlineReadout,
        PromptFeatures,
        Readout,
        ReadoutError,
        TraceError,
        __version__,
        remaining,
        select_slots,
    )
    from leap_rs.replay import ReplayResult, replay
    from leap_rs.replay.tune import TuneResult, tune
    from leap_rs.trace import read_trace, write_trace

__all__ = [
    "AgingQueue",
    "ConfigError",
    "LeapError",
    "OnlineReadout",
    "PromptFeatures",
    "Readout",
    "ReadoutError",
    "ReplayResult",
    "TraceError",
    "TuneResult",
    "__version__",
    "read_trace",
    "remaining",
    "replay",
    "select_slots",
    "tune",
    "write_trace",
]


class _Face(ModuleType):
    def __setattr__(self, name: str, value: object) -> None:
        # Whoever imports the package `leap_rs.replay` has Python put it here, where the function of that name belongs.
        if name != "replay" or not isinstance(value, ModuleType):
            super().__setattr__(name, value)


if not TYPE_CHECKING:
    sys.modules[__name__].__class__ = _Face
    # Type checkers are to see what is above, and nothing else.
    __getattr__, __dir__ = lazy.names(
        __name__,
        dict.fromkeys(__all__, "leap_rs._leap")
        | {"_leap": "leap_rs._leap", "trace": "leap_rs.trace"}
        | {"ReplayResult": "leap_rs.replay.results", "replay": "leap_rs.replay.run"}
        | dict.fromkeys(("TuneResult", "tune"), "leap_rs.replay.tune")
        | dict.fromkeys(("read_trace", "write_trace"), "leap_rs.trace"),
    )
