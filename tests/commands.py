"""Commands under test in this process, and their JSON read strictly."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

Run = Callable[..., tuple[int, str, str]]


def runner(main: Callable[[list[str]], None], capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a command: exit status, stdout, stderr."""

    def call(*words: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as caught:
            main([str(word) for word in words])
        out = capsys.readouterr()
        return int(caught.value.code or 0), out.out, out.err

    return call


def strict_json(text: str) -> Any:
    """The value, if the text holds no NaN and no infinity."""

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    return json.loads(text, parse_constant=refuse)
