"""Policies against stock over engines, traces and loads: what a user who arms the plugin gains, and whether any loses.

    python benches/grid.py [--data DIR] [--policies fcfs:levers=admission,leap] [--loads 1.2] ...

Every cell is one engine under one trace at one load. Its rows are ratios to `fcfs` on the same seeds, +- half of their
95 % interval; `!` marks a bound that is broken and `~` one that is passed within the interval. DIR of `--data` holds
`traces/azure2023` and, for `--held-out`, `traces/mooncake` and `traces/gmi_lmbench`. Without it the committed traces run
alone. The exit status says nothing about bounds.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import grid_bounds as bounds
import grid_traces as traces
import typer
from grid_bounds import METRICS, Ratio, Verdict

import leap_rs
from leap_rs.replay.remarks import is_short

STOCK = "fcfs"
POLICIES = (STOCK, "fcfs:levers=admission", "leap")
LOADS = (0.8, 1.0, 1.2)
REQUESTS = 5000
SEEDS = 3
CACHE = Path(".cache/grid")

SMALL = {"max_num_seqs": 256, "max_num_batched_tokens": 2048}
ENGINES: dict[str, dict[str, int]] = {
    "h100-llama-8b": {"max_num_seqs": 1024, "max_num_batched_tokens": 8192},
    "a100-llama-8b": SMALL,
    "l40s-llama-8b": SMALL,
    "rtx4090-llama-8b": SMALL,
    "rtxpro6000-qwen3-32b-tp2": {},
}
HELD_OUT = {"mooncake": ("h100-llama-8b",), "gmi": ("rtx4090-llama-8b", "l40s-llama-8b")}


@dataclass(frozen=True)
class Task:
    """One call of the replay: an engine and a trace, at all loads."""

    engine: str
    limits: Mapping[str, Any]
    source: traces.Source


@dataclass
class Row:
    """One policy in one cell."""

    engine: str
    trace: str
    load: float | None
    policy: str
    ratios: dict[str, Ratio]
    preemptions: tuple[float, float]
    queued: float
    """Share of stock's steps in which a request waited: at 0 no order can change anything."""
    short: bool
    """Whether the requests are too few to bring the engine to the load that they offer."""
    spearman: float | None = None

    @property
    def cell(self) -> str:
        return f"{self.engine}, {self.trace}, {at(self.load)}"

    def verdicts(self) -> dict[str, Verdict]:
        """By metric, of those that are bounded and defined."""
        limits = bounds.bounds_of(self.policy)
        return {b.metric: bounds.verdict(self.ratios[b.metric], b) for b in limits if b.metric in self.ratios}

    def to_dict(self) -> dict[str, Any]:
        return {
            "engine": self.engine,
            "trace": self.trace,
            "load": self.load,
            "policy": self.policy,
            "ratios": {key: {"mean": r.mean, "half": r.half} for key, r in self.ratios.items()},
            "verdicts": {key: found.name.lower() for key, found in self.verdicts().items()},
            "preemptions": {STOCK: self.preemptions[0], "policy": self.preemptions[1]},
            "queued": self.queued,
            "short": self.short,
            "spearman": self.spearman,
        }


@dataclass
class Settings:
    """What all calls have in common."""

    policies: list[str]
    loads: list[float]
    requests: int
    seeds: int
    seed: int
    from_zero: bool
    cache: Path


def at(load: float | None) -> str:
    return "own times" if load is None else f"load {load:g}"


def split(values: Iterable[str] | None) -> list[str]:
    """Values of an option that may be repeated and may hold several; a part `key=value` belongs to the policy before."""
    found: list[str] = []
    for part in (part.strip() for value in values or () for part in value.split(",")):
        if found and "=" in part and ":" not in part.partition("=")[0]:
            found[-1] += f",{part}"
        elif part:
            found.append(part)
    return list(dict.fromkeys(found))


def chosen(option: str, wanted: Sequence[str], known: Iterable[str]) -> list[str]:
    """The known names that are wanted, all of them where none is named."""
    names = list(dict.fromkeys(known))
    for name in wanted:
        if name not in names:
            raise typer.BadParameter(f"no {name!r} here, there are {', '.join(names)}", param_hint=f"--{option}")
    return [name for name in names if not wanted or name in wanted]


def tasks(
    engines: Sequence[str], names: Sequence[str], data: Path | None, cache: Path, *, held_out: bool
) -> Iterator[Task]:
    """The calls that are asked for; each trace is converted once, when the first of its calls is due."""
    if held_out:
        if data is None:
            raise typer.BadParameter("needs --data", param_hint="--held-out")
        pairs = {name: HELD_OUT[name] for name in chosen("traces", names, HELD_OUT)}
        used = chosen("engines", engines, (engine for several in HELD_OUT.values() for engine in several))
        for name, several in pairs.items():
            source = traces.converted(name, data, cache)
            yield from (Task(engine, ENGINES[engine], source) for engine in several if engine in used)
        return
    makers: dict[str, Callable[[], traces.Source]] = {
        "sharegpt": traces.sharegpt,
        "alpacaeval": partial(traces.alpacaeval, cache),
    }
    if data is not None:
        makers |= {name: partial(traces.converted, name, data, cache) for name in traces.CONVERTED}
    wanted = chosen("traces", names, (*makers, "recorded"))
    used = chosen("engines", engines, (*ENGINES, *traces.RUNS))
    for name in wanted:
        if name == "recorded":
            yield from (Task(engine, {}, traces.recorded(engine)) for engine in traces.RUNS if engine in used)
        else:
            source = makers[name]()
            yield from (Task(engine, ENGINES[engine], source) for engine in used if engine in ENGINES)


def replayed(
    task: Task, settings: Settings
) -> tuple[list[Row], dict[float | None, dict[str, float | None]], list[str]]:
    """The rows of all loads, stock's own numbers by load, and the notes of the replay."""
    source = traces.dealt(task.source, settings.requests, settings.seed, settings.cache)
    document = leap_rs.replay(
        source.trace,
        policies=settings.policies,
        load=None if source.own_times else settings.loads,
        num_prompts=source.requests(settings.requests),
        seed=settings.seed,
        seeds=settings.seeds,
        engine=task.engine,
        readout="none" if settings.from_zero else source.readout,
        keep_requests=False,
        **task.limits,
    ).to_dict()
    points = [None] if source.own_times else settings.loads
    stock = {one["point"]: one for one in document["results"] if one["policy"] == STOCK}
    rows = []
    for one in document["results"]:
        if one["policy"] == STOCK:
            continue
        found = {key: bounds.ratio((one["paired"] or {}).get(key)) for key in METRICS}
        base = stock[one["point"]]
        rows.append(
            Row(
                task.engine,
                source.name,
                points[one["point"]],
                one["policy"],
                {key: value for key, value in found.items() if value is not None},
                (base["queue"]["preemptions"], one["queue"]["preemptions"]),
                base["queue"]["share_of_steps_with_queue"] or 0.0,
                is_short(document, one["point"]),
                one["prediction"].get("spearman"),
            )
        )
    numbers = {points[i]: {key: base["metrics"][key]["mean"] for key in METRICS} for i, base in stock.items()}
    return rows, numbers, document["notes"]


def absolute(metric: str, value: float | None) -> str:
    """One of stock's own numbers with its unit."""
    if value is None:
        return "-"
    if metric in bounds.HIGHER_IS_BETTER:
        return f"{value:.2f}"
    return f"{value:.0f} ms" if value < 10_000 else f"{value / 1000:.1f} s"


def table_line(first: str, cells: Iterable[str], width: int) -> str:
    return f"{first:<{width}}{''.join(f'{cell:<16}' for cell in cells)}".rstrip()


def show_cell(rows: Sequence[Row], own: Mapping[str, float | None], width: int) -> None:
    """A cell: stock's own numbers, then the ratios of each policy."""
    few = "; too few requests to fill it" if rows[0].short else ""
    print(f"{rows[0].cell}: requests wait in {100 * rows[0].queued:.0f} % of the steps{few}")
    print(table_line(f"  {STOCK}", (absolute(key, own[key]) for key in METRICS), width))
    for row in rows:
        verdicts = row.verdicts()
        cells = [number(row.ratios.get(key)) + verdicts.get(key, Verdict.KEPT).value for key in METRICS]
        cells.append(f"{row.preemptions[0]:.0f} > {row.preemptions[1]:.0f}")
        cells.append("-" if row.spearman is None else f"{row.spearman:.2f}")
        print(table_line(f"  {row.policy}", cells, width))
    sys.stdout.flush()


def number(one: Ratio | None) -> str:
    """A ratio with half of its interval."""
    if one is None:
        return "-"
    return f"{one.mean:.3f}" + ("" if one.half is None else f" ±{one.half:.3f}")


def summary(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """By policy: the worst cell of each number, geometric means by load, and every bound that is passed."""
    found = []
    for policy in dict.fromkeys(row.policy for row in rows):
        mine = [row for row in rows if row.policy == policy]
        by_metric = {key: {row.cell: row.ratios[key] for row in mine if key in row.ratios} for key in METRICS}
        worst = {key: bounds.worst(key, cells) for key, cells in by_metric.items()}
        means = {
            load: {
                key: bounds.geometric_mean(
                    row.ratios[key].mean for row in mine if row.load == load and key in row.ratios
                )
                for key in METRICS
            }
            for load in dict.fromkeys(row.load for row in mine)
        }
        passed = [(row, key, verdict) for row in mine for key, verdict in row.verdicts().items()]
        found.append(
            {
                "policy": policy,
                "cells": len(mine),
                "cells_without_a_queue": sum(row.queued == 0 for row in mine),
                "cells_too_short": sum(row.short for row in mine),
                "worst": {
                    key: None if one is None else {"cell": one[0], **shown(one[1])} for key, one in worst.items()
                },
                "geometric_means": [{"load": load, **values} for load, values in means.items()],
                "passed": [
                    {"cell": row.cell, "metric": key, "verdict": verdict.name.lower(), **shown(row.ratios[key])}
                    for row, key, verdict in passed
                    if verdict is not Verdict.KEPT
                ],
            }
        )
    return found


def shown(one: Ratio) -> dict[str, float | None]:
    return {"mean": one.mean, "half": one.half}


def where(found: Mapping[str, Any]) -> str:
    """A ratio of a summary, and its cell."""
    return f"{number(Ratio(found['mean'], found['half'])):<16} {found['cell']}"


def show_summary(found: Sequence[Mapping[str, Any]]) -> None:
    """What `summary` found, as text."""
    for one in found:
        policy = one["policy"]
        kinds = f"{one['cells_without_a_queue']} without a queue, {one['cells_too_short']} with too few requests"
        print(f"\n{policy} against {STOCK}, {one['cells']} cells ({kinds})")
        for key, worst in one["worst"].items():
            if worst is not None:
                print(f"  worst {METRICS[key]:<10} {where(worst)}")
        for means in one["geometric_means"]:
            texts = [f"{name} {'-' if means[key] is None else f'{means[key]:.3f}'}" for key, name in METRICS.items()]
            print(f"  geometric mean, {at(means['load']):<10} {', '.join(texts)}")
        for means in one["geometric_means"]:
            if (
                means["load"] == bounds.ASKED_AT_LOAD
                and means["mean_ptl_ms"] is not None
                and policy.split(":")[0] != STOCK
            ):
                kept = "kept" if means["mean_ptl_ms"] <= bounds.ASKED_PTL else "NOT kept"
                print(f"  asked: mean PTL at {at(means['load'])} <= {bounds.ASKED_PTL:.2f}: {kept}")
        limits = {bound.metric: bound.limit for bound in bounds.bounds_of(policy)}
        broken = [passed for passed in one["passed"] if passed["verdict"] == "broken"]
        within = [passed for passed in one["passed"] if passed["verdict"] == "within"]
        print(f"  bounds broken: {len(broken)}; passed within the interval: {len(within)}")
        for passed in (*broken, *within):
            sign = ">=" if passed["metric"] in bounds.HIGHER_IS_BETTER else "<="
            limit = f"{METRICS[passed['metric']]} {sign} {limits[passed['metric']]:g}"
            mark = Verdict[passed["verdict"].upper()].value
            print(f"    {mark} {limit:<18} {where(passed)}")


def main(
    data: Annotated[Path | None, typer.Option(exists=True, file_okay=False, help="Directory of public traces.")] = None,
    policies: Annotated[list[str] | None, typer.Option(help="Repeatable, or separated by commas.")] = None,
    engines: Annotated[list[str] | None, typer.Option(help="Repeatable, or separated by commas.")] = None,
    names: Annotated[list[str] | None, typer.Option("--traces", help="Repeatable, or separated by commas.")] = None,
    loads: Annotated[list[str] | None, typer.Option(help="Repeatable, or separated by commas.")] = None,
    requests: Annotated[int, typer.Option(min=1, help="Requests a replay.")] = REQUESTS,
    seeds: Annotated[int, typer.Option(min=1, help="Runs a policy and cell.")] = SEEDS,
    seed: Annotated[int, typer.Option(min=0, help="The first seed; above 0 the first run is dealt anew too.")] = 0,
    from_zero: Annotated[bool, typer.Option("--from-zero", help="No readout is given.")] = False,
    held_out: Annotated[
        bool, typer.Option("--held-out", help="Other traces instead, which nothing was chosen on.")
    ] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all numbers here too.")] = None,
    cache: Annotated[Path, typer.Option(help="Where converted traces go.")] = CACHE,
) -> None:
    """Ratios of policies to stock over engines, traces and loads."""
    try:
        values = list(dict.fromkeys(float(load) for load in split(loads))) or list(LOADS)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--loads") from None
    # The report pairs with the first policy that serves first come first served.
    asked = [STOCK, *(policy for policy in split(policies) or POLICIES if policy != STOCK)]
    settings = Settings(asked, values, requests, seeds, seed, from_zero, cache)
    cache.mkdir(parents=True, exist_ok=True)
    width = 2 + max(20, *(len(policy) for policy in asked)) + 2
    rows: list[Row] = []
    stock: list[dict[str, Any]] = []
    notes: dict[str, list[str]] = {}
    start = perf_counter()
    try:
        for task in tasks(split(engines), split(names), data, cache, held_out=held_out):
            if not rows:
                print(table_line("", (*METRICS.values(), "preemptions", "rank"), width))
            began = perf_counter()
            found, numbers, told = replayed(task, settings)
            for load, own in numbers.items():
                stock.append({"engine": task.engine, "trace": task.source.name, "load": load, **own})
                cell = [row for row in found if row.load == load]
                if cell:
                    show_cell(cell, own, width)
            print(f"  ({perf_counter() - began:.0f} s)", flush=True)
            rows += found
            notes[f"{task.engine}, {task.source.name}"] = told
    except leap_rs.LeapError as error:
        print(f"grid: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
    whole = summary(rows)
    show_summary(whole)
    print(f"\n{len({row.cell for row in rows})} cells in {perf_counter() - start:.0f} s")
    if json_file is not None:
        document = {
            "options": {
                "policies": asked,
                "loads": values,
                "requests": requests,
                "seeds": seeds,
                "seed": seed,
                "from_zero": from_zero,
                "held_out": held_out,
            },
            "stock": stock,
            "rows": [row.to_dict() for row in rows],
            "summary": whole,
            "notes": notes,
        }
        json_file.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
