"""Interchangeable backends: membership, and who takes the next exchange."""

from __future__ import annotations

from collections.abc import Sequence

from gateway.core.backend import Backend, Health, Lease
from gateway.core.balancing import POLICIES
from gateway.errors import Refusal

_DOWN = Health.DOWN  # looked up once: see core.head


class Pool:
    def __init__(self, backends: Sequence[Backend], balance: str = "least_loaded", load_factor: float = 1.25):
        self.apply(backends, balance, load_factor)

    def apply(self, backends: Sequence[Backend], balance: str, load_factor: float = 1.25) -> None:
        """A new membership, whole. Backends that stay are the same objects, with all that is known of them."""
        self.backends, self._policy = list(backends), POLICIES[balance](backends, load_factor)
        self._limited = any(b.max_in_flight is not None for b in self.backends)
        self._only = self.backends[0] if len(self.backends) == 1 and not self._limited else None

    @property
    def routable(self) -> bool:
        return any(b.routable for b in self.backends)

    def usable(self, now: float) -> bool:
        """Some backend can be routed to that is not ejected, either."""
        return any(b.routable and b.breaker.allows(now) for b in self.backends)

    @property
    def has_room(self) -> bool:
        """Some backend could take an exchange now, or none can be routed to at all, in which case waiting is in vain."""
        if not self._limited:
            return True
        return any(not b.full for b in self.backends if b.routable) or not self.routable

    def pick(
        self,
        now: float,
        tried: Sequence[Backend] = (),
        *,
        key: float | None = None,
        tokens: int = 0,
        chance: float = 0.0,
    ) -> Lease | None:
        """A lease on a backend that is not among `tried`; None where there is none, or none with room.

        `key`, `chance`: as the policy takes them (`balancing.base`). `tokens`: of the prompt, about.
        """
        only = self._only
        if only is not None and only.health is not _DOWN and not tried:
            only.breaker.allows(now)  # the last one is never taken out, but is to be told of the time
            return only.lease(tokens)

        def fit(backend: Backend) -> bool:
            return backend.routable and backend not in tried and not backend.full and backend.breaker.allows(now)

        chosen = self._policy.choose(fit, now, chance, key)
        if chosen is None and not tried:
            # where breakers leave nobody, they are not obeyed: a doubtful backend is better than none
            chosen = self._policy.choose(lambda b: b.routable and not b.full, now, chance, key)
        if chosen is None:
            return None
        chosen.picked = now
        return chosen.lease(tokens)

    def nobody(self, model: str | None = None) -> Refusal:
        """Why there is no backend to be picked, for `model` or for any."""
        which = "backend" if model is None else f"backend that serves {model[:128]}"
        if self.routable:
            return Refusal("overloaded", f"every {which} is at its limit (backends[].max_in_flight)", retry_after=1)
        down = ", ".join(f"{b.name} is {b.state}" for b in self.backends) or "there is none, or all drain"
        return Refusal("no_backend", f"no {which} can be reached: {down}", retry_after=5)
