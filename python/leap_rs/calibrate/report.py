"""A calibration as text: coefficients, held-out errors, queue and cache, and what the runs did not determine."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from rich.console import Console
from rich.table import Table

from leap_rs.replay.engines import COST_KEYS

from .calibration import Calibration, RunResult
from .errors import METRICS, MetricError

WIDTH = 110
# Factor to the unit in which a coefficient is readable.
UNITS = {
    "step_s": (1e3, "ms"),
    "per_decode_seq_s": (1e6, "us"),
    "per_kv_token_s": (1e9, "ns"),
    "per_token_over_free_s": (1e6, "us"),
    "free_tokens": (1.0, "tokens"),
    "per_prefill_pair_s": (1e9, "ns"),
    "per_kv_token_with_prefill_s": (1e9, "ns"),
}


def report(calibration: Calibration, console: Console) -> None:
    """Print the calibration."""
    for table in (_coefficients(calibration), *(_errors(run) for run in calibration.runs)):
        title, table.title = str(table.title), None
        console.print(title, style="bold")
        console.print(table)
        console.print()
    for run in calibration.runs:
        for line in _facts(run):
            console.print(line)
    for one in calibration.determined:
        if one.reason is not None:
            console.print(f"not identified: {one.name}: {one.reason}")
    if any(one.reason is not None for one in calibration.determined):
        console.print("(not identified: the runs explain less than half of the prior's variance)", style="dim")
    for a, b, value in calibration.correlations:
        console.print(f"known only together: {a} and {b} (correlation {value:+.2f})")
    for note in calibration.notes:
        console.print(f"note: {note}", style="dim")
    if calibration.worst_held_out_percent is not None:
        jitters = calibration.options.jitters
        averaged = (
            f"averaged over {jitters} arrival jitter{'s' * (jitters != 1)} of {calibration.options.jitter_ms:g} ms"
        )
        console.print(f"worst held-out error {calibration.worst_held_out_percent:.1f} % ({averaged})", style="bold")


def _table(title: str, columns: Sequence[str]) -> Table:
    table = Table(title=title, box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="")
    for i, column in enumerate(columns):
        table.add_column(column, no_wrap=True, justify="left" if i == 0 else "right")
    return table


def _coefficients(calibration: Calibration) -> Table:
    title = f"Step-time coefficients, from {calibration.setup.preset}, fitted on {calibration.fitted_on}"
    table = _table(title, ("coefficient", "unit", "start", "fitted", "±", "sd of prior's"))
    table.add_column("")
    by_name = {one.name: one for one in calibration.determined}
    cost = calibration.fit.cost
    for key in COST_KEYS:
        factor, unit = UNITS[key]
        one = by_name.get(key)
        cells = [f"{calibration.setup.start[key] * factor:.4g}", f"{cost[key] * factor:.4g}"]
        cells += (
            ["-", "-"] if one is None else [f"{one.deviation * factor:.2g}", f"{100 * one.relative_to_prior:.0f} %"]
        )
        mark = "not fitted" if one is None else "" if one.reason is None else "not identified"
        table.add_row(key, unit, *cells, mark)
    return table


def _errors(result: RunResult) -> Table:
    held_out = result.held_out is not None
    errors = result.held_out if result.held_out is not None else result.fitted_errors
    count = len(result.run) - result.fitted if held_out else result.fitted
    part = f"the last {count} requests, not fitted" if held_out else f"all {count} requests, fitted"
    names = [f"{statistic} {metric}" for metric in ("TTFT", "TPOT", "E2EL", "PTL") for statistic in ("mean", "P90")]
    table = _table(f"{result.run.name}: {part}", ("", *names))
    order = [errors[f"{statistic}_{metric}"] for metric in METRICS for statistic in ("mean", "p90")]
    table.add_row("measured, ms", *(_number(error.measured_ms) for error in order))
    table.add_row("simulated, ms", *(_number(error.simulated_ms) for error in order))
    table.add_row("error, %", *(_signed(error) for error in order))
    table.add_row("sd over jitters, %", *(_number(error.jitter_sd_percent) for error in order))
    return table


def _facts(result: RunResult) -> list[str]:
    run = result.run
    lag = f"front-end lag median {1e3 * float(np.median(run.lag_s)):.1f} ms, max {1e3 * float(run.lag_s.max()):.1f} ms"
    lines = [f"{run.name}: {result.preemptions:.0f} preemptions simulated; {lag} (its own term, not step time)"]
    prefixes = run.shared_prefixes()
    if prefixes is not None:
        total = int(run.requests["prompt_tokens"].sum())
        shared = f"{prefixes[0]} of {len(run)} prompts start with an earlier prompt's blocks"
        lines.append(f"{run.name}: {shared} ({prefixes[1]:,} of {total:,} prompt tokens, before any eviction)")
    if result.occupancy is not None:
        for name in ("running", "waiting"):
            found = result.occupancy[name]
            means = f"mean {found['mean_measured']:.1f} measured, {found['mean_simulated']:.1f} simulated"
            peaks = f"peaks {found['peak_measured']:.0f} and {found['peak_simulated']:.0f}"
            away = f"mean absolute difference {found['mean_absolute_difference']:.1f}"
            lines.append(f"{run.name}: {name}: {means}, {away}, {peaks}")
    return lines


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.1f}"


def _signed(error: MetricError) -> str:
    return "-" if error.error_percent is None else f"{error.error_percent:+.1f}"
