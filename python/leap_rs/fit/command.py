"""The `leap-fit` command: fit readouts on recorded traces, say how good they are, and write them with their anchors."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from leap_rs import terminal
from leap_rs._leap import LeapError, Readout, TraceError
from leap_rs.fit import data
from leap_rs.fit.evaluate import Score, evaluate
from leap_rs.trace import Trace, load

SUFFIX = ".safetensors"

TargetName = Literal["sqrt", "log", "raw"]

WIDTH = 100
NAME_WIDTH = 48

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


def expand(words: Sequence[str]) -> list[str]:
    """`--eval A B` as `--eval A --eval B`: a trace to judge on must never end up among those to fit on."""
    return terminal.expand(words, {"--eval": lambda _: True})


class Target(str, Enum):
    """The scale on which lengths are fitted."""

    SQRT = "sqrt"
    LOG = "log"
    RAW = "raw"


NAMES: Mapping[Target, TargetName] = {Target.SQRT: "sqrt", Target.LOG: "log", Target.RAW: "raw"}


@dataclass(frozen=True)
class Options:
    """Everything that a fit depends on besides the traces."""

    lam: float | None
    folds: int
    target: TargetName
    max_tokens: int | None
    seed: int
    batch: int
    rls: bool


@dataclass(frozen=True)
class Fitted:
    """One readout, where it goes, and what was measured."""

    kind: data.Kind
    path: Path
    readout: Readout
    rows: int
    left_out: int
    evaluations: dict[str, dict[str, Score]]

    def to_dict(self) -> dict[str, Any]:
        """One entry of `--json`."""
        return {
            "kind": self.kind,
            "path": str(self.path),
            "rows": self.rows,
            "rows_left_out": self.left_out,
            "d": self.readout.d,
            "max_tokens": self.readout.max_tokens,
            "target": self.readout.target,
            "lam": self.readout.lam,
            "train_spearman": train_spearman(self.readout),
            "evaluations": {
                path: {name: score.to_dict() for name, score in scores.items()}
                for path, scores in self.evaluations.items()
            },
        }


@app.command()
def leap_fit(
    traces: Annotated[list[Path], typer.Argument(metavar="TRACE...", help="Traces to fit on.", show_default=False)],
    out: Annotated[Path, typer.Option(help="The readout's file, NAME.safetensors.", show_default=False)],
    evaluation: Annotated[
        list[Path] | None,
        typer.Option(
            "--eval", metavar="TRACE ...", help="Evaluate on these traces; all words up to the next option are taken."
        ),
    ] = None,
    rls: Annotated[
        bool, typer.Option("--rls", help="Also stream each evaluation trace through RLS: predict first, learn after.")
    ] = False,
    lam: Annotated[float | None, typer.Option(help="Ridge penalty; by k-fold when not given.", min=0.0)] = None,
    folds: Annotated[int, typer.Option(help="Folds for the penalty and the out-of-fold numbers.", min=2)] = 5,
    target: Annotated[Target, typer.Option(help="Scale on which lengths are fitted.")] = Target.SQRT,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            help="Output budget M; the largest max_tokens of the traces when not given.", min=1, max=2**32 - 1
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the folds.", min=0)] = 0,
    batch: Annotated[int, typer.Option(help="Finished requests an RLS update.", min=1)] = 8,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")] = False,
) -> None:
    """Fit readouts of output length on traces and write them, each with its anchor for RLS beside it.

    Traces with `features` give the state readout, traces with `prompt_features` the prompt readout. Where both are
    fitted, the state readout goes to NAME.safetensors and the prompt readout to NAME.prompt.safetensors.
    """
    if out.suffix != SUFFIX:
        raise typer.BadParameter(f"{out} must end with {SUFFIX}", param_hint="--out")
    options = Options(lam, folds, NAMES[target], max_tokens, seed, batch, rls)
    with terminal.ending("leap-fit"):
        fitted, notes = run(traces, evaluation or [], out, options)
        for note in notes:
            print(f"leap-fit: {note}", file=sys.stderr)
        if as_json:
            result = {"leap_fit_version": 1, "readouts": [one.to_dict() for one in fitted]}
            print(json.dumps(result, allow_nan=False), flush=True)
        else:
            report(fitted)


def run(
    traces: Sequence[Path], evaluation: Sequence[Path], out: Path, options: Options
) -> tuple[list[Fitted], list[str]]:
    """Fit, evaluate, and only then write. Returns the readouts and what a user should be told."""
    if not out.parent.is_dir():
        raise LeapError(f"{out}: cannot be written: there is no directory {out.parent}")
    training = [load(path) for path in traces]
    judging = [load(path) for path in evaluation]
    notes = [line for trace in (*training, *judging) for line in trace.told()]

    max_tokens = options.max_tokens or data.output_budget(training)
    data.require_variance(training, max_tokens)
    data.require_same_features([*training, *judging])
    kinds = data.kinds(training)

    fitted = []
    for kind in kinds:
        one, told = fit_one(kind, training, judging, path_of(out, kind, kinds), max_tokens, options)
        fitted.append(one)
        notes.extend(told)
    for one in fitted:
        one.readout.save(one.path)
    return fitted, list(dict.fromkeys(notes))


def fit_one(
    kind: data.Kind, training: Sequence[Trace], judging: Sequence[Trace], path: Path, max_tokens: int, options: Options
) -> tuple[Fitted, list[str]]:
    """The readout of one kind with its scores on every evaluation trace that has its features."""
    notes = []
    parts = [data.trainable(data.labelled(trace, kind, max_tokens), max_tokens) for trace in training]
    left_out = sum(count for _, count in parts)
    if left_out:
        notes.append(f"{left_out} answers were cut before {max_tokens} tokens: their length is not known, so left out")
    readout = Readout.fit(
        stacked(kind, training, [part for part, _ in parts]),
        np.concatenate([part.lengths for part, _ in parts]),
        max_tokens=max_tokens,
        target=options.target,
        lam=options.lam,
        folds=options.folds,
        seed=options.seed,
        meta=meta(kind, training),
    )
    evaluations: dict[str, dict[str, Score]] = {}
    for trace in judging:
        if data.COLUMNS[kind] not in trace.frame.columns:
            notes.append(f"{trace.path}: no column '{data.COLUMNS[kind]}', so not evaluated for the {kind} readout")
            continue
        if any(trace.path.resolve() == other.path.resolve() for other in training):
            notes.append(f"{trace.path}: the readouts were fitted on this trace, so its scores flatter")
        judged = data.labelled(trace, kind, max_tokens)
        require_width(kind, trace, judged, readout.d, training[0])
        evaluations[str(trace.path)] = dict(evaluate(readout, judged, rls=options.rls, batch=options.batch))
    return Fitted(kind, path, readout, sum(len(part) for part, _ in parts), left_out, evaluations), notes


def stacked(kind: data.Kind, traces: Sequence[Trace], parts: Sequence[data.Labelled]) -> Any:
    """All rows below each other; every trace must have the same number of features."""
    for trace, part in zip(traces, parts, strict=True):
        require_width(kind, trace, part, parts[0].features.shape[1], traces[0])
    return np.concatenate([part.features for part in parts])


def require_width(kind: data.Kind, trace: Trace, part: data.Labelled, width: int, first: Trace) -> None:
    """Refuse a trace whose features are not as many as those of the first training trace."""
    found = part.features.shape[1]
    if found != width:
        raise TraceError(f"{trace.path}: column '{data.COLUMNS[kind]}' is {found} wide, in {first.path} {width}")


def meta(kind: data.Kind, training: Sequence[Trace]) -> dict[str, Any]:
    """What the readout says about itself. No date: the same traces and options give the same bytes."""
    values: dict[str, Any] = {"kind": kind, "trained_on": [trace.name for trace in training]}
    first = training[0].metadata
    if "model" in first:
        values["model"] = first["model"]
    if kind == "state" and first.get("layer", "").isdecimal():
        values["layer"] = int(first["layer"])
    return values


def path_of(out: Path, kind: data.Kind, kinds: Sequence[data.Kind]) -> Path:
    """The state readout, or the only one, goes to `out`; a prompt readout beside it to NAME.prompt.safetensors."""
    return out if kind == kinds[0] else out.with_name(f"{out.stem}.{kind}{SUFFIX}")


def train_spearman(readout: Readout) -> float | None:
    """The out-of-fold rank correlation on the training rows, if it is defined."""
    value = readout.meta.get("train_spearman")
    return None if value is None else float(value)


def report(fitted: Sequence[Fitted]) -> None:
    """Print what was fitted and how it scores, each on at most `WIDTH` columns unless a path is longer."""
    console = Console(width=WIDTH, soft_wrap=True, markup=False, highlight=False)
    for one in fitted:
        readout = one.readout
        console.print(
            f"{one.kind} readout: {one.path}\n"
            f"  {one.rows} rows, d {readout.d}, lambda {readout.lam:g}, max_tokens {readout.max_tokens}, "
            f"Spearman {shown(train_spearman(readout))} on rows that a fold left out"
        )
    names = short_names([path for one in fitted for path in one.evaluations])
    if not names:
        return
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="")
    for column in ("readout", "trace"):
        table.add_column(column, no_wrap=True)
    table.add_column("predictions", no_wrap=True)
    for column in ("Spearman", "MAE tokens"):
        table.add_column(column, no_wrap=True, justify="right")
    for one in fitted:
        for path, scores in one.evaluations.items():
            for name, score in scores.items():
                told = name.replace("_second_half", ", second half").replace("rls", "RLS")
                table.add_row(one.kind, names[path], told, shown(score.spearman), f"{score.mae_tokens:.1f}")
    console.print()
    console.print(table)


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


def main(words: Sequence[str] | None = None) -> None:
    """Entry point. Exit status: 0 done, 1 a `LeapError` (one line on stderr), 2 wrong usage, 130 interrupted."""
    app(args=expand(sys.argv[1:] if words is None else words), prog_name="leap-fit")
