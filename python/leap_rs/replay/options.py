"""Every option of a replay in one validated model.

The command line and the Python face share it, so a value is refused in one place, with one `ConfigError` that starts with
the option's name; the command respells that name (`--max-num-seqs`).
"""

from __future__ import annotations

import math
from decimal import Decimal, InvalidOperation
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from leap_rs._leap import ConfigError

METRICS = ("ptl", "ttft", "tpot", "itl", "e2el")
GOODPUT_METRICS = ("ptl", "ttft", "tpot", "e2el")
AGING = ("aging", "aging_rate")
SWEPT = ("load", "decode_slots", "max_num_seqs", *AGING)
# What a point of a sweep may differ in.
POINT_KEYS = ("load", "request_rate", "decode_slots", "max_num_seqs", *AGING)
MAX_POINTS = 1000
# Keys of the result object that a --metadata pair would overwrite.
RESERVED = ("leap_replay_version", "trace", "config", "results", "notes", "conclusions")

Count = Annotated[int, Field(ge=1, lt=2**32)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
PositiveOrInf = Annotated[float, Field(gt=0, allow_inf_nan=True)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)]


def _names(value: object) -> object:
    if isinstance(value, str):
        value = [part.strip() for part in value.split(",") if part.strip()]
    if isinstance(value, (list, tuple)):
        for name in value:
            if name not in METRICS:
                raise ValueError(f"unknown metric {name!r}, expected some of {', '.join(METRICS)}")
        return tuple(dict.fromkeys(value))
    return value


def _percentiles(value: object) -> object:
    if isinstance(value, str):
        value = [part.strip() for part in value.split(",") if part.strip()]
    if isinstance(value, (int, float)):
        value = [value]
    if not isinstance(value, (list, tuple)):
        return value
    try:
        numbers = sorted({float(part) for part in value})
    except (TypeError, ValueError):
        raise ValueError(f"expected numbers such as 50,90,99, got {value!r}") from None
    if any(not 0 <= number <= 100 for number in numbers):
        raise ValueError(f"a percentile lies between 0 and 100, got {value!r}")
    return tuple(numbers)


def parse_goodput(value: object) -> object:
    """`["ttft:500", "tpot:50"]` or `"ttft:500 tpot:50"` to `{"ttft": 500.0, "tpot": 50.0}`, milliseconds."""
    if isinstance(value, str):
        value = value.split()
    if isinstance(value, dict):
        pairs = [(str(key), item) for key, item in value.items()]
    elif isinstance(value, (list, tuple)):
        pairs = []
        for item in " ".join(str(part) for part in value).split():
            key, colon, number = item.partition(":")
            if not colon:
                raise ValueError(f"expected METRIC:MILLISECONDS such as ttft:500, got {item!r}")
            pairs.append((key, number))
    else:
        return value
    objectives: dict[str, float] = {}
    for key, number in pairs:
        if key not in GOODPUT_METRICS:
            raise ValueError(f"unknown metric {key!r}, expected one of {', '.join(GOODPUT_METRICS)}")
        if key in objectives:
            raise ValueError(f"{key} is given twice")
        try:
            limit = float(number)
        except (TypeError, ValueError):
            raise ValueError(f"{key} needs milliseconds, got {number!r}") from None
        if not (limit >= 0 and math.isfinite(limit)):
            raise ValueError(f"{key} needs milliseconds >= 0, got {number!r}")
        objectives[key] = limit
    return objectives


def parse_metadata(value: object) -> object:
    """`["gpu=h100", "team=search"]` to a dictionary; keys of the result object are refused."""
    if isinstance(value, (list, tuple)):
        pairs: dict[str, str] = {}
        for item in value:
            key, equals, text = str(item).partition("=")
            if not equals or not key.strip():
                raise ValueError(f"expected KEY=VALUE, got {item!r}")
            pairs[key.strip()] = text.strip()
        value = pairs
    if isinstance(value, dict):
        for key in value:
            if key in RESERVED:
                raise ValueError(f"{key!r} is a key of the result itself")
    return value


def grid(text: str) -> list[float]:
    """Values of `START:STOP:STEP` (both ends included) or `A,B,C`; in decimals, so that steps of 0.1 stay exact."""
    try:
        if ":" not in text:
            values = [Decimal(part.strip()) for part in text.split(",")]
        else:
            start, stop, step = (Decimal(part.strip()) for part in text.split(":"))
            if not all(part.is_finite() for part in (start, stop, step)):
                raise ValueError
            if step <= 0 or stop < start:
                raise ValueError(f"{text!r} needs START <= STOP and STEP > 0")
            if (stop - start) / step >= MAX_POINTS:
                raise ValueError(f"{text!r} has more than {MAX_POINTS} values")
            values = [start + step * i for i in range(int((stop - start) / step) + 1)]
    except InvalidOperation:
        raise ValueError(f"expected START:STOP:STEP or A,B,C, got {text!r}") from None
    except ValueError as error:
        raise ValueError(
            str(error)
            if "needs" in str(error) or "more" in str(error)
            else f"expected START:STOP:STEP or A,B,C, got {text!r}"
        ) from None
    if not all(value.is_finite() for value in values):
        raise ValueError(f"expected finite numbers, got {text!r}")
    return [float(value) for value in values]


def parse_sweep(value: object) -> object:
    """`["load=0.6:1.6:0.1"]`, `"load=..."` or `{"load": [0.6, 0.7]}` to a dictionary of value lists by option name."""
    if isinstance(value, str):
        value = [value]
    if isinstance(value, (list, tuple)):
        swept: dict[str, object] = {}
        for item in value:
            key, equals, text = str(item).partition("=")
            name = key.strip().lstrip("-").replace("-", "_")
            if not equals:
                raise ValueError(f"expected NAME=START:STOP:STEP, got {item!r}")
            if name in swept:
                raise ValueError(f"{key} is swept twice")
            _require_swept(name)
            swept[name] = grid(text)
        value = swept
    if not isinstance(value, dict):
        return value
    result: dict[str, list[float]] = {}
    for name, numbers in value.items():
        _require_swept(name)
        values = [float(number) for number in numbers]
        whole = name in ("decode_slots", "max_num_seqs")
        if not values:
            raise ValueError(f"{name} has no values")
        for number in values:
            if not math.isfinite(number) or number < 0 or (number == 0 and name not in AGING):
                raise ValueError(f"{name} must be {'>= 0' if name in AGING else '> 0'}, got {number:g}")
            if whole and number != int(number):
                raise ValueError(f"{name} must be a whole number, got {number:g}")
        result[name] = list(dict.fromkeys(values))
    return result


def _require_swept(name: str) -> None:
    if name not in SWEPT:
        raise ValueError(f"cannot sweep {name!r}, expected one of {', '.join(key.replace('_', '-') for key in SWEPT)}")


def in_json(value: Any) -> Any:
    """An option's value as strict JSON carries it: infinity as text."""
    return "inf" if value == math.inf else value


class Options(BaseModel):
    """Options of one replay. Names and meanings follow `vllm bench serve` and `vllm serve` where they have one."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    policies: tuple[str, ...] | None = None
    load: Positive | tuple[Positive, ...] | None = None
    request_rate: PositiveOrInf | None = None
    burstiness: PositiveOrInf = 1.0
    num_prompts: Count | None = None
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    seeds: Annotated[int, Field(ge=1, le=1000)] = 5
    max_concurrency: Count | None = None
    goodput: Annotated[dict[str, float], BeforeValidator(parse_goodput)] = Field(default_factory=dict)
    percentile_metrics: Annotated[tuple[str, ...], BeforeValidator(_names)] = METRICS
    metric_percentiles: Annotated[tuple[float, ...], BeforeValidator(_percentiles)] = (50.0, 90.0, 99.0)
    metadata: Annotated[dict[str, str], BeforeValidator(parse_metadata)] = Field(default_factory=dict)
    sweep: Annotated[dict[str, list[float]], BeforeValidator(parse_sweep)] = Field(default_factory=dict)
    engine: str = "h100-llama-8b"
    cost_model: Path | dict[str, Any] | None = None
    data_parallel_size: Annotated[int, Field(ge=1, le=1024)] | None = None
    decode_slots: Count | None = None
    max_num_seqs: Count | None = None
    max_num_batched_tokens: Count | None = None
    max_model_len: Count | None = None
    kv_tokens: Count | None = None
    block_size: Annotated[int, Field(ge=1, le=65536)] | None = None
    watermark: Fraction = 0.0
    async_scheduling: bool | None = None
    enable_chunked_prefill: bool = True
    enable_prefix_caching: bool = True
    scheduler_reserve_full_isl: bool = True
    wait_cap_s: Positive | None = None
    max_tokens: Count | None = None
    threads: Annotated[int, Field(ge=1, le=4096)] | None = None
    readout: Path | Literal["none"] | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Options:
        if self.policies is not None and not self.policies:
            raise ValueError("policies: give at least one, or leave the option out for the usual ones")
        for name in ("request_rate", "burstiness"):
            value = getattr(self, name)
            if value is not None and math.isnan(value):
                raise ValueError(f"{name}: must be a number > 0 or inf, got nan")
        loads = self.load is not None or "load" in self.sweep
        if loads and self.request_rate is not None:
            raise ValueError(
                "load: scales the trace's own arrival times, which request_rate replaces; give one of them"
            )
        for name in SWEPT[:3]:
            if name in self.sweep and getattr(self, name) is not None:
                raise ValueError(f"sweep: {name} is swept and also given")
        if set(AGING) <= self.sweep.keys():
            raise ValueError("sweep: aging and aging_rate exclude each other")
        if math.prod(len(values) for values in self.sweep.values()) > MAX_POINTS:
            raise ValueError(f"sweep: more than {MAX_POINTS} points")
        return self

    def points(self) -> list[dict[str, Any]]:
        """The points of the sweep, first swept option slowest: one point where nothing is swept."""
        axes: dict[str, list[Any]] = {
            name: [int(v) for v in values] if name in ("decode_slots", "max_num_seqs") else list(values)
            for name, values in self.sweep.items()
        }
        if isinstance(self.load, tuple):
            axes = {"load": list(dict.fromkeys(self.load)), **axes}
        base = {
            **dict.fromkeys(POINT_KEYS),
            "load": self.load if isinstance(self.load, float) else None,
            "request_rate": in_json(self.request_rate),
        }
        return [{**base, **dict(zip(axes, values, strict=True))} for values in product(*axes.values())]


def build(values: dict[str, Any]) -> Options:
    """Validate `values`; a `ConfigError` names the first option that is wrong (`max_num_seqs: ...`)."""
    try:
        return Options.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        message = str(first["msg"]).removeprefix("Value error, ")
        name = str(first["loc"][0]) if first["loc"] else ""
        if not name:
            head, colon, tail = message.partition(": ")
            name, message = (head, tail) if colon and head in Options.model_fields else ("", message)
        elif first["type"] == "extra_forbidden":
            message = "no such option"
        elif first["type"] != "value_error":
            message = f"{message[0].lower()}{message[1:]}, got {values.get(name)!r}"
        raise ConfigError(f"{name}: {message}" if name else message) from None
