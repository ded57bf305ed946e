"""Two API processes before one engine that learns: every scrape shows the same, and forced lengths teach nothing."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

import pytest
from server_prompts import PROMPTS, check_every_metric
from vllm_server import DEADLINE_S, Samples, Server, at, bench, same, served, together

pytest.importorskip("vllm.version")
pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]

REQUESTS, SCRAPES, FORCED = 100, 20, 300
BATCH = 8


@pytest.fixture(scope="module")
def server(
    environment: dict[str, str],
    model: Callable[[str], Path],
    lock: Callable[[], AbstractContextManager[None]],
    traces: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Server]:
    # That it stays in shadow must not hang on what a hundred answers happen to prove: it may arm at a perfect ranking alone.
    leap = {"layer": 20, "readout": str(traces / "readout.safetensors"), "arm": {"min_correlation": 1.0}}
    path, directory = model("real"), tmp_path_factory.mktemp("pair")
    with lock(), served(environment, path, directory, leap, "--api-server-count", "2") as running:
        yield running


def shares_of(server: Server) -> list[float]:
    """How many requests each API process has answered, from the files in which vLLM adds them up."""
    from prometheus_client.mmap_dict import MmapedDict

    files = server.out.parent.rglob("counter_*.db")
    read = [MmapedDict.read_all_values_from_file(str(path)) for path in files]
    shares = [sum(value for key, value, *_ in values if "vllm:request_success" in key) for values in read]
    return [share for share in shares if share]


def counters(samples: Samples) -> Samples:
    return {key: value for key, value in samples.items() if key[0].endswith(("_total", "_bucket", "_count", "_sum"))}


def test_every_scrape_shows_the_same(server: Server) -> None:
    scrapes: list[Samples] = []
    done = threading.Event()

    def scrape() -> None:
        while not done.is_set() or len(scrapes) < SCRAPES:
            scrapes.append(counters(server.metrics()))

    scraper = threading.Thread(target=scrape)
    scraper.start()
    try:
        prompts = [PROMPTS[i % len(PROMPTS)] for i in range(REQUESTS)]
        together([partial(server.text, prompt, 8 + i % 24) for i, prompt in enumerate(prompts)])
    finally:
        done.set()
        scraper.join()
    server.wait("leap:updates_total", REQUESTS // BATCH, readout="prompt")
    server.wait("leap:updates_total", REQUESTS // BATCH, readout="state")
    # The engine may still renew predictions; two processes that each knew a part would never agree.
    deadline = time.monotonic() + DEADLINE_S
    while True:
        final, *others = [server.metrics() for _ in range(SCRAPES)]
        if all(same(other, final) for other in others):
            break
        assert time.monotonic() < deadline, (final, others)
    for before, after in zip(scrapes, [*scrapes[1:], counters(final)], strict=True):
        assert before.keys() == after.keys()
        assert all(after[key] >= value for key, value in before.items())
    check_every_metric(final)
    kinds = ("exact", "censored", "forced", "aborted", "failed")
    assert sum(at(final, "leap:labels_total", kind=kind) for kind in kinds) == REQUESTS
    assert at(final, "leap:predictions_total", readout="state") == REQUESTS
    # Else this would show nothing.
    shares = shares_of(server)
    assert sum(shares) == REQUESTS
    assert len(shares) == 2


def test_forced_lengths_teach_nothing(server: Server, environment: dict[str, str], tmp_path: Path) -> None:
    before = server.metrics()
    options = ["--backend", "openai", "--dataset-name", "random", "--num-prompts", str(FORCED)]
    result = bench(server, environment, tmp_path, *options, "--random-input-len", "12", "--random-output-len", "3")
    assert (result["completed"], result["failed"]) == (FORCED, 0)
    assert set(result["output_lens"]) == {3}
    after = server.wait("leap:labels_total", FORCED, kind="forced")
    check_every_metric(after)
    for readout in ("prompt", "state"):
        for name in ("updates_total", "rank_correlation", "predictions_total", "absolute_error_tokens_count"):
            assert at(after, f"leap:{name}", readout=readout) == at(before, f"leap:{name}", readout=readout)
        assert at(after, "leap:armed_readout", readout=readout) == 0
    assert at(after, "leap:output_tokens_count") == REQUESTS
    assert at(after, "leap:mode", mode="shadow") == 1
