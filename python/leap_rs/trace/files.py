"""Files that are read, unpacked where they are compressed, with a `TraceError` where one cannot be."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import stat
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, BinaryIO

from leap_rs._leap import TraceError
from leap_rs.writing import reason as reason

HEAD_BYTES = 4096
MAGIC = b"PAR1"
"""What a Parquet file begins and ends with."""


def existing_file(path: str | os.PathLike[str]) -> Path:
    """The path, if it is a file that can be opened."""
    path = Path(path)
    if path.is_dir():
        raise TraceError(f"{path}: is a directory, not a trace file")
    try:
        # Asked before it is opened, which would wait for a named pipe's writer.
        regular = stat.S_ISREG(path.stat().st_mode)
        start = b""
        if regular:
            with path.open("rb") as file:
                start = file.read(len(MAGIC))
    except (OSError, ValueError) as error:
        raise TraceError(f"{path}: cannot be read: {reason(error)}") from error
    if not regular:
        raise TraceError(f"{path}: is a pipe or a device: a trace is read more than once, so save it to a file first")
    if start == MAGIC:
        require_utf8(path)
    return path


def require_utf8(path: Path, what: str = "the name of a Parquet file") -> None:
    """`TraceError` where polars, which takes names as text, could not find what is named."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise TraceError(f"{path}: {what} must be UTF-8 in this locale") from None


_COMPRESSIONS = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"BZh": "bzip2", b"\xfd7zXZ\x00": "xz"}


def compression(path: Path) -> str | None:
    """How the file is compressed, by its first bytes."""
    with path.open("rb") as file:
        start = file.read(8)
    return next((name for magic, name in _COMPRESSIONS.items() if start.startswith(magic)), None)


def opened(path: Path) -> BinaryIO:
    """The file's content, unpacked where it is compressed. Reading raises `OSError` where that is damaged."""
    packed = compression(path)
    if packed is None:
        return path.open("rb")
    return io.BufferedReader(_Unpacked(path, packed), 1 << 20)


class _Unpacked(io.RawIOBase):
    """A compressed file's content."""

    def __init__(self, path: Path, packed: str) -> None:
        self._file = _unpacking(path, packed)
        self._packed = packed

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            data = self._file.read(len(buffer))
        except (EOFError, OSError, ValueError, zlib.error, lzma.LZMAError) as error:
            raise self._damaged(error) from error
        except Exception as error:
            if type(error).__name__ != "ZstdError":
                raise
            raise self._damaged(error) from error
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        self._file.close()
        super().close()

    def _damaged(self, error: Exception) -> OSError:
        return OSError(f"the {self._packed} data is damaged or cut off: {error}")


class _Zstd:
    """The content of zstd frames, one behind the other. The library's own stream takes one that is cut off for whole."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("rb")
        self._frame: Any = None
        self._data = b""

    def read(self, size: int) -> bytes:
        import zstandard

        while not self._data and (packed := self._file.read(io.DEFAULT_BUFFER_SIZE)):
            while packed:
                if self._frame is None or self._frame.eof:
                    self._frame = zstandard.ZstdDecompressor().decompressobj()
                self._data += self._frame.decompress(packed)
                packed = self._frame.unused_data
        if not self._data and self._frame is not None and not self._frame.eof:
            raise EOFError("a frame ends in the middle")
        taken, self._data = self._data[:size], self._data[size:]
        return taken

    def close(self) -> None:
        self._file.close()


def _unpacking(path: Path, packed: str) -> IO[bytes] | _Zstd:
    if packed == "zstd":
        return _Zstd(path)
    unpack: dict[str, Callable[[Path], Any]] = {"gzip": gzip.open, "bzip2": bz2.open, "xz": lzma.open}
    unpacked: IO[bytes] = unpack[packed](path)
    return unpacked


def head(path: Path) -> bytes:
    """The first bytes of the file, unpacked: enough for a magic number or a header line."""
    with opened(path) as file:
        return file.read(HEAD_BYTES)
