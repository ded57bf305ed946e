"""What clients get is what stock vLLM gives them, whatever the levers do: the real engine, greedy, in float32."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_requests import LIMITS, QUESTIONS, SEQUENCES, Request, model_of
from shared_engines import Configuration, Engines, Run

from leap_rs import Readout

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1800)]

LEVERS = ("queue", "slots", "queue+slots+evict")
SLOTS = 3
# The engine, the setting of its requests and of its scheduler, and options of the plugin.
SETTINGS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "default": ("eager", "default", {}),
    "chunked": ("eager", "chunked", {}),
    "shared prefixes": ("eager", "shared prefixes", {}),
    "wait cap": ("eager", "default", {"wait_cap_steps": 8}),
    "memory": ("eager", "memory", {}),
    "order fcfs": ("eager", "default", {"order": "fcfs"}),
    "asynchronous": ("asynchronous", "default", {}),
    "compiled": ("compiled", "default", {}),
}
EACH = pytest.mark.parametrize(
    ("configuration", "setting", "levers"),
    [(configuration, setting, levers) for setting, (configuration, _, _) in SETTINGS.items() for levers in LEVERS],
)
Runs = Callable[[str, str], Run]


@pytest.fixture(scope="module")
def readout(
    configurations: dict[str, Configuration],
    prompts: dict[str, dict[str, list[list[int]]]],
    reference: Callable[..., dict[str, Any]],
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[str], Path]:
    """Of an engine's model. Fitted to lengths without meaning, so that its predictions are of all sizes and mostly wrong."""

    @cache
    def fitted(kind: str) -> Path:
        configuration = configurations["compiled" if kind == "small" else "eager"]
        states = reference(configuration.model, prompts[kind]["short"])
        rows = np.stack([states[f"hidden_{i}"][configuration.layer, -1] for i in range(len(QUESTIONS))])
        lengths = np.random.default_rng(3).permutation(np.linspace(2, 60, len(rows)).astype(int))
        path = tmp_path_factory.mktemp("readout") / "state.safetensors"
        meta = {"kind": "state", "layer": configuration.layer}
        Readout.fit(rows, lengths, max_tokens=512, lam=10.0, meta=meta).save(path)
        return path

    return lambda configuration: fitted(model_of(configuration))


@pytest.fixture(scope="module")
def runs(
    engines: Engines,
    configurations: dict[str, Configuration],
    asked: Callable[[str, str], list[Request]],
    readout: Callable[[str], Path],
    stock: Callable[[str], dict[str, Run]],
) -> Runs:
    """What comes out in a setting with levers."""

    @cache
    def run(setting: str, levers: str) -> Run:
        name, requests, options = SETTINGS[setting]
        stock(name)
        configuration = configurations[name]
        leap = {"mode": "armed", "layer": configuration.layer, "readout": str(readout(name)), "evict_per_s": 100}
        leap |= {"decode_slots": SLOTS, "levers": levers, **options}
        limits = {"max_num_seqs": SEQUENCES, **LIMITS[requests]}
        return engines.run(configuration, "leap", asked(name, requests), leap=leap, **limits)

    return run


@pytest.fixture(scope="module")
def stock_order(
    engines: Engines,
    configurations: dict[str, Configuration],
    asked: Callable[[str, str], list[Request]],
    stock: Callable[[str], dict[str, Run]],
) -> Callable[[str], Run]:
    """Stock vLLM's run in a setting: on an engine of its own, or for the asynchronous one by its scheduler on ours."""

    @cache
    def run(setting: str) -> Run:
        name, requests, _ = SETTINGS[setting]
        if not configurations[name].asynchronous:
            return stock(name)[requests]
        return engines.run(configurations[name], "stock", asked(name, requests), max_num_seqs=SEQUENCES)

    return run


@EACH
def test_outputs_are_those_of_stock_vllm(
    configuration: str, setting: str, levers: str, runs: Runs, stock: Callable[[str], dict[str, Run]]
) -> None:
    ours, theirs = runs(setting, levers).answers, stock(configuration)[SETTINGS[setting][1]].answers
    assert len(theirs) == 2 * len(QUESTIONS)
    assert ours == theirs
    reasons = [reason for _, reason in theirs]
    assert reasons[::2] == ["length"] * len(QUESTIONS)
    if model_of(configuration) == "real":
        assert reasons[1::2].count("stop") >= len(QUESTIONS) // 3


@EACH
def test_the_levers_acted(
    configuration: str, setting: str, levers: str, runs: Runs, stock_order: Callable[[str], Run]
) -> None:
    stock, ours = stock_order(setting).seen, runs(setting, levers).seen
    assert ours["asynchronous"] == stock["asynchronous"] == (configuration == "asynchronous")
    if setting == "order fcfs":
        assert ours["finished"] == stock["finished"]
        assert ours["gated"] == ours["evictions"] == 0
        return
    assert ours["finished"] != stock["finished"]
    assert (ours["gated"] > 0) == ("slots" in levers)
    if setting == "memory":
        assert stock["preemptions"] >= 3
        assert ours["preemptions"] >= 3
        assert (ours["evictions"] > 0) == ("evict" in levers)
    if setting == "wait cap" and "slots" in levers:
        assert ours["promotions"] > 0
