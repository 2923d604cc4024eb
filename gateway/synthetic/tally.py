"""Counters and histograms of one series each, for one thread: what an event pays is an addition.

Prometheus' own client takes a lock and walks the buckets at each observation, which is more than writing the event costs.
The page that comes of these is the same.
"""

from __future__ import annotations

import itertools
import time
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class Count(Collector):
    """A counter."""

    def __init__(self, name: str, text: str, labels: Mapping[str, str], registry: CollectorRegistry):
        self._name, self._text, self._labels = name, text, dict(labels)
        self._created = time.time()
        self.value = 0.0
        registry.register(self)

    def inc(self, amount: float = 1) -> None:
        self.value += amount

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily(self._name, self._text, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), self.value, created=self._created)
        yield family


class Tally(Collector):
    """A histogram. `edges` are the upper bounds of its buckets, ascending; the last one, +Inf, is added."""

    def __init__(self, name: str, text: str, labels: Mapping[str, str], edges: Sequence[float], registry: CollectorRegistry):
        self._name, self._text, self._labels, self._edges = name, text, dict(labels), list(edges)
        self._created = time.time()
        self._counts = [0] * (len(edges) + 1)
        self._sum = 0.0
        registry.register(self)

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._edges, value)] += 1
        self._sum += value

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(self._name, self._text, labels=list(self._labels))
        bounds = [*map(floatToGoString, self._edges), "+Inf"]
        upto = list(zip(bounds, itertools.accumulate(self._counts), strict=True))
        family.add_metric(list(self._labels.values()), upto, self._sum)
        family.add_sample(f"{self._name}_created", self._labels, self._created)
        yield family
