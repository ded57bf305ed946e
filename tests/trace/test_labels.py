"""One rule for how answers ended, and fits and replays that follow it."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest

from leap_rs.fit import data
from leap_rs.replay.columns import FINISH, to_columns
from leap_rs.trace.labels import finish_reason, is_label
from leap_rs.trace.model import Trace

# Output, own limit, what was recorded, whether the client had settled the length; how it ended, whether it is a label.
ANSWERS = (
    (10, 20, "stop", False, "stop", True),
    (20, 20, "stop", False, "stop", True),
    (20, 20, "length", False, "length", True),
    (15, 20, "length", False, "length", True),
    (20, 20, None, False, "length", True),
    (19, 20, None, False, "stop", True),
    (20, 20, "abort", False, "abort", False),
    (20, 20, "length", True, "length", False),
    (9, 20, "stop", True, "stop", False),
)
COLUMNS = ("output_tokens", "max_tokens", "finish_reason", "forced")


def frame_of(rows: list[tuple[object, ...]], without: tuple[str, ...] = ()) -> pl.DataFrame:
    types = dict(zip(COLUMNS, (pl.UInt32, pl.UInt32, pl.String, pl.Boolean), strict=True))
    frame = pl.DataFrame(rows, schema=types, orient="row").drop(without)
    return frame.with_columns(arrival_s=pl.lit(0.0), prompt_tokens=pl.lit(5, pl.UInt32), features=pl.lit(1.0))


@pytest.mark.parametrize("answer", ANSWERS, ids=str)
def test_the_rule(answer: tuple[object, ...]) -> None:
    *row, ended, counts = answer
    frame = frame_of([tuple(row)])
    assert frame.select(finish_reason(frame.columns)).item() == ended
    assert frame.select(is_label(frame.columns)).item() is counts


@pytest.mark.parametrize(
    ("without", "ended", "labels"),
    [
        (("finish_reason",), ["stop", "length", "length"], [True, True, False]),
        (("finish_reason", "max_tokens"), ["stop", "stop", "stop"], [True, True, False]),
        (("finish_reason", "forced"), ["stop", "length", "length"], [True, True, True]),
    ],
    ids=str,
)
def test_a_trace_that_lacks_columns(without: tuple[str, ...], ended: list[str], labels: list[bool]) -> None:
    frame = frame_of([(10, 20, None, False), (20, 20, None, False), (20, 20, None, True)], without)
    ruled = frame.with_columns(ended=finish_reason(frame.columns), counts=is_label(frame.columns))
    assert ruled["ended"].to_list() == ended
    assert ruled["counts"].to_list() == labels
    replayed, _ = to_columns(frame.drop("features"), trace_block=16, engine_block=16)
    names = {code: name for name, code in FINISH.items()}
    assert [names[code] for code in replayed["finish"].tolist()] == ended
    forced = replayed["forced"].tolist() if "forced" in replayed else [False] * len(labels)
    assert [not one for one in forced] == labels
    fitted = data.labelled(Trace(frame, Path("t.parquet"), "leap"), "features", 1024)
    kept = [name for name, counts in zip(ended, labels, strict=True) if counts]
    assert fitted.censored.tolist() == [name == "length" for name in kept]
