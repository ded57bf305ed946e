"""vLLM's queue of waiting requests, which stays vLLM's own: before a step the plugin puts those who wait in the core's order.

All that vLLM does with a queue in the midst of a step is vLLM's own code, so nobody can be lost here, and a step costs what
it costs without the plugin, however many wait. Who comes and goes is noted, and looked at between the steps. vLLM prepends
what it preempted or could not admit in a step (a grammar that is not ready, the LoRA limit); by key it has no privilege of
place.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence, Sized
from itertools import islice
from typing import Any

from vllm.v1.core.sched.request_queue import FCFSRequestQueue
from vllm.v1.request import RequestStatus

from leap_rs._leap import AgingQueue

from .options import LeapOptions
from .order import Ranker

RESCORED_A_STEP = 64
"""Waiting requests that are given new keys in one step when predictions have changed."""
INSERTED_A_STEP = 8
"""Newcomers that are put in their places one by one; where there are more, all are put in order anew."""

_Urgency = tuple[bool, float, int]


def first_by_urgency(queues: Iterable[WaitingQueue]) -> WaitingQueue | None:
    """Of armed queues that are in order the one whose first is next; None where nobody waits."""
    heads = [(urgency, queue) for queue in queues if (urgency := queue.urgency()) is not None]
    return min(heads, key=lambda pair: pair[0])[1] if heads else None


class WaitingQueue(FCFSRequestQueue):  # type: ignore[misc]
    """The queue that vLLM is given. In the core's queue a request goes by its number in the ranker."""

    # vLLM's own are written in Python, and a step may ask them once for each who waits.
    __len__ = deque.__len__
    __iter__ = deque.__iter__

    def __init__(
        self,
        ranker: Ranker,
        options: LeapOptions,
        *,
        lets_in: Callable[[WaitingQueue], bool] | None = None,
        holders_first: bool = False,
    ) -> None:
        super().__init__()
        self._ranker = ranker
        self._options = options
        # Whether vLLM may look at the first, where admission control has a say.
        self._lets_in = lets_in
        self._holders_first = holders_first
        self.armed = False
        # The other queue of vLLM, where it has two: who is first by key may wait there.
        self.beside: tuple[WaitingQueue, ...] = ()
        # Who has been popped and not put back yet: a step may do so with all.
        self._popped: list[Any] = []
        # Who has come and who has gone since the core was told last; dictionaries, which keep the order.
        self._came: dict[Any, None] = {}
        self._gone: dict[Any, None] = {}
        # Whom the core knows. Kept here as well as in the ranker, which may forget a request before vLLM takes it out.
        self._numbers: dict[str, int] = {}
        self._requests: OrderedDict[int, Any] = OrderedDict()
        self._queue = self._empty()
        # Who is not in their place yet, and whether that is anybody.
        self._misplaced: dict[Any, None] = {}
        self._disordered = False
        self._next_overdue_s: float | None = None
        self._now = 0.0
        # Who is rescored before all others, and how many of all are still to be: each moves to the end of `_requests`.
        self._fresh: deque[str] = deque()
        self._stale = 0

    def _empty(self) -> AgingQueue:
        options = self._options
        return AgingQueue(1.0, memory_weight=options.memory_weight, wait_cap_s=options.wait_cap_s)

    # What vLLM calls: its own, with a note of who comes and goes. Nothing of it can fail, for nothing guards it.

    def add_request(self, request: Any) -> None:
        self.append(request)
        if self.armed:
            self._enters(request)

    def prepend_request(self, request: Any) -> None:
        self.appendleft(request)
        if self.armed:
            self._enters(request)

    def prepend_requests(self, requests: Iterable[Any]) -> None:
        requests = tuple(requests)
        self.extendleft(requests)
        if self.armed:
            # Whom a step has passed over comes back in the order in which it was taken, to its own place.
            popped, self._popped, back = self._popped, [], set(requests)
            for request in [request for request in popped if request not in back]:
                self._leaves(request)
            for request in back.difference(popped):
                self._enters(request)

    def peek_request(self) -> Any:
        # Not by the truth of the queue, for which admission control is asked.
        return self[0]

    def pop_request(self) -> Any:
        request = self.popleft()
        if self.armed:
            self._popped.append(request)
        return request

    def remove_request(self, request: Any) -> None:
        self.remove(request)
        if self.armed:
            self._note_popped()
            self._leaves(request)

    def remove_requests(self, requests: Iterable[Any]) -> None:
        gone = set(requests).intersection(self)
        if gone:
            super().remove_requests(gone)
        if self.armed:
            self._note_popped()
            for request in gone:
                self._leaves(request)

    def __bool__(self) -> bool:
        """Also False while vLLM looks for whom to admit and the first has no room."""
        lets_in = self._lets_in
        return len(self) > 0 and (lets_in is None or lets_in(self))

    def _note_popped(self) -> None:
        """Those who were popped and not put back are gone."""
        popped, self._popped = self._popped, []
        for request in popped:
            self._leaves(request)

    def _enters(self, request: Any) -> None:
        self._note_popped()
        if request in self._gone:
            # The core still knows it.
            del self._gone[request]
            self._misplaced[request] = None
        else:
            self._came[request] = None

    def _leaves(self, request: Any) -> None:
        if request in self._came:
            del self._came[request]
        else:
            self._gone[request] = None

    # What the plugin's scheduler calls. A step: `rescore`, `arrange`, vLLM's own part, `admitted`.

    def arm(self, armed: bool) -> None:
        """Changes over to the order by key, or back to that of arrival."""
        if armed == self.armed:
            return
        if armed:
            self.armed = True
            self._came = dict.fromkeys(self)
            return
        self._tell()
        self._put([self._requests[number] for number in sorted(self._requests)])
        self._forget()

    def give_up(self) -> None:
        """After a fault: vLLM's own order, as far as it is known, and nothing kept but who waits."""
        if self.armed:
            self._put(sorted(self, key=lambda request: request.arrival_time))
        self._forget()

    def _forget(self) -> None:
        self.armed = self._disordered = False
        for kept in (self._popped, self._came, self._gone, self._numbers, self._requests, self._misplaced, self._fresh):
            kept.clear()
        self._stale = 0
        self._queue = self._empty()

    def arrange(self, now: float) -> None:
        """Puts those who wait in their order at `now`. vLLM takes them by it until this is called again."""
        if not self.armed:
            return
        self._tell()
        self._now = now
        newly_overdue = self._next_overdue_s is not None and now >= self._next_overdue_s
        if self._disordered or newly_overdue or len(self._misplaced) > INSERTED_A_STEP:
            self._put(list(map(self._requests.__getitem__, self._queue.order(now))))
        elif self._misplaced:
            self._insert()
        self._misplaced.clear()
        self._disordered = False
        self._next_overdue_s = self._queue.next_overdue(now) if self._options.wait_cap_s is not None else None

    def admitted(self) -> int:
        """After vLLM's part of a step: how many went in before who was first by key."""
        overtook = 0
        if self.armed and self._options.wait_cap_s is not None:
            self._note_popped()
            for request in tuple(self._gone):
                # Not those who were only looked at, and wait elsewhere now.
                overtook += request.status == RequestStatus.RUNNING and self._overtakes(request)
                self._take(request)
        return overtook

    def forget_gone(self) -> None:
        """Between steps: keeps nothing of those who have gone."""
        if self.armed and (self._gone or self._popped):
            self._tell()

    def kept(self) -> tuple[Sized, ...]:
        """All that is kept of those who wait."""
        return self, self._popped, self._came, self._gone, self._numbers, self._requests, self._misplaced, self._fresh

    def first(self, now: float) -> tuple[_Urgency, Any] | None:
        """How urgent who is next at `now` is, and who: in its place already or not; None where nobody waits."""
        self._tell()
        if not self._requests:
            return None
        number, _, _ = self._queue.head(now)
        return self._urgency_of(number, now), self._requests[number]

    def urgency(self) -> _Urgency | None:
        """In vLLM's part of a step: how urgent the first is, comparable between queues; None where nobody waits.

        None, too, where the first has only just been put there: vLLM asks once more after it has put back who it passed over.
        """
        number = self._numbers.get(self[0].request_id) if self.armed and len(self) > 0 else None
        return None if number is None else self._urgency_of(number, self._now)

    def first_of_all(self) -> Any:
        """Whom vLLM would look at next: by key the first of both queues, else of those that it skipped before."""
        if not self.beside:
            return self[0]
        queues = (self, *self.beside)
        if self.armed:
            first = first_by_urgency(queues)
        else:
            first = next((queue for queue in queues if queue._holders_first and len(queue) > 0), None)
        return self[0] if first is None else first[0]

    def rescore(self, requests: Iterable[Any] = (), fresh: Iterable[str] = (), *, everybody: bool = False) -> None:
        """Gives `requests` new keys, and a bounded number a step of the `fresh` (by their ids) and, after them, of `everybody`.

        Those who do not wait here are left out.
        """
        if not self.armed:
            return
        self._tell()
        self._fresh.extend(fresh)
        if everybody:
            self._stale = len(self._requests)
        known = self._numbers
        numbers = dict.fromkeys(known[r.request_id] for r in requests if r.request_id in known)
        left = RESCORED_A_STEP
        while self._fresh and left > 0:
            number = known.get(self._fresh.popleft())
            if number is not None:
                numbers[number] = None
                left -= 1
        turns = list(islice(self._requests, min(left, self._stale)))
        self._stale -= len(turns)
        for number in turns:
            self._requests.move_to_end(number)
            numbers[number] = None
        if numbers:
            remaining, memory = self._ranks([self._requests[number] for number in numbers])
            self._queue.rekey_many(list(numbers), remaining, memory)
            self._disordered = True

    def _tell(self) -> None:
        """Lets the core know who has come and who has gone."""
        self._note_popped()
        for request in tuple(self._gone):
            self._take(request)
        came, self._came = list(self._came), {}
        if not came:
            return
        remaining, memory = self._ranks(came)
        for request, tokens, held in zip(came, remaining, memory, strict=True):
            live = self._ranker.live(request)
            self._queue.push(live.number, tokens, live.aged, memory_tokens=held, queued_s=live.queued_s)
            self._requests[live.number] = request
            self._numbers[request.request_id] = live.number
            self._misplaced[request] = None

    def _take(self, request: Any) -> None:
        del self._gone[request]
        self._misplaced.pop(request, None)
        number = self._numbers.pop(request.request_id)
        del self._requests[number]
        self._queue.remove(number)

    def _put(self, requests: list[Any]) -> None:
        if len(requests) != len(self):
            raise RuntimeError(f"{len(requests)} requests are known of {len(self)} who wait")
        self.clear()
        self.extend(requests)

    def _insert(self) -> None:
        """Puts those who are not in their places there; all others are."""
        places = {self._queue.place(self._numbers[r.request_id], self._now): r for r in self._misplaced}
        left = dict(self._misplaced)
        # vLLM adds at both ends.
        while left and self[-1] in left:
            del left[self.pop()]
        while left and self[0] in left:
            del left[self.popleft()]
        for request in left:
            self.remove(request)
        for place in sorted(places):
            self.insert(place, places[place])

    def _urgency_of(self, number: int, now: float) -> _Urgency:
        overdue, at = self._queue.urgency(number, now)
        return not overdue, at, number

    def _overtakes(self, request: Any) -> bool:
        number = self._numbers[request.request_id]
        place = self._queue.key(number), number
        others = [queue._first_by_key() for queue in self.beside]
        return self._queue.peek() != number or any(first is not None and first < place for first in others)

    def _first_by_key(self) -> tuple[float, int] | None:
        number = self._queue.peek() if self._requests else None
        return None if number is None or self._requests[number] in self._gone else (self._queue.key(number), number)

    def _ranks(self, requests: Sequence[Any]) -> tuple[list[float], list[float]]:
        remaining, memory = self._ranker.ranks(requests)
        for i, request in enumerate(requests) if self._holders_first else ():
            if request.num_computed_tokens > 0:
                # It holds KV blocks: behind somebody who gets none it would never give them back.
                remaining[i], memory[i] = 1e-300, 1.0
        return remaining, memory
