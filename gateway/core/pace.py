"""How soon a turn comes in a line of waiting requests, as far as the turns that came tell."""

from __future__ import annotations

KNOWN = 8  # turns in a row of waiting that must have come before anything is foretold of the next ones
FOLLOWED = 16  # turns over which the mean forgets
FORGOTTEN = 60.0  # seconds without a turn after which those that came are no measure of what comes


class Pace:
    """The mean time between turns while somebody waits. Bursts of turns (a batch that ends as one) are in it."""

    __slots__ = ("_interval", "_known", "_since")

    def __init__(self) -> None:
        self._interval, self._known, self._since = 0.0, 0, 0.0

    def waits(self, now: float) -> None:
        """The first one begins to wait."""
        if now - self._since > FORGOTTEN:
            self._known = 0
        self._since = now

    def turn(self, now: float) -> None:
        """Somebody's turn has come."""
        self._known += 1
        self._interval += (now - self._since - self._interval) / min(self._known, FOLLOWED)
        self._since = now

    def wait(self, ahead: int, now: float) -> float | None:
        """Seconds until the turn of one that has so many before it; None where too little is known."""
        if self._known < KNOWN or now - self._since > FORGOTTEN:
            return None
        return (ahead + 1) * self._interval
