"""When the plugin acts at all, what it refuses, and how the table of embeddings gets across, without an engine."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from leap_rs import ConfigError, LeapError, PromptFeatures
from leap_rs.vllm import embedding, plugin
from leap_rs.vllm.given import given


def config(scheduler: Any = None, additional: Any = None, **parallel: Any) -> SimpleNamespace:
    return SimpleNamespace(
        model_config=SimpleNamespace(runner_type="generate"),
        scheduler_config=SimpleNamespace(scheduler_cls=scheduler),
        additional_config={} if additional is None else additional,
        parallel_config=SimpleNamespace(**{"tensor_parallel_size": 1, "data_parallel_index": 0, **parallel}),
        compilation_config=SimpleNamespace(pass_config=SimpleNamespace(enable_sp=True), splitting_ops=None),
        instance_id="17",
    )


class Foreign:
    pass


OURS = type("LeapScheduler", (), {"__module__": "leap_rs.vllm.scheduler"})


@pytest.mark.parametrize("scheduler", [None, "vllm.v1.core.sched.scheduler.Scheduler", Foreign])
@pytest.mark.parametrize("additional", [None, {"other": 1}, object()])
def test_a_run_that_does_not_ask_is_left_alone(scheduler: Any, additional: Any) -> None:
    assert not plugin.selected(config(scheduler, additional))


@pytest.mark.parametrize("scheduler", ["leap_rs.vllm.LeapScheduler", OURS])
def test_the_scheduler_alone_asks(scheduler: Any) -> None:
    assert plugin.selected(config(scheduler))


def test_options_alone_ask_but_not_for_pooling() -> None:
    made = config(None, {"leap": {}})
    assert plugin.selected(made)
    made.model_config.runner_type = "pooling"
    assert not plugin.selected(made)


@pytest.mark.parametrize(
    ("parallel", "reason"),
    [
        ({"enable_dbo": True}, "microbatches"),
        ({"ubatch_size": 2}, "microbatches"),
        ({"prefill_context_parallel_size": 2}, "prefill context parallelism"),
        ({"tensor_parallel_size": 2}, "enable_sp"),
        ({"use_sequence_parallel_moe": True}, "sequence-parallel experts"),
    ],
)
def test_batches_that_are_split_are_refused(parallel: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        plugin.check_parallel(config(**parallel))
    plugin.check_parallel(config())


def test_the_compile_cache_and_the_splitting_of_graphs() -> None:
    users = {"leap": {"levers": "queue"}, "other": 1}
    made = config(additional=users)
    plugin._mark_compilation(made, "model.layers.3 1.0", "leap_rs::capture")
    assert made.additional_config == {"other": 1, "leap_tap": "model.layers.3 1.0"}
    assert given(made) == {"levers": "queue"}
    assert users == {"leap": {"levers": "queue"}, "other": 1}
    assert made.compilation_config.splitting_ops is None
    made.compilation_config.splitting_ops = ["vllm::unified_attention_with_output"]
    for _ in range(2):
        plugin._mark_compilation(made, "model.layers.3 1.0", "leap_rs::capture")
    assert given(made) == {"levers": "queue"}
    assert made.compilation_config.splitting_ops == ["vllm::unified_attention_with_output", "leap_rs::capture"]


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    # Once vLLM is imported, its loggers hand nothing on to those above.
    embedding.LOG.addHandler(caplog.handler)
    yield caplog
    embedding.LOG.removeHandler(caplog.handler)


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def test_table_reaches_the_scheduler_once(directory: Path, log: pytest.LogCaptureFixture) -> None:
    path = embedding.table_path(config())
    assert path.parent.parent == directory
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert path != embedding.table_path(config(data_parallel_index=1))
    features = PromptFeatures(np.random.default_rng(0).normal(size=(50, 8)).astype(np.float32))
    features.save(path)
    loaded = embedding.load_table(config())
    assert not list(path.parent.iterdir())
    assert loaded is not None
    np.testing.assert_array_equal(loaded.pool([3, 4, 49]), features.pool([3, 4, 49]))
    assert embedding.load_table(config()) is None
    assert "no prompt features but the length" in log.text


def test_a_broken_table_is_a_warning(directory: Path, log: pytest.LogCaptureFixture) -> None:  # noqa: ARG001
    embedding.table_path(config()).write_bytes(b"\x10\x00")
    assert embedding.load_table(config()) is None
    assert "no prompt features but the length" in log.text


def _open_to_all(path: Path) -> None:
    path.mkdir()
    path.chmod(0o777)


def _of_another(path: Path) -> None:
    path.mkdir()
    try:
        os.chown(path, os.getuid() + 1, -1)
    except PermissionError:
        pytest.skip("only root can give a directory away")


def _link(path: Path) -> None:
    (path.parent / "elsewhere").mkdir(mode=0o700)
    path.symlink_to(path.parent / "elsewhere")


@pytest.mark.parametrize("spoil", [_open_to_all, _of_another, _link, Path.touch])
def test_a_place_that_is_not_ours_costs_the_table_alone(
    directory: Path, log: pytest.LogCaptureFixture, spoil: Callable[[Path], None]
) -> None:
    spoil(directory / f"leap-rs-{os.getuid()}")
    with pytest.raises(LeapError, match=f"leap-rs-{os.getuid()}: (is not a directory that only|cannot be made)"):
        embedding.table_path(config())
    assert embedding.load_table(config()) is None
    # Once for each of the two handlers that may be there.
    (message,) = {record.getMessage() for record in log.records}
    assert message.startswith("leap: no prompt features but the length: ")


def test_without_any_place_the_table_is_missing(monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture) -> None:
    # Nobody can make anything there, root neither.
    monkeypatch.setattr("tempfile.tempdir", "/proc")
    assert embedding.load_table(config()) is None
    assert "no prompt features but the length: /proc/leap-rs-" in log.text


class Embedding:
    """A model that knows its embedding only by looking tokens up, as a sharded or quantised one does."""

    def __init__(self, table: Any) -> None:
        self.table, self.asked = table, 0

    def parameters(self) -> Any:
        return iter([self.table])

    def modules(self) -> Any:
        return iter([])

    def embed_input_ids(self, ids: Any) -> Any:
        self.asked += len(ids)
        return self.table[ids] * 2


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_worker_writes_what_numpy_projects(dtype: str, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    table = torch.arange(60, dtype=torch.float32).reshape(20, 3).to(getattr(torch, dtype))
    model = Embedding(table)
    embedding.write_table(model, 20, tmp_path / "table", 7)
    expected = PromptFeatures(table.float().numpy() * 2).pool(np.arange(20))
    np.testing.assert_allclose(PromptFeatures.load(tmp_path / "table").pool(np.arange(20)), expected, rtol=1e-3)
    embedding.write_table(model, 20, None, 7)
    assert model.asked == 40


@pytest.mark.vllm
def test_the_table_of_a_model_with_adapters_is_that_of_its_own_embedding(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    layers = pytest.importorskip("vllm.lora.layers")
    base = torch.nn.Embedding(20, 3)

    class Model(torch.nn.Module):
        """Wrapped by vLLM's own class, with no mapping of tokens to adapters yet."""

        def __init__(self) -> None:
            super().__init__()
            self.embed_tokens = layers.VocabParallelEmbeddingWithLoRA(base)
            self.most = 0

        def embed_input_ids(self, ids: Any) -> Any:
            self.most = max(self.most, len(ids))
            return self.embed_tokens(ids) * 2

    model = Model()
    embedding.write_table(model, 20, tmp_path / "table", 6)
    expected = PromptFeatures(base.weight.detach().numpy() * 2).pool(np.arange(20))
    np.testing.assert_allclose(PromptFeatures.load(tmp_path / "table").pool(np.arange(20)), expected, rtol=1e-3)
    assert model.most == 6
    assert "forward" not in vars(model.embed_tokens)


def test_a_table_that_cannot_be_written_is_a_warning(tmp_path: Path, log: pytest.LogCaptureFixture) -> None:
    torch = pytest.importorskip("torch")
    embedding.write_table(Embedding(torch.ones(4, 4)), 4, tmp_path / "missing" / "table")
    assert "no prompt features but the length" in log.text


@pytest.mark.parametrize(
    ("leap", "given", "waits"),
    [
        ({}, 0, 0),
        ({"state_dir": "s"}, 0, plugin.GRACE_S),
        ({"state_dir": "s"}, 30, 30),
        ({"state_dir": "s"}, None, None),
    ],
)
def test_engines_that_save_get_the_time_for_it(leap: dict[str, Any], given: float | None, waits: float | None) -> None:
    class Engines:
        """As much of vLLM's set of engines as is wrapped."""

        def __init__(self, count: int, vllm_config: Any) -> None:
            self.asked = (count, vllm_config)

        def shutdown(self, timeout: float | None = None) -> None:
            self.asked = timeout

    for _ in range(2):
        plugin._give_time_to_save(Engines)
    for scheduler in ("leap_rs.vllm.LeapScheduler", None):
        engines = Engines(1, vllm_config=config(scheduler, {"leap": leap}))
        engines.shutdown(given)
        assert engines.asked == waits
    stock = Engines(1, vllm_config=config())
    stock.shutdown(timeout=given)
    assert stock.asked == given


def test_that_time_is_longer_than_vllm_waits_for_workers() -> None:
    """A scheduler is told to end once the workers have; before there was a time to set it was four seconds."""
    envs = pytest.importorskip("vllm.envs")
    first = getattr(envs, "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS", 4)
    after_a_signal = 4
    assert first + after_a_signal < plugin.GRACE_S


@pytest.mark.vllm
def test_registering_twice_wraps_once() -> None:
    base = pytest.importorskip("vllm.v1.worker.worker_base")
    engines = pytest.importorskip("vllm.v1.engine.utils").CoreEngineProcManager
    plugin.register()
    once, stop = base.WorkerWrapperBase.init_device, engines.shutdown
    plugin.register()
    assert base.WorkerWrapperBase.init_device is once
    assert once.__wrapped__.__module__ == base.__name__
    assert engines.shutdown is stop
    assert stop.__wrapped__.__module__ == engines.__module__
