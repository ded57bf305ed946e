"""How answers ended, and so what their lengths say: one rule for fits, replays and descriptions of traces."""

from __future__ import annotations

from collections.abc import Collection

import polars as pl

from leap_rs.trace.schema import FORCED


def finish_reason(columns: Collection[str]) -> pl.Expr:
    """`stop`, `length` or `abort` of each request of a frame with these columns.

    Where nothing was recorded, an answer that is as long as its own limit was cut by it, and any other one ended by
    itself.
    """
    cut = pl.col("output_tokens") >= pl.col("max_tokens") if "max_tokens" in columns else pl.lit(value=False)
    guessed = pl.when(cut).then(pl.lit("length")).otherwise(pl.lit("stop"))
    return pl.coalesce(pl.col("finish_reason"), guessed) if "finish_reason" in columns else guessed


def is_label(columns: Collection[str]) -> pl.Expr:
    """Whether a length says anything: not that of an aborted answer, nor one that the client had settled."""
    ended = finish_reason(columns) != "abort"
    return ended & ~pl.col(FORCED) if FORCED in columns else ended
