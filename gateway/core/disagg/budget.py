"""The time that a hand-off has: how long P keeps KV for D, and what may still be done within it (pd.md 6.4).

What is fetched too late is no error but another request's KV, in an answer that looks right: so params are dead well before
the hold ends.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from gateway.core.disagg.base import Release

DEAD: Final = 0.8  # of the hold: from then on D must not be sent these params
LATE: Final = 0.1  # of the hold: a gap that an operator should know of
RELEASE_MOST: Final = 30.0  # seconds that a release leg, or a detached one, may take
PRESSED: Final = 0.8  # use of P's KV cache from which on Release.PRESSURE releases


class Budget(NamedTuple):
    """Seconds, and instants on the caller's clock. `hold` 0: P keeps nothing that could go."""

    hold: float
    taken: float  # when P's answer had been read: its hold has begun by then

    def gap(self, now: float) -> float:
        return max(now - self.taken, 0.0)

    def dead(self, now: float) -> bool:
        """Whether D must not be sent these params any more: the prompt is to be prefilled anew."""
        return self.hold > 0 and self.gap(now) > DEAD * self.hold

    def late(self, now: float) -> bool:
        return self.hold > 0 and self.gap(now) > LATE * self.hold

    def for_release(self, now: float, most: float = RELEASE_MOST) -> float:
        """How long a leg may take that makes P free what it holds; 0 where the hold has ended by itself."""
        return max(min(most, self.hold - self.gap(now)), 0.0)


def releases(policy: Release, kv_usage: float | None) -> bool:
    """Whether a release leg is worth its cost. `kv_usage`: P's cache, of 1; None where P does not say."""
    if policy is Release.PRESSURE:
        return kv_usage is not None and kv_usage >= PRESSED
    return policy is Release.ALWAYS
