"""What a reader should know of a replay before trusting its numbers, as sentences for the notes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .seats import could_hold

# So many requests a seat make filling and draining the engine a small part of a replay.
ENOUGH = 10
# Below this offered load an engine does not fill however long the trace is.
LOADED = 0.5
# Where nothing is preempted and every resident decodes, these have nothing left to decide.
ORDERS_OF_SLOTS = ("las", "mlfq", "leap-frozen", "leap-paper")


def remarks(document: Mapping[str, Any]) -> list[str]:
    """Sentences on the whole replay, none where there is nothing to remark."""
    return [*_short(document), *_ties(document)]


def is_short(document: Mapping[str, Any], point: int) -> bool:
    """Whether the requests at this point are too few to bring the engine to the load that they offer."""
    loads = [result["load"] for result in document["results"] if result["point"] == point]
    loaded = any(load is None or load >= LOADED for load in loads)
    requests: int = document["trace"]["requests"]
    return loaded and requests < ENOUGH * _inside(document, point)


def sequences(document: Mapping[str, Any], point: int) -> int:
    """Residents that one rank takes at this point."""
    config = document["config"]
    return int(config["points"][point]["max_num_seqs"] or config["max_num_seqs"])


def seats(document: Mapping[str, Any], point: int) -> int:
    """Residents that all ranks together take."""
    return sequences(document, point) * int(document["config"].get("data_parallel_size", 1))


def queue_of_client(document: Mapping[str, Any], points: Sequence[int]) -> str | None:
    """That the client's cap is the queue, where at each of these points the engine seats whatever is in flight."""
    cap = document["config"]["max_concurrency"]
    found = sorted({seats(document, point) for point in points})
    if cap is None or not found or cap > found[0]:
        return None
    among = f"{found[0]} seats" if len(found) == 1 else f"seats ({found[0]} to {found[-1]})"
    return (
        f"the client's cap of {cap} in flight (--max-concurrency) is the queue in front of the engine's {among}, and no "
        "order of the server can act on it"
    )


def _inside(document: Mapping[str, Any], point: int) -> int:
    """Requests that the engine holds at most: of its seats as many as its KV cache can fill."""
    config = document["config"]
    cap, most = config["max_concurrency"], seats(document, point)
    memory = could_hold(config, document["trace"].get("kv_tokens_a_resident"))
    if memory is not None:
        most = min(most, memory * int(config.get("data_parallel_size", 1)))
    return most if cap is None else min(most, int(cap))


def enough(document: Mapping[str, Any]) -> str:
    """The option that makes the trace long enough at every point."""
    return f"--num-prompts {2 * ENOUGH * max(_inside(document, i) for i in range(len(document['config']['points'])))}"


def _short(document: Mapping[str, Any]) -> list[str]:
    short = [i for i in range(len(document["config"]["points"])) if is_short(document, i)]
    if not short:
        return []
    requests, inside = document["trace"]["requests"], max(_inside(document, i) for i in short)
    few = f"{requests} requests are few" if requests > 1 else "a single request is little"
    return [
        f"{few} for an engine that takes {inside} at a time: most of this replay fills or drains it, so queues and "
        f"throughput stay below those of lasting traffic ({enough(document)} repeats the trace)"
    ]


def _ties(document: Mapping[str, Any]) -> list[str]:
    """Policies that order decode slots alone, where there was no choice of slots at any point."""
    tied: list[str] | None = None
    queued = False
    for i, point in enumerate(document["config"]["points"]):
        results = [result for result in document["results"] if result["point"] == i]
        base = next((result for result in results if result["policy"] == "fcfs"), None)
        slots = point["decode_slots"] or document["config"].get("decode_slots")
        if base is None or base["queue"]["preemptions"] or (slots and slots < sequences(document, i)):
            return []
        queued = queued or bool(base["queue"]["share_of_steps_with_queue"])
        same = [r["policy"] for r in results if _base(r) in ORDERS_OF_SLOTS and r["metrics"] == base["metrics"]]
        tied = same if tied is None else [policy for policy in tied if policy in same]
    if not tied or not queued:
        return []
    do = f"{_listed(tied)} {'do' if len(tied) > 1 else 'does'}"
    return [
        f"{do} as fcfs does here: every resident decodes in every step and none is preempted, so what they order leaves no "
        "choice (fewer --decode-slots than residents would)"
    ]


def _base(result: Mapping[str, Any]) -> str:
    return str(result["policy"]).split(":")[0]


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
