"""The `leap-calibrate` command: fit a cost model to measured runs, say how good it is, and write it."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from leap_rs import terminal
from leap_rs._leap import ConfigError, LeapError
from leap_rs.writing import obstacle, replacing

from .limits import LIMITS

if TYPE_CHECKING:
    from .calibration import Calibration

app = terminal.application()

OPTION_NAMES = ("engine", "cost_model", "pull", "fit_share", "jitters", "jitter_ms", "seed", *LIMITS)


@app.command()
def leap_calibrate(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN...",
            help=(
                "Measured runs of one engine: an LLMServingSim run (directory or its requests.jsonl), the JSON of vllm "
                "bench serve --save-detailed, spans of a vLLM server, a file of AIPerf, GuideLLM or inference-perf with "
                "a request each, or a leap trace with measured_queued_s, measured_first_token_s and "
                "measured_last_token_s, or with ttft_s and e2el_s. Several are fitted together."
            ),
            show_default=False,
        ),
    ],
    out: Annotated[
        Path, typer.Option(help="The cost model to write, for leap-replay --cost-model.", show_default=False)
    ],
    workload: Annotated[
        Path | None,
        typer.Option(
            help="The workload of an LLMServingSim run: planned arrivals, and token ids for shared prefixes.",
            show_default="the one that meta.json names, beside the run or above it",
        ),
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(
            help="Preset to start from; it also gives the limits that the run does not state.",
            show_default="by the run's card and model, else h100-llama-8b",
        ),
    ] = None,
    cost_model: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Start from this cost model instead, for instance an earlier calibration."),
    ] = None,
    pull: Annotated[
        float,
        typer.Option(help="Pull towards the start: a coefficient this factor away is one standard deviation off."),
    ] = 1.5,
    fit_share: Annotated[
        float,
        typer.Option(help="Share of each run's requests that is fitted, first queued first; the rest is held out."),
    ] = 0.5,
    refit: Annotated[
        bool,
        typer.Option(
            "--refit",
            help=(
                "Write coefficients fitted on all requests. Without it those are written whose held-out errors are "
                "reported."
            ),
        ),
    ] = False,
    name: Annotated[str, typer.Option(help="Name of the engine in the file.", show_default="the file's")] = "",
    max_num_seqs: Annotated[int | None, typer.Option(help="Sequences resident at a time.", min=1)] = None,
    max_num_batched_tokens: Annotated[int | None, typer.Option(help="Tokens a step.", min=1)] = None,
    kv_tokens: Annotated[
        int | None,
        typer.Option(help="KV cache in tokens as vLLM counts it, num_gpu_blocks x block size, null block included."),
    ] = None,
    block_size: Annotated[int | None, typer.Option(help="Tokens in a KV block.", min=1)] = None,
    data_parallel_size: Annotated[
        int | None, typer.Option(help="Ranks that step together; the limits above are of one rank.", min=1)
    ] = None,
    async_scheduling: Annotated[
        bool | None,
        typer.Option(
            "--async-scheduling/--no-async-scheduling", help="Compose a step before the one before it has ended."
        ),
    ] = None,
    enable_prefix_caching: Annotated[
        bool | None,
        typer.Option("--enable-prefix-caching/--no-enable-prefix-caching", help="Reuse KV blocks of shared prefixes."),
    ] = None,
    jitters: Annotated[int, typer.Option(help="Jittered copies of each run to average over.", min=1)] = 8,
    jitter_ms: Annotated[float, typer.Option(help="Standard deviation of the jitter of arrivals.")] = 2.0,
    seed: Annotated[int, typer.Option(help="Seed of the jitters.", min=0)] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")] = False,
) -> None:
    """Fit the step-time coefficients of an engine to the times of real requests and write them as a cost model.

    The first requests of each run are fitted by simulating the run; the rest says how good the fit is. A coefficient that
    the runs do not determine keeps about the value of the start, and is named.
    """
    limits = {
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max_num_batched_tokens,
        "kv_tokens": kv_tokens,
        "block_size": block_size,
        "async_scheduling": async_scheduling,
        "enable_prefix_caching": enable_prefix_caching,
        "data_parallel_size": data_parallel_size,
    }
    with terminal.ending("leap-calibrate", _option_spelled):
        from .calibration import CalibrationOptions, calibrate

        options = CalibrationOptions(
            engine=engine,
            cost_model=cost_model,
            pull=pull,
            fit_share=fit_share,
            refit=refit,
            jitters=jitters,
            jitter_ms=jitter_ms,
            seed=seed,
            limits={key: value for key, value in limits.items() if value is not None},
            name=name or out.stem,
        )
        if fault := obstacle(out):
            raise LeapError(f"{out}: cannot be written: {fault}")
        with terminal.status("fitting"):
            found = calibrate(runs, options, workload=workload)
        document = found.to_dict()
        write(document, out)
        if as_json:
            terminal.print_json({"leap_calibrate_version": 1, "out": str(out), **document})
        else:
            show(found, out)


def write(document: dict[str, Any], out: Path) -> None:
    """The cost model as JSON, whole or not at all."""
    text = json.dumps(document, allow_nan=False, indent=1)
    with replacing(out) as temporary:
        temporary.write_text(f"{text}\n", encoding="utf-8")


def show(found: Calibration, out: Path) -> None:
    """Print the report and where the cost model is."""
    from rich.console import Console

    from .report import WIDTH, report

    console = Console(width=WIDTH, soft_wrap=True, markup=False, highlight=False)
    command = f"leap-replay TRACE --cost-model {out} {found.setup.replay_options()}".rstrip()
    # Captured, because rich would end the process with status 1 where the reader of a pipe has gone.
    with console.capture() as capture:
        report(found, console)
        console.print(f"written: {out} ({command})")
    sys.stdout.write(capture.get())
    sys.stdout.flush()


def _option_spelled(error: LeapError) -> str:
    """The message with the option as the command spells it."""
    name, colon, rest = str(error).partition(":")
    first, space, tail = str(error).partition(" ")
    if isinstance(error, ConfigError):
        if name in OPTION_NAMES and colon:
            return f"--{name.replace('_', '-')}:{rest}"
        if first in OPTION_NAMES and space:
            return f"--{first.replace('_', '-')} {tail}"
    return str(error)


def main(words: Sequence[str] | None = None) -> None:
    """Entry point. Exit status: 0 done, 1 a `LeapError` (one line on stderr), 2 wrong usage, 130 interrupted."""
    typed = list(sys.argv[1:] if words is None else words)
    terminal.run("leap-calibrate", lambda: app(args=typed, prog_name="leap-calibrate"))
