"""The tables of the page as HTML: the numbers of one point, and every option in force."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from leap_rs.replay.conclude import describe_point
from leap_rs.replay.engines import LIMITS
from leap_rs.replay.options import SWEPT
from leap_rs.replay.report import QueueColumn, best, cell, interval_cell, percentiles, queue_columns, unit

Result = Mapping[str, Any]
TABULATED = ("ptl", "ttft", "tpot", "e2el")
_ENGINE = {
    *LIMITS,
    "engine",
    "gpu",
    "model",
    "kv_tokens_usable",
    "scheduler_reserve_full_isl",
    "enable_chunked_prefill",
    "enable_prefix_caching",
    "watermark",
}


@dataclass(frozen=True)
class _Column:
    group: str
    name: str
    value: Callable[[Result], Mapping[str, Any] | None]
    scale: float = 1.0
    interval: bool = False


def results_table(document: Mapping[str, Any], point: int, *, hidden: bool) -> str:
    """Policies by metrics at one point; whole intervals stand in the title of a cell."""
    results = [result for result in document["results"] if result["point"] == point]
    columns = _columns(document, results)
    groups: list[tuple[str, int]] = []
    for column in columns:
        if groups and groups[-1][0] == column.group:
            groups[-1] = (column.group, groups[-1][1] + 1)
        else:
            groups.append((column.group, 1))
    head = '<tr><th scope="col" rowspan="2">policy</th>'
    head += "".join(f'<th scope="colgroup" colspan="{n}">{escape(name)}</th>' for name, n in groups) + "</tr><tr>"
    start = _starts(columns)
    head += "".join(
        f'<th scope="col"{_class(i in start)}>{escape(column.name)}</th>' for i, column in enumerate(columns)
    )
    lowest = best(results)
    names = list(dict.fromkeys(result["policy"] for result in document["results"]))
    body = []
    for result in results:
        cells = "".join(_cell(column, result, first=i in start) for i, column in enumerate(columns))
        mark = ' class="best"' if result is lowest else ""
        body.append(
            f'<tr data-policy="{names.index(result["policy"])}"{mark}>'
            f'<th scope="row" title="{escape(result["policy"])}">{escape(result["policy"])}</th>{cells}</tr>'
        )
    return (
        f'<table class="numbers" data-point="{point}"{" hidden" if hidden else ""}>'
        f"<caption>{escape(describe_point(document, point))}</caption>"
        f"<thead>{head}</tr></thead><tbody>{''.join(body)}</tbody></table>"
    )


def _class(first: bool) -> str:
    return ' class="first"' if first else ""


def _starts(columns: Sequence[_Column]) -> set[int]:
    """Columns that begin a group."""
    return {i for i, column in enumerate(columns) if i == 0 or columns[i - 1].group != column.group}


def _cell(column: _Column, result: Result, *, first: bool) -> str:
    value = column.value(result)
    mean = None if value is None else value["mean"]
    text = interval_cell(value, column.scale) if column.interval else cell(mean, column.scale)
    title = ""
    if value is not None and mean is not None and value["ci95"] is not None:
        low, high = (cell(end, column.scale) for end in value["ci95"])
        title = f' title="95 %: {low} to {high}"'
    return f"<td{_class(first)}{title}>{escape(text)}</td>"


def _columns(document: Mapping[str, Any], results: Sequence[Result]) -> list[_Column]:
    columns = []
    shown = document["config"]["percentile_metrics"]
    for metric in TABULATED:
        name, scale = unit(metric, document["results"])
        group = f"{metric.upper()}, {name}"
        columns.append(_Column(group, "mean", _metric(f"mean_{metric}_ms"), scale, interval=True))
        if metric in shown:
            asked = percentiles(document)[0 if metric in ("ptl", "e2el") else -1 :]
            columns += [_Column(group, f"P{p}", _metric(f"p{p}_{metric}_ms"), scale) for p in asked]
    if document["config"]["goodput"]:
        columns.append(_Column("served", "goodput/s", _metric("request_goodput"), interval=True))
    columns.append(_Column("served", "req/s", _metric("request_throughput"), interval=True))
    columns.append(_Column("slowdown", "max", _metric("max_slowdown")))
    columns += [
        _Column("queue", "% steps", _grouped("queue", "share_of_steps_with_queue"), 100),
        _Column("queue", "preempted", _grouped("queue", "preemptions")),
    ]
    for column in queue_columns(document["results"]):
        if not column.always:
            columns.append(_Column("queue", column.name, _plain_mean(column), column.scale))
    if any(result["prediction"].get("spearman") is not None for result in results):
        columns.append(_Column("prediction", "Spearman", _grouped("prediction", "spearman"), interval=True))
    return columns


def _metric(key: str) -> Callable[[Result], Mapping[str, Any] | None]:
    def get(result: Result) -> Mapping[str, Any] | None:
        value: Mapping[str, Any] | None = result["metrics"].get(key)
        return value

    return get


def _plain_mean(column: QueueColumn) -> Callable[[Result], Mapping[str, Any] | None]:
    def get(result: Result) -> Mapping[str, Any] | None:
        return {"mean": column.value(result), "ci95": None}

    return get


def _grouped(group: str, key: str) -> Callable[[Result], Mapping[str, Any] | None]:
    def get(result: Result) -> Mapping[str, Any] | None:
        return {"mean": result[group].get(key), "ci95": (result[group].get("ci95") or {}).get(key)}

    return get


def options_tables(document: Mapping[str, Any]) -> str:
    """Every option in force: the run's, the engine's and its cost, then a row a policy."""
    config = document["config"]
    apart = ("policies", "policy_options", "readouts", "points", "cost_model", "capacity_rps")
    groups: dict[str, dict[str, Any]] = {"Replay": {}, "Engine": {}, "Cost of a step": dict(config["cost_model"])}
    for key, value in config.items():
        if key not in apart:
            groups["Engine" if key in _ENGINE else "Replay"][key.replace("_", "-")] = _joined(value)
    for key in SWEPT:
        values = list(dict.fromkeys(point[key] for point in config["points"] if point[key] is not None))
        if values:
            groups["Engine" if key in _ENGINE else "Replay"][key.replace("_", "-")] = _joined(values)
    rates = list(dict.fromkeys(rate for rate in config["capacity_rps"] or () if rate is not None))
    groups["Engine"]["FCFS capacity, req/s"] = _joined([round(rate, 3) for rate in rates]) or None
    for kind, used in config["readouts"].items():
        groups["Replay"][f"{kind} readout"] = "none, learns from zero" if used is None else _joined(used)
    tables = "".join(
        f'<table class="options card"><caption>{title}</caption><tbody>'
        + "".join(
            f'<tr><th scope="row">{escape(key)}</th><td>{_option(value)}</td></tr>' for key, value in group.items()
        )
        + "</tbody></table>"
        for title, group in groups.items()
    )
    return f'<div class="groups">{tables}</div>' + _policies_table(config["policy_options"])


def _policies_table(policies: Mapping[str, Mapping[str, Any]]) -> str:
    keys = list(dict.fromkeys(key for one in policies.values() for key in one if key not in ("name", "rule")))
    head = "".join(f'<th scope="col">{escape(key.replace("_", "-"))}</th>' for key in keys)
    body = "".join(
        f'<tr><th scope="row">{escape(name)}</th>'
        + "".join(f"<td>{_option(_levers(one.get(key)))}</td>" for key in keys)
        + "</tr>"
        for name, one in policies.items()
    )
    return (
        '<div class="scroll card" tabindex="0" role="region" aria-label="Options of the policies"><table class="options policies"><thead><tr><th scope="col">policy</th>'
        f"{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _levers(value: Any) -> Any:
    return "+".join(key for key, on in value.items() if on) or "none" if isinstance(value, Mapping) else value


def _joined(value: Any) -> Any:
    """A list or an object on one line."""
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_plain(_joined(one))}" for key, one in value.items() if one is not None)
    return ", ".join(map(_plain, value)) if isinstance(value, (list, tuple)) else value


def _plain(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:.12g}" if isinstance(value, float) else str(value)


def _option(value: Any) -> str:
    return "-" if value is None or value == "" else escape(_plain(value))
