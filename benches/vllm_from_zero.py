"""Real prompts through the real vLLM with the plugin in mode auto, from zero: what it learns, when it arms, what it keeps.

Prompts (column `prompt` or `text` of a parquet file) are sampled with temperature 1 and top_k 50 up to a short cap. Then the engine
shuts down and starts again with the same state, and once more after a kill -9 in the middle of further requests.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from rich.console import Console
from rich.table import Table
from vllm_engine import Engine

from leap_rs import OnlineReadout
from leap_rs._leap import spearman

READOUTS = ("prompt", "state")
KINDS = ("exact", "censored", "forced", "aborted", "failed")
SAMPLING = {"temperature": 1.0, "top_k": 50}
WINDOW = 100
CONSOLE = Console(width=110)


def requests_of(engine: Engine, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Those that fit, in a seeded order: enough for the run and for what is killed after it."""
    frame = pl.read_parquet(arguments.prompts)
    texts = frame["prompt" if "prompt" in frame.columns else "text"]
    texts = texts.sample(fraction=1, shuffle=True, seed=arguments.seed)
    wanted = 2 * arguments.requests
    room = arguments.max_model_len - arguments.max_tokens
    # What is far too long need not be tokenised to be left out.
    tokens = engine.tokens([text for text in texts.head(2 * wanted).to_list() if len(text) < 8 * room])
    sampling = {**SAMPLING, "max_tokens": arguments.max_tokens}
    return [{"tokens": prompt, "sampling": sampling} for prompt in tokens if len(prompt) <= room][:wanted]


class Watch:
    """What was seen from request to request."""

    def __init__(self, readouts: Sequence[str] = READOUTS) -> None:
        self.readouts = readouts
        self.finished = 0
        self.armed_at: dict[str, int] = {}
        title = "The judges as requests finish: rank correlation, requests with a prediction, updates"
        self.table = Table("finished", "exact", "censored", title=title)
        for name in readouts:
            self.table.add_column(f"{name} readout", justify="right")
            self.table.add_column("predicted", justify="right")
            self.table.add_column("updates", justify="right")

    def see(self, numbers: dict[str, float], finished: int) -> None:
        before = self.finished
        self.finished += finished
        for name in self.readouts:
            if numbers[f"armed_readout/{name}"]:
                self.armed_at.setdefault(name, self.finished)
        if self.finished // WINDOW > before // WINDOW:
            row = [str(self.finished), *(f"{numbers[f'labels/{kind}']:.0f}" for kind in ("exact", "censored"))]
            for name in self.readouts:
                armed = " (armed)" if numbers[f"armed_readout/{name}"] else ""
                row.append(f"{numbers[f'rank_correlation/{name}']:.2f}{armed}")
                row += [f"{numbers[f'{what}/{name}']:.0f}" for what in ("predictions", "updates")]
            self.table.add_row(*row)


def saved(state_dir: Path) -> dict[str, Any]:
    """The saved state: updates by readout, and the judges' verdicts with what they rest on."""
    directory = state_dir / "engine-0"
    manifest = json.loads((directory / "state.json").read_text())
    updates = {name: OnlineReadout.load(directory / file["name"]).updates for name, file in manifest["files"].items()}
    return {"updates": updates, "judges": manifest["extra"]["judges"], "finished": manifest["extra"]["finished"][0]}


def verdict(name: str, armed_at: int | None, seen: Sequence[Sequence[float]]) -> str:
    n = len(seen)
    rho = spearman([row[0] for row in seen], [row[1] for row in seen]) if n > 1 else None
    proof = (rho or 0.0) * math.sqrt(max(n - 1, 0))
    if armed_at is not None:
        return f"{name}: armed at request {armed_at}"
    return (
        f"{name}: did not arm: {n} of at least 50 requests had a prediction of it when they came, rank correlation "
        f"{rho or math.nan:.2f} (at least 0.2), {proof:.1f} standard errors above 0 (at least 4)"
    )


def show_windows(judges: dict[str, Any]) -> None:
    table = Table("readout", title="Judged requests in turn: rank correlation [95 % by bootstrap], share at the cap")
    table.add_column("requests with a prediction")
    table.add_column("rank correlation", justify="right")
    table.add_column("censored", justify="right")
    rng = np.random.default_rng(0)
    for name, judge in judges.items():
        rows = np.array(judge["seen"], dtype=float).reshape(-1, 3)
        parts = [(at, min(at + WINDOW, len(rows))) for at in range(0, len(rows), WINDOW)]
        for start, end in [*parts, (0, len(rows))] if len(parts) > 1 else parts:
            score, tokens, censored = rows[start:end].T
            draws = rng.integers(0, end - start, (500, end - start))
            several = [spearman(score[draw], tokens[draw]) or math.nan for draw in draws]
            low, high = np.nanpercentile(several, [2.5, 97.5])
            rho = spearman(score, tokens) or math.nan
            table.add_row(name, f"{start + 1} to {end}", f"{rho:.2f} [{low:.2f}, {high:.2f}]", f"{censored.mean():.0%}")
    CONSOLE.print(table)


def show_state(what: str, numbers: dict[str, float]) -> None:
    parts = [
        f"{name}: {numbers[f'updates/{name}']:.0f} updates, rank correlation {numbers[f'rank_correlation/{name}']:.4f}, "
        f"{'armed' if numbers[f'armed_readout/{name}'] else 'not armed'}"
        for name in READOUTS
    ]
    CONSOLE.print(f"{what}: {'; '.join(parts)}", soft_wrap=True)


def run(engine: Engine, requests: list[dict[str, Any]], flying: int, watch: Watch) -> dict[str, float]:
    engine.begin(requests, flying)
    done = False
    while not done:
        part = engine.steps(4)
        done = part["done"]
        if part["finished"]:
            watch.see(engine.metrics(), len(part["finished"]))
    return engine.wait_for(lambda now: sum(now[f"labels/{kind}"] for kind in KINDS) == len(requests))


def run_past_a_save(engine: Engine, requests: list[dict[str, Any]], flying: int) -> dict[str, float]:
    """Until something has been learned after a save, which a kill then loses."""
    saves, at_save = engine.metrics()["state_saves/saved"], math.inf
    engine.begin(requests, flying)
    while not engine.steps(4)["done"]:
        numbers = engine.metrics()
        if numbers["state_saves/saved"] > saves:
            at_save = min(at_save, numbers["updates/state"])
        if numbers["updates/state"] > at_save:
            break
    return engine.metrics()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="directory of a model with a chat template")
    parser.add_argument("prompts", type=Path, help="parquet file with a column `prompt` or `text`")
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--max-tokens", type=int, default=256, help="cap of an answer (default 256)")
    parser.add_argument("--max-model-len", type=int, default=1024)
    parser.add_argument("--flying", type=int, default=32, help="requests under way, and max_num_seqs (default 32)")
    parser.add_argument("--state-every", type=int, default=4, help="updates from one save to the next (default 4)")
    parser.add_argument("--layer", type=int, help="decoder layer of the state readout (default: at 5/6 of the depth)")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()

    with tempfile.TemporaryDirectory() as temporary:
        state_dir = Path(temporary) / "state"
        leap: dict[str, Any] = {"state_dir": str(state_dir), "state_every": arguments.state_every}
        if arguments.layer is not None:
            leap["layer"] = arguments.layer
        options = {
            "leap": leap,
            "max_model_len": arguments.max_model_len,
            "max_num_seqs": arguments.flying,
            "max_num_batched_tokens": max(512, arguments.flying),
            "seed": arguments.seed,
        }
        watch = Watch()
        with Engine() as engine:
            engine.open(arguments.model, **options)
            requests = requests_of(engine, arguments)
            first, later = requests[: arguments.requests], requests[arguments.requests :]
            numbers = run(engine, first, arguments.flying, watch)
            report = engine.report()
        CONSOLE.print(watch.table)
        at_end = saved(state_dir)
        show_windows(at_end["judges"])
        for name in READOUTS:
            seen = at_end["judges"][name]["seen"]
            CONSOLE.print(verdict(name, watch.armed_at.get(name), seen), soft_wrap=True)
        counts = ", ".join(f"{kind} {numbers[f'labels/{kind}']:.0f}" for kind in KINDS)
        CONSOLE.print(f"labels: {counts}; {report['steps']} steps in {report['clock_s']:.0f} s of the engine")
        show_state("at the end", numbers)
        CONSOLE.print(f"saved at shutdown: {at_end['updates']}", soft_wrap=True)

        with Engine() as engine:
            engine.open(arguments.model, **options)
            resumed = engine.metrics()
            show_state("started again", resumed)
            killed = run_past_a_save(engine, later, arguments.flying)
            engine.kill()
        show_state("killed", killed)
        kept = saved(state_dir)
        CONSOLE.print(f"the last saved state has {kept['updates']} and {kept['finished']} finished", soft_wrap=True)
        with Engine() as engine:
            engine.open(arguments.model, **options)
            numbers = engine.metrics()
        show_state("started after it", numbers)
        for name in READOUTS:
            same = numbers[f"updates/{name}"] == kept["updates"][name]
            CONSOLE.print(f"{name}: {'the last saved state' if same else 'NOT the last saved state'}")


if __name__ == "__main__":
    main()
