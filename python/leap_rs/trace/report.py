"""What `leap-trace` prints for a reader: the descriptions of traces, and what a conversion wrote and left out."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from leap_rs.trace.describe import GROUPS, TOKENS
from leap_rs.trace.tally import QUANTILES

WIDTH = 100
GAP = 2
NARROWEST = 24
MOST_GROUPS = 12

_LEVELS = "▁▂▃▄▅▆▇█"


def render(found: dict[str, Any]) -> str:
    """A description as text."""
    text = io.StringIO()
    console = Console(file=text, width=2 * WIDTH, highlight=False, soft_wrap=True, emoji=False, markup=False)
    console.print(f"{found['path']} ({found['format']})")
    console.print(f"  {_requests(found['requests'])}{_pace(found)}")
    for out in found["left_out"]:
        console.print(f"  {_left_out(out)}")
    for note in found["notes"]:
        console.print(f"  {note}")
    _print_arrivals(console, found)
    console.print()
    console.print(_lengths(found))
    for line in (*_facts(found), *_head(found), *_missing(found)):
        console.print(line)
    console.print()
    return text.getvalue()


def written_text(written: dict[str, Any]) -> str:
    """What was written, and what was left out of it."""
    lines = [
        f"{written['path']}: {_requests(written['requests'])} over {duration(written['duration_s'])}; "
        f"columns {', '.join(written['columns'])}"
    ]
    for source in written["inputs"]:
        lines += [f"{source['path']} ({source['format']}): {_left_out(out)}" for out in source["left_out"]]
        lines += [f"{source['path']} ({source['format']}): {note}" for note in source["notes"]]
        if not source["left_out"]:
            lines.append(f"{source['path']} ({source['format']}): nothing left out")
    return "".join(f"{line}\n" for line in [*lines, *written["notes"]])


def duration(seconds: float) -> str:
    """As a person says it."""
    if seconds < 120:
        return f"{seconds:.4g} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours} h"
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def sparkline(values: Sequence[float]) -> str:
    """One bar a value, from zero."""
    top = max(values, default=0.0)
    return "".join(_LEVELS[min(int(value / top * len(_LEVELS)), len(_LEVELS) - 1)] if top else " " for value in values)


def _requests(count: int) -> str:
    return "1 request" if count == 1 else f"{count:,} requests"


def _left_out(out: dict[str, Any]) -> str:
    rows = "1 row" if out["count"] == 1 else f"{out['count']:,} rows"
    return f"{rows} left out: {out['reason']} (first: {out['first']})"


def _pace(found: dict[str, Any]) -> str:
    if found["duration_s"] is None:
        return ""
    rate = found["request_rate"]
    return f" over {duration(found['duration_s'])}" + (f", {rate:.4g} requests/s" if rate is not None else "")


def _print_arrivals(console: Console, found: dict[str, Any]) -> None:
    arrivals = found["arrivals"]
    rates = arrivals["request_rates"]
    if rates:
        console.print(
            f"  requests/s, {len(rates)} windows of {duration(arrivals['window_s'])}: {sparkline(rates)}  "
            f"{min(rates):.3g} to {max(rates):.3g}"
        )
    if arrivals["gap_cv"] is not None:
        known = [f"{value:.3g} at {window}" for window, value in arrivals["dispersion"].items() if value is not None]
        dispersion = f"; index of dispersion {', '.join(known)}" if known else ""
        console.print(f"  burstiness (1 is Poisson): CV of the gaps {arrivals['gap_cv']:.3g}{dispersion}")


def _lengths(found: dict[str, Any]) -> Table:
    heads = ["requests", "mean", *(name.upper() for name in QUANTILES), "max"]

    def numbers(requests: int, summary: dict[str, float]) -> list[str]:
        return [f"{requests:,}", *(f"{summary[name]:,.0f}" for name in ("mean", *QUANTILES, "max"))]

    rows = [(column.removesuffix("_tokens"), "", numbers(found["requests"], found[column])) for column in TOKENS]
    for group, values in found["groups"].items():
        for one in (values or [])[:MOST_GROUPS]:
            rows += [
                (f"  {group} {one['value'] or '(none)'}", f", {column.removesuffix('_tokens')}", cells)
                for column in TOKENS
                for cells in [numbers(one["requests"], one[column])]
            ]
    # Names give way to the numbers, which a narrower column would cut.
    columns = zip(heads, *(cells for _, _, cells in rows), strict=True)
    room = max(WIDTH - sum(GAP + max(map(len, column)) for column in columns), NARROWEST)
    table = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0))
    table.add_column("tokens", no_wrap=True)
    for head in heads:
        table.add_column(head, justify="right", no_wrap=True)
    for name, kind, cells in rows:
        own = room - len(kind)
        table.add_row((name if len(name) <= own else f"{name[: own - 1]}…") + kind, *cells)
    return table


def _facts(found: dict[str, Any]) -> list[str]:
    lines = []
    for group in GROUPS:
        if group in found["groups"]:
            values = found["groups"][group]
            if values is None:
                lines.append(f"{group}: too many different ones to list")
            elif len(values) > MOST_GROUPS:
                lines.append(f"{group}: {len(values)} in all, the {MOST_GROUPS} largest are shown")
    if (cut := found["cut_by_budget"]) is not None:
        lines.append(f"cut by their budget (the length is only known to be at least that): {_share(cut)}")
    if (talk := found["conversations"]) is not None and talk["continuations"] is not None:
        lines.append(
            f"conversations: {talk['continuations']:,} of {found['requests']:,} requests continue one of "
            f"{talk['sessions']:,} sessions; replay is open loop"
        )
    if (prefix := found["shared_prefix"]) is not None and prefix["token_share"] is not None:
        lines.append(f"shared prefixes: {100 * prefix['token_share']:.1f} % of the prompt tokens have come before")
    own = [f"{key} {value}" for key, value in found["metadata"].items() if key != "leap_trace_version"]
    if own:
        lines.append(f"metadata: {'; '.join(own)}")
    return ["", *lines] if lines else []


def _share(cut: dict[str, Any]) -> str:
    return f"{_requests(cut['requests'])}, {100 * cut['share']:.1f} %"


def _head(found: dict[str, Any]) -> list[str]:
    head = found["head"]
    if head is None or not head["differs_in"]:
        return []
    parts = []
    if "request_rate" in head["differs_in"]:
        parts.append(f"{head['request_rate']:.3g} requests/s against {found['request_rate']:.3g}")
    parts += [
        f"{head[f'mean_{column}']:.0f} {column.removesuffix('_tokens')} tokens against {found[column]['mean']:.0f}"
        for column in TOKENS
        if column in head["differs_in"]
    ]
    return [
        f"the head differs from the whole: the first {head['requests']:,} requests, which --num-prompts "
        f"{head['requests']} takes, have {', '.join(parts)}"
    ]


def _missing(found: dict[str, Any]) -> list[str]:
    lines = [f"  {command}: {what}" for command, lacks in found["missing"].items() for what in lacks]
    return (
        ["what is missing for", *lines] if lines else ["nothing is missing for leap-replay, leap-fit, leap-calibrate"]
    )
