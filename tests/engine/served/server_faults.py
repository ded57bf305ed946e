"""A plugin of vLLM that damages what leap-rs sends: the hidden state of each request whose id holds the word `spoil`."""

from __future__ import annotations

import numpy as np

from leap_rs.vllm.capture import Parcel, Rows


def register() -> None:
    """Calling it again changes nothing."""
    original = Parcel.rows
    if hasattr(original, "leap_fault"):
        return

    def rows(self: Parcel) -> Rows:
        made = original(self)
        for request_id, row in made.items():
            if "spoil" in request_id:
                row[len(row) // 2] = np.nan
        return made

    rows.leap_fault = True  # type: ignore[attr-defined]
    Parcel.rows = rows  # type: ignore[method-assign]
