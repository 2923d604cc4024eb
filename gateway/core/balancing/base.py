"""What every policy has: it chooses among the backends of a pool, as it was given them when the membership last changed."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Sequence

from gateway.core.backend import Backend

Fit = Callable[[Backend], bool]  # whether a backend may take this exchange


class Policy(abc.ABC):
    """Made anew with each membership; `load_factor` is affinity's. It changes nothing but its own marks."""

    __slots__ = ("backends",)

    def __init__(self, backends: Sequence[Backend], load_factor: float = 1.25):
        self.backends = list(backends)

    @abc.abstractmethod
    def choose(self, fit: Fit, now: float, chance: float, key: float | None) -> Backend | None:
        """A backend that is fit; None where there is none.

        `now`: the clock. `chance`: a random number from 0 to 1. `key`: what the exchange is to be kept together by, as a
        number from 0 to 1; None where it has no such thing.
        """


class InTurn(Policy):
    """A policy that goes round, and begins where the pool has not been for the longest time."""

    __slots__ = ("_next", "_twice")

    def __init__(self, backends: Sequence[Backend], load_factor: float = 1.25):
        super().__init__(backends, load_factor)
        self._twice = self.backends * 2  # so that it can be gone round from any of them on
        self._next = min(range(len(self.backends)), key=lambda i: self.backends[i].picked, default=0)

    def round(self) -> range:
        """The places of all of them in `_twice`, from the next one on."""
        return range(self._next, self._next + len(self.backends))

    def chosen(self, place: int) -> Backend:
        """The one in this place is the last of the round; the next one begins behind it."""
        self._next = (place + 1) % len(self.backends)
        return self._twice[place]


class Shares:
    """Turns by weight, evenly spread: nginx's smooth weighted round robin."""

    __slots__ = ("_credits", "_weights", "even")

    def __init__(self, backends: Sequence[Backend]):
        self._weights = [backend.weight for backend in backends]
        self._credits = [0.0] * len(backends)
        self.even = len(set(self._weights)) <= 1

    def next(self, places: Iterable[int]) -> int | None:
        """Whose turn it is among these. Each gains its weight, and the one with most pays for all."""
        total, chosen = 0.0, None
        for place in places:
            self._credits[place] += self._weights[place]
            total += self._weights[place]
            if chosen is None or self._credits[place] > self._credits[chosen]:
                chosen = place
        if chosen is not None:
            self._credits[chosen] -= total
        return chosen
