from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from typing import Any, Literal, TypeAlias, final

import numpy as np
import numpy.typing as npt
from typing_extensions import Self

_Path: TypeAlias = str | PathLike[str]
_Target: TypeAlias = Literal["sqrt", "log", "raw"]
_Kind: TypeAlias = Literal["prompt", "text", "state"]
_Order: TypeAlias = Literal["countdown", "survival", "gittins"]
_Objective: TypeAlias = Literal["ptl", "e2el"]
_DType: TypeAlias = Literal["float32", "float64"]
_Features: TypeAlias = npt.NDArray[Any]
"""(n, d), or (d,) for one row: float16, float32, float64, bfloat16 (ml_dtypes) or its bits as uint16."""
_F32: TypeAlias = npt.NDArray[np.float32]

__version__: str

DEFAULT_AGING: float
"""e-foldings a standing wait where nobody says otherwise."""
DEFAULT_RECOMPUTE_SHARE: float
"""Share of the computed tokens that may be computed again where nobody says otherwise."""
ENCODER_BACKLOG: int
"""Prompts that wait for the encoder at most: beyond them the oldest are skipped."""

class LeapError(ValueError):
    """An input or option that leap-rs cannot use."""

class TraceError(LeapError):
    """A trace cannot be used."""

class ReadoutError(LeapError):
    """A readout, its anchor or its features cannot be used."""

class ConfigError(LeapError):
    """An option cannot be used."""

@final
class Readout:
    """A linear layer that reads an output length from features."""

    @classmethod
    def fit(
        cls,
        features: _Features,
        lengths: npt.ArrayLike,
        *,
        max_tokens: int,
        target: _Target = "sqrt",
        lam: float | None = None,
        folds: int = 5,
        seed: int = 0,
        meta: Mapping[str, Any] | None = None,
    ) -> Self:
        """Ridge fit of features (n, d) to lengths (n,) in tokens; lam by k-fold unless given.

        meta: kind ("state", "text" or "prompt"), model, layer, fit_date, trained_on; other keys are kept as text.
        """

    def score(self, features: _Features) -> _F32:
        """(n,) on the model's own scale (sqrt tokens), within the budget."""

    def predict(self, features: _Features) -> _F32:
        """(n,) tokens, from 1 to max_tokens."""

    def save(self, path: _Path) -> None:
        """Writes the readout and, where it was just fitted, its anchor beside it (x.anchor.safetensors)."""

    @classmethod
    def load(cls, path: _Path) -> Self: ...
    def noise(self, score: float) -> float | None:
        """Standard deviation of sqrt(length) about a score on that scale; None where it was not measured."""

    def pit(
        self, features: _Features, lengths: npt.ArrayLike
    ) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]] | None:
        """Mass below and up to lengths (n,) in their predicted distributions; None where noise was not measured.

        The two differ where a length has a mass of its own, as the output budget does. Lengths above it count as it.
        """

    @property
    def d(self) -> int: ...
    @property
    def max_tokens(self) -> int: ...
    @property
    def target(self) -> str: ...
    @property
    def lam(self) -> float: ...
    @property
    def meta(self) -> dict[str, Any]: ...
    @property
    def mean(self) -> _F32: ...
    @property
    def scale(self) -> _F32: ...
    @property
    def weight(self) -> _F32: ...
    @property
    def bias(self) -> float: ...

@final
class Moments:
    """A fit whose rows come in parts and need not fit in memory."""

    def __new__(
        cls,
        d: int,
        *,
        max_tokens: int,
        target: _Target = "sqrt",
        lam: float | None = None,
        folds: int = 5,
        seed: int = 0,
        meta: Mapping[str, Any] | None = None,
    ) -> Self: ...
    def add(self, features: _Features, lengths: npt.ArrayLike) -> None: ...
    def finish(self) -> Readout:
        """The readout, with its anchor; without the out-of-fold correlation and noise that Readout.fit adds."""

@final
class OnlineReadout:
    """A readout that learns from every finished request."""

    def __new__(
        cls,
        readout: Readout,
        *,
        batch: int = 8,
        forgetting: float = 1.0,
        dtype: _DType = "float32",
        anchor: _Path | None = None,
    ) -> Self:
        """Uses the anchor of the fit, the one beside the readout's file, or the one given; see anchored."""

    @classmethod
    def from_zero(
        cls,
        d: int,
        *,
        max_tokens: int,
        warmup: int = 256,
        lam: float = 1000.0,
        kind: _Kind = "state",
        batch: int = 8,
        forgetting: float = 1.0,
        dtype: _DType = "float32",
    ) -> Self: ...
    def score(self, features: _Features) -> _F32:
        """(n,) square roots of predicted tokens, whatever the target."""

    def predict(self, features: _Features) -> _F32:
        """(n,) tokens. While known is false: the running mean of finished lengths."""

    def observe(self, features: _Features, lengths: npt.ArrayLike, censored: npt.ArrayLike | None = None) -> int:
        """Learns lengths (n,) in tokens; censored (n,) marks those that ended at their own limit.

        Returns the updates applied. A row that cannot be used is refused before any is learned.
        """

    def flush(self) -> int:
        """Applies the labels that wait for a full batch."""

    def readout(self) -> Readout: ...
    def noise(self, score: float) -> float:
        """Standard deviation of sqrt(length) about a score on that scale."""

    def pit(
        self, features: _Features, lengths: npt.ArrayLike
    ) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """Mass below and up to lengths (n,) in the distributions predicted now; as Readout.pit."""

    def save(self, path: _Path) -> None: ...
    @classmethod
    def load(cls, path: _Path) -> Self: ...
    @property
    def d(self) -> int: ...
    @property
    def max_tokens(self) -> int: ...
    @property
    def anchored(self) -> bool:
        """Whether the training rows weigh in; without, the readout starts from P0 = I / lam and moves faster."""

    @property
    def known(self) -> bool:
        """Whether predictions come from a readout yet."""

    @property
    def updates(self) -> int: ...
    @property
    def waiting(self) -> int: ...

@final
class Learner:
    """An online readout with a thread of its own: predicting takes no lock, also while an update runs."""

    def __new__(cls, online: OnlineReadout, *, capacity: int = 1024) -> Self:
        """Starts from a copy of online, with room for capacity labels on their way."""

    def score(self, features: _Features) -> _F32: ...
    def predict(self, features: _Features) -> _F32: ...
    def tables(
        self,
        features: _Features,
        caps: npt.ArrayLike,
        *,
        kind: _Order = "gittins",
        objective: _Objective = "ptl",
        seen: bool = False,
    ) -> list[RemainingTable]:
        """A table a row, with the readout's own noise, for requests that stop at caps (n,) tokens.

        While known is false their score is the running mean of finished lengths. seen: the rows do not count for mean
        and scale (again); for requests that are no sample of the traffic, or are scored once more.
        """

    def observe(self, features: _Features, lengths: npt.ArrayLike, censored: npt.ArrayLike | None = None) -> int:
        """Hands labels over and returns at once: how many were taken. The rest found the queue full."""

    def flush(self) -> int:
        """Waits until all labels handed over are learned."""

    def save(self, path: _Path) -> None: ...
    def noise(self, score: float) -> float: ...
    @property
    def known(self) -> bool: ...
    @property
    def updates(self) -> int: ...
    @property
    def dropped(self) -> int: ...
    @property
    def fault(self) -> str | None: ...

@final
class PromptFeatures:
    """Mean of a prompt's projected input embeddings, and its length."""

    def __new__(cls, embedding: _Features, *, dim: int = 256, seed: int = 0) -> Self:
        """Projects an embedding table (vocabulary, d)."""

    @classmethod
    def from_safetensors(cls, path: _Path, tensor: str, *, dim: int = 256, seed: int = 0) -> Self: ...
    def pool(self, token_ids: npt.ArrayLike) -> _F32:
        """(dim + 3,): the projected mean, then sqrt(n), ln(1 + n), n."""

    def project(self, mean: _Features, tokens: int) -> _F32:
        """As pool, from the mean embedding (d,) of a prompt of that many tokens."""

    @staticmethod
    def length_features(tokens: int) -> _F32:
        """(3,): sqrt(n), ln(1 + n), n."""

    def save(self, path: _Path) -> None: ...
    @classmethod
    def load(cls, path: _Path) -> Self: ...
    @property
    def dim(self) -> int: ...
    @property
    def width(self) -> int: ...
    @property
    def vocabulary(self) -> int: ...
    @property
    def d(self) -> int: ...

def remaining(
    score: npt.ArrayLike,
    noise: npt.ArrayLike,
    generated: npt.ArrayLike,
    cap: npt.ArrayLike,
    *,
    kind: _Order = "survival",
    objective: _Objective = "ptl",
) -> npt.NDArray[np.float64]:
    """Remaining tokens of n requests, by which they are ordered; shape (n,), at least 1 each.

    ``score`` and ``noise`` are mean and deviation of sqrt(output tokens), ``generated`` and ``cap`` tokens so far and at
    most; each is a number or has shape (n,).

    ``countdown`` is max(score**2 - generated, 1). ``survival`` is E[min(L, cap) - generated | L > generated] with
    sqrt(L) normal; ``cap`` may be infinite. ``gittins`` is 1 / Gittins index under ``objective``: tokens for ``e2el``
    (every completion counts 1), tokens squared for ``ptl`` (a completion counts 1 / L).

    Raises ConfigError naming the first value that cannot be used.
    """

@final
class RemainingTable:
    """Remaining tokens of one request by tokens generated: made once when its score arrives, then only looked up."""

    def __new__(
        cls, score: float, noise: float, cap: int, *, kind: _Order = "gittins", objective: _Objective = "ptl"
    ) -> Self:
        """Of a request that stops at cap tokens; score and noise as in remaining."""

    @classmethod
    def of_length(cls, length: int, *, kind: _Order = "gittins", objective: _Objective = "ptl") -> Self:
        """Of a request whose length is known for certain."""

    def remaining(self, generated: int) -> float:
        """As the function of that name; for gittins at the greatest level that is at most generated."""

    def mean_remaining(self, generated: int) -> float:
        """Expected remaining tokens, at least 1 and at most what cap leaves; for gittins at the same level."""

    def next_rekey(self, generated: int) -> int:
        """Tokens generated at which remaining is to be read again; 2**32 - 1 when it never is."""

    @property
    def score(self) -> float: ...
    @property
    def cap(self) -> int: ...
    @property
    def known(self) -> bool:
        """Whether a readout gave the score; if not, it is the running mean of finished lengths."""

def is_settled(max_tokens: int, min_tokens: int, ignore_eos: bool) -> bool:
    """Whether an answer is as long as its ``max_tokens`` whatever it says: known before the first token, and no label."""

def select_slots(
    remaining: npt.ArrayLike,
    arrival_s: npt.ArrayLike,
    steps_waited: npt.ArrayLike,
    slots: int,
    *,
    aging_rate: float,
    wait_cap_steps: int | None,
) -> npt.NDArray[np.uint32]:
    """Indices, ascending, of the residents that get the ``slots`` decode slots of a step.

    ``remaining`` (tokens), ``arrival_s`` and ``steps_waited`` (steps since a resident last decoded) have shape (n,).
    Residents that waited ``wait_cap_steps`` or more go first, the longest waiting ahead; then the smallest
    ln(remaining) + aging_rate * arrival_s; ties by index. O(n).

    Raises ConfigError naming the first value that cannot be used.
    """

def static_key(
    remaining: float,
    aging_rate: float,
    arrival_s: float,
    *,
    memory_weight: float = 0.0,
    memory_tokens: float = 1.0,
) -> float:
    """ln(remaining) + memory_weight * ln(memory_tokens) + aging_rate * arrival_s: the key of every order."""

@final
class AgingQueue:
    """Waiting requests, the smallest ln(remaining) + aging_rate * arrival_s first; equal keys first in, first out.

    A request of S1 remaining tokens is overtaken by one of S2 < S1 only if that one arrived less than
    ln(S1 / S2) / aging_rate seconds later (plus the difference of the memory terms over the rate). This holds for
    requests that the engine could admit: not for one that waits for a LoRA slot, a grammar or remote KV.
    """

    def __new__(cls, aging_rate: float, *, memory_weight: float = 0.0, wait_cap_s: float | None = None) -> Self:
        """``aging_rate`` per second; ``memory_weight`` adds memory_weight * ln(memory_tokens) to the keys; a request
        that has waited ``wait_cap_s`` in the queue goes first, the oldest ahead, wherever ``now_s`` is given.

        Raises ConfigError for a value that is negative or not finite.
        """

    @property
    def aging_rate(self) -> float: ...
    def push(
        self,
        id: int,
        remaining: float,
        arrival_s: float,
        *,
        memory_tokens: float = 1.0,
        queued_s: float | None = None,
    ) -> None:
        """Add request ``id`` (0 to 2**64 - 1). ``memory_tokens`` is the KV cache that it will hold on average. Its wait
        counts from ``queued_s``, by default from its arrival: a request that was preempted comes back later.

        Raises ConfigError where the id is in already, or a value cannot be used.
        """

    def pop(self, now_s: float | None = None) -> int:
        """Take out the request that goes first. Raises IndexError when empty."""

    def peek(self, now_s: float | None = None) -> int:
        """The request that ``pop`` would take. Raises IndexError when empty."""

    def head(self, now_s: float) -> tuple[int, bool, bool]:
        """The request that ``pop(now_s)`` would take, whether it has waited ``wait_cap_s``, and whether only that put it
        before one with a better key. Raises IndexError when empty."""

    def order(self, now_s: float) -> list[int]:
        """The requests in the order in which ``pop(now_s)`` would take one after the other."""

    def place(self, id: int, now_s: float) -> int:
        """How many would go before request ``id``: its place in ``order(now_s)``. Raises KeyError when it is not in."""

    def urgency(self, id: int, now_s: float) -> tuple[bool, float]:
        """Whether request ``id`` has waited ``wait_cap_s``, and since when it waits if so, else its key. Comparable
        between queues of one clock: the overdue first, then the smallest number. Raises KeyError when it is not in."""

    def next_overdue(self, now_s: float) -> float | None:
        """When the next of those who are not overdue at ``now_s`` will be; None where nobody ever is."""

    def key(self, id: int) -> float:
        """Key of request ``id``; smaller goes first. Raises KeyError when it is not in."""

    def remove(self, id: int) -> None:
        """Take out request ``id``. Raises KeyError when it is not in."""

    def rekey(self, id: int, remaining: float, *, memory_tokens: float | None = None) -> None:
        """Give request ``id`` new remaining tokens; arrival and place among ties stay. Raises KeyError when it is not
        in, ConfigError where a value cannot be used."""

    def rekey_many(self, ids: list[int], remaining: list[float], memory_tokens: list[float]) -> None:
        """``rekey`` of several requests, up to the first that cannot be.

        Raises KeyError where one is not in, ConfigError where lengths differ or a value cannot be used.
        """

    def __len__(self) -> int: ...
    def __contains__(self, id: object, /) -> bool: ...

@final
class Evictor:
    """Says which residents give their KV cache to a request that waits, each worse by ``factor``; at most ``per_s`` a
    second, 0 for none."""

    def __new__(cls, factor: float, per_s: float) -> Self: ...
    @property
    def evicted(self) -> int:
        """How many so far."""

    def ready(self, now_s: float) -> bool:
        """Whether anybody may be evicted now."""

    def victims(
        self,
        residents: Sequence[tuple[float, int, int]],
        *,
        key: float,
        blocks: int,
        seat: bool,
        free_blocks: int,
        now_s: float,
    ) -> list[int]:
        """Indices of the ``residents`` that give way, the worst first, as many as make room; none where all do not.

        A resident is its key, its place in the order of arrival (of equal keys the last goes first) and the blocks that
        come free with it. The request that waits has ``key``, needs ``blocks``, and lacks a ``seat`` as well or not.
        """

@final
class Admission:
    """Whether the first of the queue may come in, by the KV cache that all inside are predicted to grow into.

    For a check: ``progressed`` for all residents, then ``has_room``. After every step ``stepped``.
    """

    def __new__(cls, groups: Sequence[tuple[int, int | None]], usable_blocks: int, recompute_share: float) -> Self:
        """``groups`` are KV caches: tokens of a block, and the most blocks that a request ever holds there."""

    def admitted(self, id: int, *, prompt: int, cap: int, shared_blocks: int, table: RemainingTable | None) -> None:
        """A request came in. ``cap``: tokens that it stops at; ``shared_blocks``: those that others held already;
        ``table``: its own length, None to go by the lengths that have finished."""

    def left(self, id: int) -> None:
        """A resident has ended, or has given its blocks to somebody better."""

    def preempted(self, id: int) -> None:
        """A resident has lost its blocks for want of memory."""

    def learned(self, id: int, table: RemainingTable | None) -> None:
        """More is known of a resident's length, or less."""

    def finished(self, tokens: int) -> None:
        """A request has finished with so many tokens."""

    def progressed(self, ids: Sequence[int], generated: Sequence[int]) -> None:
        """Residents have generated so many tokens by now."""

    def has_room(
        self, *, prompt: int, generated: int, cap: int, shared_blocks: int, table: RemainingTable | None
    ) -> bool:
        """Whether such a request may come in beside those inside."""

    def held(self) -> None:
        """The first of the queue was held back in a step."""

    def stepped(self, computed: int, recomputed: int) -> None:
        """A step computed so many tokens, of which some had been computed before."""

    @property
    def holds(self) -> int:
        """Steps in which the first of the queue was held back."""

    @property
    def z(self) -> float:
        """Standard deviations that have to be left free."""

    @property
    def peak_ratio(self) -> float | None:
        """What residents came to hold over what had been predicted; None before the first look back."""

@final
class AgingClock:
    """By how much waiting has raised everybody, in e-foldings: what it shows at a request's arrival is in its keys."""

    def __new__(cls, *, per_wait: float | None = None, per_second: float | None = None) -> Self:
        """e-foldings a standing wait, or a second."""

    def at(self, time_s: float) -> float:
        """What it shows at a time that is not before the last step."""

    def arrival(self, time_s: float) -> tuple[float, float]:
        """What it shows, and the mean length of those that have finished (infinite before the first)."""

    def finished(self, tokens: int | None) -> None:
        """A request has ended; None where its tokens say nothing of a length."""

    def step(self, now_s: float, waiting: int) -> None:
        """A step has been composed, after which so many requests wait."""

    def boosted(self, ln_remaining: Sequence[float], mean_tokens: Sequence[float], *, squared: bool) -> list[float]:
        """Logarithms of remaining lengths as aging compares them, from a share of the mean on ever flatter.

        ``squared`` where remaining is in tokens squared.
        """

@final
class Planner:
    """Plans which residents decode in each step, and in which order the engine looks at them.

    For a step: ``look``; where it says so ``wants_keys`` and ``plan``; after it ``scheduled``.
    """

    def __new__(
        cls,
        *,
        slots: int,
        step_tokens: int,
        block_size: int,
        groups: int,
        max_adapters: int | None,
        hysteresis: float,
        wait_cap_steps: int | None,
    ) -> Self:
        """Of the residents ``slots`` decode in a step of at most ``step_tokens``, each in ``groups`` KV caches."""

    def look(self, residents: int, free_blocks: int) -> bool:
        """Whether the next step needs a plan; the list stays as it stands otherwise."""

    def wants_keys(self, numbers: Sequence[int], classes: bytes, adapters: Sequence[int | None] | None = None) -> bool:
        """Takes the residents, as they stand, and says whether their plan goes by keys.

        ``numbers`` are places in the order of arrival. ``classes``: 0 idle, 1 decoding, 2 prefilling.
        """

    def plan(
        self, ln_remaining: Sequence[float] | None = None, aged: Sequence[float] | None = None
    ) -> tuple[list[int], list[int], list[int], int]:
        """Indices of all in their new order, of those passed over, of those whose waits count; how many go first by the
        wait cap alone."""

    def scheduled(self, got: Sequence[bool]) -> None:
        """Takes note of which of those whose waits count got a token."""

    def settle(self, ln_remaining: Sequence[float] | None = None, aged: Sequence[float] | None = None) -> list[int]:
        """Forgets who has waited. Indices of those that are still passed over: residents of more adapters than fit."""

def engine_presets() -> str:
    """JSON list of the engine presets, each with where its numbers come from."""

def replay(
    columns: Mapping[str, Any],
    options: str,
    readouts: Mapping[str, str] | None = None,
    progress: Callable[[float], object] | None = None,
    requests: bool = False,
) -> tuple[str, dict[str, npt.NDArray[Any]] | None]:
    """Replays the columns of a trace under options (JSON): the report (JSON) and, on request, a row a request.

    readouts are files by kind; one that is not there learns from zero.
    """

def simulate(
    columns: Mapping[str, Any],
    engine: str,
    *,
    policy: str = "fcfs",
    readouts: Mapping[str, str] | None = None,
    timeline: bool = False,
    steps: bool = False,
) -> dict[str, npt.NDArray[Any]]:
    """Every request of a trace once under one policy at its recorded arrival, on an engine (JSON).

    readouts are files by kind; one that is not there predicts nothing.

    In the order of the rows: admitted_s (when the scheduler first gave it a seat), first_token_s and finish_s (float64,
    on the clock of arrival_s), preemptions (uint32). With timeline also the engine over time as a step function, each
    entry from its time to the next one's: timeline_s (float64), timeline_waiting and timeline_resident (uint32),
    timeline_kv_share of the usable KV blocks (float64). With steps also every step of a single engine: step_s (when it
    was composed), step_requests and step_tokens (rows scheduled and their tokens; step i's up to step_ends[i], uint64),
    step_preempted (rows preempted since the step before; up to step_preempted_ends[i]).

    Raises TraceError naming the first row that the engine can never hold, ConfigError where the engine cannot be used.
    """

def spearman(a: npt.ArrayLike, b: npt.ArrayLike) -> float | None:
    """Spearman's rank correlation of (n,) and (n,), ties at their mean rank; None where it is undefined."""

def kendall_tau_b(a: npt.ArrayLike, b: npt.ArrayLike) -> float | None:
    """Kendall's tau-b of (n,) and (n,); None where it is undefined. O(n log n)."""

def pairwise_accuracy(predicted: npt.ArrayLike, lengths: npt.ArrayLike, ratio: float) -> float | None:
    """Share of the pairs whose lengths differ by ratio (above 1) or more that the predictions order rightly.

    A pair that they tie counts one half; None where there is no such pair. O(n log n).
    """
