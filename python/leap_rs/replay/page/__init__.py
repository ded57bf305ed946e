"""The report of a replay as one HTML file that works without a network: `leap-replay --report`, `ReplayResult.report`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from leap_rs._leap import ConfigError
from leap_rs.writing import obstacle, replacing

if TYPE_CHECKING:
    from .rows import PointDetail


def check(path: Path) -> None:
    """Refuse, before a long replay, a page that could not be written after it."""
    if fault := obstacle(path):
        raise ConfigError(f"report: {path}: cannot be written: {fault}")
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
    text = page(document, details, origin, bundle).encode(errors="replace")
    with replacing(path) as temporary:
        temporary.write_bytes(text)
    return len(text)
