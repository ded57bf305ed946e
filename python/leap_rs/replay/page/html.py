"""The page as one HTML text: what the reader reads, in order; numbers and specifications as data; style and scripts inlined."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from pathlib import PurePath
from typing import Any

from leap_rs._leap import __version__
from leap_rs.replay.conclude import describe_point, number
from leap_rs.replay.options import RESERVED
from leap_rs.replay.report import capacity, replayed

from .figures import Figure, axes, figures
from .rows import MAX_POINTS, PointDetail
from .style import Look, hidden_behind, looks
from .tables import options_tables, results_table

# The page may run its own scripts and style itself; nothing in it can reach any other place.
POLICY = "default-src 'none'; script-src 'unsafe-inline' 'unsafe-eval'; style-src 'unsafe-inline'; img-src data:"

MANY = 12
_SECTIONS = {
    "latency": ("Latency", "Means over the seeds; {band}."),
    "distributions": (
        "Distributions",
        "Share of the requests that had at most this latency, first seed (the trace as recorded).",
    ),
    "quartiles": (
        "Who pays",
        "Means over the seeds. Shortest-first moves waiting from short answers to long ones: below 100 % a group is served sooner than by fcfs.",
    ),
    "predictions": (
        "Predicted against true length",
        "Requests of the first seed by the last prediction made of each: the state readout's where there is one, else the "
        "text readout's, the prompt readout's or the score. On the dashed line it was exact. Spearman is the mean over the seeds.",
    ),
    "queue": ("Queue over time", "First seed, at 300 instants."),
}


def page(document: Mapping[str, Any], details: Sequence[PointDetail], origin: str, bundle: str) -> str:
    """The whole page. `origin` is the command that reproduces it, `bundle` the JavaScript that draws Vega-Lite."""
    policies = list(dict.fromkeys(result["policy"] for result in document["results"]))
    points = [detail.point for detail in details]
    start = _start(document, points)
    drawn = figures(document, details)
    data = {
        "policies": policies,
        "points": points,
        "start": start,
        "figures": [
            {"name": figure.name, "spec": figure.spec, "captions": figure.captions, "tables": figure.tables}
            for figure in drawn
        ],
    }
    title = f"leap-replay: {PurePath(document['trace'].get('path') or 'frame').name}"
    tables = "".join(results_table(document, point, hidden=i != start) for i, point in enumerate(points))
    body = [
        _header(document, title),
        _conclusions(document),
        _bar(document, points, start, looks(policies)),
        '<section aria-labelledby="h-numbers"><h2 id="h-numbers">Numbers</h2>'
        f'<div class="scroll card" tabindex="0" role="region" aria-labelledby="h-numbers">{tables}</div>'
        f'<p class="note">{_about_numbers(document)}</p></section>',
        *(_section(name, drawn, document, start) for name in _SECTIONS),
        _notes(document, points),
        _reproduce(origin, document),
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">'
        f"<title>{escape(title)}</title><style>{_asset('page.css')}</style></head><body>"
        f"<main>{_kept(''.join(body))}</main>"
        f'<script type="application/json" id="data">{_json(data)}</script>'
        f"<script>{_script(bundle)}</script><script>{_script(_asset('page.js'))}</script></body></html>\n"
    )


def _asset(name: str) -> str:
    return (files(__package__) / name).read_text(encoding="utf-8")


def _kept(text: str) -> str:
    """A number and its per cent sign on one line."""
    return re.sub(r"(?<=\d) %", "\N{NO-BREAK SPACE}%", text)


def _json(data: Any) -> str:
    """Strict JSON that cannot end the script element it stands in."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"), ensure_ascii=False)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _script(text: str) -> str:
    return text.replace("</script", "<\\/script").replace("<!--", "<\\!--")


def _start(document: Mapping[str, Any], points: Sequence[int]) -> int:
    """Which shown point the page opens with: the one whose load is nearest to 1.2, where orders matter, or the last."""
    settings = document["config"]["points"]
    loads = [settings[point]["load"] for point in points]
    if not points or any(load is None for load in loads):
        return max(0, len(points) - 1)
    return min(range(len(points)), key=lambda i: abs(loads[i] - 1.2))


def _header(document: Mapping[str, Any], title: str) -> str:
    config = document["config"]
    limits = f"{config['max_num_seqs']:,} sequences, {config['max_num_batched_tokens']:,} tokens a step, KV cache of "
    limits += f"{config['kv_tokens_usable']:,} tokens"
    if config.get("decode_slots"):
        limits += f", {config['decode_slots']:,} decode slots"
    engine = config["engine"] + (f" ({config['gpu']}, {config['model']})" if config.get("gpu") else "")
    load = describe_point(document, 0) if len(config["points"]) == 1 else _swept(document)
    facts = {
        "Trace": replayed(document),
        "Engine": f"{engine}: {limits}",
        ("Load" if len(config["points"]) == 1 else "Sweep"): load + capacity(config),
        "Runs": f"{config['seeds']} seeds a policy" if config["seeds"] > 1 else "one seed, so no intervals",
        **{str(key): str(value) for key, value in document.items() if key not in RESERVED},
    }
    listed = "".join(f"<div><dt>{escape(key)}</dt><dd>{escape(value)}</dd></div>" for key, value in facts.items())
    return f"<header><h1>{escape(title)}</h1><dl>{listed}</dl></header>"


def _swept(document: Mapping[str, Any]) -> str:
    points = document["config"]["points"]
    spans = []
    for key in axes(document):
        values = [point[key] for point in points]
        spans.append(f"{key.replace('_', '-')} {number(min(values))} to {number(max(values))}")
    return f"{', '.join(spans)} in {len(points)} points"


def _conclusions(document: Mapping[str, Any]) -> str:
    split = (sentence.partition(": ") for sentence in document["conclusions"])
    sentences = "".join(f"<li><b>{escape(where + colon)}</b>{escape(what)}</li>" for where, colon, what in split)
    # A long sweep would push the numbers off the first screens: its sentences scroll in a box of their own.
    many = ' many" tabindex="0' if len(document["conclusions"]) > MANY else ""
    return f'<section class="conclusions{many}" aria-label="Conclusions"><ul>{sentences}</ul></section>'


def _bar(document: Mapping[str, Any], points: Sequence[int], start: int, legend: Sequence[Look]) -> str:
    """What stays in view: which point is shown, and the legend of all charts, whose entries pick policies."""
    choice = ""
    if len(points) > 1:
        options = "".join(
            f'<option value="{i}"{" selected" if i == start else ""}>{escape(describe_point(document, point))}</option>'
            for i, point in enumerate(points)
        )
        choice = f'<label class="choice">Show <select id="point">{options}</select></label>'
    behind = hidden_behind(document)
    chips = "".join(_chip(i, look, behind.get(look.policy)) for i, look in enumerate(legend))
    return (
        f'<div class="bar">{choice}<div class="legend" role="group" aria-label="Policies to highlight">{chips}'
        '<button type="button" id="all" hidden>show all</button></div></div>'
    )


def _chip(i: int, look: Look, front: str | None) -> str:
    """An entry of the legend. A line that lies under that of another policy, `front`, would be looked for in vain."""
    same = f" <small>= {escape(front)}</small>" if front is not None else ""
    dash = f' stroke-dasharray="{" ".join(map(str, look.dash))}"' if look.dash else ""
    line = f'<line x1="0" y1="5" x2="22" y2="5" stroke="{look.colour}" stroke-width="{look.width + 0.5:g}"{dash}/>'
    return (
        f'<button type="button" class="chip" data-policy="{i}" aria-pressed="false">'
        f'<svg width="22" height="10" aria-hidden="true">{line}</svg>{escape(look.policy)}{same}</button>'
    )


def _about_numbers(document: Mapping[str, Any]) -> str:
    seeds = document["config"]["seeds"]
    text = f"Means over {seeds} seeds, ± is half a 95 % interval. " if seeds > 1 else ""
    text += (
        "PTL is (completion - planned arrival) / output tokens; TTFT, TPOT and E2EL are vLLM's, from the planned arrival. "
        "Queue: share of engine steps that left a request waiting, times a request lost its KV cache. "
        "Green: the lowest mean PTL of a policy that does not know the true lengths."
    )
    return escape(text)


def _section(name: str, drawn: Sequence[Figure], document: Mapping[str, Any], start: int) -> str:
    own = [figure for figure in drawn if figure.section == name]
    if not own:
        return ""
    title, about = _SECTIONS[name]
    band = "bands and bars are 95 % intervals" if document["config"]["seeds"] > 1 else "one seed, so no intervals"
    cards = "".join(
        f'<figure class="card"><figcaption id="c-{figure.name}">'
        f"{escape(figure.captions[start if len(figure.captions) > 1 else 0])}</figcaption>"
        f'<div class="chart" id="f-{figure.name}"></div></figure>'
        for figure in own
    )
    return (
        f'<section aria-labelledby="h-{name}"><h2 id="h-{name}">{title}</h2>'
        f'<p class="note">{escape(about.format(band=band))}</p>'
        f'<div class="figures {name}">{cards}</div></section>'
    )


def _notes(document: Mapping[str, Any], points: Sequence[int]) -> str:
    notes = list(document["notes"])
    count = len(document["config"]["points"])
    if count > len(points):
        notes.append(f"tables and charts of single points are shown for {MAX_POINTS} of the {count} points")
    listed = "".join(f"<li>{escape(note)}</li>" for note in notes)
    return f'<section aria-labelledby="h-notes"><h2 id="h-notes">Notes</h2><ul>{listed}</ul></section>' if notes else ""


def _reproduce(origin: str, document: Mapping[str, Any]) -> str:
    return (
        '<section aria-labelledby="h-again"><h2 id="h-again">The same again</h2>'
        f'<div class="command"><pre tabindex="0"><code id="command">{escape(origin)}</code></pre>'
        '<button type="button" id="copy">copy</button></div>'
        f'<p class="note">leap-rs {escape(__version__)}; the same options and seed give the same numbers.</p></section>'
        '<section aria-labelledby="h-options"><h2 id="h-options">Options in force</h2>'
        f"{options_tables(document)}</section>"
        "<noscript><p>The charts need JavaScript; the tables do not.</p></noscript>"
    )
