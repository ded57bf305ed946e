"""What several test modules share."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("fixed", derandomize=True, deadline=None, max_examples=60)
settings.load_profile("fixed")

REPOSITORY = Path(__file__).parent.parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    found = importlib.util.find_spec("vllm")
    # A directory of that name on the path makes an empty package of that name for Python.
    if found is None or found.origin is None:
        for item in items:
            if item.get_closest_marker("vllm"):
                item.add_marker(pytest.mark.skip(reason="vLLM is not installed"))


@pytest.fixture(scope="session")
def traces() -> Path:
    """The directory of the committed traces."""
    return REPOSITORY / "traces"


@pytest.fixture(scope="session")
def cases() -> Path:
    """The directory of small inputs in the shape of real files, each with a right answer that its test states."""
    return REPOSITORY / "tests" / "cases"


@pytest.fixture
def told() -> Iterator[list[str]]:
    """What the plugin warns of."""
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("vllm.leap_rs")
    logger.addHandler(handler)
    yield lines
    logger.removeHandler(handler)
