"""The outcome of a search as tables of at most 120 columns, what it means, and what to paste into a server's command."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from leap_rs.replay.conclude import number
from leap_rs.replay.report import WIDTH, cell, interval_cell, paragraph, print_table

BEST = 6
# Width of `-76.0±0.8`, so that values and changes stand below each other.
CHANGE = 10
COLUMNS = (
    ("PTL ms", "mean_ptl_ms", 1.0),
    ("E2EL s", "mean_e2el_ms", 1e-3),
    ("P99 E2EL s", "p99_e2el_ms", 1e-3),
    ("P99 PTL ms", "p99_ptl_ms", 1.0),
    ("req/s", "request_throughput", 1.0),
)


def render(document: Mapping[str, Any], console: Console, *, text_width: int | None = None) -> None:
    """Print the report; commands stay on one line each, so that they can be copied."""
    width = min(text_width or WIDTH, console.width)
    for line in _header(document):
        paragraph(console, line, width=width)
    if document["candidates"]:
        print_table(console, _candidates(document))
    for half, which in (("search", "Searched half"), ("held_out", "Other half, which the search did not see")):
        if document[half] is not None:
            title = f"{which}: change against fcfs on the same seeds, ± half a 95 % interval"
            print_table(console, _half(document, document[half], title))
    paragraph(console, "")
    for note in document["notes"]:
        paragraph(console, f"note: {note}", style="dim", width=width)
    for sentence in document["conclusions"]:
        paragraph(console, sentence, style="bold", width=width)
    paragraph(console, "")
    for title, command in _commands(document):
        paragraph(console, f"{title}:", width=width)
        console.print(command, soft_wrap=True, markup=False)
    for line in _remarks(document):
        paragraph(console, line, width=width)


def _commands(document: Mapping[str, Any]) -> list[tuple[str, str]]:
    server, stock = document["server"], document["config"]["max_num_seqs"]
    seqs = server["max_num_seqs"]
    ordered = _ordered(document)
    if ordered:
        which = "chosen policy" if document["verdict"]["recommend"] == "leap" else f"best policy at {stock} sequences"
        found = [(f"The server with the {which} (your other options stay)", server["command"])]
    else:
        change = (
            "as it is" if seqs == stock else f"with {seqs} sequences instead of {stock}, under vLLM's own scheduler"
        )
        found = [(f"The server {change} (your other options stay)", server["plain_command"])]
        found.append(("or with leap beside it, which watches, learns and changes nothing", server["command"]))
    if document["server_at_stock"] is not None:
        found.append(
            (f"or, leaving it at {stock} sequences, with the best there", document["server_at_stock"]["command"])
        )
    if document["replay_command"] is not None:
        what = "This policy beside fcfs, both" if ordered else "fcfs"
        found.append((f"{what} at {seqs} sequences, on the whole trace", document["replay_command"]))
    return found


def _ordered(document: Mapping[str, Any]) -> bool:
    """Whether an order of leap's is recommended."""
    return document["verdict"]["recommend"] in ("leap", "leap_at_stock")


def _remarks(document: Mapping[str, Any]) -> list[str]:
    lines = [
        'Try it with "mode": "shadow" in the JSON first: it predicts, learns and shows both, and changes no order.'
    ]
    used = [used["path"] for used in document["config"]["readouts"].values() if used is not None]
    if used and (_ordered(document) or document["server_at_stock"] is not None):
        lines.append(
            f"These numbers are with predictions by {' and '.join(used)}; a server without `readout` in the JSON learns from zero."
        )
    return lines


def _header(document: Mapping[str, Any]) -> list[str]:
    trace, config, search = document["trace"], document["config"], document["search"]
    bounds = ", ".join(f"{one['metric']}{one['relation']}{one['factor']:g}" for one in document["bound"])
    lines = [
        f"{trace['path'] or 'frame'}: {trace['requests']} requests; the first {search['requests']} by arrival are searched, "
        "the others judge",
        f"engine {config['engine']}: fcfs at {config['max_num_seqs']} sequences, every resident decoding, is what all is "
        f"compared with; {_load(config, search)}",
    ]
    if config["repeated"]:
        lines.append(
            f"halves and quarters are short against what the engine takes in at a time, so each is repeated to "
            f"{search['replayed']} requests (--num-prompts overrides)"
        )
    else:
        lines.append(f"each half replays {search['replayed']} requests")
    lines.append(f"lowest mean {document['objective'].split('_')[1].upper()} with {bounds} (relative to fcfs)")
    effort, space = document["effort"], document["space"]
    if effort["candidates"]:
        final = sum(one["candidates"] for one in effort["rounds"] if one["seeds"] == config["seeds"])
        lines.append(
            f"{effort['candidates']} of {space['candidates']} combinations replayed in {effort['simulations']} simulations, "
            f"{final} of them on all {config['seeds']} seeds; the bound had to hold with the far end of its 95 % interval, "
            f"also on each of the two quarters in that half ({effort['on_quarters']} came to be replayed there)"
        )
    return lines


def _load(config: Mapping[str, Any], search: Mapping[str, Any]) -> str:
    rate = "all requests at once" if search["request_rate"] is None else f"{number(search['request_rate'])} req/s"
    if config["load"] is not None:
        return f"load {number(config['load'])} ({rate} on the searched half)"
    return rate if config["request_rate"] is not None else f"the trace's own times ({rate})"


def _table(title: str, *names: str) -> Table:
    table = Table(caption=title, box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="")
    for name in names:
        table.add_column(name, no_wrap=True)
    return table


def _right(table: Table, *names: str) -> None:
    for name in names:
        table.add_column(name, no_wrap=True, justify="right")


def _candidates(document: Mapping[str, Any]) -> Table:
    title = "Best candidates on the searched half"
    # Of several bounds there is only room for whether they hold.
    single = len(document["bound"]) == 1
    if single:
        title += f"; ratio: {document['bound'][0]['metric']} against fcfs"
    title += "; a share behind the levers: admission, with this recompute_share"
    table = _table(title, "levers, admission", "order")
    ratio = ["ratio"] if single else []
    value, scale = ("PTL ms", 1.0) if document["objective"] == "mean_ptl_ms" else ("E2EL s", 1e-3)
    _right(table, "aging", "memory", "slots", "seqs", value, "req/s", *ratio, "quarters", "bound")
    chosen = document["chosen"]
    for one in document["candidates"][:BEST]:
        order = ":".join(one[key] for key in ("order", "objective") if key in one) or "-"
        metrics = one["metrics"]
        table.add_row(
            _levers(one),
            order,
            _aging(one),
            f"{one['memory_weight']:g}" if one["levers"] else "-",
            str(one["decode_slots"] or "all"),
            str(one["max_num_seqs"]),
            interval_cell(metrics[document["objective"]], scale),
            cell(metrics["request_throughput"]["mean"]),
            *([_ratio(one["bounds"][0]["ratio"])] if single else []),
            _on_quarters(one["quarters"]),
            _standing(one),
            style="green" if _same(one, chosen) else "",
        )
    return table


def _levers(one: Mapping[str, Any]) -> str:
    """Where the order acts, and with admission the share of the computed tokens that it risks to compute again."""
    order = "+".join(lever for lever in one["levers"] if lever != "admission") or "fcfs"
    return f"{order}, {100 * one['recompute_share']:g} %" if "recompute_share" in one else order


def _aging(one: Mapping[str, Any]) -> str:
    """e-foldings a standing wait, or a second."""
    if "aging" in one:
        return f"{one['aging']:g}"
    return f"{one['aging_rate']:g}/s" if "aging_rate" in one else "-"


def _on_quarters(quarters: Sequence[Mapping[str, Any]] | None) -> str:
    """The ratio on each; of several bounds whether they hold."""
    if quarters is None:
        return "-"
    return " ".join(
        f"{checks[0]['ratio']['mean']:.3f}"
        if len(checks) == 1
        else _word(all(check["holds_with_ci95"] for check in checks))
        for checks in (quarter["bounds"] for quarter in quarters)
    )


def _standing(one: Mapping[str, Any]) -> str:
    if not all(check["holds_with_ci95"] for check in one["bounds"]):
        return "broken"
    if one["quarters"] is None:
        return "on half"
    return _word(all(check["holds_with_ci95"] for quarter in one["quarters"] for check in quarter["bounds"]))


def _word(held: bool) -> str:
    return "kept" if held else "broken"


def _same(one: Mapping[str, Any], chosen: Mapping[str, Any] | None) -> bool:
    return chosen is not None and all(one[key] == value for key, value in chosen.items())


def _ratio(ratio: Mapping[str, Any]) -> str:
    if ratio["mean"] is None:
        return "-"
    if ratio["ci95"] is None:
        return f"{ratio['mean']:.3f}"
    return f"{ratio['mean']:.3f} ±{(ratio['ci95'][1] - ratio['ci95'][0]) / 2:.3f}"


def _half(document: Mapping[str, Any], half: Mapping[str, Any], title: str) -> Table:
    table = _table(title, "")
    shown: Sequence[tuple[str, str, float]] = COLUMNS
    _right(table, *[f"{name}  %" for name, _, _ in shown])
    for one in half["results"]:
        cells = []
        for _, key, scale in shown:
            change = "" if one["name"] == "fcfs" else _percent(one["change"][key])
            cells.append(f"{cell(one['metrics'][key]['mean'], scale)} {change:>{CHANGE}}")
        table.add_row(_label(document, one), *cells, style="green" if one["name"] == "chosen" else "")
    return table


def _label(document: Mapping[str, Any], one: Mapping[str, Any]) -> str:
    stock = document["config"]["max_num_seqs"]
    names = {
        "leap": "leap, untuned",
        "fcfs_at_chosen": f"fcfs, {one['max_num_seqs']} seqs",
        "at_stock": f"best, {stock} seqs",
    }
    return names.get(one["name"], str(one["name"]))


def _percent(change: Mapping[str, Any]) -> str:
    if change["mean"] is None:
        return "-"
    sign = "+" if change["mean"] > 0 else ""
    text = f"{sign}{change['mean']:.1f}"
    if change["ci95"] is not None:
        text += f"±{(change['ci95'][1] - change['ci95'][0]) / 2:.1f}"
    return text
