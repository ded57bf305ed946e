"""Times of foreign formats as whole nanoseconds: only integers can be subtracted before anything is rounded."""

from __future__ import annotations

import polars as pl

from leap_rs.trace.model import PER_SECOND, Unit

NS_PER_S = 1_000_000_000
MAX_NS = 2**62  # 146 years: the difference of two such times is still an Int64

_DIGITS: dict[Unit, int] = {"s": 9, "ms": 6, "us": 3, "ns": 0}


def nanoseconds(values: pl.Series, unit: Unit) -> pl.Series:
    """Numbers, or their text, in `unit` as Int64 nanoseconds; null where one is no finite number within `MAX_NS`.

    Text in plain decimals and integers are exact to the nanosecond, whatever their size.
    """
    if values.dtype == pl.String:
        times = _from_text(values, unit)
    elif values.dtype.is_integer():
        scale = 10 ** _DIGITS[unit]
        whole = values.cast(pl.Int64, strict=False)
        times = whole.set((whole > MAX_NS // scale) | (whole < -MAX_NS // scale), None) * scale
    else:
        times = _from_float(values.cast(pl.Float64), unit)
    return _within(times)


def dates(text: pl.Series, form: str) -> pl.Series:
    """Dates as Int64 nanoseconds since 1970 (UTC where they have an offset); null where one does not have the form."""
    times: pl.Series = text.str.to_datetime(form, time_unit="ns", strict=False).cast(pl.Int64)
    return _within(times)


def _from_float(values: pl.Series, unit: Unit) -> pl.Series:
    scaled = (values * (NS_PER_S / PER_SECOND[unit])).round()
    times: pl.Series = scaled.set(~values.is_finite(), None).cast(pl.Int64, strict=False)
    return times


def _from_text(text: pl.Series, unit: Unit) -> pl.Series:
    digits = _DIGITS[unit]
    table = text.to_frame("text").select(
        pl.col("text"),
        pl.col("text").str.extract_groups(r"^(?<sign>[+-]?)(?<whole>\d+)(?:\.(?<fraction>\d*))?$").alias("parts"),
    )
    table = table.unnest("parts")
    fraction = pl.col("fraction").fill_null("").str.pad_end(digits + 1, "0").str.head(digits + 1)
    # One digit more than is kept, for rounding.
    tenths = pl.concat_str(pl.col("whole"), fraction).cast(pl.Int128, strict=False)
    size = ((tenths + 5) // 10).cast(pl.Int64, strict=False)
    plain = table.select(pl.when(pl.col("sign") == "-").then(-size).otherwise(size).alias("ns"))["ns"]
    odd = table["whole"].is_null()
    if not odd.any():
        return plain
    # 1e-05, .5 and the like: pandas writes small numbers so.
    return plain.zip_with(~odd, _from_float(text.cast(pl.Float64, strict=False), unit))


def _within(times: pl.Series) -> pl.Series:
    return times.set((times > MAX_NS) | (times < -MAX_NS), None)
