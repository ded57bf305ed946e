"""What tests of servers and commands share, each of which is a process of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
from server_prompts import QUESTIONS
from vllm_process import Process


@pytest.fixture(scope="session")
def expected(transformers: Process, smollm: Path) -> list[str]:
    """transformers' greedy answers of 24 tokens to the questions that servers are asked."""
    made: list[str] = transformers.ask("answers", model=str(smollm), texts=list(QUESTIONS))
    return made
