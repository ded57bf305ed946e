"""Engines that tests share, and what stock vLLM makes of the same requests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from engine_requests import (
    CHUNK,
    LAYER,
    LIMITS,
    QUESTIONS,
    SEQUENCES,
    SHARED,
    SMALL_LAYER,
    TEXTS,
    Request,
    answered,
    captured,
    model_of,
    small_prompts,
)
from shared_engines import Configuration, Engines, Run

# Engines in the order in which they are opened for the tests that name one, so that each is opened once.
ORDER = (
    "compiled",
    "compiled asynchronous",
    "asynchronous",
    "asynchronous processes",
    "eager",
    "one adapter a step",
    "two adapters a step",
)


STARTED = pytest.StashKey[dict[str, int]]()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def place(item: pytest.Item) -> int:
        called = getattr(item, "callspec", None)
        name = called.params.get("configuration") if called is not None else None
        return ORDER.index(name) if name in ORDER else len(ORDER)

    items.sort(key=place)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if (started := config.stash.get(STARTED, None)) is not None:
        terminalreporter.write_line("shared: {engines} engines opened in {processes} processes".format(**started))


@pytest.fixture(scope="session")
def engines(
    environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config
) -> Iterator[Engines]:
    """The engines that tests share."""
    made = Engines(environment, tmp_path_factory.mktemp("engines"))
    pytestconfig.stash[STARTED] = made.starts
    yield made
    made.end()


@pytest.fixture(scope="session")
def configurations(smollm: Path, model: Callable[[str], Path]) -> dict[str, Configuration]:
    """The engines of ORDER, and stock vLLM's of the same models, which are not tapped.

    What is compiled is a small model: a real one takes a minute for each engine, and shows no more.
    """
    eager, small = Configuration(smollm, layer=LAYER), model("qwen2")
    compiled = Configuration(small, layer=SMALL_LAYER, compiled=True, tokenizer=False)
    return {
        "stock": Configuration(smollm, stock=True),
        "stock compiled": replace(compiled, layer=None, stock=True),
        "eager": eager,
        "asynchronous": replace(eager, asynchronous=True),
        "asynchronous processes": Configuration(smollm, asynchronous=True, processes=True, chunk=CHUNK),
        "compiled": compiled,
        "compiled asynchronous": replace(compiled, asynchronous=True, whole=True),
        "stock adapters": Configuration(smollm, stock=True, adapters=2),
        "one adapter a step": replace(eager, adapters=1),
        "two adapters a step": replace(eager, adapters=2),
    }


@pytest.fixture(scope="session")
def prompts(smollm: Path, tokenised: Callable[..., list[list[int]]]) -> dict[str, dict[str, list[list[int]]]]:
    """Tokens of what the engines of the `real` and of the `small` model are asked."""
    texts = {"captured": TEXTS, "short": QUESTIONS, "shared": SHARED}
    return {"real": {name: tokenised(smollm, asked) for name, asked in texts.items()}, "small": small_prompts()}


@pytest.fixture(scope="session")
def asked(prompts: dict[str, dict[str, list[list[int]]]]) -> Callable[[str, str], list[Request]]:
    """The requests to an engine in a setting."""

    def requests(configuration: str, setting: str) -> list[Request]:
        kind = "shared" if setting == "shared prefixes" else "short"
        return answered(prompts[model_of(configuration)][kind], setting)

    return requests


@pytest.fixture(scope="session")
def stock(
    engines: Engines,
    configurations: dict[str, Configuration],
    prompts: dict[str, dict[str, list[list[int]]]],
    asked: Callable[[str, str], list[Request]],
) -> Callable[[str], dict[str, Run]]:
    """What stock vLLM makes of all that an engine is asked: `captured` and the settings of LIMITS."""

    @cache
    def runs(name: str) -> dict[str, Run]:
        few = {"max_num_seqs": SEQUENCES, "max_num_batched_tokens": CHUNK}
        requests = captured(prompts[model_of(name)]["captured"])
        made = {"captured": engines.run(configurations[name], "stock", *requests, **few)}
        for setting in LIMITS if model_of(name) == "real" else ["default"]:
            limits = {"max_num_seqs": SEQUENCES, **LIMITS[setting]}
            made[setting] = engines.run(configurations[name], "stock", asked(name, setting), **limits)
        return made

    return lambda configuration: runs("stock compiled" if "compiled" in configuration else "stock")
