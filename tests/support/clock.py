"""A clock that only a test moves."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable


class ManualClock:
    """Called, it tells the time; `advance` moves it, and runs in order what `call_at` was given on the way."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now
        self._order = itertools.count()
        self._due: list[tuple[float, int, Callable[[], None]]] = []

    def __call__(self) -> float:
        return self.now

    def __repr__(self) -> str:
        return f"<ManualClock {self.now:.3f}, {len(self._due)} due>"

    def call_at(self, when: float, function: Callable[[], None]) -> None:
        heapq.heappush(self._due, (when, next(self._order), function))

    def advance(self, seconds: float) -> float:
        assert seconds >= 0, "a monotonic clock never goes back"
        end = self.now + seconds
        while self._due and self._due[0][0] <= end:
            when, _, function = heapq.heappop(self._due)
            self.now = max(self.now, when)
            function()
        self.now = end
        return end
