"""The place where a worker leaves its table of embeddings for the scheduler, so that nothing stays there.

The engine core waits at the place before there are workers, by a file that it keeps locked until its scheduler has read
the table. A worker leaves a table only where somebody waits: not on another node, and not where nobody reads. What lies
at a place without anybody who waits is left of a start that was killed, and the next start takes it away.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import time
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

from leap_rs._leap import LeapError
from leap_rs.trace.files import reason

from .places import held, hold

_WANTED = ".wanted"
# The table, the file of who waits for it, and what the core writes a table under before it renames it.
_OURS = re.compile(r"\.?(embedding-[^.]+)(?:\.wanted|\.\d+\.\d+\.tmp)?")
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
_TRIES = 100
_PAUSE_S = 0.01
_waiting: dict[Path, Finalize] = {}


def wait(path: Path, reader: Any) -> None:
    """Waits at a place, until `clear`, or until the reader or the process ends.

    Args:
        path: Where the table will lie.
        reader: What lives for as long as somebody may still read it.

    Raises:
        LeapError: Nobody can wait there.
    """
    sweep(path.parent)
    if path in _waiting:
        return
    try:
        descriptor = _lock(_wanted(path))
    except OSError as error:
        raise LeapError(f"{path}: cannot be waited for: {reason(error)}") from error
    # Not `atexit`, which processes that were forked do not run.
    _waiting[path] = Finalize(reader, _end, (path, descriptor), exitpriority=0)


def is_awaited(path: Path) -> bool:
    """Whether a process lives that waits at a place."""
    try:
        descriptor = _look(path)
    except OSError:
        return True
    if descriptor is None:
        return False
    try:
        return held(descriptor)
    finally:
        os.close(descriptor)


def clear(path: Path) -> None:
    """Takes away whatever lies at a place, and waits there no longer."""
    waits = _waiting.get(path)
    if waits is None:
        _remove(path)
    else:
        waits()


def sweep(directory: Path) -> None:
    """Takes away what lies at places of this directory where nobody waits."""
    for path in sorted({path for path, _ in _lying(directory)}):
        # Whoever takes away waits there meanwhile, so that nobody else begins to.
        try:
            descriptor = _claim(_wanted(path))
        except OSError as error:
            if error.errno == errno.ELOOP:
                # A link: nobody can wait there.
                _remove(path)
            continue
        if descriptor is not None:
            try:
                _remove(path)
            finally:
                os.close(descriptor)


def _wanted(path: Path) -> Path:
    return path.with_name(path.name + _WANTED)


def _lock(path: Path) -> int:
    """Makes and locks the file of who waits; its descriptor."""
    for _ in range(_TRIES):
        try:
            descriptor = _claim(path)
        except BlockingIOError:
            # Somebody sweeps, and has it for a moment.
            descriptor = None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            # Where files cannot be locked nobody sweeps either.
            return _made(path)
        if descriptor is not None:
            return descriptor
        time.sleep(_PAUSE_S)
    raise BlockingIOError(errno.EAGAIN, "somebody else waits there")


def _claim(path: Path) -> int | None:
    """A descriptor of the file of who waits, made and locked; None where it was taken away in between.

    Raises:
        BlockingIOError: Somebody else has it.
    """
    descriptor = _made(path)
    try:
        hold(descriptor)
        if os.path.samestat(os.fstat(descriptor), path.lstat()):
            return descriptor
    except FileNotFoundError:
        pass
    except OSError:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None


def _made(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def _look(path: Path) -> int | None:
    """A descriptor to ask whether somebody waits; None where there is no file of anybody's."""
    try:
        return os.open(_wanted(path), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ELOOP):
            return None
        raise


def _lying(directory: Path) -> Iterator[tuple[Path, Path]]:
    """The files of ours in a directory, each after the place that it is of."""
    try:
        entries = sorted(directory.iterdir())
    except OSError:
        return
    for entry in entries:
        found = _OURS.fullmatch(entry.name)
        with suppress(OSError):
            status = entry.lstat()
            if found is not None and stat.S_ISREG(status.st_mode) and status.st_uid == os.getuid():
                yield directory / found[1], entry


def _remove(path: Path) -> None:
    files = [file for place, file in _lying(path.parent) if place == path]
    # The file of who waits last: what lies without one is anybody's to take away.
    for file in sorted(files, key=lambda file: file == _wanted(path)):
        with suppress(OSError):
            file.unlink()


def _end(path: Path, descriptor: int) -> None:
    _waiting.pop(path, None)
    _remove(path)
    os.close(descriptor)
