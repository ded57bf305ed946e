"""Files that hold several results of a benchmark: one is chosen, or all of them are joined."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from leap_rs._leap import ConfigError, TraceError
from leap_rs.trace.model import ReadOptions

Result = TypeVar("Result")


def chosen(path: Path, results: Sequence[Result], options: ReadOptions) -> list[tuple[int, Result]]:
    """The results that the options choose, with their numbers from 1."""
    found = list(enumerate(results, start=1))
    count = {1: "only one result", 2: "two results"}.get(len(found), f"{len(found)} results")
    if options.run is not None:
        if not 1 <= options.run <= len(found):
            raise ConfigError(f"{path}: run {options.run} is not there: the file holds {count}")
        return [found[options.run - 1]]
    if len(found) > 1 and not options.join:
        raise TraceError(f"{path}: {count}; choose with --run N or --join")
    return found
