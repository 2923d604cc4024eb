"""When another attempt may be made: only before the first response byte, and never so that a request is done twice.

A POST may have been read as soon as a byte of it was sent, so it is tried elsewhere only where no byte can have arrived
(RFC 9110 section 9.2.2). A GET, whose repetition harms nobody, is sent once more when the pooled connection that it was sent
on proves stale (RFC 9112 section 9.3.1); a POST only if `replay_stale` says so.

A stream that is held back until it says something (`commit: first_event`) has shown nobody anything, and what it may have begun
ends with its connection: the attempts say that it is unsent.

A backend that answers 429, or 503 with Retry-After, has said that it did nothing and will not for now: somebody else may. A 503
without may have come from anywhere behind it, and passes. So does any other status.

Where a connection was refused, the next backend is asked at once. After anything else there is a short pause first, each time
twice as long and by chance half or one and a half of it, so that many who were turned away together do not come back together.

The budget is a share of requests: when everything fails, second attempts must not double the load of what is failing.
"""

from __future__ import annotations

from typing import NamedTuple

from gateway.errors import EngineRefused, UpstreamFailed

SAFE = frozenset((b"GET", b"HEAD", b"OPTIONS"))
# Second attempts that are in hand at the start, and at most: as many clients come at once before a dead backend is known.
RESERVE = 50.0
PAUSE, PAUSE_MOST = 0.05, 1.0  # seconds
AT_ONCE = frozenset(("upstream_connect", "timeout_connect"))


class RetrySettings(NamedTuple):
    attempts: int = 2
    budget: float = 0.2
    replay_stale: bool = False
    statuses: frozenset[int] = frozenset((429, 503))


class Retries:
    """The budget, and the decision."""

    def __init__(self, settings: RetrySettings):
        self.settings = settings
        self._credit = RESERVE

    def request(self) -> None:
        """One more first attempt has been made."""
        if self._credit < RESERVE:
            self._credit = min(self._credit + self.settings.budget, RESERVE)

    @property
    def solvent(self) -> bool:
        """There is credit for an attempt beside the first."""
        return self._credit >= 1

    def spend(self) -> None:
        """Such an attempt is made."""
        if not self.solvent:
            raise AssertionError("an attempt was made for which there is no credit")
        self._credit -= 1

    def afford(self) -> bool:
        """Whether there is credit for it; takes it."""
        if not self.solvent:
            return False
        self.spend()
        return True

    # Questions, which take nothing: whoever makes the attempt spends. So they can be asked before a backend is looked for: a
    # pick that comes to nothing would be somebody's turn all the same.

    def again(self, failure: UpstreamFailed | EngineRefused, method: bytes, attempts: int, *, body_kept: bool) -> bool:
        """Whether to try once more after `attempts` attempts. `body_kept`: it can be sent again."""
        stale = failure.code == "stale_connection" and (method in SAFE or self.settings.replay_stale)
        if not (failure.unsent or stale) or not body_kept:
            return False
        # a connection that proved stale says nothing of the backend: that repetition is not an attempt of the operator's
        return self._may_spend(attempts, max(self.settings.attempts, 2) if stale else self.settings.attempts)

    def turned_away(self, status: int, retry_after: float | None, attempts: int, *, body_kept: bool) -> bool:
        """The same, where a backend answered with this status."""
        if status not in self.settings.statuses or (status == 503 and retry_after is None) or not body_kept:
            return False
        return self._may_spend(attempts, self.settings.attempts)

    def _may_spend(self, attempts: int, most: int) -> bool:
        return attempts < most and self.solvent

    def another(self, attempts: int) -> bool:
        """The same where trying again can harm nobody, whatever failed: a prompt may be prefilled twice."""
        return self._may_spend(attempts, self.settings.attempts)


def pause(code: str, attempts: int, chance: float) -> float:
    """Seconds until the next attempt, after so many of which the last one failed with `code`. `chance`: from 0 to 1."""
    return 0.0 if code in AT_ONCE else min(PAUSE * 2.0 ** (attempts - 1), PAUSE_MOST) * (0.5 + chance)
