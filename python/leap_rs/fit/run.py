"""From traces to readouts and everything that was measured of them."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from leap_rs._leap import LeapError, Readout
from leap_rs.fit import data, evaluate, joined, layers, targets, zero
from leap_rs.fit.curve import Curve, curve
from leap_rs.fit.layers import Layer
from leap_rs.fit.metrics import Score
from leap_rs.fit.options import SUFFIX, Options, TargetName
from leap_rs.fit.readouts import fit, meta, path_of, train_spearman
from leap_rs.fit.targets import TargetScores
from leap_rs.fit.zero import FromZero
from leap_rs.trace import Trace, load
from leap_rs.writing import obstacle, reason, replacing, temporary_directory


@dataclass(frozen=True)
class Fitted:
    """One readout, where it goes, and what was measured."""

    kind: data.Kind
    path: Path
    readout: Readout
    rows: int
    left_out: int
    evaluations: dict[str, dict[str, Score]]
    targets: dict[TargetName, TargetScores]
    curves: dict[str, Curve]

    def to_dict(self) -> dict[str, Any]:
        """One entry of `readouts` in `--json`."""
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
            "targets": {target: scores.to_dict() for target, scores in self.targets.items()},
            "curves": {path: one.to_dict() for path, one in self.curves.items()},
        }


@dataclass(frozen=True)
class Result:
    """All that a call found, and what a user should be told about it."""

    readouts: list[Fitted]
    layers: list[Layer] | None = None
    from_zero: list[FromZero] | None = None
    notes: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """The object that `--json` prints."""
        document: dict[str, Any] = {"leap_fit_version": 1, "readouts": [one.to_dict() for one in self.readouts]}
        if self.layers is not None:
            document["layers"] = [layer.to_dict() for layer in self.layers]
        if self.from_zero is not None:
            document["from_zero"] = [one.to_dict() for one in self.from_zero]
        return document


def run(traces: Sequence[Path], evaluation: Sequence[Path], out: Path, options: Options) -> Result:
    """Fit, evaluate, and only then write."""
    check_targets([out])
    training = [load(path) for path in traces]
    judging = [load(path) for path in evaluation]
    notes = about_files([*training, *judging])

    max_tokens = options.max_tokens or data.output_budget(training)
    data.require_variance(training, max_tokens)
    data.require_same_features([*training, *judging])
    columns = data.columns(training)
    check_targets(path_of(out, kind, list(columns)) for kind in columns)
    training, judging = ([joined.with_column(one, columns.get("text")) for one in part] for part in (training, judging))

    fitted = []
    for kind, column in columns.items():
        rows, judged, told = labelled(column, training, judging, max_tokens)
        notes.extend(told)
        data.require_known(training, rows)
        try:
            fitted.append(fit_one(kind, rows, judged, meta(kind, training), path_of(out, kind, list(columns)), options))
        except LeapError as error:
            # The core knows rows and folds, but not which files they came from.
            raise type(error)(f"{data.named(training)}: {error}") from None
    compared = None
    if options.layers:
        compared, told = layers.compare(training, judging, max_tokens, options)
        notes.extend(told)
    save(fitted, out.parent)
    return Result(fitted, compared, notes=list(dict.fromkeys(notes)))


def run_from_zero(traces: Sequence[Path], options: Options) -> Result:
    """Nothing is fitted or written: each trace teaches readouts that start with it."""
    loaded = [load(path) for path in traces]
    found, notes = zero.learn(loaded, options)
    notes = [*about_files(loaded), *notes]
    return Result([], from_zero=found, notes=list(dict.fromkeys(notes)))


def about_files(traces: Sequence[Trace]) -> list[str]:
    """What the readers noticed, but for arrival times: here they give no more than the order."""
    return [line for trace in traces for line in trace.told(times=False)]


def save(fitted: Sequence[Fitted], directory: Path) -> None:
    """All files or none: a readout without its anchor, or with that of an older fit, would learn from a wrong start."""
    try:
        with temporary_directory(directory) as temporary, ExitStack() as whole:
            for one in fitted:
                # A short name: the core makes a temporary one of it, which the longest would leave no room for.
                made = files(temporary / f"readout{SUFFIX}")
                try:
                    one.readout.save(made[0])
                except LeapError as error:
                    raise LeapError(f"{one.path}: cannot be written: {reason(error)}") from None
                for file, path in zip(made, files(one.path), strict=True):
                    shutil.move(file, whole.enter_context(replacing(path)))
    except OSError as error:
        raise LeapError(f"{fitted[0].path}: cannot be written: {reason(error)}") from None


def files(path: Path) -> tuple[Path, Path]:
    """The file of a readout and that of its anchor."""
    return path, path.with_name(f"{path.stem}.anchor{SUFFIX}")


def check_targets(paths: Iterable[Path]) -> None:
    """`LeapError` where a readout or its anchor could not be written; before anything is fitted."""
    for path in paths:
        for file in files(path):
            if fault := obstacle(file):
                raise LeapError(f"{file}: cannot be written: {fault}")


def labelled(
    column: str, training: Sequence[Trace], judging: Sequence[Trace], max_tokens: int
) -> tuple[data.Labelled, dict[str, data.Labelled], list[str]]:
    """All training rows, the rows of every evaluation trace that has the column, and what a user should be told."""
    notes = []
    rows = data.stacked(column, training, [data.labelled(trace, column, max_tokens) for trace in training])
    if not rows.known.all():
        count = int((~rows.known).sum())
        notes.append(f"{count} answers were cut before {max_tokens} tokens: their length is not known, so left out")
    notes += [told for trace in (*training, *judging) for told in data.settled(trace)]
    judged = {}
    for trace in judging:
        if told := data.not_judged(trace, column):
            notes.append(told)
            continue
        if any(trace.path.resolve() == other.path.resolve() for other in training):
            notes.append(f"{trace.path}: the readouts were fitted on this trace, so its scores flatter")
        part = data.labelled(trace, column, max_tokens)
        data.require_width(column, trace, part, rows.features.shape[1], training[0])
        judged[str(trace.path)] = part
        notes.extend(f"{trace.path}: {what}" for what in data.remarks(part))
    return rows, judged, notes


def fit_one(
    kind: data.Kind,
    rows: data.Labelled,
    judged: Mapping[str, data.Labelled],
    about: Mapping[str, Any],
    path: Path,
    options: Options,
) -> Fitted:
    """The readout of one kind with everything that is measured of it."""
    readout = fit(rows, options, about)
    evaluations, curves = {}, {}
    for name, part in judged.items():
        made = evaluate.predictions(readout, part, options)
        evaluations[name] = evaluate.scores(made, part)
        if options.rls:
            curves[name] = curve(readout, made, part, options)
    known = int(rows.known.sum())
    compared = targets.compare(readout, rows, judged, options)
    return Fitted(kind, path, readout, known, len(rows) - known, evaluations, compared, curves)
