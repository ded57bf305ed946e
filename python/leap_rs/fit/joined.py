"""The rows of a text readout: the features of the prompt's text, then what is known of the prompt without an encoder.

They are put into a column of their own, so that a fit, a score and `--layers` treat them as any other features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import polars as pl

from leap_rs._leap import PromptFeatures, TraceError
from leap_rs.trace import Trace, schema

TEXT, PROMPT = schema.COLUMN_OF["text"], schema.COLUMN_OF["prompt"]
WITH_PROMPT = f"{TEXT} + {PROMPT}"
WITH_LENGTH = f"{TEXT} + length terms"
"""Where no trace has prompt features, the three terms of the prompt's length stand in their place."""

_PARTS = {WITH_PROMPT: (TEXT, PROMPT), WITH_LENGTH: (TEXT,)}


def column_of(traces: Sequence[Trace]) -> str | None:
    """What a text readout of these traces reads; None where one of them has no text features.

    `TraceError` where some have prompt features and others have not: one readout cannot read both.
    """
    if any(lacking(trace, TEXT) for trace in traces):
        return None
    without = [trace for trace in traces if lacking(trace, PROMPT)]
    if not without:
        return WITH_PROMPT
    if len(without) < len(traces):
        having = next(trace for trace in traces if not lacking(trace, PROMPT))
        raise TraceError(
            f"{without[0].path}: no column '{PROMPT}', but {having.path} has it: "
            "a text readout reads it in all traces or in none"
        )
    return WITH_LENGTH


def lacking(trace: Trace, column: str) -> list[str]:
    """Which columns the trace would need to have this one, joined or as it stands in the file."""
    return [part for part in _PARTS.get(column, (column,)) if part not in trace.frame.columns]


def with_column(trace: Trace, column: str | None) -> Trace:
    """The trace with this column, if it is one that is joined and the trace has its parts; as it is otherwise."""
    if column not in _PARTS or lacking(trace, column):
        return trace
    frame = trace.frame
    if column == WITH_PROMPT:
        known = frame[PROMPT].to_numpy()
    else:
        known = np.stack([PromptFeatures.length_features(tokens) for tokens in frame["prompt_tokens"]])
    rows = np.concatenate([frame[TEXT].to_numpy(), known], axis=1, dtype=np.float32)
    return replace(trace, frame=frame.with_columns(pl.Series(column, rows)))
