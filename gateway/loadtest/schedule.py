"""When requests arrive. Pure: randomness comes in, times go out.

The arithmetic is that of `vllm bench serve` (vllm/benchmarks/serve.py, get_request): gaps follow a gamma distribution with
shape `burstiness` and mean 1/rate (1: a Poisson process; inf: even gaps), the first request waits for its own gap, and at a
constant rate the whole is stretched so that the last of N arrives at N/rate exactly. A ramp's rate goes by the request's
index, not by time, and is not stretched.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from itertools import accumulate
from random import Random


@dataclasses.dataclass(frozen=True)
class Ramp:
    """From `start` (above 0) to `end` requests a second over a run; `exponential`: by equal factors, else by equal steps."""

    start: float
    end: float
    exponential: bool = False

    def rate(self, index: int, count: int) -> float:
        progress = index / max(count - 1, 1)
        if self.exponential:
            return float(self.start * (self.end / self.start) ** progress)
        return self.start + (self.end - self.start) * progress


def arrivals(count: int, rate: float, burstiness: float, ramp: Ramp | None, random: Random) -> list[float]:
    """Seconds after the run's start at which each of `count` requests arrives, ascending."""
    rates = [ramp.rate(index, count) if ramp else rate for index in range(count)]
    times = list(accumulate(_gap(each, burstiness, random) for each in rates))
    if ramp is None and times and times[-1] > 0:
        stretch = count / rate / times[-1]
        times = [time * stretch for time in times]
    return times


def _gap(rate: float, burstiness: float, random: Random) -> float:
    if math.isinf(rate):
        return 0.0
    if math.isinf(burstiness):
        return 1.0 / rate
    return random.gammavariate(burstiness, 1.0 / (rate * burstiness))


def rate_changes(ramp: Ramp, times: Sequence[float]) -> list[tuple[int, float]]:
    """The whole numbers of requests a second that a ramp passes, and when it reaches each (vLLM's rps_change_events)."""
    last = int(ramp.start)
    changes = [(last, 0.0)]
    for index, time in enumerate(times):
        now = int(ramp.rate(index, len(times)))
        changes += [(rate, time) for rate in range(last + 1, now + 1)]
        last = max(last, now)
    return changes


def pairs(times: Sequence[float], rate: float, random: Random) -> list[tuple[float, float]]:
    """When each arrival's request goes to the first and to the second endpoint.

    One goes at the arrival's own time and the other half a mean gap later; which of them is the first is drawn anew for
    each pair, so that neither endpoint is always the one that finds the other's work in its way, or in its cache.
    """
    later = 0.0 if math.isinf(rate) else 0.5 / rate
    return [(time, time + later) if random.random() < 0.5 else (time + later, time) for time in times]
