"""LoRA on the real engine: requests to a model and to two adapters of it, beside stock vLLM and merged weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import adapters
import numpy as np
import pytest
from captured_rows import check_rows, cosine
from engine_requests import CHUNK, LAYER, SEQUENCES, Request, answered, captured
from shared_engines import Configuration, Engines, Run

from leap_rs import read_trace

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1800)]

EACH = pytest.mark.parametrize("configuration", ["one adapter a step", "two adapters a step"])
BASE, NAMES = "", ("first", "second")
# The same words mean other states to each of them, and a cached prefix of one is none of another's.
ASKED = (BASE, *NAMES)


@pytest.fixture(scope="module")
def places(smollm: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Each adapter's directory."""
    made = {name: tmp_path_factory.mktemp("adapters") / name for name in NAMES}
    for seed, place in enumerate(made.values()):
        adapters.make(smollm, place, seed)
    return made


@pytest.fixture(scope="module")
def states(
    smollm: Path,
    places: dict[str, Path],
    prompts: dict[str, dict[str, list[list[int]]]],
    reference: Callable[..., dict[str, Any]],
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, dict[str, Any]]:
    """transformers' states of the captured prompts: of the model, and of the model with each adapter merged into it."""
    models = {BASE: smollm}
    for name, place in places.items():
        models[name] = tmp_path_factory.mktemp("merged") / name
        adapters.merge(smollm, place, models[name])
    return {name: reference(path, prompts["real"]["captured"]) for name, path in models.items()}


@pytest.fixture(scope="module")
def mixed(places: dict[str, Path]) -> Callable[[list[Request]], list[Request]]:
    """Each request to the model and to both adapters, side by side."""

    def requests(plain: list[Request]) -> list[Request]:
        to = {BASE: {}} | {name: {"adapter": str(place)} for name, place in places.items()}
        return [{**request, **to[name]} for request in plain for name in ASKED]

    return requests


@dataclass(frozen=True)
class Runs:
    """What an engine, or stock vLLM, makes of mixed requests."""

    captured: Run
    answered: Run
    numbers: dict[str, float]
    recorded: dict[int, tuple[int, str, bool]]
    """Length of each answer, why it ended, and whether its client had settled it, by the number of the request."""


@pytest.fixture(scope="module")
def runs(
    engines: Engines,
    configurations: dict[str, Configuration],
    mixed: Callable[[list[Request]], list[Request]],
    prompts: dict[str, dict[str, list[list[int]]]],
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[str], Runs]:
    @cache
    def run(name: str) -> Runs:
        configuration, stock = configurations[name], name == "stock adapters"
        batches = [mixed(batch) for batch in captured(prompts["real"]["captured"])]
        few = {"max_num_seqs": SEQUENCES, "max_num_batched_tokens": CHUNK}
        rows = engines.run(configuration, "stock" if stock else "rows", *batches, **few)
        requests = mixed(answered(prompts["real"]["short"], "default"))
        if stock:
            return Runs(rows, engines.run(configuration, "stock", requests, max_num_seqs=SEQUENCES), {}, {})
        trace = tmp_path_factory.mktemp("trace")
        leap = {"mode": "armed", "layer": LAYER, "levers": "queue+admission+slots", "decode_slots": 4}
        leap["record"] = str(trace)
        made = engines.run(configuration, "leap", requests, leap=leap, max_num_seqs=SEQUENCES)
        engine = engines.process()
        labels = sum("ignore_eos" not in request["sampling"] for request in requests)
        numbers = engine.wait_for(lambda now: now["labels/exact"] + now["labels/censored"] == labels)
        # The last part is written as its engine ends.
        engines.scheduled(configuration, "stock")
        recorded = {
            int(row["request_id"].split("-")[0]): (row["output_tokens"], row["finish_reason"], row["forced"])
            for row in read_trace(trace).iter_rows(named=True)
        }
        return Runs(rows, made, numbers, recorded)

    return run


@EACH
def test_outputs_are_those_of_stock_vllm(configuration: str, runs: Callable[[str], Runs]) -> None:
    stock, ours = runs("stock adapters"), runs(configuration)
    assert ours.captured.answers == stock.captured.answers
    assert ours.answered.answers == stock.answered.answers
    assert ours.answered.seen["finished"] != stock.answered.seen["finished"]
    assert ours.numbers["faults"] == 0


def test_adapters_answer_otherwise_than_the_model_and_each_other(runs: Callable[[str], Runs]) -> None:
    answers = runs("stock adapters").captured.answers
    by_name = {name: answers[i :: len(ASKED)] for i, name in enumerate(ASKED)}
    for prompt in zip(*by_name.values(), strict=True):
        assert len({tuple(tokens) for tokens, _ in prompt}) == len(ASKED)


@EACH
def test_labels_are_the_lengths_of_the_answers(configuration: str, runs: Callable[[str], Runs]) -> None:
    stock, ours = runs("stock adapters").answered.answers, runs(configuration)
    # Each question is asked in a settled length, then without one.
    forced = [number // len(ASKED) % 2 == 0 for number in range(len(stock))]
    expected = [(len(tokens), reason, mark) for (tokens, reason), mark in zip(stock, forced, strict=True)]
    assert ours.recorded == dict(enumerate(expected))
    natural = [(length, reason) for length, reason, mark in expected if not mark]
    kinds = Counter(reason for _, reason in natural)
    assert min(kinds["stop"], kinds["length"]) > 0
    assert (ours.numbers["labels/exact"], ours.numbers["labels/censored"]) == (kinds["stop"], kinds["length"])
    assert ours.numbers["labels/forced"] == len(natural)
    assert ours.numbers["output_tokens/sum"] == sum(length for length, _ in natural)
    assert ours.numbers["captures_missed"] == ours.numbers["refused_rows/state"] == 0


@EACH
def test_rows_are_those_of_the_model_with_the_adapter_merged(
    configuration: str,
    runs: Callable[[str], Runs],
    states: dict[str, dict[str, Any]],
    prompts: dict[str, dict[str, list[list[int]]]],
) -> None:
    tokens = prompts["real"]["captured"]
    for name in ASKED:
        found = {
            prompt: [entry for entry in entries if str(entry["adapter"]) == name]
            for prompt, entries in runs(configuration).captured.rows.items()
        }
        check_rows(found, tokens, states[name], LAYER)
        for i, prompt in enumerate(tokens):
            for other in set(ASKED) - {name}:
                assert cosine(found[tuple(prompt)][0]["row"], states[other][f"hidden_{i}"][LAYER, -1]) < 0.99


@EACH
def test_the_table_is_that_of_the_model_without_adapters(
    configuration: str, engines: Engines, configurations: dict[str, Configuration]
) -> None:
    table = engines.table(configurations[configuration])
    assert len(table) > 49_152 * 256 * np.dtype(np.float16).itemsize
    assert table == engines.table(configurations["eager"])


@cache
def _plain_table(engines: Engines, configurations: Any) -> bytes:
    return engines.table(configurations["eager"])
