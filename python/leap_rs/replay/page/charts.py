"""The charts as Vega-Lite, made with altair: how they look, without the numbers.

Each takes its rows from the dataset `rows` and dims all policies but those in its parameter `picked`; the page's script sets
both. Widths follow the page.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Literal

import altair as alt

from .style import FAINT, INK, Look, chart_config

ROWS = alt.NamedData(name="rows")
HEIGHT = 280
WIDE = 20  # times the smallest: swept values up to here stand on a linear axis
# Lines at the powers of ten stand out among those between them.
DECADES: Any = {"condition": {"test": "abs(log(datum.value) / LN10 % 1) < 1e-6", "value": 1}, "value": 0.4}
PICKED = "!length(picked) || indexof(picked, datum.policy) >= 0"


def _spec(chart: alt.LayerChart | alt.FacetChart, description: str, *, height: int = HEIGHT) -> dict[str, Any]:
    chart = chart.add_params(alt.param(name="picked", value=[]))
    chart = chart.properties(width="container", height=height, description=description)
    chart = chart.properties(autosize=alt.AutoSizeParams(type="fit-x", contains="padding"))
    spec: dict[str, Any] = chart.to_dict()
    # The schema's address is never fetched, but a page that names no other place needs no explanation.
    del spec["$schema"]
    spec["config"] = chart_config()
    return spec


def _colour(looks: Sequence[Look]) -> alt.Color:
    scale = alt.Scale(domain=[look.policy for look in looks], range=[look.colour for look in looks])
    return alt.Color("policy:N", scale=scale, legend=None)


def _dash(looks: Sequence[Look]) -> alt.StrokeDash:
    scale = alt.Scale(domain=[look.policy for look in looks], range=[list(look.dash) or [1, 0] for look in looks])
    return alt.StrokeDash("policy:N", scale=scale, legend=None)


def _width(looks: Sequence[Look]) -> alt.StrokeWidth:
    scale = alt.Scale(type="ordinal", domain=[look.policy for look in looks], range=[look.width for look in looks])
    return alt.StrokeWidth("policy:O", scale=scale, legend=None)


def _order() -> alt.Detail:
    """Groups are drawn in the order in which they come first; a sort of the legend must not change it."""
    return alt.Detail("policy:N")


def spacing(values: Sequence[float]) -> Literal["linear", "log", "symlog"]:
    """The scale on which swept values lie apart: 0.001, 0.01 and 0.1 would be two dots on a linear one."""
    positive = [value for value in values if value > 0]
    if not positive or max(positive) / min(positive) <= WIDE:
        return "linear"
    return "symlog" if len(positive) < len(values) else "log"


def _opacity(full: float = 1.0, dim: float = 0.1) -> Any:
    return alt.when(PICKED).then(alt.value(full)).otherwise(alt.value(dim))


def sweep(
    looks: Sequence[Look], title: str, axis: str, values: Sequence[float], *, log: bool, behind: Sequence[str] = ()
) -> dict[str, Any]:
    """A latency along the `values` of the option that is swept, with 95 % bands.

    Bands that lie on each other would mix to a colour of nobody's: those of policies `behind` others show when picked.
    """
    name, _, shown = title.rpartition(", ")
    kind = spacing(values)
    if kind == "linear":
        x_axis, x_scale = alt.Axis(), alt.Scale(zero=False, nice=False, padding=12)
    else:
        x_axis = alt.Axis(values=sorted(set(values)), format="~g")
        constant = min(value for value in values if value > 0) if kind == "symlog" else alt.Undefined
        x_scale = alt.Scale(type=kind, constant=constant, nice=False, padding=12)
    x = alt.X("x:Q", title=axis.replace("_", "-"), axis=x_axis, scale=x_scale)
    scale = alt.Scale(type="log") if log else alt.Scale(domainMin=0)
    tooltip = [
        alt.Tooltip("policy:N"),
        alt.Tooltip("x:Q", title=axis.replace("_", "-")),
        alt.Tooltip("mean:Q", title=title, format=",.4~r"),
        alt.Tooltip("low:Q", title=f"95 % from, {shown}", format=",.4~r"),
        alt.Tooltip("high:Q", title=f"95 % to, {shown}", format=",.4~r"),
    ]
    base = alt.Chart(ROWS).encode(x=x, color=_colour(looks), detail=_order())
    y = alt.Y("mean:Q", title=title, scale=scale, axis=alt.Axis(format=",.3~r", tickCount=6))
    seen = f"({PICKED}) && (length(picked) > 0 || indexof({json.dumps(list(behind))}, datum.policy) < 0)"
    band = base.mark_area(clip=True).encode(
        y=alt.Y("low:Q", scale=scale, title=title),
        y2="high:Q",
        opacity=alt.when(seen).then(alt.value(0.16)).otherwise(alt.value(0.02)),
    )
    line = base.mark_line().encode(y=y, strokeDash=_dash(looks), strokeWidth=_width(looks), opacity=_opacity())
    dots = base.mark_circle(size=46).encode(y=y, opacity=_opacity(), tooltip=tooltip)
    where = f"Lines of {name} in {shown} against {axis.replace('_', '-')}, one a policy, with 95 % bands."
    return _spec(alt.layer(band, line, dots), where)


def single(looks: Sequence[Look], title: str) -> dict[str, Any]:
    """A latency where nothing is swept: a bar a policy with its interval."""
    shown = title.rpartition(", ")[2]
    y = alt.Y("policy:N", title=None, sort=[look.policy for look in looks], axis=alt.Axis(labelLimit=150, ticks=False))
    tooltip = [
        alt.Tooltip("policy:N"),
        alt.Tooltip("mean:Q", title=title, format=",.4~r"),
        alt.Tooltip("low:Q", title=f"95 % from, {shown}", format=",.4~r"),
        alt.Tooltip("high:Q", title=f"95 % to, {shown}", format=",.4~r"),
    ]
    base = alt.Chart(ROWS).encode(y=y, tooltip=tooltip)
    x = alt.X(
        "mean:Q", title=title, scale=alt.Scale(domainMin=0), axis=alt.Axis(format=",.3~r", tickCount=5, grid=True)
    )
    bar = base.mark_bar(height={"band": 0.62}, cornerRadiusEnd=2).encode(
        x=x, color=_colour(looks), opacity=_opacity(0.9)
    )
    # An interval of few seeds may reach below 0, which no latency does.
    rule = base.mark_rule(strokeWidth=1.5, color=INK, clip=True).encode(
        x=alt.X("low:Q", title=title), x2="high:Q", opacity=_opacity()
    )
    return _spec(alt.layer(bar, rule), f"Bars of {title}, one a policy, with 95 % intervals.", height=26 * len(looks))


def _labels(decades: float) -> str:
    """Which ticks of a logarithmic axis get their number: evenly spaced ones, as many as there is room for."""
    if decades < 0.7:
        return "datum.label"
    digits = [1, 2, 5] if decades < 1.5 else [1, 3] if decades < 3 else [1]
    leading = "round(datum.value / pow(10, floor(log(datum.value) / LN10 + 1e-9)))"
    return f"indexof({digits}, {leading}) >= 0 ? datum.label : ''"


def distribution(looks: Sequence[Look], metric: str, shown: str, *, decades: float) -> dict[str, Any]:
    """Share of the requests that had at most this latency, a line a policy over a logarithmic axis of so many `decades`."""
    x = alt.X(
        "value:Q",
        title=f"{metric}, {shown} (log)",
        scale=alt.Scale(type="log", nice=False),
        axis=alt.Axis(format="~g", gridOpacity=DECADES, tickOpacity=DECADES, labelExpr=_labels(decades)),
    )
    y = alt.Y("share:Q", title="share of requests", axis=alt.Axis(format=".0%", tickCount=5))
    tooltip = [
        alt.Tooltip("policy:N"),
        alt.Tooltip("share:Q", title="share of requests", format=".1%"),
        alt.Tooltip("value:Q", title=f"at most, {shown}", format=",.4~r"),
    ]
    base = alt.Chart(ROWS).encode(x=x, y=y, color=_colour(looks), detail=_order())
    line = base.mark_line(interpolate="monotone").encode(
        strokeDash=_dash(looks), strokeWidth=_width(looks), opacity=_opacity(), order="share:Q"
    )
    # Dots that are not seen, for the tooltip: a line has one for all of it.
    dots = base.mark_circle(size=90, opacity=0).encode(tooltip=tooltip)
    where = f"Distribution functions of {metric} in {shown}, one a policy, over a logarithmic axis."
    return _spec(alt.layer(line, dots), where)


def quartiles(looks: Sequence[Look], *, relative: bool) -> dict[str, Any]:
    """Mean E2EL of short to long answers, a line a policy."""
    title = "mean E2EL relative to fcfs (log)" if relative else "mean E2EL, s (log)"
    x = alt.X(
        "group:O",
        title="true output length, tokens, and share of the requests",
        sort=None,
        scale=alt.Scale(padding=0.3),
        axis=alt.Axis(labelAngle=0, grid=False, labelExpr="split(datum.label, ', ')"),
    )
    y = alt.Y(
        "value:Q",
        title=title,
        scale=alt.Scale(type="log", nice=False, padding=10),
        axis=alt.Axis(format=".0%" if relative else ",.3~r", tickCount=6),
    )
    tooltip = [
        alt.Tooltip("policy:N"),
        alt.Tooltip("group:O", title="true output length, tokens"),
        alt.Tooltip("seconds:Q", title="mean E2EL, s", format=",.4~r"),
    ]
    if relative:
        tooltip.append(alt.Tooltip("value:Q", title="relative to fcfs", format=".1%"))
    base = alt.Chart(ROWS).encode(x=x, y=y, color=_colour(looks), detail=_order())
    line = base.mark_line().encode(strokeDash=_dash(looks), strokeWidth=_width(looks), opacity=_opacity())
    dots = base.mark_circle(size=60).encode(opacity=_opacity(), tooltip=tooltip)
    where = f"Lines of {title}, from the quartile of the shortest answers to that of the longest, one a policy."
    return _spec(alt.layer(line, dots), where)


def prediction(policy: str, *, ranks: bool) -> dict[str, Any]:
    """Predicted against true lengths in bins of both, darker where more requests lie."""
    shown = "rank, %" if ranks else "tokens"
    scale = alt.Scale(nice=False) if ranks else alt.Scale(type="log", base=2, nice=False)
    axis = alt.Axis(format=",d", tickCount=6, grid=False)
    tooltip = [
        alt.Tooltip("x:Q", title=f"predicted from, {shown}", format=",.3~r"),
        alt.Tooltip("x2:Q", title=f"predicted to, {shown}", format=",.3~r"),
        alt.Tooltip("y:Q", title=f"true from, {shown}", format=",.3~r"),
        alt.Tooltip("y2:Q", title=f"true to, {shown}", format=",.3~r"),
        alt.Tooltip("requests:Q", format=","),
    ]
    cells = (
        alt.Chart(ROWS)
        .mark_rect(stroke="white", strokeWidth=0.5)
        .encode(
            x=alt.X("x:Q", title=f"predicted {shown}", scale=scale, axis=axis),
            x2="x2:Q",
            y=alt.Y("y:Q", title=f"true {shown}", scale=scale, axis=axis),
            y2="y2:Q",
            color=alt.Color(
                "requests:Q",
                scale=alt.Scale(range=["#dce8f4", "#0b3c6f"]),
                legend=alt.Legend(
                    title="requests",
                    orient="top",
                    direction="horizontal",
                    titleOrient="left",
                    gradientLength=110,
                    gradientThickness=9,
                    tickCount=2,
                ),
            ),
            tooltip=tooltip,
        )
    )
    # From the corners of the cells themselves: what lies on this line was predicted exactly.
    exact = (
        alt.Chart(ROWS)
        .transform_aggregate(low="min(x)", high="max(x2)", low_true="min(y)", high_true="max(y2)")
        .transform_calculate(
            start="max(datum.low, datum.low_true)",
            end="min(datum.high, datum.high_true)",
        )
        .mark_rule(color=FAINT, strokeDash=[4, 3])
        .encode(x="start:Q", y="start:Q", x2="end:Q", y2="end:Q")
    )
    where = f"Predicted against true output length of {policy}: number of requests by {shown} of both."
    return _spec(alt.layer(cells, exact), where)


def queue(looks: Sequence[Look], order: Sequence[int]) -> dict[str, Any]:
    """Requests in the queue over time, a line a policy; pointing at an instant shows all of them."""
    names = json.dumps([look.policy for look in looks])
    columns: list[str | alt.FieldName] = [f"p{i}" for i in order]
    x = alt.X("t:Q", title="time, s", scale=alt.Scale(nice=False), axis=alt.Axis(format=",.6~r", tickCount=8))
    line = (
        alt.Chart(ROWS)
        .transform_fold(columns, as_=["column", "waiting"])
        .transform_filter("isValid(datum.waiting)")
        .transform_calculate(policy=f"{names}[toNumber(slice(datum.column, 1))]")
        .mark_line()
        .encode(
            x=x,
            y=alt.Y("waiting:Q", title="requests waiting", axis=alt.Axis(format=",.6~r", tickCount=5, tickMinStep=1)),
            color=_colour(looks),
            strokeDash=_dash(looks),
            strokeWidth=_width(looks),
            detail=_order(),
            opacity=_opacity(),
        )
    )
    hover = alt.selection_point(name="hover", on="pointerover", clear="pointerout", nearest=False)
    rule = (
        alt.Chart(ROWS)
        .mark_rule(strokeWidth=6, color=INK)
        .encode(
            x=x,
            opacity=alt.when(hover, empty=False).then(alt.value(0.15)).otherwise(alt.value(0)),
            tooltip=[
                alt.Tooltip("t:Q", title="time, s", format=",.4~r"),
                *[alt.Tooltip(f"p{i}:Q", title=look.policy, format=",") for i, look in enumerate(looks)],
            ],
        )
        .add_params(hover)
        # Without a name older altair numbers the view, on and on from page to page.
        .properties(name="hovered")
    )
    return _spec(alt.layer(line, rule), "Lines of the number of requests that wait over time, one a policy.")
