"""Several vLLM engines in lock-step behind their load balancer, as plainly as possible: one step and one token at a time.

Chunked prefill and exact KV blocks; no prefix cache, no watermark, and a request enters only if its whole prompt fits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from math import ceil, nan
from typing import Any


@dataclass(eq=False)
class Request:
    id: int
    arrival: float
    prompt: int
    output: int
    rank: int = -1
    made: int = 0
    stored: int = 0
    target: int = 0
    blocks: int = 0
    delivered: int = 0
    preemptions: int = 0
    admitted: float = nan
    first: float = nan
    finish: float = nan

    @property
    def decodes(self) -> bool:
        # All that a resumed request may lack is its last token.
        lacks_one = self.stored >= self.prompt and self.stored + 1 == self.target
        return (self.stored >= self.target or lacks_one) and self.made < self.output


@dataclass(eq=False)
class Rank:
    engine: dict[str, Any]
    key: Callable[[Request], float]
    waiting: list[Request] = field(default_factory=list)
    residents: list[Request] = field(default_factory=list)  # in order of admission
    flying: int = 0
    preemptions: int = 0

    @property
    def free(self) -> int:
        return int(self.engine["kv_tokens"] // self.engine["block_size"] - sum(r.blocks for r in self.residents))

    def lacks(self, request: Request, tokens: int) -> int:
        return ceil(tokens / self.engine["block_size"]) - request.blocks

    def preempt_last(self) -> Request:
        victim = self.residents.pop()
        victim.stored = victim.blocks = 0
        victim.preemptions += 1
        self.preemptions += 1
        # One whose last token is under way has nothing left to wait for.
        if victim.made < victim.output:
            self.waiting.append(victim)
        return victim

    def store(self, request: Request, tokens: int) -> None:
        request.blocks += self.lacks(request, request.stored + tokens)
        request.stored += tokens
        assert self.free >= 0

    def compose(self, now: float) -> tuple[list[Request], float] | None:
        """Who gets a token from the next step, and its seconds."""
        before = self.preemptions
        decoders = [r for r in self.residents if r.decodes]
        while sum(self.lacks(r, r.stored + 1) for r in decoders) > self.free:
            victim = self.preempt_last()
            decoders = [r for r in decoders if r is not victim]
        for request in decoders:
            request.blocks += self.lacks(request, request.stored + 1)
        budget = self.engine["max_num_batched_tokens"] - len(decoders)
        chunks: list[tuple[Request, int, int]] = []
        for request in list(self.residents):
            chunk = 0 if request.decodes else min(request.target - request.stored, budget)
            while request in self.residents and chunk > 0 and self.lacks(request, request.stored + chunk) > self.free:
                victim = self.preempt_last()
                decoders = [r for r in decoders if r is not victim]
            if request in self.residents and chunk > 0:
                chunks.append((request, chunk, request.stored))
                self.store(request, chunk)
                budget -= chunk
        while self.preemptions == before and budget > 0 and self.waiting:
            head = min(self.waiting, key=self.key)
            head.target = head.prompt + head.made
            if len(self.residents) == self.engine["max_num_seqs"] or self.lacks(head, head.target) > self.free:
                break
            self.waiting.remove(head)
            self.residents.append(head)
            head.admitted = now if head.admitted != head.admitted else head.admitted
            chunk = min(head.target, budget)
            chunks.append((head, chunk, 0))
            self.store(head, chunk)
            budget -= chunk
        if not decoders and not chunks:
            return None
        seconds = self.seconds([r.stored for r in decoders], [(chunk, cached) for _, chunk, cached in chunks])
        for request in decoders:
            request.stored += 1
        tokens = decoders + [r for r, _, _ in chunks if r.stored == r.target]
        for request in tokens:
            request.made += 1
        return tokens, seconds

    def compose_again(self, now: float) -> tuple[list[Request], float] | None:
        """As `compose`; who gave up its blocks itself may have been the only one, and then the others go on at once."""
        while True:
            before = self.preemptions
            step = self.compose(now)
            if step is not None or self.flying or self.preemptions == before:
                return step

    def seconds(self, stored: list[int], chunks: list[tuple[int, int]]) -> float:
        cost = self.engine["cost"]
        read = sum(stored) + len(stored)
        prefill = sum(chunk for chunk, _ in chunks)
        pairs = sum(chunk * (cached + chunk / 2) for chunk, cached in chunks)
        return float(
            cost["step_s"]
            + cost["per_decode_seq_s"] * len(stored)
            + (cost["per_kv_token_s"] + (cost["per_kv_token_with_prefill_s"] if prefill else 0.0)) * read
            + cost["per_token_over_free_s"] * max(0.0, len(stored) + prefill - cost["free_tokens"])
            + cost["per_prefill_pair_s"] * pairs
        )


class Balancer:
    """vLLM's choice of a rank, from the counts that its coordinator has published by then: at once when nothing was
    published for 100 ms, else when these have passed."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.changes: list[tuple[float, list[tuple[int, int]]]] = []
        self.sent: list[tuple[float, int]] = []

    def report(self, now: float, counts: list[tuple[int, int]]) -> None:
        if counts != (self.changes[-1][1] if self.changes else [(0, 0)] * self.ranks):
            self.changes.append((now, counts))

    def choose(self, now: float) -> int:
        published, counts, left = float("-inf"), [(0, 0)] * self.ranks, self.changes
        while left and max(left[0][0], published + 0.1) <= now:
            published = max(left[0][0], published + 0.1)
            seen = [change for change in left if change[0] < published] or left[:1]
            counts, left = seen[-1][1], left[len(seen) :]
        # What was sent at the moment of a publication was composed, and reported, before that went out.
        since = [rank for at, rank in self.sent if at > published]
        score = [4 * (waiting + since.count(i)) + running for i, (waiting, running) in enumerate(counts)]
        first = len(self.sent)
        chosen = min(((first + i) % self.ranks for i in range(self.ranks)), key=lambda rank: score[rank])
        self.sent.append((now, chosen))
        return chosen


def lockstep(
    columns: dict[str, Any], engine: dict[str, Any], ranks: int, key: Callable[[Request], float] = lambda r: r.id
) -> list[Request]:
    """Every request with its times; all ranks compose together, and a step lasts until the slowest rank's has ended."""
    names = ("arrival_s", "prompt_tokens", "output_tokens")
    requests = [Request(i, *row) for i, row in enumerate(zip(*(columns[name].tolist() for name in names), strict=True))]
    deployment = [Rank(engine, key) for _ in range(ranks)]
    balancer = Balancer(ranks)
    coming = deque(requests)
    flights: deque[tuple[float, list[tuple[Rank, list[Request]]]]] = deque()
    now = horizon = 0.0
    while True:
        while coming and coming[0].arrival <= now:
            request = coming.popleft()
            request.rank = balancer.choose(request.arrival) if ranks > 1 else 0
            deployment[request.rank].waiting.append(request)
        while flights and flights[0][0] <= now:
            end, landed = flights.popleft()
            for rank, tokens in landed:
                rank.flying -= 1
                for request in tokens:
                    request.delivered += 1
                    if request.delivered == 1:
                        request.first = end
                    if request.delivered == request.output:
                        request.finish = end
                        rank.residents = [r for r in rank.residents if r is not request]
        steps = [(rank, rank.compose_again(now)) for rank in deployment]
        balancer.report(now, [(len(rank.waiting), len(rank.residents)) for rank in deployment])
        busy = [(rank, step) for rank, step in steps if step is not None]
        if busy:
            start = max(now, horizon)
            horizon = start + max(seconds for _, (_, seconds) in busy)
            for rank, _ in busy:
                rank.flying += 1
            flights.append((horizon, [(rank, tokens) for rank, (tokens, _) in busy]))
            now = start if engine["async_scheduling"] else horizon
        elif flights:
            now = flights[0][0]
        elif coming:
            now = coming[0].arrival
        else:
            assert not any(rank.waiting or rank.residents for rank in deployment)
            return requests
