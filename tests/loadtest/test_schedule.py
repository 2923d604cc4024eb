"""When requests arrive: vLLM's arithmetic, with nothing but numbers."""

from __future__ import annotations

import math
from itertools import pairwise
from random import Random

import pytest

from gateway.loadtest.schedule import Ramp, arrivals, pairs, rate_changes


def gaps(times: list[float]) -> list[float]:
    return [times[0], *(later - earlier for earlier, later in pairwise(times))]


@pytest.mark.parametrize("burstiness", [0.5, 1.0, 4.0, math.inf])
def test_the_last_of_n_arrives_at_n_over_rate(burstiness: float) -> None:
    times = arrivals(500, 50.0, burstiness, None, Random(1))
    assert len(times) == 500
    assert times == sorted(times)
    assert times[-1] == pytest.approx(10.0)
    assert times[0] > 0  # the first waits for its own gap


def test_inf_is_all_at_once() -> None:
    assert arrivals(3, math.inf, 1.0, None, Random(1)) == [0.0] * 3


def test_infinite_burstiness_is_even_gaps() -> None:
    assert gaps(arrivals(10, 4.0, math.inf, None, Random(1))) == pytest.approx([0.25] * 10)


def test_burstiness_1_is_a_poisson_process() -> None:
    """The largest distance between the gaps' distribution and the exponential one (Kolmogorov and Smirnov)."""
    found = sorted(gaps(arrivals(2000, 50.0, 1.0, None, Random(3))))
    distances = [abs((place + 0.5) / 2000 - (1 - math.exp(-50 * gap))) for place, gap in enumerate(found)]
    assert max(distances) < 1.63 / math.sqrt(2000)  # passes 99 % of samples; the seed is fixed


@pytest.mark.parametrize(("burstiness", "variation"), [(0.25, 2.0), (1.0, 1.0), (4.0, 0.5)])
def test_burstiness_is_the_shape_of_a_gamma_distribution(burstiness: float, variation: float) -> None:
    found = gaps(arrivals(20_000, 10.0, burstiness, None, Random(5)))
    mean = sum(found) / len(found)
    deviation = math.sqrt(sum((gap - mean) ** 2 for gap in found) / len(found))
    assert deviation / mean == pytest.approx(variation, rel=0.05)


def test_the_same_seed_the_same_arrivals() -> None:
    assert arrivals(9, 5.0, 1.0, None, Random("7/a")) == arrivals(9, 5.0, 1.0, None, Random("7/a"))
    assert arrivals(9, 5.0, 1.0, None, Random("7/a")) != arrivals(9, 5.0, 1.0, None, Random("8/a"))


def test_a_linear_ramp_goes_by_index() -> None:
    ramp = Ramp(2, 10)
    assert [ramp.rate(index, 5) for index in range(5)] == [2, 4, 6, 8, 10]
    assert gaps(arrivals(5, math.inf, math.inf, ramp, Random(1))) == pytest.approx([1 / 2, 1 / 4, 1 / 6, 1 / 8, 1 / 10])


def test_an_exponential_ramp_goes_by_equal_factors() -> None:
    assert [Ramp(1, 16, True).rate(index, 5) for index in range(5)] == pytest.approx([1, 2, 4, 8, 16])


def test_the_rates_that_a_ramp_passes() -> None:
    times = [1.0, 2.0, 3.0]
    assert rate_changes(Ramp(1, 5), times) == [(1, 0.0), (2, 2.0), (3, 2.0), (4, 3.0), (5, 3.0)]


def test_pairs_are_interleaved_and_neither_is_always_the_first() -> None:
    times = [float(n) for n in range(200)]
    both = pairs(times, 2.0, Random(1))
    assert all(sorted(pair) == [time, time + 0.25] for pair, time in zip(both, times, strict=True))
    assert 70 < sum(one < other for one, other in both) < 130
    assert pairs([0.0], math.inf, Random(1)) == [(0.0, 0.0)]
