"""inference-perf's `per_request_lifecycle_metrics.json`: a list with an object a request, in the order of their ends."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from leap_rs.trace.benchmarks.rows import RowsReader
from leap_rs.trace.nested import at, embedded, moment, text, time, tokens
from leap_rs.trace.opening import JSON_LIST
from leap_rs.trace.requests import E2EL, FAILED, TTFT, Request, asked, seconds

_PROMPT = ("info.request_metrics.text.input_tokens", "info.input_tokens")
_OUTPUT = ("info.response_metrics.output_tokens", "info.output_tokens")
_TIMES = ("info.response_metrics.output_token_times", "info.response_metrics.chunk_times", "info.output_token_times")


class InferencePerfReader(RowsReader):
    """Times are seconds of a clock of the client's own; the lengths are counted by its tokenizer, as it counts them."""

    name = "inference-perf"
    description = "inference-perf JSON (start_time, end_time, request, info, error)"
    kinds = (JSON_LIST,)
    keys = ("start_time", "end_time", "info", "request")
    also = ("error", "response")
    further = ("session_id",)
    names: ClassVar[Mapping[str, str]] = {
        "arrival_s": "start_time",
        "prompt_tokens": _PROMPT[0],
        "output_tokens": _OUTPUT[0],
    }

    def request(self, place: int, entry: dict[str, Any]) -> Request:
        """See `RowsReader`."""
        if entry.get("error"):
            return Request(place, None, None, left_out=FAILED)
        prompt, output = tokens(entry, *_PROMPT), tokens(entry, *_OUTPUT)
        body = embedded(entry.get("request"))
        start = time(entry, "s", "start_time")
        first, last = _ends(entry)
        return Request(
            place,
            prompt,
            output,
            start,
            columns={
                **asked(body, output),
                "model": text(body.get("model")),
                "session": text(entry.get("session_id")),
                TTFT: seconds(first, start),
                E2EL: seconds(last if last is not None else moment(entry, "s", "end_time"), start),
            },
        )


def _ends(entry: dict[str, Any]) -> tuple[int | None, int | None]:
    """When its first and its last token came."""
    for path in _TIMES:
        times = at(entry, path)
        if isinstance(times, list) and times:
            first, last = (moment({"at": times[one]}, "s", "at") for one in (0, -1))
            return first, last
    return None, None
