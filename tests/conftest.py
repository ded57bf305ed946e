"""What several test modules share."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("fixed", derandomize=True, deadline=None, max_examples=60)
settings.load_profile("fixed")

REPOSITORY = Path(__file__).parent.parent


@pytest.fixture(scope="session")
def traces() -> Path:
    """The directory of the committed traces."""
    return REPOSITORY / "traces"


@pytest.fixture(scope="session")
def cases() -> Path:
    """The directory of small inputs in the shape of real files, each with a right answer that its test states."""
    return REPOSITORY / "tests" / "cases"
