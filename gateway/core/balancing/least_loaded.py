"""The backend with the least load for its weight (`core.load`); among equals, the next in turn, by weight.

Ties are the rule with short requests, and a fixed order among equals would send all of them to the first backend.

Of many backends some that follow each other are looked at, each time from another one on: eight choices are nearly as good
as all (what is found is one of the least loaded eighth), and the cost does not grow with the fleet.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from gateway.core.backend import Backend
from gateway.core.balancing.base import Fit, InTurn, Shares

LOOKED_AT = 8  # backends


class LeastLoaded(InTurn):
    __slots__ = ("_shares",)

    def __init__(self, backends: Sequence[Backend], load_factor: float = 1.25):
        super().__init__(backends, load_factor)
        self._shares = Shares(self.backends)

    def choose(self, fit: Fit, now: float, chance: float, key: float | None) -> Backend | None:
        if not self._shares.even:
            return self._by_weight(fit, now)
        chosen, least, seen = None, inf, 0
        for place in self.round():
            backend = self._twice[place]
            load = backend.load(now)
            if load < least:
                if not fit(backend):
                    continue
                chosen, least = place, load
                if not load:
                    break  # nobody has less
            # one that has more counts as looked at, whether or not it is fit
            seen += 1
            if seen == LOOKED_AT:
                break
        return None if chosen is None else self.chosen(chosen)

    def _by_weight(self, fit: Fit, now: float) -> Backend | None:
        """The next one is looked at from behind all of these on, so that each is looked at as often as any other."""
        found = []
        for place in self.round():
            backend = self._twice[place]
            if fit(backend):
                found.append((backend.load(now) / backend.weight, place))
                if len(found) == LOOKED_AT:
                    break
        if not found:
            return None
        self.chosen(found[-1][1])
        least = min(burden for burden, _ in found)
        count = len(self.backends)
        whose = self._shares.next(place % count for burden, place in found if burden == least)
        return None if whose is None else self.backends[whose]
