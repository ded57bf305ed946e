"""The `leap-record` command: prompts of a file through a local vLLM into a trace with features and true lengths."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from leap_rs import terminal
from leap_rs._leap import ConfigError, LeapError
from leap_rs.record.options import Options, engine_args

if TYPE_CHECKING:
    from leap_rs.record.run import Result

SUFFIX = ".parquet"

app = terminal.application()


@app.command()
def leap_record(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="As in `vllm serve MODEL`.", show_default=False)],
    prompts: Annotated[
        Path,
        typer.Argument(metavar="PROMPTS", help="Parquet, or JSON lines with an object a line.", show_default=False),
    ],
    out: Annotated[Path, typer.Option(metavar="TRACE.parquet", help="The trace to write.", show_default=False)],
    column: Annotated[
        str | None,
        typer.Option(
            help="Column or field of the prompts: texts, lists of messages, or lists of token ids.",
            show_default="prompt, messages or prompt_token_ids",
        ),
    ] = None,
    limit: Annotated[int | None, typer.Option(help="Only the first N prompts.", min=1, show_default=False)] = None,
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--no-chat",
            help="Send texts as user messages in the model's chat template, or as they are.",
            show_default="the template, where the model has one",
        ),
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Output budget of an answer.", min=1, max=2**32 - 1)] = 1024,
    temperature: Annotated[
        float | None, typer.Option(min=0.0, show_default="the model's generation config, as in vLLM")
    ] = None,
    top_p: Annotated[
        float | None, typer.Option(max=1.0, show_default="the model's generation config, as in vLLM")
    ] = None,
    seed: Annotated[int, typer.Option(help="Each prompt has a seed of its own made of it.", min=0, max=2**31 - 1)] = 0,
    layer: Annotated[
        int | None, typer.Option(help="Decoder layer of the features.", min=0, show_default="at 5/6 of the depth")
    ] = None,
    encoder: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="Text encoder, or small causal model, whose rows are recorded as text_features: a directory, or a name.",
            show_default=False,
        ),
    ] = None,
    max_num_seqs: Annotated[int | None, typer.Option(help="Sequences at a time.", min=1, show_default="vLLM's")] = None,
    max_model_len: Annotated[
        int | None, typer.Option(help="Context; prompts that do not fit are left out.", min=2, show_default="vLLM's")
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="Data type of the model.", show_default="vLLM's")] = None,
    engine_arguments: Annotated[
        str | None,
        typer.Option("--engine-args", metavar="JSON", help="Further arguments of vLLM's engine.", show_default=False),
    ] = None,
    save_every: Annotated[
        int, typer.Option(help="Answers from one saved part to the next; a minute of them at most is lost.", min=1)
    ] = 256,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")] = False,
) -> None:
    """Run prompts through a local vLLM and write a trace for leap-fit and leap-replay.

    Interrupted, the answers so far stay in TRACE.parquet.parts, and the same command goes on from there.
    Exit status: 0 done, 1 an input or option that cannot be used, 2 wrong usage, 130 interrupted.
    """
    if out.suffix != SUFFIX:
        raise typer.BadParameter(f"{out} must end with {SUFFIX}", param_hint="--out")
    if top_p is not None and top_p <= 0:
        raise typer.BadParameter(f"{top_p} is not above 0", param_hint="--top-p")
    with terminal.ending("leap-record", _as_typed):
        from leap_rs.record.run import run

        options = Options(
            model=model,
            max_tokens=max_tokens,
            temperature=temperature,
            top_p=top_p,
            seed=seed,
            layer=layer,
            encoder=encoder,
            chat=chat,
            limit=limit,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            dtype=dtype,
            engine_args=engine_args(engine_arguments),
            save_every=save_every,
        )
        result = run(
            prompts,
            out,
            options,
            column=column,
            progress=partial(terminal.progress_bar, "answering"),
            tell=partial(terminal.tell, "leap-record"),
        )
        if as_json:
            terminal.print_json(result.to_dict())
        else:
            sys.stdout.write(text_of(result))
            sys.stdout.flush()


def text_of(result: Result) -> str:
    """The result for a reader."""
    already = f" ({result.already} of them by an earlier run)" if result.already else ""
    lines = [
        f"{result.path}: {result.requests} requests{already}, {result.prompt_tokens} prompt and {result.output_tokens} "
        f"output tokens, {result.bytes / 1e6:.1f} MB, {result.duration_s:.0f} s",
        f"{result.requests - result.cut} answers ended by themselves, {result.cut} were cut",
        f"model {result.metadata.get('model')}, layer {result.metadata.get('layer')}; {result.metadata.get('sampling')}",
    ]
    left_out = [
        (result.too_long, "too long for the model's context (--max-model-len)"),
        (result.empty, "without tokens"),
        (result.unrecorded, "answered, but without usable features"),
    ]
    lines += [f"left out: {count} of {result.prompts} prompts: {why}" for count, why in left_out if count]
    return "".join(f"{line}\n" for line in lines)


def _as_typed(error: LeapError) -> str:
    """The message with its option as the command line spells it."""
    text = str(error)
    name, colon, rest = text.partition(":")
    return (
        f"--{name.replace('_', '-')}:{rest}"
        if isinstance(error, ConfigError) and name.isidentifier() and colon
        else text
    )


def main(words: Sequence[str] | None = None) -> None:
    """Entry point. Exit status: 0 done, 1 a `LeapError` (one line on stderr), 2 wrong usage, 130 interrupted."""
    typed = list(sys.argv[1:] if words is None else words)
    terminal.run("leap-record", lambda: app(args=typed, prog_name="leap-record"))
