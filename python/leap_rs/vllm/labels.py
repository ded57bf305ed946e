"""Which finished requests say something about natural output lengths.

Learning from one that did not end by itself would push every later prediction up: a forced length is the client's choice,
an aborted or failed request says nothing, and one that ended at its limit says only "at least this long".
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from leap_rs._leap import is_settled

MARGIN = 1.25
"""An answer within this factor of its `min_tokens` may have been kept from ending sooner."""


class Kind(str, Enum):
    """What a finished request says of its natural length."""

    EXACT = "exact"
    CENSORED = "censored"
    FORCED = "forced"
    ABORTED = "aborted"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Limits:
    """What a client asked of the length of one answer."""

    max_tokens: int
    min_tokens: int = 0
    ignore_eos: bool = False

    @property
    def forced(self) -> bool:
        """Whether the length is settled before the first token, at `max_tokens`."""
        return is_settled(self.max_tokens, self.min_tokens, self.ignore_eos)


@dataclass(frozen=True, slots=True)
class Label:
    """What there is to learn from a finished request; `tokens` is at least 1 where it is a label."""

    kind: Kind
    tokens: int

    @property
    def taught(self) -> bool:
        """Whether the readouts learn from it."""
        return self.kind in (Kind.EXACT, Kind.CENSORED)

    @property
    def censored(self) -> bool:
        """Whether the natural length is at least `tokens`, and not `tokens`."""
        return self.kind is Kind.CENSORED


def label(limits: Limits, reason: str, output_tokens: int) -> Label:
    """The label of a finished request.

    Args:
        limits: What its client asked for.
        reason: `stop`, `length`, `abort` or `error`; anything else counts as `error`.
        output_tokens: Tokens that it generated, the end token counted.
    """
    return Label(_kind(limits, reason, output_tokens), output_tokens)


def _kind(limits: Limits, reason: str, output_tokens: int) -> Kind:
    if reason == "abort":
        return Kind.ABORTED
    if reason not in ("stop", "length") or output_tokens < 1:
        return Kind.FAILED
    if limits.forced:
        return Kind.FORCED
    # One token at least is what every answer has anyway.
    pushed = limits.min_tokens > 1
    if reason == "length":
        # Had it not been kept from ending, it might never have come this far.
        return Kind.FORCED if pushed else Kind.CENSORED
    return Kind.FORCED if pushed and output_tokens <= MARGIN * limits.min_tokens else Kind.EXACT
