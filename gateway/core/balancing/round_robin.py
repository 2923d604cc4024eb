"""In turn, by weight, and evenly spread: nginx's smooth weighted round robin."""

from __future__ import annotations

from collections.abc import Sequence

from gateway.core.backend import Backend
from gateway.core.balancing.base import Fit, InTurn


class RoundRobin(InTurn):
    __slots__ = ("_credits", "_even")

    def __init__(self, backends: Sequence[Backend], load_factor: float = 1.25):
        super().__init__(backends, load_factor)
        self._even = len({backend.weight for backend in self.backends}) <= 1
        self._credits = [0.0] * len(self.backends)

    def choose(self, fit: Fit, now: float, chance: float, key: float | None) -> Backend | None:
        if not self._even:
            return self._by_weight(fit)
        for number, backend in self.round():
            if fit(backend):
                self.after(number)
                return backend
        return None

    def _by_weight(self, fit: Fit) -> Backend | None:
        """Each gains its weight, and the one with most pays for all."""
        total, chosen = 0.0, None
        for place, backend in enumerate(self.backends):
            if fit(backend):
                self._credits[place] += backend.weight
                total += backend.weight
                if chosen is None or self._credits[place] > self._credits[chosen]:
                    chosen = place
        if chosen is None:
            return None
        self._credits[chosen] -= total
        return self.backends[chosen]
