"""One guard around all that is the plugin's: the first fault gives vLLM its own order for good, and the engine serves on."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

from .compat import LOG
from .metrics import MetricsWriter


class Guard:
    """Runs what is the plugin's until the first fault, which is told and counted; after it nothing is run any more.

    One for an engine: the scheduler, its queues, admission control and the brain's own thread share it.
    """

    def __init__(self, metrics: MetricsWriter | None = None) -> None:
        self.fault: str | None = None
        self._metrics = metrics
        self._lock = threading.Lock()

    def call(self, function: Callable[..., Any], *arguments: Any, otherwise: Any = None) -> Any:
        """What `function` returns; `otherwise` where it fails, and once anything has failed."""
        return otherwise if self.fault is not None else self.always(function, *arguments, otherwise=otherwise)

    def always(self, function: Callable[..., Any], *arguments: Any, otherwise: Any = None) -> Any:
        """As `call`, and also after a fault: for what lets go of things."""
        try:
            return function(*arguments)
        except Exception as error:
            self.failed(error)
            return otherwise

    def failed(self, error: Exception) -> None:
        """Takes a fault down. Serving matters more than ordering."""
        with self._lock:
            if self.fault is not None:
                return
            self.fault = f"{type(error).__name__}: {error}"
        if self._metrics is not None:
            self._metrics.add("faults")
        # Not even a handler of the log that fails may end what is guarded.
        with contextlib.suppress(Exception):
            LOG.error(
                "leap: a fault of the plugin: from now on the order is first come first served and nothing is learned",
                exc_info=error,
            )
