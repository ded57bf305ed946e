"""Two API processes before one engine with the plugin armed and fewer decode slots than residents: answers, vLLM's own
client, metrics that are the same in every scrape, and lengths that teach nothing.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from server_prompts import ANSWER, PROMPTS, QUESTIONS, check_every_metric
from vllm_server import DEADLINE_S, Samples, Server, at, bench, same, served, together

from leap_rs import OnlineReadout

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]

SLOTS, SEATS, BATCH = 3, 8, 4
REQUESTS, SCRAPES, FORCED = 100, 20, 100
SCHEMA = {
    "type": "object",
    "properties": {
        "answer": {"type": "string", "enum": ["yes", "no"]},
        "sure": {"type": "boolean"},
    },
    "required": ["answer", "sure"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("server")


@pytest.fixture(scope="module")
def server(
    environment: dict[str, str],
    smollm: Path,
    traces: Path,
    directory: Path,
) -> Iterator[Server]:
    leap = {
        "mode": "armed",
        "decode_slots": SLOTS,
        "layer": 20,
        "readout": str(traces / "readout.safetensors"),
        "rls": {"batch": BATCH},
        "state_dir": str(directory / "state"),
        "state_every": 100_000,
    }
    with served(environment, smollm, directory, leap, "--api-server-count", "2") as running:
        yield running


def labels(samples: Samples) -> dict[str, int]:
    kinds = ("exact", "censored", "forced", "aborted", "failed")
    return {kind: int(at(samples, "leap:labels_total", kind=kind)) for kind in kinds}


def finished(server: Server) -> dict[str, int]:
    """vLLM's own count of finished requests by reason."""
    samples = server.metrics("vllm:request_success_total")
    return {dict(where)["finished_reason"]: int(number) for (_, where), number in samples.items()}


def test_the_benchmark_client(server: Server, environment: dict[str, str], tmp_path: Path) -> None:
    """64 chats of vLLM's own client: none fails, and what the plugin counts is what the client and vLLM count."""
    conversations = [
        {
            "conversations": [
                {"from": "human", "value": prompt},
                # Their lengths are the limits of the answers.
                {"from": "gpt", "value": " word" * (5 + 3 * i % 24)},
            ]
        }
        for i, prompt in enumerate(PROMPTS)
    ]
    (tmp_path / "chats.json").write_text(json.dumps(conversations))
    options = ["--backend", "openai-chat", "--endpoint", "/v1/chat/completions", "--num-prompts", str(len(PROMPTS))]
    options += ["--dataset-name", "sharegpt", "--dataset-path", str(tmp_path / "chats.json")]
    result = bench(server, environment, tmp_path, *options)
    n = len(PROMPTS)
    assert (result["completed"], result["failed"]) == (n, 0)
    assert not any(result["errors"])
    updates = n // BATCH
    server.wait("leap:updates_total", updates, readout="prompt")
    samples = server.wait("leap:updates_total", updates, readout="state")
    check_every_metric(samples)
    theirs = finished(server)
    assert theirs["stop"] > 0
    assert theirs["length"] > 0
    expected = {"exact": theirs["stop"], "censored": theirs["length"], "forced": 0, "aborted": 0, "failed": 0}
    assert labels(samples) == expected
    assert sum(expected.values()) == n
    assert at(samples, "leap:output_tokens_sum") == sum(result["output_lens"])
    for readout in ("prompt", "state"):
        assert at(samples, "leap:predictions_total", readout=readout) == n
        assert at(samples, "leap:absolute_error_tokens_count", readout=readout) == n
        assert at(samples, "leap:refused_rows_total", readout=readout) == 0
        assert at(samples, "leap:dropped_labels_total", readout=readout) == 0
        assert at(samples, "leap:armed_readout", readout=readout) == 1
        assert -1 <= at(samples, "leap:rank_correlation", readout=readout) <= 1
    assert at(samples, "leap:captures_missed_total") == 0
    assert at(samples, "leap:mode", mode="armed") == 1
    assert 1 <= at(samples, "leap:readout_version") <= 2 * updates
    assert at(samples, "leap:state_saves_total", outcome="saved") == 0
    assert at(samples, "leap:state_saves_total", outcome="failed") == 0
    assert at(samples, "leap:slot_waits_total") > 0
    assert at(samples, "leap:gated_requests") == 0, "nobody is there any more"
    # Nobody waits for what no key can give, or beyond a cap that is not set.
    assert at(samples, "leap:blocked_requests") == 0
    assert at(samples, "leap:wait_cap_promotions_total") == 0
    assert at(samples, "leap:evictions_total") == 0


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
    """Two processes that each knew a part would never agree."""
    earlier = server.metrics()
    scrapes: list[Samples] = []
    done = threading.Event()

    def scrape() -> None:
        while not done.is_set() or len(scrapes) < SCRAPES:
            scrapes.append(counters(server.metrics()))

    scraper = threading.Thread(target=scrape)
    scraper.start()
    try:
        prompts = [PROMPTS[i % len(PROMPTS)] for i in range(REQUESTS)]
        together([partial(server.text, prompt, 4 + i % 8) for i, prompt in enumerate(prompts)])
    finally:
        done.set()
        scraper.join()
    served = sum(labels(earlier).values()) + REQUESTS
    for readout in ("prompt", "state"):
        server.wait("leap:updates_total", served // BATCH, readout=readout)
    # The engine may still renew predictions.
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
    assert sum(labels(final).values()) == served
    assert at(final, "leap:predictions_total", readout="state") == served
    # Else this would show nothing.
    shares = shares_of(server)
    assert sum(shares) == sum(finished(server).values()) >= served
    assert len(shares) == 2


def test_forced_lengths_teach_nothing(server: Server, environment: dict[str, str], tmp_path: Path) -> None:
    before = server.metrics()
    options = ["--backend", "openai", "--dataset-name", "random", "--num-prompts", str(FORCED)]
    result = bench(server, environment, tmp_path, *options, "--random-input-len", "12", "--random-output-len", "3")
    assert (result["completed"], result["failed"]) == (FORCED, 0)
    assert set(result["output_lens"]) == {3}
    after = server.wait("leap:labels_total", FORCED, kind="forced")
    check_every_metric(after)
    assert {**labels(after), "forced": 0} == labels(before)
    for readout in ("prompt", "state"):
        for name in ("updates_total", "rank_correlation", "predictions_total", "absolute_error_tokens_count"):
            assert at(after, f"leap:{name}", readout=readout) == at(before, f"leap:{name}", readout=readout)
        assert at(after, "leap:armed_readout", readout=readout) == 1
    assert at(after, "leap:output_tokens_count") == at(before, "leap:output_tokens_count")
    assert at(after, "leap:mode", mode="armed") == 1


def structured(server: Server, question: str) -> dict[str, Any]:
    schema = {"type": "json_schema", "json_schema": {"name": "reply", "schema": SCHEMA}}
    (choice,) = server.chat(question, 64, response_format=schema)
    assert choice["finish_reason"] == "stop"
    answer: dict[str, Any] = json.loads(choice["message"]["content"])
    return answer


def streamed(server: Server, question: str, max_tokens: int) -> str:
    with server.stream(question, max_tokens) as parts:
        return "".join(parts)


def left_early(server: Server) -> str:
    """Reads four parts of a long answer and goes."""
    with server.stream("Tell me a very long story.", 400, min_tokens=390) as parts:
        return "".join(next(parts) for _ in range(4))


def test_answers_of_every_kind_at_once(server: Server, expected: list[str]) -> None:
    """Streams, whole answers, structured ones, four to a prompt, and a client that goes, on three slots for eight seats."""
    before, theirs = server.metrics(), finished(server)
    greedy = [partial(streamed, server, question, ANSWER) for question in QUESTIONS]
    whole = [partial(server.text, question, ANSWER) for question in QUESTIONS]
    closed = [partial(structured, server, question) for question in QUESTIONS]
    several = partial(server.chat, "Name an animal.", 24, n=4, temperature=1.0, seed=7)
    made = together([partial(left_early, server), *greedy, *closed, several, *whole])
    assert made[0]
    n = len(QUESTIONS)
    assert made[1 : n + 1] == expected
    for answer in made[n + 1 : 2 * n + 1]:
        assert answer.keys() == {"answer", "sure"}
        assert answer["answer"] in ("yes", "no")
        assert isinstance(answer["sure"], bool)
    assert sorted(choice["index"] for choice in made[2 * n + 1]) == [0, 1, 2, 3]
    assert made[2 * n + 2 :] == expected
    ended = 3 * n + 4
    samples = server.wait("leap:labels_total", labels(before)["aborted"] + 1, kind="aborted")
    samples = server.wait("leap:output_tokens_count", at(before, "leap:output_tokens_count") + ended)
    check_every_metric(samples)
    now = finished(server)
    assert labels(samples) == {
        "exact": labels(before)["exact"] + now["stop"] - theirs["stop"],
        "censored": labels(before)["censored"] + now["length"] - theirs["length"],
        "forced": FORCED,
        "aborted": 1,
        "failed": 0,
    }
    for readout in ("prompt", "state"):
        predicted = at(samples, "leap:predictions_total", readout=readout)
        assert predicted - at(before, "leap:predictions_total", readout=readout) == ended + 1


def test_it_saves_when_it_is_stopped(server: Server, directory: Path) -> None:
    """Nothing was saved on the way: what lies there was written between the signal and the end."""
    together([partial(server.text, prompt, 8) for prompt in PROMPTS[:BATCH]])
    samples = server.until(lambda s: at(s, "leap:updates_total", readout="state") > 0, "it has learned")
    learned = {name: at(samples, "leap:updates_total", readout=name) for name in ("prompt", "state")}
    assert not (directory / "state" / "engine-0" / "state.json").exists()
    assert server.stop() == 0
    manifest = json.loads((directory / "state" / "engine-0" / "state.json").read_text())
    for name, entry in manifest["files"].items():
        readout = OnlineReadout.load(directory / "state" / "engine-0" / entry["name"])
        # What was left of a batch is learned at the end.
        assert learned[name] <= readout.updates <= learned[name] + 1
    # The table of embeddings, the largest file by far, does not stay behind.
    assert list((directory / f"leap-rs-{os.getuid()}").glob("embedding-*")) == []
