"""The text encoder beside the real vLLM, from zero: what it reads and when, how the three readouts rank, and what a step costs.

Prompts (column `prompt` or `text` of a parquet file) are sampled as in `vllm_from_zero.py`, more at a time than there are seats,
so that some wait. Then steps of the same engine are timed in turns: while the encoder reads without a pause, more than any
traffic has it do, and while its process is stopped.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from vllm_engine import Engine, EngineServer, random_prompts
from vllm_from_zero import CONSOLE, KINDS, Watch, requests_of, run, saved, show_windows, verdict
from vllm_process import serve

READOUTS = ("prompt", "text", "state")
BUSY = 64
"""Prompts that the encoder is kept supplied with while its cost is measured."""
TURNS, TURN_STEPS = 16, 16


class EncoderEngineServer(EngineServer):
    """An engine that takes down when prompts have been read, and what each step takes."""

    def _watch_scheduler(self) -> None:
        super()._watch_scheduler()
        brain, scheduler, engine = self._core.scheduler.leap._brain, self._core.scheduler, self._llm.llm_engine
        self._client = brain._reading._client
        self._asked: dict[str, float] = {}
        self._delays: list[float] = []
        self._times: dict[str, dict[str, list[float]]] = {}
        self._turn = ""
        arrived, freshen = brain.arrived, brain._freshen

        def arriving(request_id: str, *args: Any) -> None:
            self._asked[request_id] = time.perf_counter()
            arrived(request_id, *args)

        def freshening(name: str, request_id: str, live: Any) -> None:
            freshen(name, request_id, live)
            if name == "text":
                self._delays.append(time.perf_counter() - self._asked[request_id])

        brain.arrived, brain._freshen = arriving, freshening
        scheduler.schedule = self._clocked("schedule()", scheduler.schedule)
        engine.step = self._clocked("step", engine.step)
        threading.Thread(target=self._keep_busy, daemon=True).start()

    def _clocked(self, name: str, call: Any) -> Any:
        def clocked(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                if self._turn:
                    self._times.setdefault(self._turn, {}).setdefault(name, []).append(time.perf_counter() - began)

        return clocked

    def _keep_busy(self) -> None:
        rng = np.random.default_rng(0)
        asked = 0
        while True:
            while self._turn == "reading" and self._client.backlog < BUSY:
                asked += 1
                self._client.ask(f"busy-{asked}", random_prompts(rng, 1, 64, 64)[0])
            time.sleep(0.02)

    def turn(self, name: str) -> None:
        """`reading`, `stopped`, or nothing: no step is timed."""
        self._turn = name
        os.kill(self._client._process.pid, signal.SIGSTOP if name == "stopped" else signal.SIGCONT)

    def delays(self) -> list[float]:
        """Seconds from the arrival of a request to the prediction that its text led to."""
        return self._delays

    def times(self) -> dict[str, dict[str, float]]:
        """Median seconds by turn."""
        return {turn: {name: median(times) for name, times in by.items()} for turn, by in self._times.items()}


def show_cost(engine: Engine, arguments: argparse.Namespace) -> None:
    length = TURNS * TURN_STEPS + 32
    sampling = {"temperature": 0.0, "max_tokens": length, "ignore_eos": True}
    prompts = random_prompts(np.random.default_rng(1), 2 * arguments.max_num_seqs, 16, 32)
    engine.begin([{"tokens": tokens, "sampling": sampling} for tokens in prompts])
    engine.steps(16)
    before = engine.metrics()
    for number in range(TURNS):
        engine.ask("turn", name=("reading", "stopped")[number % 2])
        engine.steps(TURN_STEPS)
    engine.ask("turn", name="")
    read = engine.metrics()["encoder_prompts/read"] - before["encoder_prompts/read"]
    times = engine.ask("times")
    for name in ("schedule()", "step"):
        reading, stopped = (1e3 * times[turn][name] for turn in ("reading", "stopped"))
        CONSOLE.print(
            f"{name}: median {reading:.3f} ms while the encoder reads, {stopped:.3f} ms while it is stopped: "
            f"{reading / stopped:.3f}",
        )
    CONSOLE.print(f"read meanwhile: {read:.0f} prompts of 64 tokens; {arguments.max_num_seqs} decoded, as many waited")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="directory of a model with a chat template")
    parser.add_argument("prompts", type=Path, help="parquet file with a column `prompt` or `text`")
    parser.add_argument("--encoder", required=True, help="directory of a text encoder")
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--max-tokens", type=int, default=128, help="cap of an answer (default 128)")
    parser.add_argument("--max-model-len", type=int, default=768)
    parser.add_argument("--max-num-seqs", type=int, default=32)
    parser.add_argument("--flying", type=int, default=48, help="requests under way (default 48)")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()

    with tempfile.TemporaryDirectory() as temporary:
        state_dir = Path(temporary) / "state"
        watch = Watch(READOUTS)
        with Engine(script=__file__) as engine:
            engine.open(
                arguments.model,
                leap={"state_dir": str(state_dir), "encoder": arguments.encoder},
                max_model_len=arguments.max_model_len,
                max_num_seqs=arguments.max_num_seqs,
                max_num_batched_tokens=512,
                seed=arguments.seed,
            )
            requests = requests_of(engine, arguments)[: arguments.requests]
            numbers = run(engine, requests, arguments.flying, watch)
            report, delays = engine.report(), engine.ask("delays")
            show_cost(engine, arguments)
        CONSOLE.print(watch.table)
        judges = saved(state_dir)["judges"]
    show_windows(judges)
    for name in READOUTS:
        CONSOLE.print(verdict(name, watch.armed_at.get(name), judges[name]["seen"]), soft_wrap=True)
    counts = ", ".join(f"{kind} {numbers[f'labels/{kind}']:.0f}" for kind in KINDS)
    CONSOLE.print(f"labels: {counts}; {report['steps']} steps in {report['clock_s']:.0f} s of the engine")
    read = numbers["encoder_prompts/read"]
    CONSOLE.print(
        f"{read:.0f} prompts read, {numbers['encoder_prompts/seen_before']:.0f} seen before, "
        f"{numbers['encoder_prompts/skipped']:.0f} skipped; {1e3 * numbers['encoder_seconds'] / max(read, 1):.1f} ms a prompt",
        soft_wrap=True,
    )
    p50, p95 = np.percentile(delays, [50, 95]) if delays else (np.nan, np.nan)
    CONSOLE.print(f"from arrival to prediction, {len(delays)} requests: P50 {1e3 * p50:.0f} ms, P95 {1e3 * p95:.0f} ms")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main()
    else:
        serve(EncoderEngineServer())
