"""Which decoder layer the hidden state is read after, and whether a model's layers hand it on in a form that is known.

vLLM's decoder layers pass two tensors from one to the next, (hidden_states, residual), and the first thing that a layer
does is to add them. Then the state between two layers is the sum. A layer that does something else with the pair is
refused rather than misread: that shows in the source of its forward and in what its first norm computes. Where tensor
parallelism splits a layer, some leave the sum over its ranks to a function that the next one calls in place of its norm.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Callable, Sequence
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


def find_site(
    model: nn.Module, depth: int, wanted: int | None = None, ranks: int = 1, device: torch.device | None = None
) -> Site | None:
    """The layer to tap in a loaded model; None on all but the last rank of a pipeline.

    Args:
        model: The model.
        depth: Its decoder layers.
        wanted: After how many of them the state is read, instead of after 5/6.
        ranks: Tensor-parallel ones.
        device: Where the model runs; offloaded weights are elsewhere.

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
    reason = unreadable(layer, follower, ranks, device)
    if reason:
        raise ConfigError(f"leap cannot read the hidden states of {type(model).__name__}: {reason}")
    return Site(number, f"{path}.{number - 1}", layer)


def unreadable(layer: nn.Module, follower: nn.Module, ranks: int = 1, device: torch.device | None = None) -> str | None:
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
    if norm is None or not _adds(getattr(follower, norm, None), device):
        return f"its decoder layer {name} does not begin by adding {HIDDEN} and {RESIDUAL}"
    if ranks > 1 and _sums_over_ranks(taken, norm):
        return f"its decoder layer {name} leaves a sum over tensor-parallel ranks to the layer that follows it"
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
        names = [value.id for value in _given(call) if isinstance(value, ast.Name)]
        if names[:2] == [HIDDEN, RESIDUAL] and isinstance(call.func, ast.Attribute):
            return _of_layer(call.func)
    return None


def _sums_over_ranks(forward: ast.AST, norm: str) -> bool:
    """Whether a function may be given the pair instead of the norm: one that sums it over ranks before the norm has it.

    What the layer itself holds, another norm or a method, is no such function unless it is handed a norm.
    """
    function = next(node for node in ast.walk(forward) if isinstance(node, ast.FunctionDef))
    for call in _takers(function.body)[0]:
        of_layer = [_of_layer(value) for value in (call.func, *_given(call))]
        if of_layer[0] != norm and (of_layer[0] is None or any(of_layer[1:])):
            return True
    return False


def _takers(statements: Sequence[ast.stmt]) -> tuple[list[ast.Call], bool]:
    """The calls that may be the first to be given the pair, and whether it may still be as it came after them."""
    found: list[ast.Call] = []
    for statement in statements:
        if isinstance(statement, ast.If):
            ways = [_takers(way) for way in (statement.body, statement.orelse)]
            found += [*_pairs_given(statement.test), *(call for calls, _ in ways for call in calls)]
            as_it_came = any(left for _, left in ways)
        elif isinstance(statement, ast.With):
            calls, as_it_came = _takers(statement.body)
            found += calls
        else:
            found += _pairs_given(statement)
            stored = {
                node.id
                for node in ast.walk(statement)
                if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
            }
            as_it_came = HIDDEN not in stored and not isinstance(statement, (ast.Return, ast.Raise))
        if not as_it_came:
            return found, False
    return found, True


def _pairs_given(node: ast.AST) -> list[ast.Call]:
    calls = [call for call in ast.walk(node) if isinstance(call, ast.Call)]
    return [
        call
        for call in calls
        if {HIDDEN, RESIDUAL} <= {value.id for value in _given(call) if isinstance(value, ast.Name)}
    ]


def _given(call: ast.Call) -> list[ast.expr]:
    return [*call.args, *(keyword.value for keyword in call.keywords)]


def _of_layer(value: ast.expr) -> str | None:
    """The name of a part of the layer itself."""
    held = isinstance(value, ast.Attribute) and isinstance(value.value, ast.Name) and value.value.id == "self"
    return value.attr if held and isinstance(value, ast.Attribute) else None


def _adds(norm: Any, device: torch.device | None) -> bool:
    """Whether a norm given (x, y) returns (the norm of their sum, their sum)."""
    import torch

    weight: torch.Tensor | None = next(iter(norm.parameters()), None) if isinstance(norm, torch.nn.Module) else None
    if weight is None or weight.dim() != 1:
        return False
    # Fixed numbers: a random generator that is asked here would give every later sample of the engine another value.
    steps = torch.linspace(-1, 1, 4 * weight.numel(), device=device or weight.device, dtype=torch.float32)
    x, y = ((steps * factor).cos().reshape(4, -1).to(weight.dtype) for factor in (7.0, 11.0))
    # Offloaded weights may be on the CPU, or on their way to where the layer runs.
    held = {name: torch.ones_like(value, device=steps.device) for name, value in norm.named_parameters()}
    call = functools.partial(torch.func.functional_call, norm, held)
    try:
        with torch.inference_mode():
            made = call((x.clone(), y.clone()))
            plain = call((x + y).clone())
    except Exception:
        return False
    if not isinstance(made, tuple) or len(made) != 2:
        return False
    close = torch.finfo(weight.dtype).eps * 8
    pairs = ((made[0], plain), (made[1], x + y))
    return all(torch.allclose(a.float(), b.float(), rtol=close, atol=close) for a, b in pairs)
