"""Output-length prediction and length-aware scheduling for vLLM."""

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
