"""Times of foreign formats as whole nanoseconds: only integers can be subtracted before anything is rounded."""

from __future__ import annotations

import polars as pl

from leap_rs.trace.model import PER_SECOND, Unit

NS_PER_S = 1_000_000_000
MAX_NS = 2**62  # 146 years: the difference of two such times is still an Int64
MAX_S = MAX_NS // NS_PER_S

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


_DATE = (
    r"^(?<year>\d{4})(?<dash>-?)(?<month>\d{2})-?(?<day>\d{2})"
    r"[Tt ](?<hour>\d{2}):?(?<minute>\d{2})(?::?(?<second>\d{2})(?:[.,](?<fraction>\d+))?)?"
    r" ?(?<zone>[Zz]|UTC|GMT|[+-]\d{2}(?::?\d{2}(?::?\d{2})?)?)?$"
)


def dates(text: pl.Series) -> pl.Series:
    """Dates and times as ISO 8601 has them, as Int64 nanoseconds since 1970; null where one is none.

    With a T or a space; to minutes, seconds or any fraction of them (what is finer than a nanosecond is cut off); with an
    offset from UTC in any of its forms, or without one, which counts as UTC.
    """
    found = text.str.strip_chars().to_frame("text").select(pl.col("text").str.extract_groups(_DATE).alias("parts"))
    parts = found.unnest("parts")
    second = pl.col("second").fill_null("00")
    stamp = pl.concat_str("year", pl.lit("-"), "month", pl.lit("-"), "day", pl.lit(" "), "hour", pl.lit(":"), "minute")
    stamp = pl.concat_str(stamp, pl.lit(":"), second).str.to_datetime("%Y-%m-%d %H:%M:%S", time_unit="us", strict=False)
    nanos = pl.col("fraction").fill_null("").str.head(9).str.pad_end(9, "0").cast(pl.Int64)
    zone = pl.col("zone").str.replace_all(":", "")

    def digits(start: int) -> pl.Expr:
        return zone.str.slice(start, 2).cast(pl.Int64, strict=False).fill_null(0)

    offset = (digits(1) * 3600 + digits(3) * 60 + digits(5)) * pl.when(zone.str.starts_with("-")).then(-1).otherwise(1)
    ahead = pl.when(zone.str.contains(r"^[+-]")).then(offset).otherwise(0)
    seconds = stamp.cast(pl.Int64) // 1_000_000 - ahead
    # Outside of these an Int64 of nanoseconds has no room.
    held = pl.when(seconds.abs() <= MAX_NS // NS_PER_S).then(seconds)
    return _within(parts.select((held * NS_PER_S + nanos).alias("ns"))["ns"])


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
