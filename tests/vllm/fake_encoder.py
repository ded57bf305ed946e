"""A text encoder that reads when it is told to, with the rows that it is given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from leap_rs._leap import ENCODER_BACKLOG
from leap_rs.encoder.client import ClientSettings
from leap_rs.encoder.source import EncoderInfo
from leap_rs.vllm.reading import Reading
from leap_rs.vllm.recorder import Recorder


def settings_of(width: int, name: str = "mini", layer: int = 4) -> ClientSettings:
    """An encoder that nobody loads."""
    return ClientSettings(EncoderInfo(name, f"/models/{name}", "bert", 6, layer, width), tokenizer="/models/served")


class FakeEncoder:
    """Stands where `EncoderClient` stands.

    Args:
        row_of: The row of a prompt by its token ids.
    """

    def __init__(self, row_of: Callable[[Sequence[int]], np.ndarray]) -> None:
        self.row_of = row_of
        self.asked: dict[str, list[int]] = {}
        self.waiting: list[str] = []
        self.forgotten: list[str] = []
        self.read = self.seen_before = self.skipped = 0
        self.seconds = 0.0
        self.alive = True
        self.closed = False
        self._came: list[tuple[str, Any]] = []

    def __call__(
        self, settings: ClientSettings, on_rows: Callable[[], None], tell: Callable[[str], None]
    ) -> FakeEncoder:
        self.settings, self._on_rows, self._tell = settings, on_rows, tell
        return self

    def reading(self, width: int, recorder: Recorder | None = None, **encoder: Any) -> Reading:
        """What the brain is given."""
        return Reading(settings_of(width, **encoder), recorder, self)  # type: ignore[arg-type]

    def ask(self, key: str, token_ids: Sequence[int]) -> None:
        assert key not in self.asked
        self.asked[key] = list(token_ids)
        if self.alive:
            self.waiting.append(key)
        else:
            self._came.append((key, None))
            self._on_rows()

    def forget(self, key: str) -> None:
        self.forgotten.append(key)
        if key in self.waiting:
            self.waiting.remove(key)

    def rows(self) -> list[tuple[str, Any]]:
        came, self._came = self._came, []
        return came

    @property
    def backlog(self) -> int:
        return len(self.waiting)

    def close(self) -> None:
        self.closed = True

    # What a test has happen.

    def deliver(self, *keys: str) -> None:
        """Reads these prompts, or all that wait."""
        for key in keys or tuple(self.waiting):
            self.waiting.remove(key)
            self._answer(key)
        self._on_rows()

    def skip(self, *keys: str) -> None:
        """Falls too far behind to read these."""
        for key in keys:
            self.waiting.remove(key)
            self.skipped += 1
            self._came.append((key, None))
        self._on_rows()

    def die(self) -> None:
        """Reads nothing any more."""
        self.alive = False
        self._came += [(key, None) for key in self.waiting]
        self.waiting.clear()
        self._tell("the text encoder mini reads no prompts: it was killed")
        self._on_rows()

    def _answer(self, key: str) -> None:
        self.read += 1
        self.seconds += 0.01
        self._came.append((key, np.asarray(self.row_of(self.asked[key]), dtype=np.float32)))


class TimedEncoder(FakeEncoder):
    """Reads one prompt after the other, first come first served, on a clock that is not the machine's.

    Who is asked for and who has ended in one moment come in the replayer's order: of those asked for the oldest are skipped
    first, then the ended are forgotten.

    Args:
        seconds: What a prompt takes.
        now: The clock.
    """

    def __init__(
        self, row_of: Callable[[Sequence[int]], np.ndarray], seconds: float, now: Callable[[], float] = lambda: 0.0
    ) -> None:
        super().__init__(row_of)
        self.now = now
        self.read_s: dict[str, float] = {}
        """When each prompt was read."""
        self._takes_s = seconds
        self._asked_s: dict[str, float] = {}
        self._ended: list[str] = []
        self._reads: str | None = None
        self._free_s = 0.0

    def ask(self, key: str, token_ids: Sequence[int]) -> None:
        super().ask(key, token_ids)
        self._asked_s[key] = self.now()
        self._read()
        if len(self.waiting) > ENCODER_BACKLOG:
            self.skip(self.waiting[0])

    def forget(self, key: str) -> None:
        self._ended.append(key)

    def catch_up(self) -> None:
        """Takes in all that has happened until now."""
        self._read()
        for key in self._ended:
            super().forget(key)
        self._ended.clear()
        self._on_rows()

    def _read(self) -> None:
        while self._free_s <= self.now() and (self._reads is not None or self.waiting):
            if self._reads is not None:
                self.read_s[self._reads] = self._free_s
                self._answer(self._reads)
                self._reads = None
            if self.waiting:
                self._reads = self.waiting.pop(0)
                self._free_s = max(self._free_s, self._asked_s[self._reads]) + self._takes_s
