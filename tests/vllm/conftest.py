"""What the tests of the plugin share that start no engine."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest
from traffic import Brains, Traffic, real_traffic


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    found = importlib.util.find_spec("vllm")
    # This directory's own name makes an empty package of that name for Python.
    has_vllm = found is not None and found.origin is not None
    for item in items:
        if item.get_closest_marker("vllm") and not has_vllm:
            item.add_marker(pytest.mark.skip(reason="vLLM is not installed"))


@pytest.fixture(scope="session")
def real(traces: Path) -> Traffic:
    """Real requests, by numbers."""
    return real_traffic(traces)


@pytest.fixture
def brains(tmp_path: Path) -> Iterator[Brains]:
    """Makes brains, which are closed after the test."""
    made = Brains(tmp_path / "metrics")
    yield made
    for brain in made.made:
        brain.close()
