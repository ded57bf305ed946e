"""LLMPerf's `individual_responses.json`: a list with an object a request, without the time at which it was sent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from leap_rs.trace.benchmarks.rows import RowsReader
from leap_rs.trace.nested import number, tokens
from leap_rs.trace.opening import JSON_LIST
from leap_rs.trace.requests import E2EL, FAILED, TTFT, Request

_PROMPT, _OUTPUT, _CODE = "number_input_tokens", "number_output_tokens", "error_code"


class LlmperfReader(RowsReader):
    """A request with an error code has failed, whatever lengths stand there."""

    name = "llmperf"
    description = "LLMPerf JSON (number_input_tokens, number_output_tokens, error_code)"
    kinds = (JSON_LIST,)
    keys = (_PROMPT, _OUTPUT)
    also = (_CODE, "ttft_s", "end_to_end_latency_s")
    names: ClassVar[Mapping[str, str]] = {"prompt_tokens": _PROMPT, "output_tokens": _OUTPUT}
    no_times = "LLMPerf keeps none"

    def request(self, place: int, entry: dict[str, Any]) -> Request:
        """See `RowsReader`."""
        if entry.get(_CODE) is not None:
            return Request(place, None, None, left_out=FAILED)
        measured = {TTFT: number(entry.get("ttft_s")), E2EL: number(entry.get("end_to_end_latency_s"))}
        return Request(place, tokens(entry, _PROMPT), tokens(entry, _OUTPUT), columns={**measured})
