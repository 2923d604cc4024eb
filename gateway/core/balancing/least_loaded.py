"""The backend with the least load for its weight (`core.load`); among equals, the next in turn, by weight.

Ties are the rule with short requests, and a fixed order among equals would send all of them to the first backend.

Of many backends some that follow each other are looked at, each time from another one on: eight choices are nearly as good
as all (what is found is one of the least loaded eighth), and the cost does not grow with the fleet.
"""

from __future__ import annotations

from collections.abc import Sequence

from gateway.core.backend import Backend
from gateway.core.balancing.base import Fit, InTurn, Shares

LOOKED_AT = 8  # fit backends


class LeastLoaded(InTurn):
    __slots__ = ("_shares",)

    def __init__(self, backends: Sequence[Backend], load_factor: float = 1.25):
        super().__init__(backends, load_factor)
        self._shares = Shares(self.backends)

    def choose(self, fit: Fit, now: float, chance: float, key: float | None) -> Backend | None:
        if not self._shares.even:
            return self._by_weight(fit, now)
        chosen, least, following, seen = None, 0.0, 0, 0
        for number, backend in self.round():
            if fit(backend):
                burden = backend.load(now) / backend.weight
                if chosen is None or burden < least:
                    chosen, least, following = backend, burden, number
                seen += 1
                if seen == LOOKED_AT:
                    break
        if chosen is not None:
            self.after(following)
        return chosen

    def _by_weight(self, fit: Fit, now: float) -> Backend | None:
        """The next one is looked at from behind all of these on, so that each is looked at as often as any other."""
        found = []
        for number, backend in self.round():
            if fit(backend):
                found.append((backend.load(now) / backend.weight, number))
                if len(found) == LOOKED_AT:
                    break
        if not found:
            return None
        self.after(found[-1][1])
        least = min(burden for burden, _ in found)
        place = self._shares.next(number - 1 for burden, number in found if burden == least)
        return None if place is None else self.backends[place]
