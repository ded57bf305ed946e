"""Which decoder layer the hidden state is read after, and whether a model's layers hand it on in a form that is known.

vLLM's decoder layers pass two tensors from one to the next, (hidden_states, residual), and the first thing that a layer
does is to add them. Then the state between two layers is the sum. A layer that does something else with the pair is
refused rather than misread: that shows in the source of its forward and in what its first norm computes.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from leap_rs._leap import ConfigError

if TYPE_CHECKING:
    import torch
    from torch import nn

HIDDEN, RESIDUAL = "hidden_states", "residual"


@dataclass(frozen=True)
class Site:
    """The place where the hidden state is read."""

    number: int
    """Decoder layers that lie before it: the entry of transformers' `output_hidden_states`."""
    name: str
    """Path of the layer in the model."""
    layer: nn.Module


def layer_number(depth: int, wanted: int | None = None) -> int:
    """After how many of `depth` decoder layers the state is read; by default after 5/6 of them."""
    if depth < 2:
        raise ConfigError(f"leap: a model of {depth} decoder layer has no state between two layers to read")
    if wanted is None:
        return min(max(round(depth * 5 / 6), 1), depth - 1)
    if not 1 <= wanted < depth:
        raise ConfigError(f"leap: layer: expected 1 to {depth - 1} for a model of {depth} decoder layers, got {wanted}")
    return wanted


def check_last_rank(number: int, first: int, depth: int) -> None:
    """Refuses a layer whose output is made before the pipeline's last rank, which begins with layer `first`, counted from 0."""
    if first > number - 1:
        choice = f": choose {first + 1} to {depth - 1}" if first + 1 < depth else ", and has no two of them"
        raise ConfigError(
            f"leap: layer {number} is not on the pipeline's last rank, which answers the scheduler{choice}"
        )


def find_site(model: nn.Module, depth: int, wanted: int | None = None) -> Site | None:
    """The layer to tap in a loaded model; None on all but the last rank of a pipeline.

    Raises:
        ConfigError: The model's layers do not follow the convention, or `wanted` is none of them.
    """
    number = layer_number(depth, wanted)
    path, layers = _layers(model, depth)
    held = [index for index, layer in enumerate(layers) if type(layer).__name__ != "PPMissingLayer"]
    if not held or held[-1] != depth - 1:
        return None
    check_last_rank(number, held[0], depth)
    layer, follower = layers[number - 1], layers[number]
    reason = unreadable(layer, follower)
    if reason:
        raise ConfigError(f"leap cannot read the hidden states of {type(model).__name__}: {reason}")
    return Site(number, f"{path}.{number - 1}", layer)


def unreadable(layer: nn.Module, follower: nn.Module) -> str | None:
    """Why the state between a layer and the one that follows it is not known to be the sum; None where it is."""
    name = type(layer).__name__
    if not {HIDDEN, RESIDUAL} <= set(inspect.signature(type(follower).forward).parameters):
        return f"its decoder layer {name} does not take {HIDDEN} and {RESIDUAL}"
    try:
        made, taken = _syntax(type(layer).forward), _syntax(type(follower).forward)
    except (OSError, TypeError, SyntaxError):
        return f"the source of its decoder layer {name} is not at hand"
    if not _returns_pairs(made):
        return f"its decoder layer {name} does not return ({HIDDEN}, {RESIDUAL})"
    norm = _first_norm(taken)
    if norm is None or not _adds(getattr(follower, norm, None)):
        return f"its decoder layer {name} does not begin by adding {HIDDEN} and {RESIDUAL}"
    return None


def language_model(model: nn.Module) -> nn.Module:
    """The text model inside a multimodal one."""
    inner = getattr(model, "get_language_model", None)
    found: nn.Module = inner() if callable(inner) else model
    return found


def _layers(model: nn.Module, depth: int) -> tuple[str, Any]:
    from torch.nn import ModuleList

    text = language_model(model)
    found = [
        (name, module)
        for name, module in text.named_modules()
        if isinstance(module, ModuleList)
        and len(module) == depth
        and name.rpartition(".")[2] in ("layers", "h", "blocks")
    ]
    if not found:
        raise ConfigError(
            f"leap cannot read the hidden states of {type(model).__name__}: it has no list of {depth} decoder layers"
        )
    return min(found, key=lambda entry: len(entry[0]))


def _syntax(forward: Callable[..., Any]) -> ast.AST:
    return ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(forward))))


def _returns_pairs(forward: ast.AST) -> bool:
    returned = [node.value for node in ast.walk(forward) if isinstance(node, ast.Return)]
    return bool(returned) and all(
        isinstance(value, ast.Tuple) and len(value.elts) == 2 and not isinstance(value.elts[1], ast.Constant)
        for value in returned
    )


def _first_norm(forward: ast.AST) -> str | None:
    """The submodule NORM of the first `x, residual = self.NORM(hidden_states, residual)`, in the order of the source."""
    calls = [
        node.value
        for node in ast.walk(forward)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and isinstance(node.targets[0], ast.Tuple)
    ]
    for call in sorted(calls, key=lambda call: (call.lineno, call.col_offset)):
        given = [*call.args, *(keyword.value for keyword in call.keywords)]
        names = [value.id for value in given if isinstance(value, ast.Name)]
        function = call.func
        if names[:2] == [HIDDEN, RESIDUAL] and isinstance(function, ast.Attribute):
            return function.attr if isinstance(function.value, ast.Name) and function.value.id == "self" else None
    return None


def _adds(norm: Any) -> bool:
    """Whether a norm given (x, y) returns (the norm of their sum, their sum)."""
    import torch

    weight: torch.Tensor | None = next(iter(norm.parameters()), None) if isinstance(norm, torch.nn.Module) else None
    if weight is None or weight.dim() != 1:
        return False
    # Fixed numbers: a random generator that is asked here would give every later sample of the engine another value.
    steps = torch.linspace(-1, 1, 4 * weight.numel(), device=weight.device, dtype=torch.float32)
    x, y = ((steps * factor).cos().reshape(4, -1).to(weight.dtype) for factor in (7.0, 11.0))
    try:
        with torch.inference_mode():
            made = norm(x.clone(), y.clone())
            plain = norm((x + y).clone())
    except Exception:
        return False
    if not isinstance(made, tuple) or len(made) != 2:
        return False
    close = torch.finfo(weight.dtype).eps * 8
    pairs = ((made[0], plain), (made[1], x + y))
    return all(torch.allclose(a.float(), b.float(), rtol=close, atol=close) for a, b in pairs)
