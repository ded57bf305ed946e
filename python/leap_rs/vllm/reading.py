"""What is read of a prompt: its features, at once, and the row of the text encoder, a moment after its arrival.

One encoder serves all that want its rows: the brain, and the recorder where what is served is recorded. Without a recorder
the encoder reads what the brain learns from and nothing else, and skips what it falls too far behind with.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from leap_rs.encoder.client import ClientSettings, EncoderClient
from leap_rs.encoder.source import EncoderInfo

from .metrics import MetricsWriter
from .recorder import Recorder

Row = npt.NDArray[np.float32]

MOST_ROWS = 4096
"""That wait for the brain's thread: memory stays bounded where it hangs."""


class Reading:
    """The text encoder of an engine, which may have none. No call waits for it.

    Args:
        settings: Which encoder, and where it runs; None: there is none.
        recorder: Where what is served is recorded: it is given every prompt's row, so none is skipped.
        client: Makes the client; for tests.
    """

    def __init__(
        self,
        settings: ClientSettings | None = None,
        recorder: Recorder | None = None,
        client: Callable[..., EncoderClient] = EncoderClient,
    ) -> None:
        if settings is not None and recorder is not None:
            settings = replace(settings, backlog=None)
        self._settings = settings
        self._recorder = recorder
        self._make = client
        self._client: EncoderClient | None = None
        self._rows: deque[tuple[str, Row]] = deque(maxlen=MOST_ROWS)

    @property
    def info(self) -> EncoderInfo | None:
        """What reads; None where nothing does."""
        return None if self._settings is None else self._settings.info

    def start(self, wake: Callable[[], None], tell: Callable[[str], None]) -> None:
        """Starts the encoder; `wake` is called when there is something in `rows`, and on another thread."""
        if self._settings is not None:
            self._client = self._make(self._settings, functools.partial(self._hand_on, wake), tell)

    def ask(self, request_id: str, prompt_token_ids: Sequence[int], *, teaches: bool) -> None:
        """Has a prompt read that the brain learns from; one that it does not learn from for the recorder alone."""
        if self._client is None or not len(prompt_token_ids) or not (teaches or self._recorder is not None):
            return
        if self._recorder is not None:
            self._recorder.expect_text(request_id)
        self._client.ask(request_id, prompt_token_ids)

    def forget(self, request_id: str) -> None:
        """A request has ended: its row is of use to the recorder alone."""
        if self._client is not None and self._recorder is None:
            self._client.forget(request_id)

    def rows(self) -> Iterator[tuple[str, Row]]:
        """The rows that have come in since the last call."""
        while self._rows:
            yield self._rows.popleft()

    def show(self, metrics: MetricsWriter) -> None:
        """Writes the metrics of the encoder."""
        client = self._client
        if client is None:
            return
        for outcome, count in (("read", client.read), ("seen_before", client.seen_before), ("skipped", client.skipped)):
            metrics.set("encoder_prompts", count, outcome)
        metrics.set("encoder_seconds", client.seconds)
        metrics.set("encoder_backlog", client.backlog)
        metrics.set("encoder_up", float(client.alive))

    def close(self) -> None:
        """Ends the encoder's process."""
        if self._client is not None:
            self._client.close()
        self._rows.clear()

    def _hand_on(self, wake: Callable[[], None]) -> None:
        """On the client's own thread."""
        rows: list[tuple[str, Any]] = [] if self._client is None else self._client.rows()
        for request_id, row in rows:
            if row is not None:
                self._rows.append((request_id, row))
            if self._recorder is not None:
                self._recorder.text(request_id, row)
        wake()
