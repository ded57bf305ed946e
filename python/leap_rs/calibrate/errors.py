"""How far simulated latencies are from measured ones: mean and P90 of TTFT, TPOT, E2EL and PTL, each on its own.

They stand apart because errors cancel: a TTFT that is far too short and a TPOT that is far too long can give a good E2EL.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .forward import Simulated, step_values
from .measured import Floats, MeasuredRun

METRICS = ("ttft", "tpot", "e2el", "ptl")
PERCENTILE = 90.0
Rows = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class MetricError:
    """One statistic of one metric, milliseconds and percent; None where it is undefined."""

    measured_ms: float | None
    simulated_ms: float | None
    error_percent: float | None
    """Mean over the jitters."""
    jitter_sd_percent: float | None
    """How much it moves between jitters: below this no error means anything."""

    def to_dict(self) -> dict[str, float | None]:
        """As it stands in JSON."""
        return dict(vars(self))


def latencies(run: MeasuredRun, first: Floats, last: Floats, rows: Rows) -> dict[str, Floats]:
    """Seconds from the planned arrival, by the definitions of `vllm bench serve`; PTL is E2EL over output tokens."""
    start, tokens, first, last = run.planned_s[rows], run.output_tokens[rows], first[rows], last[rows]
    several = tokens > 1
    return {
        "ttft": first - start,
        "tpot": (last - first)[several] / (tokens - 1)[several],
        "e2el": last - start,
        "ptl": (last - start) / tokens,
    }


def metric_errors(run: MeasuredRun, simulated: Sequence[Simulated], rows: Rows) -> dict[str, MetricError]:
    """`mean_ttft`, `p90_ttft`, ... of the requests in `rows`."""
    real = latencies(run, run.first_token_s, run.last_token_s, rows)
    ours = [latencies(run, one.first_token_s, one.last_token_s, rows) for one in simulated]
    errors = {}
    for name in METRICS:
        for statistic in ("mean", "p90"):
            measured = _statistic(real[name], statistic)
            values = np.array([_statistic(one[name], statistic) for one in ours])
            errors[f"{statistic}_{name}"] = _error(measured, values)
    return errors


def _statistic(values: Floats, name: str) -> float:
    if not values.size:
        return float("nan")
    return float(values.mean()) if name == "mean" else float(np.percentile(values, PERCENTILE))


def _error(measured: float, values: Floats) -> MetricError:
    if not np.isfinite(measured):
        return MetricError(None, None, None, None)
    milliseconds = 1e3 * measured, 1e3 * float(values.mean())
    if measured <= 0:
        return MetricError(*milliseconds, None, None)
    percent = 100.0 * (values / measured - 1.0)
    return MetricError(*milliseconds, float(percent.mean()), float(percent.std()))


def worst(errors: Mapping[str, MetricError]) -> float | None:
    """The largest error in percent, whatever its sign."""
    found = [abs(error.error_percent) for error in errors.values() if error.error_percent is not None]
    return max(found) if found else None


def occupancy(run: MeasuredRun, simulated: Sequence[Simulated]) -> dict[str, Any] | None:
    """Requests running and waiting against what the real engine logged, at the times of its log."""
    observed = run.observed
    if observed is None or any(one.timeline is None for one in simulated):
        return None
    found: dict[str, Any] = {"samples": len(observed.at_s)}
    for name, real, index in (("running", observed.running, 2), ("waiting", observed.waiting, 1)):
        ours = np.mean([step_values(t[0], t[index], observed.at_s) for one in simulated if (t := one.timeline)], axis=0)
        found[name] = {
            "mean_measured": float(real.mean()),
            "mean_simulated": float(ours.mean()),
            "mean_absolute_difference": float(np.abs(ours - real).mean()),
            "peak_measured": float(real.max()),
            "peak_simulated": float(ours.max()),
        }
    return found
