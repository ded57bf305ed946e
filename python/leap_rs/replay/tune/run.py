"""`leap_rs.tune`: splits the trace, searches one half, replays what was found on the other, puts the result together."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import polars as pl

from leap_rs._leap import ConfigError, TraceError
from leap_rs.replay import engines
from leap_rs.replay.options import Options, build
from leap_rs.replay.run import open_trace
from leap_rs.trace import Trace

from .bound import parse
from .measure import Bench, Measured
from .outcome import SHOWN, VERSION, TuneResult, half, verdict, worth
from .search import Found, Search
from .server import replay_command, server_options
from .space import Candidate, Space, default_space, fcfs

if TYPE_CHECKING:
    from leap_rs.trace import ReadOptions

Objective = Literal["ptl", "e2el"]
# A half shorter than so many requests a sequence is repeated to it: it would mostly fill and drain the engine.
ENOUGH = 20
# Progress up to which the search counts.
SEARCH_SHARE = 0.9
_CONFIG = (
    "load",
    "burstiness",
    "num_prompts",
    "seed",
    "seeds",
    "max_concurrency",
    "goodput",
    "max_tokens",
    "wait_cap_s",
)


def tune(
    trace: str | os.PathLike[str] | pl.DataFrame,
    bound: str,
    *,
    objective: Objective = "ptl",
    load: float | None = None,
    seeds: int = 5,
    progress: Callable[[float], None] | None = None,
    **options: Any,
) -> TuneResult:
    """Search leap's options for the lowest objective under a bound relative to fcfs.

    The search runs on the first half of the trace (by arrival); what it chose is then replayed on the other half.

    trace: a trace file of any format that leap reads, or a frame in the leap trace format.
    bound: `METRIC<=FACTOR` such as `p99_e2el<=1.1`, several joined by commas: a latency's metric may be at most so many
    times what it is under fcfs, a rate's (`request_throughput>=0.95`) at least.
    objective: `ptl` for the lowest mean PTL, `e2el` for the lowest mean E2EL.
    load: offered load of each half as a multiple of the FCFS capacity measured on it; the trace's own times without it.
    seeds: runs of a finalist, at least 2; the bound must hold with the far end of the 95 % interval over them.
    progress: called with the share done, from 0 to 1.
    options: those of `leap_rs.replay`; `sweep` gives the values to search of `max_num_seqs`, `decode_slots` or
    `aging_rate`, `num_prompts` the requests that each half replays.

    Raises `ConfigError` for an option that cannot be used, `TraceError` and `ReadoutError` for the inputs.
    """
    values = {"load": load, "seeds": seeds, **options}
    return run_tune(trace, bound, objective, build(values), progress=progress)


def run_tune(
    source: str | os.PathLike[str] | pl.DataFrame,
    bound: str,
    objective: str,
    options: Options,
    *,
    read_options: ReadOptions | None = None,
    progress: Callable[[float], None] | None = None,
) -> TuneResult:
    """Search with options that are already validated."""
    bounds = parse(bound, options.goodput)
    target = _objective(objective)
    _require_searchable(options)
    core_engine, engine = engines.resolve(options)
    stock = int(core_engine["max_num_seqs"])
    space = default_space(stock, max_num_batched_tokens=int(core_engine["max_num_batched_tokens"]), swept=options.sweep)
    trace, path = open_trace(source, read_options)
    first, second = halves(trace)
    repeated = options.num_prompts is None and second.frame.height < ENOUGH * stock
    num_prompts = ENOUGH * stock if repeated else options.num_prompts
    used = options.model_copy(update={"num_prompts": num_prompts, "sweep": {}})
    metrics = (*SHOWN, *(bound.metric for bound in bounds))

    def searched(share: float) -> None:
        if progress is not None:
            progress(SEARCH_SHARE * share)

    bench = Bench(first, used, stock, metrics)
    found = None
    if bench.queue.get("share_of_steps_with_queue"):
        found = Search(bench, space, bounds, target, options.seeds, searched).run()
    seen, unseen, held_out = _both(bench, found, second, used, stock, metrics, options.seeds)
    decided = verdict(found, bench, unseen, bounds, target, stock)
    if progress is not None:
        progress(1.0)

    recommended = fcfs(stock)
    if found is not None and found.chosen is not None and decided.recommend != "fcfs":
        chosen = found.chosen.candidate
        recommended = chosen if decided.recommend == "leap" else fcfs(chosen.max_num_seqs)
    beside = unseen.get("at_stock")
    if beside is not None and not worth(beside, unseen["fcfs"], bounds, target):
        beside = None
    height = trace.frame.height
    middle = first.frame.height
    whole = num_prompts if options.num_prompts is not None or (num_prompts or 0) > height else None
    load = options.load if isinstance(options.load, float) else None
    if load is not None and held_out is not None and held_out.rate is not None:
        load = held_out.rate / held_out.capacity.get(recommended.engine, held_out.rate / load)
    notes = [str(left) for left in trace.left_out] + list(trace.notes) + bench.notes + _edge(found, options, space)
    document: dict[str, Any] = {
        "leap_tune_version": VERSION,
        "trace": {"path": None if path is None else str(path), "format": trace.format, "requests": height},
        "config": {
            **engine,
            **{name: getattr(used, name) for name in _CONFIG},
            "request_rate": "inf" if options.request_rate == float("inf") else options.request_rate,
            "repeated": repeated,
        },
        "bound": [
            {"metric": one.metric, "relation": "<=" if one.at_most else ">=", "factor": one.factor} for one in bounds
        ],
        "objective": f"{target}_ms",
        "space": space.to_dict(),
        "effort": {
            "candidates": 0 if found is None else found.tried,
            "simulations": bench.simulations,
            "rounds": [] if found is None else found.rounds,
        },
        "candidates": half(bench, _finalists(found), bounds, (0, middle))["results"],
        "chosen": None if found is None or found.chosen is None else found.chosen.candidate.to_dict(),
        "nearest": None if found is None or found.nearest is None else found.nearest.candidate.to_dict(),
        "search": half(bench, seen, bounds, (0, middle)),
        "held_out": None if held_out is None else half(held_out, unseen, bounds, (middle, height)),
        "verdict": decided.to_dict(),
        "server": server_options(recommended, options),
        "server_at_stock": None if beside is None else server_options(beside.candidate, options),
        "replay_command": replay_command(path, recommended, options, load=load, num_prompts=whole),
        "notes": list(dict.fromkeys(notes)),
        "conclusions": decided.sentences,
    }
    for key in options.metadata:
        if key in document:
            raise ConfigError(f"metadata: {key!r} is a key of the result itself")
    return TuneResult({**document, **options.metadata})


def halves(trace: Trace) -> tuple[Trace, Trace]:
    """The requests that arrive first, and the rest."""
    height = trace.frame.height
    if height < 4:
        raise TraceError(f"{trace.path}: {height} requests are too few to search one half and judge on the other")
    middle = height // 2
    parts = (trace.frame[:middle], trace.frame[middle:])
    first, second = (replace(trace, frame=part, left_out=(), notes=()) for part in parts)
    return first, second


def _both(
    bench: Bench,
    found: Found | None,
    second: Trace,
    options: Options,
    stock: int,
    metrics: tuple[str, ...],
    seeds: int,
) -> tuple[dict[str, Measured], dict[str, Measured], Bench | None]:
    """What is reported of each half by name, and the other half where something was chosen to be replayed on it."""
    seen = {"fcfs": bench.fcfs, "leap": bench.leap}
    if found is None or found.chosen is None:
        if found is not None and found.nearest is not None:
            seen["nearest"] = found.nearest
        return seen, {}, None
    named: dict[str, Candidate] = {"chosen": found.chosen.candidate}
    if found.chosen.candidate.max_num_seqs != stock and found.chosen.candidate.levers:
        named["fcfs_at_chosen"] = fcfs(found.chosen.candidate.max_num_seqs)
    if found.at_stock is not None:
        named["at_stock"] = found.at_stock.candidate
    other = Bench(second, options, stock, metrics)
    seen |= dict(zip(named, bench.measure(named.values(), seeds), strict=True))
    unseen = {"fcfs": other.fcfs, "leap": other.leap}
    unseen |= dict(zip(named, other.measure(named.values(), seeds), strict=True))
    return seen, unseen, other


def _edge(found: Found | None, options: Options, space: Space) -> list[str]:
    """A word where the best number of sequences may lie beyond those searched."""
    searched = sorted({seqs for seqs, _ in space.engines})
    chosen = None if found is None or found.chosen is None else found.chosen.candidate.max_num_seqs
    if "max_num_seqs" in options.sweep or chosen not in (searched[0], searched[-1]) or chosen == space.stock:
        return []
    return [
        f"{chosen} is at the end of the numbers of sequences that were searched ({', '.join(map(str, searched))}): "
        "--sweep max-num-seqs=A,B,C looks further"
    ]


def _finalists(found: Found | None) -> dict[str, Measured]:
    return {} if found is None else {str(i): one for i, one in enumerate(found.finalists, 1)}


def _objective(objective: str) -> str:
    if objective not in ("ptl", "e2el"):
        raise ConfigError(f"objective: expected ptl or e2el, got {objective!r}")
    return f"mean_{objective}"


def _require_searchable(options: Options) -> None:
    """Refuse options that contradict a search."""
    if options.policies is not None:
        raise ConfigError("policies: --tune searches the policies itself; leave it out")
    if options.decode_slots is not None:
        raise ConfigError("decode_slots: --tune searches it; --sweep decode-slots=A,B,C gives the values")
    if isinstance(options.load, tuple):
        raise ConfigError("load: --tune takes one")
    if options.seeds < 2:
        raise ConfigError("seeds: --tune needs at least 2, for without an interval no bound is sure")
