"""Calibration: step-time coefficients of an engine from the times that real requests took on it.

`calibrate` is the Python face of the `leap-calibrate` command. The forward model is the replayer's own simulation, so what
is fitted is what `leap-replay --cost-model` then uses.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from leap_rs import lazy

if TYPE_CHECKING:
    from .calibration import Calibration, CalibrationOptions, calibrate
    from .measured import MeasuredRun
    from .runs import read_runs

__all__ = ["Calibration", "CalibrationOptions", "MeasuredRun", "calibrate", "read_runs"]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy.names(
        __name__,
        dict.fromkeys(("Calibration", "CalibrationOptions", "calibrate"), "leap_rs.calibrate.calibration")
        | {"MeasuredRun": "leap_rs.calibrate.measured", "read_runs": "leap_rs.calibrate.runs"},
    )
