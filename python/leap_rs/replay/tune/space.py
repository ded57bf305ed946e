"""What a search may choose: levers, order, aging, memory term, what admission risks, decode slots and sequences."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from leap_rs._leap import DEFAULT_AGING, DEFAULT_RECOMPUTE_SHARE, ConfigError
from leap_rs.replay.options import AGING
from leap_rs.replay.seats import WORTH

LEVERS = ("queue", "slots", "evict", "admission")
LEVER_SETS = (
    ("queue", "admission"),
    ("queue",),
    ("queue", "slots", "admission"),
    ("queue", "slots"),
    ("slots",),
    ("queue", "evict", "admission"),
    ("queue", "evict"),
    ("queue", "slots", "evict"),
)
ORDERS = ("gittins:ptl", "gittins:e2el", "survival", "countdown")
# e-foldings a standing wait, the default and those about it.
AGINGS = (0.0, 0.5, 1.0, DEFAULT_AGING, 4.0, 8.0)
MEMORY_WEIGHTS = (1.0, 0.0)
RECOMPUTE_SHARES = (0.003, DEFAULT_RECOMPUTE_SHARE, 0.03)
USUAL_SHARE = DEFAULT_RECOMPUTE_SHARE
SWEPT = (*AGING, "decode_slots", "max_num_seqs")


@dataclass(frozen=True)
class Candidate:
    """A policy and the engine limits that it runs under."""

    levers: tuple[str, ...]
    """None at all is fcfs."""
    order: str
    """With what Gittins order serves behind a colon; empty for fcfs."""
    aging: float
    memory_weight: float
    decode_slots: int | None
    """None: every resident decodes."""
    max_num_seqs: int
    recompute_share: float | None = None
    """What admission risks; None without that lever."""
    aging_key: str = "aging"
    """Whether `aging` is in e-foldings a standing wait (`aging`) or a second (`aging_rate`)."""

    @property
    def policy(self) -> str:
        """The specification that `leap-replay --policy` takes."""
        if not self.levers:
            return "fcfs"
        keys = [f"levers={'+'.join(self.levers)}", *(f"{key}={value}" for key, value in self.ordering().items())]
        keys += [f"{key}={plain(value)}" for key, value in self.numbers().items()]
        return f"leap:{','.join(keys)}"

    def ordering(self) -> dict[str, str]:
        """Order, and what it serves where it has a choice."""
        order, _, objective = self.order.partition(":")
        return {"order": order, **({"objective": objective} if objective else {})}

    def numbers(self) -> dict[str, float]:
        """The numbers of the policy by option."""
        found = {self.aging_key: self.aging, "memory_weight": self.memory_weight}
        return found if self.recompute_share is None else {**found, "recompute_share": self.recompute_share}

    def with_levers(self, levers: tuple[str, ...], share: float) -> Candidate:
        """The same with other levers; `share` is what admission risks where it is new."""
        kept = (self.recompute_share or share) if "admission" in levers else None
        return replace(self, levers=levers, recompute_share=kept)

    @property
    def engine(self) -> tuple[int, int | None]:
        """What of it is the engine's: sequences and decode slots."""
        return self.max_num_seqs, self.decode_slots

    def to_dict(self) -> dict[str, Any]:
        """Its entry in a result object."""
        found: dict[str, Any] = {"policy": self.policy, "levers": list(self.levers)}
        if self.levers:
            found |= {**self.ordering(), **self.numbers()}
        return {**found, "decode_slots": self.decode_slots, "max_num_seqs": self.max_num_seqs}


def plain(value: float) -> str:
    """Every digit that the number has, and no `.0` behind a whole one."""
    return repr(float(value)).removesuffix(".0")


def fcfs(max_num_seqs: int) -> Candidate:
    """First come first served at so many sequences, without a limit on slots."""
    return Candidate((), "", 0.0, 0.0, None, max_num_seqs)


def plain_leap(max_num_seqs: int) -> Candidate:
    """The policy `leap` as it is where nobody tunes it and every resident decodes."""
    return Candidate(("queue", "admission"), "gittins:ptl", DEFAULT_AGING, 1.0, None, max_num_seqs, USUAL_SHARE)


@dataclass(frozen=True)
class Space:
    """Every value of every choice; the simpler or usual one first, since that wins where two do the same."""

    stock: int
    """Sequences of the engine as it is."""
    levers: tuple[tuple[str, ...], ...]
    orders: tuple[str, ...]
    agings: tuple[float, ...]
    memory_weights: tuple[float, ...]
    engines: tuple[tuple[int, int | None], ...]
    """Pairs of sequences and decode slots."""
    recompute_shares: tuple[float, ...] = (USUAL_SHARE,)
    aging_key: str = "aging"

    @property
    def step(self) -> int:
        """How far the agings of a coarse grid lie apart: about four of them, but none of them left out of reach."""
        return min(max((len(self.agings) + 2) // 4, 1), 5)

    @property
    def strides(self) -> tuple[int, int]:
        """How far each refinement looks among the agings; together they reach every one from the coarse ones."""
        return (self.step + 1) // 2, 1

    def candidates(self) -> list[Candidate]:
        """All of them."""
        found = []
        for engine in self.engines:
            found += self._product(engine, self.levers, self.agings, self.memory_weights, self.recompute_shares)
        return found

    @property
    def usual_share(self) -> float:
        """What admission risks on a coarse grid: the default where it is a choice."""
        return USUAL_SHARE if USUAL_SHARE in self.recompute_shares else self.recompute_shares[0]

    def coarse(self) -> list[Candidate]:
        """Those from which a search starts: few agings, and of further engines what tells whether they pay."""
        agings = self.agings[:: self.step]
        rest = (self.memory_weights[:1], (self.usual_share,))
        found = self._product(self.engines[0], self.levers, agings, *rest)
        for engine in self.engines[1:]:
            levers = [one for one in self.levers if engine[1] is None or "slots" in one]
            found += replace(self, orders=self.orders[:2])._product(engine, levers[:1], agings[1:3] or agings, *rest)
        return found

    def _product(
        self,
        engine: tuple[int, int | None],
        levers: Iterable[tuple[str, ...]],
        agings: Sequence[float],
        weights: Sequence[float],
        shares: Sequence[float],
    ) -> list[Candidate]:
        seqs, slots = engine
        found = [fcfs(seqs)] if slots is None and seqs != self.stock else []
        # Slots that nobody orders only hold residents back.
        for one in levers:
            if slots is None or "slots" in one:
                found += [
                    Candidate(one, order, aging, weight, slots, seqs, share, self.aging_key)
                    for order in self.orders
                    for weight in weights
                    for aging in agings
                    for share in (shares if "admission" in one else (None,))
                ]
        return found

    def neighbours(self, candidate: Candidate, stride: int) -> list[Candidate]:
        """Those that are one step away: `stride` agings, memory weight, what admission risks, a lever, sequences, slots."""
        if not candidate.levers:
            return []
        share = self.usual_share
        found = [replace(candidate, aging=aging) for aging in _beside(self.agings, candidate.aging, stride)]
        if candidate.recompute_share is not None:
            beside = _beside(self.recompute_shares, candidate.recompute_share)
            found += [replace(candidate, recompute_share=other) for other in beside]
        found += [
            replace(candidate, memory_weight=weight)
            for weight in self.memory_weights
            if weight != candidate.memory_weight
        ]
        found += [
            candidate.with_levers(levers, share)
            for levers in self.levers
            if len(set(levers) ^ set(candidate.levers)) == 1 and (candidate.decode_slots is None or "slots" in levers)
        ]
        seqs, slots = candidate.engine
        for other in _beside([n for n, k in self.engines if k is None], seqs):
            found.append(replace(candidate, max_num_seqs=other, decode_slots=None))
        for limit in _beside([k or n for n, k in self.engines if n == seqs], slots or seqs):
            levers = tuple(
                lever for lever in LEVERS if lever in candidate.levers or (lever == "slots" and limit < seqs)
            )
            if levers in self.levers:
                slotted = candidate.with_levers(levers, share)
                found.append(replace(slotted, decode_slots=limit if limit < seqs else None))
        return found

    def to_dict(self) -> dict[str, Any]:
        """Its entry in a result object."""
        return {
            "levers": ["+".join(levers) for levers in self.levers],
            "orders": list(self.orders),
            f"{self.aging_key}s": list(self.agings),
            "memory_weights": list(self.memory_weights),
            "recompute_shares": list(self.recompute_shares),
            "engines": [{"max_num_seqs": seqs, "decode_slots": slots} for seqs, slots in self.engines],
            "candidates": len(self.candidates()),
        }


def _beside(values: Iterable[float], value: float, stride: int = 1) -> list[Any]:
    """The values so many places below and above, or at the end."""
    ordered = sorted(set(values))
    at = ordered.index(value)
    beside = (max(at - stride, 0), min(at + stride, len(ordered) - 1))
    return [ordered[i] for i in beside if i != at]


def default_space(
    stock: int, swept: Mapping[str, Sequence[float]] | None = None, could_hold: int | None = None
) -> Space:
    """The whole space about an engine of `stock` sequences whose KV cache could hold so many of these requests.

    `swept` replaces the values of an option.
    """
    swept = swept or {}
    for name in swept:
        if name not in SWEPT:
            allowed = ", ".join(key.replace("_", "-") for key in SWEPT)
            raise ConfigError(f"sweep: {name.replace('_', '-')} is no choice of --tune, which searches {allowed}")
    by_rate = "aging_rate" in swept
    engines: dict[tuple[int, int | None], None] = {}
    for seqs in [int(value) for value in swept.get("max_num_seqs", ())] or usual_sequences(stock, could_hold):
        # More seats than the engine has are there to decode.
        usual = (3 * seqs // 4, seqs // 2) if seqs <= stock else ()
        slots = [int(value) for value in swept.get("decode_slots", usual)]
        engines |= dict.fromkeys([(seqs, None), *((seqs, k) for k in slots if 1 <= k < seqs)])
    return Space(
        stock=stock,
        levers=LEVER_SETS,
        orders=ORDERS,
        agings=tuple(dict.fromkeys(swept["aging_rate"] if by_rate else swept.get("aging", AGINGS))),
        memory_weights=MEMORY_WEIGHTS,
        engines=tuple(engines),
        recompute_shares=RECOMPUTE_SHARES,
        aging_key="aging_rate" if by_rate else "aging",
    )


def usual_sequences(stock: int, could_hold: int | None) -> list[int]:
    """The engine's own number first, then fewer, then more as far as the KV cache holds them."""
    found = [n for n in (stock, stock // 2, stock // 4) if n >= 1]
    if could_hold is None or could_hold < WORTH * stock:
        return found
    # One between, where the way is long: what a step costs grows with the sequences in it.
    between = [int((stock * could_hold) ** 0.5)] if could_hold >= 3 * stock else []
    return [*found, *between, could_hold]
