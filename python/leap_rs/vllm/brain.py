"""What the scheduler asks of prediction, and all that it asks. No call may block a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from leap_rs._leap import RemainingTable

from .metrics import MetricsWriter

Row = npt.NDArray[np.float32] | npt.NDArray[np.float16]
Reason = Literal["stop", "length", "abort", "error"]


@runtime_checkable
class Brain(Protocol):
    """Predicts the lengths of live requests, and learns from those that finish."""

    @property
    def armed(self) -> bool:
        """Whether the schedule may follow the predictions."""

    @property
    def version(self) -> int:
        """Grows when the predictions of all live requests have changed, so that each is asked for once more."""

    def arrived(
        self, request_id: str, prompt_token_ids: Sequence[int], max_tokens: int, min_tokens: int, ignore_eos: bool
    ) -> None:
        """A request has come in."""

    def state(self, request_id: str, row: Row) -> None:
        """The hidden state (d,) of a request's last prompt token has come in."""

    def remaining_key(self, request_id: str, generated: int) -> float:
        """Natural logarithm of the remaining length by the order in force, before the aging and memory terms."""

    def finished(self, request_id: str, reason: Reason, output_tokens: int) -> None:
        """A request has ended."""

    def save(self) -> None:
        """The engine is about to shut down, or pauses: what was learned is worth saving now."""

    def close(self) -> None:
        """The engine shuts down."""


class MeanRemaining(Protocol):
    """A brain that also knows the mean remaining length, from which the memory term of a key is made.

    Under the orders countdown and survival that is what the key holds; the Gittins order's is in other units.
    """

    def mean_remaining(self, request_id: str, generated: int) -> float:
        """Expected tokens to come."""


class KnownLengths(Protocol):
    """A brain that also knows whole distributions, by which admission control looks ahead at the KV cache."""

    def table(self, request_id: str) -> RemainingTable | None:
        """What is known of a request's length; None where nothing is that has proven itself."""


class Fresh(Protocol):
    """A brain to which more becomes known of single requests while they wait."""

    def fresh(self) -> Sequence[str]:
        """The requests of which more is known than when this was asked last: a new key for each is enough."""


class Counted(Protocol):
    """A brain with metrics, to which the scheduler adds those of its own: no metric is written by both."""

    metrics: MetricsWriter


class Watcher:
    """A brain that never arms: the schedule stays vLLM's own."""

    armed = False
    version = 0

    def arrived(self, *args: Any, **kwargs: Any) -> None: ...

    def state(self, request_id: str, row: Row) -> None: ...

    def remaining_key(self, request_id: str, generated: int) -> float:  # noqa: ARG002
        return 0.0

    def finished(self, request_id: str, reason: Reason, output_tokens: int) -> None: ...

    def save(self) -> None: ...

    def close(self) -> None: ...
