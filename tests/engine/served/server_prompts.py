"""What the clients of the server tests ask, and metrics that every scrape must satisfy."""

from __future__ import annotations

import math
from collections.abc import Sequence

from vllm_server import NAME, Samples, at

from leap_rs.vllm.metrics import METRICS

# Whose greedy answers are compared with another library's.
QUESTIONS = (
    "What is the capital of France?",
    "What is 2 plus 3?",
    "Name a colour.",
    "How many legs does a spider have?",
    "Is water wet? Answer yes or no.",
    "What is the opposite of hot?",
)
ANSWER = 24
_THINGS = ("a boat", "the moon", "a river", "an old house", "a teacher", "the winter", "a horse", "a small town")
_TASKS = (
    "Write one sentence about {}.",
    "Name three words that go with {}.",
    "Is {} bigger than a cat? Answer yes or no.",
    "Write a short story about {} that ends well.",
    "Explain to a child what {} is.",
    "List five facts about {}.",
    "What colour has {}?",
    "Give {} a name.",
)
PROMPTS = tuple(task.format(thing) for task in _TASKS for thing in _THINGS)


def check_every_metric(samples: Samples, readouts: Sequence[str] = ("prompt", "state")) -> None:
    """Every metric is there with its labels, counts are whole numbers, and histograms add up."""
    seen = set()
    for metric in METRICS:
        for value in metric.values or ("",):
            labels = {metric.label: value} if metric.label else {}
            if metric.kind == "histogram":
                seen |= _check_histogram(samples, metric.name, labels, metric.buckets)
                continue
            name = f"leap:{metric.name}{'_total' if metric.kind == 'counter' else ''}"
            seen.add((name, frozenset({"model_name": NAME, "engine": "0", **labels}.items())))
            number = at(samples, name, **labels)
            if metric.name == "rank_correlation":
                assert math.isnan(number) or -1 <= number <= 1
            elif metric.name == "kv_peak_ratio":
                # Whatever was held over what was predicted; unknown as long as nobody has waited for room.
                assert math.isnan(number) or number >= 0
            else:
                assert number == int(number) >= 0, name
    assert seen == samples.keys()
    for readout in readouts:
        predictions = at(samples, "leap:predictions_total", readout=readout)
        for name in ("prediction_seconds", "predicted_tokens"):
            assert at(samples, f"leap:{name}_count", readout=readout) == predictions
        assert at(samples, "leap:prediction_seconds_sum", readout=readout) >= 0
        assert at(samples, "leap:predicted_tokens_sum", readout=readout) >= predictions
        assert at(samples, "leap:armed_readout", readout=readout) in (0, 1)
    kinds = {kind: at(samples, "leap:labels_total", kind=kind) for kind in ("exact", "censored")}
    assert at(samples, "leap:output_tokens_count") == sum(kinds.values())
    assert at(samples, "leap:mode", mode="armed") + at(samples, "leap:mode", mode="shadow") == 1


def _check_histogram(
    samples: Samples, name: str, labels: dict[str, str], buckets: Sequence[float]
) -> set[tuple[str, frozenset[tuple[str, str]]]]:
    common = {"model_name": NAME, "engine": "0", **labels}
    edges = [*(repr(float(edge)) for edge in buckets), "+Inf"]
    counts = [at(samples, f"leap:{name}_bucket", le=edge, **labels) for edge in edges]
    assert counts == sorted(counts)
    assert counts[-1] == at(samples, f"leap:{name}_count", **labels)
    assert at(samples, f"leap:{name}_sum", **labels) >= 0
    made = {(f"leap:{name}_bucket", frozenset({**common, "le": edge}.items())) for edge in edges}
    return made | {(f"leap:{name}_{part}", frozenset(common.items())) for part in ("count", "sum")}
