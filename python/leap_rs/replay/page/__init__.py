"""The report of a replay as one HTML file that works without a network: `leap-replay --report`, `ReplayResult.report`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from leap_rs._leap import ConfigError, LeapError
from leap_rs.trace.files import replacing

if TYPE_CHECKING:
    from .rows import PointDetail


def check(path: Path) -> None:
    """Refuse, before a long replay, a page that could not be written after it."""
    if path.is_dir():
        raise ConfigError(f"report: {path} is a directory, not a file")
    if not path.parent.is_dir():
        raise ConfigError(f"report: {path.parent} is not a directory")
    if not os.access(path.parent, os.W_OK):
        raise ConfigError(f"report: {path.parent} cannot be written to")
    if find_spec("altair") is None or find_spec("vl_convert") is None:
        raise ConfigError('report: needs altair and vl-convert: pip install "leap-rs[report]"')


def write(path: Path, document: Mapping[str, Any], details: Sequence[PointDetail], origin: str) -> int:
    """Write the page, whole or not at all; its size in bytes. `origin` is the command that reproduces it."""
    import altair
    import vl_convert

    from .html import page

    version = altair.SCHEMA_VERSION.rpartition(".")[0].removeprefix("v")
    known = vl_convert.get_vegalite_versions()
    # Its stub asks for a snippet, but only the bundle without one is remembered from call to call.
    bundle = vl_convert.javascript_bundle(vl_version=version if version in known else known[-1])  # type: ignore[call-arg]
    text = page(document, details, origin, bundle).encode()
    with replacing(path, LeapError) as temporary:
        temporary.write_bytes(text)
    return len(text)
