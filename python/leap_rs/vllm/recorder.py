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

from .labels import Kind, Limits, label

LOG = logging.getLogger("vllm.leap_rs")

PART_REQUESTS = 256
PART_S = 60.0
POLL_S = 0.2
CLOSE_S = 10.0
"""So long an engine that shuts down waits for the last part."""
MOST_WAITING = 4096
"""Finished requests that may wait for the recorder's thread, prompts included: more only where a disk hangs."""
MOST_ROWS = 4096
"""Rows that are kept in memory while they cannot be written."""


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


class Recorder:
    """Writes the parts of one engine to a directory of its own in `directory`.

    Args:
        directory: That of the recording; made with the first part.
        engine: Number of the engine.
        metadata: What the trace says of itself: model, layer, source.
        prompt_features: Pools prompts; without it a prompt's features are those of its length.
        part_requests: Requests a part.
    """

    def __init__(
        self,
        directory: Path,
        engine: int,
        metadata: Mapping[str, Any],
        prompt_features: PromptFeatures | None = None,
        part_requests: int = PART_REQUESTS,
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
        self._waiting: deque[Served] = deque()
        self._refused = self._counted = 0
        self._rows: list[tuple[Served, npt.NDArray[np.float32]]] = []
        self._failing = False
        self._due_s = 0.0
        self._told: set[str] = set()
        self._over = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="leap-recorder", daemon=True)
        self._thread.start()

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
            self._over = True
            LOG.exception("leap: %s: recording has stopped, and the server goes on", self._place())

    def _hand_over(
        self, request: Any, reason: str, number: int, arrival_s: float, row: npt.NDArray[Any] | None
    ) -> None:
        # A trace has no place for a request that was aborted before its first token.
        if self._over or request.num_output_tokens < 1:
            return
        if len(self._waiting) >= MOST_WAITING:
            self._refused += 1
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
        )
        self._waiting.append(served)

    def close(self) -> None:
        """Writes what is left, and stops."""
        if self._stop.is_set():
            return
        self._stop.set()
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            LOG.warning("leap: %s: the last part of the recording was not written within %g s", self._place(), CLOSE_S)
        elif self.recorded or self.lost:
            LOG.info("leap: %s: %d requests recorded, %d lost", self._place(), self.recorded, self.lost)

    # What the recorder's own thread does.

    def _work(self) -> None:
        last = False
        while not last:
            last = self._stop.wait(POLL_S)
            try:
                self._turn(at_once=last)
            except Exception:
                # Serving matters more than recording.
                self._over = True
                self._waiting.clear()
                LOG.exception("leap: %s: recording has stopped, and the server goes on", self._place())
                return

    def _turn(self, *, at_once: bool) -> None:
        while self._waiting:
            self._take(self._waiting.popleft())
            if len(self._rows) >= self._part_requests and not self._failing:
                self._write()
        refused = self._refused
        if refused > self._counted:
            self._lose(refused - self._counted, "full", "they finished faster than the disk took them")
            self._counted = refused
        if self._rows and (at_once or time.monotonic() >= self._due_s):
            self._write()

    def _take(self, served: Served) -> None:
        if served.row is None or not np.isfinite(served.row).all():
            self._lose(1, "row", "no usable hidden state was captured of them")
            return
        if len(self._rows) >= MOST_ROWS:
            self._lose(1, "full", "they finished faster than the disk took them")
            return
        try:
            pooled = self._pool(served.prompt_token_ids)
        except (LeapError, OverflowError, ValueError, TypeError) as error:
            self._lose(1, "prompt", f"their prompts have no features: {error}")
            return
        if not self._rows:
            self._due_s = time.monotonic() + PART_S
        self._rows.append((served, pooled))

    def _pool(self, prompt_token_ids: Sequence[int]) -> npt.NDArray[np.float32]:
        if not prompt_token_ids:
            raise ValueError("a prompt without tokens")
        if self._pooling is None:
            return PromptFeatures.length_features(len(prompt_token_ids))
        return self._pooling.pool(np.asarray(prompt_token_ids, dtype=np.uint32))

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
    """The requests in the order of their arrival."""
    ordered = sorted(rows, key=lambda pair: pair[0].number)
    served = [one for one, _ in ordered]

    def column(name: str, dtype: Any, of: Callable[[Served], Any]) -> pl.Series:
        return pl.Series(name, [of(one) for one in served], dtype=dtype)

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
            pl.Series("prompt_features", np.stack([pooled for _, pooled in ordered])),
        ]
    )
