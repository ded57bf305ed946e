"""The table of embeddings between the processes of real engines: it reaches who reads it, and nobody else's disk."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm_engine import LEAP, Engine

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]

OURS = {"scheduler_cls": LEAP, "additional_config": {"leap": {}}}
TRANSFER = {"kv_connector": "ExampleConnector", "kv_role": "kv_producer"}


@pytest.fixture(scope="module")
def engine(environment: dict[str, str]) -> Iterator[Engine]:
    with Engine(environment) as engine:
        yield engine


@pytest.mark.parametrize(
    "options",
    [OURS, {**OURS, "kv_transfer_config": TRANSFER}, {"additional_config": {"leap": {}}}],
    ids=["ours", "prefill instance", "options alone"],
)
def test_no_table_stays(engine: Engine, options: dict[str, Any], model: Callable[[str], Path]) -> None:
    engine.open(model("qwen2"), leap=None, skip_tokenizer_init=True, max_model_len=256, **options)
    place = engine.place / f"leap-rs-{os.getuid()}"
    left = [path.name for path in place.rglob("*") if "embedding" in path.name]
    told = "no prompt features but the length" in engine.log
    engine.shut()
    assert left == []
    assert not told
