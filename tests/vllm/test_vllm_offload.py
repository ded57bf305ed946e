"""Weights offloaded to the CPU: vLLM's own offloaders put a forward of theirs on a layer, which is tapped all the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm.model_executor.offloader")

from leap_rs.vllm.capture import Tap, install  # noqa: E402

pytestmark = pytest.mark.vllm

WIDTH, ROWS = 8, 5


class Place(str):
    """A device that says it is an accelerator and is the CPU."""

    __slots__ = ()
    type = "cuda"


class Held(torch.nn.Parameter):
    """A weight that says it is on an accelerator, until it is offloaded: there is none where these tests run."""

    @property
    def device(self) -> Any:
        return Place("cpu")


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = Held(torch.linspace(1, 2, WIDTH), requires_grad=False)

    def forward(self, hidden_states: Any, residual: Any) -> Any:
        return hidden_states * self.weight, residual - 1


def moved(layer: torch.nn.Module) -> torch.nn.Module:
    """Offloaded by what moves weights in each call."""
    from vllm.model_executor.offloader.uva import UVAOffloader

    offloader = UVAOffloader(cpu_offload_max_bytes=1 << 20)
    offloader.uva_offloading = offloader.pin_memory = False
    (made,) = offloader.wrap_modules(iter([layer]))
    assert offloader.cpu_offload_bytes == WIDTH * 4
    return made


def prefetched(layer: torch.nn.Module) -> torch.nn.Module:
    """With the forward of what fetches weights ahead; its streams and buffers need CUDA."""
    from vllm.model_executor.offloader.prefetch import PrefetchOffloader

    offloader = PrefetchOffloader.__new__(PrefetchOffloader)
    offloader.prefetch_step, offloader.module_offloaders = 1, [layer]
    offloader._hook_module_forward(0, layer)
    return layer


@pytest.mark.parametrize(("offload", "compiled"), [(moved, False), (prefetched, False), (prefetched, True)])
def test_rows_of_a_layer_with_another_forward_are_its_states(
    offload: Callable[[torch.nn.Module], torch.nn.Module], compiled: bool
) -> None:
    layer = offload(Layer())
    assert "forward" in vars(layer), "else there is nothing to test"
    tap = Tap(ROWS, WIDTH, torch.float32, torch.device("cpu"))
    install(layer, f"{offload.__name__} {compiled}", tap)
    if compiled:
        layer.compile(backend="aot_eager", fullgraph=True, dynamic=True)
    rng = np.random.default_rng(0)
    for tokens in (6, 9, 4):
        hidden, residual = (torch.from_numpy(rng.normal(size=(tokens, WIDTH)).astype(np.float32)) for _ in range(2))
        tap.aim(("a", "b"), (0, 1), (1, 0), torch.tensor([0, 3]))
        state = (hidden * layer.weight + residual - 1).numpy()
        layer(hidden, residual)
        parcel = tap.collect()
        assert parcel is not None
        np.testing.assert_allclose(parcel.rows()["a"], state[1], rtol=1e-6)
        np.testing.assert_allclose(parcel.rows()["b"], state[3], rtol=1e-6)
