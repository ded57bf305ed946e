"""Which readouts and which policies a replay uses where the user does not say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import polars as pl

from leap_rs import _leap
from leap_rs._leap import ReadoutError
from leap_rs.trace import schema

from .columns import score_names

KINDS, COLUMNS = tuple(schema.COLUMN_OF), schema.COLUMN_OF
LENGTH_TERMS = 3  # where a trace has no prompt features they stand for them
DEFAULT_NAME = "readout.safetensors"
WITHOUT_PREDICTOR = ("fcfs", "fcfs:levers=admission", "sjf-prompt", "hrrn", "las", "mlfq")
LEAP = ("leap-frozen", "leap-paper", "leap")
ORACLES = ("sjf-oracle", "srpt-oracle")


@dataclass
class Chosen:
    """The readout files in force by kind; a readout without one learns from zero, or the trace has no features for it."""

    files: dict[str, Path] = field(default_factory=dict)
    used: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def sibling(path: Path, kind: str) -> Path:
    """Where another readout than that of the state lies beside it: `X.safetensors` has `X.prompt.safetensors`."""
    return path.with_name(f"{path.name.removesuffix('.safetensors')}.{kind}.safetensors")


def choose(
    requested: Path | Literal["none"] | None,
    *,
    frame: pl.DataFrame,
    metadata: Mapping[str, str],
    trace_path: Path | None,
) -> Chosen:
    """Find, load and check the readouts. One that was asked for must fit; one that merely lies there is left alone."""
    chosen = Chosen()
    if requested == "none" or (requested is not None and str(requested) == "none"):
        pass
    elif requested is not None:
        path = Path(requested)
        if not path.is_file():
            raise ReadoutError(f"{path}: no such readout file")
        _take(chosen, path, frame, metadata, trace_path, required=True)
        for kind in ("prompt", "text"):
            if kind not in chosen.files and (beside := sibling(path, kind)).is_file():
                _take(chosen, beside, frame, metadata, trace_path, required=False)
    elif trace_path is not None:
        default = trace_path.parent / DEFAULT_NAME
        for path in (default, sibling(default, "prompt"), sibling(default, "text")):
            if path.is_file():
                _take(chosen, path, frame, metadata, trace_path, required=False)
    for kind in ("state", "prompt", "text"):
        if COLUMNS[kind] in frame.columns and kind not in chosen.used:
            chosen.used[kind] = None
    return chosen


def _take(
    chosen: Chosen,
    path: Path,
    frame: pl.DataFrame,
    metadata: Mapping[str, str],
    trace_path: Path | None,
    *,
    required: bool,
) -> None:
    readout = _leap.Readout.load(str(path))
    meta: dict[str, Any] = dict(readout.meta)
    kind = str(meta.get("kind") or "state").lower()
    column = COLUMNS[kind]
    misfit = _misfit(readout.d, meta, frame, metadata, kind)
    if misfit is not None:
        if required:
            raise ReadoutError(f"{path}: does not fit this trace: {misfit}")
        # A trace without any features is replayed as often as not; that no readout fits it needs no words.
        if column in frame.columns:
            chosen.notes.append(f"{path} is not used: {misfit}")
        return
    chosen.files[kind] = path
    chosen.used[kind] = {
        "path": str(path),
        "d": readout.d,
        "max_tokens": readout.max_tokens,
        "model": meta.get("model"),
        "layer": meta.get("layer"),
        **{key: meta[key] for key in schema.FEATURES_OF["text_features"] if key in meta},
        "trained_on": _names(meta),
    }
    if trace_path is not None and _was_trained_on(_names(meta), trace_path):
        chosen.notes.append(
            f"{path} was fitted on this very trace: its predictions are better here than on other traffic"
        )


def _misfit(d: int, meta: Mapping[str, Any], frame: pl.DataFrame, metadata: Mapping[str, str], kind: str) -> str | None:
    column = COLUMNS[kind]
    if column not in frame.columns and not (kind == "prompt" and d == LENGTH_TERMS):
        return f"the trace has no column {column}"
    # A text readout reads the prompt features too.
    reads = (column, COLUMNS["prompt"]) if kind == "text" else (column,)
    read = [name for name in reads if name in frame.columns]
    width = sum(_width(frame.schema[name]) for name in read)
    if kind != "state" and COLUMNS["prompt"] not in read:
        width += LENGTH_TERMS
    if width != d:
        beside = " with those of the prompt" if kind == "text" else ""
        return f"it reads {d} features and column {column} has {width}{beside}"
    known = {key: value for name in read for key, value in schema.identity(name, metadata).items()}
    for key, theirs in known.items():
        ours = meta.get(key)
        if ours is not None and str(ours) != theirs:
            return f"it is for {key} {ours} and the trace is from {key} {theirs}"
    return None


def _width(dtype: pl.DataType) -> int:
    return dtype.shape[0] if isinstance(dtype, pl.Array) else 0


def _names(meta: Mapping[str, Any]) -> list[str]:
    names = meta.get("trained_on") or []
    return [str(names)] if isinstance(names, str) else [str(name) for name in names]


def _was_trained_on(names: Sequence[str], trace_path: Path) -> bool:
    # Files move between machines, so the file name decides and not the directory; leap-fit writes it without suffix.
    return any(name.replace("\\", "/").rsplit("/", 1)[-1] in (trace_path.name, trace_path.stem) for name in names)


def default_policies(frame: pl.DataFrame) -> list[str]:
    """The policies that are replayed where none is named; the core leaves out, and tells, those that cannot run."""
    return [*WITHOUT_PREDICTOR, *LEAP, *(f"score:{name}" for name in score_names(frame)), *ORACLES]
