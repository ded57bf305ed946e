"""The sentence that a replay ends with: what the order changes at this load, or that it cannot change anything."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .options import AGING
from .remarks import enough, is_short, queue_of_client, seats
from .seats import short_of_seats

ORACLES = ("srpt-oracle", "sjf-oracle")
# Below this share the order hardly ever had a choice, and a reader should know before reading on.
SELDOM = 0.02


def conclude(document: Mapping[str, Any], point: int) -> str:
    """What to know of one point of the sweep, in a sentence or two, from the result object."""
    results = [result for result in document["results"] if result["point"] == point]
    where = describe_point(document, point)
    if not results:
        return f"{where}: nothing was replayed."
    base = next((result for result in results if result["policy"] == "fcfs"), None)
    share = (base or results[0])["queue"].get("share_of_steps_with_queue")
    client = queue_of_client(document, [point])
    if share == 0 and _all_equal(results):
        if client is not None:
            remedy = f"give --max-concurrency above {seats(document, point)}, or leave it out"
            return f"{where}: no policy can matter, because {client} ({remedy})."
        return f"{where}: no policy can matter at this load, because there is no queue ({_remedy(document, point)})."
    if client is None and base is not None:
        client = short_of_seats(document, point, base)
    tail = "" if client is None else f" {client[0].upper()}{client[1:]}."
    return f"{where}: {_compared(results, base, share)}{tail}"


def _compared(results: Sequence[Mapping[str, Any]], base: Mapping[str, Any] | None, share: float | None) -> str:
    """What the order changes against fcfs."""
    if base is None:
        return "fcfs was not replayed, so there is nothing to compare with (add --policy fcfs)."
    subject = _subject(results)
    if subject is None:
        if len(results) > 1 and (oracle := _oracle(results)) is not None:
            return f"with true lengths known, {oracle}; no predictor was replayed.{_seldom(share)}"
        return f"only fcfs was replayed, so there is nothing to compare.{_seldom(share)}"
    parts = [f"{_label(subject['policy'])} {_main_effect(subject)}"]
    p99 = _change(subject, "p99_e2el_ms", "P99 E2EL")
    if p99 is not None:
        parts.append(p99)
    throughput = _mean(subject, "request_throughput")
    if throughput is not None and abs(throughput) >= 1:
        parts.append(f"throughput changes by {_signed(throughput)} %")
    oracle = _oracle(results)
    if oracle is not None:
        parts.append(oracle)
    return f"{'; '.join(parts)}.{_seldom(share)}"


def _remedy(document: Mapping[str, Any], point: int) -> str:
    load = next(result["load"] for result in document["results"] if result["point"] == point)
    if is_short(document, point) and (load is None or load >= 1):
        return f"the trace ends before one builds up; {enough(document)} repeats it"
    return "raise --load"


def describe_point(document: Mapping[str, Any], point: int) -> str:
    """How this point loads the engine, in a few words."""
    settings = document["config"]["points"][point]
    result = next((one for one in document["results"] if one["point"] == point), None)
    load = (result or settings).get("load")
    rate = (result or settings).get("request_rate")
    words = []
    if settings.get("request_rate") == "inf" or rate == "inf":
        words.append("all requests at once")
    elif settings.get("request_rate") is not None:
        words.append(
            f"at {number(settings['request_rate'])} req/s" + (f" (load {number(load)})" if load is not None else "")
        )
    elif settings.get("load") is not None:
        words.append(f"at load {number(settings['load'])}" + (f" ({number(rate)} req/s)" if rate is not None else ""))
    else:
        extra = [f"{number(rate)} req/s"] if rate is not None else []
        extra += [f"load {number(load)}"] if load is not None else []
        words.append("at the trace's own times" + (f" ({', '.join(extra)})" if extra else ""))
    for key, name in (("decode_slots", "decode slots"), ("max_num_seqs", "sequences")):
        if settings.get(key) is not None:
            words.append(f"{settings[key]} {name}")
    words += [f"{key.replace('_', ' ')} {number(settings[key])}" for key in AGING if settings.get(key) is not None]
    text = ", ".join(words)
    return text[0].upper() + text[1:]


def number(value: float) -> str:
    """Three significant digits, without an exponent where a person would not write one."""
    if value == 0:
        return "0"
    if abs(value) >= 100:
        return f"{value:.0f}"
    return f"{value:.3g}"


def _label(policy: str) -> str:
    return "LEAP" if policy == "leap" else policy


def _subject(results: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """Whom the sentence is about: leap, else its nearest relative, else the best of what else was asked for."""
    candidates = [
        result for result in results if result["policy"] != "fcfs" and result["policy"].split(":")[0] not in ORACLES
    ]
    for name in ("leap", "leap-paper", "leap-frozen", "score"):
        named = [result for result in candidates if result["policy"].split(":")[0] == name]
        if named:
            exact = [result for result in named if result["policy"] == name]
            return (exact or sorted(named, key=_ptl))[0]
    return min(candidates, key=_ptl, default=None)


def _ptl(result: Mapping[str, Any]) -> float:
    value = result["metrics"]["mean_ptl_ms"]["mean"]
    return float("inf") if value is None else float(value)


def _main_effect(result: Mapping[str, Any]) -> str:
    change = _mean(result, "mean_ptl_ms")
    if change is None:
        return "cannot be compared with FCFS: mean PTL is undefined"
    interval = result["paired"]["mean_ptl_ms"]["ci95"]
    low, high = interval if interval is not None else (None, None)
    if low is not None and high is not None and low <= 0 <= high and not (low == high == 0):
        bounds = f"({_signed(low)} to {_signed(high)})"
        return f"changes mean PTL by {_signed(change)} % {bounds} against FCFS, no clear difference"
    if _round(change) == 0:
        return "leaves mean PTL as it is under FCFS"
    verb = "cuts" if change < 0 else "raises"
    bounds = ""
    if low is not None and high is not None:
        ends = (-high, -low) if change < 0 else (low, high)
        bounds = f" ({_plain(ends[0])} to {_plain(ends[1])})"
    return f"{verb} mean PTL by {_plain(abs(change))} %{bounds} against FCFS"


def _change(result: Mapping[str, Any], metric: str, name: str) -> str | None:
    change = _mean(result, metric)
    return None if change is None else f"{name} changes by {_signed(change)} %"


def _oracle(results: Sequence[Mapping[str, Any]]) -> str | None:
    for name in ORACLES:
        for result in results:
            if result["policy"].split(":")[0] == name:
                change = _mean(result, "mean_ptl_ms")
                if change is not None:
                    if _round(change) == 0:
                        return "the oracle leaves mean PTL as it is"
                    return f"the oracle {'cuts' if change < 0 else 'raises'} mean PTL by {_plain(abs(change))} %"
    return None


def _mean(result: Mapping[str, Any], metric: str) -> float | None:
    value = (result.get("paired") or {}).get(metric)
    mean = None if value is None else value["mean"]
    return None if mean is None else float(mean)


def _all_equal(results: Sequence[Mapping[str, Any]]) -> bool:
    values = [result["metrics"]["mean_ptl_ms"]["mean"] for result in results]
    known = [value for value in values if value is not None]
    return len(known) == len(values) and max(known) - min(known) <= 1e-9 * max(1.0, *known)


def _seldom(share: float | None) -> str:
    if share is None or not 0 < share < SELDOM:
        return ""
    return f" Only {100 * share:.2g} % of the steps had a queue, so little can change."


def _round(value: float) -> float:
    return round(value, 0 if abs(value) >= 10 else 1) + 0.0  # -0.0 becomes 0.0


def _plain(value: float) -> str:
    rounded = _round(value)
    return f"{rounded:.0f}" if abs(rounded) >= 10 or rounded == 0 else f"{rounded:.1f}"


def _signed(value: float) -> str:
    text = _plain(value)
    return text if text.startswith("-") or text == "0" else f"+{text}"
