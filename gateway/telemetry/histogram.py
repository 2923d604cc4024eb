"""A histogram that is cheap to observe, and flat enough to be sent, added and merged.

An observation is one bisect and two additions. `counts` holds what fell into each bucket *alone*, the last one being
everything above the highest edge; Prometheus's cumulative view is made at scrape time, where time is cheap.
The edges are the union of what dashboards of vLLM and of OpenTelemetry ask for, so that their thresholds are edges
here too: a threshold that is no edge cannot be answered from a histogram.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

Edges = tuple[float, ...]

B_TTFT: Edges = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.75,
    1.0, 1.5, 2.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0,
)  # fmt: skip
B_TPOT: Edges = (
    0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4,
    0.5, 0.75, 1.0, 2.5, 5.0, 10.0,
)  # fmt: skip
B_E2E: Edges = (
    0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0,
    480.0, 960.0, 1920.0,
)  # fmt: skip
B_OVH: Edges = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)
B_GAP: Edges = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)  # the longest silence within a stream
B_WAIT: Edges = (*B_OVH, 2.5, 5.0, 10.0, 30.0)  # of a queue, of a connection: usually nothing, at times a time-out


class Exemplar(NamedTuple):
    """A trace in which an observation of a bucket can be looked at. `at`: the time of day, in seconds."""

    trace_id: str
    value: float
    at: float


class Histogram:
    __slots__ = ("counts", "edges", "exemplars", "sum")

    def __init__(self, edges: Edges):
        self.edges = edges
        self.counts = [0] * (len(edges) + 1)
        self.sum = 0.0
        self.exemplars: dict[int, Exemplar] | None = None  # the newest of each bucket

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.edges, value)] += 1  # an edge belongs to the bucket below it: `le`
        self.sum += value

    def observe_all(self, values: list[float]) -> None:
        """`observe` for many at once, which it sorts: they lie in a few buckets, and all else runs in C."""
        if not values:
            return
        values.sort()
        counts, edges, counted = self.counts, self.edges, 0
        last = bisect_left(edges, values[-1])
        for bucket in range(bisect_left(edges, values[0]), last):
            upto = bisect_right(values, edges[bucket], counted)
            counts[bucket] += upto - counted
            counted = upto
        counts[last] += len(values) - counted
        self.sum += sum(values)

    def exemplify(self, value: float, trace_id: str, at: float) -> None:
        """Name the trace of an observation. The newest stays."""
        if self.exemplars is None:
            self.exemplars = {}
        self.exemplars[bisect_left(self.edges, value)] = Exemplar(trace_id, value, at)

    @property
    def n(self) -> int:
        return sum(self.counts)

    def add(self, counts: Sequence[int], total: float) -> None:
        """Add another histogram's flat form. Other edges are a mistake of the caller's, and would lie for ever."""
        if len(counts) != len(self.counts):
            raise ValueError(f"{len(counts)} buckets do not fit into {len(self.counts)}")
        self.counts = [mine + theirs for mine, theirs in zip(self.counts, counts, strict=True)]
        self.sum += total

    def cumulative(self) -> tuple[int, ...]:
        """Prometheus's buckets: how many are not above each edge; all of them, last."""
        return tuple(accumulate(self.counts))
