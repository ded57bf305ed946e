"""What is refused by vLLM's configuration alone, and that each of vLLM's processes is told before it loads a model."""

from __future__ import annotations

import copy
from typing import Any

import pytest

pytest.importorskip("vllm.version")

import vllm
from fake_setup import Setup, config_of
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.executor.abstract import Executor
from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher
from vllm.v1.worker.worker_base import WorkerWrapperBase

from leap_rs import ConfigError
from leap_rs.vllm import plugin
from leap_rs.vllm.compat import version_of
from leap_rs.vllm.start import checked

pytestmark = pytest.mark.vllm

OURS = "leap_rs.vllm.LeapScheduler"


def config(leap: object = None, **parallel: Any) -> Any:
    """vLLM's configuration of a run with our scheduler."""
    made = config_of(Setup())
    made.additional_config = {"leap": {} if leap is None else leap}
    made.scheduler_config.scheduler_cls = OURS
    made.parallel_config = copy.copy(made.parallel_config)
    for name, value in parallel.items():
        setattr(made.parallel_config, name, value)
    return made


def refusal(made: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        checked(made)
    line = str(caught.value)
    assert "\n" not in line
    return line


def test_what_is_right_is_not_refused() -> None:
    assert checked(config({"layer": 1, "levers": ["queue"]})).layer == 1


@pytest.mark.parametrize("backend", ["external_launcher", ExecutorWithExternalLauncher])
def test_ranks_that_each_schedule_for_themselves_are_refused(backend: Any) -> None:
    assert "'external_launcher': every rank schedules for itself" in refusal(
        config(distributed_executor_backend=backend)
    )


def test_a_layer_that_the_model_has_not_is_refused() -> None:
    assert refusal(config({"layer": 2})).endswith("layer: expected 1 to 1 for a model of 2 decoder layers, got 2")


@pytest.mark.parametrize(("layer", "refused"), [(20, True), (21, True), (22, False), (23, False), (None, True)])
def test_a_layer_of_another_rank_of_a_pipeline_is_refused(layer: int | None, refused: bool) -> None:
    """Of 24 layers the last of eight ranks has 21, 22 and 23, counted from 0; 5/6 of the depth is 20."""
    made = config({} if layer is None else {"layer": layer}, pipeline_parallel_size=8)
    made.model_config = copy.copy(made.model_config)
    made.model_config.hf_text_config = copy.copy(made.model_config.hf_text_config)
    made.model_config.hf_text_config.num_hidden_layers = 24
    if refused:
        assert f"layer {layer or 20} is not on the pipeline's last rank" in refusal(made)
        assert refusal(made).endswith("choose 22 to 23")
    else:
        checked(made)


def test_a_rank_with_one_layer_has_none_to_read() -> None:
    assert refusal(config(pipeline_parallel_size=2)).endswith(
        "last rank, which answers the scheduler, and has no two of them"
    )


def test_a_scheduler_that_vllm_would_have_chosen_by_the_model_is_not_replaced() -> None:
    """vLLM itself chooses, where it is left to."""
    diffusion = pytest.importorskip("vllm.config.diffusion")
    made = config()
    made.diffusion_config = diffusion.DiffusionConfig(canvas_length=8)
    made.scheduler_config.scheduler_cls = None
    made.__post_init__()
    chosen = made.scheduler_config.get_scheduler_cls()
    version = version_of(vllm.__version__)
    assert version is not None
    assert (chosen in (Scheduler, AsyncScheduler)) == (version < (0, 32))
    made.scheduler_config.scheduler_cls = OURS
    assert "vLLM has a scheduler of its own for them" in refusal(made)


class ReachedError(Exception):
    """What comes after the refusal has begun."""


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own classes with the plugin; what they would do next says that it was reached."""

    def reached(*_: Any, **__: Any) -> None:
        raise ReachedError

    for owner, name in (
        (Executor, "__init__"),
        (WorkerWrapperBase, "init_device"),
        (EngineArgs, "create_engine_config"),
    ):
        original = getattr(owner, name)
        monkeypatch.setattr(owner, name, getattr(original, "__wrapped__", original))
    monkeypatch.setattr(Executor, "__init__", reached)
    monkeypatch.setattr(WorkerWrapperBase, "init_device", reached)
    monkeypatch.setattr(EngineArgs, "create_engine_config", lambda self: self)
    plugin.register()


WRONG = [
    (lambda: config({"levers": ["all"]}), "additional_config: leap: levers: unknown lever 'all'"),
    (lambda: config("queue"), "additional_config: leap: expected an object"),
    (lambda: config(distributed_executor_backend="external_launcher"), "every rank schedules for itself"),
    (lambda: config(enable_dbo=True), "microbatches"),
]


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize(("make", "line"), WRONG, ids=[line for _, line in WRONG])
def test_each_process_refuses_before_it_goes_on(make: Any, line: str) -> None:
    made = make()
    worker = WorkerWrapperBase.__new__(WorkerWrapperBase)
    worker.vllm_config = made
    steps = [
        lambda: EngineArgs.create_engine_config(made),
        lambda: Executor.__init__(object(), made),
        worker.init_device,
    ]
    for step in steps:
        with pytest.raises(ConfigError, match=line):
            step()


@pytest.mark.usefixtures("registered")
def test_a_run_that_does_not_ask_is_not_looked_at() -> None:
    stock = config(distributed_executor_backend="external_launcher", enable_dbo=True)
    stock.additional_config = {}
    stock.scheduler_config.scheduler_cls = None
    assert EngineArgs.create_engine_config(stock) is stock
    with pytest.raises(ReachedError):
        Executor.__init__(object(), stock)
