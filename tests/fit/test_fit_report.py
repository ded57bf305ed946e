"""The tables of `leap-fit` where a trace is longer than they are wide."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl
from fit_command import BUDGET, fit, fit_json

from leap_rs.trace import write_trace


def test_windows_that_do_not_fit_are_left_to_json(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for name, rows in (("train", 100), ("long", 1050), ("short", 130)):
        x = rng.normal(size=(rows, 3))
        lengths = np.clip(np.round((16 + x @ [3.0, 2.0, 0.0] + 2 * rng.normal(size=rows)) ** 2), 1, BUDGET)
        columns = {
            "arrival_s": np.arange(rows) / 10,
            "prompt_tokens": np.full(rows, 20, dtype=np.uint32),
            "output_tokens": lengths.astype(np.uint32),
            "max_tokens": np.full(rows, BUDGET, dtype=np.uint32),
            "features": x.astype(np.float32),
        }
        write_trace(pl.DataFrame(columns), tmp_path / f"{name}.parquet")
    judged = [tmp_path / "long.parquet", tmp_path / "short.parquet"]
    words = [tmp_path / "train.parquet", "--out", tmp_path / "r.safetensors", "--lam", "1", "--rls", "--eval", *judged]
    (one,) = fit_json(*words)
    windows = one["curves"][str(judged[0])]["windows"]
    assert [window["last"] for window in windows] == [*range(100, 1001, 100), 1050]

    blocks = [block.splitlines() for block in fit(*words).stdout.split("\n\n")]
    (table,) = [block for block in blocks if "over 100 requests" in block[0]]
    assert "2 windows more in --json" in table[0]
    assert table[1].split() == ["trace", "predictions", *(str(first) for first in range(1, 900, 100))]
    assert table[2].split() == ["long", "frozen", *(f"{window['frozen']:.3f}" for window in windows[:9])]
    short = one["curves"][str(judged[1])]["windows"]
    assert table[4].split() == ["short", "frozen", f"{short[0]['frozen']:.3f}"]
    (curve,) = [block for block in blocks if "after that many labels" in block[0]]
    assert curve[2].split()[:9] == ["trace", "0", "50", "100", "200", "300", "400", "500", "readout"]
    assert [line.split()[0] for line in curve[3:]] == ["long", "short"]
    assert max(len(line) for block in blocks[1:] for line in block) <= 120
