from __future__ import annotations

import random

import pytest

from gateway.telemetry import histogram as module
from gateway.telemetry.histogram import B_TTFT, Histogram


def test_an_edge_belongs_to_its_own_bucket() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.0, 1.0, 1.5, 2.0, 2.1, 100.0):
        histogram.observe(value)
    assert histogram.counts == [2, 2, 2]
    assert histogram.cumulative() == (2, 4, 6)
    assert histogram.n == 6
    assert histogram.sum == pytest.approx(106.6)


def test_adding_is_observing_all_in_one() -> None:
    rng = random.Random(1)
    one, other, both = Histogram(B_TTFT), Histogram(B_TTFT), Histogram(B_TTFT)
    for _ in range(500):
        value = rng.expovariate(1)
        (one if rng.random() < 0.3 else other).observe(value)
        both.observe(value)
    one.add(other.counts, other.sum)
    assert one.counts == both.counts
    assert one.sum == pytest.approx(both.sum)


def test_observing_all_at_once_is_observing_each() -> None:
    rng = random.Random(2)
    one, each = Histogram(B_TTFT), Histogram(B_TTFT)
    for size in (0, 1, 2, 32, 200):
        values = [rng.choice([rng.expovariate(1), rng.choice(B_TTFT), 0.0, 1e6]) for _ in range(size)]
        for value in values:
            each.observe(value)
        one.observe_all(values)
        assert one.counts == each.counts
        assert one.sum == pytest.approx(each.sum)


def test_other_edges_are_refused() -> None:
    with pytest.raises(ValueError, match="3 buckets"):
        Histogram((1.0,)).add([1, 2, 3], 6.0)


@pytest.mark.parametrize("name", ["B_TTFT", "B_TPOT", "B_E2E", "B_GAP", "B_OVH", "B_WAIT"])
def test_edges_rise(name: str) -> None:
    edges = getattr(module, name)
    assert list(edges) == sorted(set(edges))
    assert all(isinstance(edge, float) for edge in edges)
