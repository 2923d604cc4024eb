"""To the backend that has the request's prefix in its cache, unless it is too full: consistent hashing with bounded loads
(Karger et al. 1997; Mirrokni, Thorup and Zadimoghaddam 2016), as HAProxy's `hash-balance-factor` has it.

Each backend has points on a ring, by its name alone: every gateway finds the same, also after a restart, and a membership
that changes moves no keys but those of the backends that come or go. A key belongs to the first point after it. Where that
backend is not fit, or holds more than `load_factor` times the mean load for its weight, the key goes on to the next one on
the ring, which is the same each time: it soon has the prefix too.

What has no key goes to the least loaded.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from hashlib import blake2b

from gateway.core.backend import Backend
from gateway.core.balancing.base import Fit, Policy
from gateway.core.balancing.least_loaded import LeastLoaded

POINTS = 96  # of a backend of mean weight: keys are shared out to within a tenth
# Requests that are never too many: engines run some side by side at hardly any cost, and with little in flight a mean says
# nothing (with one request in the fleet, a second one would always be one too many).
FREE = 4.0
RECOUNTED = 8  # backends whose load is looked at for a mean, averaged over picks


class Affinity(Policy):
    __slots__ = ("_fresh", "_least_loaded", "_load_factor", "_mean", "_owners", "_points")

    def __init__(self, backends: Sequence[Backend], load_factor: float = 1.25):
        super().__init__(backends, load_factor)
        self._load_factor = load_factor
        self._least_loaded = LeastLoaded(backends)
        self._points, self._owners = _ring(self.backends)
        self._mean = 0.0
        self._fresh = 0  # picks for which the mean still holds

    def choose(self, fit: Fit, now: float, chance: float, key: float | None) -> Backend | None:
        if key is not None and self._points:
            owners, at, passed = self._owners, bisect_left(self._points, key), set[Backend]()
            while len(passed) < len(self.backends):
                backend = owners[at % len(owners)]
                at += 1
                if backend not in passed:
                    passed.add(backend)
                    if fit(backend) and not self._too_full(backend, fit, now):
                        return backend
        return self._least_loaded.choose(fit, now, chance, None)

    def _too_full(self, backend: Backend, fit: Fit, now: float) -> bool:
        load = backend.load(now)
        return load >= FREE and load + 1 > self._load_factor * self._mean_with_one_more(fit, now) * backend.weight

    def _mean_with_one_more(self, fit: Fit, now: float) -> float:
        """Load for a unit of weight, were the exchange on one of the fit backends. In a large fleet a few picks make no
        difference to it, and it is not counted anew for each."""
        if not self._fresh:
            self._fresh = max(len(self.backends) // RECOUNTED, 1)
            load, weight = 1.0, 0.0
            for backend in self.backends:
                if fit(backend):
                    load += backend.load(now)
                    weight += backend.weight
            self._mean = load / weight if weight else 0.0
        self._fresh -= 1
        return self._mean


def _ring(backends: Sequence[Backend]) -> tuple[list[float], list[Backend]]:
    """Points in order, from 0 to 1, and whose each of them is."""
    mean = sum(backend.weight for backend in backends) / len(backends) if backends else 1.0
    owner = {
        point: backend for backend in backends for point in _points(backend.name, round(POINTS * backend.weight / mean) or 1)
    }
    points = sorted(owner)
    return points, [owner[point] for point in points]


def _points(name: str, count: int) -> list[float]:
    """The first of the endless sequence of a backend's points: with a larger share come more, and none is moved."""
    found: list[float] = []
    turn = 0
    while len(found) < count:
        digest = blake2b(b"%d %b" % (turn, name.encode())).digest()
        found += [int.from_bytes(digest[i : i + 8]) / 2**64 for i in range(0, len(digest), 8)]
        turn += 1
    return found[:count]
