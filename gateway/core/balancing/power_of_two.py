"""Two at random, by weight, and of them the less loaded one (Mitzenmacher, "The Power of Two Choices", 2001).

Where dozens of gateways share backends, and each sees the others' requests only at the next scrape, chance keeps them from
all choosing the same one meanwhile. Of equals the one is taken that has waited longer, so that shares are even also where
nothing is in flight; where their weights differ, the one that was drawn first.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

from gateway.core.backend import Backend
from gateway.core.balancing.base import Fit, Policy

_SPLIT = 1 << 26  # a random number has 53 bits: enough for two


class PowerOfTwo(Policy):
    __slots__ = ("_sums",)

    def __init__(self, backends: Sequence[Backend], load_factor: float = 1.25):
        super().__init__(backends, load_factor)
        self._sums = _sums(self.backends)

    def choose(self, fit: Fit, now: float, chance: float, key: float | None) -> Backend | None:
        backends = self.backends
        if len(backends) > 1:
            one, other = _two(backends, self._sums, chance)
            if fit(one) and fit(other):
                return _better(one, other, now)
        usable = [backend for backend in backends if fit(backend)]
        if len(usable) > 1:
            return _better(*_two(usable, _sums(usable), chance), now)
        return usable[0] if usable else None


def _sums(backends: Sequence[Backend]) -> list[float]:
    """Weights, each with all before it."""
    return list(accumulate(backend.weight for backend in backends))


def _two(backends: Sequence[Backend], sums: list[float], chance: float) -> tuple[Backend, Backend]:
    """Two different ones."""
    last, total = len(backends) - 1, sums[-1]
    chance *= _SPLIT
    first = min(bisect_right(sums, int(chance) / _SPLIT * total), last)
    without = sums[first] - backends[first].weight  # where the first one's share begins: it is cut out
    at = (chance % 1) * (total - backends[first].weight)
    second = bisect_right(sums, at if at < without else at + backends[first].weight)
    if second > last or second == first:  # by a rounding
        second = first - 1
    return backends[first], backends[second]


def _better(one: Backend, other: Backend, now: float) -> Backend:
    ours, others = one.load(now) / one.weight, other.load(now) / other.weight
    if ours == others:
        return one if one.weight != other.weight or one.picked <= other.picked else other
    return one if ours < others else other
