"""Random requests to an API server, drawn with a seed: what clients send, what they break off, and what came back
wrong.

Arrivals are Poisson or come in bursts; meanwhile the engine is paused, put to sleep and has its prefix cache reset.
Between them stand reference requests, a fixed set with one right answer each, which is compared token by token.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from server_prompts import PROMPTS, QUESTIONS
from vllm_server import NAME, Server

from .adapters import NAMES as ADAPTERS

IN_FLIGHT = 24
TIMEOUT_S = 240.0
SCHEMA = {
    "type": "object",
    "properties": {"answer": {"type": "string", "enum": ["yes", "no"]}, "sure": {"type": "boolean"}},
    "required": ["answer", "sure"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
STOPS = (["."], ["\n"], [" the", ","], ["!", "?"])
FILLER = "The harbour master wrote down every ship that came in its flag its cargo and the hour of its arrival"


@dataclass
class Asked:
    """A request: its body, and how long its client waits for it."""

    body: dict[str, Any]
    parts: int | None = None
    """Of a stream, those after which the client goes away; None: it waits for the end."""
    reference: int | None = None

    @property
    def kinds(self) -> list[str]:
        body = self.body
        kinds = {
            "n > 1": body.get("n", 1) > 1,
            "LoRA": body["model"] != NAME,
            "JSON": "response_format" in body,
            "forced": "ignore_eos" in body or "min_tokens" in body,
            "streamed": bool(body.get("stream")),
        }
        return [kind for kind, has in kinds.items() if has]


@dataclass
class Seen:
    """What became of the requests."""

    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    answers: list[tuple[int, Any]] = field(default_factory=list)
    """Of reference requests, in the order in which they came: the number of the request, and its tokens and ends."""


def asked(text: str, max_tokens: int, **body: Any) -> dict[str, Any]:
    fixed = {"model": NAME, "temperature": 0.0, "max_tokens": max_tokens, "return_token_ids": True}
    return {**fixed, "messages": [{"role": "user", "content": text}], **body}


def references() -> list[Asked]:
    """Requests with one right answer: greedy ones.

    None is sampled with a seed: on the CPU that ends vLLM's worker where such a prompt is computed in parts, for it takes
    the draw of an unfinished part back, and PyTorch's generators of the CPU cannot.
    """
    bodies = [asked(question, 24) for question in QUESTIONS]
    bodies += [asked(question, 24, model=name) for name in ADAPTERS for question in QUESTIONS[:3]]
    bodies += [asked(PROMPTS[3 * i], length, ignore_eos=True) for i, length in enumerate((20, 60, 90))]
    bodies += [asked(PROMPTS[2], 40, stop=["."]), asked(PROMPTS[5], 40, stop_token_ids=[28, 30])]
    bodies += [asked(PROMPTS[7], 50, min_tokens=30), asked(QUESTIONS[4], 40, response_format=FORMAT)]
    return [Asked(body, reference=number) for number, body in enumerate(bodies)]


def drawn(rng: random.Random, fixed: list[Asked]) -> Asked:
    """A request at random: one in four is a reference."""
    if rng.random() < 0.25:
        return rng.choice(fixed)
    filler = " ".join(rng.choices(FILLER.split(), k=rng.choice((0, 0, 5, 20, 60))))
    body = asked(f"{filler} {rng.choice(PROMPTS)}", rng.choice((1, 2, 8, 16, 32, 64, 100)), temperature=1.0)
    changes: list[tuple[float, dict[str, Any]]] = [
        (0.30, {"model": rng.choice(ADAPTERS)}),
        (0.15, {"n": rng.choice((2, 3))}),
        (0.12, {"response_format": FORMAT, "max_tokens": 60}),
        (0.15, {"stop": rng.choice(STOPS)}),
        (0.10, {"stop_token_ids": rng.sample(range(20, 60), 3)}),
        (0.10, {"ignore_eos": True}),
        (0.05, {"min_tokens": rng.randrange(1, body["max_tokens"] + 1)}),
        (0.50, {"stream": True, "stream_options": {"include_usage": True}}),
    ]
    for share, change in changes:
        if rng.random() < share:
            body |= change
    parts = None
    if rng.random() < 0.2:
        body |= {"stream": True}
        parts = int(rng.expovariate(1 / 8))
    return Asked(body, parts)


def faults_of(sent: Asked, choices: list[dict[str, Any]], usage: dict[str, Any]) -> list[str]:
    """What of an answer is not as the request has it. An engine that pauses may abort any."""
    body = sent.body
    if any(choice["finish_reason"] == "abort" for choice in choices):
        return []
    found = []
    if len(choices) != body.get("n", 1):
        found.append(f"{len(choices)} answers")
    if usage["completion_tokens"] != sum(len(choice["token_ids"]) for choice in choices):
        found.append(f"{usage['completion_tokens']} tokens counted, {[len(c['token_ids']) for c in choices]} sent")
    for choice in choices:
        reason, text, made = choice["finish_reason"], choice["text"], len(choice["token_ids"])
        if made > body["max_tokens"] or (reason == "length" and made != body["max_tokens"]):
            found.append(f"{reason} after {made} tokens")
        # A schema may be fulfilled before, and then allows nothing but the end.
        if made < body.get("min_tokens", 0) and "response_format" not in body:
            found.append(f"only {made} tokens")
        if body.get("ignore_eos") and "stop" not in body and "stop_token_ids" not in body and reason != "length":
            found.append(f"{reason} though forced")
        if any(stop in text for stop in body.get("stop", ())) and "min_tokens" not in body:
            found.append(f"a stop string in {text!r}")
        if reason == "stop" and "response_format" in body and not {"stop", "stop_token_ids"} & body.keys():
            with contextlib.suppress(ValueError):
                if set(json.loads(text)) == set(SCHEMA["required"]):
                    continue
            found.append(f"no answer by the schema: {text!r}")
    return found


class Traffic:
    """Clients of one server."""

    def __init__(self, server: Server, seed: int, seen: Seen) -> None:
        self._url = f"http://127.0.0.1:{server.port}"
        self._rng = random.Random(seed)
        self._references = references()
        self._put_down = False
        self.seen = seen

    async def __aenter__(self) -> Traffic:
        # A connection each, so that none is open at rest.
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
        self._session = aiohttp.ClientSession(self._url, connector=connector, timeout=timeout)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def alone(self) -> None:
        """The reference requests one by one, on an engine that has nothing else to do."""
        for request in self._references:
            await self._send(request)

    async def burst(self, until: float) -> None:
        """Random requests until then, and their ends."""
        tasks: set[asyncio.Task[None]] = set()
        changes = asyncio.create_task(self._change(until))
        while (now := time.monotonic()) < until:
            if self._rng.random() < 0.3:
                tasks |= {self._start() for _ in range(self._rng.randrange(4, IN_FLIGHT))}
            rate, phase = self._rng.choice((0.5, 2.0, 6.0)), now + self._rng.uniform(2, 8)
            while time.monotonic() < min(phase, until):
                await asyncio.sleep(self._rng.expovariate(rate))
                tasks = {task for task in tasks if not task.done()}
                if len(tasks) < IN_FLIGHT:
                    tasks.add(self._start())
        await changes
        if tasks:
            await asyncio.wait(tasks)

    def _start(self) -> asyncio.Task[None]:
        return asyncio.create_task(self._send(drawn(self._rng, self._references)))

    async def _send(self, sent: Asked) -> None:
        counts = self.seen.counts
        counts.update(["sent", *sent.kinds])
        try:
            async with self._session.post("/v1/chat/completions", json=sent.body) as response:
                if response.status != 200:
                    raise RuntimeError(f"status {response.status}: {(await response.text())[:300]}")
                if sent.body.get("stream"):
                    choices, usage = await self._stream(response, sent)
                else:
                    answer = await response.json()
                    choices, usage = answer["choices"], answer["usage"]
                    for choice in choices:
                        choice["text"] = choice["message"]["content"] or ""
        except Exception as error:
            self.seen.wrong.append(f"{type(error).__name__} {error}: {json.dumps(sent.body)}")
            return
        if usage is None:
            counts["aborted"] += 1
            return
        counts["done"] += 1
        if any(choice["finish_reason"] == "abort" for choice in choices):
            counts["put down by a pause"] += 1
            if not self._put_down:
                self.seen.wrong.append(f"aborted, and no pause was there: {json.dumps(sent.body)}")
        counts["stopped"] += any(choice.get("stop_reason") is not None for choice in choices)
        self.seen.wrong += [f"{fault}: {json.dumps(sent.body)}" for fault in faults_of(sent, choices, usage)]
        ends = [(choice["token_ids"], choice["finish_reason"]) for choice in choices]
        if sent.reference is not None and all(reason != "abort" for _, reason in ends):
            self.seen.answers.append((sent.reference, ends))

    async def _stream(self, response: Any, sent: Asked) -> tuple[list[dict[str, Any]], dict[str, Any] | None]:
        """The answers of a stream, and their usage; none where the client went away, which closes the connection."""
        choices: dict[int, dict[str, Any]] = {}
        usage, parts = None, 0
        async for line in response.content:
            if sent.parts is not None and (parts := parts + 1) > sent.parts:
                response.close()
                return [], None
            text = line.decode().strip().removeprefix("data: ")
            if text == "[DONE]":
                # Who is aborted before its first token is not told so.
                for made in choices.values():
                    made["finish_reason"] = made["finish_reason"] or (None if made["token_ids"] else "abort")
                return list(choices.values()), usage
            if not text:
                continue
            event = json.loads(text)
            if "error" in event:
                raise RuntimeError(text)
            usage = event.get("usage") or usage
            for part in event["choices"]:
                made = choices.setdefault(part["index"], {"text": "", "token_ids": [], "finish_reason": None})
                made["text"] += part["delta"].get("content") or ""
                made["token_ids"] += part.get("token_ids") or []
                for name in ("finish_reason", "stop_reason"):
                    made[name] = part.get(name) or made.get(name)
        raise RuntimeError("the stream ended without saying so")

    async def _change(self, until: float) -> None:
        """Pauses, sleeps and resets of the prefix cache, each of which is taken back."""
        rng = self._rng
        while True:
            await asyncio.sleep(rng.uniform(3, 10))
            if time.monotonic() > until:
                return
            mode, inside = rng.choice(("keep", "keep", "wait", "abort")), rng.choice(("true", "false"))
            away, back = rng.choice(
                (
                    (f"/pause?mode={mode}", "/resume"),
                    (f"/sleep?level={rng.choice((0, 1))}&mode={mode}", "/wake_up"),
                    (f"/reset_prefix_cache?reset_running_requests={inside}", None),
                )
            )
            self._put_down |= "mode=abort" in away
            await self._ask(away)
            await asyncio.sleep(rng.uniform(0.1, 1.0))
            if back is not None:
                await self._ask(back)

    async def _ask(self, path: str) -> None:
        self.seen.counts["changes of the engine"] += 1
        try:
            async with self._session.post(path) as response:
                if response.status != 200:
                    raise RuntimeError(f"status {response.status}: {(await response.text())[:300]}")
        except Exception as error:
            self.seen.wrong.append(f"{type(error).__name__} {error}: {path}")
