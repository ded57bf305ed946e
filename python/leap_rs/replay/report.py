"""The result object as compact tables of at most 120 columns, units in the headers, '-' where a number is undefined."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from .conclude import ORACLES, describe_point, number
from .options import POINT_KEYS
from .remarks import queue_of_client

WIDTH = 120
MAX_QUARTILES = 4
POINTS_A_TABLE = 11
Result = Mapping[str, Any]


def _decimals(size: float) -> int:
    return 0 if size >= 99.95 else 1 if size >= 9.995 else 2 if size >= 0.0995 or size < 0.0005 else 3


def cell(value: float | None, scale: float = 1.0) -> str:
    """Three significant digits, at most three decimals; '-' for an undefined number."""
    if value is None:
        return "-"
    if value == 0:
        return "0"
    value = value * scale
    return f"{value / 1000:.0f}k" if abs(value) >= 99_950 else f"{value:.{_decimals(abs(value))}f}"


def interval_cell(value: Mapping[str, Any] | None, scale: float = 1.0) -> str:
    """A mean and the half width of its 95 % interval, to the decimals of the mean unless that would hide it."""
    mean = None if value is None else value["mean"]
    text = cell(mean, scale)
    if value is None or mean is None or value["ci95"] is None:
        return text
    half = (value["ci95"][1] - value["ci95"][0]) / 2 * scale
    if text.endswith("k"):
        return f"{text} ±{cell(half)}"
    rounded = f"{half:.{_decimals(abs(mean * scale))}f}"
    if float(rounded) == 0:
        rounded = f"{half:.1g}" if half >= 1e-4 else "0"
    return f"{text} ±{rounded}"


def render(document: Mapping[str, Any], console: Console, *, text_width: int | None = None) -> None:
    """Print the report: what was replayed, the tables, the notes and, last, what it means.

    Text wraps at `text_width` columns; tables never shrink below what they hold if the console is `WIDTH` wide.
    """
    width = min(text_width or WIDTH, console.width)
    for line in _header(document):
        paragraph(console, line, width=width)
    points = document["config"]["points"]
    if len(points) == 1:
        results = document["results"]
        for table in (
            _main_table(document, results),
            _latency_table(document, results),
            _order_table(results),
            _queue_table(results),
        ):
            print_table(console, table)
        paragraph(console, _legend(results), style="dim", width=width)
    else:
        for title, value in (
            ("Mean PTL, ms", _metric("mean_ptl_ms")),
            (f"P{top_percentile(document)} E2EL, s", _metric(f"p{top_percentile(document)}_e2el_ms", 1e-3)),
            ("Requests a second", _metric("request_throughput")),
        ):
            for start in range(0, len(points), POINTS_A_TABLE):
                shown = range(start, min(start + POINTS_A_TABLE, len(points)))
                print_table(console, _sweep_table(document, title, value, shown))
    paragraph(console, "")
    for note in document["notes"]:
        paragraph(console, f"note: {note}", style="dim", width=width)
    for sentence in document["conclusions"]:
        paragraph(console, sentence, style="bold", width=width)


def paragraph(console: Console, text: str, style: str = "", width: int = WIDTH) -> None:
    """One paragraph. Wrapped here, since rich leaves a space at the end of each line that it wraps."""
    kept = text.replace(" %", "\N{NO-BREAK SPACE}%")
    wrapped = textwrap.fill(kept, width, break_long_words=False, break_on_hyphens=False).replace(
        "\N{NO-BREAK SPACE}", " "
    )
    # Text, not markup: a path may hold brackets.
    console.print(Text(wrapped, style=style), soft_wrap=True)


def print_table(console: Console, table: Table) -> None:
    """A table under its caption."""
    # The title apart: inside, it would wrap at the width of a narrow table.
    console.print()
    paragraph(console, str(table.caption), style="bold")
    table.caption = None
    console.print(table)


def _header(document: Mapping[str, Any]) -> list[str]:
    config = document["config"]
    limits = f"{config['max_num_seqs']} sequences, {config['max_num_batched_tokens']} tokens a step, "
    limits += f"KV cache of {config['kv_tokens_usable']} tokens"
    if config.get("decode_slots"):
        limits += f", {config['decode_slots']} decode slots"
    if config.get("data_parallel_size", 1) > 1:
        limits += f"; {config['data_parallel_size']} such ranks in lock-step"
    lines = [replayed(document), f"engine {config['engine']} ({limits})"]
    lines += _client(document)
    for kind, used in config["readouts"].items():
        lines.append(f"{kind} readout: " + ("none, learns from zero" if used is None else str(used["path"])))
    seeds = config["seeds"]
    about = f"means over {seeds} seeds" if seeds > 1 else "one seed"
    if len(config["points"]) == 1:
        about += ", ± is half a 95 % interval" if seeds > 1 else ", so no intervals"
        lines.append(f"{describe_point(document, 0)}{capacity(config)}; {about}")
    else:
        lines.append(f"{len(config['points'])} points{capacity(config)}; {about}")
    return lines


def _client(document: Mapping[str, Any]) -> list[str]:
    """A line where the client's cap leaves the server no queue for a seat, at all points or at some."""
    every = range(len(document["config"]["points"]))
    held = [point for point in every if queue_of_client(document, [point]) is not None]
    text = queue_of_client(document, held)
    if text is None:
        return []
    return [text if len(held) == len(every) else f"at {len(held)} of {len(every)} points {text}"]


def replayed(document: Mapping[str, Any]) -> str:
    """Where the requests come from, and how many of them were replayed how often."""
    trace, wanted = document["trace"], document["config"]["num_prompts"]
    recorded = trace.get("recorded_requests", trace["requests"])
    head = min(wanted or recorded, recorded)
    text = f"{head} request{'s' * (head != 1)}" if head == recorded else f"the first {head} of {recorded} requests"
    text = f"{trace.get('path') or 'frame'}: {text} over {number(trace['duration_s'])} s"
    if trace["left_out"]:
        text += f", {len(trace['left_out'])} of them left out"
    if trace["requests"] > head:
        text += f", repeated to {trace['requests']}"
    return text


def capacity(config: Mapping[str, Any]) -> str:
    """The measured FCFS capacity as the end of a sentence; empty where none was measured."""
    found = [value for value in config.get("capacity_rps") or [] if value is not None]
    if not found:
        return ""
    low, high = number(min(found)), number(max(found))
    return f"; FCFS capacity (load 1) {low if low == high else f'{low} to {high}'} req/s"


def _table(title: str) -> Table:
    table = Table(caption=title, box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="")
    table.add_column("policy", overflow="ellipsis", max_width=24, no_wrap=True)
    return table


def _column(table: Table, *names: str) -> None:
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)


def percentiles(document: Mapping[str, Any]) -> list[str]:
    """The highest three percentiles that were asked for, as metric names spell them."""
    return [f"{p:g}" for p in document["config"]["metric_percentiles"]][-3:]


def top_percentile(document: Mapping[str, Any]) -> str:
    """The highest percentile that was asked for, as metric names spell it."""
    return percentiles(document)[-1] if document["config"]["metric_percentiles"] else "99"


def unit(metric: str, results: Sequence[Result]) -> tuple[str, float]:
    """Seconds for waits of seconds, milliseconds for the rest; one unit a column, so that policies compare."""
    means = [result["metrics"][f"mean_{metric}_ms"]["mean"] for result in results]
    long = metric in ("ttft", "e2el") and max((mean for mean in means if mean is not None), default=0.0) >= 1000
    return ("s", 1e-3) if long else ("ms", 1.0)


def _latency_columns(
    document: Mapping[str, Any], metrics: Sequence[str], results: Sequence[Result], table: Table
) -> list[Callable[[Result], str]]:
    getters: list[Callable[[Result], str]] = []
    shown = document["config"]["percentile_metrics"]
    for metric in metrics:
        shown_unit, scale = unit(metric, results)
        _column(table, f"{metric.upper()} {shown_unit}")
        getters.append(_metric(f"mean_{metric}_ms", scale, interval=True))
        for p in percentiles(document) if metric in shown else ():
            _column(table, f"P{p}")
            getters.append(_metric(f"p{p}_{metric}_ms", scale))
    return getters


def _metric(key: str, scale: float = 1.0, *, interval: bool = False) -> Callable[[Result], str]:
    def get(result: Result) -> str:
        value = result["metrics"].get(key)
        return interval_cell(value, scale) if interval else cell(None if value is None else value["mean"], scale)

    return get


def _fill(table: Table, results: Sequence[Result], getters: Sequence[Callable[[Result], str]]) -> Table:
    lowest = best(results)
    for result in results:
        table.add_row(result["policy"], *[get(result) for get in getters], style="green" if result is lowest else "")
    return table


def best(results: Sequence[Result]) -> Result | None:
    """The lowest mean PTL that is not an oracle's, if the policies differ at all."""
    fair = [
        r
        for r in results
        if r["policy"].split(":")[0] not in ORACLES and r["metrics"]["mean_ptl_ms"]["mean"] is not None
    ]
    values = [r["metrics"]["mean_ptl_ms"]["mean"] for r in fair]
    if len(set(values)) < 2:
        return None
    return fair[values.index(min(values))]


def _main_table(document: Mapping[str, Any], results: Sequence[Result]) -> Table:
    table = _table("Mean per-token latency (PTL) and end-to-end latency (E2EL)")
    getters = _latency_columns(document, ("ptl", "e2el"), results, table)
    _column(table, "req/s", "max slowdown")
    getters += [_metric("request_throughput", interval=True), _metric("max_slowdown")]
    if document["config"]["goodput"]:
        _column(table, "goodput/s")
        getters.append(_metric("request_goodput"))
    return _fill(table, results, getters)


def _latency_table(document: Mapping[str, Any], results: Sequence[Result]) -> Table:
    table = _table("Time to first token (TTFT) and per output token after it (TPOT)")
    getters = _latency_columns(document, ("ttft", "tpot"), results, table)
    return _fill(table, results, getters)


def _order_table(results: Sequence[Result]) -> Table:
    quartiles: list[Result] = next((result["by_quartile"] for result in results if result["by_quartile"]), [])
    shown_unit, scale = unit("e2el", results)
    table = _table(
        f"Mean E2EL, {shown_unit}, of answers up to N tokens (quartiles); rank correlation with the true lengths"
    )
    getters: list[Callable[[Result], str]] = []
    for i, quartile in enumerate(quartiles[:MAX_QUARTILES]):
        _column(table, f"<={quartile['max_output_tokens']:.0f}")

        def by_quartile(result: Result, i: int = i) -> str:
            rows = result["by_quartile"]
            return cell(rows[i]["mean_e2el_ms"]["mean"], scale) if i < len(rows) else "-"

        getters.append(by_quartile)
    _column(table, "Spearman", "Kendall")
    getters += [
        lambda result: _with_interval(result["prediction"], "spearman"),
        lambda result: _with_interval(result["prediction"], "kendall_tau_b"),
    ]
    return _fill(table, results, getters)


@dataclass(frozen=True)
class QueueColumn:
    """A column on the queue: its name, its number and what that is."""

    name: str
    value: Callable[[Result], float | None]
    meaning: str
    scale: float = 1.0
    always: bool = False
    """Whether it is shown where all its numbers are 0, too."""


def recomputed_share(result: Result) -> float | None:
    """Share of the computed tokens that were computed again; None where nothing tells."""
    again, computed = result["queue"].get("recomputed_tokens"), result["queue"].get("computed_tokens")
    return again / computed if computed else None


def _of_queue(key: str) -> Callable[[Result], float | None]:
    def get(result: Result) -> float | None:
        value: float | None = result["queue"].get(key)
        return value

    return get


QUEUE_COLUMNS = (
    QueueColumn(
        "queue %",
        _of_queue("share_of_steps_with_queue"),
        "share of steps that left a request waiting",
        scale=100,
        always=True,
    ),
    QueueColumn(
        "waiting", _of_queue("mean_waiting"), "mean number that wait, also for the running step to end", always=True
    ),
    QueueColumn("preempted", _of_queue("preemptions"), "times that a request lost its KV cache", always=True),
    QueueColumn(
        "recomputed %", recomputed_share, "computed tokens that a preempted request had computed before", scale=100
    ),
    QueueColumn(
        "blocked",
        _of_queue("steps_blocked_by_memory"),
        "steps in which the next in line found no room in the KV cache",
    ),
    QueueColumn(
        "held",
        _of_queue("admission_holds"),
        "steps in which admission held the next in line back, for the KV cache to come",
    ),
)


def queue_columns(results: Sequence[Result]) -> list[QueueColumn]:
    """Those that say something of these results."""
    return [column for column in QUEUE_COLUMNS if column.always or any(map(column.value, results))]


def _queue_cell(column: QueueColumn) -> Callable[[Result], str]:
    return lambda result: cell(column.value(result), column.scale)


def _queue_table(results: Sequence[Result]) -> Table:
    table = _table("The queue and the KV cache")
    getters: list[Callable[[Result], str]] = []
    for column in queue_columns(results):
        _column(table, column.name)
        getters.append(_queue_cell(column))
    return _fill(table, results, getters)


def _legend(results: Sequence[Result]) -> str:
    return "; ".join(f"{column.name}: {column.meaning}" for column in queue_columns(results))


def _with_interval(group: Mapping[str, Any], key: str) -> str:
    return interval_cell({"mean": group.get(key), "ci95": (group.get("ci95") or {}).get(key)})


def _sweep_table(document: Mapping[str, Any], title: str, value: Callable[[Result], str], points: range) -> Table:
    settings = document["config"]["points"]
    varied = [key for key in POINT_KEYS if len({str(p[key]) for p in settings}) > 1]
    by = " and ".join(key.replace("_", "-") for key in varied)
    table = _table(f"{title}, by {by}")
    for point in points:
        _column(table, "\n".join(f"{settings[point][key]:g}" for key in varied))
    for policy in dict.fromkeys(result["policy"] for result in document["results"]):
        by_point = {result["point"]: result for result in document["results"] if result["policy"] == policy}
        table.add_row(policy, *[value(by_point[point]) if point in by_point else "-" for point in points])
    return table
