"""Writes what an engine serves as a leap trace with features, in parts that are each a valid trace.

The scheduler's thread hands over a finished request and goes on; a thread of the recorder's own pools its prompt and
writes a part every so many requests, every so many seconds, and at the end. Whatever goes wrong with a disk, serving goes
on: what is lost is counted, and told once.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from leap_rs._leap import LeapError, PromptFeatures, TraceError
from leap_rs.trace import schema, write_trace
from leap_rs.trace.files import reason as reason_of
from leap_rs.trace.parts import START_KEY, part_name

from .embedding import pooled
from .labels import Kind, Limits, label

LOG = logging.getLogger("vllm.leap_rs")

PART_REQUESTS = 256
PART_S = 60.0
POLL_S = 0.2
CLOSE_S = 10.0
"""So long an engine that shuts down waits for the last part."""
TEXT_S = 60.0
"""So long the last part waits for the next row of a text encoder, which may still be loading."""
MOST_WAITING = 4096
"""Finished requests that may wait with their prompts: more only where a disk hangs, or the text encoder is far behind."""
MOST_ROWS = 4096
"""Rows that are kept in memory while they cannot be written."""


@dataclass(slots=True)
class Text:
    """The text encoder's row of a prompt."""

    came: bool = False
    row: npt.NDArray[np.float32] | None = None
    """None also where it came and there is none, for the encoder has ended."""


@dataclass(frozen=True, slots=True)
class Served:
    """A finished request."""

    number: int
    """Place in the order of arrival."""
    request_id: str
    arrival_s: float
    prompt_token_ids: Sequence[int]
    output_tokens: int
    max_tokens: int
    finish_reason: str
    forced: bool
    temperature: float
    top_p: float
    row: npt.NDArray[Any] | None
    """Its hidden state; None where none was captured."""
    text: Text | None
    """The text encoder's row of its prompt; None where it was asked for none."""


class Recorder:
    """Writes the parts of one engine to a directory of its own in `directory`.

    Args:
        directory: That of the recording; made with the first part.
        engine: Number of the engine.
        metadata: What the trace says of itself: model, layer, source.
        prompt_features: Pools prompts; without it a prompt's features are those of its length.
        part_requests: Requests a part.
        text: Whether the trace has the rows of a text encoder.
    """

    def __init__(
        self,
        directory: Path,
        engine: int,
        metadata: Mapping[str, Any],
        prompt_features: PromptFeatures | None = None,
        part_requests: int = PART_REQUESTS,
        *,
        text: bool = False,
    ) -> None:
        self.recorded = 0
        self.lost = 0
        """Requests that belong into the trace and are not there."""
        self._directory, self._engine = directory, engine
        self._metadata = {**metadata, START_KEY: repr(time.time())}
        self._pooling = prompt_features
        self._part_requests = part_requests
        self._own: Path | None = None
        self._parts = 0
        self._text = text
        self._texts: dict[str, Text] = {}
        self._text_s = 0.0
        self._waiting: deque[Served] = deque()
        self._unread: list[Served] = []
        self._refused = self._counted = 0
        self._rows: list[tuple[Served, npt.NDArray[np.float32]]] = []
        self._failing = False
        self._due_s = 0.0
        self._hurries = False
        self._told: set[str] = set()
        self._over = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="leap-recorder", daemon=True)
        self._thread.start()

    def expect_text(self, request_id: str) -> None:
        """The text encoder was asked for the row of a request's prompt; on the scheduler's thread."""
        if not self._over:
            self._texts[request_id] = Text()

    def text(self, request_id: str, row: npt.NDArray[np.float32] | None) -> None:
        """The row has come, or never will; on any thread."""
        self._text_s = time.monotonic()
        text = self._texts.get(request_id)
        if text is not None:
            text.row, text.came = row, True

    def finished(self, request: Any, reason: str, number: int, arrival_s: float, row: npt.NDArray[Any] | None) -> None:
        """Takes a finished request; on the scheduler's thread, which waits for nothing here.

        Args:
            request: vLLM's own.
            reason: `stop`, `length`, `abort` or `error`.
            number: Its place in the order of arrival.
            arrival_s: Seconds from the start of the engine.
            row: Its hidden state (d,), which nobody will change; None where there is none.
        """
        try:
            self._hand_over(request, reason, number, arrival_s, row)
        except Exception:
            self._end()
            LOG.exception("leap: %s: recording has stopped, and the server goes on", self._place())

    def _hand_over(
        self, request: Any, reason: str, number: int, arrival_s: float, row: npt.NDArray[Any] | None
    ) -> None:
        # A trace has no place for a request that was aborted before its first token.
        belongs = request.num_output_tokens >= 1 and not self._over
        if not belongs or len(self._waiting) + len(self._unread) >= MOST_WAITING:
            self._refused += belongs
            self._texts.pop(request.request_id, None)
            return
        sampling, tokens = request.sampling_params, request.num_output_tokens
        limits = Limits(
            request.max_tokens,
            int(getattr(sampling, "min_tokens", 0) or 0),
            bool(getattr(sampling, "ignore_eos", False)),
        )
        served = Served(
            number=number,
            request_id=request.request_id,
            arrival_s=arrival_s,
            prompt_token_ids=request.prompt_token_ids or (),
            output_tokens=tokens,
            max_tokens=max(request.max_tokens, tokens),
            finish_reason=reason if reason in ("stop", "length") else "abort",
            forced=label(limits, reason, tokens).kind is Kind.FORCED,
            temperature=float(getattr(sampling, "temperature", 1.0)),
            top_p=float(getattr(sampling, "top_p", 1.0)),
            row=row,
            text=self._texts.get(request.request_id),
        )
        self._waiting.append(served)

    def save(self) -> None:
        """Has what is there written now, without waiting for it: the engine is about to end, and may be killed."""
        self._due_s = 0.0
        self._hurries = True

    def no_more(self) -> None:
        """No other request will be handed over, and no row of the text encoder either."""
        for text in tuple(self._texts.values()):
            text.came = True
        self._texts.clear()

    def close(self) -> None:
        """Writes what is left, and stops."""
        if self._stop.is_set():
            return
        self._stop.set()
        self._text_s = time.monotonic()
        most = CLOSE_S + (TEXT_S if self._text else 0.0)
        while self._thread.is_alive() and time.monotonic() < self._text_s + most:
            self._thread.join(POLL_S)
        if self._thread.is_alive():
            LOG.warning("leap: %s: the last part of the recording was not written within %g s", self._place(), CLOSE_S)
        elif self.recorded or self.lost:
            LOG.info("leap: %s: %d requests recorded, %d lost", self._place(), self.recorded, self.lost)

    # What the recorder's own thread does.

    def _work(self) -> None:
        last = False
        while not last:
            stopping = self._stop.wait(POLL_S)
            try:
                self._turn(at_once=False)
                last = stopping and (not self._unread or time.monotonic() > self._text_s + TEXT_S)
                if last:
                    self._turn(at_once=True)
                elif stopping:
                    time.sleep(POLL_S)
            except Exception:
                # Serving matters more than recording.
                self._end()
                LOG.exception("leap: %s: recording has stopped, and the server goes on", self._place())
                return

    def _end(self) -> None:
        """Nothing is recorded any more."""
        self._over = True
        self._waiting.clear()
        self._texts.clear()

    def _turn(self, *, at_once: bool) -> None:
        waiting, self._unread = self._unread, []
        while self._waiting:
            waiting.append(self._waiting.popleft())
        for served in waiting:
            if served.text is not None and not served.text.came and not at_once:
                self._unread.append(served)
                continue
            self._texts.pop(served.request_id, None)
            self._take(served)
            if len(self._rows) >= self._part_requests and not self._failing:
                self._write()
        refused = self._refused
        if refused > self._counted:
            self._lose(refused - self._counted, "full", "they finished faster than the disk took them")
            self._counted = refused
        if self._rows and (at_once or time.monotonic() >= self._due_s):
            self._write()
        self._hurries = self._hurries and bool(self._unread)

    def _take(self, served: Served) -> None:
        if served.row is None or not np.isfinite(served.row).all():
            self._lose(1, "row", "no usable hidden state was captured of them")
            return
        text = served.text.row if served.text is not None else None
        if self._text and served.prompt_token_ids and (text is None or not np.isfinite(text).all()):
            self._lose(1, "text", "the text encoder has not read their prompts")
            return
        if len(self._rows) >= MOST_ROWS:
            self._lose(1, "full", "they finished faster than the disk took them")
            return
        try:
            if not served.prompt_token_ids:
                raise ValueError("a prompt without tokens")
            features = pooled(self._pooling, served.prompt_token_ids)
        except (LeapError, OverflowError, ValueError, TypeError) as error:
            self._lose(1, "prompt", f"their prompts have no features: {error}")
            return
        if not self._rows:
            self._due_s = time.monotonic() + (0.0 if self._hurries else PART_S)
        self._rows.append((served, features))

    def _write(self) -> None:
        rows = len(self._rows)
        try:
            frame = schema.checked(_frame(self._rows), self._place(), {})
        except TraceError as error:
            self._rows.clear()
            self._lose(rows, "unfit", f"they make no trace: {error}")
            return
        try:
            path = self._made() / part_name(self._parts + 1)
            write_trace(frame, path, **self._metadata)
        except (LeapError, OSError) as error:
            # They stay, and are tried again after a while: a disk that is full now may have room later.
            self._failing, self._due_s = True, time.monotonic() + PART_S
            text = str(error) if isinstance(error, LeapError) else f"{self._place()}: {reason_of(error)}"
            self._tell("failing", f"nothing is recorded for now, and the server goes on: {text}")
            return
        self._parts += 1
        self.recorded += rows
        self._rows.clear()
        if self._failing:
            self._failing = False
            self._told.discard("failing")
            LOG.info("leap: %s: recording again", self._place())

    def _made(self) -> Path:
        """The engine's own directory: one that no other recording has, also where the server was started before."""
        self._directory.mkdir(parents=True, exist_ok=True)
        number = 1
        while self._own is None:
            own = self._directory / f"engine-{self._engine}{'' if number == 1 else f'-{number}'}"
            number += 1
            try:
                own.mkdir()
            except FileExistsError:
                continue
            self._own = own
        return self._own

    def _place(self) -> Path:
        return self._own or self._directory

    def _lose(self, requests: int, key: str, why: str) -> None:
        self.lost += requests
        self._tell(key, f"some requests are not recorded (their number is told at the end): {why}")

    def _tell(self, key: str, text: str) -> None:
        """Warns, once of each kind."""
        if key not in self._told:
            self._told.add(key)
            LOG.warning("leap: %s: %s", self._place(), text)


def _frame(rows: Sequence[tuple[Served, npt.NDArray[np.float32]]]) -> pl.DataFrame:
    """The requests in the order of their arrival. Either all of them have a row of the text encoder, or none has."""
    ordered = sorted(rows, key=lambda pair: pair[0].number)
    served = [one for one, _ in ordered]

    def column(name: str, dtype: Any, of: Callable[[Served], Any]) -> pl.Series:
        return pl.Series(name, [of(one) for one in served], dtype=dtype)

    texts = [one.text.row for one in served if one.text is not None and one.text.row is not None]
    return pl.DataFrame(
        [
            column("request_id", pl.String, lambda one: one.request_id),
            column("arrival_s", pl.Float64, lambda one: one.arrival_s),
            column("prompt_tokens", pl.UInt32, lambda one: len(one.prompt_token_ids)),
            column("output_tokens", pl.UInt32, lambda one: one.output_tokens),
            column("max_tokens", pl.UInt32, lambda one: one.max_tokens),
            column("finish_reason", pl.String, lambda one: one.finish_reason),
            column("forced", pl.Boolean, lambda one: one.forced),
            column("temperature", pl.Float32, lambda one: one.temperature),
            column("top_p", pl.Float32, lambda one: one.top_p),
            pl.Series("features", np.stack([one.row for one in served if one.row is not None])),
            pl.Series("prompt_features", np.stack([features for _, features in ordered])),
            *([pl.Series("text_features", np.stack(texts))] if texts else []),
        ]
    )
