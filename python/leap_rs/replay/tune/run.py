"""`leap_rs.tune`: splits the trace, searches one half, replays what was found on the other, puts the result together."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import polars as pl

from leap_rs._leap import ConfigError, TraceError
from leap_rs.replay import engines
from leap_rs.replay.options import Options, build, in_json
from leap_rs.replay.run import open_trace
from leap_rs.replay.seats import could_hold, held_tokens
from leap_rs.trace import Trace

from .bound import Bound, key_of, parse
from .measure import Bench, Measured
from .outcome import SHOWN, VERSION, TuneResult, Verdict, entry, half, quarters, verdict, worth
from .search import Found, Search
from .server import replay_command, server_options
from .space import Candidate, Space, default_space, fcfs

if TYPE_CHECKING:
    from leap_rs.trace import ReadOptions

Objective = Literal["ptl", "e2el"]
# A half shorter than so many requests a resident is repeated to it: it would mostly fill and drain the engine.
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

    The search runs on the first half of the trace (by arrival); what it chose is then replayed on the other half. The bound
    must hold on the searched half and on each of the two quarters in it.

    trace: a trace file of any format that leap reads, or a frame in the leap trace format.
    bound: `METRIC<=FACTOR` such as `p99_e2el<=1.1`, several joined by commas: a latency's metric may be at most so many
    times what it is under fcfs, a rate's (`request_throughput>=0.95`) at least.
    objective: `ptl` for the lowest mean PTL, `e2el` for the lowest mean E2EL.
    load: offered load of each half as a multiple of the FCFS capacity measured on it; the trace's own times without it.
    seeds: runs of a finalist, at least 2; the bound must hold with the far end of the 95 % interval over them.
    progress: called with the share done, from 0 to 1.
    options: those of `leap_rs.replay`; `sweep` gives the values to search of `max_num_seqs`, `decode_slots`, `aging` or
    `aging_rate`, `num_prompts` the requests that each half replays.

    Raises `ConfigError` for an option that cannot be used, `TraceError` and `ReadoutError` for the inputs.
    """
    values = {"load": load, "seeds": seeds, **options}
    return run_tune(trace, bound, objective, values, progress=progress)


@dataclass(frozen=True)
class Case:
    """What is asked: a trace in halves, an engine, bounds and an objective."""

    trace: Trace
    path: Path | None
    first: Trace
    second: Trace
    options: Options
    """As given."""
    used: Options
    """As each half is replayed."""
    engine: dict[str, Any]
    stock: int
    """Sequences of the engine as it is."""
    could_hold: int | None
    """Sequences that its KV cache could hold of these requests."""
    fitted_to: int
    """Running sequences up to which the cost model's step times are known."""
    space: Space
    seqs_given: bool
    """Whether the user said which numbers of sequences to search."""
    bounds: tuple[Bound, ...]
    objective: str
    metrics: tuple[str, ...]

    @property
    def repeated(self) -> bool:
        """Whether halves are replayed over and over because they are short."""
        return self.used.num_prompts != self.options.num_prompts

    def bench(self, part: Trace) -> Bench:
        """A half or a quarter, ready to replay."""
        used = self.used
        if used.num_prompts is None:
            used = used.model_copy(update={"num_prompts": enough(part, _filled(self.stock, self.could_hold))})
        return Bench(part, used, self.stock, self.metrics)

    @property
    def quarters(self) -> tuple[tuple[Trace, tuple[int, int]], ...]:
        """The searched half in two, by arrival, each with its rows in the trace."""
        one, other = split(self.first)
        middle = one.frame.height
        return (one, (0, middle)), (other, (middle, self.first.frame.height))


def case_of(
    source: str | os.PathLike[str] | pl.DataFrame,
    bound: str,
    objective: str,
    values: Mapping[str, Any],
    read_options: ReadOptions | None,
) -> Case:
    """Check everything, read the trace and split it."""
    # Apart: of a replay an option is either swept or given, here it is the engine's own and the values to search.
    swept = build({"sweep": values.get("sweep") or {}}).sweep
    options = build({name: value for name, value in values.items() if name != "sweep"})
    bounds = parse(bound, options.goodput)
    if objective not in ("ptl", "e2el"):
        raise ConfigError(f"objective: expected ptl or e2el, got {objective!r}")
    _require_searchable(options)
    core_engine, engine = engines.resolve(options)
    stock = int(core_engine["max_num_seqs"])
    trace, path = open_trace(source, read_options)
    first, second = halves(trace)
    held = held_tokens(first.frame, core_engine["kv_tokens"], core_engine["block_size"])
    most = could_hold(engine, held)
    space = default_space(stock, swept, most)
    num_prompts = enough(second, _filled(stock, most)) if options.num_prompts is None else options.num_prompts
    return Case(
        trace=trace,
        path=path,
        first=first,
        second=second,
        options=options,
        used=options.model_copy(update={"num_prompts": num_prompts}),
        engine=engine,
        stock=stock,
        could_hold=most,
        fitted_to=engines.measured_to(options),
        space=space,
        seqs_given="max_num_seqs" in swept,
        bounds=bounds,
        objective=f"mean_{objective}",
        metrics=(*SHOWN, *(one.metric for one in bounds)),
    )


def run_tune(
    source: str | os.PathLike[str] | pl.DataFrame,
    bound: str,
    objective: str,
    values: Mapping[str, Any],
    *,
    read_options: ReadOptions | None = None,
    progress: Callable[[float], None] | None = None,
) -> TuneResult:
    """Search, with the other options as a replay takes them."""
    told = progress or (lambda _: None)
    case = case_of(source, bound, objective, values, read_options)
    options = case.options
    bench = case.bench(case.first)
    found = Found()
    simulations = bench.simulations
    if queued := bool(bench.queue.get("share_of_steps_with_queue")):
        parts = [case.bench(quarter) for quarter, _ in case.quarters]

        def searched(share: float) -> None:
            told(SEARCH_SHARE * share)

        search = Search(bench, case.space, case.bounds, case.objective, options.seeds, searched, parts)
        found = search.run()
        simulations = search.simulations
    seen, unseen, other = _both(case, bench, found)
    told(1.0)
    decided = verdict(found if queued else None, bench, unseen, case.bounds, case.objective, case.stock)
    document = _document(case, found, decided, (bench, seen), None if other is None else (other, unseen))
    document["effort"]["simulations"] = simulations
    for key in options.metadata:
        if key in document:
            raise ConfigError(f"metadata: {key!r} is a key of the result itself")
    return TuneResult({**document, **options.metadata})


Half = tuple[Bench, dict[str, Measured]]


def _document(case: Case, found: Found, decided: Verdict, searched: Half, judged: Half | None) -> dict[str, Any]:
    options, trace, bounds, bench = case.options, case.trace, case.bounds, searched[0]
    middle, height = case.first.frame.height, trace.frame.height
    recommended = fcfs(case.stock)
    if found.chosen is not None and decided.recommend in ("leap", "max_num_seqs"):
        chosen = found.chosen.candidate
        recommended = chosen if decided.recommend == "leap" else fcfs(chosen.max_num_seqs)
    elif found.at_stock is not None and decided.recommend == "leap_at_stock":
        recommended = found.at_stock.candidate
    beside = None if judged is None or decided.recommend == "leap_at_stock" else judged[1].get("at_stock")
    if judged is not None and beside is not None and not worth(beside, judged[0].fcfs, bounds, case.objective):
        beside = None
    return {
        "leap_tune_version": VERSION,
        "trace": {"path": None if case.path is None else str(case.path), "format": trace.format, "requests": height},
        "config": {
            **case.engine,
            **{name: in_json(getattr(case.used, name)) for name in _CONFIG},
            "request_rate": in_json(options.request_rate),
            "repeated": case.repeated,
            "readouts": bench.readouts,
        },
        "bound": [one.to_dict() for one in bounds],
        "objective": key_of(case.objective),
        "space": case.space.to_dict(),
        "effort": {"candidates": found.tried, "rounds": found.rounds, "on_quarters": len(found.parts)},
        "candidates": [
            {
                **entry(str(i), one, bench.fcfs, bounds),
                "quarters": quarters(found, one, [rows for _, rows in case.quarters]),
            }
            for i, one in enumerate(found.finalists, 1)
        ],
        "chosen": None if found.chosen is None else found.chosen.candidate.to_dict(),
        "nearest": None if found.nearest is None else found.nearest.candidate.to_dict(),
        "search": half(*searched, bounds, (0, middle)),
        "held_out": None if judged is None else half(*judged, bounds, (middle, height)),
        "verdict": decided.to_dict(),
        "server": server_options(recommended, options),
        "server_at_stock": None if beside is None else server_options(beside.candidate, options),
        "replay_command": _again(case, recommended, judged),
        "notes": list(
            dict.fromkeys([*map(str, trace.left_out), *trace.notes, *bench.notes, *_edge(found, case), *_beyond(case)])
        ),
        "conclusions": decided.sentences,
    }


def _again(case: Case, recommended: Candidate, judged: Half | None) -> str | None:
    """The command that replays the recommended policy on the whole trace."""
    options, wanted = case.options, case.used.num_prompts
    if case.repeated and wanted is not None and wanted <= case.trace.frame.height:
        wanted = None  # the whole trace is long enough
    load = options.load if isinstance(options.load, float) else None
    if load is not None and judged is not None and judged[0].rate is not None:
        # Load is relative to the engine's own capacity: the same requests a second are another load to this one.
        load *= judged[0].capacity[case.stock, None] / judged[0].capacity[recommended.engine]
    return replay_command(case.path, recommended, options, load=load, num_prompts=wanted)


def halves(trace: Trace) -> tuple[Trace, Trace]:
    """The requests that arrive first, and the rest."""
    height = trace.frame.height
    if height < 8:
        raise TraceError(f"{trace.path}: {height} requests are too few to search one half and judge on the other")
    return split(trace)


def split(trace: Trace) -> tuple[Trace, Trace]:
    """In two by arrival."""
    middle = trace.frame.height // 2
    parts = (trace.frame[:middle], trace.frame[middle:])
    first, second = (replace(trace, frame=part, left_out=(), notes=()) for part in parts)
    return first, second


def _filled(seqs: int, could_hold: int | None) -> int:
    """As many of so many sequences as the KV cache can fill."""
    return seqs if could_hold is None else min(seqs, could_hold)


def enough(part: Trace, inside: int) -> int | None:
    """Requests to repeat a short part to, for an engine that takes so many in.

    More seats need no more: the requests a second are those of the engine as it is, and do not fill them.
    """
    return ENOUGH * inside if part.frame.height < ENOUGH * inside else None


def _both(case: Case, bench: Bench, found: Found) -> tuple[dict[str, Measured], dict[str, Measured], Bench | None]:
    """What is reported of each half by name, and the other half where something was chosen to be replayed on it."""
    seen = {"fcfs": bench.fcfs, "leap": bench.leap}
    if found.chosen is None:
        return {**seen, **({} if found.nearest is None else {"nearest": found.nearest})}, {}, None
    chosen = found.chosen.candidate
    named = {"chosen": chosen}
    if chosen.max_num_seqs != case.stock and chosen.levers:
        named["fcfs_at_chosen"] = fcfs(chosen.max_num_seqs)
    if found.at_stock is not None:
        named["at_stock"] = found.at_stock.candidate
    other = case.bench(case.second)
    seeds = case.options.seeds
    seen |= dict(zip(named, bench.measure(named.values(), seeds), strict=True))
    judged = dict(zip(named, other.measure(named.values(), seeds), strict=True))
    return seen, {"fcfs": other.fcfs, "leap": other.leap, **judged}, other


def _edge(found: Found, case: Case) -> list[str]:
    """A word where the best number of sequences may lie beyond those searched."""
    searched = sorted({seqs for seqs, _ in case.space.engines})
    chosen = None if found.chosen is None else found.chosen.candidate.max_num_seqs
    if case.seqs_given or chosen is None or chosen != searched[0] or chosen in (case.stock, 1):
        return []
    further = ",".join(map(str, [chosen // 2, *searched]))
    return [
        f"{chosen} is the least number of sequences that was searched: --sweep max-num-seqs={further} looks further"
    ]


def _beyond(case: Case) -> list[str]:
    """A word where more sequences are searched than the cost model knows."""
    running = {_filled(seqs, case.could_hold) for seqs, _ in case.space.engines}
    beyond = sorted(seqs for seqs in running if seqs > case.fitted_to)
    if not beyond:
        return []
    return [
        f"the cost model is extrapolated at {', '.join(map(str, beyond))} sequences: the step times of {case.engine['engine']} "
        f"are those of at most {case.fitted_to}"
    ]


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
