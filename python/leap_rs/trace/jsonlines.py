"""JSON lines read one object at a time, with the line number for messages."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from leap_rs._leap import TraceError
from leap_rs.trace.files import existing_file, reason


def json_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The objects of a JSON lines file with their line numbers."""
    with existing_file(path).open("rb") as file:
        for line, text in enumerate(file, start=1):
            if not text.strip():
                continue
            try:
                row = json.loads(text)
            except (ValueError, RecursionError) as error:
                raise TraceError(f"{path}: line {line}: not JSON: {reason(error)}") from None
            if not isinstance(row, dict):
                raise TraceError(f"{path}: line {line}: expected an object, found {type(row).__name__}")
            yield line, row
