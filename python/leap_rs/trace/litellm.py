"""Spend logs of a LiteLLM proxy, as its database exports them: a row a call, as CSV, Parquet or JSON."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import polars as pl

from leap_rs.trace import requests, table
from leap_rs.trace.jsonrows import EntryError, Further
from leap_rs.trace.jsontext import shown
from leap_rs.trace.model import Raw, ReadOptions
from leap_rs.trace.nested import NestedReader, objects, placed, text, tokens
from leap_rs.trace.opening import CSV, JSON, JSON_LIST, PARQUET, Opening, opened
from leap_rs.trace.requests import E2EL, FAILED, TTFT, Request, seconds
from leap_rs.trace.times import dates

_KIND, _START, _PROMPT, _OUTPUT = "call_type", "startTime", "prompt_tokens", "completion_tokens"
_TIMES = (_START, "completionStartTime", "endTime")
_FURTHER = ("request_id", "status", "cache_hit", "model", "session_id", "team_id")
_GENERATING = ("completion", "messages", "responses", "generate_content")
"""What the names of calls that generate text end in, whatever API and whether asynchronous or not."""
_PART_ROWS = 20_000

Row = tuple[int, dict[str, Any]]


class LiteLlmReader(NestedReader):
    """Calls that generated text; what a cache answered never reached a model."""

    name = "litellm"
    description = "LiteLLM spend logs (call_type, startTime, prompt_tokens, completion_tokens)"
    kinds = (CSV, JSON, JSON_LIST, PARQUET)
    keys = (_KIND, _START, _PROMPT, _OUTPUT)
    also = ("status", "endTime", "completionStartTime", "cache_hit")

    def raw(self, path: Path, options: ReadOptions) -> Raw:
        """See `ForeignReader`."""
        options.refuse_unit(path, "the times of LiteLLM are dates")
        start = opened(path)
        return requests.raw(
            path,
            partial(_requests, start),
            options,
            source=self.name,
            names={"arrival_s": _START, "prompt_tokens": _PROMPT, "output_tokens": _OUTPUT},
            place=start.row,
            notes=Further(start, (*self.keys, *self.also, *_FURTHER)).notes,
        )


def _requests(start: Opening) -> Iterator[Request]:
    rows = _table(start) if start.kind in (CSV, PARQUET) else _objects(start)
    while part := list(islice(rows, _PART_ROWS)):
        # Of many rows at once: a date is slow to be taken apart alone.
        times = [_dates(part, key) for key in _TIMES]
        for (place, entry), *moments in zip(part, *times, strict=True):
            with placed(start.path, start.row, place):
                request = _request(place, entry, *moments)
            yield request


def _table(start: Opening) -> Iterator[Row]:
    further = [name for name in (*_TIMES, *_FURTHER) if name != _START and name in start.names]
    for part in table.rows(start, [_KIND, _START, _PROMPT, _OUTPUT], further):
        for entry in part.iter_rows(named=True):
            yield entry.pop(table.LINE), entry


def _objects(start: Opening) -> Iterator[Row]:
    return ((entry.number, entry.value) for entry in objects(start.path, start))


def _dates(part: list[Row], key: str) -> list[int | None]:
    found = (entry.get(key) for _, entry in part)
    values = pl.Series([value if isinstance(value, str) else "" for value in found], dtype=pl.String)
    times: list[int | None] = dates(values).to_list()
    return times


def _request(place: int, entry: dict[str, Any], start: int | None, first: int | None, end: int | None) -> Request:
    why = _left_out(entry)
    if why:
        return Request(place, None, None, left_out=why)
    prompt, output = tokens(entry, _PROMPT), tokens(entry, _OUTPUT)
    if start is None and prompt and output:
        raise EntryError(f"key '{_START}': expected a date and a time, found {shown(entry.get(_START))}")
    # Where an answer came in one piece, LiteLLM takes its end for its first token.
    streamed = first is not None and end is not None and first < end
    return Request(
        place,
        prompt,
        output,
        start,
        columns={
            "request_id": text(entry.get("request_id")),
            "session": text(entry.get("session_id")),
            "model": text(entry.get("model")),
            "tenant": text(entry.get("team_id")),
            TTFT: seconds(first, start) if streamed else None,
            E2EL: seconds(end, start),
        },
    )


def _left_out(entry: dict[str, Any]) -> str:
    status, kind = entry.get("status"), entry.get(_KIND)
    if isinstance(status, str) and status and status.lower() != "success":
        return FAILED
    if not isinstance(kind, str) or not kind.endswith(_GENERATING):
        return "a call that generates no text"
    return "answered by the proxy's cache" if str(entry.get("cache_hit")).lower() == "true" else ""
