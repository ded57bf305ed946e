"""File access that fails with a `TraceError` and never leaves a half-written file behind."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from leap_rs._leap import TraceError

HEAD_BYTES = 4096


def existing_file(path: str | os.PathLike[str]) -> Path:
    """The path, if it is a file that can be opened."""
    path = Path(path)
    if path.is_dir():
        raise TraceError(f"{path}: is a directory, not a trace file")
    try:
        with path.open("rb"):
            return path
    except (OSError, ValueError) as error:
        raise TraceError(f"{path}: cannot be read: {reason(error)}") from error


def head(path: Path) -> bytes:
    """The first bytes of the file, enough for a magic number or a header line."""
    with path.open("rb") as file:
        return file.read(HEAD_BYTES)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary name in the directory of `path`, renamed to `path` when the block ends well and removed when not."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        yield temporary
        temporary.replace(path)
    except OSError as error:
        raise TraceError(f"{path}: cannot be written: {reason(error)}") from error
    finally:
        temporary.unlink(missing_ok=True)


def reason(error: BaseException) -> str:
    """The error's own words on one line, without the file name that the caller puts in front."""
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return " ".join(text.split())
