"""Interchangeable backends: membership, and who takes the next exchange."""

from __future__ import annotations

from collections.abc import Sequence

from gateway.core.backend import Backend, Health, Lease
from gateway.core.balancing import POLICIES
from gateway.errors import Refusal


class Pool:
    def __init__(self, backends: Sequence[Backend], balance: str = "least_loaded"):
        self._turn = 0
        self.apply(backends, balance)

    def apply(self, backends: Sequence[Backend], balance: str) -> None:
        """A new membership, whole. Backends that stay are the same objects, with all that is known of them."""
        self.backends, self._policy = list(backends), POLICIES[balance]
        self._limited = any(b.max_in_flight is not None for b in self.backends)
        self._only = self.backends[0] if len(self.backends) == 1 and not self._limited else None

    @property
    def routable(self) -> bool:
        return any(b.routable for b in self.backends)

    @property
    def has_room(self) -> bool:
        """Some backend could take an exchange now, or none can be routed to at all, in which case waiting is in vain."""
        if not self._limited:
            return True
        return any(not b.full for b in self.backends if b.routable) or not self.routable

    def pick(self, now: float, tried: Sequence[Backend] = ()) -> Lease | None:
        """A lease on a backend that is not among `tried`; None where there is none, or none with room."""
        only = self._only
        if only is not None and only.health is not Health.DOWN and not tried:
            only.breaker.allows(now)  # the last one is never taken out, but is to be told of the time
            return only.lease()
        routable = [b for b in self.backends if b.routable and b not in tried]
        allowed = [b for b in routable if b.breaker.allows(now)]
        # where breakers leave nobody, they are not obeyed: a doubtful backend is better than none
        candidates = [b for b in allowed if not b.full] or [b for b in (() if tried else routable) if not b.full]
        if not candidates:
            return None
        self._turn += 1
        return self._policy(candidates, self._turn).lease()

    def nobody(self) -> Refusal:
        """Why there is no backend to be picked."""
        if self.routable:
            return Refusal("overloaded", "every backend is at its limit (backends[].max_in_flight)", retry_after=1)
        down = ", ".join(f"{b.name} is {b.state}" for b in self.backends) or "there is none, or all drain"
        return Refusal("no_backend", f"no backend can be reached: {down}", retry_after=5)
