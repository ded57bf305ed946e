"""The figures of the page, each a Vega-Lite specification with the columns of numbers that it draws.

A figure has one table for all points of a sweep, or one a point between which the page's selector chooses. Tables are
columns, policies are indices: the page's script makes rows of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from leap_rs.replay.options import SWEPT
from leap_rs.replay.readouts import KINDS
from leap_rs.replay.report import top_percentile, unit

from . import charts
from .rows import LEVELS, METRICS, PointDetail, Prediction
from .style import drawing_order, hidden_behind, looks

Table = dict[str, list[Any]]
Result = Mapping[str, Any]

NAMES = {"ptl": "Per-token latency (PTL)", "ttft": "Time to first token (TTFT)", "e2el": "End-to-end latency (E2EL)"}


@dataclass(frozen=True)
class Figure:
    """One chart: its section of the page, its caption (one, or one a shown point) and the same of its tables."""

    name: str
    section: str
    captions: list[str]
    spec: dict[str, Any]
    tables: list[Table] = field(repr=False)


def rounded(value: float | None, digits: int = 4) -> float | int | None:
    """A number as short as the eye needs it; None for an undefined one, so that no NaN reaches the page."""
    if value is None or not math.isfinite(value):
        return None
    short = float(f"{value:.{digits}g}")
    return int(short) if short.is_integer() else short


def figures(document: Mapping[str, Any], details: Sequence[PointDetail]) -> list[Figure]:
    """All figures that the numbers allow, in the order of the page."""
    policies = list(dict.fromkeys(result["policy"] for result in document["results"]))
    found = [
        *_latency(document, policies, details),
        *_distributions(policies, details),
        _quartiles(document, policies, details),
        *_predictions(document, policies, details),
        _queue(policies, details),
    ]
    return [figure for figure in found if figure is not None and any(_filled(table) for table in figure.tables)]


def axes(document: Mapping[str, Any]) -> list[str]:
    """The options that vary over the sweep, the one for the x axis first: the one with the most values, else the load."""
    counts = {key: len({point[key] for point in document["config"]["points"]}) for key in SWEPT}
    return sorted((key for key in SWEPT if counts[key] > 1), key=lambda key: -counts[key])


def _filled(table: Table) -> bool:
    return any(len(column) > 0 for column in table.values())


def _latency(document: Mapping[str, Any], policies: Sequence[str], details: Sequence[PointDetail]) -> list[Figure]:
    top = top_percentile(document)
    varied = axes(document)
    found = []
    for name, key, metric in (("Mean PTL", "mean_ptl_ms", "ptl"), (f"P{top} E2EL", f"p{top}_e2el_ms", "e2el")):
        shown, scale = unit(metric, document["results"])
        tables = [
            _latency_table(document, policies, key, scale, varied, detail.point)
            for detail in (details if len(varied) != 1 else details[:1])
        ]
        if varied:
            values = [point[varied[0]] for point in document["config"]["points"]]
            log = _spread(tables, "mean") > 30
            behind = list(hidden_behind(document))
            spec = charts.sweep(looks(policies), f"{name}, {shown}", varied[0], values, log=log, behind=behind)
        else:
            spec = charts.single(looks(policies), f"{name}, {shown}")
        by = f" against {varied[0].replace('_', '-')}" if varied else ""
        found.append(Figure(key.replace("_", "-"), "latency", [f"{name}{by}"], spec, tables))
    return found


def _latency_table(
    document: Mapping[str, Any], policies: Sequence[str], key: str, scale: float, varied: Sequence[str], point: int
) -> Table:
    """The policies along the x axis through one point: what else is swept stays as it is there."""
    points = document["config"]["points"]
    table: Table = {"policy": [], "x": [], "mean": [], "low": [], "high": []}
    for i in drawing_order(policies):
        for result in document["results"]:
            here = points[result["point"]]
            value = result["metrics"].get(key)
            if result["policy"] != policies[i] or any(here[name] != points[point][name] for name in varied[1:]):
                continue
            if value is None or value["mean"] is None:
                continue
            low, high = value["ci95"] or (value["mean"], value["mean"])
            table["policy"].append(i)
            table["x"].append(here[varied[0]] if varied else None)
            for name, one in (("mean", value["mean"]), ("low", low), ("high", high)):
                table[name].append(rounded(one * scale, 5))
    return table


def _spread(tables: Sequence[Table], column: str) -> float:
    values = [value for table in tables for value in table[column]]
    return max(values) / min(values) if values and min(values) > 0 else 1.0


def _distributions(policies: Sequence[str], details: Sequence[PointDetail]) -> list[Figure]:
    found = []
    for metric in METRICS:
        shown, scale = ("ms", 1.0) if metric == "ptl" else ("s", 1e-3)
        tables = []
        for detail in details:
            table: Table = {"policy": [], "share": [], "value": []}
            for i in drawing_order(policies):
                known = detail.policies.get(policies[i])
                for level, value in zip(LEVELS, () if known is None else known.quantiles[metric], strict=False):
                    if value > 0:
                        table["policy"].append(i)
                        table["share"].append(rounded(level))
                        table["value"].append(rounded(value * scale))
            tables.append(table)
        decades = math.log10(max((_spread([table], "value") for table in tables), default=1.0))
        spec = charts.distribution(looks(policies), metric.upper(), shown, decades=decades)
        found.append(Figure(f"cdf-{metric}", "distributions", [NAMES[metric]], spec, tables))
    return found


def _quartiles(document: Mapping[str, Any], policies: Sequence[str], details: Sequence[PointDetail]) -> Figure:
    tables = []
    relative = "fcfs" in policies
    for detail in details:
        table: Table = {"policy": [], "group": [], "value": [], "seconds": []}
        by_policy = {r["policy"]: r["by_quartile"] for r in document["results"] if r["point"] == detail.point}
        base = by_policy.get("fcfs")
        for i in drawing_order(policies):
            names = _groups(by_policy.get(policies[i], ()))
            for k, quartile in enumerate(by_policy.get(policies[i], ())):
                mean = quartile["mean_e2el_ms"]["mean"]
                of = base[k]["mean_e2el_ms"]["mean"] if relative and base else 1e3
                if mean is not None and of:
                    table["policy"].append(i)
                    table["group"].append(names[k])
                    table["value"].append(rounded(mean / of))
                    table["seconds"].append(rounded(mean / 1e3))
        tables.append(table)
    caption = "Mean E2EL relative to fcfs" if relative else "Mean E2EL"
    caption += ", by quartile of true output length"
    return Figure("quartiles", "quartiles", [caption], charts.quartiles(looks(policies), relative=relative), tables)


def _groups(quartiles: Sequence[Mapping[str, Any]]) -> list[str]:
    """The lengths of each group and its share of the requests: where many answers are equally long two quartiles are one."""
    total = sum(quartile["requests"] for quartile in quartiles)
    names, before = [], None
    for quartile in quartiles:
        longest = quartile["max_output_tokens"]
        lengths = f"up to {longest:,.0f}" if before is None else f"{before + 1:,.0f} to {longest:,.0f}"
        names.append(f"{lengths}, {100 * quartile['requests'] / total:.0f} %")
        before = longest
    return names


def _predictions(document: Mapping[str, Any], policies: Sequence[str], details: Sequence[PointDetail]) -> list[Figure]:
    found = []
    for policy in policies:
        kinds = [detail.policies[policy].prediction for detail in details if policy in detail.policies]
        some = next((kind for kind in kinds if kind is not None), None)
        if some is None:
            continue
        tables = [
            _cells(detail.policies[policy].prediction if policy in detail.policies else None) for detail in details
        ]
        captions = [_spearman(document, policy, detail.point) for detail in details]
        name = f"prediction-{policies.index(policy)}"
        found.append(Figure(name, "predictions", captions, charts.prediction(policy, ranks=some.ranks), tables))
    return found


def _cells(prediction: Prediction | None) -> Table:
    table: Table = {"x": [], "x2": [], "y": [], "y2": [], "requests": []}
    if prediction is None:
        return table
    edges = [rounded(edge) for edge in prediction.edges]
    for i, j in zip(*prediction.counts.nonzero(), strict=True):
        table["x"].append(edges[i])
        table["x2"].append(edges[i + 1])
        table["y"].append(edges[j])
        table["y2"].append(edges[j + 1])
        table["requests"].append(int(prediction.counts[i, j]))
    return table


def _spearman(document: Mapping[str, Any], policy: str, point: int) -> str:
    """The policy and its rank correlations: those of its readouts one by one, where it has them."""
    result = next((r for r in document["results"] if r["policy"] == policy and r["point"] == point), None)
    prediction = {} if result is None else result["prediction"]
    parts = {kind: (prediction.get(kind) or {}).get("spearman") for kind in KINDS}
    known = [f"{_hundredths(value)} ({kind})" for kind, value in parts.items() if value is not None]
    if not known:
        whole = prediction.get("spearman")
        known = ["undefined" if whole is None else _hundredths(whole)]
    return f"{policy}: Spearman {', '.join(known)}"


def _hundredths(value: float) -> str:
    return f"{round(value, 2) + 0.0:.2f}"  # the sum has no -0.00


def _queue(policies: Sequence[str], details: Sequence[PointDetail]) -> Figure:
    tables: list[Table] = []
    for detail in details:
        table: Table = {"t": [rounded(t) for t in detail.instants]}
        for i, policy in enumerate(policies):
            known = detail.policies.get(policy)
            if known is not None:
                table[f"p{i}"] = known.waiting.tolist()
        tables.append(table)
    caption = "Requests that have arrived and have no first token yet"
    return Figure("queue", "queue", [caption], charts.queue(looks(policies), drawing_order(policies)), tables)
