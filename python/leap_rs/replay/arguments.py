"""The options of `leap-replay`, each with its help text; names and meanings are those of vLLM where it has them."""

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

Trace = Annotated[
    Path,
    typer.Argument(metavar="TRACE", help="Trace file of any known format (leap-trace describe).", show_default=False),
]
Load = Annotated[
    float | None,
    typer.Option(
        help=(
            "Offered load as a multiple of the FCFS capacity measured on this trace (and under --max-concurrency); "
            "scales the trace's own arrival times. Without --load and --request-rate they are replayed as they are."
        )
    ),
]
RequestRate = Annotated[
    float | None,
    typer.Option(
        help=(
            "Requests per second with Gamma arrivals that replace the trace's own, drawn as vllm bench serve draws "
            "them: the last of N arrives at N / rate. inf sends all at once."
        )
    ),
]
Burstiness = Annotated[
    float,
    typer.Option(
        help="Shape of the Gamma arrivals of --request-rate: 1 is Poisson, below it burstier, inf is a constant gap."
    ),
]
NumPrompts = Annotated[
    int | None,
    typer.Option(
        help=(
            "Replay N requests: the first N of the trace or, beyond its length, the trace over and over. One that is "
            "short against --max-num-seqs never brings the engine to its load."
        )
    ),
]
MaxConcurrency = Annotated[
    int | None,
    typer.Option(
        help=(
            "Send at most N requests at a time; latencies still count from the planned arrival. Below the engine's "
            "seats the queue is the client's, and no order of the server can act on it."
        )
    ),
]
MaxTokens = Annotated[
    int | None,
    typer.Option(help="Output budget of the predictions in tokens; the readout's or the trace's own by default."),
]
Seed = Annotated[int, typer.Option(help="Seed of everything random.")]
Seeds = Annotated[
    int,
    typer.Option(
        help=(
            "Runs a policy: the first replays the trace as recorded, each further one deals the requests anew "
            "over the same arrival times."
        )
    ),
]
Sweep = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=START:STOP:STEP",
        help=(
            "Replay over a grid (or NAME=A,B,C) of load, decode-slots, max-num-seqs, aging or aging-rate; repeat it "
            "for a product."
        ),
    ),
]
Engine = Annotated[str, typer.Option(help="Engine preset; a name that does not exist lists them.")]
CostModel = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help=(
            "JSON with the seven step-time coefficients (alone or under 'cost', then limits may stand beside it); "
            "replaces those of --engine."
        ),
    ),
]
DataParallelSize = Annotated[
    int | None,
    typer.Option(
        help=(
            "Ranks of an expert-parallel deployment: engines of these limits each that run in lock-step, each step as "
            "long as the slowest rank's."
        ),
        show_default="1",
    ),
]
DecodeSlots = Annotated[
    int | None,
    typer.Option(help="Sequences that decode in one step, where fewer than the residents."),
]
MaxNumSeqs = Annotated[int | None, typer.Option(help="Sequences resident at a time.")]
MaxNumBatchedTokens = Annotated[int | None, typer.Option(help="Tokens a step.")]
MaxModelLen = Annotated[
    int | None,
    typer.Option(
        help="Tokens of a prompt and its answer together that the model takes; requests beyond are left out and counted."
    ),
]
KvTokens = Annotated[
    int | None,
    typer.Option(
        help=(
            "KV cache in tokens as vLLM counts it, num_gpu_blocks x block size: this includes the null block, so "
            "one block of it is never usable."
        )
    ),
]
BlockSize = Annotated[int | None, typer.Option(help="Tokens in a KV block.")]
Watermark = Annotated[float, typer.Option(help="Share of the KV blocks kept free when a request is admitted.")]
EnableChunkedPrefill = Annotated[
    bool,
    typer.Option("--enable-chunked-prefill/--no-enable-chunked-prefill", help="Split a prompt over steps."),
]
EnablePrefixCaching = Annotated[
    bool,
    typer.Option(
        "--enable-prefix-caching/--no-enable-prefix-caching",
        help="Reuse KV blocks of shared prefixes and of a preempted request.",
    ),
]
AsyncScheduling = Annotated[
    bool | None,
    typer.Option(
        "--async-scheduling/--no-async-scheduling",
        help="Compose a step before the one before it has ended, as vLLM does by default.",
        show_default="the preset's",
    ),
]
SchedulerReserveFullIsl = Annotated[
    bool,
    typer.Option(
        "--scheduler-reserve-full-isl/--no-scheduler-reserve-full-isl",
        help="Admit a request only if its whole sequence fits.",
    ),
]
Policy = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME[:key=value,...]",
        help=(
            "A policy to replay, repeatable: fcfs, sjf-prompt, hrrn, las, mlfq, leap-frozen, leap-paper, leap, "
            "score:NAME, sjf-oracle, srpt-oracle. Keys: levers (of queue, slots, evict and admission, joined by +; fcfs "
            "takes admission alone), order, objective, rls, batch, aging (by how many e-foldings waiting raises a request "
            "in the time that a newcomer would wait) or aging_rate (e-foldings per second), memory_weight, "
            "recompute_share (of the computed tokens, what admission lets preempted requests compute again), "
            "wait_cap_steps, wait_cap_s, hysteresis, evict_factor, evict_per_s; for leap also readouts (of prompt, text "
            "and state, joined by +) and encoder_s (seconds that the encoder takes for a prompt), for score:NAME delay_s "
            "and gpu_share. All that can run by default."
        ),
    ),
]
Readout = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        help=(
            "State readout (X.prompt.safetensors and X.text.safetensors beside it are loaded too), or 'none' to learn "
            "from zero."
        ),
        show_default="readout.safetensors beside the trace, if it fits",
    ),
]
WaitCapS = Annotated[
    float | None,
    typer.Option(help="A request that has waited for so many seconds goes first, whatever its key."),
]
Goodput = Annotated[
    list[str] | None,
    typer.Option(
        metavar="METRIC:MS ...", help="Service level objectives such as ttft:500 tpot:50 (ptl, ttft, tpot, e2el; ms)."
    ),
]
PercentileMetrics = Annotated[str, typer.Option(help="Metrics whose percentiles are reported.")]
MetricPercentiles = Annotated[str, typer.Option(help="Percentiles to report.")]
JsonOutput = Annotated[bool, typer.Option("--json", help="Print the result as JSON and nothing else.")]
SaveResult = Annotated[bool, typer.Option("--save-result", help="Write the result as JSON to a file too.")]
ResultDir = Annotated[Path | None, typer.Option(help="Directory of that file.", show_default="the current one")]
ResultFilename = Annotated[str | None, typer.Option(help="Its name.", show_default="leap-replay-TRACE-LOAD.json")]
Report = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help='Write one HTML page with charts, which needs no network, too (pip install "leap-rs[report]").',
    ),
]
Metadata = Annotated[
    list[str] | None,
    typer.Option(metavar="KEY=VALUE ...", help="Pairs that are put into the result."),
]
Strict = Annotated[
    bool,
    typer.Option(
        "--strict", help="Refuse a foreign trace with failed or zero-length rows instead of leaving them out."
    ),
]
Sort = Annotated[
    bool,
    typer.Option("--sort", help="Sort a foreign trace whose times run backwards instead of refusing it."),
]
Join = Annotated[
    bool,
    typer.Option(
        "--join",
        help=(
            "Where the times of a foreign trace run backwards another recording begins: it follows the one before by "
            "that one's mean gap."
        ),
    ),
]


class TimeUnit(str, Enum):
    """Units of time that a foreign trace may be in."""

    S = "s"
    MS = "ms"
    US = "us"
    NS = "ns"


Unit = Annotated[
    TimeUnit | None,
    typer.Option(help="Unit of a foreign trace's times, where its format leaves that open.", show_default=False),
]
Tokenizer = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="tokenizer.json, or its directory, for foreign traces that carry text.",
        show_default=False,
    ),
]
Run = Annotated[
    int | None, typer.Option(help="Which of several results in one file is the trace, from 1.", show_default=False)
]
PrefixBlockSize = Annotated[
    int | None,
    typer.Option(
        help="Tokens in a block of prefixes, for Mooncake's rows as other tools write them.", min=1, show_default="512"
    ),
]
Threads = Annotated[int | None, typer.Option(help="Simulations at a time.", show_default="the CPUs")]


class Objective(str, Enum):
    """What a search brings down."""

    PTL = "ptl"
    E2EL = "e2el"


Tune = Annotated[
    str | None,
    typer.Option(
        metavar="METRIC<=FACTOR",
        help=(
            "Search leap's levers, order, aging, recompute_share, decode slots and --max-num-seqs for the lowest --objective under a bound "
            "relative to fcfs, such as 'p99_e2el<=1.1' or 'p99_ttft<=1,request_throughput>=0.95': on the first half of "
            "the trace, judged on the other. Quote it."
        ),
    ),
]
TuneObjective = Annotated[
    Objective | None,
    typer.Option("--objective", help="With --tune: the mean to bring down.", show_default="ptl"),
]
