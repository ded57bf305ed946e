"""Colours and dashes: each policy looks the same in every chart, and the colour-blind can tell them apart.

Hues are those of Okabe and Ito and of Paul Tol's muted scheme; `fcfs` is grey, `leap` is the one that stands out, and the
oracles, which nobody can run, are dashed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

INK = "#1c2430"
FAINT = "#5b6675"
GRID = "#e6e9ee"
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif"

_COLOURS = {
    "fcfs": "#6f7782",
    "sjf-prompt": "#56b4e9",
    "hrrn": "#0072b2",
    "las": "#009e73",
    "mlfq": "#cc79a7",
    "leap-frozen": "#999933",
    "leap-paper": "#e69f00",
    "leap": "#d55e00",
    "sjf-oracle": "#8a7a6a",
    "srpt-oracle": "#111111",
}
# For score:NAME and for further specifications of a policy that has its colour already.
_FURTHER = ("#332288", "#44aa99", "#882255", "#117733", "#aa4499", "#88ccee", "#661100", "#ddaa33")
_DASHES = {"sjf-oracle": (2, 3), "srpt-oracle": (7, 3)}


@dataclass(frozen=True)
class Look:
    """How one policy is drawn."""

    policy: str
    colour: str
    dash: tuple[int, ...]
    width: float


def looks(policies: Sequence[str]) -> list[Look]:
    """The look of each policy, in the order given; two specifications of one policy never share a colour by chance."""
    further = iter(_FURTHER * (len(policies) // len(_FURTHER) + 1))
    taken: set[str] = set()
    found = []
    for policy in policies:
        base = policy.split(":")[0]
        colour = _COLOURS.get(base)
        if colour is None or colour in taken:
            colour = next(further)
        taken.add(colour)
        found.append(Look(policy, colour, _DASHES.get(base, ()), {"leap": 3.0, "fcfs": 2.5}.get(base, 1.8)))
    return found


def drawing_order(policies: Sequence[str]) -> list[int]:
    """Indices of the policies from the one at the back to the one in front.

    Where lines lie on each other leap shows, and fcfs over those that do as it does.
    """

    def rank(i: int) -> int:
        base = policies[i].split(":")[0]
        return {"fcfs": 1, "leap": 2}.get(base, 0)

    return sorted(range(len(policies)), key=rank)


def hidden_behind(document: Mapping[str, Any]) -> dict[str, str]:
    """Policies whose lines lie under another's in every chart, and that other one: all their numbers are the same."""
    metrics: dict[str, list[Any]] = {}
    for result in document["results"]:
        metrics.setdefault(result["policy"], []).append((result["point"], result["metrics"], result["by_quartile"]))
    policies = list(metrics)
    found = {}
    order = [policies[i] for i in drawing_order(policies)]
    for i, policy in enumerate(order):
        front = next((other for other in reversed(order[i + 1 :]) if metrics[other] == metrics[policy]), None)
        if front is not None:
            found[policy] = front
    return found


def chart_config() -> dict[str, Any]:
    """The Vega-Lite config of every chart."""
    return {
        "font": FONT,
        "background": None,
        "view": {"stroke": None},
        "axis": {
            "labelColor": FAINT,
            "titleColor": INK,
            "labelFontSize": 12,
            "titleFontSize": 12,
            "titleFontWeight": 600,
            "titlePadding": 8,
            "gridColor": GRID,
            "domainColor": "#b9c0ca",
            "tickColor": "#b9c0ca",
            "labelPadding": 5,
            "labelOverlap": "greedy",
            "labelSeparation": 6,
        },
        "legend": {"labelFontSize": 12, "titleFontSize": 12, "labelColor": FAINT, "titleColor": INK},
    }
