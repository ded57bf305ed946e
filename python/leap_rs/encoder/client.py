"""The engine's side of the encoder: prompts are handed over and rows come back later. Nothing here blocks or raises."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import select
import selectors
import signal
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import BinaryIO, cast

import numpy as np
import numpy.typing as npt

from leap_rs._leap import ENCODER_BACKLOG

from . import frames
from .frames import Answer, Ids
from .source import EncoderInfo

BATCH = 32
SEEN = 4096
"""Rows that are kept for prompts that come again."""
ENDS = 4096
"""Of a longer prompt than twice this many tokens its beginning and its end are read."""

Row = npt.NDArray[np.float32]

# Of the engine's process, and not to be inherited: they would bind the encoder to the engine's cores.
_BINDING = ("GOMP_CPU_AFFINITY", "KMP_AFFINITY", "OMP_PLACES", "OMP_PROC_BIND")
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "POLARS_MAX_THREADS", "RAYON_NUM_THREADS")


@dataclass(frozen=True)
class ClientSettings:
    """What the encoder's process is started with."""

    info: EncoderInfo
    tokenizer: str
    """Path or name of the served model's tokenizer, which makes texts of token ids."""
    threads: int = 1
    device: str = "cpu"
    backlog: int | None = ENCODER_BACKLOG
    """Prompts that may wait; None: all, and none is skipped."""


@dataclass
class _Prompt:
    ids: Ids
    keys: list[str] = field(default_factory=list)


class EncoderClient:
    """Has prompts read by an encoder in a process of its own.

    Args:
        settings: The encoder.
        on_rows: Called from the client's own thread when there is something in `rows()`.
        tell: Told once, in a line, that there will be no more rows, and why.
    """

    def __init__(self, settings: ClientSettings, on_rows: Callable[[], None], tell: Callable[[str], None]) -> None:
        self.read = self.seen_before = self.skipped = 0
        self.seconds = 0.0
        """Spent by the process on the prompts that it read."""
        self._settings = settings
        self._on_rows = on_rows
        self._tell = tell
        self._lock = threading.Lock()
        self._waiting: OrderedDict[bytes, _Prompt] = OrderedDict()
        self._reading: dict[bytes, _Prompt] = {}
        self._batch: list[bytes] = []
        """Those that were sent together, in that order; rows come in parts."""
        self._digests: dict[str, bytes] = {}
        self._rows: list[tuple[str, Row | None]] = []
        self._seen: OrderedDict[bytes, Row] = OrderedDict()
        self._alive, self._closing = True, False
        self._process: subprocess.Popen[bytes] | None = None
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="leap-encoder", daemon=True)
        self._thread.start()

    def ask(self, key: str, token_ids: Sequence[int]) -> None:
        """Wants the row of a prompt. Never blocks; from any thread."""
        ids = _cut(token_ids)
        digest = b"" if ids is None else hashlib.blake2b(ids.tobytes(), digest_size=16).digest()
        with self._lock:
            if ids is None or not self._alive:
                self._rows.append((key, None))
            elif (row := self._seen.get(digest)) is not None:
                self._seen.move_to_end(digest)
                self.seen_before += 1
                self._rows.append((key, row))
            else:
                self._queue(key, digest, ids)
            self._notify()

    def forget(self, key: str) -> None:
        """The row of that prompt is no longer wanted: it is not read if it still waits."""
        with self._lock:
            digest = self._digests.pop(key, None)
            prompt = None if digest is None else self._waiting.get(digest) or self._reading.get(digest)
            if digest is None or prompt is None:
                return
            prompt.keys.remove(key)
            if not prompt.keys:
                self._waiting.pop(digest, None)

    def rows(self) -> list[tuple[str, Row | None]]:
        """Those that have come in since the last call; None: skipped, or will never come."""
        with self._lock:
            came, self._rows = self._rows, []
        return came

    @property
    def backlog(self) -> int:
        """Prompts that wait or are being read."""
        return len(self._waiting) + len(self._reading)

    @property
    def alive(self) -> bool:
        """Whether rows may still come."""
        return self._alive

    def close(self) -> None:
        """Ends the process; rows that have not come will not."""
        with self._lock:
            self._closing = True
            if self._process is not None:
                self._process.kill()
            self._notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _queue(self, key: str, digest: bytes, ids: Ids) -> None:
        prompt = self._waiting.get(digest) or self._reading.get(digest)
        if prompt is None:
            prompt = self._waiting[digest] = _Prompt(ids)
            limit = self._settings.backlog
            if limit is not None and len(self._waiting) > limit:
                _, oldest = self._waiting.popitem(last=False)
                self.skipped += len(oldest.keys)
                self._answer(oldest, None)
        else:
            self.seen_before += 1
        prompt.keys.append(key)
        self._digests[key] = digest

    def _answer(self, prompt: _Prompt, row: Row | None) -> None:
        for key in prompt.keys:
            self._digests.pop(key, None)
            self._rows.append((key, row))

    def _notify(self) -> None:
        if self._wake >= 0:
            os.eventfd_write(self._wake, 1)

    def _run(self) -> None:
        try:
            self._serve()
        except (EOFError, BrokenPipeError):
            self._end(_how_it_ended(self._process))
        except Exception as error:
            self._end(str(error))
        self._stop()
        # What is asked from now on is answered too.
        wake = select.poll()
        wake.register(self._wake, select.POLLIN)
        while not self._closing:
            self._hand_over()
            wake.poll()
            os.eventfd_read(self._wake)
        with self._lock:
            self._alive = False
            os.close(self._wake)
            self._wake = -1

    def _stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()

    def _hand_over(self) -> None:
        if self._rows:
            self._on_rows()

    def _end(self, why: str) -> None:
        with self._lock:
            self._alive = False
            for prompt in (*self._reading.values(), *self._waiting.values()):
                self._answer(prompt, None)
            self._reading.clear()
            self._waiting.clear()
        if not self._closing:
            self._tell(f"the text encoder {self._settings.info.name} reads no prompts: {why}")

    def _serve(self) -> None:
        to_process, from_process = self._start()
        loaded = False
        with selectors.DefaultSelector() as selector:
            selector.register(from_process, selectors.EVENT_READ)
            selector.register(self._wake, selectors.EVENT_READ)
            while not self._closing:
                for event, _ in selector.select():
                    if event.fd == self._wake:
                        os.eventfd_read(self._wake)
                        continue
                    answer, payload = frames.read_answer(from_process)
                    if answer is Answer.FAILED:
                        raise RuntimeError(payload.decode())
                    if answer is Answer.READY:
                        loaded = True
                    else:
                        self._take(payload)
                self._hand_over()
                if loaded and (prompts := self._next_batch()):
                    frames.write_prompts(to_process, prompts)

    def _start(self) -> tuple[BinaryIO, BinaryIO]:
        """The process's standard input and output."""
        settings = json.dumps(dataclasses.asdict(self._settings))
        environment = {name: value for name, value in os.environ.items() if name not in _BINDING}
        environment |= dict.fromkeys(_THREADS, str(self._settings.threads))
        environment |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        # oneDNN keeps what it has compiled for a size, of which prompts have hundreds: a gigabyte, and no faster than with fewer.
        environment.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "128")
        if self._settings.device == "cpu":
            environment["CUDA_VISIBLE_DEVICES"] = ""
        # A session of its own: Ctrl-C is for the server, which ends it.
        process = subprocess.Popen(  # noqa: S603 — its own interpreter and module
            [sys.executable, "-m", "leap_rs.encoder.process", settings],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            start_new_session=True,
        )
        with self._lock:
            self._process = process
        return cast(BinaryIO, process.stdin), cast(BinaryIO, process.stdout)

    def _next_batch(self) -> list[Ids]:
        """What is to be read now; nothing while a batch is being read."""
        with self._lock:
            if self._reading:
                return []
            while self._waiting and len(self._reading) < BATCH:
                digest, prompt = self._waiting.popitem(last=False)
                self._reading[digest] = prompt
            self._batch = list(self._reading)
            return [prompt.ids for prompt in self._reading.values()]

    def _take(self, payload: bytes) -> None:
        places, rows, seconds = frames.unpack_rows(payload)
        with self._lock:
            self.seconds += seconds
            self.read += len(places)
            for place, row in zip(places, rows, strict=True):
                digest = self._batch[place]
                usable = bool(np.isfinite(row).all())
                self._answer(self._reading.pop(digest), row if usable else None)
                if usable:
                    self._seen[digest] = row
                if len(self._seen) > SEEN:
                    self._seen.popitem(last=False)


def _cut(token_ids: Sequence[int]) -> Ids | None:
    if len(token_ids) > 2 * ENDS:
        token_ids = [*token_ids[:ENDS], *token_ids[-ENDS:]]
    try:
        return np.asarray(token_ids, dtype=np.uint32)
    except (OverflowError, TypeError, ValueError):
        return None


def _how_it_ended(process: subprocess.Popen[bytes] | None) -> str:
    code = process.wait() if process is not None else 0
    if code < 0:
        return f"its process was ended by {signal.Signals(-code).name}"
    return f"its process ended with status {code}; the log says more"
