"""The `leap-replay` command: parses, shows progress, prints or saves; a `LeapError` is one line and status 1."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from leap_rs import terminal
from leap_rs._leap import ConfigError, LeapError
from leap_rs.terminal import looks_like

from . import arguments, page

if TYPE_CHECKING:
    from .results import ReplayResult, ResultObject
    from .tune import TuneResult

app = terminal.application()

# Options that take several values after one name in vllm bench serve, and what such a value looks like.
_SEVERAL = {"--goodput": looks_like(r"\w+:\S+"), "--metadata": looks_like(r"[^\s=-][^=]*=.*")}
_READ_OPTIONS = ("strict", "sort", "join", "unit", "tokenizer", "run", "prefix_block_size")
_NOT_OPTIONS = (
    "trace",
    "policy",
    "json_output",
    "save_result",
    "result_dir",
    "result_filename",
    "report",
    "context",
    "tune",
    "objective",
    *_READ_OPTIONS,
)


def expand(words: Sequence[str]) -> list[str]:
    """`--goodput ttft:500 tpot:50` as `--goodput ttft:500 --goodput tpot:50`, so that vLLM's own spelling works."""
    return terminal.expand(words, _SEVERAL)


@app.command()
def leap_replay(
    context: typer.Context,
    trace: arguments.Trace,
    load: arguments.Load = None,
    request_rate: arguments.RequestRate = None,
    burstiness: arguments.Burstiness = 1.0,
    num_prompts: arguments.NumPrompts = None,
    max_concurrency: arguments.MaxConcurrency = None,
    max_tokens: arguments.MaxTokens = None,
    seed: arguments.Seed = 0,
    seeds: arguments.Seeds = 5,
    sweep: arguments.Sweep = None,
    engine: arguments.Engine = "h100-llama-8b",
    cost_model: arguments.CostModel = None,
    data_parallel_size: arguments.DataParallelSize = None,
    decode_slots: arguments.DecodeSlots = None,
    max_num_seqs: arguments.MaxNumSeqs = None,
    max_num_batched_tokens: arguments.MaxNumBatchedTokens = None,
    max_model_len: arguments.MaxModelLen = None,
    kv_tokens: arguments.KvTokens = None,
    block_size: arguments.BlockSize = None,
    watermark: arguments.Watermark = 0.0,
    enable_chunked_prefill: arguments.EnableChunkedPrefill = True,
    enable_prefix_caching: arguments.EnablePrefixCaching = True,
    async_scheduling: arguments.AsyncScheduling = None,
    scheduler_reserve_full_isl: arguments.SchedulerReserveFullIsl = True,
    policy: arguments.Policy = None,
    readout: arguments.Readout = None,
    wait_cap_s: arguments.WaitCapS = None,
    goodput: arguments.Goodput = None,
    percentile_metrics: arguments.PercentileMetrics = "ptl,ttft,tpot,itl,e2el",
    metric_percentiles: arguments.MetricPercentiles = "50,90,99",
    json_output: arguments.JsonOutput = False,
    save_result: arguments.SaveResult = False,
    result_dir: arguments.ResultDir = None,
    result_filename: arguments.ResultFilename = None,
    report: arguments.Report = None,
    metadata: arguments.Metadata = None,
    strict: arguments.Strict = False,
    sort: arguments.Sort = False,
    join: arguments.Join = False,
    unit: arguments.Unit = None,
    tokenizer: arguments.Tokenizer = None,
    run: arguments.Run = None,
    prefix_block_size: arguments.PrefixBlockSize = None,
    threads: arguments.Threads = None,
    tune: arguments.Tune = None,
    objective: arguments.TuneObjective = None,
) -> None:
    """Replay a recorded trace under several scheduling policies on a simulated vLLM engine, and say what they change.

    Exit status: 0 done, 1 an input or option that cannot be used, 2 wrong usage, 130 interrupted.
    """
    words = locals()
    given = {name: value for name, value in words.items() if name not in _NOT_OPTIONS and value is not None}
    reading = {name: words[name] for name in _READ_OPTIONS} | {"unit": None if unit is None else unit.value}
    if policy:
        given["policies"] = tuple(policy)
    with terminal.ending("leap-replay", _as_typed):
        if not save_result and (result_dir is not None or result_filename is not None):
            raise ConfigError("--result-dir and --result-filename: need --save-result")
        if objective is not None and tune is None:
            raise ConfigError("--objective: goes with --tune; of a policy it is a key (--policy leap:objective=e2el)")
        if report is not None and tune is not None:
            raise ConfigError(
                "--report: not with --tune; the page of what it chose comes from the command that it prints"
            )
        if report is not None:
            page.check(report)
        result: ResultObject
        replayed = None
        if tune is not None:
            result = _tune(trace, tune, "ptl" if objective is None else objective.value, given, reading)
        else:
            result = replayed = _replay(trace, given, reading, for_page=report is not None)
        saved = _save(result, trace, result_dir or Path(), result_filename) if save_result else None
        if report is not None and replayed is not None:
            replayed.command = _command(context.obj or (), seed)
            size = replayed.report(report).stat().st_size
        _show(result, as_json=json_output)
        told = sys.stderr if json_output else sys.stdout
        if saved is not None:
            print(f"saved to {saved}", file=told)
        if report is not None:
            # A device or a pipe has no size.
            print(f"report: {report}{f' ({size / 1e6:.1f} MB)' if size else ''}", file=told)


def _command(words: Sequence[str], seed: int) -> str:
    """What was typed, for a shell, with the seed even where it was left at its default."""
    named = any(word.partition("=")[0] == "--seed" for word in words)
    return shlex.join(["leap-replay", *words, *([] if named else ["--seed", str(seed)])])


def _as_typed(error: LeapError) -> str:
    """The message with its option as the command line spells it."""
    text = str(error)
    found = re.match(r"([a-z_]+)(?=:? )", text)
    if found is None or not isinstance(error, ConfigError):
        return text
    name = found[1].replace("policies", "policy")
    if name in ("policy", "trace") and not text.startswith("policies"):
        return text  # "policy leap:speed=1: ..." quotes a specification
    if not hasattr(arguments, "".join(part.capitalize() for part in name.split("_"))):
        return text
    return f"--{name.replace('_', '-')}{text[found.end() :]}"


def _replay(trace: Path, given: dict[str, Any], reading: dict[str, Any], *, for_page: bool) -> ReplayResult:
    # Imported late: --help and a wrong option need neither polars nor the core.
    from leap_rs.trace import ReadOptions

    from .options import build
    from .run import run

    options = build(given)
    with _progress_bar() as progress:
        return run(trace, options, read_options=ReadOptions(**reading), for_page=for_page, progress=progress)


def _tune(trace: Path, bound: str, objective: str, given: dict[str, Any], reading: dict[str, Any]) -> TuneResult:
    from leap_rs.trace import ReadOptions

    from .tune.run import run_tune

    with _progress_bar() as progress:
        return run_tune(trace, bound, objective, given, read_options=ReadOptions(**reading), progress=progress)


def _save(result: ResultObject, trace: Path, directory: Path, name: str | None) -> Path:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LeapError(f"{directory}: cannot be made: {error.strerror or error}") from error
    return result.save(directory / (name or default_filename(result.to_dict(), trace)))


def default_filename(document: dict[str, Any], trace: Path) -> str:
    """`leap-replay-TRACE-LOAD.json` (`leap-tune-...` of a search), LOAD as it was asked for: `load1.2`, `2.5qps`, `sweep` or `recorded`."""
    config = document["config"]
    points = config.get("points", [config])
    point = points[0]
    if len(points) > 1:
        load = "sweep"
    elif point["load"] is not None:
        load = f"load{point['load']:g}"
    elif point["request_rate"] is not None:
        load = f"{point['request_rate']}qps"
    else:
        load = "recorded"
    kind = "leap-tune" if "leap_tune_version" in document else "leap-replay"
    return f"{kind}-{trace.stem}-{load}.json"


def _show(result: ResultObject, *, as_json: bool) -> None:
    if as_json:
        sys.stdout.write(result.to_json() + "\n")
        sys.stdout.flush()
        return
    from rich.console import Console

    from .report import WIDTH, render
    from .tune.report import render as render_search

    own_width = Console().width if sys.stdout.isatty() else WIDTH
    console = Console(width=max(own_width, WIDTH), highlight=False)
    document = result.to_dict()
    with console.capture() as capture:
        (render_search if "leap_tune_version" in document else render)(document, console, text_width=own_width)
    sys.stdout.write(capture.get())
    sys.stdout.flush()


@contextmanager
def _progress_bar() -> Iterator[Callable[[float], None] | None]:
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("replaying", total=1.0)
        yield lambda done: bar.update(task, completed=done)


def main(words: Sequence[str] | None = None) -> None:
    """Entry point of the console script."""
    typed = list(sys.argv[1:] if words is None else words)
    terminal.run("leap-replay", lambda: app(args=expand(typed), prog_name="leap-replay", obj=typed))
