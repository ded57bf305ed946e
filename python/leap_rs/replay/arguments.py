"""The options of `leap-replay`, each with its help text; names and meanings are those of vLLM where it has them."""

from pathlib import Path
from typing import Annotated

import typer

_LOAD, _ENGINE, _POLICY, _REPORT, _TRACE = "Load", "Engine", "Policies", "Report", "Trace"

Trace = Annotated[Path, typer.Argument(metavar="TRACE", help="Trace file of any format that leap reads.", show_default=False)]
Load = Annotated[
    float | None,
    typer.Option(
        help="Offered load as a multiple of the FCFS capacity measured on this trace; scales the trace's own arrival times. Without --load and --request-rate they are replayed as they are.",
        rich_help_panel=_LOAD,
    ),
]
RequestRate = Annotated[
    float | None,
    typer.Option(
        help="Requests per second with Gamma arrivals that replace the trace's own; inf sends all at once.", rich_help_panel=_LOAD
    ),
]
Burstiness = Annotated[
    float,
    typer.Option(help="Shape of the Gamma arrivals of --request-rate: 1 is Poisson, below it burstier.", rich_help_panel=_LOAD),
]
NumPrompts = Annotated[int | None, typer.Option(help="Replay only the first N requests.", rich_help_panel=_LOAD)]
MaxConcurrency = Annotated[
    int | None,
    typer.Option(
        help="Send at most N requests at a time; latencies still count from the planned arrival.", rich_help_panel=_LOAD
    ),
]
MaxTokens = Annotated[int | None, typer.Option(help="Cap every answer at N tokens.", rich_help_panel=_LOAD)]
Seed = Annotated[int, typer.Option(help="Seed of everything random.", rich_help_panel=_LOAD)]
Seeds = Annotated[
    int,
    typer.Option(
        help="Runs a policy: the first replays the trace as recorded, each further one deals the requests anew over the same arrival times.",
        rich_help_panel=_LOAD,
    ),
]
Sweep = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=START:STOP:STEP",
        help="Replay over a grid (or NAME=A,B,C) of load, decode-slots, max-num-seqs or aging-rate; repeat it for a product.",
        rich_help_panel=_LOAD,
    ),
]
Engine = Annotated[str, typer.Option(help="Engine preset; a name that does not exist lists them.", rich_help_panel=_ENGINE)]
CostModel = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="JSON with the seven step-time coefficients (alone or under 'cost', then limits may stand beside it); replaces those of --engine.",
        rich_help_panel=_ENGINE,
    ),
]
DecodeSlots = Annotated[
    int | None,
    typer.Option(help="Sequences that decode in one step, where fewer than the residents.", rich_help_panel=_ENGINE),
]
MaxNumSeqs = Annotated[int | None, typer.Option(help="Sequences resident at a time.", rich_help_panel=_ENGINE)]
MaxNumBatchedTokens = Annotated[int | None, typer.Option(help="Tokens a step.", rich_help_panel=_ENGINE)]
KvTokens = Annotated[
    int | None,
    typer.Option(
        help="KV cache in tokens as vLLM counts it, num_gpu_blocks x block size: this includes the null block, so one block of it is never usable.",
        rich_help_panel=_ENGINE,
    ),
]
BlockSize = Annotated[int | None, typer.Option(help="Tokens in a KV block.", rich_help_panel=_ENGINE)]
Watermark = Annotated[
    float, typer.Option(help="Share of the KV blocks kept free when a request is admitted.", rich_help_panel=_ENGINE)
]
EnableChunkedPrefill = Annotated[
    bool,
    typer.Option(
        "--enable-chunked-prefill/--no-enable-chunked-prefill", help="Split a prompt over steps.", rich_help_panel=_ENGINE
    ),
]
EnablePrefixCaching = Annotated[
    bool,
    typer.Option(
        "--enable-prefix-caching/--no-enable-prefix-caching",
        help="Reuse KV blocks of shared prefixes and of a preempted request.",
        rich_help_panel=_ENGINE,
    ),
]
AsyncScheduling = Annotated[
    bool | None,
    typer.Option(
        "--async-scheduling/--no-async-scheduling",
        help="Compose a step before the one before it has ended, as vLLM does by default.",
        show_default="the preset's",
        rich_help_panel=_ENGINE,
    ),
]
SchedulerReserveFullIsl = Annotated[
    bool,
    typer.Option(
        "--scheduler-reserve-full-isl/--no-scheduler-reserve-full-isl",
        help="Admit a request only if its whole sequence fits.",
        rich_help_panel=_ENGINE,
    ),
]
Policy = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME[:key=value,...]",
        help="A policy to replay, repeatable: fcfs, sjf-prompt, hrrn, las, mlfq, leap-frozen, leap-paper, leap, score:NAME, sjf-oracle, srpt-oracle. Keys: levers, order, objective, rls, aging_rate, memory_weight, wait_cap_steps. All that can run by default.",
        rich_help_panel=_POLICY,
    ),
]
Readout = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        help="State readout (X.prompt.safetensors beside it is loaded too), or 'none' to learn from zero.",
        show_default="readout.safetensors beside the trace, if it fits",
        rich_help_panel=_POLICY,
    ),
]
WaitCapS = Annotated[
    float | None,
    typer.Option(help="A request that has waited for so many seconds goes first, whatever its key.", rich_help_panel=_POLICY),
]
Goodput = Annotated[
    list[str] | None,
    typer.Option(
        metavar="METRIC:MS ...",
        help="Service level objectives such as ttft:500 tpot:50 (ptl, ttft, tpot, e2el; ms).",
        rich_help_panel=_REPORT,
    ),
]
PercentileMetrics = Annotated[str, typer.Option(help="Metrics whose percentiles are reported.", rich_help_panel=_REPORT)]
MetricPercentiles = Annotated[str, typer.Option(help="Percentiles to report.", rich_help_panel=_REPORT)]
JsonOutput = Annotated[bool, typer.Option("--json", help="Print the result as JSON and nothing else.", rich_help_panel=_REPORT)]
SaveResult = Annotated[
    bool, typer.Option("--save-result", help="Write the result as JSON to a file too.", rich_help_panel=_REPORT)
]
ResultDir = Annotated[
    Path | None, typer.Option(help="Directory of that file.", show_default="the current one", rich_help_panel=_REPORT)
]
ResultFilename = Annotated[
    str | None, typer.Option(help="Its name.", show_default="leap-replay-TRACE-LOAD.json", rich_help_panel=_REPORT)
]
Metadata = Annotated[
    list[str] | None,
    typer.Option(metavar="KEY=VALUE ...", help="Pairs that are put into the result.", rich_help_panel=_REPORT),
]
Strict = Annotated[
    bool,
    typer.Option(
        "--strict",
        help="Refuse a foreign trace with failed or zero-length rows instead of leaving them out.",
        rich_help_panel=_TRACE,
    ),
]
Sort = Annotated[
    bool,
    typer.Option("--sort", help="Sort a foreign trace whose times run backwards instead of refusing it.", rich_help_panel=_TRACE),
]
Threads = Annotated[int | None, typer.Option(help="Simulations at a time.", show_default="the CPUs", rich_help_panel=_REPORT)]
