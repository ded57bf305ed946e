"""Requests as logs of tools and servers tell them: one by one, each with whatever its log happens to say of it.

Leap's columns know no gaps where a gap would be a guess, so a file is gone through twice: once for what it says of every
request, and once for the requests.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import polars as pl

from leap_rs._leap import TraceError
from leap_rs.trace.jsonrows import BLOCKS, Columns, frame
from leap_rs.trace.model import LeftOut, Raw, ReadOptions
from leap_rs.trace.nested import number, whole
from leap_rs.trace.schema import BLOCK_SIZE_KEY, U32_MAX

FAILED, CANCELLED, UNFINISHED = "the request failed", "the request was cancelled", "the request did not end"
_FAILURES = (FAILED, CANCELLED, UNFINISHED)

TTFT, E2EL, CLIENT_QUEUE = "ttft_s", "e2el_s", "client_queue_s"
"""Measured times of a request in seconds: to the first and the last token from the planned arrival, and how much of that
the client held it back."""

_WHOLE: Columns = {
    "max_tokens": pl.Int64,
    "temperature": pl.Float64,
    "top_p": pl.Float64,
    "finish_reason": pl.String,
    "forced": pl.Boolean,
    "request_id": pl.String,
    "tenant": pl.String,
    "prefix_blocks": BLOCKS,
}
"""Columns that every request needs a value of."""
_LOOSE: Columns = {
    "session": pl.String,
    "model": pl.String,
    TTFT: pl.Float64,
    E2EL: pl.Float64,
    CLIENT_QUEUE: pl.Float64,
    "time_in_queue_s": pl.Float64,
}
_ENDS = {
    "stop": "stop",
    "length": "length",
    "max_tokens": "length",
    "end_turn": "stop",
    "stop_sequence": "stop",
    "tool_calls": "stop",
    "tool_use": "stop",
    "function_call": "stop",
    "abort": "abort",
}
_PART_ROWS = 50_000


@dataclass(slots=True)
class Request:
    """One request of a log."""

    place: int
    prompt_tokens: int | None
    output_tokens: int | None
    arrival_ns: int | None = None
    left_out: str = ""
    """Why it is none of the requests that were answered; empty where it is one."""
    columns: dict[str, object] = field(default_factory=dict)
    """What else the log says of it, by leap's names; None is the same as nothing."""

    @property
    def answered(self) -> bool:
        """Whether it is a request of the trace."""
        return not self.left_out and bool(self.prompt_tokens) and bool(self.output_tokens)


Requests = Callable[[], Iterator[Request]]


def asked(body: Mapping[str, object], output_tokens: int | None) -> dict[str, object]:
    """The columns that follow from the body of a request to an API, where there is one."""
    # Not above: the plugin's package takes a while to be imported.
    from leap_rs.vllm.labels import Kind, Limits, label

    if not body:
        return {}
    limit, least = (
        whole(next((body[key] for key in keys if body.get(key) is not None), None))
        for keys in (("max_completion_tokens", "max_tokens"), ("min_tokens",))
    )
    found = {"max_tokens": limit, **sampling(body.get("temperature"), body.get("top_p"))}
    limits = Limits(U32_MAX if limit is None else max(limit, 1), max(least or 0, 0), body.get("ignore_eos") is True)
    reached = limit is not None and (output_tokens or 0) >= limit
    forced = label(limits, "length" if reached else "stop", output_tokens or 0).kind is Kind.FORCED
    return {**found, "forced": forced}


def sampling(temperature: object, top_p: object) -> dict[str, object]:
    """The columns of how tokens were drawn, as far as they can be."""
    heat, mass = number(temperature), number(top_p)
    return {
        "temperature": heat if heat is not None and 0 <= heat <= U32_MAX else None,
        "top_p": mass if mass is not None and 1e-6 <= mass <= 1 else None,
    }


def ended(reason: object) -> str | None:
    """Leap's word for how an answer ended; None where its log says nothing that is known."""
    return _ENDS.get(reason) if isinstance(reason, str) else None


def seconds(later: int | None, earlier: int | None) -> float | None:
    """From one time in nanoseconds to a later one; None where one is unknown or they run backwards."""
    return (later - earlier) / 1e9 if later is not None and earlier is not None and later >= earlier else None


def raw(
    path: Path,
    requests: Requests,
    options: ReadOptions,
    *,
    source: str,
    names: Mapping[str, str],
    place: str,
    no_times: str = "",
    unordered: bool = True,
    metadata: Mapping[str, str] | None = None,
    notes: Sequence[str] = (),
) -> Raw:
    """What a log says, for the stage that all formats share."""
    seen = _Survey(path, place, options).of(requests())
    raw = Raw(
        iter(()),
        names,
        place,
        no_times,
        unordered=unordered and not no_times,
        metadata={"source": source, **(metadata or {})},
        notes=[*seen.notes(), *notes],
    )
    columns = seen.columns()
    if "prefix_blocks" not in columns:
        raw.metadata.pop(BLOCK_SIZE_KEY, None)
    if len(seen.models) == 1:
        raw.metadata["model"] = next(iter(seen.models))
    raw.parts = _parts(requests(), columns, raw)
    return raw


class _Survey:
    """What a log says of all of its requests."""

    def __init__(self, path: Path, place: str, options: ReadOptions) -> None:
        self._path, self._place, self._options = path, place, options
        self._answered = 0
        self._have: Counter[str] = Counter()
        self._over: list[int] = []
        self._ids: set[int] = set()
        self.models: set[str] = set()

    def of(self, requests: Iterator[Request]) -> _Survey:
        """After all of them."""
        for request in requests:
            if self._options.strict and request.left_out in _FAILURES:
                where = f"{self._path}: {self._place} {request.place}"
                raise TraceError(f"{where}: {request.left_out}, and strict refuses that")
            if request.answered:
                self._see(request)
        return self

    def _see(self, request: Request) -> None:
        self._answered += 1
        columns = _filled(request)
        self._have.update(name for name, value in columns.items() if value is not None)
        limit = columns.get("max_tokens")
        if isinstance(limit, int) and (request.output_tokens or 0) > limit:
            self._over.append(request.place)
        if (known := columns.get("request_id")) is not None:
            self._ids.add(hash(known))
        if isinstance(model := columns.get("model"), str) and len(self.models) < 2:
            self.models.add(model)

    def columns(self) -> Columns:
        """Those that can be filled."""
        whole = {name: dtype for name, dtype in _WHOLE.items() if self._answered and self._complete(name)}
        return whole | {name: dtype for name, dtype in _LOOSE.items() if self._have[name]}

    def _complete(self, name: str) -> bool:
        if name == "max_tokens" and self._over:
            return False
        if name == "request_id" and len(self._ids) < self._answered:
            return False
        return self._have[name] == self._answered

    def notes(self) -> list[str]:
        """What it says of some requests only, and so of none."""
        told = []
        for name in _WHOLE:
            have = self._have[name]
            if 0 < have < self._answered:
                told.append(f"no {name}: only {have} of {self._answered} requests have one")
            elif have and name == "max_tokens" and self._over:
                first = f"first: {self._place} {self._over[0]}"
                told.append(f"no max_tokens: {len(self._over)} answers are longer than theirs ({first})")
            elif have and name == "request_id" and not self._complete(name):
                told.append("no request_id: some stand there more than once")
        return told


def _filled(request: Request) -> Mapping[str, object]:
    """Its columns, with how its answer ended where that follows from its limit."""
    columns = request.columns
    limit = columns.get("max_tokens")
    if isinstance(limit, int):
        if not 1 <= limit <= U32_MAX:
            columns["max_tokens"] = None
        elif columns.get("finish_reason") is None:
            columns["finish_reason"] = "length" if (request.output_tokens or 0) >= limit else "stop"
    return columns


def _parts(requests: Iterator[Request], columns: Columns, raw: Raw) -> Iterator[pl.DataFrame]:
    left_out: dict[str, LeftOut] = {}
    schema: Columns = {"place": pl.UInt64, "prompt_tokens": pl.Int64, "output_tokens": pl.Int64}
    if not raw.no_times:
        schema["arrival_ns"] = pl.Int64
    schema |= columns

    def rows() -> Iterator[tuple[object, ...]]:
        for request in requests:
            why = request.left_out
            if not request.answered and not why and request.arrival_ns is None and not raw.no_times:
                why = FAILED
            if why:
                known = left_out.get(why)
                first = known.first if known else f"{raw.place} {request.place}"
                left_out[why] = LeftOut(why, 1 + (known.count if known else 0), first)
                continue
            # A failed row is left out by the stage after this one, which needs a value all the same.
            found = _filled(request) if request.answered else dict.fromkeys(columns)
            times = () if raw.no_times else (request.arrival_ns,)
            further = (found.get(name) if name != "prefix_blocks" else found.get(name) or [] for name in columns)
            yield (request.place, request.prompt_tokens, request.output_tokens, *times, *further)

    try:
        source = rows()
        while part := list(islice(source, _PART_ROWS)):
            yield frame(part, schema)
    finally:
        raw.left_out.extend(left_out.values())
