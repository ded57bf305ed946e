"""What goes over the pipes between the client and the encoder's process: binary, since it is all numbers."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.uint32]
Rows = npt.NDArray[np.float32]

_COUNT = struct.Struct("<I")
_ANSWER = struct.Struct("<BI")
_ROWS = struct.Struct("<dII")


class Answer(IntEnum):
    """What the process says."""

    READY = 0
    """It has loaded its model."""
    ROWS = 1
    FAILED = 2
    """It cannot go on; the text says why."""


def write_prompts(pipe: BinaryIO, prompts: Sequence[Ids]) -> None:
    """Sends a batch."""
    sizes = np.array([len(ids) for ids in prompts], dtype=np.uint32)
    pipe.write(b"".join([_COUNT.pack(len(prompts)), sizes.tobytes(), *(ids.tobytes() for ids in prompts)]))
    pipe.flush()


def read_prompts(pipe: BinaryIO) -> list[Ids]:
    """The next batch. `EOFError` where there will be none."""
    (count,) = _COUNT.unpack(_exactly(pipe, _COUNT.size))
    sizes = np.frombuffer(_exactly(pipe, 4 * count), dtype=np.uint32)
    ids = np.frombuffer(_exactly(pipe, 4 * int(sizes.sum())), dtype=np.uint32)
    return list(np.split(ids, np.cumsum(sizes)[:-1]))


def write_answer(pipe: BinaryIO, answer: Answer, payload: bytes = b"") -> None:
    """Sends what the client gets from `read_answer`."""
    pipe.write(_ANSWER.pack(answer, len(payload)) + payload)
    pipe.flush()


def read_answer(pipe: BinaryIO) -> tuple[Answer, bytes]:
    """The next answer. `EOFError` where there will be none."""
    answer, size = _ANSWER.unpack(_exactly(pipe, _ANSWER.size))
    return Answer(answer), _exactly(pipe, size)


def pack_rows(places: Sequence[int], rows: Rows, seconds: float) -> bytes:
    """Rows of a batch: where in it they stand, and how long they took."""
    return _ROWS.pack(seconds, *rows.shape) + np.array(places, dtype=np.uint32).tobytes() + rows.tobytes()


def unpack_rows(payload: bytes) -> tuple[list[int], Rows, float]:
    """See `pack_rows`."""
    seconds, count, width = _ROWS.unpack_from(payload)
    places = np.frombuffer(payload, dtype=np.uint32, count=count, offset=_ROWS.size)
    rows = np.frombuffer(payload, dtype=np.float32, offset=_ROWS.size + places.nbytes)
    return places.tolist(), rows.reshape(count, width), seconds


def _exactly(pipe: BinaryIO, size: int) -> bytes:
    data = pipe.read(size)
    if len(data) < size:
        raise EOFError
    return data
