"""How files are written: whole or not at all, and never in the place of what is no plain file."""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from leap_rs._leap import LeapError

_MOST_LINKS = 40  # as Linux
_SYSTEM_ERROR = re.compile(r"\(os error (\d+)\)")

_unfinished: set[Path] = set()


@contextmanager
def replacing(path: Path, error: type[LeapError] = LeapError) -> Iterator[Path]:
    """A temporary file beside `path`, which takes its place when the block ends well and is removed when not.

    Links are followed, and what they lead to is replaced. A file that is there keeps its mode, a new one gets what the
    umask leaves. A device, a pipe or a descriptor is no file to replace: what the block wrote is written into it.
    Raises `error` where that cannot be done.
    """
    try:
        target, there, descriptor = _followed(path)
        through = descriptor is not None or (there is not None and not stat.S_ISREG(there.st_mode))
        if there is not None and descriptor is None and (refused := _refused(there)):
            raise error(f"{path}: cannot be written: {refused}")
        with _temporary(Path(tempfile.gettempdir()) if through else target.parent) as temporary:
            # Nobody may read on the way what the mode of the file that is there keeps from them.
            mode = 0o666 if there is None else 0o600
            os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, mode))
            yield temporary
            if through:
                _write_into(target, descriptor, temporary)
                return
            if there is not None:
                _take_after(there, temporary)
            temporary.replace(target)
    except OSError as fault:
        raise error(f"{path}: cannot be written: {reason(fault)}") from fault


@contextmanager
def temporary_directory(directory: Path) -> Iterator[Path]:
    """A directory in `directory` that is removed with all that is in it when the block ends."""
    with _temporary(directory) as temporary:
        temporary.mkdir()
        yield temporary


def obstacle(path: Path) -> str | None:
    """Why a file could not be written under this name, as far as that can be told before it is made."""
    try:
        target, there, descriptor = _followed(path)
    except OSError as error:
        return reason(error)
    if descriptor is not None:
        return None
    if there is not None and (refused := _refused(there)):
        return refused
    if there is not None and not stat.S_ISREG(there.st_mode):
        return None if os.access(target, os.W_OK) else os.strerror(errno.EACCES)
    if not target.parent.is_dir():
        return f"there is no directory {target.parent if path.is_symlink() else path.parent}"
    return None if os.access(target.parent, os.W_OK) else f"the directory {path.parent} cannot be written to"


def remove_unfinished() -> None:
    """Removes every temporary file, for a process that ends at once."""
    for temporary in list(_unfinished):
        _remove(temporary)


def reason(error: BaseException) -> str:
    """The error's own words on one line, without the file name that the caller puts in front."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    text = " ".join(str(error).split())
    # polars wraps what the system said in words of its own, the temporary file's name among them.
    code = _SYSTEM_ERROR.search(text)
    return os.strerror(int(code[1])) if code else text


def _followed(path: Path) -> tuple[Path, os.stat_result | None, int | None]:
    """What the links of a path lead to, what is there, and the number of the descriptor of ours that it is."""
    for _ in range(_MOST_LINKS):
        parent = Path(os.path.realpath(path.parent))
        # A link of the kernel's own: its text may name a file, but what is open there is meant (/dev/stdout).
        if parent == Path(f"/proc/{os.getpid()}/fd") and path.name.isdecimal():
            return path, path.stat(), int(path.name)
        here = parent / path.name
        if not here.is_symlink():
            try:
                return here, here.stat(), None
            except FileNotFoundError:
                return here, None, None
        path = parent / here.readlink()
    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))


def _refused(there: os.stat_result) -> str | None:
    if stat.S_ISDIR(there.st_mode):
        return "it is a directory"
    return "it is a disk" if stat.S_ISBLK(there.st_mode) else None


@contextmanager
def _temporary(directory: Path) -> Iterator[Path]:
    """A name of its own, as long for a long name as for a short one; whatever then has it is removed."""
    temporary = directory / f".leap-{secrets.token_hex(4)}.tmp"
    _unfinished.add(temporary)
    try:
        yield temporary
    finally:
        _remove(temporary)
        _unfinished.discard(temporary)


def _remove(temporary: Path) -> None:
    # Where nothing can be written there is nothing to remove either, and the first error is the one to tell.
    with suppress(OSError):
        if temporary.is_dir():
            shutil.rmtree(temporary, ignore_errors=True)
        else:
            temporary.unlink(missing_ok=True)


def _take_after(there: os.stat_result, temporary: Path) -> None:
    new = temporary.stat()
    if (new.st_uid, new.st_gid) != (there.st_uid, there.st_gid):
        # Only root may give files away.
        with suppress(OSError):
            os.chown(temporary, there.st_uid, there.st_gid)
    mode = stat.S_IMODE(there.st_mode) & 0o777
    if stat.S_IMODE(new.st_mode) != mode:
        temporary.chmod(mode)


def _write_into(target: Path, descriptor: int | None, temporary: Path) -> None:
    if descriptor is None:
        descriptor = os.open(target, os.O_WRONLY | os.O_CLOEXEC)
    else:
        if sys.stdout is not None:
            sys.stdout.flush()
        descriptor = os.dup(descriptor)
    with temporary.open("rb") as whole, os.fdopen(descriptor, "wb") as into:
        shutil.copyfileobj(whole, into)
