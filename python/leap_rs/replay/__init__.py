"""Replay a recorded trace under several scheduling policies: `leap_rs.replay(...)` and the `leap-replay` command."""

from typing import TYPE_CHECKING

from leap_rs import lazy

if TYPE_CHECKING:
    from leap_rs.replay.results import ReplayResult
    from leap_rs.replay.run import replay

__all__ = ["ReplayResult", "replay"]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy.names(
        __name__, {"ReplayResult": "leap_rs.replay.results", "replay": "leap_rs.replay.run"}
    )
