"""AIPerf's `profile_export.jsonl`: a record a request, with its times and its metrics, warm-up among them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from leap_rs.trace.benchmarks.rows import RowsReader
from leap_rs.trace.nested import at, number, text, time, tokens, whole
from leap_rs.trace.opening import JSON
from leap_rs.trace.requests import CANCELLED, CLIENT_QUEUE, E2EL, FAILED, TTFT, Request

_DUE, _START = "metadata.credit_issued_ns", "metadata.request_start_ns"
_PROMPT, _OUTPUT = "metrics.input_sequence_length.value", "metrics.output_sequence_length.value"
_PER_SECOND = {"ns": 1e9, "us": 1e6, "ms": 1e3, "s": 1.0, "sec": 1.0}


class AiperfReader(RowsReader):
    """The planned arrival is when the load generator gave the request out, which is before a worker sent it."""

    name = "aiperf"
    description = "AIPerf JSONL (metadata.request_start_ns, metrics.input_sequence_length, ...)"
    kinds = (JSON,)
    keys = (_START, "metrics")
    also = (_DUE, "metadata.benchmark_phase")
    further = ("error",)
    names: ClassVar[Mapping[str, str]] = {"arrival_s": _DUE, "prompt_tokens": _PROMPT, "output_tokens": _OUTPUT}

    def request(self, place: int, entry: dict[str, Any]) -> Request:
        """See `RowsReader`."""
        why = _left_out(entry)
        if why:
            return Request(place, None, None, left_out=why)
        due = time(entry, "ns", _DUE, _START)
        start = whole(at(entry, _START))
        wait = max(start - due, 0) / 1e9 if start is not None else 0.0
        measured = {TTFT: _seconds(entry, "time_to_first_token"), E2EL: _seconds(entry, "request_latency")}
        return Request(
            place,
            tokens(entry, _PROMPT),
            tokens(entry, _OUTPUT),
            due,
            columns={
                "request_id": text(at(entry, "metadata.x_request_id")),
                # Conversations of a data set may be played more than once, each time under another correlation id.
                "session": text(at(entry, "metadata.x_correlation_id")) or text(at(entry, "metadata.conversation_id")),
                **{name: None if found is None else wait + found for name, found in measured.items()},
                CLIENT_QUEUE: wait,
            },
        )


def _left_out(entry: dict[str, Any]) -> str:
    if at(entry, "metadata.benchmark_phase") == "warmup":
        return "a warm-up request"
    if at(entry, "metadata.was_cancelled") is True:
        return CANCELLED
    return FAILED if entry.get("error") else ""


def _seconds(entry: dict[str, Any], metric: str) -> float | None:
    found, unit = number(at(entry, f"metrics.{metric}.value")), at(entry, f"metrics.{metric}.unit")
    scale = _PER_SECOND.get(unit) if isinstance(unit, str) else None
    return None if found is None or scale is None else found / scale
