"""How an engine starts to predict: from the state that it saved, from the user's files, or from zero."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from leap_rs._leap import LeapError, OnlineReadout
from leap_rs.encoder.source import EncoderInfo

from .metrics import MetricsWriter, engine_path
from .readouts import Kind, Wanted, files_of, origin, resumed, start
from .settings import BrainSettings
from .state import Identity, StateStore, open_store


@dataclass(frozen=True)
class Opened:
    """The readouts by their names, where they are saved, and what was saved with them."""

    readouts: Mapping[str, OnlineReadout]
    store: StateStore | None
    extra: Mapping[str, Any]


def open_readouts(
    settings: BrainSettings, widths: Mapping[Kind, int], encoder: EncoderInfo | None, tell: Callable[[str], None]
) -> Opened:
    """Opens the readouts of these widths. Whatever is wrong with a file is told, and no reason not to start."""
    files = files_of(settings.readout)
    models = (settings.model, settings.weights or settings.model)
    wanted: dict[str, Wanted] = {
        name: Wanted(
            name, width, models, settings.layer, settings.max_tokens, encoder=encoder if name == "text" else None
        )
        for name, width in widths.items()
    }
    store, resumed_readouts, extra = _resume(settings, wanted, encoder, origin(files), tell)
    readouts = resumed_readouts or {
        name: start(one, files.get(name), settings.learn, tell) for name, one in wanted.items()
    }
    return Opened(readouts, store, extra)


def open_metrics(settings: BrainSettings, tell: Callable[[str], None]) -> MetricsWriter:
    """Opens the file of the engine's metrics; where it cannot be written there are none."""
    try:
        path = engine_path(settings.engine, settings.metrics_dir)
        return MetricsWriter.create(path, model_name=settings.model, engine=settings.engine)
    except LeapError as error:
        tell(f"no metrics: {error}")
        return MetricsWriter.nowhere()


def _resume(
    settings: BrainSettings,
    wanted: Mapping[str, Wanted],
    encoder: EncoderInfo | None,
    origin: str,
    tell: Callable[[str], None],
) -> tuple[StateStore | None, dict[str, OnlineReadout], Mapping[str, Any]]:
    readouts: dict[str, OnlineReadout] = {}

    def check(paths: Mapping[str, Path]) -> None:
        readouts.clear()
        if set(paths) != set(wanted):
            raise LeapError(f"it holds {', '.join(sorted(paths)) or 'no readout'}, not {', '.join(sorted(wanted))}")
        loaded = {name: resumed(one, paths[name]) for name, one in wanted.items()}
        readouts.update(loaded)

    if settings.state_dir is None:
        return None, {}, {}
    widths = {name: one.width for name, one in wanted.items()}
    identity = Identity(
        model=settings.weights or settings.model,
        layer=settings.layer,
        max_tokens=settings.max_tokens,
        widths=widths,
        encoder=encoder.name if encoder is not None else None,
        encoder_layer=encoder.layer if encoder is not None else None,
        origin=origin,
    )
    try:
        store = open_store(settings.state_dir, settings.engine, identity, check)
    except LeapError as error:
        tell(f"the state is not saved, and the server goes on: {error}")
        return None, {}, {}
    for why in store.refused:
        tell(f"a saved state is not used, and stays as it is: {why}")
    if store.loaded is None:
        return store, {}, {}
    return store, readouts, store.loaded.extra
