"""The lever admission: what vLLM's requests are to the core's admission control, and what its answer is to vLLM.

While vLLM's `schedule` runs, the waiting queue is empty as soon as its head has no room for what it will grow into; whoever
looks at it in between, metrics among them, sees all that wait. Needs no order and no readout: where nothing is known of a
request it goes by the lengths that have finished.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from typing import Any

from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec
from vllm.v1.request import RequestStatus

from leap_rs._leap import Admission

from .compat import adapters_in_use, seats
from .options import LeapOptions
from .order import Live, Ranker, generated
from .waiting import WaitingQueue

_WAITING, _PREEMPTED = RequestStatus.WAITING, RequestStatus.PREEMPTED
_GRAMMAR = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
# Residents whose lengths are asked for anew in one step when predictions have changed.
RELEARNED_A_STEP = 64


def groups_of(kv_cache_config: Any, block_size: int) -> list[tuple[int, int | None]]:
    """Tokens of a block, and the most blocks that a request ever holds, for each KV cache."""
    groups = kv_cache_config.kv_cache_groups
    if len(groups) <= 1:
        # Tokens of all ranks that share a block, where vLLM spreads the KV cache over several.
        return [(block_size, _most(groups[0].kv_cache_spec, block_size) if groups else None)]
    sizes = [int(group.kv_cache_spec.block_size) for group in groups]
    return [(size, _most(group.kv_cache_spec, size)) for group, size in zip(groups, sizes, strict=True)]


def _most(spec: Any, block_size: int) -> int | None:
    # Layers of one kind whose heads differ in size are wrapped.
    spec = next(iter(getattr(spec, "kv_cache_specs", {}).values()), spec)
    # Where vLLM manages all layers alike, those with a window keep all of their tokens and still say what it is.
    if isinstance(spec, FullAttentionSpec):
        return None
    window = getattr(spec, "sliding_window", None) or getattr(spec, "attention_chunk_size", None)
    if window:
        return -(-int(window) // block_size) + 1
    if isinstance(spec, MambaSpec) and spec.mamba_cache_mode != "all":
        return (2 if spec.mamba_cache_mode == "align" else 1) + int(spec.num_speculative_blocks)
    return None


class Room:
    """Says in the midst of vLLM's step whether the head of a queue may come in."""

    def __init__(self, scheduler: Any, ranker: Ranker, options: LeapOptions) -> None:
        blocks = scheduler.kv_cache_manager.block_pool.num_gpu_blocks - 1
        groups = groups_of(scheduler.kv_cache_config, scheduler.block_size)
        self.core = Admission(groups, blocks, options.recompute_share)
        self._scheduler = scheduler
        self._ranker = ranker
        # The requests that the core knows as residents, by the name that vLLM has for them.
        self._inside: dict[str, Live] = {}
        self._version = ranker.version
        self._to_relearn: list[Any] = []
        self._in_step = False
        self._progressed = False
        self._held = False
        # Of whom was asked last in this step, with how many inside, and the answer.
        self._head: Any = None
        self._residents = -1
        self._answer = True
        # Grammars that are being compiled, of requests that were first.
        self._compiling: set[Any] = set()
        # The adapters that a step may have, those in use with so many inside, and whether they are all that it may have.
        self._limit = scheduler.lora_config.max_loras if scheduler.lora_config else 0
        self._in_use: set[int] = set()
        self._counted = -1
        self._no_more = False

    # Between the steps.

    def left(self, request: Any, *, preempted: bool) -> None:
        """A request has ended, or has lost its blocks."""
        live = self._inside.pop(request.request_id, None)
        if live is not None:
            self._ranker.guard.call(self.core.preempted if preempted else self.core.left, live.number)

    def finished(self, tokens: int) -> None:
        """A request has finished with so many tokens."""
        self._ranker.guard.call(self.core.finished, tokens)

    def learned(self, request_id: str) -> None:
        """More is known of a request's length."""
        live = self._inside.get(request_id)
        if live is not None:
            self._ranker.guard.call(self.core.learned, live.number, self._ranker.table(request_id))

    def shown(self) -> tuple[int, float]:
        """Steps in which the first was held back, and what was held over what was predicted; NaN while unknown."""
        ratio = self.core.peak_ratio
        return self.core.holds, math.nan if ratio is None else ratio

    def give_up(self) -> None:
        """Keeps nothing of any request, after a fault."""
        self._rest()
        self._inside.clear()
        self._compiling.clear()
        self._to_relearn.clear()

    # In a step.

    def begin(self) -> None:
        """The step of vLLM itself begins."""
        self._in_step, self._progressed, self._held = True, False, False

    def end(self, computed: int, recomputed: int) -> None:
        """It has ended, with so many tokens."""
        self._rest()
        self._ranker.guard.call(self._enter)
        self._ranker.guard.call(self.core.stepped, computed, recomputed)

    def _rest(self) -> None:
        """No step is under way: what was asked in the last one says nothing of the next."""
        self._in_step = False
        self._head, self._residents, self._counted = None, -1, -1
        self._in_use = set()

    def lets_in(self, queue: WaitingQueue) -> bool:
        """Whether vLLM may look at the first of a queue. Outside of its step it always may."""
        if not self._in_step:
            return True
        # A step may put thousands off and asks this before each: hence no guard but this one, and the frequent answers first.
        try:
            head = queue.first_of_all() if queue.beside else queue[0]
            status = head.status
            if status is _WAITING or status is _PREEMPTED:
                adapter = head.lora_request
                if adapter is not None and self._limit:
                    if len(self._scheduler.running) != self._counted:
                        self._count_adapters()
                    if self._no_more and adapter.lora_int_id not in self._in_use:
                        return True
            elif status is not _GRAMMAR or self._compiles(head.structured_output_request):
                return True
            return self._answers(head)
        except Exception as error:
            self._ranker.guard.failed(error)
            return True

    def _compiles(self, request: Any) -> bool:
        """Whether a request's grammar is not ready; one that could not be compiled is for vLLM to turn down.

        A compilation says when it is done: vLLM's own look at it takes a lock, and until 0.30 waits a while.
        """
        grammar = request._grammar
        if isinstance(grammar, Future):
            if grammar in self._compiling:
                return True
            self._compiling.add(grammar)
            grammar.add_done_callback(self._compiling.discard)
            if grammar in self._compiling:
                return True
            grammar = request.grammar
        return not grammar or isinstance(grammar, Exception)

    def _count_adapters(self) -> None:
        self._counted = len(self._scheduler.running)
        self._in_use = adapters_in_use(self._scheduler, self._scheduler.leap_uncounted)
        self._no_more = len(self._in_use) >= self._limit

    def _answers(self, head: Any) -> bool:
        """Whether there is room for a head that vLLM would admit; those who hold blocks already have theirs."""
        if self._ranker.guard.fault is not None:
            return True
        residents = len(self._scheduler.running)
        if head is not self._head or residents != self._residents:
            self._answer = head.num_computed_tokens > 0 or self._has_room(head, residents)
            self._head, self._residents = head, residents
        return self._answer

    def _has_room(self, head: Any, residents: int) -> bool:
        running = self._scheduler.running
        if not residents or residents >= seats(self._scheduler):
            return True
        self._enter()
        if not self._progressed:
            self._progressed = True
            self._relearn(running)
            self._progress(running)
        made = generated(head, self._ranker.live(head))
        table = self._ranker.table(head.request_id)

        def fits(shared_blocks: int) -> bool:
            return self.core.has_room(
                prompt=head.num_prompt_tokens,
                generated=made,
                cap=self._cap(head),
                shared_blocks=shared_blocks,
                table=table,
            )

        # What it would find with others is looked up only where it decides.
        if fits(0) or ((shared := self._shared_hits(head)) > 0 and fits(shared)):
            return True
        if not self._held:
            self._held = True
            self.core.held()
        return False

    def _enter(self) -> None:
        """Tells the core of those who were admitted since it was last told; they stand at the end of vLLM's list."""
        fresh = []
        for request in reversed(self._scheduler.running):
            if request.request_id in self._inside:
                break
            fresh.append(request)
        for request in reversed(fresh):
            live = self._inside[request.request_id] = self._ranker.live(request)
            self.core.admitted(
                live.number,
                prompt=request.num_prompt_tokens,
                cap=self._cap(request),
                shared_blocks=self._shared(request),
                table=self._ranker.table(request.request_id),
            )
        if fresh and self._progressed:
            self._progress(fresh)

    def _progress(self, residents: Sequence[Any]) -> None:
        inside = self._inside
        try:
            lives = [inside[request.request_id] for request in residents]
        except KeyError:
            # One who takes up a session again has been inside all along, and hides those admitted with it.
            residents = [request for request in residents if request.request_id in inside]
            lives = [inside[request.request_id] for request in residents]
        # As `generated` has it, written out: it is asked of all residents in each step in which somebody waits.
        tokens = [
            made if (made := r.num_output_tokens + r.num_output_placeholders) > live.promised else live.promised
            for r, live in zip(residents, lives, strict=True)
        ]
        self.core.progressed([live.number for live in lives], tokens)

    def _cap(self, request: Any) -> int:
        """Tokens that a request stops at: a client may ask for more than the context has."""
        return int(min(request.max_tokens, max(self._scheduler.max_model_len - request.num_prompt_tokens, 1)))

    def _relearn(self, running: Sequence[Any]) -> None:
        version = self._ranker.version
        if version != self._version:
            self._version, self._to_relearn = version, list(running)
        for request in self._to_relearn[:RELEARNED_A_STEP]:
            self.learned(request.request_id)
        del self._to_relearn[:RELEARNED_A_STEP]

    def _shared(self, request: Any) -> int:
        """Blocks that a request has just been given and that others hold too."""
        return _count(self._scheduler.kv_cache_manager.get_blocks(request.request_id).blocks, least=2)

    def _shared_hits(self, head: Any) -> int:
        """Blocks that a waiting request would find with others."""
        manager = self._scheduler.kv_cache_manager
        if not manager.enable_caching or getattr(head, "skip_reading_prefix_cache", False):
            return 0
        # Not through the manager, which counts what is asked of it.
        hits = manager.coordinator.find_longest_cache_hit(head.block_hashes, head.num_tokens - 1)
        return _count(hits[0], least=1)


def _count(groups: Iterable[Iterable[Any]], *, least: int) -> int:
    return sum(block.ref_cnt >= least and not block.is_null for blocks in groups for block in blocks)
