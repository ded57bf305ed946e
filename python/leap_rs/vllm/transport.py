"""Takes the rows of a step from the worker to the scheduler.

The scheduler says in `SchedulerOutput.leap_positions` where in a request's part of the step its last prompt token lies.
The model runner knows where each request's part starts. The rows come back in `ModelRunnerOutput.leap_rows`, when the
output itself does: both are plain attributes of objects that vLLM hands over anyway, also between processes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch

from leap_rs._leap import ConfigError

from .capture import Parcel, Tap

POSITIONS = "leap_positions"
ROWS = "leap_rows"
_MARK = "leap_transport"
_PARCEL = "leap_parcel"


def connect(runner: Any, tap: Tap) -> None:
    """Makes a model runner, of either kind that vLLM has, ask for the rows and attach them. Once for each runner."""
    if getattr(runner, _MARK, False):
        return
    prepare, batch = _preparation(runner)
    original, sample = getattr(runner, prepare), runner.sample_tokens

    def prepare_inputs(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        prepared = original(scheduler_output, *args, **kwargs)
        positions = getattr(scheduler_output, POSITIONS, None)
        if not positions:
            tap.aim((), (), (), torch.empty(0))
            return prepared
        request_ids, starts = batch(prepared)
        wanted = [(name, place) for place, name in enumerate(request_ids) if name in positions]
        names, places = [name for name, _ in wanted], [place for _, place in wanted]
        tap.aim(names, places, [positions[name] for name in names], starts)
        return prepared

    def sample_tokens(*args: Any, **kwargs: Any) -> Any:
        parcel = tap.collect()
        output = sample(*args, **kwargs)
        return output if parcel is None or output is None else _attach(output, parcel)

    setattr(runner, prepare, prepare_inputs)
    runner.sample_tokens = sample_tokens
    setattr(runner, _MARK, True)


def _preparation(runner: Any) -> tuple[str, Callable[[Any], tuple[Sequence[str], torch.Tensor]]]:
    """The method after which the order of the batch is final, and how to read it from there."""
    if callable(getattr(runner, "prepare_inputs", None)):
        return "prepare_inputs", lambda prepared: (prepared.req_ids, prepared.query_start_loc)
    if callable(getattr(runner, "_prepare_inputs", None)):
        return "_prepare_inputs", lambda _: (runner.input_batch.req_ids, runner.query_start_loc.gpu)
    raise ConfigError(f"leap: vLLM's {type(runner).__name__} has no prepare_inputs: this version of vLLM is not known")


def _attach(output: Any, parcel: Parcel) -> Any:
    """The output with the rows, or one that will have them once its own tokens have arrived."""
    if getattr(output, "get_output", None) is None:
        # vLLM keeps one empty output for all steps that have none.
        output = copy.copy(output)
        setattr(output, ROWS, parcel.rows())
        return output
    # Not a method put on the output itself: it would hold the output that holds it, and with it tensors on the GPU until
    # the garbage collector comes by.
    kind: Any = type(output)
    output.__class__ = _with_rows(kind)
    setattr(output, _PARCEL, parcel)
    return output


@cache
def _with_rows(kind: Any) -> type[Any]:
    """A class of asynchronous outputs whose results have the rows."""

    def get_output(self: Any) -> Any:
        return _attach(kind.get_output(self), getattr(self, _PARCEL))

    return type(kind.__name__, (kind,), {"get_output": get_output, "__module__": kind.__module__})
