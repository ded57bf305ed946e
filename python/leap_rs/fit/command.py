"""The `leap-fit` command: fit readouts on recorded traces, say how good they are, and write them with their anchors."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from leap_rs import terminal
from leap_rs.fit.options import SUFFIX, Options, TargetName

app = terminal.application()


def expand(words: Sequence[str]) -> list[str]:
    """`--eval A B` as `--eval A --eval B`: a trace to judge on must never end up among those to fit on."""
    return terminal.expand(words, {"--eval": lambda _: True})


class Target(str, Enum):
    """The scale on which lengths are fitted."""

    SQRT = "sqrt"
    LOG = "log"
    RAW = "raw"


FROM_ZERO = ("traces", "from_zero", "lam", "max_tokens", "batch", "forgetting", "as_json")
"""The parameters that say something where readouts start from zero."""

NAMES: Mapping[Target, TargetName] = {Target.SQRT: "sqrt", Target.LOG: "log", Target.RAW: "raw"}


def checked_forgetting(value: float) -> float:
    """A factor above 0 and at most 1; typer's own bounds are closed."""
    if not 0.0 < value <= 1.0:
        raise typer.BadParameter(f"{value} is not above 0 and at most 1")
    return value


@app.command()
def leap_fit(
    context: typer.Context,
    traces: Annotated[list[Path], typer.Argument(metavar="TRACE", help="Traces to fit on.", show_default=False)],
    out: Annotated[
        Path | None,
        typer.Option(metavar="NAME.safetensors", help="The readout's file; only --from-zero needs none."),
    ] = None,
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
    forgetting: Annotated[
        float,
        typer.Option(
            help="What RLS leaves of a label's weight at every later one; 1 forgets nothing.",
            callback=checked_forgetting,
        ),
    ] = 1.0,
    layers: Annotated[
        bool, typer.Option("--layers", help="Also compare every feature column that the traces carry.")
    ] = False,
    from_zero: Annotated[
        bool,
        typer.Option(
            "--from-zero",
            help="Write nothing: stream each TRACE through readouts that start with it and learn as a server does.",
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")] = False,
) -> None:
    """Fit readouts of output length on traces and write them, each with its anchor for RLS beside it.

    Traces with `features` give the state readout, with `prompt_features` the prompt readout, with `text_features` the
    text readout. The first of them goes to NAME.safetensors, the others to NAME.prompt.safetensors and
    NAME.text.safetensors.
    """
    options = Options(lam, folds, NAMES[target], max_tokens, seed, batch, rls, forgetting, layers)
    if from_zero:
        refuse_others(context)
    elif out is None:
        raise typer.BadParameter("a file is needed; only --from-zero writes none", param_hint="--out")
    elif out.suffix != SUFFIX:
        raise typer.BadParameter(f"{out} must end with {SUFFIX}", param_hint="--out")
    with terminal.ending("leap-fit"):
        from leap_rs.fit.report import report
        from leap_rs.fit.run import run, run_from_zero

        result = run_from_zero(traces, options) if out is None else run(traces, evaluation or [], out, options)
        for note in result.notes:
            terminal.tell("leap-fit", note)
        if as_json:
            terminal.print_json(result.to_dict())
        else:
            report(result)


def refuse_others(context: typer.Context) -> None:
    """Refuse options that say nothing from zero: nothing is fitted or written, and each trace is judged on itself."""
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        if source is not None and source.name == "COMMANDLINE" and parameter.name not in FROM_ZERO:
            raise typer.BadParameter("has no meaning with --from-zero", param_hint=parameter.opts[0])


def main(words: Sequence[str] | None = None) -> None:
    """Entry point. Exit status: 0 done, 1 a `LeapError` (one line on stderr), 2 wrong usage, 130 interrupted."""
    typed = expand(sys.argv[1:] if words is None else words)
    terminal.run("leap-fit", lambda: app(args=typed, prog_name="leap-fit"))
