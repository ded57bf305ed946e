"""Which layer is read, and which models are refused and why. The layers here are small copies of vLLM's conventions."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from leap_rs import ConfigError  # noqa: E402
from leap_rs.vllm.decoder import find_site, layer_number, unreadable  # noqa: E402

Tensor = torch.Tensor
WIDTH = 16


class AddingNorm(torch.nn.Module):
    """As vLLM's RMSNorm: with a residual it adds first, and returns the sum too."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.linspace(0.5, 2, WIDTH))

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        if residual is not None:
            x = x + residual
        normed = torch.nn.functional.rms_norm(x, (WIDTH,), self.weight, 1e-6)
        return normed if residual is None else (normed, x)


class PassingNorm(AddingNorm):
    """As the LayerNorm of vLLM's Cohere, which hands the residual on as it is."""

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        normed = torch.nn.functional.rms_norm(x, (WIDTH,), self.weight, 1e-6)
        return normed if residual is None else (normed, residual)


class Layer(torch.nn.Module):
    norm = AddingNorm

    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm = self.norm()

    def forward(self, positions: Tensor, hidden_states: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        if residual is None:
            residual = hidden_states
            hidden_states = self.input_layernorm(hidden_states)
        else:
            hidden_states, residual = self.input_layernorm(hidden_states, residual)
        return hidden_states, residual


class PassingLayer(Layer):
    norm = PassingNorm


class PlainLayer(Layer):
    def forward(self, hidden_states: Tensor) -> Tensor:
        return hidden_states


class NothingLeftLayer(Layer):
    def forward(self, hidden_states: Tensor, residual: Tensor | None) -> tuple[Tensor, None]:
        hidden_states, residual = self.input_layernorm(hidden_states, residual)
        return hidden_states + residual, None


class SummingLayer(Layer):
    def forward(self, hidden_states: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        hidden_states = residual + self.input_layernorm(hidden_states)
        return hidden_states, residual


def reduce_and_norm(hidden_states: Tensor, residual: Tensor, norm: AddingNorm) -> tuple[Tensor, Tensor]:
    """As vLLM's functions that sum over ranks before they call the norm; of one rank."""
    return norm(hidden_states, residual)


class EitherLayer(Layer):
    """As MiniMax-M3: a flag tells whether the layer before has left its sum."""

    left = False

    def forward(self, positions: Tensor, hidden_states: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        if self.left and residual is not None:
            hidden_states, residual = reduce_and_norm(hidden_states, residual, self.input_layernorm)
        elif residual is None:
            residual, hidden_states = hidden_states, self.input_layernorm(hidden_states)
        else:
            hidden_states, residual = self.input_layernorm(hidden_states, residual)
        return hidden_states, residual


class OtherwiseLayer(Layer):
    """As DeepSeek-V3.2: what leaves a sum stands behind what does not."""

    split = False

    def forward(self, positions: Tensor, hidden_states: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        if self.split:
            hidden_states, residual = self.input_layernorm(hidden_states, residual)
        else:
            hidden_states, residual = reduce_and_norm(hidden_states, residual, norm=self.input_layernorm)
        return hidden_states, residual


class HandedLayer(OtherwiseLayer):
    """The same with a method of its own."""

    def forward(self, positions: Tensor, hidden_states: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        if self.split:
            hidden_states, residual = self.input_layernorm(hidden_states, residual)
        else:
            hidden_states, residual = self._reduced(hidden_states, residual, self.input_layernorm)
        return hidden_states, residual

    def _reduced(self, hidden_states: Tensor, residual: Tensor, norm: AddingNorm) -> tuple[Tensor, Tensor]:
        return reduce_and_norm(hidden_states, residual, norm)


class LaterLayer(Layer):
    """As MiniMax-M3 on other cards: the sum that its own attention leaves is no matter of what layers hand on."""

    def forward(self, positions: Tensor, hidden_states: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        hidden_states, residual = self.input_layernorm(hidden_states, residual)
        hidden_states, residual = reduce_and_norm(hidden_states, residual, self.input_layernorm)
        return hidden_states, residual


class TwoNormsLayer(Layer):
    """As Nemotron-NAS: without attention its second norm is the first."""

    attends = True

    def __init__(self) -> None:
        super().__init__()
        self.post_attention_layernorm = AddingNorm()

    def forward(self, positions: Tensor, hidden_states: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        if self.attends:
            hidden_states, residual = self.input_layernorm(hidden_states, residual)
        hidden_states, residual = self.post_attention_layernorm(hidden_states, residual)
        return hidden_states, residual


class PPMissingLayer(torch.nn.Identity):
    """What vLLM puts where another pipeline rank has the layer."""


def model(layer: type[torch.nn.Module], depth: int = 6, missing: tuple[int, ...] = ()) -> torch.nn.Module:
    made = torch.nn.Module()
    made.model = torch.nn.Module()
    made.model.layers = torch.nn.ModuleList(PPMissingLayer() if i in missing else layer() for i in range(depth))
    return made


@pytest.mark.parametrize(("depth", "number"), [(2, 1), (6, 5), (24, 20), (30, 25), (32, 27), (36, 30), (80, 67)])
def test_default_layer_is_at_five_sixths(depth: int, number: int) -> None:
    assert layer_number(depth) == number
    assert layer_number(depth, 1) == 1


@pytest.mark.parametrize("wanted", [0, -1, 6, 7])
def test_layers_that_are_none_are_refused(wanted: int) -> None:
    with pytest.raises(ConfigError, match=rf"layer: expected 1 to 5 .* got {wanted}"):
        find_site(model(Layer), 6, wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_pairs_of_llama_are_read(dtype: torch.dtype) -> None:
    made = model(Layer).to(dtype)
    before = torch.get_rng_state()
    site = find_site(made, 6, 4)
    assert torch.equal(torch.get_rng_state(), before)
    assert site is not None
    assert (site.number, site.name, site.layer) == (4, "model.layers.3", made.model.layers[3])


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (PlainLayer, "PlainLayer does not take hidden_states and residual"),
        (NothingLeftLayer, "NothingLeftLayer does not return .hidden_states, residual."),
        (PassingLayer, "PassingLayer does not begin by adding hidden_states and residual"),
        (SummingLayer, "SummingLayer does not begin by adding hidden_states and residual"),
    ],
)
def test_other_conventions_are_refused(layer: type[torch.nn.Module], reason: str) -> None:
    with pytest.raises(ConfigError, match=f"cannot read the hidden states of Module: its decoder layer {reason}"):
        find_site(model(layer), 6)


def test_layers_whose_weights_are_offloaded_are_read() -> None:
    assert find_site(model(Layer).to("meta"), 6, device=torch.device("cpu")) is not None
    with pytest.raises(ConfigError, match="PassingLayer does not begin by adding"):
        find_site(model(PassingLayer).to("meta"), 6, device=torch.device("cpu"))


@pytest.mark.parametrize("layer", [EitherLayer, OtherwiseLayer, HandedLayer])
def test_sums_that_are_left_to_the_next_layer_are_refused_where_there_are_ranks(layer: type[torch.nn.Module]) -> None:
    assert find_site(model(layer), 6) is not None
    reason = f"its decoder layer {layer.__name__} leaves a sum over tensor-parallel ranks to the layer that follows it"
    with pytest.raises(ConfigError, match=f"cannot read the hidden states of Module: {reason}"):
        find_site(model(layer), 6, ranks=2)


@pytest.mark.parametrize("layer", [Layer, LaterLayer, TwoNormsLayer])
def test_layers_that_hand_on_what_is_whole_are_read_with_ranks(layer: type[torch.nn.Module]) -> None:
    assert find_site(model(layer), 6, ranks=2) is not None


class AnyLayer(torch.nn.Module):
    """Of vLLM's own decoder layers it gets the forward, and has a norm wherever that looks for one."""

    def __getattr__(self, name: str) -> AddingNorm:
        return AddingNorm()


def vllm_layers() -> Iterator[tuple[str, torch.nn.Module]]:
    """Each forward in vLLM's source that takes the pair, in a layer: many a module can only be imported where its device is."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    root = Path(spec.origin).parent
    for file in sorted([*root.glob("model_executor/models/**/*.py"), *root.glob("models/**/*.py")]):
        source = file.read_text()
        for made in ast.walk(ast.parse(source)) if "residual" in source else ():
            for forward in made.body if isinstance(made, ast.ClassDef) else ():
                if isinstance(forward, ast.FunctionDef) and forward.name == "forward":
                    names = {argument.arg for argument in [*forward.args.args, *forward.args.kwonlyargs]}
                    if {"hidden_states", "residual"} <= names:
                        yield f"{file.relative_to(root)} {made.name}", layer_of(made.name, forward, file)


def layer_of(name: str, forward: ast.FunctionDef, file: Path) -> torch.nn.Module:
    forward.decorator_list, forward.returns = [], None
    for argument in ast.walk(forward.args):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    scope: dict[str, Any] = {}
    # Under its own place in its own file, so that its source is at hand.
    exec(compile(ast.Module([forward], []), str(file), "exec"), scope)
    return type(name, (AnyLayer,), {"forward": scope["forward"]})()


def test_of_vllms_own_layers_those_that_leave_a_sum_are_refused_where_there_are_ranks() -> None:
    pytest.importorskip("vllm.version")
    layers = dict(vllm_layers())
    read = {name for name, layer in layers.items() if unreadable(layer, layer) is None}
    refused = {name: unreadable(layers[name], layers[name], ranks=2) for name in read}
    # Of AMD's MiniMax-M3 only the attention leaves its sum, and to the same layer.
    leaving = {
        "models/deepseek_v32/nvidia/model.py DeepseekV32DecoderLayer",
        "models/minimax_m3/nvidia/model.py MiniMaxM3DecoderLayer",
    }
    assert {name for name, reason in refused.items() if reason} == leaving & set(layers)
    for name in leaving & read:
        assert "leaves a sum over tensor-parallel ranks" in str(refused[name])
    families = ("llama", "qwen2", "qwen3_moe", "deepseek_v2", "mixtral", "gemma3", "nemotron_nas")
    for family in families:
        assert any(f"/{family}.py" in name for name in read), family


def test_layers_whose_source_is_not_at_hand_are_refused() -> None:
    scope: dict[str, type[torch.nn.Module]] = {"Layer": Layer}
    exec(
        "class Made(Layer):\n    def forward(self, hidden_states, residual):\n        return hidden_states, residual",
        scope,
    )
    with pytest.raises(ConfigError, match="the source of its decoder layer Made is not at hand"):
        find_site(model(scope["Made"]), 6)


def test_a_model_without_the_list_of_layers_is_refused() -> None:
    with pytest.raises(ConfigError, match="no list of 7 decoder layers"):
        find_site(model(Layer), 7)


def test_pipelines_are_read_on_their_last_rank() -> None:
    assert find_site(model(Layer, missing=(3, 4, 5)), 6, 2) is None
    site = find_site(model(Layer, missing=(0, 1, 2)), 6, 5)
    assert site is not None
    assert site.name == "model.layers.4"
    with pytest.raises(ConfigError, match=r"layer 3 is not on the pipeline's last rank.* choose 4 to 5"):
        find_site(model(Layer, missing=(0, 1, 2)), 6, 3)
