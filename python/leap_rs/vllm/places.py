"""Where the processes of one run meet: files below TMPDIR that nobody else can write, under a name that the run alone has."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import secrets
import sys
import tempfile
from functools import cache
from pathlib import Path

from leap_rs._leap import LeapError
from leap_rs.trace.files import reason

RUN = "LEAP_RS_RUN"
_RAY_COPIES = "VLLM_RAY_EXTRA_ENV_VARS_TO_COPY"


def place(*names: str) -> Path:
    """A directory of ours below TMPDIR. See `private`.

    Raises:
        LeapError: There is no such directory, and none can be made.
    """
    try:
        path = Path(tempfile.gettempdir()) / f"leap-rs-{os.getuid()}"
    except OSError as error:
        raise LeapError(f"no directory for temporary files: {reason(error)}") from error
    private(path)
    for name in names:
        path /= name
        private(path)
    return path


def private(path: Path) -> None:
    """Makes a directory that only this user can write, or checks that it is one.

    Raises:
        LeapError: It is none, or it cannot be made.
    """
    try:
        path.mkdir(mode=0o700, exist_ok=True)
        status = path.lstat()
    except OSError as error:
        raise LeapError(f"{path}: cannot be made: {reason(error)}") from error
    if path.is_symlink() or status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise LeapError(f"{path}: is not a directory that only this user can write; remove it or set TMPDIR")


def name_run() -> None:
    """Names the run that this process begins, for all processes that vLLM starts: they inherit the name.

    Process ids would not do: Ray starts engines elsewhere, and containers that share a TMPDIR count theirs alike.
    """
    if RUN in os.environ and (multiprocessing.parent_process() is not None or _of_ray()):
        return
    os.environ[RUN] = _own_name()
    copied = [name for name in os.environ.get(_RAY_COPIES, "").split(",") if name]
    if RUN not in copied:
        os.environ[_RAY_COPIES] = ",".join([*copied, RUN])


@cache
def _own_name() -> str:
    return secrets.token_hex(8)


def run_name() -> str:
    """The name of the run that this process is part of."""
    if RUN not in os.environ:
        name_run()
    return os.environ[RUN]


def _of_ray() -> bool:
    ray = sys.modules.get("ray")
    return ray is not None and ray.is_initialized() and ray.get_runtime_context().get_actor_id() is not None


def hold(descriptor: int) -> None:
    """Shows to `held` that a process lives that has this file open, for as long as it does."""
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def held(descriptor: int) -> bool:
    """Whether the process that called `hold` on this file still lives."""
    try:
        # Shared, so that no two that ask take each other for it; given back when the file is closed.
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    return False
