"""The client of the encoder's process, and what becomes of it whatever happens to the process."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from leap_rs.encoder.client import BATCH, SEEN, ClientSettings, EncoderClient  # noqa: E402
from leap_rs.encoder.model import Encoder  # noqa: E402
from leap_rs.encoder.source import inspect  # noqa: E402

Row = npt.NDArray[np.float32] | None
PATIENCE_S = 90.0
# Rows depend on what they are read with by rounding, and a processor may round to bfloat16.
TOLERANCE = 0.05


def wait_for(true: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < end, f"{what} has not come about"
        time.sleep(0.01)


def processes_of(parent: int) -> list[int]:
    """The encoders' processes that a process has."""
    found = []
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            status = (directory / "stat").read_text().rpartition(")")[2].split()
            words = (directory / "cmdline").read_bytes()
        except OSError:
            continue
        if int(status[1]) == parent and status[0] != "Z" and b"leap_rs.encoder.process" in words:
            found.append(int(directory.name))
    return found


class Asked:
    """A client, and what it has answered and told."""

    def __init__(self, settings: ClientSettings) -> None:
        before = set(processes_of(os.getpid()))
        self.rows: dict[str, Row] = {}
        self.answers = 0
        self.told: list[str] = []
        self.called = 0
        self.caller: set[str] = set()
        self.client = EncoderClient(settings, self._call, self.told.append)
        self._before = before

    def _call(self) -> None:
        self.called += 1
        self.caller.add(threading.current_thread().name)

    def take(self) -> int:
        for key, row in self.client.rows():
            self.rows[key] = row
            self.answers += 1
        return self.answers

    def wait(self, answers: int) -> dict[str, Row]:
        wait_for(lambda: self.take() >= answers, f"{answers} answers")
        assert self.answers == answers
        return self.rows

    def pid(self) -> int:
        def mine() -> list[int]:
            return [pid for pid in processes_of(os.getpid()) if pid not in self._before]

        wait_for(lambda: bool(mine()), "the process")
        return mine()[0]


@pytest.fixture(scope="module")
def settings(minilm: Path) -> ClientSettings:
    # The encoder's own tokenizer stands for that of the model that is served.
    return ClientSettings(inspect(minilm), str(minilm))


@pytest.fixture
def ask() -> Iterator[Callable[[ClientSettings], Asked]]:
    made: list[Asked] = []

    def start(settings: ClientSettings) -> Asked:
        made.append(Asked(settings))
        return made[-1]

    yield start
    for one in made:
        one.client.close()


@pytest.fixture(scope="module")
def tokens(minilm: Path) -> Callable[[str], list[int]]:
    tokenizer = transformers.AutoTokenizer.from_pretrained(minilm)
    return lambda text: list(tokenizer.encode(text, add_special_tokens=False))


@pytest.fixture(scope="module")
def expected(settings: ClientSettings) -> Callable[[Sequence[str]], npt.NDArray[np.float32]]:
    return Encoder.load(settings.info).encode


def test_rows_are_the_encoders(
    settings: ClientSettings,
    ask: Callable[[ClientSettings], Asked],
    tokens: Callable[[str], list[int]],
    expected: Callable[[Sequence[str]], npt.NDArray[np.float32]],
) -> None:
    texts = [f"{'please ' * (number % 7)}count from {number} to a hundred" for number in range(3 * BATCH + 1)]
    asked = ask(settings)
    for number, text in enumerate(texts):
        asked.client.ask(str(number), tokens(text))
    rows = asked.wait(len(texts))
    made = np.stack([rows[str(number)] for number in range(len(texts))])
    np.testing.assert_allclose(made, expected(texts), atol=TOLERANCE)
    client = asked.client
    assert (client.read, client.seen_before, client.skipped, client.backlog) == (len(texts), 0, 0, 0)
    assert client.seconds > 0
    assert client.alive
    assert asked.called
    assert asked.caller == {"leap-encoder"}
    assert asked.told == []


def test_it_writes_nowhere(
    settings: ClientSettings,
    ask: Callable[[ClientSettings], Asked],
    tokens: Callable[[str], list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Nobody can make anything there, root neither.
    for name in ("HOME", "TMPDIR", "HF_HOME", "XDG_CACHE_HOME", "TORCHINDUCTOR_CACHE_DIR"):
        monkeypatch.setenv(name, "/proc")
    asked = ask(settings)
    asked.client.ask("a", tokens("count to a hundred"))
    assert asked.wait(1)["a"] is not None
    assert asked.told == []


def test_a_prompt_that_came_before_is_not_read_again(
    settings: ClientSettings, ask: Callable[[ClientSettings], Asked], tokens: Callable[[str], list[int]]
) -> None:
    asked = ask(settings)
    # Three at once, of which it reads one, and one more when the row is there.
    for key in "abc":
        asked.client.ask(key, tokens("again and again"))
    asked.wait(3)
    called = asked.called
    asked.client.ask("d", tokens("again and again"))
    wait_for(lambda: asked.called > called, "the call")
    rows = asked.wait(4)
    for key in "bcd":
        np.testing.assert_array_equal(rows[key], rows["a"])
    assert (asked.client.read, asked.client.seen_before) == (1, 3)
    asked.client.ask("e", tokens("again and again and again"))
    assert not np.array_equal(asked.wait(5)["e"], rows["a"])


def test_only_so_many_rows_are_kept(
    settings: ClientSettings,
    ask: Callable[[ClientSettings], Asked],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert SEEN > 2
    monkeypatch.setattr("leap_rs.encoder.client.SEEN", 2)
    asked = ask(settings)
    for answers, word in enumerate([1000, 1001, 1000, 1002, 1000, 1001], start=1):
        asked.client.ask(str(answers), [word])
        asked.wait(answers)
    # 1002 put out 1001, since 1000 had come again.
    assert (asked.client.read, asked.client.seen_before) == (4, 2)


def test_ten_thousand_at_once(settings: ClientSettings, ask: Callable[[ClientSettings], Asked]) -> None:
    count = 10_000
    asked = ask(replace(settings, backlog=256))
    for number in range(count):
        asked.client.ask(str(number), [1000 + number, 2000])
    rows = asked.wait(count)
    client = asked.client
    read = [number for number in range(count) if rows[str(number)] is not None]
    assert client.read == len(read)
    assert client.skipped == count - len(read)
    # None of the last is among the skipped.
    assert read[-256:] == list(range(count - 256, count))


def test_without_a_bound_none_is_skipped(settings: ClientSettings, ask: Callable[[ClientSettings], Asked]) -> None:
    asked = ask(replace(settings, backlog=None))
    for number in range(600):
        asked.client.ask(str(number), [1000 + number])
    assert all(row is not None for row in asked.wait(600).values())
    assert (asked.client.read, asked.client.skipped) == (600, 0)


def test_a_prompt_of_100_000_tokens(
    settings: ClientSettings,
    ask: Callable[[ClientSettings], Asked],
    tokens: Callable[[str], list[int]],
    expected: Callable[[Sequence[str]], npt.NDArray[np.float32]],
) -> None:
    word = tokens("banana")
    asked = ask(settings)
    asked.client.ask("long", word * (100_000 // len(word)))
    np.testing.assert_allclose(asked.wait(1)["long"], expected(["banana " * 300])[0], atol=TOLERANCE)


def test_what_is_no_prompt_has_no_row_and_hurts_nobody(
    settings: ClientSettings,
    ask: Callable[[ClientSettings], Asked],
    expected: Callable[[Sequence[str]], npt.NDArray[np.float32]],
) -> None:
    asked = ask(settings)
    asked.client.ask("negative", [-1])
    asked.client.ask("large", [2**40])
    asked.client.ask("nothing", [])
    asked.client.ask("outside the vocabulary", [4_000_000_000])
    asked.client.ask("words", [7592, 2088])
    rows = asked.wait(5)
    assert rows["negative"] is None
    assert rows["large"] is None
    np.testing.assert_allclose(rows["nothing"], expected([""])[0], atol=TOLERANCE)
    np.testing.assert_allclose(rows["outside the vocabulary"], expected([""])[0], atol=TOLERANCE)
    np.testing.assert_allclose(rows["words"], expected(["hello world"])[0], atol=TOLERANCE)
    assert asked.told == []


def test_the_forgotten_are_not_read(settings: ClientSettings, ask: Callable[[ClientSettings], Asked]) -> None:
    asked = ask(settings)
    # Before the process has loaded its model, so that all of them wait.
    for number in range(20):
        asked.client.ask(str(number), [1000 + number])
    asked.client.ask("same as 3", [1003])
    for number in range(1, 20):
        asked.client.forget(str(number))
    asked.client.forget("never asked")
    assert asked.client.backlog == 2
    rows = asked.wait(2)
    assert set(rows) == {"0", "same as 3"}
    assert all(row is not None for row in rows.values())
    assert asked.client.read == 2


def test_killed(settings: ClientSettings, ask: Callable[[ClientSettings], Asked]) -> None:
    asked = ask(settings)
    asked.client.ask("before", [1000])
    asked.wait(1)
    for number in range(200):
        asked.client.ask(str(number), [1000 + number, 5])
    os.kill(asked.pid(), signal.SIGKILL)
    asked.wait(201)
    wait_for(lambda: bool(asked.told), "the message")
    called = asked.called
    asked.client.ask("behind", [1000])
    wait_for(lambda: asked.called > called, "the call")
    assert asked.wait(202)["behind"] is None
    assert not asked.client.alive
    assert asked.client.backlog == 0
    assert len(asked.told) == 1
    assert asked.told[0].endswith("reads no prompts: its process was ended by SIGKILL")


@pytest.mark.parametrize("fault", ["no model", "no tokenizer", "no python"])
def test_what_cannot_start(
    settings: ClientSettings,
    ask: Callable[[ClientSettings], Asked],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fault: str,
) -> None:
    gone = str(tmp_path / "gone")
    if fault == "no model":
        settings, said = replace(settings, info=replace(settings.info, source=gone)), "gone: cannot be loaded"
    elif fault == "no tokenizer":
        settings, said = replace(settings, tokenizer=gone), "gone: its tokenizer cannot be loaded"
    else:
        monkeypatch.setattr(sys, "executable", gone)
        said = "No such file or directory"
    asked = ask(settings)
    asked.client.ask("a", [1000])
    assert asked.wait(1) == {"a": None}
    wait_for(lambda: bool(asked.told), "the message")
    assert len(asked.told) == 1
    assert said in asked.told[0]
    assert "\n" not in asked.told[0]
    assert not asked.client.alive


def test_what_is_asked_after_its_end_is_answered_among_many_files(
    settings: ClientSettings, ask: Callable[[ClientSettings], Asked], tmp_path: Path
) -> None:
    """Servers have more files open than select() can name."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 4096:
        pytest.skip(f"no more than {hard} files may be open")
    resource.setrlimit(resource.RLIMIT_NOFILE, (4096, hard))
    opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        asked = ask(replace(settings, tokenizer=str(tmp_path / "gone")))
        wait_for(lambda: bool(asked.told), "the message")
        for number in range(3):
            called = asked.called
            asked.client.ask(str(number), [1000])
            wait_for(lambda called=called: asked.called > called, "the call")  # type: ignore[misc]
        assert asked.wait(3) == {"0": None, "1": None, "2": None}
    finally:
        for file in opened:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_closed_while_it_reads(settings: ClientSettings, ask: Callable[[ClientSettings], Asked]) -> None:
    asked = ask(replace(settings, backlog=None))
    for number in range(1000):
        asked.client.ask(str(number), [1000 + number])
    pid = asked.pid()
    asked.client.close()
    asked.client.close()
    assert pid not in processes_of(os.getpid())
    assert not asked.client.alive
    assert asked.told == []
    asked.client.ask("late", [1])
    asked.client.forget("late")
    asked.take()
    assert asked.rows["late"] is None


def test_it_gives_way_and_is_bound_to_no_core(settings: ClientSettings, ask: Callable[[ClientSettings], Asked]) -> None:
    cores = os.sched_getaffinity(0)
    if len(cores) < 2:
        pytest.skip("one core alone")
    started: list[Asked] = []

    def bound() -> None:
        os.sched_setaffinity(0, {min(cores)})
        started.append(ask(settings))

    # As an engine does with the threads that compute, of which one may start the client.
    thread = threading.Thread(target=bound)
    thread.start()
    thread.join()
    (asked,) = started
    asked.client.ask("a", [1000])
    asked.wait(1)
    pid = asked.pid()
    assert os.sched_getaffinity(pid) == cores
    assert os.getpriority(os.PRIO_PROCESS, pid) == min(19, os.getpriority(os.PRIO_PROCESS, 0) + 5)
    os.kill(pid, signal.SIGINT)
    asked.client.ask("b", [1001])
    assert asked.wait(2)["b"] is not None


OWNER = """
import sys
from leap_rs.encoder.client import ClientSettings, EncoderClient
from leap_rs.encoder.source import inspect

client = EncoderClient(ClientSettings(inspect(sys.argv[1]), sys.argv[1]), lambda: print("rows", flush=True), print)
client.ask("a", [1000])
sys.stdin.read()
"""


@pytest.mark.parametrize("busy", [False, True])
def test_it_ends_with_its_owner(minilm: Path, busy: bool) -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(minilm)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with owner:
        if busy:
            wait_for(lambda: bool(processes_of(owner.pid)), "the process")
        else:
            assert owner.stdout is not None
            assert owner.stdout.readline() == "rows\n"
        (pid,) = processes_of(owner.pid)
        owner.kill()
    wait_for(lambda: not Path(f"/proc/{pid}").exists() or "\nState:\tZ" in status(pid), "its end")


def status(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return "\nState:\tZ"
