"""The backend with the least load for its weight (`core.load`); among equals, the next in turn.

Ties are the rule with short requests, and a fixed order among equals would send all of them to the first backend.

Of many backends some that follow each other are looked at, each time from another one on: eight choices are nearly as good
as all (what is found is one of the least loaded eighth), and the cost does not grow with the fleet.
"""

from __future__ import annotations

from gateway.core.backend import Backend
from gateway.core.balancing.base import Fit, InTurn

LOOKED_AT = 8  # fit backends


class LeastLoaded(InTurn):
    __slots__ = ()

    def choose(self, fit: Fit, now: float, chance: float, key: float | None) -> Backend | None:
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
