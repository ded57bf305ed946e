"""What a readout learns from and is judged on: the labelled requests of traces, one column of features at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt
import polars as pl

from leap_rs._leap import ConfigError, TraceError
from leap_rs.fit import joined
from leap_rs.trace import Trace, labels, schema

Kind = Literal["state", "prompt", "text"]

COLUMNS: dict[Kind, str] = {kind: schema.COLUMN_OF[kind] for kind in get_args(Kind)}
"""The column that a trace must have for a readout of the kind."""


@dataclass(frozen=True)
class Labelled:
    """Requests by arrival: features (n, d), lengths (n,) in tokens up to the budget, and which are only lower bounds."""

    features: npt.NDArray[Any]
    lengths: npt.NDArray[np.uint32]
    censored: npt.NDArray[np.bool_]
    max_tokens: int

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def known(self) -> npt.NDArray[np.bool_]:
        """Rows whose target is known: all but those cut before the output budget."""
        return ~self.censored | (self.lengths >= self.max_tokens)

    def where(self, rows: npt.NDArray[np.bool_]) -> Labelled:
        """The rows that the mask marks."""
        return Labelled(self.features[rows], self.lengths[rows], self.censored[rows], self.max_tokens)


def columns(traces: Sequence[Trace]) -> dict[Kind, str]:
    """What each readout that can be fitted reads: of those kinds whose column every trace has, in the order of `COLUMNS`.

    `TraceError` where there is none, or where the text readout would read other rows in one trace than in another.
    """
    found = {kind: column for kind, column in COLUMNS.items() if not any(joined.lacking(one, column) for one in traces)}
    if not found:
        without = next(trace for trace in traces if not set(COLUMNS.values()) <= set(trace.frame.columns))
        wanted = " or ".join(f"'{column}'" for column in COLUMNS.values())
        raise TraceError(f"{without.path}: nothing to fit a readout on: no column {wanted} that all traces have")
    text = joined.column_of(traces)
    return found if text is None else {**found, "text": text}


def output_budget(traces: Sequence[Trace]) -> int:
    """M in tokens: the largest `max_tokens` of the traces, or their longest output where no trace has that column."""
    limits = [trace.frame["max_tokens"] for trace in traces if "max_tokens" in trace.frame.columns]
    return max(_largest(column) for column in limits or [trace.frame["output_tokens"] for trace in traces])


def require_variance(traces: Sequence[Trace], max_tokens: int) -> None:
    """Refuse lengths that are all the same: there is nothing to rank."""
    lengths = pl.concat([trace.frame["output_tokens"] for trace in traces]).clip(upper_bound=max_tokens)
    if lengths.n_unique() == 1:
        all_of = f"all {len(lengths)} lengths are" if len(lengths) > 1 else "the only length is"
        raise TraceError(f"{named(traces)}: the target has no variance: {all_of} {lengths[0]} tokens")


def require_known(traces: Sequence[Trace], rows: Labelled) -> None:
    """Refuse traces in which no answer that could be learned from ended by itself, or all those are as long."""
    lengths = rows.lengths[rows.known]
    if len(lengths) < 2:
        useless = sum(trace.frame.height for trace in traces) - len(rows)
        known = "no answer has" if len(lengths) == 0 else "one answer alone has"
        raise TraceError(
            f"{named(traces)}: nothing to fit a readout on: {known} a known length ({len(rows) - len(lengths)} were cut "
            f"before {rows.max_tokens} tokens, {useless} were aborted or forced to a length)"
        )
    if (lengths == lengths[0]).all():
        raise TraceError(
            f"{named(traces)}: the target has no variance: all {len(lengths)} known lengths are {lengths[0]} tokens"
        )


def named(traces: Sequence[Trace]) -> str:
    """The files, for a message about all of them."""
    return ", ".join(str(trace.path) for trace in traces)


def require_same_features(traces: Sequence[Trace]) -> None:
    """Refuse features of different models, layers or encoders: one readout cannot serve both."""
    for column, keys in schema.FEATURES_OF.items():
        having = [
            (schema.identity(column, trace.metadata), trace.path) for trace in traces if column in trace.frame.columns
        ]
        for key in keys:
            known = [(of[key], path) for of, path in having if key in of]
            for value, path in known[1:]:
                if value != known[0][0]:
                    raise ConfigError(
                        f"{path}: its {column} are of {key} {value}, those of {known[0][1]} of {known[0][0]}"
                    )


def not_judged(trace: Trace, column: str) -> str | None:
    """Why nothing is evaluated on the column, if the trace lacks it or a part of it."""
    lacking = joined.lacking(trace, column)
    if not lacking:
        return None
    what = "it" if lacking == [column] else f"'{column}'"
    return f"{trace.path}: no column '{lacking[0]}', so not evaluated for {what}"


def labelled(trace: Trace, column: str, max_tokens: int) -> Labelled:
    """The requests that say something about a length, which `finished` ones do; lengths end at `max_tokens`."""
    frame = finished(trace, column)
    lengths = frame["output_tokens"].to_numpy()
    cut = (frame["finish_reason"] == "length").to_numpy() | (lengths > max_tokens)
    return Labelled(frame[column].to_numpy(), np.minimum(lengths, max_tokens).astype(np.uint32), cut, max_tokens)


def finished(trace: Trace, column: str) -> pl.DataFrame:
    """The rows of requests whose lengths say something: this column, how long they are, and how they ended."""
    columns = trace.frame.columns
    rows = trace.frame.with_columns(labels.finish_reason(columns).alias("finish_reason")).filter(
        labels.is_label(columns)
    )
    return rows.select(name for name in ("output_tokens", "finish_reason", column) if name in rows.columns)


def forced(trace: Trace) -> pl.Series:
    """Which answers have a length that their client had settled before the first token."""
    if schema.FORCED in trace.frame.columns:
        return trace.frame[schema.FORCED]
    return pl.repeat(False, trace.frame.height, eager=True)


def settled(trace: Trace) -> list[str]:
    """A remark where answers have such a length."""
    count = int(forced(trace).sum())
    return [f"{trace.path}: {count} answers had a length that their client had settled: left out"] if count else []


def remarks(part: Labelled) -> list[str]:
    """What limits the scores on these rows."""
    found = []
    lengths = part.lengths[part.known]
    if not part.known.all():
        count = int((~part.known).sum())
        found.append(
            f"{count} answers were cut before {part.max_tokens} tokens: left out of ranks and errors, "
            "lower bounds for RLS and intervals"
        )
    if len(part) == 0:
        found.append("all answers were aborted: there is nothing to judge on")
    elif len(lengths) == 1:
        found.append("one answer alone has a known length, so ranks are undefined")
    elif len(np.unique(lengths)) == 1:
        found.append(f"all {len(lengths)} lengths are {lengths[0]} tokens, so ranks are undefined")
    return found


def stacked(column: str, traces: Sequence[Trace], parts: Sequence[Labelled]) -> Labelled:
    """All rows below each other; every trace must have the same number of features."""
    for trace, part in zip(traces, parts, strict=True):
        require_width(column, trace, part, parts[0].features.shape[1], traces[0])
    return Labelled(
        np.concatenate([part.features for part in parts]),
        np.concatenate([part.lengths for part in parts]),
        np.concatenate([part.censored for part in parts]),
        parts[0].max_tokens,
    )


def require_width(column: str, trace: Trace, part: Labelled, width: int, first: Trace) -> None:
    """Refuse a trace whose features are not as many as those of the first training trace."""
    found = part.features.shape[1]
    if found != width:
        raise TraceError(f"{trace.path}: column '{column}' is {found} wide, in {first.path} {width}")


def _largest(column: pl.Series) -> int:
    return int(column.to_numpy().max())
