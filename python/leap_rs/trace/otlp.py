"""OpenTelemetry spans of language models, as a collector writes them to a file: vLLM's own, and those of the standard.

A server with `--otlp-traces-endpoint` tells every request so: when it came, its tokens, its limits, and the times measured.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from leap_rs.trace import requests
from leap_rs.trace.files import head
from leap_rs.trace.jsonrows import EntryError
from leap_rs.trace.jsontext import Entry, shown
from leap_rs.trace.model import Raw, ReadOptions
from leap_rs.trace.nested import NestedReader, counted, listed, number, objects, placed, text, time, whole
from leap_rs.trace.opening import JSON, JSON_LIST, Fit, Opening, opened
from leap_rs.trace.requests import E2EL, FAILED, TTFT, Request, ended, sampling

_BEGIN = re.compile(rb'\s*\[?\s*\{\s*"resourceSpans"\s*:')
_WHOLE = re.compile(r"-?\d{1,20}", re.ASCII)
_KEY = "resourceSpans"
_VLLM = "llm_request"
_PROMPT = ("gen_ai.usage.prompt_tokens", "gen_ai.usage.input_tokens")
_OUTPUT = ("gen_ai.usage.completion_tokens", "gen_ai.usage.output_tokens")
_IDS = ("gen_ai.request.id", "gen_ai.response.id")
_MODELS = ("gen_ai.response.model", "gen_ai.request.model")
_QUEUE, _TTFT, _E2EL = (f"gen_ai.latency.{name}" for name in ("time_in_queue", "time_to_first_token", "e2e"))
_ERRORS = (2, "STATUS_CODE_ERROR")


class OtlpReader(NestedReader):
    """Spans of requests; those that vLLM writes are preferred, since a client's own span of the same request may be there."""

    name = "otlp"
    description = "OpenTelemetry spans JSON (resourceSpans, with gen_ai.usage attributes)"
    kinds = (JSON, JSON_LIST)
    keys = (_KEY,)

    def fit(self, opening: Opening) -> Fit:
        """See `Reader`."""
        if opening.kind in self.kinds and not opening.names and _begins(opening.path):
            # A single object of all spans may be longer than what a look at the file reads.
            return Fit((_KEY,))
        return super().fit(opening)

    def raw(self, path: Path, options: ReadOptions) -> Raw:
        """See `ForeignReader`."""
        options.refuse_unit(path, "the times of spans are nanoseconds")
        vllm = any(span.get("name") == _VLLM for _, span in _spans(path))
        found = requests.raw(
            path,
            partial(_requests, path, vllm=vllm),
            options,
            source=self.name,
            names={"arrival_s": "startTimeUnixNano", "prompt_tokens": _PROMPT[0], "output_tokens": _OUTPUT[0]},
            place="span",
        )
        if found.metadata.get("source") and not vllm:
            found.notes.append(f"no spans '{_VLLM}' of vLLM: every span with {_OUTPUT[1]} counts as a request")
        return found


def _begins(path: Path) -> bool:
    try:
        return _BEGIN.match(head(path).removeprefix(b"\xef\xbb\xbf")) is not None
    except OSError:
        return False


def _spans(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """All spans of a file, counted from 1."""
    start = opened(path)
    place = 0
    for entry in objects(path, start):
        with placed(path, start.row, entry.number):
            spans = _inside(entry)
        for span in spans:
            place += 1
            yield place, span


def _inside(entry: Entry) -> list[dict[str, Any]]:
    # A collector may write metrics and logs into the same file, which have other keys.
    found = [entry.value]
    for key in (_KEY, "scopeSpans", "spans"):
        found = [one for parent in found for one in listed(parent.get(key), key)]
        for one in found:
            if not isinstance(one, dict):
                raise EntryError(f"key '{key}': expected a list of objects, found {shown(one)} in it")
    return found


def _requests(path: Path, *, vllm: bool) -> Iterator[Request]:
    for place, span in _spans(path):
        if vllm and span.get("name") != _VLLM:
            continue
        with placed(path, "span", place):
            attributes = _attributes(span)
            prompt, output = (_tokens(attributes, keys) for keys in (_PROMPT, _OUTPUT))
            request = _request(place, span, attributes, prompt, output)
        if vllm or prompt is not None or output is not None:
            yield request


def _request(
    place: int, span: dict[str, Any], attributes: dict[str, Any], prompt: int | None, output: int | None
) -> Request:
    status = span.get("status")
    if isinstance(status, dict) and status.get("code") in _ERRORS:
        return Request(place, prompt, output, left_out=FAILED)
    heat, mass = attributes.get("gen_ai.request.temperature"), attributes.get("gen_ai.request.top_p")
    if span.get("name") == _VLLM and heat is None and mass is not None:
        # vLLM leaves out what is 0, and greedy requests so.
        heat = 0
    reasons = attributes.get("gen_ai.response.finish_reasons")
    ends = [end for one in reasons if (end := ended(one))] if isinstance(reasons, list) else []
    return Request(
        place,
        prompt,
        output,
        time(span, "ns", "startTimeUnixNano") if prompt and output else None,
        columns={
            "max_tokens": whole(attributes.get("gen_ai.request.max_tokens")),
            **sampling(heat, mass),
            "finish_reason": ends[0] if ends else None,
            "request_id": _first(attributes, _IDS),
            "session": text(attributes.get("gen_ai.conversation.id")),
            "model": _first(attributes, _MODELS),
            TTFT: number(attributes.get(_TTFT)),
            E2EL: number(attributes.get(_E2EL)),
            "time_in_queue_s": number(attributes.get(_QUEUE)),
        },
    )


def _first(attributes: dict[str, Any], keys: tuple[str, ...]) -> str | None:
    return next((found for key in keys if (found := text(attributes.get(key)))), None)


def _tokens(attributes: dict[str, Any], keys: tuple[str, ...]) -> int | None:
    key = next((key for key in keys if attributes.get(key) is not None), None)
    return None if key is None else counted(attributes[key], key)


def _attributes(span: dict[str, Any]) -> dict[str, Any]:
    """By their names; one that is not as the protocol has it is as good as none."""
    found: dict[str, Any] = {}
    for one in listed(span.get("attributes"), "attributes"):
        if isinstance(one, dict) and isinstance(key := one.get("key"), str):
            found[key] = _value(one.get("value"))
    return found


def _value(value: object) -> object:
    """What a typed value holds. 64-bit numbers are strings there."""
    if not isinstance(value, dict):
        return None
    if "intValue" in value:
        found = value["intValue"]
        return int(found) if isinstance(found, str) and _WHOLE.fullmatch(found) else found
    if isinstance(many := value.get("arrayValue"), dict):
        return [_value(one) for one in many["values"]] if isinstance(many.get("values"), list) else []
    return next((value[kind] for kind in ("doubleValue", "stringValue", "boolValue") if kind in value), None)
