"""What the plugin's fault leaves behind, made vLLM's own again: the waiting queues, and all that a step holds back."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import Any

from vllm.v1.request import RequestStatus

from .guard import Guard
from .waiting import WaitingQueue


class GuardedQueue(WaitingQueue):
    """The queue that vLLM is given: whatever becomes of the one by key, it knows who waits, and in vLLM's own order."""

    def __init__(self, guard: Guard, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._guard = guard
        self._held: OrderedDict[str, Any] = OrderedDict()
        self._looked_at: Any = None

    def add_request(self, request: Any) -> None:
        self._held[request.request_id] = request
        self._guard.call(super().add_request, request)

    def prepend_request(self, request: Any) -> None:
        self._held[request.request_id] = request
        self._held.move_to_end(request.request_id, last=False)
        self._guard.call(super().prepend_request, request)

    def prepend_requests(self, requests: Iterable[Any]) -> None:
        for request in requests:
            self.prepend_request(request)

    def peek_request(self) -> Any:
        if not self._held:
            raise IndexError("peek from an empty queue")
        found = self._guard.call(super().peek_request)
        self._looked_at = next(iter(self._held.values())) if found is None else found
        return self._looked_at

    def pop_request(self) -> Any:
        if not self._held:
            raise IndexError("pop from an empty queue")
        found = self._guard.call(super().pop_request)
        if found is None:
            # vLLM has given blocks to the one that it looked at, maybe before the fault.
            seen = self._looked_at
            found = seen if seen is not None and seen in self else next(iter(self._held.values()))
        self._looked_at = None
        del self._held[found.request_id]
        return found

    def remove_request(self, request: Any) -> None:
        if self._held.pop(request.request_id, None) is None:
            raise ValueError(f"request {request.request_id} is not in the queue")
        self._guard.call(super().remove_request, request)

    def remove_requests(self, requests: Iterable[Any]) -> None:
        gone = set(requests)
        for request in gone:
            self._held.pop(request.request_id, None)
        self._guard.call(super().remove_requests, gone)

    def __bool__(self) -> bool:
        return bool(self._held) and bool(self._guard.call(super().__bool__, otherwise=True))

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, request: object) -> bool:
        return self._held.get(getattr(request, "request_id", "")) is request

    def __iter__(self) -> Iterator[Any]:
        found = self._guard.call(super().__iter__)
        return iter(tuple(self._held.values())) if found is None else found

    def give_up(self) -> None:
        """Keeps nothing but who waits, after a fault."""
        self.armed = False
        self._looked_at = None
        for kept in (self._fcfs, self._entries, self._numbers, self._to_rescore, self.promoted):
            kept.clear()
        self._queue = self._empty()


class Step:
    """What of vLLM's is held back while a step is composed, so that it can be given back whatever has happened."""

    def __init__(self) -> None:
        self.held: list[tuple[Any, int]] = []
        """Residents that are passed over, with the tokens that they seem to have computed more than they have."""
        self.aside: list[Any] = []
        """Those who gave way: they come back into the queue when vLLM has gone through it."""

    def take_back(self, scheduler: Any) -> None:
        """Gives back what a step has held, after it."""
        for request, tokens in self.held:
            if request.status == RequestStatus.RUNNING:
                request.num_computed_tokens -= tokens
        for request in self.aside:
            scheduler.waiting.prepend_request(request)

    def mend(self, scheduler: Any) -> None:
        """Makes a step that was half composed one of vLLM's own."""
        for request, tokens in self.held:
            request.num_computed_tokens -= tokens
        self.held = []
        for request in tuple(self.aside):
            scheduler.prev_step_scheduled_req_ids.discard(request.request_id)
            if request.status == RequestStatus.RUNNING:
                # It was about to give way, and still has its blocks.
                self.aside.remove(request)
                if request not in scheduler.running:
                    scheduler.running.append(request)
            elif request in scheduler.waiting:
                scheduler.waiting.remove_request(request)


def let_go(parts: Iterable[Any]) -> None:
    """Has every part forget the requests that it knows of: nobody will tell it of their ends."""
    for part in parts:
        with contextlib.suppress(Exception):
            part.give_up()
