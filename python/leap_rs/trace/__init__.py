"""Read and write traces: the strict leap format, and other public formats through one reader each.

`read_trace` gives the frame alone; `load` gives the frame with its metadata and with everything that the reader left
out or found odd, which is what the commands print.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from leap_rs import lazy

if TYPE_CHECKING:
    from leap_rs.trace.model import LeftOut, Reader, ReadOptions, Stream, Trace, Unit
    from leap_rs.trace.parquet import write_trace
    from leap_rs.trace.reading import READERS, TraceWarning, load, open_stream, read_trace

__all__ = [
    "READERS",
    "LeftOut",
    "ReadOptions",
    "Reader",
    "Stream",
    "Trace",
    "TraceWarning",
    "Unit",
    "load",
    "open_stream",
    "read_trace",
    "write_trace",
]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy.names(
        __name__,
        dict.fromkeys(__all__, "leap_rs.trace.reading")
        | dict.fromkeys(("LeftOut", "ReadOptions", "Reader", "Stream", "Trace", "Unit"), "leap_rs.trace.model")
        | {"write_trace": "leap_rs.trace.parquet"},
    )
