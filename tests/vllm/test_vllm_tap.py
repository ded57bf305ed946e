"""The tap's buffers and its operator, without an engine, against indexing written out."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from leap_rs import ConfigError  # noqa: E402
from leap_rs.vllm.capture import Parcel, Tap, install  # noqa: E402
from leap_rs.vllm.transport import _attach, connect  # noqa: E402

WIDTH, ROWS = 8, 4


class Layer(torch.nn.Module):
    def forward(self, hidden_states: Any, residual: Any) -> Any:
        return hidden_states * 2, residual - 1


class Later:
    """An output of vLLM's that is asked for when its tokens have arrived."""

    def __init__(self, output: SimpleNamespace) -> None:
        self.output = output

    def get_output(self) -> SimpleNamespace:
        return self.output


class Runner:
    """The part of a model runner that the transport talks to; runs one tapped layer over a batch."""

    def __init__(self, layer: torch.nn.Module, asynchronous: bool) -> None:
        self.layer, self.asynchronous = layer, asynchronous
        self.input_batch = SimpleNamespace(req_ids=[])
        self.query_start_loc = SimpleNamespace(gpu=torch.zeros(ROWS + 1, dtype=torch.int32))

    def _prepare_inputs(self, step: Any, tokens: np.ndarray) -> str:
        self.input_batch.req_ids = list(step.order)
        self.query_start_loc.gpu[1 : len(tokens) + 1] = torch.from_numpy(np.cumsum(tokens))
        return "prepared"

    def run(self, step: Any, hidden_states: Any, residual: Any) -> Any:
        tokens = np.array([step.num_scheduled_tokens[name] for name in step.order])
        assert self._prepare_inputs(step, tokens) == "prepared"
        self.layer(hidden_states, residual)
        return self.sample_tokens(None)

    def sample_tokens(self, grammar: None) -> Any:  # noqa: ARG002
        output = SimpleNamespace(req_ids=list(self.input_batch.req_ids))
        return Later(output) if self.asynchronous else output


def tapped(asynchronous: bool = False, dtype: torch.dtype = torch.float32) -> Runner:
    layer = Layer()
    tap = Tap(ROWS, WIDTH, dtype, torch.device("cpu"))
    install(layer, "layer", tap)
    runner = Runner(layer, asynchronous)
    connect(runner, tap)
    connect(runner, tap)
    return runner


def step(tokens: dict[str, int], positions: dict[str, int] | None, order: list[str] | None = None) -> SimpleNamespace:
    made = SimpleNamespace(num_scheduled_tokens=tokens, order=order or list(tokens))
    if positions is not None:
        made.leap_positions = positions
    return made


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_rows_follow_the_order_of_the_batch(asynchronous: bool, compiled: bool) -> None:
    runner = tapped(asynchronous)
    if compiled:
        runner.layer.compile(backend="aot_eager", fullgraph=True, dynamic=True)
    rng = np.random.default_rng(0)
    # A large batch first, so that its numbers lie past the end of the ones that follow.
    for tokens, positions, given in [
        ({"a": 30, "b": 1, "c": 20}, {"a": 29, "c": 4}, ["c", "b", "a"]),
        ({"b": 1}, {}, None),
        ({"d": 3, "b": 1}, {"d": 2, "gone": 0}, None),
        ({"b": 1}, None, None),
        ({"e": 1, "b": 1}, {"e": 0, "b": 0}, ["b", "e"]),
    ]:
        order = given or list(tokens)
        total = sum(tokens.values())
        hidden, residual = (torch.from_numpy(rng.normal(size=(total, WIDTH)).astype(np.float32)) for _ in range(2))
        output = runner.run(step(tokens, positions, order), hidden, residual)
        output = output.get_output() if asynchronous else output
        starts = dict(zip(order, np.cumsum([0, *(tokens[name] for name in order)]), strict=False))
        state = (hidden * 2 + residual - 1).numpy()
        expected = {name: state[starts[name] + p] for name, p in (positions or {}).items() if name in tokens}
        rows = getattr(output, "leap_rows", {})
        assert set(rows) == set(expected)
        for name, row in expected.items():
            np.testing.assert_allclose(rows[name], row, rtol=1e-6)


def test_rows_of_a_step_survive_the_next_ones() -> None:
    runner = tapped(asynchronous=True)
    ones = torch.ones((1, WIDTH))
    first = runner.run(step({"a": 1}, {"a": 0}), ones, ones)
    second = runner.run(step({"b": 1}, {"b": 0}), ones * 5, ones)
    np.testing.assert_array_equal(second.get_output().leap_rows["b"], np.full(WIDTH, 10, np.float32))
    np.testing.assert_array_equal(first.get_output().leap_rows["a"], np.full(WIDTH, 2, np.float32))


@pytest.mark.parametrize(
    ("dtype", "expected"), [("float16", np.float16), ("bfloat16", np.float32), ("float32", np.float32)]
)
def test_rows_are_in_types_that_numpy_has(dtype: str, expected: type) -> None:
    runner = tapped(dtype=getattr(torch, dtype))
    ones = torch.ones((2, WIDTH), dtype=getattr(torch, dtype))
    row = runner.run(step({"a": 2}, {"a": 1}), ones, ones).leap_rows["a"]
    assert row.dtype == expected
    np.testing.assert_array_equal(row, np.full(WIDTH, 2, expected))


def test_rows_are_not_numbers_where_the_operator_did_not_run() -> None:
    runner = tapped()
    ones = torch.ones((1, WIDTH))
    runner.run(step({"a": 1}, {"a": 0}), ones, ones)
    runner.layer = Layer()
    assert np.isnan(runner.run(step({"b": 1}, {"b": 0}), ones, ones).leap_rows["b"]).all()


@pytest.mark.parametrize("outside", [3, 7, -1])
def test_a_number_outside_the_rows_gives_no_other_request_s_state(outside: int) -> None:
    layer = Layer()
    tap = Tap(ROWS, WIDTH, torch.float32, torch.device("cpu"))
    install(layer, "layer", tap)
    tap.aim(("a", "b"), (0, 1), (1, 0), torch.tensor([0, outside]))
    layer(torch.ones((3, WIDTH)), torch.ones((3, WIDTH)))
    parcel = tap.collect()
    assert parcel is not None
    np.testing.assert_array_equal(parcel.rows()["a"], np.full(WIDTH, 2, np.float32))
    assert np.isnan(parcel.rows()["b"]).all()


def test_a_layer_is_tapped_once() -> None:
    layer, ones = Layer(), torch.ones((1, WIDTH))
    taps = [Tap(ROWS, WIDTH, torch.float32, torch.device("cpu")) for _ in range(2)]
    for tap in taps:
        install(layer, "layer", tap)
        tap.aim(("a",), (0,), (0,), torch.tensor([0]))
    layer(ones, ones)
    first, second = (tap.collect() for tap in taps)
    assert first is not None
    assert second is not None
    assert np.isnan(first.rows()["a"]).all()
    np.testing.assert_array_equal(second.rows()["a"], np.full(WIDTH, 2, np.float32))
    assert len(layer._forward_hooks) == 1


def test_an_unknown_model_runner_is_refused() -> None:
    with pytest.raises(ConfigError, match="SimpleNamespace has no prepare_inputs"):
        connect(SimpleNamespace(sample_tokens=None), Tap(ROWS, WIDTH, torch.float32, torch.device("cpu")))


def _of_the_first_runner() -> Any:
    outputs = pytest.importorskip("vllm.v1.outputs")
    runner = pytest.importorskip("vllm.v1.worker.gpu_model_runner")
    # Made by hand: its constructor copies on a stream of the GPU.
    made = object.__new__(runner.AsyncGPUModelRunnerOutput)
    tokens = torch.tensor([[7]])
    vars(made).update(
        _model_runner_output=outputs.ModelRunnerOutput(req_ids=["a"], req_id_to_index={"a": 0}),
        _invalid_req_indices=[],
        async_copy_ready_event=SimpleNamespace(synchronize=lambda: None),
        _sampled_token_ids=tokens,
        sampled_token_ids_cpu=tokens,
        vocab_size=10,
        _logprobs_tensors=None,
        _logprobs_tensors_cpu=None,
        _num_nans=None,
        _num_nans_cpu=None,
        _has_fault=None,
        _routed_experts=None,
        _routed_experts_cpu=None,
    )
    return made


def _of_the_second_runner() -> Any:
    outputs = pytest.importorskip("vllm.v1.outputs")
    made = object.__new__(pytest.importorskip("vllm.v1.worker.gpu.async_utils").AsyncOutput)
    vars(made).update(
        model_runner_output=outputs.ModelRunnerOutput(req_ids=["a"], req_id_to_index={"a": 0}),
        sampler_output=SimpleNamespace(sampled_token_ids=torch.tensor([[7]])),
        num_sampled_tokens=torch.tensor([1]),
        pending_aux_output=None,
        copy_event=SimpleNamespace(synchronize=lambda: None),
        sampled_token_ids=np.array([[7]]),
        num_sampled_tokens_np=np.array([1]),
        logprobs_tensors=None,
        num_nans=None,
        sampling_mask_tensors=None,
        prompt_logprobs_dict={},
        prompt_token_id_logprobs_dict={},
        _has_fault=None,
        routed_experts_cpu=None,
    )
    return made


@pytest.mark.vllm
@pytest.mark.parametrize("make", [_of_the_first_runner, _of_the_second_runner])
@pytest.mark.parametrize("asked", [True, False])
def test_nothing_but_its_reader_holds_an_asynchronous_output(make: Any, asked: bool) -> None:
    """It holds tensors on the GPU, which nobody waits for the garbage collector with."""
    module = pytest.importorskip("vllm.v1.outputs")
    # What warns while it is imported keeps the frame that it is first imported from.
    make()
    parcel = Parcel(("a",), torch.ones((1, WIDTH)), None)
    gc.disable()
    try:
        output = _attach(make(), parcel)
        assert isinstance(output, module.AsyncModelRunnerOutput)
        gone = weakref.ref(output)
        # As vLLM's executor does, which hands on the method alone.
        get_output = output.get_output
        del output
        assert gone() is not None
        if asked:
            found = get_output()
            assert found.sampled_token_ids == [[7]]
            np.testing.assert_array_equal(found.leap_rows["a"], np.ones(WIDTH, np.float32))
        del get_output
        assert gone() is None
    finally:
        gc.enable()
