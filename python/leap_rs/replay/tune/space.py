"""What a search may choose: levers, order, aging, memory term, decode slots and sequences; and how fine it looks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from leap_rs._leap import ConfigError

LEVERS = ("queue", "slots", "evict")
ORDERS = ("gittins:ptl", "gittins:e2el", "survival", "countdown")
AGING_RATES = (
    *(0.0, 0.001, 0.0015, 0.002, 0.003, 0.005, 0.007, 0.01, 0.015, 0.02, 0.03),
    *(0.05, 0.07, 0.1, 0.15, 0.2, 0.3, 0.5, 0.7, 1.0),
)
MEMORY_WEIGHTS = (1.0, 0.0)
SWEPT = ("aging_rate", "decode_slots", "max_num_seqs")


@dataclass(frozen=True)
class Candidate:
    """A policy and the engine limits that it runs under."""

    levers: tuple[str, ...]
    """None at all is fcfs."""
    order: str
    """With what Gittins order serves behind a colon; empty for fcfs."""
    aging_rate: float
    memory_weight: float
    decode_slots: int | None
    """None: every resident decodes."""
    max_num_seqs: int

    @property
    def policy(self) -> str:
        """The specification that `leap-replay --policy` takes."""
        if not self.levers:
            return "fcfs"
        keys = [f"levers={'+'.join(self.levers)}", *(f"{key}={value}" for key, value in self.ordering().items())]
        keys += [f"aging_rate={plain(self.aging_rate)}", f"memory_weight={plain(self.memory_weight)}"]
        return f"leap:{','.join(keys)}"

    def ordering(self) -> dict[str, str]:
        """Order, and what it serves where it has a choice."""
        order, _, objective = self.order.partition(":")
        return {"order": order, **({"objective": objective} if objective else {})}

    @property
    def engine(self) -> tuple[int, int | None]:
        """What of it is the engine's: sequences and decode slots."""
        return self.max_num_seqs, self.decode_slots

    def to_dict(self) -> dict[str, Any]:
        """Its entry in a result object."""
        found: dict[str, Any] = {"policy": self.policy, "levers": list(self.levers)}
        if self.levers:
            found |= {**self.ordering(), "aging_rate": self.aging_rate, "memory_weight": self.memory_weight}
        return {**found, "decode_slots": self.decode_slots, "max_num_seqs": self.max_num_seqs}


def plain(value: float) -> str:
    """Every digit that the number has, and no `.0` behind a whole one."""
    return repr(float(value)).removesuffix(".0")


def fcfs(max_num_seqs: int) -> Candidate:
    """First come first served at so many sequences, without a limit on slots."""
    return Candidate((), "", 0.0, 0.0, None, max_num_seqs)


def plain_leap(max_num_seqs: int) -> Candidate:
    """The policy `leap` as it is where nobody tunes it."""
    return Candidate(("queue", "slots"), "gittins:ptl", 0.05, 1.0, None, max_num_seqs)


@dataclass(frozen=True)
class Space:
    """Every value of every choice; the simpler or usual one first, since that wins where two do the same."""

    stock: int
    """Sequences of the engine as it is."""
    levers: tuple[tuple[str, ...], ...]
    orders: tuple[str, ...]
    aging_rates: tuple[float, ...]
    memory_weights: tuple[float, ...]
    engines: tuple[tuple[int, int | None], ...]
    """Pairs of sequences and decode slots."""

    @property
    def step(self) -> int:
        """How far the aging rates of a coarse grid lie apart: about four of them, but none of them left out of reach."""
        return min(max((len(self.aging_rates) + 2) // 4, 1), 5)

    @property
    def strides(self) -> tuple[int, int]:
        """How far each refinement looks among the aging rates; together they reach every one from the coarse ones."""
        return (self.step + 1) // 2, 1

    def candidates(self) -> list[Candidate]:
        """All of them."""
        found = []
        for engine in self.engines:
            found += self._product(engine, self.levers, self.aging_rates, self.memory_weights)
        return found

    def coarse(self) -> list[Candidate]:
        """Those from which a search starts: few aging rates, and of further engines what tells whether they pay."""
        rates = self.aging_rates[:: self.step]
        weights = self.memory_weights[:1]
        found = self._product(self.engines[0], self.levers, rates, weights)
        for engine in self.engines[1:]:
            levers = [one for one in self.levers if engine[1] is None or "slots" in one]
            found += self._product(engine, levers[:1], rates[1:3] or rates, weights)
        return found

    def _product(
        self,
        engine: tuple[int, int | None],
        levers: Iterable[tuple[str, ...]],
        rates: Sequence[float],
        weights: Sequence[float],
    ) -> list[Candidate]:
        seqs, slots = engine
        found = [fcfs(seqs)] if slots is None and seqs != self.stock else []
        # Slots that nobody orders only hold residents back.
        for one in levers:
            if slots is None or "slots" in one:
                found += [
                    Candidate(one, order, rate, weight, slots, seqs)
                    for order in self.orders
                    for weight in weights
                    for rate in rates
                ]
        return found

    def neighbours(self, candidate: Candidate, stride: int) -> list[Candidate]:
        """Those that are one step away: `stride` aging rates, another memory weight, a lever, sequences or slots."""
        if not candidate.levers:
            return []
        found = [
            replace(candidate, aging_rate=rate) for rate in _beside(self.aging_rates, candidate.aging_rate, stride)
        ]
        found += [
            replace(candidate, memory_weight=weight)
            for weight in self.memory_weights
            if weight != candidate.memory_weight
        ]
        found += [
            replace(candidate, levers=levers)
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
                found.append(replace(candidate, levers=levers, decode_slots=limit if limit < seqs else None))
        return found

    def to_dict(self) -> dict[str, Any]:
        """Its entry in a result object."""
        return {
            "levers": ["+".join(levers) for levers in self.levers],
            "orders": list(self.orders),
            "aging_rates": list(self.aging_rates),
            "memory_weights": list(self.memory_weights),
            "engines": [{"max_num_seqs": seqs, "decode_slots": slots} for seqs, slots in self.engines],
            "candidates": len(self.candidates()),
        }


def _beside(values: Iterable[float], value: float, stride: int = 1) -> list[Any]:
    """The values so many places below and above, or at the end."""
    ordered = sorted(set(values))
    at = ordered.index(value)
    beside = (max(at - stride, 0), min(at + stride, len(ordered) - 1))
    return [ordered[i] for i in beside if i != at]


def default_space(stock: int, swept: Mapping[str, Sequence[float]] | None = None) -> Space:
    """The whole space about an engine of `stock` sequences; `swept` replaces the values of an option."""
    swept = swept or {}
    for name in swept:
        if name not in SWEPT:
            allowed = ", ".join(key.replace("_", "-") for key in SWEPT)
            raise ConfigError(f"sweep: {name.replace('_', '-')} is no choice of --tune, which searches {allowed}")
    given = [int(value) for value in swept.get("max_num_seqs", ())]
    # Step times are fitted to steps of at most the engine's own number: what more sequences cost is a guess.
    usual = [n for n in (stock, stock // 2, stock // 4) if n >= 1]
    engines: dict[tuple[int, int | None], None] = {}
    for seqs in given or usual:
        slots = [int(value) for value in swept.get("decode_slots", (3 * seqs // 4, seqs // 2))]
        engines |= dict.fromkeys([(seqs, None), *((seqs, k) for k in slots if 1 <= k < seqs)])
    return Space(
        stock=stock,
        levers=tuple(
            tuple(lever for lever, on in zip(LEVERS, mask, strict=True) if on)
            for mask in ((1, 0, 0), (1, 1, 0), (0, 1, 0), (1, 0, 1), (1, 1, 1), (0, 1, 1), (0, 0, 1))
        ),
        orders=ORDERS,
        aging_rates=tuple(dict.fromkeys(swept.get("aging_rate", AGING_RATES))),
        memory_weights=MEMORY_WEIGHTS,
        engines=tuple(engines),
    )
