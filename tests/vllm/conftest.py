"""What the tests of the plugin share that start no engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from traffic import Brains, Traffic, real_traffic


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
