"""The engine that is calibrated: the preset to start from, and the limits that each run or the user states."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from leap_rs._leap import ConfigError
from leap_rs.replay.engines import COST_KEYS, presets, resolve
from leap_rs.replay.options import build

from .limits import LIMITS
from .measured import MeasuredRun

DEFAULT_PRESET = "h100-llama-8b"
DATA_PARALLEL = "data_parallel_size"
WRITTEN = ("block_size", "max_num_seqs", "max_num_batched_tokens", "async_scheduling")

# What is on by default and may be off: option of leap-replay and key of the core.
SWITCHES = {
    "enable-chunked-prefill": "enable_chunked_prefill",
    "enable-prefix-caching": "enable_prefix_caching",
    "scheduler-reserve-full-isl": "reserve_full_prompt",
}


@dataclass(frozen=True)
class Setup:
    """Where the fit starts and which engine each run is simulated on."""

    preset: str
    gpu: str | None
    model: str | None
    start: dict[str, float]
    cores: tuple[dict[str, Any], ...]
    """The engine of each run as the core takes it; `cost` is replaced while fitting."""
    notes: tuple[str, ...]

    def replay_options(self) -> str:
        """Options of the engine that a cost model has no place for, as `leap-replay` spells them."""
        core = self.cores[0]
        return " ".join(f"--no-{name}" for name, key in SWITCHES.items() if not core[key])

    def limits(self) -> dict[str, Any]:
        """Limits of the first run's engine as a preset states them: KV tokens are usable ones."""
        core = self.cores[0]
        found = {"kv_tokens": core["kv_tokens"], **{key: core[key] for key in WRITTEN}}
        if core.get(DATA_PARALLEL, 1) > 1:
            found[DATA_PARALLEL] = core[DATA_PARALLEL]
        return found


def choose(
    runs: Sequence[MeasuredRun],
    *,
    engine: str | None = None,
    cost_model: Path | None = None,
    limits: Mapping[str, Any] | None = None,
) -> Setup:
    """The start and the engines. `limits` are the user's and go before those of a run, which go before the preset's."""
    _require_one_model(runs)
    _require_one_card(runs)
    given = {key: value for key, value in (limits or {}).items() if value is not None}
    notes: list[str] = []
    if engine is None:
        engine, why = match(runs[0])
        if cost_model is None:
            notes.append(f"starts from the preset {engine}: {why}")
    cores = []
    stated: dict[str, Any] = {}
    for run in runs:
        known = {**run.facts.limits, **given}
        ranks = known.pop(DATA_PARALLEL, None) or run.facts.data_parallel_size
        core, stated = resolve(build({"engine": engine, "cost_model": cost_model, **known}))
        if ranks is not None and ranks != core.get(DATA_PARALLEL, 1):
            core[DATA_PARALLEL] = int(ranks)
        cores.append(core)
        missing = [key for key in LIMITS[:3] if key not in known]
        if missing:
            values = ", ".join(f"{key} {core[key]:,}{' usable' if key == 'kv_tokens' else ''}" for key in missing)
            notes.append(f"{run.name}: not stated by the run, taken from the start: {values}")
    if any(_without_cost(core) != _without_cost(cores[0]) for core in cores[1:]):
        notes.append(f"the runs' limits differ; those written are of {runs[0].name}")
    setup = Setup(
        preset=str(cost_model) if cost_model is not None else engine,
        gpu=stated.get("gpu"),
        model=runs[0].facts.model or stated.get("model"),
        start={key: float(cores[0]["cost"][key]) for key in COST_KEYS},
        cores=tuple(cores),
        notes=tuple(notes),
    )
    if options := setup.replay_options():
        told = f"the engine ran otherwise than leap-replay does by default: give it {options} too"
        setup = replace(setup, notes=(*setup.notes, told))
    return setup


def match(run: MeasuredRun) -> tuple[str, str]:
    """The preset whose model and card are those of the run, and why; the default where none fits."""
    words, model = _plain(run.facts.hardware), _plain(_base_name(run.facts.model or ""))
    for name, preset in presets().items():
        card = _card(name)
        if card in words and model and model.startswith(_plain(str(preset["model"]))):
            return name, f"its card and model ({preset['gpu']}, {preset['model']}) are those of {run.name}"
    found = f"{run.facts.model or 'unknown model'} on {run.facts.hardware or 'an unknown card'}"
    return DEFAULT_PRESET, f"no preset fits {found}, choose one with --engine"


def _card(preset: str) -> str:
    return _plain(preset.split("-", 1)[0])


def _base_name(model: str) -> str:
    return model.rstrip("/").rsplit("/", 1)[-1]


def _plain(text: str) -> str:
    return re.sub(r"[^a-z0-9]", "", text.lower())


def _without_cost(core: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in core.items() if key != "cost"}


def _require_one_model(runs: Sequence[MeasuredRun]) -> None:
    """Runs of two models have two sets of coefficients: fitting them together would be wrong for both."""
    named = [run for run in runs if run.facts.model]
    for run in named[1:]:
        if _plain(_base_name(str(run.facts.model))) != _plain(_base_name(str(named[0].facts.model))):
            what = f"{run.path} is of {run.facts.model}, {named[0].path} of {named[0].facts.model}"
            raise ConfigError(f"runs of one engine are fitted together, but {what}")


def _require_one_card(runs: Sequence[MeasuredRun]) -> None:
    """The same for two cards, as far as they are known ones."""
    known = {_card(name): str(preset["gpu"]) for name, preset in presets().items() if name != "paper"}
    named = []
    for run in runs:
        words = _plain(run.facts.hardware)
        card = next((gpu for word, gpu in known.items() if word in words), None)
        if card is not None:
            named.append((run, card))
    for run, card in named[1:]:
        if card != named[0][1]:
            what = f"{run.path} is of {card}, {named[0][0].path} of {named[0][1]}"
            raise ConfigError(f"runs of one engine are fitted together, but {what}")
