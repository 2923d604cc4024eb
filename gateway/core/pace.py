"""How soon a turn comes in a line of waiting requests, as far as the turns that came tell; or, where few have come yet, how
long requests hold their places."""

from __future__ import annotations

KNOWN = 8  # turns in a row of waiting, or stays, that must have been before anything is foretold by them
FOLLOWED = 16  # of them, over which the mean forgets
FORGOTTEN = 60.0  # seconds without a turn after which those that came are no measure of what comes


class Pace:
    """The mean time between turns while somebody waits. Bursts of turns (a batch that ends as one) are in it. And the mean
    time of a request from its turn to its end."""

    __slots__ = ("_interval", "_known", "_since", "_stay", "_stayed", "_stays")

    def __init__(self) -> None:
        self._interval, self._known, self._since = 0.0, 0, 0.0
        self._stay, self._stays, self._stayed = 0.0, 0, 0.0

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

    def held(self, seconds: float, now: float) -> None:
        """Somebody gave a place back that was held for so long."""
        if now - self._stayed > FORGOTTEN:
            self._stays = 0
        self._stays += 1
        self._stay += (seconds - self._stay) / min(self._stays, FOLLOWED)
        self._stayed = now

    def wait(self, ahead: int, now: float) -> float | None:
        """Seconds until the turn of one that has so many before it; None where too little is known."""
        if self._known < KNOWN or now - self._since > FORGOTTEN:
            return None
        return (ahead + 1) * self._interval

    def guess(self, ahead: int, places: int, now: float) -> float | None:
        """The same before any turns are known: `places` are held, and come free as long as they are held, one after the other.
        Half a stay is left of the next one to end, if all are alike."""
        if self._stays < KNOWN or now - self._stayed > FORGOTTEN or not places:
            return None
        return (ahead + 0.5) * self._stay / places
