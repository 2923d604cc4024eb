"""A circuit breaker for one backend: what its requests say of it, beside what probes say.

    state      input     next
    CLOSED     failure   CLOSED, or OPEN at the `failures`th within `window` seconds
    CLOSED     success   CLOSED (failures are forgotten)
    OPEN       time      HALF_OPEN after `open` seconds
    HALF_OPEN  trial     HALF_OPEN, its one trial request being under way
    HALF_OPEN  no word   HALF_OPEN, and another request may be the trial (its client left, it was sent elsewhere after all)
    HALF_OPEN  beginning HALF_OPEN, and another request may be the trial: an answer may go on for minutes
    HALF_OPEN  success   CLOSED
    HALF_OPEN  failure   OPEN

Only failures of the backend count: what a client did never does, nor a status that the backend chose to send, but a 5xx on one
leg of a pair where another engine then serves the same request (`Backend.judged`).
"""

from __future__ import annotations

import enum
from collections import deque
from typing import NamedTuple


class State(enum.StrEnum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


# Looked up once: see core.head.
_CLOSED, _OPEN, _HALF_OPEN = State


class BreakerSettings(NamedTuple):
    failures: int = 5
    window: float = 30.0
    open: float = 10.0


class Breaker:
    __slots__ = ("_failed_at", "_opened_at", "_trial", "_trials", "settings", "state")

    def __init__(self, settings: BreakerSettings):
        self.settings = settings
        self.state = _CLOSED
        self._failed_at: deque[float] = deque()
        self._opened_at = 0.0
        self._trial = 0  # half open: which trial is under way; 0: none
        self._trials = 0

    def allows(self, now: float) -> bool:
        """Whether a request may be sent. Says so of a half-open breaker until `sent` is called."""
        if self.state is _CLOSED:
            while self._failed_at and now - self._failed_at[0] > self.settings.window:
                self._failed_at.popleft()
            return True
        if self.state is not self.state_at(now):
            self.state, self._trial = _HALF_OPEN, 0
        return self.state is _HALF_OPEN and not self._trial

    def state_at(self, now: float) -> State:
        """The same for whoever only looks: nothing need be asked for, for time to be noticed."""
        due = self.state is _OPEN and now - self._opened_at >= self.settings.open
        return _HALF_OPEN if due else self.state

    def sent(self) -> int:
        """A request is to be sent. Returns the number of the trial that it is, to be given to `over`; 0: none."""
        if self.state is not _HALF_OPEN or self._trial:
            return 0
        self._trials += 1
        self._trial = self._trials
        return self._trial

    def over(self, trial: int) -> None:
        """The request that was this trial is over. If it said nothing of the backend, another one may be the trial."""
        if trial == self._trial:
            self._trial = 0

    def succeeded(self) -> None:
        if self.state is not _OPEN:  # an answer to what was sent before it opened closes nothing
            self.state, self._trial = _CLOSED, 0
            self._failed_at.clear()

    def failed(self, now: float) -> None:
        if self.state is _HALF_OPEN:
            self._trip(now)
        elif self.state is _CLOSED:
            self._failed_at.append(now)
            while len(self._failed_at) > self.settings.failures:
                self._failed_at.popleft()
            if len(self._failed_at) == self.settings.failures and now - self._failed_at[0] <= self.settings.window:
                self._trip(now)

    def _trip(self, now: float) -> None:
        self.state, self._opened_at, self._trial = _OPEN, now, 0
        self._failed_at.clear()

    def __repr__(self) -> str:
        return f"<Breaker {self.state}>"
