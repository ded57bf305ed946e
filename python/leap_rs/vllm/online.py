"""Predicts the lengths of live requests and learns from those that finish: what the scheduler asks, and what it tells.

The scheduler's thread pools a prompt, takes a dot product, looks into a table; it waits for nothing and takes no lock. A
thread of the brain's own does the rest: it hands labels to the learners (which have a thread each), judges what was
predicted, renews the predictions of live requests when weights have changed, saves the state and keeps the metrics.
"""

from __future__ import annotations

import functools
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from leap_rs._leap import LeapError, Learner, PromptFeatures, RemainingTable

from .auto import PREFERENCE, Judge, Judged, preferred, told
from .embedding import pooled, prompt_width
from .ends import Ends
from .guard import Guard
from .known import Known, Live, neutral, rescore
from .labels import Limits, label
from .opening import open_metrics, open_readouts
from .reading import Reading
from .readouts import Kind
from .settings import BrainSettings

LOG = logging.getLogger("vllm.leap_rs")
_warn = functools.partial(LOG.warning, "leap: %s")

POLL_S = 0.1
RENEW_S = 0.25
"""Renewing the live requests takes the interpreter from the scheduler for a moment; this often is fresh enough."""
RENEW_SHARE = 0.1
"""Most of the time of the brain's thread that renewing may take, however many requests are live."""
LONG = 4096
"""Prompts of more tokens are pooled by the brain's own thread: a step waits for none of them."""
MOST_WAITING = 4096
"""Of finished requests, long prompts and predictions that wait for the brain's thread: memory stays bounded where it hangs."""


class OnlineBrain:
    """The brain of one engine.

    Args:
        settings: What it is for.
        prompt_features: Pools prompts; without it the prompt readout has their length alone.
        reading: The text encoder, where there is one.
    """

    def __init__(
        self,
        settings: BrainSettings,
        prompt_features: PromptFeatures | None = None,
        reading: Reading | None = None,
    ) -> None:
        self.settings = settings
        self._pooling = prompt_features
        self._reading = Reading() if reading is None else reading
        self._rule: dict[str, Any] = {"kind": settings.order, "objective": settings.objective}
        self._told: set[str] = set()
        self._live: dict[str, Live] = {}
        self._done: deque[tuple[Live, str, int]] = deque()
        self._long: deque[tuple[str, Live, Sequence[int]]] = deque(maxlen=MOST_WAITING)
        self._fresh: deque[str] = deque(maxlen=MOST_WAITING)
        self._predicted: deque[tuple[str, float, RemainingTable | None]] = deque(maxlen=MOST_WAITING)
        self._version = 0
        widths: dict[Kind, int] = {"prompt": prompt_width(prompt_features)}
        if self._reading.info is not None:
            widths["text"] = self._reading.info.width + widths["prompt"]
        if settings.width is not None:
            widths["state"] = settings.width
        opened = open_readouts(settings, widths, self._reading.info, _warn)
        self._store = opened.store
        self._learners = {name: Learner(readout) for name, readout in opened.readouts.items()}
        self._finished, self._finished_tokens = opened.extra.get("finished", (0, 0))
        judges = opened.extra.get("judges", {})
        self._judges: dict[str, Judge] = {name: Judge.resumed(settings.arm, judges.get(name, {})) for name in widths}
        order = tuple(opened.extra.get("preferred", PREFERENCE))
        self._preferred = tuple(name for name in order if name in self._judges)
        self._renewed = {name: learner.updates for name, learner in self._learners.items()}
        self._saved = dict(self._renewed)
        self._next_renewal_s = 0.0
        self._trusted = self._trust()
        self._neutral = neutral(self._finished, self._finished_tokens, self.settings.max_tokens, self._rule)
        self.metrics = open_metrics(settings, _warn)
        self.guard = Guard(self.metrics)
        self._ends = Ends(self.metrics)
        self._publish()
        self._wake, self._stop = threading.Event(), False
        self._reading.start(self._wake.set, _warn)
        self._settled: tuple[threading.Event, bool] | None = None
        self._thread = threading.Thread(target=self._work, name="leap-brain", daemon=True)
        self._thread.start()

    # What the scheduler asks. None of it waits.

    @property
    def fault(self) -> str | None:
        """The first fault of anything that is the plugin's."""
        return self.guard.fault

    @property
    def armed(self) -> bool:
        """Whether the schedule may follow the predictions."""
        if self.fault is not None or self.settings.mode == "shadow":
            return False
        return self.settings.mode == "armed" or any(judge.armed for judge in self._judges.values())

    @property
    def version(self) -> int:
        """Grows when the predictions of live requests have changed, so that each is asked for once more."""
        return self._version

    def fresh(self) -> list[str]:
        """The requests of which more is known than when this was asked last: a new key for each is enough."""
        return [self._fresh.popleft() for _ in range(len(self._fresh))]

    @property
    def trusted(self) -> tuple[str, ...]:
        """The readouts whose predictions order, the one that ranks best first."""
        return self._trusted

    def arrived(
        self, request_id: str, prompt_token_ids: Sequence[int], max_tokens: int, min_tokens: int, ignore_eos: bool
    ) -> None:
        """A request has come in."""
        if request_id in self._live or self._failed():
            return
        live = self._live[request_id] = Live(Limits(max(max_tokens, 1), min_tokens, ignore_eos))
        if live.limits.forced:
            live.length = RemainingTable.of_length(live.limits.max_tokens, **self._rule)
        elif len(prompt_token_ids) > LONG:
            self._long.append((request_id, live, prompt_token_ids))
            self._wake.set()
        elif len(prompt_token_ids) > 0:
            self._predict("prompt", live, lambda: pooled(self._pooling, prompt_token_ids))
        self._reading.ask(request_id, prompt_token_ids, teaches=not live.limits.forced)

    def state(self, request_id: str, row: npt.NDArray[np.float32] | npt.NDArray[np.float16]) -> None:
        """The hidden state of a request's last prompt token has come in."""
        live = self._live.get(request_id)
        if live is None or self._failed():
            return
        live.captured = True
        if not live.limits.forced and "state" in self._learners:
            # The buffer that it lies in is written again in the next step.
            self._predict("state", live, lambda: np.array(row))

    def remaining_key(self, request_id: str, generated: int) -> float:
        """Natural logarithm of the remaining length by the order in force; before any estimate, of the running mean."""
        table = self.table(request_id)
        return math.log((self._neutral.remaining(0)) if table is None else table.remaining(generated))

    def mean_remaining(self, request_id: str, generated: int) -> float:
        """Expected tokens to come."""
        table = self.table(request_id)
        return self._neutral.mean_remaining(0) if table is None else table.mean_remaining(generated)

    def finished(
        self, request_id: str, reason: Literal["stop", "length", "abort", "error"], output_tokens: int
    ) -> None:
        """A request has ended."""
        live = self._live.pop(request_id, None)
        if live is None or self._failed():
            return
        self._reading.forget(request_id)
        if len(self._done) >= MOST_WAITING:
            self._ends.left_out(label(live.limits, reason, output_tokens))
        else:
            self._done.append((live, reason, output_tokens))
        self._wake.set()

    def save(self) -> None:
        """Learns what is left, and saves the state."""
        self.settle(save=True)

    def settle(self, *, save: bool = False) -> None:
        """Waits until all that has finished is learned, the live requests have been renewed and, if asked, all is saved."""
        settled = threading.Event()
        self._settled = settled, save
        self._wake.set()
        while self._thread.is_alive() and not settled.wait(POLL_S):
            pass

    def close(self) -> None:
        """Learns what is left, saves the state, and stops."""
        if not self._stop:
            self.settle()
            self._stop = True
            self._wake.set()
            self._thread.join()
            self._save(at_once=True)
            if self._store is not None:
                self._store.close()
            self._reading.close()
            self.metrics.close()

    def learned(self) -> str:
        """What has been learned, in a line."""
        return f"learned before: {self._finished} labels; {told(self._judges)}"

    def table(self, request_id: str) -> RemainingTable | None:
        """What the readouts that have proven themselves know of a request, or its client has settled."""
        if (live := self._live.get(request_id)) is None:
            return None
        if live.length is not None:
            return live.length
        for name in self._trusted:
            known = live.known.get(name)
            if known is not None and known.table.known:
                return known.table
        return None

    def _predict(self, name: str, live: Live, row_of: Callable[[], npt.NDArray[Any]]) -> None:
        began = time.perf_counter()
        try:
            row = row_of()
            table = self._learners[name].tables(row, live.limits.max_tokens, **self._rule)[0]
        except (LeapError, OverflowError, ValueError, TypeError) as error:
            self._predicted.append((name, 0.0, None))
            self._tell(f"refused {name}", f"a row of {name} features is not used, nor are others like it: {error}")
            return
        live.known[name] = Known(row, table, table.score if table.known else None)
        if table.known:
            self._predicted.append((name, time.perf_counter() - began, table))

    # What the brain's own thread does.

    def _work(self) -> None:
        while not self._stop:
            self._wake.wait(POLL_S)
            self._wake.clear()
            asked, self._settled = self._settled, None
            self.guard.call(self._turn, asked is not None, asked is not None and asked[1])
            if over := self.guard.fault is not None:
                self.guard.always(self._give_up)
            if asked is not None:
                asked[0].set()
            if over:
                return

    def _give_up(self) -> None:
        self._failed()
        for name in self._learners:
            self.metrics.set("armed_readout", 0.0, name)
        self._reading.close()
        self._reading.show(self.metrics)

    def _failed(self) -> bool:
        """Whether there was a fault; nothing is kept of any request then."""
        if self.guard.fault is None:
            return False
        for kept in (self._live, self._done, self._long, self._fresh, self._predicted):
            kept.clear()
        return True

    def _turn(self, at_once: bool, save: bool) -> None:
        self._read()
        self._ends.catch_up()
        while self._done:
            self._learn(*self._done.popleft())
        if at_once:
            self._flush()
        self._neutral = neutral(self._finished, self._finished_tokens, self.settings.max_tokens, self._rule)
        self._renew(at_once=at_once)
        self._save(at_once=save)
        self._publish()

    def _read(self) -> None:
        """Predicts by what has been read of prompts since they arrived."""
        self._read_long()
        for request_id, text in self._reading.rows():
            # A row may come as soon as its prompt has been handed over, and is of use with the prompt's own alone.
            self._read_long()
            # Whose length is settled has no row of the prompt either.
            if (live := self._live.get(request_id)) is not None and (prompt := live.known.get("prompt")) is not None:
                self._came("text", request_id, live, functools.partial(np.concatenate, (text, prompt.row)))

    def _read_long(self) -> None:
        while self._long:
            request_id, live, prompt_token_ids = self._long.popleft()
            self._came("prompt", request_id, live, functools.partial(pooled, self._pooling, prompt_token_ids))

    def _came(self, name: str, request_id: str, live: Live, row_of: Callable[[], npt.NDArray[Any]]) -> None:
        self._predict(name, live, row_of)
        known = live.known.get(name)
        if known is not None and known.table.known and name in self._trusted:
            self._fresh.append(request_id)

    def _flush(self) -> None:
        for name, learner in self._learners.items():
            try:
                learner.flush()
            except LeapError as error:  # noqa: PERF203
                self._tell(f"fault {name}", f"the {name} readout has left labels out: {error}")

    def _learn(self, live: Live, reason: str, output_tokens: int) -> None:
        what = label(live.limits, reason, output_tokens)
        self._ends.add(what)
        if not what.taught:
            return
        self._finished += 1
        self._finished_tokens += min(what.tokens, self.settings.max_tokens)
        self.metrics.observe("output_tokens", what.tokens)
        if "state" in self._learners and not live.captured:
            self.metrics.add("captures_missed")
        for name, known in live.known.items():
            if known.first is not None:
                self._judges[name].add(Judged(known.first, what.tokens, what.censored))
                predicted = min(known.first**2, live.limits.max_tokens)
                self.metrics.observe("absolute_error_tokens", abs(predicted - what.tokens), name)
            self._learners[name].observe(known.row, [what.tokens], [what.censored])

    def _renew(self, *, at_once: bool) -> None:
        """Scores the live requests once more where weights have changed, and lets the scheduler know."""
        if (trusted := self._trust()) != self._trusted:
            self._trusted = trusted
            self._version += 1
            if self.settings.mode == "auto":
                LOG.info("leap: readouts that have proven themselves: %s", ", ".join(trusted) or "none")
        began = time.monotonic()
        if not at_once and began < self._next_renewal_s:
            return
        updates = {name: learner.updates for name, learner in self._learners.items()}
        stale = [name for name in updates if updates[name] != self._renewed[name]]
        if not stale:
            return
        requests = list(self._live.values())
        for name in stale:
            live = [(one, known) for one in requests if (known := one.known.get(name)) is not None]
            rescore(self._learners[name], live, self._rule)
            self.metrics.add("rescored_requests", len(live))
            self._renewed[name] = updates[name]
        self._version += 1
        ended = time.monotonic()
        self._next_renewal_s = ended + max(RENEW_S, (ended - began) / RENEW_SHARE)

    def _trust(self) -> tuple[str, ...]:
        """The readouts whose predictions order, best first; all of them where arming is not by proof."""
        self._preferred = preferred(self._preferred, {name: judge.standing for name, judge in self._judges.items()})
        by_proof = self.settings.mode == "auto"
        return tuple(name for name in self._preferred if self._judges[name].armed or not by_proof)

    def _save(self, *, at_once: bool = False) -> None:
        if self._store is None:
            return
        updates = {name: learner.updates for name, learner in self._learners.items()}
        unsaved = max(updates[name] - self._saved[name] for name in updates)
        if unsaved < (1 if at_once else self.settings.state_every):
            return
        # Also where it fails: it is tried again after as many updates, not at every turn.
        self._saved = updates
        judges = {name: judge.saved() for name, judge in self._judges.items()}
        finished = [self._finished, self._finished_tokens]
        extra = {"judges": judges, "preferred": self._preferred, "finished": finished}
        try:
            self._store.save({name: learner.save for name, learner in self._learners.items()}, extra)
        except LeapError as error:
            self.metrics.add("state_saves", value="failed")
            self._tell("state", f"the state is not saved, and the server goes on: {error}")
            return
        self.metrics.add("state_saves", value="saved")
        if "state" in self._told:
            self._told.discard("state")
            LOG.info("leap: the state is saved again")

    def _publish(self) -> None:
        while self._predicted:
            name, seconds, table = self._predicted.popleft()
            if table is None:
                self.metrics.add("refused_rows", value=name)
            else:
                self.metrics.add("predictions", value=name)
                self.metrics.observe("prediction_seconds", seconds, name)
                self.metrics.observe("predicted_tokens", min(table.score**2, table.cap), name)
        for name, learner in self._learners.items():
            judge = self._judges[name]
            rho = math.nan if judge.correlation is None else judge.correlation
            self.metrics.set("rank_correlation", rho, name)
            self.metrics.set("updates", learner.updates, name)
            self.metrics.set("dropped_labels", learner.dropped + self._ends.overflow, name)
            self.metrics.set("armed_readout", float(name in self._trusted and self.armed), name)
            if learner.fault is not None:
                self._tell(f"fault {name}", f"the {name} readout has left labels out: {learner.fault}")
        self._reading.show(self.metrics)
        self.metrics.set("readout_version", self._version)

    def _tell(self, key: str, text: str) -> None:
        """Warns, once of each kind: what recurs with every request would drown the log."""
        if key not in self._told:
            self._told.add(key)
            _warn(text)
