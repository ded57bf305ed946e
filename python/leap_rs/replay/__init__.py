"""Replay a recorded trace under several scheduling policies: `leap_rs.replay(...)` and the `leap-replay` command."""

from leap_rs.replay.results import ReplayResult
from leap_rs.replay.run import replay

__all__ = ["ReplayResult", "replay"]
