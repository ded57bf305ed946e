"""What the plugin's fault leaves behind, made vLLM's own again: all that a step holds back."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

from vllm.v1.request import RequestStatus


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
