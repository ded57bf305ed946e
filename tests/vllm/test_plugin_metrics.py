"""The engine's numbers in another process: what prometheus_client shows of the files that engines map."""

import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import leap_rs
from leap_rs._leap import LeapError
from leap_rs.vllm import metrics as plugin_metrics
from leap_rs.vllm.metrics import METRICS, MetricsWriter, engine_files, engine_path, read
from leap_rs.vllm.opening import open_metrics
from leap_rs.vllm.places import RUN
from leap_rs.vllm.settings import BrainSettings

prometheus = pytest.importorskip("prometheus_client")

PACKAGE = str(Path(leap_rs.__file__).parent.parent)


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join([PACKAGE, os.environ.get("PYTHONPATH", "")])}


def scraped(directory: Path | None = None) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Every sample that a scrape shows, by name and labels."""
    from leap_rs.vllm.collector import register

    registry = prometheus.CollectorRegistry()
    register(registry, directory)
    register(registry, directory)
    text = prometheus.generate_latest(registry).decode()
    from prometheus_client.parser import text_string_to_metric_families

    samples = [s for family in text_string_to_metric_families(text) for s in family.samples]
    assert len({(s.name, tuple(sorted(s.labels.items()))) for s in samples}) == len(samples)
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for s in samples}


def at(samples: dict[tuple[str, tuple[tuple[str, str], ...]], float], name: str, **labels: str) -> float:
    labels = {"model_name": "m", "engine": "0", **labels}
    return samples[name, tuple(sorted(labels.items()))]


def test_what_is_written_is_shown(tmp_path: Path) -> None:
    writer = MetricsWriter.create(tmp_path / "own" / "engine-0.metrics", model_name="m", engine=0)
    other = MetricsWriter.create(tmp_path / "own" / "engine-3.metrics", model_name="m", engine=3)
    writer.add("labels", value="exact")
    writer.add("labels", 2, value="forced")
    other.add("labels", 7, value="exact")
    writer.set("rank_correlation", 0.44, "state")
    lengths = np.array([1, 2, 3, 100, 5000, 1e6])
    for tokens in lengths:
        writer.observe("output_tokens", tokens)
    samples = scraped(tmp_path / "own")
    assert at(samples, "leap:labels_total", kind="exact") == 1
    assert at(samples, "leap:labels_total", kind="forced") == 2
    assert at(samples, "leap:labels_total", kind="censored") == 0
    assert at(samples, "leap:labels_total", kind="exact", engine="3") == 7
    assert at(samples, "leap:rank_correlation", readout="state") == 0.44
    assert math.isnan(at(samples, "leap:rank_correlation", readout="prompt"))
    assert at(samples, "leap:output_tokens_count") == 6
    assert at(samples, "leap:output_tokens_sum") == lengths.sum()
    for edge in ("1.0", "2.0", "4.0", "128.0", "8192.0", "+Inf"):
        assert at(samples, "leap:output_tokens_bucket", le=edge) == (lengths <= float(edge)).sum()
    # Every metric is there before anything has happened, for dashboards and alerts.
    names = {name.removeprefix("leap:") for name, _ in samples}
    for metric in METRICS:
        suffix = {"counter": "_total", "gauge": "", "histogram": "_bucket"}[metric.kind]
        assert f"{metric.name}{suffix}" in names
    assert all(name.startswith("leap:") for name, _ in samples)


def test_an_engine_that_has_ended_is_gone(tmp_path: Path) -> None:
    directory = tmp_path / "own"
    writer = MetricsWriter.create(directory / "engine-0.metrics", model_name="m", engine=0)
    assert scraped(directory)
    writer.close()
    assert scraped(directory) == {}
    writer.add("evictions")
    # One that was killed could not take its file away.
    command = [sys.executable, "-c", CRASH, str(directory / "engine-0.metrics")]
    subprocess.run(command, check=False, env=environment())
    assert (directory / "engine-0.metrics").exists()
    assert scraped(directory) == {}


ENGINE = """
import sys
from pathlib import Path
from leap_rs.vllm.metrics import MetricsWriter, engine_path
writer = MetricsWriter.create(engine_path(0), model_name="m", engine=0)
print("ready", flush=True)
turn = 0
while not Path(sys.argv[1]).exists():
    turn += 1
    writer.add("slot_waits", 2**turn.bit_length())
    writer.set("readout_version", 2.0**53 - 1 if turn % 2 else 1.0)
    writer.observe("output_tokens", turn % 300)
    writer.add("labels", value="exact")
writer.close()
print(turn, flush=True)
"""


@pytest.mark.slow
def test_two_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine counts as fast as it can while two API processes scrape: no number goes backwards or is read in halves."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setenv(RUN, "this")
    stop = tmp_path / "stop"
    engine = subprocess.Popen(
        [sys.executable, "-c", ENGINE, str(stop)], stdout=subprocess.PIPE, text=True, env=environment()
    )
    assert engine.stdout is not None
    try:
        assert engine.stdout.readline() == "ready\n"
        # The file is found by the run's name, without being told where.
        (path,) = engine_files()
        # Another server of the run sees it too.
        code = "from leap_rs.vllm.metrics import engine_files; print(*engine_files())"
        beside = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment()
        )
        assert beside.stdout.split() == [str(path)]
        before = scraped()
        for _ in range(60):
            now = scraped()
            assert at(now, "leap:readout_version") in (0.0, 1.0, 2.0**53 - 1)
            for (name, labels), value in now.items():
                if name.endswith(("_total", "_bucket", "_count", "_sum")):
                    assert value == int(value)
                    assert value >= before[name, labels]
            before = now
        assert at(before, "leap:labels_total", kind="exact") > 0
    finally:
        stop.write_text("")
        turns, _ = engine.communicate(timeout=60)
    assert int(turns) >= at(before, "leap:labels_total", kind="exact")
    assert engine.returncode == 0
    assert engine_files() == []


CRASH = """
import os, sys
from pathlib import Path
from leap_rs.vllm.metrics import MetricsWriter
MetricsWriter.create(Path(sys.argv[1]), model_name="m", engine=0)
os._exit(9)
"""


def test_what_dead_engines_left_is_swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    mine = engine_path(0)
    living = MetricsWriter.create(mine.with_name("living-0.metrics"), model_name="m", engine=0)
    left = mine.with_name("left-0.metrics")
    subprocess.run([sys.executable, "-c", CRASH, str(left)], check=False, env=environment())
    elsewhere = tmp_path / "precious"
    elsewhere.write_text("")
    mine.with_name("link-0.metrics").symlink_to(elsewhere)
    assert left.exists()
    MetricsWriter.create(mine, model_name="m", engine=0).close()
    assert not left.exists()
    assert elsewhere.exists()
    assert read(mine.with_name("living-0.metrics")) is not None
    living.close()


def test_an_engine_takes_only_its_own_file_away(tmp_path: Path) -> None:
    path = tmp_path / "engine-0.metrics"
    first = MetricsWriter.create(path, model_name="first", engine=0)
    second = MetricsWriter.create(path, model_name="second", engine=0)
    first.close()
    reading = read(path)
    assert reading is not None
    assert reading.model_name == "second"
    second.close()
    second.close()
    assert not path.exists()


def test_runs_do_not_see_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv(RUN, "one")
    writer = MetricsWriter.create(engine_path(0), model_name="m", engine=0)
    assert engine_files() == [writer.path]
    monkeypatch.setenv(RUN, "another")
    assert engine_files() == []
    writer.close()


def test_a_server_started_by_another_is_a_run_of_its_own() -> None:
    """As a command it is; a process that multiprocessing starts, as vLLM does its own, is part of the run."""
    code = """
import multiprocessing, os
from leap_rs.vllm.places import RUN, name_run, run_name
def part(queue):
    name_run()
    queue.put(run_name())
if __name__ == "__main__":
    name_run()
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=part, args=(queue,))
    child.start()
    print(run_name(), queue.get(), os.environ["VLLM_RAY_EXTRA_ENV_VARS_TO_COPY"])
    child.join()
"""
    known = {**environment(), RUN: "outer", "VLLM_RAY_EXTRA_ENV_VARS_TO_COPY": "MINE"}
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=known)
    mine, child, copied = shown.stdout.split()
    assert mine == child != "outer"
    assert copied == f"MINE,{RUN}"


@pytest.mark.parametrize("spoiled", ["", "metrics"])
def test_no_place_is_no_metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spoiled: str) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    place = tmp_path / f"leap-rs-{os.getuid()}" / spoiled
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    place.parent.mkdir(mode=0o700, exist_ok=True)
    place.symlink_to(tmp_path / "elsewhere")
    settings = BrainSettings(model="m", weights="m", layer=1, width=4)
    told: list[str] = []
    writer = open_metrics(settings, told.append)
    assert writer.path is None
    (line,) = told
    assert line.startswith("no metrics: ")
    assert str(place) in line
    assert engine_files() == []
    assert not list((tmp_path / "elsewhere").iterdir())


def test_a_full_disk_is_no_metrics(tmp_path: Path) -> None:
    code = """
import resource, sys
from pathlib import Path
from leap_rs._leap import LeapError
from leap_rs.vllm.metrics import MetricsWriter
resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
try:
    MetricsWriter.create(Path(sys.argv[1]), model_name="m", engine=0)
except LeapError as error:
    print(error)
"""
    path = tmp_path / "engine-0.metrics"
    shown = subprocess.run(
        [sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True, env=environment()
    )
    assert shown.stdout == f"{path}: cannot be written: File too large\n"
    assert not list(tmp_path.iterdir())


def test_other_files_are_not_read(tmp_path: Path) -> None:
    for name, content in (("engine-0", b""), ("engine-1", b"x" * 5), ("engine-2", b"x" * 500)):
        (tmp_path / f"{name}.metrics").write_bytes(content)
        assert read(tmp_path / f"{name}.metrics") is None
    assert read(tmp_path / "none") is None
    assert scraped(tmp_path) == {}


def test_a_directory_of_somebody_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(LeapError, match="only this user can write"):
        MetricsWriter.create(tmp_path / "open" / "engine-0.metrics", model_name="m", engine=0)
    (tmp_path / "file").write_text("")
    with pytest.raises(LeapError, match="cannot be made: File exists"):
        MetricsWriter.create(tmp_path / "file" / "engine-0.metrics", model_name="m", engine=0)
    nowhere = MetricsWriter.nowhere()
    nowhere.add("evictions")
    nowhere.close()
    assert nowhere.get("evictions") == 1


def test_the_schema_of_another_version_is_read_by_its_own_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    extra = plugin_metrics.Metric("later", "counter", "Of a later version.")
    with monkeypatch.context() as patch:
        patch.setattr(plugin_metrics, "METRICS", (extra, *METRICS))
        writer = MetricsWriter.create(tmp_path / "own" / "engine-0.metrics", model_name="m", engine=0)
        writer.add("later", 3)
        writer.add("evictions", 4)
    samples = scraped(tmp_path / "own")
    assert at(samples, "leap:later_total") == 3
    assert at(samples, "leap:evictions_total") == 4


class Config:
    """As much of vLLM's configuration as the stat logger looks at."""

    class scheduler_config:  # noqa: N801
        scheduler_cls: object = "leap_rs.vllm.LeapScheduler"

    class model_config:  # noqa: N801
        runner_type = "generate"

    additional_config = None


def test_vllm_shows_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With vLLM's own registries, of one API process and of several."""
    pytest.importorskip("vllm.v1.metrics.loggers")
    import vllm.v1.metrics.prometheus as theirs
    from fastapi import FastAPI
    from fastapi.testclient import TestClient
    from prometheus_client.multiprocess import MultiProcessCollector
    from vllm.entrypoints.serve.instrumentator.metrics import attach_router
    from vllm.v1.metrics.loggers import StatLoggerBase

    from leap_rs.vllm.stat_logger import LeapStatLogger

    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr(MultiProcessCollector, "__init__", MultiProcessCollector.__init__)
    monkeypatch.delenv("PROMETHEUS_MULTIPROC_DIR", raising=False)
    assert issubclass(LeapStatLogger, StatLoggerBase)
    writer = MetricsWriter.create(engine_path(0), model_name="m", engine=0)
    writer.add("evictions", 5)
    LeapStatLogger(Config, [0]).record(None, None, engine_idx=0)
    line = b'leap:evictions_total{engine="0",model_name="m"} 5.0'
    assert line in prometheus.generate_latest(theirs.get_prometheus_registry())
    (tmp_path / "several").mkdir()
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path / "several"))
    LeapStatLogger(Config, [0])
    LeapStatLogger(Config, [0])
    # Not vLLM's registry answers a scrape then, but one of the library that it hands its registry to.
    app = FastAPI()
    attach_router(app)
    client = TestClient(app)
    for _ in range(2):
        shown = prometheus.generate_latest(theirs.get_prometheus_registry())
        assert shown.count(line) == 1
        assert client.get("/metrics").content.count(line) == 1
    writer.close()
