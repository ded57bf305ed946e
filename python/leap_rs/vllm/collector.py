"""What prometheus_client shows of the engines' files, under the prefix `leap:`."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any
from weakref import WeakSet

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector, CollectorRegistry

from .metrics import Metric as Ours
from .metrics import Reading, engine_files, read

PREFIX = "leap:"
COMMON = ("model_name", "engine")


class LeapCollector(Collector):
    """Reads the files anew at each scrape, so that engines may come, go and start again.

    Args:
        directory: Where the files lie, if not where engines put them by themselves.
    """

    def __init__(self, directory: Path | None = None) -> None:
        self._directory = directory

    def describe(self) -> list[Metric]:
        """Nothing: what there is depends on the engines."""
        return []

    def collect(self) -> Iterator[Metric]:
        """The metrics of all engines."""
        families: dict[str, Any] = {}
        readings = (read(path) for path in engine_files(self._directory))
        for reading in filter(None, readings):
            for metric, value, numbers in reading.series():
                if metric.name not in families:
                    families[metric.name] = _family(metric)
                _add(families[metric.name], metric, [*_common(reading), *([value] if metric.label else [])], numbers)
        yield from families.values()


def _common(reading: Reading) -> list[str]:
    return [reading.model_name, reading.engine]


def _family(metric: Ours) -> Any:
    kinds = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily, "histogram": HistogramMetricFamily}
    labels = [*COMMON, *([metric.label] if metric.label else [])]
    return kinds[metric.kind](f"{PREFIX}{metric.name}", metric.help, labels=labels)


def _add(family: Any, metric: Ours, labels: list[str], numbers: Any) -> None:
    if metric.kind != "histogram":
        family.add_metric(labels, numbers[0])
        return
    edges = [*(repr(float(edge)) for edge in metric.buckets), "+Inf"]
    family.add_metric(labels, list(zip(edges, accumulate(numbers[:-1]), strict=True)), sum_value=numbers[-1])


_REGISTRIES: WeakSet[CollectorRegistry] = WeakSet()


def register(registry: CollectorRegistry, directory: Path | None = None) -> None:
    """Adds the collector to a registry, once."""
    if registry not in _REGISTRIES:
        registry.register(LeapCollector(directory))
        _REGISTRIES.add(registry)
