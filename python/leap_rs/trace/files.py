"""File access that fails with a `TraceError` and never leaves a half-written file behind."""

from __future__ import annotations

import os
import re
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from leap_rs._leap import LeapError, TraceError

HEAD_BYTES = 4096

_SYSTEM_ERROR = re.compile(r"\(os error (\d+)\)")


def existing_file(path: str | os.PathLike[str]) -> Path:
    """The path, if it is a file that can be opened."""
    path = Path(path)
    if path.is_dir():
        raise TraceError(f"{path}: is a directory, not a trace file")
    try:
        # Asked before it is opened, which would wait for a named pipe's writer.
        regular = stat.S_ISREG(path.stat().st_mode)
        if regular:
            path.open("rb").close()
    except (OSError, ValueError) as error:
        raise TraceError(f"{path}: cannot be read: {reason(error)}") from error
    if not regular:
        raise TraceError(f"{path}: is a pipe or a device: a trace is read more than once, so save it to a file first")
    return path


def head(path: Path) -> bytes:
    """The first bytes of the file, enough for a magic number or a header line."""
    with path.open("rb") as file:
        return file.read(HEAD_BYTES)


@contextmanager
def replacing(path: Path, error: type[LeapError] = TraceError) -> Iterator[Path]:
    """A temporary name in the directory of `path`, renamed to `path` when the block ends well and removed when not.

    Raises `error` where that cannot be done.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        yield temporary
        temporary.replace(path)
    except OSError as fault:
        raise error(f"{path}: cannot be written: {reason(fault)}") from fault
    finally:
        # Where nothing can be written there is nothing to remove either, and the first error is the one to tell.
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def reason(error: BaseException) -> str:
    """The error's own words on one line, without the file name that the caller puts in front."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    text = " ".join(str(error).split())
    # polars wraps what the system said in words of its own, the temporary file's name among them.
    code = _SYSTEM_ERROR.search(text)
    return os.strerror(int(code[1])) if code else text
