"""The `leap-trace` command: convert traces of any known format into leap's own, describe and merge them, add features."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from enum import Enum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from leap_rs import terminal
from leap_rs._leap import ConfigError, LeapError

if TYPE_CHECKING:
    from leap_rs.trace import ReadOptions
    from leap_rs.trace import Unit as UnitName

SUFFIX = ".parquet"

app = terminal.application()


def expand(words: Sequence[str]) -> list[str]:
    """`--label A B` as `--label A --label B`; a trace to merge is no label."""
    return terminal.expand(words, {"--label": lambda word: not (word.endswith(SUFFIX) or Path(word).is_file())})


class Unit(str, Enum):
    """Units of time that a trace may be in."""

    S = "s"
    MS = "ms"
    US = "us"
    NS = "ns"


NAMES: Mapping[Unit, UnitName] = {Unit.S: "s", Unit.MS: "ms", Unit.US: "us", Unit.NS: "ns"}


Out = Annotated[Path, typer.Option(metavar="OUT.parquet", help="The trace to write.", show_default=False)]
Strict = Annotated[
    bool, typer.Option("--strict", help="Refuse failed and zero-length rows instead of leaving them out.")
]
Sort = Annotated[
    bool,
    typer.Option(
        "--sort",
        help="Order a file whose times run backwards (equal times stay in the order of the file) instead of refusing it.",
    ),
]
Join = Annotated[
    bool,
    typer.Option(
        "--join",
        help=(
            "Where times run backwards another recording begins: its first request follows the last of the recording "
            "before it by that one's mean gap."
        ),
    ),
]
UnitOption = Annotated[
    Unit | None,
    typer.Option("--unit", help="Unit of the times, for formats that leave it open.", show_default="the format's"),
]
Tokenizer = Annotated[
    Path | None,
    typer.Option(help="tokenizer.json, or its directory, for formats that carry text.", show_default=False),
]
Run = Annotated[
    int | None, typer.Option(help="Which of several results in one file, from 1.", min=1, show_default=False)
]
PrefixBlockSize = Annotated[
    int | None,
    typer.Option(
        help="Tokens in a block of prefixes, for Mooncake's rows as other tools write them.", min=1, show_default="512"
    ),
]
JsonOutput = Annotated[bool, typer.Option("--json", help="Print the result as JSON and nothing else.")]


@app.callback()
def leap_trace() -> None:
    """Convert, describe and merge traces of requests of any size, part by part; add features of their texts.

    Exit status: 0 done, 1 an input or option that cannot be used, 2 wrong usage, 130 interrupted.
    """


@app.command("convert")
def convert_command(
    inputs: Annotated[
        list[Path],
        typer.Argument(
            metavar="IN",
            help="A trace of any known format. Several are the files of one recording, in order: each follows the one "
            "before it by that one's mean gap.",
            show_default=False,
        ),
    ],
    out: Out,
    strict: Strict = False,
    sort: Sort = False,
    join: Join = False,
    unit: UnitOption = None,
    tokenizer: Tokenizer = None,
    run: Run = None,
    prefix_block_size: PrefixBlockSize = None,
    head: Annotated[int | None, typer.Option(help="Only the first N requests.", min=1, show_default=False)] = None,
    request_rate: Annotated[
        float | None,
        typer.Option(
            help="Requests per second with Gamma arrivals as vllm bench serve draws them, for formats without times; inf "
            "sends all at once.",
            show_default=False,
        ),
    ] = None,
    burstiness: Annotated[
        float, typer.Option(help="Shape of the Gamma arrivals: 1 is Poisson, below it burstier, inf is a constant gap.")
    ] = 1.0,
    seed: Annotated[int, typer.Option(help="Seed of the Gamma arrivals.", min=0)] = 0,
    model: Annotated[str | None, typer.Option(help="Model, for the trace's metadata.", show_default=False)] = None,
    domain: Annotated[str | None, typer.Option(help="The domain of all requests.", show_default=False)] = None,
    tenant: Annotated[str | None, typer.Option(help="The tenant of all requests.", show_default=False)] = None,
    as_json: JsonOutput = False,
) -> None:
    """Convert a trace into leap's own format, and say what was left out and why."""
    _need_suffix(out)
    with terminal.ending("leap-trace", _as_typed):
        from leap_rs.trace.convert import Changes, convert

        options = _read_options(
            strict=strict,
            sort=sort,
            join=join,
            unit=unit,
            tokenizer=tokenizer,
            run=run,
            prefix_block_size=prefix_block_size,
        )
        changes = Changes(request_rate, burstiness, seed, head, model, domain, tenant)
        _show_written(convert(inputs, out, options, changes).to_dict(), as_json=as_json)


@app.command("merge")
def merge_command(
    inputs: Annotated[
        list[Path], typer.Argument(metavar="TRACE", help="Traces of any known format.", show_default=False)
    ],
    out: Out,
    join: Annotated[
        bool,
        typer.Option(
            "--join",
            help="One behind the other, by the mean gap of the one before, instead of interleaved from their own starts.",
        ),
    ] = False,
    label: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME ...",
            help="One a trace: the tenant of a trace that has no column tenant, and what its ids get in front.",
            show_default="the files' names",
        ),
    ] = None,
    one_recording: Annotated[
        bool,
        typer.Option(
            "--one-recording",
            help="The traces are parts of one recording: equal ids, sessions and blocks of prefixes are the same ones.",
        ),
    ] = False,
    strict: Strict = False,
    sort: Sort = False,
    unit: UnitOption = None,
    tokenizer: Tokenizer = None,
    run: Run = None,
    prefix_block_size: PrefixBlockSize = None,
    as_json: JsonOutput = False,
) -> None:
    """Merge traces by arrival. Columns that all of them have are kept; features must be of one model and layer."""
    _need_suffix(out)
    with terminal.ending("leap-trace", _as_typed):
        from leap_rs.trace.convert import merge

        options = _read_options(
            strict=strict, sort=sort, unit=unit, tokenizer=tokenizer, run=run, prefix_block_size=prefix_block_size
        )
        written = merge(inputs, out, options, labels=label or (), behind=join, one_recording=one_recording)
        _show_written(written.to_dict(), as_json=as_json)


@app.command("features")
def features_command(
    trace: Annotated[Path, typer.Argument(metavar="TRACE", help="A trace of any known format.", show_default=False)],
    texts: Annotated[
        Path,
        typer.Option(
            metavar="FILE",
            help="Parquet, CSV or JSON lines with the prompts in a column text or prompt. They go by a column request_id "
            "where both have one, else by their order.",
            show_default=False,
        ),
    ],
    encoder: Annotated[
        str, typer.Option(metavar="DIR", help="The encoder: its directory or its name.", show_default=False)
    ],
    out: Out,
    layer: Annotated[
        int | None,
        typer.Option(
            help="After how many of its layers the encoder is read.", min=0, show_default="two thirds of them"
        ),
    ] = None,
    layers: Annotated[
        bool, typer.Option("--layers", help="Also write text_layer_N for every layer, which leap-fit --layers ranks.")
    ] = False,
    as_json: JsonOutput = False,
) -> None:
    """Add to a trace the features of its prompts' texts: rows of a text encoder. No text is written."""
    _need_suffix(out)
    with terminal.ending("leap-trace", _as_typed):
        from leap_rs.trace import features

        progress = partial(terminal.progress_bar, "reading")
        written = features.add(trace, texts, encoder, out, layer=layer, layers=layers, progress=progress)
        _show_written(written.to_dict(), as_json=as_json)


@app.command("describe")
def describe_command(
    traces: Annotated[
        list[Path], typer.Argument(metavar="TRACE", help="Traces of any known format.", show_default=False)
    ],
    num_prompts: Annotated[
        int,
        typer.Option(
            help="Compare the first N requests, which leap-replay --num-prompts takes, with the whole.", min=1
        ),
    ] = 1000,
    strict: Strict = False,
    sort: Sort = False,
    join: Join = False,
    unit: UnitOption = None,
    tokenizer: Tokenizer = None,
    run: Run = None,
    prefix_block_size: PrefixBlockSize = None,
    as_json: JsonOutput = False,
) -> None:
    """Say what a trace holds, and what it lacks for which command. With --json one object a trace, a line each."""
    with terminal.ending("leap-trace", _as_typed):
        from leap_rs.trace.describe import describe
        from leap_rs.trace.report import render

        options = _read_options(
            strict=strict,
            sort=sort,
            join=join,
            unit=unit,
            tokenizer=tokenizer,
            run=run,
            prefix_block_size=prefix_block_size,
        )
        for path in traces:
            found = describe(path, options, num_prompts=num_prompts)
            if as_json:
                terminal.print_json(found)
            else:
                sys.stdout.write(render(found))
                sys.stdout.flush()


def _need_suffix(out: Path) -> None:
    if out.suffix != SUFFIX:
        raise typer.BadParameter(f"{out} must end with {SUFFIX}", param_hint="--out")


def _read_options(*, unit: Unit | None, **given: Any) -> ReadOptions:
    from leap_rs.trace import ReadOptions

    return ReadOptions(unit=None if unit is None else NAMES[unit], **given)


def _show_written(written: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        terminal.print_json(written)
        return
    from leap_rs.trace.report import written_text

    sys.stdout.write(written_text(written))
    sys.stdout.flush()


def _as_typed(error: LeapError) -> str:
    """The message with its option as the command line spells it."""
    text = str(error)
    name, colon, rest = text.partition(":")
    if isinstance(error, ConfigError) and colon and name.isidentifier():
        return f"--{name.replace('_', '-')}:{rest}"
    return text


def main(words: Sequence[str] | None = None) -> None:
    """Entry point. Exit status: 0 done, 1 a `LeapError` (one line on stderr), 2 wrong usage, 130 interrupted."""
    typed = expand(sys.argv[1:] if words is None else words)
    terminal.run("leap-trace", lambda: app(args=typed, prog_name="leap-trace"))
