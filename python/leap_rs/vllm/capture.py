"""Reads rows of the hidden state out of a decoder layer while the model runs.

The reading is an operator of PyTorch with nothing but static buffers, so that it works where Python runs in every step,
inside what torch.compile makes, and inside a CUDA graph, where only its kernels are replayed: it picks the rows whose
numbers stand in one buffer and leaves them in another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from leap_rs import __version__

Rows = dict[str, npt.NDArray[Any]]

OPERATOR = "leap_rs::capture"
_MARK = "leap_tap"


@dataclass(frozen=True)
class Parcel:
    """Rows on their way to the CPU."""

    request_ids: tuple[str, ...]
    host: torch.Tensor
    arrived: Any
    """CUDA event after the copy; None where there was nothing to wait for."""

    def rows(self) -> Rows:
        """The row (d,) of each request, in float16 or float32; waits for the copy."""
        if self.arrived is not None:
            self.arrived.synchronize()
        host = self.host if self.host.dtype in (torch.float16, torch.float32) else self.host.float()
        return dict(zip(self.request_ids, np.array(host.numpy()), strict=True))


class Tap:
    """The static buffers of one tapped layer.

    Args:
        rows: The most rows that a step can ask for, one a request.
        width: Hidden size d.
        dtype: The model's.
        device: The model's.
    """

    def __init__(self, rows: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
        self._index = torch.zeros(rows, dtype=torch.int64, device=device)
        self._rows = torch.zeros((rows, width), dtype=dtype, device=device)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._request_ids: tuple[str, ...] = ()
        self._parcel: Parcel | None = None

    def aim(
        self, request_ids: Sequence[str], places: Sequence[int], offsets: Sequence[int], starts: torch.Tensor
    ) -> None:
        """Before the forward: asks for the row at `offsets` after the start of each request, the `places`-th of the batch.

        Args:
            request_ids: Whose rows they are.
            places: Their places in the batch.
            offsets: Tokens from the start of a request's part of this step to the wanted one.
            starts: On the device: where each request's tokens start in the batch.
        """
        self._request_ids, self._parcel = tuple(request_ids), None
        if not request_ids:
            return
        picked = torch.tensor([places, offsets], dtype=torch.int64, pin_memory=self._stream is not None)
        picked = picked.to(self._index.device, non_blocking=True)
        self._index[: len(request_ids)] = starts[picked[0]] + picked[1]
        # Should the operator not run in this step, its rows must not pass for states.
        self._rows[: len(request_ids)] = torch.nan

    def read(self, hidden_states: torch.Tensor, residual: torch.Tensor) -> None:
        """Within the forward: picks the rows."""
        # Numbers left from a larger batch may lie past the end of this one, and nobody reads the rows picked for them. Should
        # one that is read lie there, it must not pass for another request's state.
        index = self._index.clamp(0, hidden_states.shape[0] - 1)
        torch.add(hidden_states.index_select(0, index), residual.index_select(0, index), out=self._rows)
        self._rows.masked_fill_((index != self._index).unsqueeze(1), torch.nan)
        if self._request_ids and self._stream is not None and not torch.cuda.is_current_stream_capturing():
            self._parcel = self._send()

    def collect(self) -> Parcel | None:
        """After the forward: the rows, in a parcel that may still be on its way."""
        if not self._request_ids:
            return None
        # A replayed graph ran the kernels of `read` and not its Python.
        parcel = self._parcel or self._send()
        self._request_ids, self._parcel = (), None
        if parcel.arrived is not None:
            torch.cuda.current_stream().wait_event(parcel.arrived)
        return parcel

    def _send(self) -> Parcel:
        rows = self._rows[: len(self._request_ids)]
        if self._stream is None:
            return Parcel(self._request_ids, rows.cpu().clone(), None)
        host = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=True)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            host.copy_(rows, non_blocking=True)
            # As vLLM's own: who waits for one that does not block spins, on the core that the scheduler needs.
            arrived = torch.cuda.Event(blocking=True)
            arrived.record()
        return Parcel(self._request_ids, host, arrived)


_taps: dict[str, Tap] = {}


def _capture(hidden_states: torch.Tensor, residual: torch.Tensor, tap: str) -> None:
    _taps[tap].read(hidden_states, residual)


def _capture_shape(hidden_states: torch.Tensor, residual: torch.Tensor, tap: str) -> None:  # noqa: ARG001
    return None


_library = torch.library.Library("leap_rs", "FRAGMENT")
# It changes no argument. Said so, a compiler would see an operator without any effect and drop it; this way it keeps its
# place, and no copy is made because nobody needs the value from before.
_library.define("capture(Tensor(a!) hidden_states, Tensor residual, str tap) -> ()")
_library.impl("capture", _capture, "CompositeExplicitAutograd")
_library._register_fake("capture", _capture_shape)


def install(layer: nn.Module, name: str, tap: Tap) -> None:
    """Puts the operator behind a layer. A layer that has it keeps it and gets the new buffers."""
    _taps[name] = tap
    if hasattr(layer, _MARK):
        return

    def capture(layer: nn.Module, args: Any, output: Any) -> None:  # noqa: ARG001
        torch.ops.leap_rs.capture(output[0], output[1], name)

    # A hook and no forward of our own: where weights are offloaded vLLM puts another forward on the instance, hides that of
    # the class with it, and takes off what is put over it.
    layer.register_forward_hook(capture)
    setattr(layer, _MARK, name)


def fingerprint(name: str) -> str:
    """What must be part of the key of vLLM's compile cache, where a graph without the operator may lie already."""
    return f"{name} {__version__}"
