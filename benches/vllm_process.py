"""A Python process that does what it is asked: a line of JSON in, a line of JSON out.

What needs a model, and what may be killed, lives in such a process; the other end stays without PyTorch and goes on.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

_T = TypeVar("_T", bound="Process")


class Process:
    """Runs a script that ends in `serve`. Leaving the `with` lets it end by itself; `kill` does not.

    Args:
        script: The Python script.
        environment: Its variables. The log and the script's temporary files lie in a directory of its own.
    """

    def __init__(self, script: str | Path, environment: Mapping[str, str]) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="leap-process-", ignore_cleanup_errors=True)
        self.place = place = Path(self._directory.name)
        self._log = place / "log"
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, str(Path(script).resolve())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**environment, "TMPDIR": str(place)},
                text=True,
            )

    def __enter__(self: _T) -> _T:
        return self

    def __exit__(self, *_: object) -> None:
        if not self.ended:
            with contextlib.suppress(RuntimeError, subprocess.TimeoutExpired):
                self.close()
        self.kill()
        self._directory.cleanup()

    def ask(self, do: str, **arguments: Any) -> Any:
        """Has the process do something and returns its answer.

        Raises:
            RuntimeError: It has ended, with the end of what it logged.
        """
        try:
            self._process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            raise RuntimeError(f"the process has ended:\n{self.log[-4000:]}")
        return json.loads(answer)

    @property
    def ended(self) -> bool:
        """Whether the process is gone."""
        return self._process.poll() is not None

    @property
    def log(self) -> str:
        """What has been printed in the process, vLLM's log among it."""
        return self._log.read_text(errors="replace")

    def close(self) -> None:
        """Lets the process end after what it does."""
        self._process.stdin.close()
        self._process.wait(timeout=300)

    def kill(self) -> None:
        """SIGKILL."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):
                pipe.close()


def serve(served: object) -> None:
    """The process's side: calls the methods of `served` that the lines on the standard input name."""
    answers = os.fdopen(os.dup(1), "w")
    # What libraries print goes where their log goes.
    os.dup2(2, 1)
    for line in sys.stdin:
        command = json.loads(line)
        answer = getattr(served, command.pop("do"))(**command)
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
