from typing import Literal

import numpy as np
import numpy.typing as npt

class LeapError(ValueError):
    """An input or option that leap-rs cannot use."""

class TraceError(LeapError):
    """A trace cannot be used."""

class ReadoutError(LeapError):
    """A readout, its anchor or its features cannot be used."""

class ConfigError(LeapError):
    """An option cannot be used."""

def remaining(
    score: npt.ArrayLike,
    noise: npt.ArrayLike,
    generated: npt.ArrayLike,
    cap: npt.ArrayLike,
    *,
    kind: Literal["countdown", "survival", "gittins"] = "survival",
    objective: Literal["ptl", "e2el"] = "ptl",
) -> npt.NDArray[np.float64]:
    """Remaining tokens of n requests, by which they are ordered; shape (n,), at least 1 each.

    ``score`` and ``noise`` are mean and deviation of sqrt(output tokens), ``generated`` and ``cap`` tokens so far and at
    most; each is a number or has shape (n,).

    ``countdown`` is max(score**2 - generated, 1). ``survival`` is E[min(L, cap) - generated | L > generated] with
    sqrt(L) normal; ``cap`` may be infinite. ``gittins`` is 1 / Gittins index under ``objective``: tokens for ``e2el``
    (every completion counts 1), tokens squared for ``ptl`` (a completion counts 1 / L).

    Raises ConfigError naming the first value that cannot be used.
    """

def select_slots(
    remaining: npt.ArrayLike,
    arrival_s: npt.ArrayLike,
    steps_waited: npt.ArrayLike,
    slots: int,
    *,
    aging_rate: float,
    wait_cap_steps: int | None,
) -> npt.NDArray[np.uint32]:
    """Indices, ascending, of the residents that get the ``slots`` decode slots of a step.

    ``remaining`` (tokens), ``arrival_s`` and ``steps_waited`` (steps since a resident last decoded) have shape (n,).
    Residents that waited ``wait_cap_steps`` or more go first, the longest waiting ahead; then the smallest
    ln(remaining) + aging_rate * arrival_s; ties by index. O(n).

    Raises ConfigError naming the first value that cannot be used.
    """

class AgingQueue:
    """Waiting requests, the smallest ln(remaining) + aging_rate * arrival_s first; equal keys first in, first out.

    A request of S1 remaining tokens is overtaken by one of S2 < S1 only if that one arrived less than
    ln(S1 / S2) / aging_rate seconds later (plus the difference of the memory terms over the rate). This holds for
    requests that the engine could admit: not for one that waits for a LoRA slot, a grammar or remote KV.
    """

    def __init__(self, aging_rate: float, *, memory_weight: float = 0.0, wait_cap_s: float | None = None) -> None:
        """``aging_rate`` per second; ``memory_weight`` adds memory_weight * ln(memory_tokens) to the keys; a request
        that has waited longer than ``wait_cap_s`` goes first, the oldest ahead, wherever ``now_s`` is given.

        Raises ConfigError for a value that is negative or not finite.
        """

    @property
    def aging_rate(self) -> float: ...
    def push(self, id: int, remaining: float, arrival_s: float, *, memory_tokens: float = 1.0) -> None:
        """Add request ``id`` (0 to 2**64 - 1). ``memory_tokens`` is the KV cache that it will hold on average.

        Raises ConfigError where the id is in already, or a value cannot be used.
        """

    def pop(self, now_s: float | None = None) -> int:
        """Take out the request that goes first. Raises IndexError when empty."""

    def peek(self, now_s: float | None = None) -> int:
        """The request that ``pop`` would take. Raises IndexError when empty."""

    def remove(self, id: int) -> None:
        """Take out request ``id``. Raises KeyError when it is not in."""

    def rekey(self, id: int, remaining: float, *, memory_tokens: float | None = None) -> None:
        """Give request ``id`` new remaining tokens; arrival and place among ties stay. Raises KeyError when it is not
        in, ConfigError where a value cannot be used."""

    def __len__(self) -> int: ...
    def __contains__(self, id: object) -> bool: ...
