"""What was fitted and measured, as tables of at most 120 columns; '-' stands where a number is undefined."""

from __future__ import annotations

import io
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from leap_rs.fit.curve import NEAR, WINDOW, Curve
from leap_rs.fit.metrics import LONG, SHORT, Score
from leap_rs.fit.readouts import train_spearman
from leap_rs.fit.run import Fitted, Result
from leap_rs.fit.zero import FromZero

WIDTH = 120
NAME_WIDTH = 22
WINDOWS = 9
POINTS = (0, 50, 100, 200, 300, 400, 500, 1000)
"""Labels at which the table shows the learning curve."""

SCORES = (
    "Spearman",
    "tau-b",
    "pairs\n≥ 1.2",
    "pairs\n≥ 2",
    "MAE\nall",
    f"MAE\n≤ {SHORT}",
    f"MAE\n≤ {LONG}",
    f"MAE\n> {LONG}",
    "in\n50 %",
    "in\n90 %",
)
LEGEND = (
    "pairs: share ordered rightly of those whose true lengths differ by that factor or more; "
    f"MAE in tokens, by true length: up to {SHORT}, {SHORT + 1} to {LONG}, above {LONG}; "
    "in: % of true lengths inside the central interval of the predicted distribution."
)
UNDEFINED = "-: undefined (no such rows or pairs, nothing learned, or all values equal)."


class Report:
    """Collects the text, and remembers whether a dash has to be explained."""

    def __init__(self) -> None:
        # Kept and written at once: rich would end the process with status 1 where the reader of a pipe has gone.
        self.text = io.StringIO()
        self.console = Console(file=self.text, width=WIDTH, soft_wrap=True, markup=False, highlight=False)
        self.dashes = False

    def line(self, text: str = "") -> None:
        """One line; a long path may make it longer than `WIDTH`."""
        self.console.print(text)

    def table(self, title: str, left: Sequence[str], right: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
        """A table below its title, columns of text before columns of numbers."""
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="")
        for column in left:
            table.add_column(column, no_wrap=True, vertical="bottom")
        for column in right:
            table.add_column(column, no_wrap=True, justify="right", vertical="bottom")
        for row in rows:
            self.dashes |= "-" in row
            table.add_row(*row)
        self.line()
        self.line(textwrap.fill(title, WIDTH))
        self.console.print(table)


def report(result: Result) -> None:
    """Print all of it: a block of tables a readout, then the comparison of columns, then what the heads mean."""
    out = Report()
    for one in result.readouts:
        readout = one.readout
        out.line(
            f"{one.kind} readout: {one.path}\n"
            f"  {one.rows} rows, d {readout.d}, lambda {readout.lam:g}, max_tokens {readout.max_tokens}, "
            f"Spearman {shown(train_spearman(readout))} on rows that a fold left out"
        )
    names = short_names([path for one in result.readouts for path in one.evaluations])
    for one in result.readouts:
        if one.evaluations:
            scores_table(out, one, names)
            targets_table(out, one, names)
        if one.curves:
            windows_table(out, one, names)
            learning_table(out, one, names)
    layers_tables(out, result)
    if result.from_zero:
        from_zero_tables(out, result.from_zero)
    if names or result.layers or result.from_zero:
        out.line()
        out.line(textwrap.fill(LEGEND, WIDTH))
    if out.dashes:
        out.line(UNDEFINED)
    sys.stdout.write(out.text.getvalue())
    sys.stdout.flush()


def scores_table(out: Report, one: Fitted, names: Mapping[str, str]) -> None:
    """The readout that is written, on each trace."""
    out.table(
        f"{one.kind} readout, target {one.readout.target}",
        ("trace", "predictions"),
        SCORES,
        (
            [names[path], told(name), *cells(score)]
            for path, scores in one.evaluations.items()
            for name, score in scores.items()
        ),
    )


def targets_table(out: Report, one: Fitted, names: Mapping[str, str]) -> None:
    """The three targets below each other, for each trace and kind of prediction."""
    penalties = "; ".join(
        f"{target}: lambda {scores.lam:g}, Spearman {shown(scores.train_spearman)}"
        for target, scores in one.targets.items()
    )
    out.table(
        f"{one.kind} readout, targets side by side (out of fold {penalties})",
        ("trace", "predictions", "target"),
        SCORES,
        (
            [names[path], told(name), target, *cells(scores.evaluations[path][name])]
            for path in one.evaluations
            for name in next(iter(one.targets.values())).evaluations[path]
            for target, scores in one.targets.items()
        ),
    )


def windows_table(out: Report, one: Fitted, names: Mapping[str, str]) -> None:
    """Spearman by window of the stream; windows start at the same requests in all traces, the last may end anywhere."""
    longest = max((one.curves[path].windows for path in one.curves), key=len)
    if not longest:
        return
    heads = [str(window.first) for window in longest[:WINDOWS]]
    more = f"; {len(longest) - WINDOWS} windows more in --json" if len(longest) > WINDOWS else ""
    rows = []
    for path, curve in one.curves.items():
        for name in ("frozen", "rls"):
            found = [shown(getattr(window, name)) for window in curve.windows[: len(heads)]]
            rows.append([names[path], told(name), *found, *[""] * (len(heads) - len(found))])
    out.table(
        f"{one.kind} readout, Spearman over {WINDOW} requests from the one named (standard error about 0.1{more})",
        ("trace", "predictions"),
        heads,
        rows,
    )


def learning_table(out: Report, one: Fitted, names: Mapping[str, str]) -> None:
    """Spearman over all rows by number of labels learned, against a readout fitted on the trace itself."""
    known = {labels for curve in one.curves.values() for labels in (point.labels for point in curve.learning)}
    points = [labels for labels in POINTS if labels in known]
    out.table(
        f"{one.kind} readout, Spearman after that many labels of the trace, rows of another fold (by cross-validation)",
        ("trace",),
        (*map(str, points), "own\nreadout", "se of\ndifference", f"within {NEAR}\nafter labels"),
        ([names[path], *learning_cells(curve, points)] for path, curve in one.curves.items()),
    )


def learning_cells(curve: Curve, points: Sequence[int]) -> list[str]:
    """One row of the learning curve."""
    by_labels = {point.labels: shown(point.rls) for point in curve.learning}
    last = curve.learning[-1].labels if curve.learning else 0
    after = f"> {last}" if curve.within_0_02_after is None else str(curve.within_0_02_after)
    return [
        *(by_labels.get(labels, "") for labels in points),
        shown(curve.in_domain),
        shown(curve.difference_se),
        "-" if curve.in_domain is None else after,
    ]


def layers_tables(out: Report, result: Result) -> None:
    """Every feature column, a table for the training rows and one for each trace."""
    layers = result.layers or []
    names = short_names(list(dict.fromkeys(path for layer in layers for path in layer.evaluations)))
    heads = ("d", "lambda", *SCORES)
    about = [(layer, [named(layer.column)], [str(layer.d), f"{layer.lam:g}"]) for layer in layers]
    if layers:
        rows = ([*name, *size, *cells(layer.out_of_fold)][:-2] for layer, name, size in about)
        out.table("feature columns, training rows that a fold left out", ("column",), heads[:-2], rows)
    for path, name in names.items():
        judged = (
            [*column, *size, *cells(layer.evaluations[path])]
            for layer, column, size in about
            if path in layer.evaluations
        )
        out.table(f"feature columns, frozen on {name}", ("column",), heads, judged)


def from_zero_tables(out: Report, found: Sequence[FromZero]) -> None:
    """The readouts below each other for each trace: by window, and over all requests with a prediction."""
    names = short_names(list(dict.fromkeys(str(one.trace) for one in found)))
    for one in found:
        first = "no prediction" if one.first_predicted is None else f"first prediction: request {one.first_predicted}"
        out.line(f"{one.kind} readout from zero: {one.trace}\n  {one.rows} rows, d {one.d}, {first}")
    longest = max((one.windows for one in found), key=len)
    heads = [str(window.first) for window in longest[:WINDOWS]]
    more = f"; {len(longest) - WINDOWS} windows more in --json" if len(longest) > WINDOWS else ""
    rows = []
    for one in found:
        cells_of = [shown(window.spearman) for window in one.windows[: len(heads)]]
        rows.append([names[str(one.trace)], one.kind, *cells_of, *[""] * (len(heads) - len(cells_of))])
    out.table(
        f"from zero, Spearman over {WINDOW} requests from the one named, of those with a prediction "
        f"(standard error about 0.1{more})",
        ("trace", "readout"),
        heads,
        rows,
    )
    out.table(
        "from zero, requests with a prediction",
        ("trace", "readout"),
        SCORES,
        (
            [names[str(one.trace)], f"{one.kind}{told(name).removeprefix('from_zero')}", *cells(score)]
            for one in found
            for name, score in one.scores.items()
        ),
    )


def named(column: str) -> str:
    """A column's name, cut to fit; what was joined stands below each other."""
    return " +\n".join(part[:NAME_WIDTH] for part in column.split(" + "))


def cells(score: Score) -> list[str]:
    """The cells below `SCORES`."""
    ranks = (score.spearman, score.kendall_tau_b, score.pairwise_accuracy_1_2, score.pairwise_accuracy_2)
    errors = (
        score.mae_tokens,
        score.mae_tokens_to_256,
        score.mae_tokens_257_to_1024,
        score.mae_tokens_above_1024,
    )
    return [
        *map(shown, ranks),
        *("-" if error is None else f"{error:.1f}" if error < 1000 else f"{error:.0f}" for error in errors),
        *("-" if share is None else f"{100 * share:.1f}" for share in (score.inside_50, score.inside_90)),
    ]


def told(name: str) -> str:
    """A kind of predictions in words."""
    return name.replace("_second_half", ", 2nd half").replace("rls", "RLS")


def short_names(paths: Sequence[str]) -> dict[str, str]:
    """The stem of each path, with as many directories before it as tell it from the others; cut in front to fit."""
    parts = {path: Path(path).with_suffix("").parts for path in paths}
    if len(set(parts.values())) < len(parts):
        parts = {path: Path(path).parts for path in paths}
    names = {}
    for path, own in parts.items():
        others = [other for other in parts.values() if other != own]
        count = next((n for n in range(1, len(own)) if all(other[-n:] != own[-n:] for other in others)), len(own))
        name = "/".join(own[-count:])
        names[path] = name if len(name) <= NAME_WIDTH else f"…{name[1 - NAME_WIDTH :]}"
    return names


def shown(value: float | None) -> str:
    """Three decimals, or a dash for what is undefined."""
    return "-" if value is None else f"{value:.3f}"
