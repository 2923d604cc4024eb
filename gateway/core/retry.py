"""When another attempt may be made: only before the first response byte, and never so that a request is done twice.

A POST may have been read as soon as a byte of it was sent, so it is tried elsewhere only where no byte can have arrived
(RFC 9110 section 9.2.2). A GET, whose repetition harms nobody, is sent once more when the pooled connection that it was sent
on proves stale (RFC 9112 section 9.3.1); a POST only if `replay_stale` says so.

The budget is a share of requests: when everything fails, second attempts must not double the load of what is failing.
"""

from __future__ import annotations

from typing import NamedTuple

from gateway.errors import EngineRefused, UpstreamFailed

SAFE = frozenset((b"GET", b"HEAD", b"OPTIONS"))
# Second attempts that are in hand at the start, and at most: as many clients come at once before a dead backend is known.
RESERVE = 50.0


class RetrySettings(NamedTuple):
    attempts: int = 2
    budget: float = 0.2
    replay_stale: bool = False


class Retries:
    """The budget, and the decision."""

    def __init__(self, settings: RetrySettings):
        self.settings = settings
        self._credit = RESERVE

    def request(self) -> None:
        """One more first attempt has been made."""
        if self._credit < RESERVE:
            self._credit = min(self._credit + self.settings.budget, RESERVE)

    def afford(self) -> bool:
        """Whether there is credit for an attempt beside the first; takes it."""
        if self._credit < 1:
            return False
        self._credit -= 1
        return True

    def again(self, failure: UpstreamFailed | EngineRefused, method: bytes, attempts: int, *, body_kept: bool) -> bool:
        """Whether to try once more after `attempts` attempts; takes from the budget. `body_kept`: it can be sent again."""
        stale = failure.code == "stale_connection" and (method in SAFE or self.settings.replay_stale)
        if not (failure.unsent or stale) or not body_kept:
            return False
        # a connection that proved stale says nothing of the backend: that repetition is not an attempt of the operator's
        most = max(self.settings.attempts, 2) if stale else self.settings.attempts
        return attempts < most and self.afford()

    def another(self, attempts: int) -> bool:
        """The same where trying again can harm nobody, whatever failed: a prompt may be prefilled twice."""
        return attempts < self.settings.attempts and self.afford()
