"""What a server's processes hold, as the system counts it, and whether it grows."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil

EVERY_S = 1.0
MIB = 2**20


class Held(NamedTuple):
    """What a process holds at a moment."""

    at_s: float
    rss_mib: float
    files: int
    threads: int


class Growth(NamedTuple):
    """By how much something has grown, by the slope of a line through it; `spread` is two standard errors of that."""

    mib: float
    spread: float


def growth(held: Sequence[Held], parts: int = 8) -> Growth:
    """Of the RSS. Samples close to each other are not independent: the line goes through the means of a few parts."""
    if len(held) < 2 * parts:
        return Growth(float("nan"), float("nan"))
    means = [np.mean(part, axis=0) for part in np.array_split(np.array([(h.at_s, h.rss_mib) for h in held]), parts)]
    t, y = np.array(means).T
    (slope, _), covariance = np.polyfit(t, y, 1, cov="unscaled")
    residuals = y - np.polyval(np.polyfit(t, y, 1), t)
    error = np.sqrt(covariance[0, 0] * (residuals @ residuals) / (parts - 2))
    length = held[-1].at_s - held[0].at_s
    return Growth(float(slope * length), float(2 * error * length))


class Processes:
    """Samples a server's processes in a thread of its own until it is stopped."""

    def __init__(self, pid: int) -> None:
        self._root = psutil.Process(pid)
        self.held: dict[str, list[Held]] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> Processes:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def pids(self) -> list[int]:
        return [process.pid for process in (self._root, *self._root.children(recursive=True))]

    def now(self) -> dict[str, Held]:
        """What each process holds now, by what the process is for."""
        found = {}
        for process in (self._root, *self._root.children(recursive=True)):
            try:
                with process.oneshot():
                    name = _role(process, self._root)
                    rss, files, threads = process.memory_info().rss, process.num_fds(), process.num_threads()
            except psutil.Error:
                continue
            if name is not None:
                found[name] = Held(time.monotonic(), rss / MIB, files, threads)
        return found

    def _sample(self) -> None:
        while not self._stop.wait(EVERY_S):
            for name, held in self.now().items():
                self.held.setdefault(name, []).append(held)


def _role(process: psutil.Process, root: psutil.Process) -> str | None:
    if process == root:
        return "API server"
    command = " ".join(process.cmdline())
    roles = {"EngineCore": "engine core", "encoder": "encoder", "resource_tracker": None, "Worker": "worker"}
    return next((role for mark, role in roles.items() if mark in command), f"other ({process.name()})")


@dataclass(frozen=True)
class Rest:
    """A moment at which no request is there."""

    held: dict[str, Held]
    vllm: dict[str, int]
    entries: dict[str, int]
    alive: dict[str, int]


def rest(processes: Processes, written: Path, within_s: float = 60.0) -> Rest:
    """The processes, and the next line that the engine's thread writes of what it keeps.

    Raises:
        RuntimeError: No line comes, for requests are still there.
    """
    began = time.time()
    while time.time() < began + within_s:
        time.sleep(1.0)
        lines = written.read_text().splitlines() if written.exists() else []
        line: dict[str, Any] = json.loads(lines[-1]) if lines else {"at": 0.0}
        # What the plugin does in its own threads after the last request has ended takes a moment.
        if line["at"] > began + 2.0:
            return Rest(processes.now(), line["vllm"], line["entries"], line["alive"])
    raise RuntimeError(f"no rest within {within_s:.0f} s: the engine still has requests")
