"""Search leap's options for the lowest latency under a bound: `leap_rs.tune(...)` and `leap-replay --tune`."""

from leap_rs.replay.tune.outcome import TuneResult
from leap_rs.replay.tune.run import tune

__all__ = ["TuneResult", "tune"]
