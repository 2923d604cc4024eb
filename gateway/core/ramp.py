"""Slow start: a backend that has come back gets its share little by little, whatever the policy.

An engine that has just started has an empty prefix cache and has compiled nothing yet, and one that was away for a bad reason
may go again. So each pick of the pool earns it a part of an exchange: its weight, times how far it has come (`core.caution`),
among all weights so reckoned. It may be chosen when it has earned a whole one. As with nginx's and HAProxy's slow start, those
that come back together share alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gateway.core.backend import Backend

STEP = 0.2  # seconds for which the sum of all weights is taken to hold
SAVED = 2.0  # exchanges at most: one that is fit now and then only is not to be flooded then


class Ramp:
    """`picks`: of the pool, ever. `earned`: by each of those that are warming, in exchanges, and at which pick that was so."""

    __slots__ = ("_backends", "earned", "_sum", "_sum_until", "picks")

    def __init__(self, backends: Sequence[Backend]):
        self._backends = backends
        self.picks = 0
        self.earned: dict[Backend, tuple[float, int]] = {}  # exchanges, and at which pick that was so
        self._sum, self._sum_until = 0.0, 0.0

    def follow(self, before: Ramp) -> Ramp:
        """A new membership: what has been earned is kept."""
        self.picks = before.picks
        self.earned = {backend: held for backend, held in before.earned.items() if backend in self._backends}
        return self

    def is_due(self, backend: Backend, now: float) -> bool:
        """Whether one that is warming may have the exchange that is to be given just now."""
        # the first one at once: whatever it tells of the backend, it is told early
        earned, since = self.earned.get(backend, (1.0, self.picks))
        share = backend.caution.share(now) * backend.weight / self._weights(now)
        earned = min(earned + (self.picks - since) * share, SAVED)
        self.earned[backend] = (earned, self.picks)
        return earned >= 1.0

    def _weights(self, now: float) -> float:
        if now >= self._sum_until:
            self._sum_until = now + STEP
            self._sum = sum(b.caution.share(now) * b.weight for b in self._backends if b.routable)
        return self._sum or 1.0

    def taken(self, backend: Backend, now: float) -> None:
        """It has been given one. Asked of every backend, while some are warming."""
        if backend not in self.earned:
            return
        if backend.caution.share(now) < 1:
            earned, since = self.earned[backend]
            self.earned[backend] = (earned - 1.0, since)
        else:
            del self.earned[backend]
