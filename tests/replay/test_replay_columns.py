"""Arrays for the core: dtypes, block sizes."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from leap_rs.replay.columns import resize_blocks, to_columns


def offsets_of(rows: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    offsets = np.cumsum([0, *map(len, rows)]).astype(np.int64)
    return offsets, np.array([h for row in rows for h in row], dtype=np.uint64)


def shared(a: np.ndarray, b: np.ndarray) -> int:
    """Blocks that two prompts share from the start."""
    n = min(len(a), len(b))
    different = np.flatnonzero(a[:n] != b[:n])
    return int(different[0]) if different.size else n


@given(
    st.lists(st.lists(st.integers(0, 3), max_size=9), min_size=2, max_size=2), st.sampled_from([2, 4, 8, 16, 32, 64])
)
def test_resized_blocks_share_what_the_old_ones_share(rows: list[list[int]], new: int) -> None:
    """Of 16-token blocks: shared tokens are rounded down to whole new blocks, in both directions."""
    resized = resize_blocks(*offsets_of(rows), 16, new)
    assert resized is not None
    offsets, hashes = resized
    assert offsets[-1] == len(hashes)
    assert [int(n) for n in np.diff(offsets)] == [len(row) * 16 // new for row in rows]
    a, b = (hashes[offsets[i] : offsets[i + 1]] for i in range(2))
    before = shared(np.array(rows[0]), np.array(rows[1])) * 16
    assert shared(a, b) == before // new


def test_blocks_that_do_not_divide_are_left_out_with_a_note() -> None:
    frame = pl.DataFrame(
        {
            "arrival_s": [0.0],
            "prompt_tokens": [64],
            "output_tokens": [3],
            "prefix_blocks": pl.Series([[1, 2]], dtype=pl.List(pl.UInt64)),
        }
    )
    columns, notes = to_columns(frame, trace_block=16, engine_block=24)
    assert "prefix_block_hashes" not in columns
    assert "16" in notes[0]
    assert "24" in notes[0]


@pytest.mark.parametrize("kind", [np.float16, np.float32])
def test_columns_have_the_dtypes_that_the_core_expects(kind: type) -> None:
    frame = pl.DataFrame(
        {
            "arrival_s": [0.0, 1.5],
            "prompt_tokens": [10, 20],
            "output_tokens": pl.Series([3, 4], dtype=pl.UInt32),
            "max_tokens": pl.Series([8, 4], dtype=pl.UInt32),
            "finish_reason": ["stop", "length"],
            "forced": [False, True],
            "features": pl.Series(np.arange(6, dtype=kind).reshape(2, 3)),
            "score_bert": pl.Series([1.0, 2.0], dtype=pl.Float32),
            "prefix_blocks": pl.Series([[], [7, 2**64 - 1]], dtype=pl.List(pl.UInt64)),
        }
    )
    columns, notes = to_columns(frame, trace_block=16, engine_block=16)
    assert notes == []
    kinds = {name: array.dtype for name, array in columns.items() if name not in ("scores", "prefix_block_size")}
    assert kinds == {
        "arrival_s": np.float64,
        "prompt_tokens": np.uint32,
        "output_tokens": np.uint32,
        "max_tokens": np.uint32,
        "finish": np.uint8,
        "forced": np.bool_,
        "features": kind,
        "prefix_block_offsets": np.int64,
        "prefix_block_hashes": np.uint64,
    }
    assert columns["prefix_block_size"] == 16
    assert columns["features"].shape == (2, 3)
    assert columns["finish"].tolist() == [0, 1]
    assert columns["forced"].tolist() == [False, True]
    assert columns["scores"]["bert"].tolist() == [1.0, 2.0]
    assert columns["prefix_block_offsets"].tolist() == [0, 0, 2]
    assert columns["prefix_block_hashes"].tolist() == [7, 2**64 - 1]
