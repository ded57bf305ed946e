"""vLLM's queue of waiting requests: in its own order until the plugin is armed, by the core's aging queue then.

Both orders hold the same requests, so that arming and disarming lose nothing. vLLM prepends what it preempted or could
not admit in a step (a grammar that is not ready, the LoRA limit); by key it has no privilege of place.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from leap_rs._leap import AgingQueue

from .options import LeapOptions
from .order import Rank, Ranker

# Waiting requests that are given new keys in one step when predictions have changed.
RESCORED_A_STEP = 256


@dataclass(slots=True)
class _Entry:
    number: int
    request: Any
    queued_s: float


def first_by_urgency(queues: Iterable[WaitingQueue]) -> WaitingQueue | None:
    """Of armed queues the one whose first is next; None where nobody waits."""
    heads = [(head, queue) for queue in queues if (head := queue.head()) is not None]
    return min(heads, key=lambda pair: pair[0])[1] if heads else None


class WaitingQueue:
    """A `RequestQueue` of vLLM by duck typing. In the core's queues a request goes by its number in the ranker."""

    def __init__(
        self,
        ranker: Ranker,
        options: LeapOptions,
        *,
        lets_in: Callable[[Any], bool] | None = None,
        holders_first: bool = False,
    ) -> None:
        self._ranker = ranker
        self._options = options
        # Whether vLLM may look at the first, where admission control has a say.
        self._lets_in = lets_in
        self._holders_first = holders_first
        self._fcfs: deque[Any] = deque()
        # Kept here as well as in the ranker, which forgets a request before vLLM takes it out of the queue.
        self._entries: dict[int, _Entry] = {}
        self._numbers: dict[str, int] = {}
        self._queue = self._empty()
        self._to_rescore: deque[int] = deque()
        self._now = 0.0
        self.armed = False
        # The other queue of vLLM, where it has two: who is first by key may wait there.
        self.beside: tuple[WaitingQueue, ...] = ()
        # Taken out in this step before who was first by key. Whether they were admitted or put back, vLLM knows.
        self.promoted: list[Any] = []

    def _empty(self) -> AgingQueue:
        options = self._options
        return AgingQueue(1.0, memory_weight=options.memory_weight, wait_cap_s=options.wait_cap_s)

    # What vLLM calls.

    def add_request(self, request: Any) -> None:
        if self.armed:
            self._push(request)
        else:
            self._fcfs.append(request)

    def prepend_request(self, request: Any) -> None:
        if self.armed:
            self._push(request)
        else:
            self._fcfs.appendleft(request)

    def prepend_requests(self, requests: Iterable[Any]) -> None:
        for request in requests:
            self.prepend_request(request)

    def peek_request(self) -> Any:
        if len(self) == 0:
            raise IndexError("peek from an empty queue")
        return self._entries[self._queue.peek(self._now)].request if self.armed else self._fcfs[0]

    def pop_request(self) -> Any:
        if len(self) == 0:
            raise IndexError("pop from an empty queue")
        if not self.armed:
            return self._fcfs.popleft()
        number, _, promoted = self._queue.head(self._now)
        place = self._queue.key(number), number
        early = any(first < place for queue in self.beside if (first := queue._first_by_key()) is not None)
        request = self._take(number)
        if promoted or early:
            self.promoted.append(request)
        return request

    def remove_request(self, request: Any) -> None:
        if self.armed:
            number = self._numbers.get(request.request_id)
            if number is None:
                raise ValueError(f"request {request.request_id} is not in the queue")
            self._take(number)
        else:
            self._fcfs.remove(request)

    def remove_requests(self, requests: Iterable[Any]) -> None:
        """Takes out those that are in."""
        gone = set(requests)
        if not self.armed:
            self._fcfs = deque(request for request in self._fcfs if request not in gone)
            return
        for request in gone:
            number = self._numbers.get(request.request_id)
            if number is not None:
                self._take(number)

    def __bool__(self) -> bool:
        """Also False while vLLM looks for whom to admit and the first has no room."""
        if len(self) == 0:
            return False
        return self._lets_in is None or self._lets_in(self._first_of_all())

    def __len__(self) -> int:
        return len(self._entries) if self.armed else len(self._fcfs)

    def __contains__(self, request: object) -> bool:
        if not self.armed:
            return request in self._fcfs
        number = self._numbers.get(getattr(request, "request_id", ""))
        return number is not None and self._entries[number].request is request

    def __iter__(self) -> Iterator[Any]:
        if not self.armed:
            return iter(tuple(self._fcfs))
        by_key = sorted(self._entries.values(), key=lambda entry: (self._queue.key(entry.number), entry.number))
        return iter([entry.request for entry in by_key])

    # What the plugin's scheduler calls.

    def begin_step(self, now: float) -> None:
        """Sets the time by which waits are judged: one for a whole step, so that a peek and the pop after it agree."""
        self._now = now
        self.promoted.clear()

    def head(self) -> tuple[bool, float, int] | None:
        """How urgent the first is, comparable between queues: whether it is not overdue; since when, or its key; its number."""
        if not self.armed or not self._entries:
            return None
        number, overdue, _ = self._queue.head(self._now)
        return (False, self._entries[number].queued_s, number) if overdue else (True, self._queue.key(number), number)

    def arm(self, armed: bool) -> None:
        """Changes over to the order by key, or back to that of arrival."""
        if armed == self.armed:
            return
        if armed:
            self.armed = True
            requests, self._fcfs = self._fcfs, deque()
            for request in requests:
                self._push(request)
            return
        self._fcfs = deque(self._entries[number].request for number in sorted(self._entries))
        self._entries.clear()
        self._numbers.clear()
        self._to_rescore.clear()
        self._queue = self._empty()
        self.armed = False

    def rescore(self, requests: Iterable[Any] = (), fresh: Iterable[str] = (), *, everybody: bool = False) -> None:
        """Gives `requests` new keys, and a bounded number a step of the `fresh` (by their ids) and, after them, of `everybody`.

        Those who do not wait here are left out.
        """
        if not self.armed:
            return
        if everybody:
            self._to_rescore = deque(self._entries)
        self._to_rescore.extendleft(self._numbers[name] for name in fresh if name in self._numbers)
        numbers = [self._numbers[r.request_id] for r in requests if r.request_id in self._numbers]
        numbers += [self._to_rescore.popleft() for _ in range(min(RESCORED_A_STEP, len(self._to_rescore)))]
        for number in numbers:
            entry = self._entries.get(number)
            if entry is not None:
                rank = self._rank(entry.request)
                self._queue.rekey(number, rank.remaining, memory_tokens=rank.memory_tokens)

    def _first_of_all(self) -> Any:
        """Whom vLLM would look at next: by key the first of both queues, else of those that it skipped before."""
        queues = (self, *self.beside)
        if self.armed:
            first = first_by_urgency(queues)
        else:
            first = next((queue for queue in queues if queue._holders_first and len(queue) > 0), None)
        # Not by the truth of a queue, which is what is asked here.
        return (self if first is None else first).peek_request()

    def _first_by_key(self) -> tuple[float, int] | None:
        if not self._entries:
            return None
        number = self._queue.peek()
        return self._queue.key(number), number

    def _rank(self, request: Any) -> Rank:
        rank = self._ranker.rank(request)
        if self._holders_first and request.num_computed_tokens > 0:
            # It holds KV blocks: behind somebody who gets none it would never give them back.
            return rank._replace(remaining=1e-300, memory_tokens=1.0)
        return rank

    def _push(self, request: Any) -> None:
        live, rank = self._ranker.live(request), self._rank(request)
        self._queue.push(
            live.number, rank.remaining, rank.aged, memory_tokens=rank.memory_tokens, queued_s=live.queued_s
        )
        self._entries[live.number] = _Entry(live.number, request, live.queued_s)
        self._numbers[request.request_id] = live.number

    def _take(self, number: int) -> Any:
        entry = self._entries.pop(number)
        del self._numbers[entry.request.request_id]
        self._queue.remove(number)
        return entry.request
