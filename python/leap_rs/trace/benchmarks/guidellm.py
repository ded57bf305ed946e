"""GuideLLM's `benchmarks.json`, versions 1 and 2: a report with a benchmark a rate, and all requests of each by their fate."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from leap_rs._leap import TraceError
from leap_rs.trace import requests
from leap_rs.trace.benchmarks.several import chosen
from leap_rs.trace.jsonrows import EntryError
from leap_rs.trace.jsontext import documents, shown
from leap_rs.trace.model import Raw, ReadOptions
from leap_rs.trace.nested import NestedReader, at, embedded, listed, moment, placed, text, time, tokens
from leap_rs.trace.opening import JSON
from leap_rs.trace.requests import CLIENT_QUEUE, E2EL, FAILED, TTFT, UNFINISHED, Request, asked, seconds

_TIMES = "info.timings"
_DUE, _START = f"{_TIMES}.targeted_start", f"{_TIMES}.request_start"
_FATES = {"successful": "", "incomplete": UNFINISHED, "errored": FAILED}

Benchmark = tuple[int, dict[str, Any]]


class GuideLlmReader(NestedReader):
    """The planned arrival is the targeted start; the benchmarks of a report are one behind the other on one clock."""

    name = "guidellm"
    description = "GuideLLM JSON (metadata.guidellm_version, benchmarks)"
    own_options = ("run",)
    kinds = (JSON,)
    keys = ("metadata.guidellm_version",)
    also = ("benchmarks", "metadata.version")

    def raw(self, path: Path, options: ReadOptions) -> Raw:
        """See `ForeignReader`."""
        options.refuse_unit(path, "the times of GuideLLM are seconds")
        found = chosen(path, benchmarks(path), options)
        return requests.raw(
            path,
            partial(_requests, path, found),
            options,
            source=self.name,
            names={"arrival_s": _DUE, "prompt_tokens": "prompt_tokens", "output_tokens": "output_tokens"},
            place="request",
        )


def benchmarks(path: Path) -> list[dict[str, Any]]:
    """The benchmarks of a report. `TraceError` where it holds none."""
    reports = [report.get("benchmarks") for report in documents(path)]
    found = [one for benchmarks in reports if isinstance(benchmarks, list) for one in benchmarks]
    if not found:
        raise TraceError(f"{path}: key 'benchmarks': expected a list of benchmarks, found {shown(reports[:1])}")
    for number_, one in enumerate(found, start=1):
        if not isinstance(one, dict) or not isinstance(one.get("requests"), dict):
            raise TraceError(f"{path}: benchmark {number_}: expected an object with requests, found {shown(one)}")
    return found


def _listed(path: Path, benchmark: int, found: object, name: str) -> list[Any]:
    with placed(path, "benchmark", benchmark):
        return listed(found, name)


def _requests(path: Path, found: Sequence[Benchmark]) -> Iterator[Request]:
    """All requests; their place counts through the file, the chosen benchmarks of it, from 1."""
    place = 0
    for benchmark, one in found:
        for fate, why in _FATES.items():
            for entry in _listed(path, benchmark, one["requests"].get(fate), f"requests.{fate}"):
                place += 1
                with placed(path, f"benchmark {benchmark}, requests.{fate}, request", place):
                    request = _request(place, entry, why)
                yield request


def _request(place: int, entry: object, why: str) -> Request:
    if not isinstance(entry, dict):
        raise EntryError(f"expected an object, found {shown(entry)}")
    if why:
        return Request(place, None, None, left_out=why)
    prompt = tokens(entry, "prompt_tokens", "input_metrics.total_tokens")
    output = tokens(entry, "output_tokens", "output_metrics.total_tokens")
    due = time(entry, "s", _DUE, _START, f"{_TIMES}.resolve_start")
    body = embedded(entry.get("request_args"))
    inner = body.get("body")

    def since(*names: str) -> float | None:
        times = (moment(entry, "s", f"{_TIMES}.{name}") for name in names)
        return seconds(next((found for found in times if found is not None), None), due)

    return Request(
        place,
        prompt,
        output,
        due,
        columns={
            **asked(inner if isinstance(inner, dict) else body, output),
            "request_id": text(entry.get("request_id")),
            "session": text(at(entry, "info.conversation_id")),
            "model": text((inner if isinstance(inner, dict) else body).get("model")),
            TTFT: since("first_token_iteration"),
            E2EL: since("last_token_iteration", "request_end"),
            # Clocks are read one after the other: a request can seem to have left before it was due.
            CLIENT_QUEUE: since("request_start") or 0.0,
        },
    )
