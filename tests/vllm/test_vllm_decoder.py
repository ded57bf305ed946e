"""Which layer is read, and which models are refused and why. The layers here are small copies of vLLM's conventions."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from leap_rs import ConfigError  # noqa: E402
from leap_rs.vllm.decoder import find_site, layer_number  # noqa: E402

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
