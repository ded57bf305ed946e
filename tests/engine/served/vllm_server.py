"""vLLM's API server in a process of its own, and what a client sees of it: answers, metrics, and the log."""

from __future__ import annotations

import http.client
import json
import math
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CLI = str(Path(__file__).with_name("vllm_cli.py"))
DEFAULTS = {
    "dtype": "float32",
    "max-model-len": "512",
    "max-num-seqs": "8",
    "max-num-batched-tokens": "256",
    "block-size": "32",
    "seed": "0",
    "scheduler-cls": "leap_rs.vllm.LeapScheduler",
}
NAME = "SmolLM2-135M-Instruct"
START_S = 400.0
DEADLINE_S = 60.0

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


@dataclass
class Server:
    """A running server."""

    process: subprocess.Popen[bytes]
    port: int
    model: Path
    out: Path

    @property
    def log(self) -> str:
        return self.out.read_text(errors="replace")

    def _open(self, method: str, path: str, body: Any, headers: dict[str, str]) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        sent = None if body is None else json.dumps(body)
        # A connection each: which of several API processes answers is settled with the connection.
        fixed = {"Content-Type": "application/json", "Connection": "close"}
        connection.request(method, path, sent, {**fixed, **headers})
        response = connection.getresponse()
        assert response.status == 200, response.read().decode()
        return response

    def get(self, path: str) -> str:
        return self._open("GET", path, None, {}).read().decode()

    def post(self, path: str, body: dict[str, Any], **headers: str) -> dict[str, Any]:
        given = {"model": NAME, "temperature": 0, **body}
        answer: dict[str, Any] = json.loads(self._open("POST", path, given, headers).read())
        return answer

    def chat(self, text: str, max_tokens: int, request_id: str = "", **body: Any) -> list[dict[str, Any]]:
        """The answers (choices) to a user's message."""
        given = {**_message(text), "max_tokens": max_tokens, **body}
        headers = {"X-Request-Id": request_id} if request_id else {}
        choices: list[dict[str, Any]] = self.post("/v1/chat/completions", given, **headers)["choices"]
        return choices

    def text(self, text: str, max_tokens: int, request_id: str = "") -> str:
        return str(self.chat(text, max_tokens, request_id)[0]["message"]["content"])

    @contextmanager
    def stream(self, text: str, max_tokens: int, **body: Any) -> Iterator[Iterator[str]]:
        """The parts of an answer as they come; leaving before the last one closes the connection."""
        given = {"model": NAME, "temperature": 0, "stream": True, **_message(text), "max_tokens": max_tokens, **body}
        response = self._open("POST", "/v1/chat/completions", given, {})
        try:
            yield _parts(response)
        finally:
            response.close()

    def metrics(self, prefix: str = "leap:") -> Samples:
        """Every sample of `/metrics` whose name begins with the prefix."""
        from prometheus_client.parser import text_string_to_metric_families

        samples = [s for family in text_string_to_metric_families(self.get("/metrics")) for s in family.samples]
        mine = [s for s in samples if s.name.startswith(prefix)]
        made = {(s.name, frozenset(s.labels.items())): s.value for s in mine}
        assert len(made) == len(mine)
        return made

    def wait(self, name: str, value: float, **labels: str) -> Samples:
        """The metrics once one of them has a value; the engine counts after it has answered."""
        return self.until(lambda samples: at(samples, name, **labels) == value, f"{name} {labels} is {value}")

    def until(self, condition: Callable[[Samples], bool], what: str) -> Samples:
        deadline = time.monotonic() + DEADLINE_S
        while True:
            samples = self.metrics()
            if condition(samples):
                return samples
            assert time.monotonic() < deadline, (what, samples, self.log[-4000:])
            time.sleep(0.1)

    def stop(self) -> int:
        """Stops it as an operator does; the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)


def at(samples: Samples, name: str, **labels: str) -> float:
    """A sample of an engine's."""
    return samples[name, frozenset({"model_name": NAME, "engine": "0", **labels}.items())]


def same(left: Samples, right: Samples) -> bool:
    """Whether two scrapes show the same, undefined numbers included."""
    return left.keys() == right.keys() and all(
        right[key] == value or (math.isnan(value) and math.isnan(right[key])) for key, value in left.items()
    )


def together(calls: Sequence[Callable[[], Any]], clients: int = 32) -> list[Any]:
    """What calls return that are made at the same time."""
    with ThreadPoolExecutor(clients) as pool:
        return [future.result() for future in [pool.submit(call) for call in calls]]


@contextmanager
def served(
    environment: dict[str, str],
    model: Path,
    directory: Path,
    leap: dict[str, Any],
    *options: str,
    within: Sequence[str] = (),
) -> Iterator[Server]:
    """A server of a model with the plugin's options `leap`; `within` is a command that runs it."""
    port = _free_port()
    command = [*within, sys.executable, CLI, "serve", str(model), "--enforce-eager", "--port", str(port)]
    command += [part for name, value in DEFAULTS.items() for part in (f"--{name}", value)]
    command += ["--served-model-name", NAME, "--additional-config", json.dumps({"leap": leap}), *options]
    out = directory / "server.log"
    with out.open("wb") as log:
        process = subprocess.Popen(
            command, env={**environment, "TMPDIR": str(directory)}, stdout=log, stderr=subprocess.STDOUT
        )
        server = Server(process, port, model, out)
        try:
            _wait_for_health(server)
            yield server
        finally:
            try:
                server.stop()
            finally:
                process.kill()


def bench(server: Server, environment: dict[str, str], directory: Path, *options: str) -> dict[str, Any]:
    """The result file of vLLM's own client, whose first request is the first that is measured."""
    command = [sys.executable, CLI, "bench", "serve", "--model", NAME, "--tokenizer", str(server.model)]
    command += ["--port", str(server.port), "--ready-check-timeout-sec", "0", "--temperature", "0", "--disable-tqdm"]
    command += ["--save-result", "--save-detailed", "--result-dir", str(directory), "--result-filename", "result.json"]
    done = subprocess.run([*command, *options], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:] + server.log[-4000:]
    result: dict[str, Any] = json.loads((directory / "result.json").read_text())
    return result


def _message(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]}


def _parts(response: http.client.HTTPResponse) -> Iterator[str]:
    while line := response.readline().decode().strip() or response.readline().decode().strip():
        if line == "data: [DONE]":
            return
        for choice in json.loads(line.removeprefix("data: "))["choices"]:
            if choice["delta"].get("content"):
                yield choice["delta"]["content"]
    raise AssertionError("the stream ended without saying so")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_for_health(server: Server) -> None:
    deadline = time.monotonic() + START_S
    while True:
        assert server.process.poll() is None, server.log[-6000:]
        assert time.monotonic() < deadline, server.log[-6000:]
        try:
            server.get("/health")
        except OSError:
            time.sleep(0.25)
        else:
            return
