"""The engines that tests share, from the tests' side: one process, in which one engine is open at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from vllm_engine import Engine

SCRIPT = Path(__file__).with_name("engine_process.py")
DEFAULTS = {
    "enable_prefix_caching": True,
    "max_model_len": 512,
    "max_num_seqs": 32,
    "max_num_batched_tokens": 256,
    "num_gpu_blocks_override": 192,
    "seed": 0,
}
ROWS = "row_scheduler.RowScheduler"


@dataclass(frozen=True)
class Configuration:
    """What the model runner of an engine is made for."""

    model: Path
    layer: int | None = None
    """Where the model is tapped; None: where the plugin does by default."""
    stock: bool = False
    """Without the plugin: the model is not tapped."""
    asynchronous: bool = False
    compiled: bool = False
    whole: bool = False
    """The compiled model is kept whole, as is vLLM's default: on CPUs it then fails to load what it has kept."""
    processes: bool = False
    """The engine's core in a process of its own."""
    tokenizer: bool = True
    chunk: int = DEFAULTS["max_num_batched_tokens"]  # type: ignore[assignment]
    """Tokens of a step."""
    adapters: int = 0
    """LoRA adapters that a step may use; 0: the engine knows none."""

    def options(self) -> dict[str, Any]:
        """What vLLM's `LLM` takes; the scheduler of a tapped model is one that writes rows down."""
        leap = {} if self.layer is None else {"layer": self.layer}
        plugin = {} if self.stock else {"scheduler_cls": ROWS, "additional_config": {"leap": leap}}
        lora = {"enable_lora": True, "max_loras": self.adapters, "max_lora_rank": 8, "max_cpu_loras": 2}
        return {
            **DEFAULTS,
            **plugin,
            **(lora if self.adapters else {}),
            "enforce_eager": not self.compiled,
            "skip_tokenizer_init": not self.tokenizer,
            "max_num_batched_tokens": self.chunk,
        }

    def variables(self) -> dict[str, str]:
        """Variables of vLLM's."""
        return {
            "VLLM_USE_AOT_COMPILE": str(int(self.whole)),
            "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(self.processes)),
        }


@dataclass(frozen=True)
class Run:
    """What came out of requests: how each ended, what the scheduler did, and the rows that it wrote down of each prompt."""

    requests: list[dict[str, Any]]
    seen: dict[str, Any] = field(default_factory=dict)
    rows: dict[tuple[int, ...], list[dict[str, Any]]] = field(default_factory=dict)
    asynchronous: bool = False

    @property
    def answers(self) -> list[tuple[list[int], str]]:
        """What clients see."""
        return [(request["token_ids"], request["reason"]) for request in self.requests]


class Engines:
    """Opens engines and keeps the last one open for whoever needs the same next; `starts` are what that took."""

    def __init__(self, environment: Mapping[str, str], directory: Path) -> None:
        self._environment, self._directory = environment, directory
        self._engine: Engine | None = None
        self._open: Configuration | None = None
        self._made = 0
        self._loaded: dict[Configuration, Path] = {}
        self.starts = {"processes": 0, "engines": 0}

    def process(self) -> Engine:
        """A process with whatever engine is open in it; a new one if a test has ended it."""
        if self._engine is not None and self._engine.ended:
            self.end()
        if self._engine is None:
            self._engine = Engine(self._environment, SCRIPT)
            self.starts["processes"] += 1
        return self._engine

    def end(self) -> None:
        """Ends the process: the next one starts from nothing."""
        if self._engine is not None:
            with self._engine:
                pass
        self._engine = self._open = None

    def refused(self, configuration: Configuration) -> str:
        """What vLLM says when such an engine is opened; nothing once it is open."""
        process = self.process()
        if configuration == self._open:
            return ""
        process.shut()
        self._open = None
        self._rows = self._loaded[configuration] = self._place()
        self.starts["engines"] += 1
        refused: str = process.ask(
            "open",
            options={
                **configuration.options(),
                "model": str(configuration.model),
                "dtype": "float32",
                "block_size": 32,
            },
            asynchronous=configuration.asynchronous,
            variables={**configuration.variables(), "LEAP_TEST_OUT": str(self._rows)},
        )
        self._open = None if refused else configuration
        return refused

    def opened(self, configuration: Configuration) -> Engine:
        """The engine of a configuration, opened if it is not."""
        refused = self.refused(configuration)
        assert not refused, f"{refused}\n{self.process().log[-6000:]}"
        return self.process()

    def table(self, configuration: Configuration) -> bytes:
        """The file of projected embeddings that a tapped engine's worker has made of the model that it loaded."""
        if configuration not in self._loaded:
            self.opened(configuration)
        return (self._loaded[configuration] / "table").read_bytes()

    def scheduled(
        self, configuration: Configuration, kind: str, leap: Mapping[str, Any] | None = None, **limits: int
    ) -> Engine:
        """The same with a new scheduler; `schedule` of the process says what it takes."""
        engine = self.opened(configuration)
        self._rows = self._place()
        engine.ask("schedule", kind=kind, leap=dict(leap or {}), limits=limits, rows=str(self._rows))
        return engine

    def run(
        self,
        configuration: Configuration,
        kind: str,
        *batches: Sequence[Mapping[str, Any]],
        leap: Mapping[str, Any] | None = None,
        **limits: int,
    ) -> Run:
        """Runs batches of requests under a new scheduler, one after the other: a later one may find in the cache what an
        earlier one has left."""
        if configuration.processes:
            assert (kind, leap, limits) == ("rows", None, {})
            engine = self.opened(configuration)
        else:
            engine = self.scheduled(configuration, kind, leap, **limits)
        done = [request for batch in batches for request in engine.run(batch)]
        seen = {} if configuration.processes else engine.ask("seen")
        rows: dict[tuple[int, ...], list[dict[str, Any]]] = {}
        for file in sorted(self._rows.glob("row*.npz")):
            entry = dict(np.load(file))
            rows.setdefault(tuple(entry["prompt"].tolist()), []).append(entry)
        return Run(done, seen, rows, (self._rows / "_AsyncRows.scheduler").exists())

    def _place(self) -> Path:
        self._made += 1
        place = self._directory / str(self._made)
        place.mkdir()
        return place
