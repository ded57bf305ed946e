"""SGLang's `bench_serving`, a result a line: lengths and latencies of its requests where `--output-details` was given.

It keeps no times of sending, so that its traffic has no arrivals.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from leap_rs._leap import TraceError
from leap_rs.trace import requests
from leap_rs.trace.benchmarks.several import chosen
from leap_rs.trace.jsontext import documents
from leap_rs.trace.model import LeftOut, Raw, ReadOptions
from leap_rs.trace.nested import NestedReader, counted, number, placed
from leap_rs.trace.opening import JSON, JSON_LIST
from leap_rs.trace.requests import E2EL, FAILED, TTFT, Request

_LENGTHS = ("input_lens", "output_lens")
_DETAILS = (*_LENGTHS, "ttfts", "itls", "errors")
_SUMMARY = "a result without its requests (run with --output-details)"


class SglangReader(NestedReader):
    """Results without details are left out where others have them, since the tool appends to the file of earlier runs."""

    name = "sglang"
    description = "sglang bench_serving JSONL (saved with --output-details)"
    own_options = ("run",)
    kinds = (JSON, JSON_LIST)
    keys = ("sharegpt_output_len", "random_input_len", "random_output_len", "duration")
    also = ("backend", "dataset_name", *_LENGTHS)

    def raw(self, path: Path, options: ReadOptions) -> Raw:
        """See `ForeignReader`."""
        options.refuse_unit(path, "the file has no times")
        results = documents(path)
        detailed = [one for one in results if _is_detailed(one)]
        if options.run is not None:
            detailed = [one for _, one in chosen(path, results, options) if _is_detailed(one)]
        if not detailed:
            raise TraceError(f"{path}: {_SUMMARY}")
        found = detailed if options.run is not None else [one for _, one in chosen(path, detailed, options)]
        raw = requests.raw(
            path,
            partial(_requests, path, found),
            options,
            source=self.name,
            names={"prompt_tokens": _LENGTHS[0], "output_tokens": _LENGTHS[1]},
            place="request",
            no_times="sglang bench_serving keeps none",
        )
        if options.run is None and (summaries := len(results) - len(detailed)):
            first = next(count for count, one in enumerate(results, start=1) if not _is_detailed(one))
            raw.left_out.append(LeftOut(_SUMMARY, summaries, f"result {first}"))
        return raw


def _is_detailed(result: dict[str, Any]) -> bool:
    return all(isinstance(result.get(key), list) for key in _LENGTHS)


def _requests(path: Path, results: Sequence[dict[str, Any]]) -> Iterator[Request]:
    place = 0
    for result in results:
        arrays = {key: result[key] for key in _DETAILS if isinstance(result.get(key), list)}
        for key, values in arrays.items():
            if len(values) != len(arrays[_LENGTHS[0]]):
                what = f"{len(values)} values, but {len(arrays[_LENGTHS[0]])} in '{_LENGTHS[0]}'"
                raise TraceError(f"{path}: key '{key}': {what}")
        for row in range(len(arrays[_LENGTHS[0]])):
            place += 1
            with placed(path, "request", place):
                request = _request(place, {key: values[row] for key, values in arrays.items()})
            yield request


def _request(place: int, found: dict[str, Any]) -> Request:
    if found.get("errors"):
        return Request(place, None, None, left_out=FAILED)
    prompt, output = (counted(found[key], key) for key in _LENGTHS)
    ttft, gaps = number(found.get("ttfts")), found.get("itls")
    later = [number(gap) for gap in gaps] if isinstance(gaps, list) else [None]
    known = [gap for gap in later if gap is not None]
    whole = ttft is not None and len(known) == len(later)
    return Request(
        place,
        prompt,
        output,
        columns={TTFT: ttft, E2EL: math.fsum([ttft, *known]) if whole and ttft is not None else None},
    )
