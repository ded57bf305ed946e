"""The `leap-fit` command: fit readouts on recorded traces, say how good they are, and write them with their anchors."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import typer
from rich.console import Console
from rich.table import Column, Table

from leap_rs._leap import LeapError, Readout, TraceError
from leap_rs.fit import data
from leap_rs.fit.evaluate import Score, evaluate
from leap_rs.trace import Trace, load

SUFFIX = ".safetensors"

TargetName = Literal["sqrt", "log", "raw"]

app = typer.Typer(add_completion=False, rich_markup_mode=None)


class Target(str, Enum):
    """The scale on which lengths are fitted."""

    SQRT = "sqrt"
    LOG = "log"
    RAW = "raw"


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
        list[Path] | None, typer.Option("--eval", metavar="TRACE", help="Evaluate on this trace too (repeatable).")
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
    errors = Console(stderr=True, soft_wrap=True, markup=False, highlight=False)
    options = Options(lam, folds, target.value, max_tokens, seed, batch, rls)
    try:
        fitted, notes = run(traces, evaluation or [], out, options)
    except LeapError as error:
        errors.print(f"leap-fit: {error}")
        raise typer.Exit(1) from error
    for note in notes:
        errors.print(f"leap-fit: {note}")
    if as_json:
        typer.echo(json.dumps({"leap_fit_version": 1, "readouts": [one.to_dict() for one in fitted]}, allow_nan=False))
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
    """Print what was fitted and how it scores."""
    console = Console(soft_wrap=True, markup=False, highlight=False)
    for one in fitted:
        readout = one.readout
        console.print(
            f"{one.kind} readout: {one.path}  ({one.rows} rows, d {readout.d}, lambda {readout.lam:g}, "
            f"max_tokens {readout.max_tokens}, out-of-fold Spearman {shown(train_spearman(readout))})"
        )
    rows = [(one.kind, path, scores) for one in fitted for path, scores in one.evaluations.items()]
    if not rows:
        return
    table = Table("readout", Column("trace", overflow="fold"), "scored", "Spearman", "MAE tokens")
    for kind, path, scores in rows:
        for name, score in scores.items():
            table.add_row(kind, path, name.replace("_", " "), shown(score.spearman), f"{score.mae_tokens:.1f}")
    console.print(table)


def shown(value: float | None) -> str:
    """Three decimals, or a dash for what is undefined."""
    return "-" if value is None else f"{value:.3f}"


def main() -> None:
    """Entry point. Exit status: 0 done, 1 a `LeapError` (one line on stderr), 2 wrong usage."""
    app()
