"""The strict leap trace format: which columns it has, what each may hold, and the first row that breaks the rule."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl

from leap_rs._leap import TraceError

VERSION = "1"
VERSION_KEY = "leap_trace_version"
BLOCK_SIZE_KEY = "block_size"
DEFAULT_BLOCK_SIZE = 16
FINISH_REASONS = ("stop", "length", "abort")
FEATURES_OF = {
    "features": ("model", "layer"),
    "prompt_features": ("model",),
    "text_features": ("encoder", "encoder_layer"),
}
"""The columns of features, and the metadata that say what they are of."""
FEATURE_COLUMNS = tuple(FEATURES_OF)
COLUMN_OF = {"prompt": "prompt_features", "text": "text_features", "state": "features"}
"""The readouts, in the order in which they know something of a request, and the column of features that each is named by."""
SCORE_PREFIX = "score_"

U32_MAX = 2**32 - 1
UNIX_TIME_S = 1e8  # three years: no trace starts that long after its own start

REQUIRED = ("arrival_s", "prompt_tokens", "output_tokens")
_SMALLEST = {"prompt_tokens": 1, "output_tokens": 1, "max_tokens": 1, "prefix_tokens": 0}
_STRINGS = ("request_id", "finish_reason", "domain", "tenant")
FORCED = "forced"
"""Whether the client had settled the length beforehand (`ignore_eos`, `min_tokens`): it is no label."""
KNOWN = (*REQUIRED, *_SMALLEST, *_STRINGS, *FEATURE_COLUMNS, FORCED, "temperature", "top_p", "prefix_blocks", "session")
"""The columns that mean something here; all others are kept as they are."""


@dataclass(frozen=True)
class Rows:
    """How an error calls the rows of a frame: by their number from 0 in the file, of which the frame may be a part."""

    path: Path
    first: int = 0
    """The number of the frame's first row."""

    def place(self, row: int) -> str:
        """What the frame's row is called."""
        return f"row {self.first + row}"

    def fault(self, what: str, *, column: str | None = None, row: int | None = None) -> TraceError:
        """A `TraceError` that names the file and, where they are known, the column and the row."""
        where = [f"column '{column}'"] if column is not None else []
        if row is not None:
            where.append(f"{self.place(row)} (the first row is 0)")
        return TraceError(": ".join([str(self.path), *([", ".join(where)] if where else []), what]))


def checked(frame: pl.DataFrame, rows: Path | Rows, metadata: Mapping[str, str]) -> pl.DataFrame:
    """The frame with the format's own dtypes, or `TraceError`. Columns that the format does not know are kept.

    `rows` names the rows in the error; a path stands for a file that the frame is the whole of.
    """
    at = rows if isinstance(rows, Rows) else Rows(rows)
    _check_version(at.path, metadata)
    for column in REQUIRED:
        if column not in frame.columns:
            raise at.fault(f"missing; the file has {', '.join(frame.columns) or 'no columns'}", column=column)
    if frame.height == 0:
        raise at.fault("the trace holds no requests")
    if "prefix_tokens" in frame.columns and "prefix_blocks" in frame.columns:
        raise at.fault("give either prefix_tokens or prefix_blocks, not both", column="prefix_blocks")

    frame = pl.DataFrame([_checked_column(series, at) for series in frame.get_columns()])
    _check_between_columns(frame, at, metadata)
    return frame


def identity(column: str, metadata: Mapping[str, str]) -> dict[str, str]:
    """What a column of features is of, as far as the trace says it: two that differ in it cannot be read by one readout.

    `features_model` stands where the states and embeddings are not those of the model that answered.
    """
    keys = FEATURES_OF.get(column, ())
    known = {**metadata, "model": metadata.get("features_model", metadata.get("model"))}
    return {key: value for key in keys if (value := known.get(key)) is not None}


def refuse_repeated_ids(ids: pl.Series, rows: Path | Rows) -> None:
    """`TraceError` at the second row with an id."""
    at = rows if isinstance(rows, Rows) else Rows(rows)
    row = _first(~ids.is_first_distinct())
    if row is not None:
        first = _first(ids == ids[row])
        raise at.fault(f"{ids[row]!r} is already the id of {at.place(first or 0)}", column=ids.name, row=row)


def block_size(path: Path, metadata: Mapping[str, str]) -> int:
    """Tokens in a block of `prefix_blocks`: the metadata's `block_size`, or vLLM's 16."""
    text = metadata.get(BLOCK_SIZE_KEY, str(DEFAULT_BLOCK_SIZE))
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= U32_MAX):
        raise Rows(path).fault(f"metadata {BLOCK_SIZE_KEY} must be a whole number of tokens, not {text!r}")
    return int(text)


def _check_version(path: Path, metadata: Mapping[str, str]) -> None:
    version = metadata.get(VERSION_KEY, VERSION)
    if version != VERSION:
        raise Rows(path).fault(f"{VERSION_KEY} is {version!r}; this release reads version {VERSION}")


def _checked_column(series: pl.Series, at: Rows) -> pl.Series:
    name = series.name
    if name == "arrival_s":
        return _arrivals(series, at)
    if name in _SMALLEST:
        return _tokens(series, at, _SMALLEST[name])
    if name in _STRINGS:
        return _strings(series, at)
    if name in FEATURE_COLUMNS:
        return checked_features(series, at)
    if name in ("temperature", "top_p") or name.startswith(SCORE_PREFIX):
        return _reals(series, at)
    if name == "prefix_blocks":
        return _blocks(series, at)
    if name == FORCED:
        return _flags(series, at)
    return series


def _first(mask: pl.Series) -> int | None:
    """The first row where the mask is true."""
    at = mask.arg_true()
    return int(at[0]) if len(at) else None


def _refuse_nulls(series: pl.Series, at: Rows) -> None:
    row = _first(series.is_null())
    if row is not None:
        raise at.fault("no value (null)", column=series.name, row=row)


def _refuse_where(mask: pl.Series, series: pl.Series, at: Rows, rule: str) -> None:
    row = _first(mask)
    if row is not None:
        raise at.fault(f"{rule}, not {series[row]}", column=series.name, row=row)


def _wrong_type(series: pl.Series, at: Rows, wanted: str) -> TraceError:
    return at.fault(f"must be {wanted}, not {series.dtype}", column=series.name)


def _arrivals(series: pl.Series, at: Rows) -> pl.Series:
    if not series.dtype.is_numeric():
        raise _wrong_type(series, at, "seconds from the start of the trace as Float64")
    _refuse_nulls(series, at)
    times: pl.Series = series.cast(pl.Float64)
    _refuse_where(~times.is_finite(), times, at, "must be a finite number of seconds")
    _refuse_where(times < 0, times, at, "must not be negative")
    row = _first((times.diff() < 0).fill_null(value=False))
    if row is not None:
        what = f"times run backwards, from {times[row - 1]} s to {times[row]} s; sort the trace by arrival_s"
        raise at.fault(what, column=series.name, row=row)
    if at.first == 0 and times[0] >= UNIX_TIME_S:
        what = f"must count from the start of the trace; {times[0]} looks like a Unix time"
        raise at.fault(what, column=series.name, row=0)
    return times


def _tokens(series: pl.Series, at: Rows, smallest: int) -> pl.Series:
    if not series.dtype.is_integer():
        raise _wrong_type(series, at, "whole tokens as UInt32 (any integer type is read)")
    _refuse_nulls(series, at)
    _refuse_where(series < smallest, series, at, f"must be at least {smallest}")
    # Compared in 128 bits: a signed or small column cannot hold the bound itself.
    _refuse_where(series.cast(pl.Int128) > U32_MAX, series, at, f"must be at most {U32_MAX}")
    tokens: pl.Series = series.cast(pl.UInt32)
    return tokens


def _strings(series: pl.Series, at: Rows) -> pl.Series:
    if series.dtype not in (pl.String, pl.Categorical, pl.Enum):
        raise _wrong_type(series, at, "String")
    _refuse_nulls(series, at)
    text: pl.Series = series.cast(pl.String)
    if series.name == "finish_reason":
        rule = f"must be one of {', '.join(FINISH_REASONS)}"
        _refuse_where(~text.is_in(FINISH_REASONS), text, at, rule)
    if series.name == "request_id":
        refuse_repeated_ids(text, at)
    return text


def _reals(series: pl.Series, at: Rows) -> pl.Series:
    if not series.dtype.is_numeric():
        raise _wrong_type(series, at, "Float32")
    _refuse_nulls(series, at)
    values: pl.Series = series.cast(pl.Float32)
    _refuse_where(~values.is_finite(), series, at, "must be a finite 32-bit number")
    if series.name == "temperature":
        _refuse_where(values < 0, series, at, "must not be negative")
    if series.name == "top_p":
        _refuse_where((values <= 0) | (values > 1), series, at, "must be above 0 and at most 1")
    return values


def checked_features(series: pl.Series, at: Rows) -> pl.Series:
    """A column of features, or `TraceError`: an array of 16 or 32 bit floats a row, none of them missing or infinite."""
    dtype = series.dtype
    if not (isinstance(dtype, pl.Array) and dtype.inner in (pl.Float16, pl.Float32) and len(dtype.shape) == 1):
        raise _wrong_type(series, at, "Array(Float16, d) or Array(Float32, d)")
    if dtype.size == 0:
        raise at.fault("holds no features (width 0)", column=series.name)
    _refuse_nulls(series, at)
    inner = series.arr.explode()
    element = _first(inner.is_null())
    if element is not None:
        what = f"feature {element % dtype.size} has no value (null)"
        raise at.fault(what, column=series.name, row=element // dtype.size)
    values = inner.to_numpy().reshape(len(series), dtype.size)
    good = np.isfinite(values)
    bad = np.flatnonzero(~good.all(axis=1))
    if bad.size:
        row = int(bad[0])
        element = int(np.argmin(good[row]))
        raise at.fault(f"feature {element} is {values[row, element]}, not a finite number", column=series.name, row=row)
    return series


def _flags(series: pl.Series, at: Rows) -> pl.Series:
    if series.dtype != pl.Boolean:
        raise _wrong_type(series, at, "Boolean")
    _refuse_nulls(series, at)
    return series


def _blocks(series: pl.Series, at: Rows) -> pl.Series:
    dtype = series.dtype
    if not (isinstance(dtype, pl.List) and isinstance(dtype.inner, pl.DataType) and dtype.inner.is_integer()):
        raise _wrong_type(series, at, "List(UInt64)")
    _refuse_nulls(series, at)
    bad = pl.element().is_null() | (pl.element() < 0)
    row = _first(series.list.eval(bad).list.any())
    if row is not None:
        raise at.fault("a block hash must be a whole number from 0 to 2**64 - 1", column=series.name, row=row)
    try:
        blocks: pl.Series = series.cast(pl.List(pl.UInt64))
    except pl.exceptions.InvalidOperationError as error:
        raise at.fault("a block hash is above 2**64 - 1", column=series.name) from error
    return blocks


def _check_between_columns(frame: pl.DataFrame, at: Rows, metadata: Mapping[str, str]) -> None:
    def at_most(column: str, bound: str, values: pl.Series, unit: str = "tokens") -> None:
        row = _first(values > frame[bound])
        if row is not None:
            what = f"{values[row]} {unit}, more than {bound} ({frame[bound][row]})"
            raise at.fault(what, column=column, row=row)

    if "max_tokens" in frame.columns:
        at_most("output_tokens", "max_tokens", frame["output_tokens"])
    if "prefix_tokens" in frame.columns:
        at_most("prefix_tokens", "prompt_tokens", frame["prefix_tokens"])
    if "prefix_blocks" in frame.columns:
        size = block_size(at.path, metadata)
        covered = frame["prefix_blocks"].list.len().cast(pl.UInt64) * size
        at_most("prefix_blocks", "prompt_tokens", covered, f"tokens in blocks of {size}")
