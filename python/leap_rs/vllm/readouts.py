"""The readouts that an engine starts with: from a saved state, from files, or from zero.

Whatever is wrong with a file, the server starts: the readout then learns from zero, and the reason is told.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from leap_rs._leap import LeapError, OnlineReadout, Readout, ReadoutError
from leap_rs.encoder.source import EncoderInfo
from leap_rs.replay.readouts import sibling

Kind = Literal["prompt", "text", "state"]


@dataclass(frozen=True)
class LearnSettings:
    """How readouts learn: labels an update, weight of the past, ridge penalty, rows for mean and scale."""

    batch: int = 8
    forgetting: float = 1.0
    lam: float = 1000.0
    warmup: int = 256


@dataclass(frozen=True)
class Wanted:
    """What a readout has to be: its name, features, model and layer, and what reads the text."""

    name: Kind
    width: int
    models: tuple[str, ...]
    """What the model is called, the name that it is served under first."""
    layer: int | None
    max_tokens: int
    encoder: EncoderInfo | None = None


def files_of(readout: Path | None) -> dict[str, Path]:
    """The files that a user's `readout` stands for: the state readout's, and the others' beside it."""
    if readout is None:
        return {}
    beside = {name: sibling(readout, name) for name in ("prompt", "text")}
    return {"state": readout, **{name: path for name, path in beside.items() if path.is_file()}}


def origin(files: Mapping[str, Path]) -> str:
    """Names what learning started from: a state that started elsewhere is another one."""
    parts = []
    for name, path in sorted(files.items()):
        # One that cannot be read is told of where it is opened.
        with contextlib.suppress(OSError):
            parts.append(f"{name}:{hashlib.sha256(path.read_bytes()).hexdigest()[:16]}")
    return " ".join(parts) or "zero"


def start(wanted: Wanted, path: Path | None, settings: LearnSettings, tell: Callable[[str], None]) -> OnlineReadout:
    """The readout of a file, or one that learns from zero where there is none or it does not fit."""
    if path is not None:
        try:
            return _from_file(wanted, path, settings, tell)
        except LeapError as error:
            tell(f"{error}; the {wanted.name} readout learns from zero")
    return OnlineReadout.from_zero(
        wanted.width,
        max_tokens=wanted.max_tokens,
        warmup=settings.warmup,
        lam=settings.lam,
        kind=wanted.name,
        batch=settings.batch,
        forgetting=settings.forgetting,
    )


def resumed(wanted: Wanted, path: Path) -> OnlineReadout:
    """The readout of a saved state.

    Raises:
        LeapError: It is damaged, or of another width.
    """
    online = OnlineReadout.load(path)
    if online.d != wanted.width:
        raise ReadoutError(f"{path}: reads {online.d} features, the {wanted.name} readout has {wanted.width}")
    return online


def _from_file(wanted: Wanted, path: Path, settings: LearnSettings, tell: Callable[[str], None]) -> OnlineReadout:
    readout = Readout.load(path)
    kind = str(readout.meta.get("kind") or "state").lower()
    if kind != wanted.name:
        raise ReadoutError(f"{path}: is a {kind} readout, not a {wanted.name} readout")
    if readout.d != wanted.width:
        raise ReadoutError(f"{path}: reads {readout.d} features, the model gives {wanted.width}")
    model, layer = readout.meta.get("model"), readout.meta.get("layer")
    if model and _bare(model) not in map(_bare, wanted.models):
        raise ReadoutError(f"{path}: is for model {model}, not for {wanted.models[0]}")
    if wanted.name == "state" and layer is not None and wanted.layer is not None and int(layer) != wanted.layer:
        raise ReadoutError(f"{path}: is for layer {layer}, not for layer {wanted.layer}")
    if wanted.encoder is not None:
        _check_encoder(path, readout.meta, wanted.encoder)
    online = OnlineReadout(readout, batch=settings.batch, forgetting=settings.forgetting)
    if not online.anchored:
        tell(f"{path}: no anchor beside it, so the {wanted.name} readout moves faster than its training rows warrant")
    return online


def _check_encoder(path: Path, meta: Mapping[str, object], encoder: EncoderInfo) -> None:
    name, layer = meta.get("encoder"), meta.get("encoder_layer")
    if name and _bare(name) != _bare(encoder.name):
        raise ReadoutError(f"{path}: is for the encoder {name}, not for {encoder.name}")
    if layer is not None and int(str(layer)) != encoder.layer:
        raise ReadoutError(f"{path}: is for layer {layer} of the encoder, not for layer {encoder.layer}")


def _bare(model: object) -> str:
    """A model's name without its owner or directory: a served path and a published name are to compare."""
    return str(model).rstrip("/").replace("\\", "/").rsplit("/", 1)[-1].casefold()
