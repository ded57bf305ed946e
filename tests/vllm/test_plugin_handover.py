"""What becomes of the table of embeddings where no scheduler takes it, without an engine: nothing stays behind."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from leap_rs.vllm import embedding, handover, plugin

VOCABULARY = 40


def config(instance: str = "17", scheduler: Any = "leap_rs.vllm.LeapScheduler", **changed: Any) -> SimpleNamespace:
    made: dict[str, Any] = {
        "model_config": SimpleNamespace(runner_type="generate", get_vocab_size=lambda: VOCABULARY),
        "scheduler_config": SimpleNamespace(scheduler_cls=scheduler, max_num_batched_tokens=16),
        "parallel_config": SimpleNamespace(data_parallel_index=0, node_rank_within_dp=0),
        "kv_transfer_config": None,
        "additional_config": {"leap": {}},
        "instance_id": instance,
    }
    return SimpleNamespace(**{**made, **changed})


class Reader:
    """Stands for the executor: whoever may still read lives as long as it does."""


class Model:
    """A model that knows its embedding by looking tokens up."""

    def __init__(self) -> None:
        torch = pytest.importorskip("torch")
        self.table = torch.arange(VOCABULARY * 3, dtype=torch.float32).reshape(VOCABULARY, 3)

    def parameters(self) -> Any:
        return iter([self.table])

    def modules(self) -> Any:
        return iter([])

    def embed_input_ids(self, ids: Any) -> Any:
        return self.table[ids]


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    yield embedding.table_path(config()).parent
    for path in list(handover._waiting):
        handover.clear(path)


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_a_table_reaches_who_waits_and_nothing_stays(directory: Path) -> None:
    reader, path = Reader(), embedding.table_path(config())
    handover.wait(path, reader)
    embedding.leave_table(Model(), config(), answers=True)  # type: ignore[arg-type]
    assert path.name in names(directory)
    loaded = embedding.load_table(config())
    assert loaded is not None
    assert loaded.pool(np.arange(VOCABULARY, dtype=np.uint32)).shape == (256 + 3,)
    assert names(directory) == []


@pytest.mark.parametrize("answers", [True, False])
def test_where_nobody_waits_no_table_is_written(directory: Path, answers: bool) -> None:
    reader = Reader()
    # Of the same user and node, but not the engine of this worker.
    handover.wait(embedding.table_path(config("18")), reader)
    before = names(directory)
    embedding.leave_table(Model(), config(), answers=answers)  # type: ignore[arg-type]
    assert names(directory) == before == ["embedding-18-0.wanted"]


def test_a_table_goes_with_the_reader_that_never_came_to_read(directory: Path) -> None:
    reader = Reader()
    handover.wait(embedding.table_path(config()), reader)
    embedding.leave_table(Model(), config(), answers=True)  # type: ignore[arg-type]
    assert len(names(directory)) == 2
    del reader
    assert names(directory) == []


def test_a_table_goes_where_loading_the_model_fails_behind_it(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    class Executor:
        """What of vLLM's executors is wrapped; its workers load the model within, and one of them then fails."""

        def __init__(self, vllm_config: Any) -> None:
            embedding.leave_table(Model(), vllm_config, answers=True)  # type: ignore[arg-type]
            seen.extend(names(directory))
            raise MemoryError

    monkeypatch.setattr(plugin, "check", lambda _: None)
    plugin._wrap(Executor, "__init__", plugin._checks_what_it_is_given)
    with pytest.raises(MemoryError):
        Executor(config())
    assert seen == ["embedding-17-0", "embedding-17-0.wanted"]
    assert names(directory) == []


STARTS = """
import sys, time
from pathlib import Path
from leap_rs.vllm import handover

class Reader: ...

path, reader = Path(sys.argv[1]), Reader()
handover.wait(path, reader)
path.write_bytes(b"a table")
path.with_name(f".{path.name}.123.0.tmp").write_bytes(b"half a table")
print("left", flush=True)
if sys.argv[2] == "exits":
    sys.exit(1)
time.sleep(600)
"""


@contextmanager
def a_start(path: Path, how: str) -> Iterator[subprocess.Popen[str]]:
    """A process that waits at a place in which a worker has left a table and the half of another."""
    with subprocess.Popen([sys.executable, "-c", STARTS, path, how], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "left\n"
            yield process
        finally:
            process.kill()


def test_what_a_killed_start_left_goes_with_the_next_one_and_what_one_under_way_has_stays(directory: Path) -> None:
    killed, running = embedding.table_path(config("1")), embedding.table_path(config("2"))
    of = {path: [f".{path.name}.123.0.tmp", path.name, f"{path.name}.wanted"] for path in (killed, running)}
    reader = Reader()
    with a_start(killed, "stays") as first, a_start(running, "stays"):
        handover.sweep(directory)
        assert names(directory) == sorted(of[killed] + of[running])
        first.send_signal(signal.SIGKILL)
        first.wait()
        assert set(of[killed]) <= set(names(directory))
        assert not handover.is_awaited(killed)
        assert handover.is_awaited(running)
        handover.wait(embedding.table_path(config("3")), reader)
        assert names(directory) == sorted([*of[running], "embedding-3-0.wanted"])


def test_a_process_that_ends_leaves_nothing(directory: Path) -> None:
    with a_start(embedding.table_path(config()), "exits") as process:
        assert process.wait() == 1
    assert names(directory) == []


def _fails(path: Path) -> None:
    handover.wait(path, Reader)
    path.write_bytes(b"a table")
    raise SystemExit(3)


# With threads about, Python 3.12 warns of every fork.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_nor_does_an_engine_core_that_fails(directory: Path, method: str) -> None:
    process = multiprocessing.get_context(method).Process(target=_fails, args=(embedding.table_path(config()),))
    process.start()
    process.join()
    assert process.exitcode == 3
    assert names(directory) == []


def test_only_files_of_ours_are_swept(directory: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    foreign = tmp_path / "elsewhere" / "embedding-1-0"
    foreign.touch()
    (directory / "embedding-2-0").symlink_to(foreign)
    # A lock that a link leads to says nothing of this place.
    (directory / "embedding-3-0").touch()
    (directory / "embedding-3-0.wanted").symlink_to(foreign)
    (directory / "embedding-4-0").mkdir()
    (directory / "metrics").mkdir()
    for name in ("embedding", "embedding-5-0.safetensors", ".embedding-5-0.tmp", "notes"):
        (directory / name).touch()
    if os.getuid() == 0:
        (directory / "embedding-6-0").touch()
        os.chown(directory / "embedding-6-0", 1, -1)
    stays = {*names(directory)} - {"embedding-3-0"}
    handover.sweep(directory)
    assert {*names(directory)} == stays
    assert foreign.exists()


def _waits(directory: Path, number: int, times: int) -> None:
    for _ in range(times):
        path = directory / f"embedding-{number}-0"
        handover.wait(path, Reader)
        path.write_bytes(b"a table")
        handover.sweep(directory)
        if not (handover.is_awaited(path) and path.exists()):
            raise SystemExit(1)
        handover.clear(path)


def test_starts_at_one_time_do_not_take_each_other_s(directory: Path) -> None:
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_waits, args=(directory, number, 200)) for number in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0, 0, 0]
    assert names(directory) == []


SAVES = """
import resource, sys
import numpy as np
from leap_rs import LeapError, PromptFeatures

features = PromptFeatures(np.ones((4096, 4), np.float32))
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
try:
    features.save(sys.argv[1])
except LeapError as error:
    print(error)
"""


def test_a_table_that_is_half_written_leaves_nothing(tmp_path: Path) -> None:
    """The disk is as good as full behind the first of its two MiB."""
    saved = subprocess.run(
        [sys.executable, "-c", SAVES, tmp_path / "table"], capture_output=True, text=True, check=True
    )
    assert "File too large" in saved.stdout
    assert names(tmp_path) == []


def subclass(name: str, reads: bool) -> Callable[..., None]:
    def scheduler() -> None: ...

    scheduler.__name__ = name
    scheduler.leap_reads_table = reads  # type: ignore[attr-defined]
    return scheduler


made_of_ours, of_another = subclass("made_of_ours", True), subclass("of_another", False)


WHO_READS: dict[str, tuple[dict[str, Any], bool]] = {
    "as usual": ({}, True),
    "both roles": ({"kv_transfer_config": SimpleNamespace(kv_role="kv_both")}, True),
    "decodes": ({"kv_transfer_config": SimpleNamespace(kv_role="kv_consumer")}, True),
    "prefills": ({"kv_transfer_config": SimpleNamespace(kv_role="kv_producer")}, False),
    "stock scheduler": ({"scheduler": None}, False),
    "a subclass by its name": ({"scheduler": f"{__name__}.made_of_ours"}, True),
    "another by its name": ({"scheduler": f"{__name__}.of_another"}, False),
    "a subclass": ({"scheduler": made_of_ours}, True),
    "no such scheduler": ({"scheduler": "nowhere.Scheduler"}, False),
    "second node": ({"parallel_config": SimpleNamespace(data_parallel_index=0, node_rank_within_dp=1)}, False),
    "not asked for": ({"scheduler": None, "additional_config": {}}, False),
}


@pytest.mark.vllm
@pytest.mark.parametrize(("changed", "reads"), WHO_READS.values(), ids=WHO_READS)
def test_who_reads_the_table(changed: dict[str, Any], reads: bool) -> None:
    pytest.importorskip("vllm.version")
    assert plugin.reads_table(config(**changed)) is reads


def test_a_model_that_cannot_be_asked_has_no_table(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The start goes on: prompt features are then those of the length alone."""

    class Odd(Model):
        def embed_input_ids(self, ids: Any) -> Any:
            raise NotImplementedError("images only")

    reader, path = Reader(), embedding.table_path(config())
    handover.wait(path, reader)
    embedding.leave_table(Odd(), config(), answers=True)  # type: ignore[arg-type]
    assert "no prompt features but the length: NotImplementedError: images only" in caplog.text
    assert path.name not in names(directory)
