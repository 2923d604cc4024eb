"""In turn, by weight, and evenly spread.

A turn is an attempt's, not a request's: whoever takes a second try has had its turn, as in nginx (each try picks the next peer
of the same rotation) and in HAProxy (`option redispatch` asks the balancing anew). So those behind a backend that fails get
fewer first tries by the second tries that they take for it, and what all of them have to do stays even.
"""

from __future__ import annotations

from collections.abc import Sequence

from gateway.core.backend import Backend
from gateway.core.balancing.base import Fit, InTurn, Shares


class RoundRobin(InTurn):
    __slots__ = ("_shares",)

    def __init__(self, backends: Sequence[Backend], load_factor: float = 1.25):
        super().__init__(backends, load_factor)
        self._shares = Shares(self.backends)

    def choose(self, fit: Fit, now: float, chance: float, key: float | None) -> Backend | None:
        if not self._shares.even:
            place = self._shares.next(place for place, backend in enumerate(self.backends) if fit(backend))
            return None if place is None else self.backends[place]
        for place in self.round():
            if fit(self._twice[place]):
                return self.chosen(place)
        return None
