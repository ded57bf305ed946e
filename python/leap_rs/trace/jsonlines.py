"""JSON lines read one object at a time, with the line number for messages."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from leap_rs._leap import TraceError
from leap_rs.trace.files import existing_file, opened, reason
from leap_rs.trace.jsontext import whole


def json_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The objects of a JSON lines file with their line numbers."""
    with opened(existing_file(path)) as file:
        for line, text in enumerate(file, start=1):
            if not text.strip():
                continue
            try:
                row = whole(json.loads(text), text.decode(errors="replace"))
            except (ValueError, RecursionError) as error:
                raise TraceError(f"{path}: line {line}: not JSON: {reason(error)}") from None
            if not isinstance(row, dict):
                raise TraceError(f"{path}: line {line}: expected an object, found {type(row).__name__}")
            yield line, row
