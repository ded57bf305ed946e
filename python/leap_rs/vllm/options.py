"""What a user may set in `--additional-config '{"leap": {...}}'`, in one validated model.

A wrong value is one `ConfigError` at start that names the option; what `leap-replay --tune` prints is valid here.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from leap_rs._leap import DEFAULT_AGING, DEFAULT_RECOMPUTE_SHARE, AgingClock, ConfigError

from .given import KEY

Lever = Literal["queue", "slots", "evict", "admission"]
LEVERS = get_args(Lever)

Count = Annotated[int, Field(ge=1, lt=2**32)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Factor = Annotated[float, Field(ge=1, allow_inf_nan=False)]


def _levers(value: object) -> object:
    if isinstance(value, str):
        value = [part.strip() for part in value.replace(",", "+").split("+") if part.strip()]
    if isinstance(value, (list, tuple, set, frozenset)):
        for lever in value:
            if lever not in LEVERS:
                raise ValueError(f"unknown lever {lever!r}, expected some of {', '.join(LEVERS)}")
        return tuple(lever for lever in LEVERS if lever in value)
    return value


class _Options(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)


class RlsOptions(_Options):
    """How finished requests correct the readouts."""

    batch: Annotated[int, Field(ge=1, le=4096)] = 8
    forgetting: Annotated[float, Field(gt=0, le=1)] = 1.0
    lam: Positive = Field(default=1000.0, alias="lambda")


class ArmOptions(_Options):
    """When `mode` auto arms: at `min_correlation` over the last `window` finished requests; it disarms `hysteresis` below."""

    window: Annotated[int, Field(ge=10, le=1_000_000)] = 200
    min_correlation: Annotated[float, Field(ge=0, le=1)] = 0.2
    hysteresis: Annotated[float, Field(ge=0, le=1)] = 0.05


class EncoderOptions(_Options):
    """The text encoder that reads prompts: a model's directory or name, and where and how it runs."""

    model: Annotated[str, Field(min_length=1)]
    layer: Annotated[int, Field(ge=0, le=4096)] | None = None
    """The layer whose states its rows are made of; none: the one at 2/3 of the depth."""
    threads: Annotated[int, Field(ge=1, le=1024)] = 1
    device: Annotated[str, Field(min_length=1)] = "cpu"


def _encoder(value: object) -> object:
    if isinstance(value, str):
        return {"model": value}
    if value is not None and not isinstance(value, (Mapping, EncoderOptions)):
        names = ", ".join(EncoderOptions.model_fields)
        raise ValueError(f"expected a model's directory or name, or an object with {names}, got {value!r}")
    return value


class LeapOptions(_Options):
    """Options of the plugin. Names and meanings are those of `leap-replay`'s policies where both have one."""

    mode: Literal["shadow", "armed", "auto"] = "auto"
    """`shadow` predicts, learns and leaves the schedule alone; `auto` starts so and arms itself."""
    levers: Annotated[tuple[Lever, ...], BeforeValidator(_levers)] = ("queue", "admission")
    """Where the plugin acts; where none are given and `decode_slots` are, the slots too."""
    decode_slots: Count | None = None
    """Residents that decode in a step; none: vLLM's `max_num_seqs`, so that nobody is gated."""
    layer: Annotated[int, Field(ge=0, le=4096)] | None = None
    """Decoder layer whose output the state readout reads; none: the one at 5/6 of the depth."""
    readout: Path | None = None
    encoder: Annotated[EncoderOptions | None, BeforeValidator(_encoder)] = None
    """What reads the text of prompts for the text readout; none: there is no such readout."""
    order: Literal["gittins", "survival", "countdown", "fcfs"] = "gittins"
    objective: Literal["ptl", "e2el"] = "ptl"
    aging: NonNegative | None = None
    """By how many e-foldings a request has risen when it has waited for the standing wait; none: `DEFAULT_AGING`, unless by the second."""
    aging_rate: NonNegative | None = None
    """The same in e-foldings a second."""
    memory_weight: NonNegative = 1.0
    """Weight of the KV term in the keys of queue and evict; the slots have none."""
    recompute_share: Annotated[float, Field(ge=0.0001, le=0.5)] = DEFAULT_RECOMPUTE_SHARE
    """Share of the computed tokens that admission control lets be computed again because somebody was preempted."""
    wait_cap_steps: Count | None = None
    wait_cap_s: Positive | None = None
    hysteresis: Factor = 1.1
    """A resident takes a decode slot from one that has it only if its remaining length is this many times shorter."""
    evict_factor: Factor = 2.0
    evict_per_s: NonNegative = 1.0
    rls: RlsOptions = RlsOptions()
    arm: ArmOptions = ArmOptions()
    state_dir: Path | None = None
    state_every: Count = 64
    """Updates of the readouts from one saved state to the next."""
    record: Path | None = None
    """Directory to which a trace of what is served is written."""
    record_every: Count = 256
    """Finished requests from one part of that trace to the next."""

    @model_validator(mode="before")
    @classmethod
    def _with_slots(cls, values: Any) -> Any:
        if isinstance(values, dict) and "levers" not in values and values.get("decode_slots") is not None:
            return {**values, "levers": ("queue", "slots", "admission")}
        return values

    @model_validator(mode="after")
    def _one_aging(self) -> LeapOptions:
        if self.aging is not None and self.aging_rate is not None:
            raise ValueError("aging (a standing wait) and aging_rate (a second) exclude each other")
        return self

    def has(self, lever: str) -> bool:
        """Whether the plugin acts at `lever`. Order fcfs acts nowhere but in admission, which needs no order."""
        return lever in self.levers and (self.order != "fcfs" or lever == "admission")

    @property
    def squared(self) -> bool:
        """Whether remaining lengths are in tokens squared."""
        return self.order == "gittins" and self.objective == "ptl"

    def clock(self) -> AgingClock:
        """A clock of the aging in force."""
        if self.aging_rate is not None:
            return AgingClock(per_second=self.aging_rate)
        return AgingClock(per_wait=DEFAULT_AGING if self.aging is None else self.aging)


def parse(additional_config: object) -> LeapOptions | None:
    """The plugin's options in vLLM's `additional_config`; None where there are none."""
    values = additional_config.get(KEY) if isinstance(additional_config, Mapping) else None
    if values is None:
        return None
    if not isinstance(values, Mapping):
        raise ConfigError(f"additional_config: leap: expected an object with options, got {values!r}")
    try:
        return LeapOptions.model_validate(dict(values))
    except ValidationError as error:
        raise ConfigError(f"additional_config: leap: {_first(error)}") from None


def _first(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    name = ".".join(str(part) for part in first["loc"])
    message = str(first["msg"]).removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        parts: dict[str, type[BaseModel]] = {"rls": RlsOptions, "arm": ArmOptions, "encoder": EncoderOptions}
        known = parts.get(name.split(".")[0], LeapOptions)
        names = ", ".join(field.alias or key for key, field in known.model_fields.items())
        return f"{name}: no such option; there are {names}"
    if first["type"] != "value_error":
        shown: Any = first["input"]
        message = f"{message[0].lower()}{message[1:]}, got {shown!r}"
    # What is wrong between options says their names itself.
    return f"{name}: {message}" if name else message
