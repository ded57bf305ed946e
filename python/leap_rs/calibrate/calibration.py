"""One calibration from measured runs to a cost model that says how far it can be trusted."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from leap_rs._leap import ConfigError
from leap_rs.replay.engines import COST_KEYS

from . import identify, setup
from .errors import MetricError, Rows, metric_errors, occupancy, worst
from .fit import Fit, Parameters, fit
from .forward import Forward, Simulated
from .measured import MeasuredRun
from .runs import read_runs
from .servingsim import LOG

VERSION = 1
FEW = 20
BAD_PERCENT = 10.0  # a cost model of the right engine comes closer than this


@dataclass(frozen=True)
class CalibrationOptions:
    """Everything that a calibration depends on besides the runs."""

    engine: str | None = None
    """The preset to start from; by the run's card and model when not given."""
    cost_model: Path | None = None
    """A cost model to start from instead of the preset's coefficients."""
    pull: float = 1.5
    """One standard deviation of the prior around the start, as a factor."""
    fit_share: float = 0.5
    """The share of each run's requests, first queued first, that is fitted; the rest is held out."""
    refit: bool = False
    """Whether the coefficients written come from a second fit, on all requests."""
    jitters: int = 8
    jitter_ms: float = 2.0
    seed: int = 0
    limits: Mapping[str, Any] = field(default_factory=dict)
    """Limits of the engine that override those of the runs and of the preset."""
    name: str = "calibrated"

    def __post_init__(self) -> None:
        for option, value, good, rule in (
            ("pull", self.pull, 1 < self.pull < math.inf, "above 1"),
            ("fit_share", self.fit_share, 0 < self.fit_share <= 1, "above 0 and at most 1"),
            ("jitters", self.jitters, self.jitters >= 1, "at least 1"),
            ("jitter_ms", self.jitter_ms, 0 <= self.jitter_ms < math.inf, "0 or more"),
            ("seed", self.seed, self.seed >= 0, "0 or more"),
        ):
            if not good:
                raise ConfigError(f"{option} must be {rule}, got {value!r}")


@dataclass(frozen=True)
class RunResult:
    """How one run compares with its simulation under the coefficients of the fitted part."""

    run: MeasuredRun
    fitted: int
    held_out: dict[str, MetricError] | None
    """None where all requests were fitted."""
    fitted_errors: dict[str, MetricError]
    occupancy: dict[str, Any] | None
    preemptions: float
    """Of one simulation, the mean over the jitters."""

    def to_dict(self) -> dict[str, Any]:
        """One entry of `runs` in the calibration object."""
        run, prefixes = self.run, self.run.shared_prefixes()

        def errors(found: dict[str, MetricError] | None) -> dict[str, Any] | None:
            return None if found is None else {name: error.to_dict() for name, error in found.items()}

        return {
            "path": str(run.path),
            "name": run.name,
            "format": run.format,
            "requests": len(run),
            "requests_fitted": self.fitted,
            "held_out": errors(self.held_out),
            "worst_held_out_percent": None if self.held_out is None else worst(self.held_out),
            "fitted": errors(self.fitted_errors),
            "occupancy": self.occupancy,
            "preemptions": self.preemptions,
            "shared_prefixes": None
            if prefixes is None
            else {
                "prompts": prefixes[0],
                "tokens": prefixes[1],
                "prompt_tokens": int(run.requests["prompt_tokens"].sum()),
            },
            "front_end_lag_ms": {"median": 1e3 * float(np.median(run.lag_s)), "max": 1e3 * float(run.lag_s.max())},
        }


@dataclass(frozen=True)
class Calibration:
    """A cost model with how it was found and what is known about it."""

    options: CalibrationOptions
    setup: setup.Setup
    fit: Fit
    """The fit whose coefficients are written."""
    fitted_on: str
    determined: tuple[identify.Determined, ...]
    correlations: tuple[tuple[str, str, float], ...]
    runs: tuple[RunResult, ...]
    notes: tuple[str, ...]

    @property
    def worst_held_out_percent(self) -> float | None:
        """The largest held-out error of any run."""
        found = [value for run in self.runs if run.held_out and (value := worst(run.held_out)) is not None]
        return max(found) if found else None

    def to_dict(self) -> dict[str, Any]:
        """The cost model as `leap-replay --cost-model` reads it, with everything else under `calibration`."""
        by_name = {one.name: one for one in self.determined}
        cost = self.fit.cost
        options = {
            **{key: value for key, value in vars(self.options).items() if key not in ("cost_model", "limits")},
            "cost_model": None if self.options.cost_model is None else str(self.options.cost_model),
            "limits": dict(self.options.limits),
        }
        coefficients = {
            key: {
                "start": self.setup.start[key],
                "fitted": cost[key],
                "sd": by_name[key].deviation if key in by_name else None,
                "sd_of_prior": by_name[key].relative_to_prior if key in by_name else None,
                "identified": key in by_name and by_name[key].reason is None,
            }
            for key in COST_KEYS
        }
        return {
            "name": self.options.name,
            "gpu": self.setup.gpu,
            "model": self.setup.model,
            "cost": cost,
            **self.setup.limits(),
            "calibration": {
                "leap_calibrate_version": VERSION,
                "start": self.setup.preset,
                "fitted_on": self.fitted_on,
                "coefficients": coefficients,
                "not_identified": {one.name: one.reason for one in self.determined if one.reason is not None},
                "correlations": [{"between": [a, b], "correlation": value} for a, b, value in self.correlations],
                "errors_averaged_over_jitters": self.options.jitters,
                "worst_held_out_percent": self.worst_held_out_percent,
                "runs": [run.to_dict() for run in self.runs],
                "optimiser": {
                    "evaluations": self.fit.evaluations,
                    "converged": self.fit.converged,
                    "loss_at_start": self.fit.loss_start,
                    "loss": self.fit.loss,
                },
                "options": options,
                "notes": list(self.notes),
            },
        }


def calibrate(
    paths: Sequence[str | os.PathLike[str]],
    options: CalibrationOptions | None = None,
    *,
    workload: Path | None = None,
) -> Calibration:
    """Fit the step-time coefficients to one or several measured runs of one engine.

    Errors are those of the requests that were not fitted, by the coefficients of the fitted ones, and are averaged over
    jitters of the arrivals that the fit did not see.

    Raises `TraceError` for a run, `ConfigError` for an option that cannot be used.
    """
    options = options or CalibrationOptions()
    if not paths:
        raise ConfigError("give at least one run")
    _require_different(paths)
    runs = [run for path in paths for run in read_runs(path, workload)]
    chosen = setup.choose(runs, engine=options.engine, cost_model=options.cost_model, limits=options.limits)
    notes = [f"{run.name}: {note}" for run in runs for note in run.notes] + list(chosen.notes)
    rows = [_first(len(run), options.fit_share) for run in runs]
    everything = [np.ones(len(run), dtype=np.bool_) for run in runs]
    jitter_s = options.jitter_ms / 1e3
    parameters = Parameters(chosen.start, options.pull)
    with Forward(runs, chosen.cores, rows, jitters=options.jitters, jitter_s=jitter_s, seed=options.seed) as forward:
        notes.extend(forward.notes)
        found = fit(forward, rows, parameters)
        (simulated,) = forward.simulate([[found.cost]], fresh=True, timeline=True)
        results = tuple(_result(*of) for of in zip(runs, simulated, rows, strict=True))
        written, written_rows = found, rows
        if options.refit:
            written, written_rows = fit(forward, everything, parameters, found.at), everything
        load = _load(forward, written, written_rows)
    determined, correlations = identify.determine(written, load)
    notes.extend(_told(results, written))
    return Calibration(
        options=options,
        setup=chosen,
        fit=written,
        fitted_on=_fitted_on(options, rows),
        determined=tuple(determined),
        correlations=tuple(correlations),
        runs=results,
        notes=tuple(dict.fromkeys(notes)),
    )


def _require_different(paths: Sequence[str | os.PathLike[str]]) -> None:
    """Refuse a run that is given twice: it would count as twice the evidence."""
    seen: set[Path] = set()
    for path in paths:
        whole = Path(path).resolve()
        whole = whole / LOG if whole.is_dir() else whole
        if whole in seen:
            raise ConfigError(f"{path} is given twice")
        seen.add(whole)


def _first(count: int, share: float) -> Rows:
    return np.arange(count) < max(1, round(count * share))


def _result(run: MeasuredRun, simulated: Sequence[Simulated], rows: Rows) -> RunResult:
    return RunResult(
        run=run,
        fitted=int(rows.sum()),
        held_out=None if rows.all() else metric_errors(run, simulated, ~rows),
        fitted_errors=metric_errors(run, simulated, rows),
        occupancy=occupancy(run, simulated),
        preemptions=float(np.mean([one.preemptions for one in simulated])),
    )


def _load(forward: Forward, found: Fit, rows: Sequence[Rows]) -> identify.Load:
    (simulated,) = forward.simulate([[found.cost]])
    first = [jitters[0] for jitters in simulated]
    ends = [float(one.last_token_s[mask].max()) for one, mask in zip(first, rows, strict=True)]
    return identify.load_of(forward.runs, first, ends)


def _fitted_on(options: CalibrationOptions, rows: Sequence[Rows]) -> str:
    total, count = sum(len(mask) for mask in rows), sum(int(mask.sum()) for mask in rows)
    if options.refit and count < total:
        return f"all {total} requests; errors are of a fit on the first {count}"
    return f"the first {count} of {total} requests" if count < total else f"all {total} requests"


def _told(results: Sequence[RunResult], found: Fit) -> list[str]:
    notes = []
    for result in results:
        name, count = result.run.name, len(result.run) - result.fitted
        off = worst(result.fitted_errors if result.held_out is None else result.held_out) or 0.0
        if count == 0:
            notes.append(f"{name}: all requests were fitted, so nothing says how good the model is elsewhere")
        elif count < FEW:
            requests = "1 request is" if count == 1 else f"{count} requests are"
            notes.append(f"{name}: only {requests} held out, so errors of that part say little")
        if off > BAD_PERCENT:
            what = f"{name}: {off:.0f} % off: this is not the engine that was simulated"
            notes.append(f"{what} (check the limits, the ranks and --engine)")
    zeros = [key for key in found.parameters.fixed if found.parameters.start[key] == 0]
    if zeros:
        notes.append(f"0 in the start and so not fitted: {', '.join(zeros)}")
    if not found.converged:
        notes.append(f"the optimiser stopped after {found.evaluations} evaluations, not at its tolerance")
    return notes
