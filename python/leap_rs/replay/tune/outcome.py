"""What a search found, as one strict JSON object: the candidates, the chosen one on both halves, the verdict in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from leap_rs.replay.conclude import number
from leap_rs.replay.results import ResultObject

from .bound import Bound, key_of
from .measure import Bench, Estimate, Measured
from .search import Check, Found, checks

VERSION = 1
SHOWN = ("mean_ptl", "mean_e2el", "p99_e2el", "p99_ptl", "request_throughput")
# Percent below which a gain is none, however sure: the engine model is not that good.
WORTH = 1.0
NAMES = {"mean_ptl": "mean PTL", "mean_e2el": "mean E2EL"}


class TuneResult(ResultObject):
    """The outcome of a search."""

    @property
    def chosen(self) -> dict[str, Any] | None:
        """The chosen policy with its settings, as in `to_dict`; None where nothing keeps the bound and gains."""
        found: dict[str, Any] | None = self.to_dict()["chosen"]
        return found

    @property
    def server(self) -> dict[str, Any]:
        """`max_num_seqs`, `additional_config`, the whole command for vLLM, and the same without leap (`plain_command`)."""
        found: dict[str, Any] = self.to_dict()["server"]
        return found


@dataclass(frozen=True)
class Verdict:
    """What follows from both halves."""

    status: str
    """gain, no_gain, bound_unmet or no_queue."""
    recommend: str
    """leap (the chosen), leap_at_stock, max_num_seqs (fcfs with another number of sequences) or fcfs."""
    bound_held: bool | None
    """On the half that the search did not see, by its mean; None where nothing was chosen."""
    sentences: list[str]

    def to_dict(self) -> dict[str, Any]:
        """Its entry in a result object."""
        return {"status": self.status, "recommend": self.recommend, "bound_held": self.bound_held}


def entry(name: str, one: Measured, base: Measured, bounds: Sequence[Bound]) -> dict[str, Any]:
    """One candidate on one half: values, changes against fcfs in percent, bounds."""
    return {
        "name": name,
        **one.candidate.to_dict(),
        "seeds": one.seeds,
        "metrics": {key_of(metric): Estimate.of(values).to_dict() for metric, values in one.values.items()},
        "change": {key_of(metric): one.change(base, metric).to_dict() for metric in one.values},
        "bounds": [check.to_dict() for check in checks(one, base, bounds)],
    }


def entries(named: Mapping[str, Measured], base: Measured, bounds: Sequence[Bound]) -> list[dict[str, Any]]:
    """Several of them."""
    return [entry(name, one, base, bounds) for name, one in named.items()]


def quarters(found: Found, one: Measured, rows: Sequence[tuple[int, int]]) -> list[dict[str, Any]] | None:
    """Bounds of a finalist on the quarters; None where it was not replayed there, for it could not have been chosen."""
    parts = found.parts.get(one.candidate)
    if parts is None:
        return None
    return [
        {"rows": list(span), "bounds": [check.to_dict() for check in part]}
        for span, part in zip(rows, parts, strict=True)
    ]


def half(bench: Bench, named: Mapping[str, Measured], bounds: Sequence[Bound], rows: Sequence[int]) -> dict[str, Any]:
    """One half with everything that is reported of it."""
    return {
        "rows": list(rows),
        "requests": rows[1] - rows[0],
        "replayed": bench.replayed,
        "duration_s": bench.duration_s,
        "request_rate": bench.rate,
        "queue": bench.queue,
        "results": entries(named, bench.fcfs, bounds),
    }


def verdict(
    found: Found | None,
    search: Bench,
    unseen: Mapping[str, Measured],
    bounds: Sequence[Bound],
    objective: str,
    stock: int,
) -> Verdict:
    """Status, recommendation and sentences; `unseen` are the candidates on the other half, by name."""
    what = NAMES[objective]
    asked = ",".join(str(bound) for bound in bounds)
    if found is None:
        why = (
            "No policy can matter at this load, because there is no queue (raise --load, or leave the server as it is)."
        )
        if search.client is not None:
            why = f"No policy can matter, because {search.client} (leave the server as it is)."
        return Verdict("no_queue", "fcfs", None, [why])
    if found.chosen is None and found.nearest is not None:
        near = max(checks(found.nearest, search.fcfs, bounds), key=lambda check: check.excess)
        where = ""
        if near.excess <= 1:
            parts = found.parts[found.nearest.candidate]
            worst = max(range(len(parts)), key=lambda i: max(check.excess for check in parts[i]))
            near = max(parts[worst], key=lambda check: check.excess)
            where = f" on the {('first', 'second')[worst]} quarter of the trace"
        text = f"Nothing meets {asked}. The nearest, {found.nearest.candidate.policy}"
        text += f" at {found.nearest.candidate.max_num_seqs} sequences, has {_ratio(near)}{where}. Stay with fcfs."
        return Verdict("bound_unmet", "fcfs", None, [text])
    if found.chosen is None:
        return Verdict(
            "no_gain",
            "fcfs",
            None,
            [f"Nothing that meets {asked} has a lower {what} than fcfs: nothing is worth switching on."],
        )
    return _of_chosen(unseen, bounds, objective, stock)


def _of_chosen(unseen: Mapping[str, Measured], bounds: Sequence[Bound], objective: str, stock: int) -> Verdict:
    base, chosen = unseen["fcfs"], unseen["chosen"]
    what = NAMES[objective]
    gain = chosen.change(base, objective)
    found = checks(chosen, base, bounds)
    held = all(check.holds for check in found)
    sentences = [f"On the half that the search did not see, the chosen setting {_effect(gain, what)} against fcfs."]
    sentences += [_kept(check) for check in found]
    if not _clear_cut(gain):
        noise = gain.ci95 is not None and gain.ci95[0] <= 0 <= gain.ci95[1]
        why = "There is no gain there" if gain.mean > 0 and not noise else f"The gain is below {WORTH:g} %"
        why = "The gain is within the noise" if noise else why
        sentences.append(f"{why}: nothing is worth switching on.")
        return Verdict("no_gain", "fcfs", held, sentences)
    recommend = "leap" if chosen.candidate.levers else "max_num_seqs"
    plain = unseen.get("fcfs_at_chosen")
    if plain is not None:
        adds = chosen.change(plain, objective)
        seqs = chosen.candidate.max_num_seqs
        text = f"fcfs at {seqs} sequences alone {_effect(plain.change(base, objective), what)}; the order on top of it "
        limits = ", ".join(_ratio(check, f"fcfs at {seqs}") for check in checks(chosen, plain, bounds))
        text += (
            f"{_effect(adds, what)}, with {limits} (--max-num-seqs {seqs} makes that what the bound is relative to)."
        )
        alone = _clear_cut(plain.change(base, objective)) and all(check.holds for check in checks(plain, base, bounds))
        if alone and not _clear_cut(adds):
            recommend = "max_num_seqs"
            text += f" So --max-num-seqs {seqs} is what is worth switching on."
        sentences.append(text)
    if not chosen.candidate.levers:
        sentences.append(f"What helps is --max-num-seqs {chosen.candidate.max_num_seqs}, under fcfs.")
    at_stock = unseen.get("at_stock")
    if at_stock is not None:
        limits = "; ".join(_ratio(check) for check in checks(at_stock, base, bounds))
        sentences.append(
            f"With --max-num-seqs left at {stock}, the best {_effect(at_stock.change(base, objective), what)} there ({limits})."
        )
    if not held:
        recommend, instead = _instead(unseen, bounds, objective, stock)
        sentences.append(f"What does not hold on traffic that it was not chosen on is not recommended: {instead}.")
    return Verdict("gain", recommend, held, sentences)


def _instead(unseen: Mapping[str, Measured], bounds: Sequence[Bound], objective: str, stock: int) -> tuple[str, str]:
    """What to recommend where the chosen setting broke the bound: the best that was fixed before this half and holds on it."""
    named = {"max_num_seqs": unseen.get("fcfs_at_chosen"), "leap_at_stock": unseen.get("at_stock")}
    good = {key: one for key, one in named.items() if one is not None and worth(one, unseen["fcfs"], bounds, objective)}
    if not good:
        return "fcfs", "stay with fcfs"
    best = min(good, key=lambda key: float(good[key].values[objective].mean()))
    seqs = good[best].candidate.max_num_seqs
    what = f"fcfs at {seqs} sequences" if best == "max_num_seqs" else f"the best at {stock} sequences"
    return best, f"{what} held and is"


def worth(one: Measured, base: Measured, bounds: Sequence[Bound], objective: str) -> bool:
    """Whether a candidate is clearly better than fcfs and keeps the bound by its mean."""
    return _clear_cut(one.change(base, objective)) and all(check.holds for check in checks(one, base, bounds))


def _clear_cut(change: Estimate) -> bool:
    """Whether an objective is lower by a percent or more, and lower for all that its interval holds."""
    return change.mean <= -WORTH and (change.ci95 is None or change.ci95[1] < 0)


def _effect(change: Estimate, what: str) -> str:
    low, high = change.ci95 or (change.mean, change.mean)
    if low <= 0 <= high:
        return f"changes {what} by {_signed(change.mean)} % ({_signed(low)} to {_signed(high)}), no clear difference"
    if change.mean < 0:
        return f"cuts {what} by {number(-change.mean)} % ({number(-high)} to {number(-low)})"
    return f"raises {what} by {number(change.mean)} % ({number(low)} to {number(high)})"


def _kept(check: Check) -> str:
    if check.excess <= 1:
        return f"The bound {check.bound} held there too: {_ratio(check)}."
    if check.holds:
        return f"The bound {check.bound} held there by the mean, not by all of its interval: {_ratio(check)}."
    return f"The bound {check.bound} did not hold there: {_ratio(check)}."


def _ratio(check: Check, base: str = "fcfs") -> str:
    ratio = check.ratio
    ends = "" if ratio.ci95 is None else f" ({ratio.ci95[0]:.3f} to {ratio.ci95[1]:.3f})"
    return f"{check.bound.metric} {ratio.mean:.3f}{ends} times that of {base}"


def _signed(value: float) -> str:
    return f"{'+' if value > 0 else '-' if value < 0 else ''}{number(abs(value))}"
