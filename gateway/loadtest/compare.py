"""What the first endpoint adds to the second: differences pair by pair, with their confidence intervals. Pure.

Both requests of a pair ask the same at nearly the same time, so that what drifts during a run drops out of their
difference. The interval of the mean is Student's; that of a percentile of the differences is read off the order statistics
(the binomial one, which assumes nothing about their distribution).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from statistics import NormalDist

from gateway.loadtest.records import Record
from gateway.loadtest.statistics import SuccessRule, percentile, spread

CONFIDENCE = 0.95
PERCENTS = (50.0, 90.0, 99.0)
PAIRS_LEAST = 6  # below which no interval is given


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Seconds. `low`, `high`: None where there are too few pairs to say."""

    value: float
    low: float | None
    high: float | None


@dataclasses.dataclass(frozen=True)
class Difference:
    """First minus second, of one measure."""

    name: str
    pairs: int
    mean: Estimate
    percentiles: tuple[tuple[float, Estimate], ...]
    ordered: Sequence[float] = dataclasses.field(repr=False, compare=False)


def _mean_gap(record: Record) -> float | None:
    count = len(record.events)
    return (record.events[-1] - record.events[0]) / (count - 1) if count > 1 else None


def _duration(record: Record) -> float | None:
    return record.duration


MEASURES: dict[str, Callable[[Record], float | None]] = {
    "ttft": lambda record: record.ttft,
    "tpot": lambda record: record.tpot_vllm,
    "itl": _mean_gap,  # of one stream
    "e2el": lambda record: record.latency,
    "duration": _duration,
}


def compare(first: Sequence[Record], second: Sequence[Record], succeeded: SuccessRule) -> list[Difference]:
    """Of the pairs whose requests both succeeded; a measure that no pair has is left out."""
    others = {record.index: record for record in second if succeeded(record)}
    pairs = [(record, others[record.index]) for record in first if succeeded(record) and record.index in others]
    found = []
    for name, measure in MEASURES.items():
        values = [(measure(one), measure(other)) for one, other in pairs]
        differences = sorted(one - other for one, other in values if one is not None and other is not None)
        if differences:
            quantiles = tuple((percent, _quantile(differences, percent)) for percent in PERCENTS)
            found.append(Difference(name, len(differences), _mean(differences), quantiles, differences))
    return found


def _mean(ordered: Sequence[float]) -> Estimate:
    count, about = len(ordered), spread(ordered)
    if count < PAIRS_LEAST:
        return Estimate(about.mean, None, None)
    half = student(count - 1) * about.std / math.sqrt(count - 1)  # std is the population's
    return Estimate(about.mean, about.mean - half, about.mean + half)


def student(freedom: int) -> float:
    """The quantile of Student's distribution that leaves out (1 - CONFIDENCE) / 2 (Cornish and Fisher's expansion).

    Right to three digits from five degrees of freedom on.
    """
    z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + math.fsum(term / math.pow(freedom, place + 1) for place, term in enumerate(terms))


def _quantile(ordered: Sequence[float], percent: float) -> Estimate:
    low, high = ranks(len(ordered), percent)
    return Estimate(
        percentile(ordered, percent),
        ordered[low] if low is not None else None,
        ordered[high] if high is not None else None,
    )


@functools.lru_cache(maxsize=256)
def ranks(count: int, percent: float) -> tuple[int | None, int | None]:
    """The places, from 0, of the values in order between which the quantile lies; None: beyond the last value.

    Of `count` values the number below the quantile is binomial: each side leaves out at most (1 - CONFIDENCE) / 2.
    """
    share, tail = percent / 100, (1 - CONFIDENCE) / 2
    below = 0.0  # the chance that at most k values lie below the quantile
    low: int | None = None
    high: int | None = None
    for k in range(count + 1):
        chance = _binomial(count, k, share)
        if low is None and below + chance > tail:
            low = k - 1  # the k-th value, counted from 1, is below the quantile with enough confidence
        below += chance
        if below >= 1 - tail:
            high = k
            break
    return (low if low is not None and low >= 0 else None), (high if high is not None and high < count else None)


def _binomial(count: int, k: int, share: float) -> float:
    spread_out = math.sqrt(count * share * (1 - share))
    if abs(k - count * share) > 12 * spread_out + 12:  # nothing to speak of, and it saves the logarithms
        return 0.0
    logarithm = math.lgamma(count + 1) - math.lgamma(k + 1) - math.lgamma(count - k + 1)
    return math.exp(logarithm + k * math.log(share) + (count - k) * math.log1p(-share))
