"""Counts what the requests that finish say of lengths, and tells where they say nothing for long."""

from __future__ import annotations

import logging
from collections import Counter

from .labels import Kind, Label
from .metrics import MetricsWriter

LOG = logging.getLogger("vllm.leap_rs")

UNTAUGHT = 500
"""So many in a row of which none is a label are told."""


class Ends:
    """The ends of one engine. All but `left_out` is for the brain's own thread."""

    def __init__(self, metrics: MetricsWriter) -> None:
        self._metrics = metrics
        self._left_out: Counter[Kind] = Counter()
        self._counted: Counter[Kind] = Counter()
        self._untaught: Counter[Kind] = Counter()
        self._told = False

    @property
    def overflow(self) -> int:
        """Labels that nobody has learned from, since too many waited."""
        return self._left_out[Kind.EXACT] + self._left_out[Kind.CENSORED]

    def left_out(self, what: Label) -> None:
        """One that is learned from no more, for too many wait already; on the scheduler's thread."""
        self._left_out[what.kind] += 1

    def catch_up(self) -> None:
        """Counts those that were left out."""
        for kind in Kind:
            more = self._left_out[kind] - self._counted[kind]
            self._counted[kind] += more
            if more:
                self._add(kind, more)

    def add(self, what: Label) -> None:
        """One that has finished."""
        self._add(what.kind, 1)

    def _add(self, kind: Kind, requests: int) -> None:
        self._metrics.add("labels", requests, kind.value)
        if kind in (Kind.EXACT, Kind.CENSORED):
            if self._untaught:
                self._untaught.clear()
                self._metrics.set("nothing_to_learn", 0.0)
            return
        self._untaught[kind] += requests
        if self._untaught.total() < UNTAUGHT:
            return
        self._metrics.set("nothing_to_learn", 1.0)
        if not self._told:
            self._told = True
            kinds = ", ".join(f"{count} {kind.value}" for kind, count in sorted(self._untaught.items()))
            LOG.warning(
                "leap: the last %d requests that finished say nothing of natural lengths (%s), so nothing is learned from "
                "them: an answer that a client's stop string ends is aborted, and one of a set length is forced",
                self._untaught.total(),
                kinds,
            )
