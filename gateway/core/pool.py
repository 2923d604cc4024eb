"""Interchangeable backends: membership, and who takes the next exchange.

The policy chooses among those that are fit. Where none is, what is only a doubt counts no more: first caution (`core.caution`),
then breakers, and with `health.panic` the word of probes. A doubtful backend is better than none, but no second attempt is made
on one that a breaker keeps out, nor on one that has said itself that it is full. But it is no better than waiting: one that is
fit, and only full, is waited for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gateway.core.backend import Backend, Lease
from gateway.core.balancing import POLICIES
from gateway.core.caution import WARMING
from gateway.core.ramp import Ramp
from gateway.errors import Refusal


class Pool:
    def __init__(self, backends: Sequence[Backend], balance: str = "least_loaded", load_factor: float = 1.25):
        self._ramp = Ramp(())
        self.apply(backends, balance, load_factor)

    def apply(self, backends: Sequence[Backend], balance: str, load_factor: float = 1.25) -> None:
        """A new membership, whole. Backends that stay are the same objects, with all that is known of them."""
        self.backends, self._policy = list(backends), POLICIES[balance](backends, load_factor)
        self._ramp = Ramp(self.backends).follow(self._ramp)
        self.limited = any(b.max_in_flight is not None for b in self.backends)
        self._only = self.backends[0] if len(self.backends) == 1 and not self.limited else None

    @property
    def routable(self) -> bool:
        return any(b.routable for b in self.backends)

    @property
    def in_flight(self) -> int:
        return sum(b.in_flight for b in self.backends)

    @property
    def asked(self) -> list[Backend]:
        """Those in service; or, where there is none, those that are a last resort."""
        return [b for b in self.backends if b.routable] or [b for b in self.backends if b.last_resort]

    def usable(self, now: float) -> bool:
        """Some backend can be routed to that is not ejected, either."""
        return any(b.routable and b.breaker.allows(now) for b in self.backends)

    def inviting(self, now: float) -> bool:
        """... and that gives no reason to pass it over, as long as others serve: it rests, says nothing, or is not proven."""
        return any(b.routable and b.breaker.allows(now) and b.caution.invites(now) for b in self.backends)

    def has_room(self, clock: Callable[[], float]) -> bool:
        """Some backend could take an exchange now, or none can be routed to at all, in which case waiting is in vain."""
        if not self.limited:
            return True
        now = clock()
        for backend in self.backends:
            if backend.has_place(now) and backend.caution.invites(now):
                return True
        if self._is_waited_for((), now):
            return False
        asked = self.asked
        return not asked or any(not b.full for b in asked)

    def _is_waited_for(self, tried: Sequence[Backend], now: float) -> bool:
        """Some backend would take an exchange, were it not full."""
        return self.limited and any(
            b.full and b.routable and b not in tried and b.breaker.allows(now) and b.caution.invites(now) for b in self.backends
        )

    def others(self, tried: Sequence[Backend], now: float) -> list[Backend]:
        """Those on which a second attempt may be made, whether or not they have room now."""
        left = [b for b in self.asked if b not in tried]
        return [b for b in left if b.breaker.allows(now) and not b.caution.refuses(now)]

    def held_up(self, tried: Sequence[Backend], now: float) -> bool:
        """Whether whoever could take a second attempt is only full, and is to be waited for."""
        others = self.others(tried, now)
        left = [b for b in others if b.caution.invites(now)] or others
        return bool(left) and all(b.full for b in left)

    def pick(
        self,
        now: float,
        tried: Sequence[Backend] = (),
        *,
        key: float | None = None,
        tokens: int = 0,
        chance: float = 0.0,
        stream: bool = False,
    ) -> Lease | None:
        """A lease on a backend that is not among `tried`; None where there is none, or none with room.

        `key`, `chance`: as the policy takes them (`balancing.base`). `tokens`: of the prompt, about. `stream`: asked for.
        """
        only = self._only
        if only is not None and only.routable and not tried:
            only.breaker.allows(now)  # the last one is never taken out, but is to be told of the time
            return only.lease(tokens, now, stream)
        ramp = self._ramp
        ramp.picks += 1

        def fit(backend: Backend) -> bool:
            if not backend.has_place(now) or backend in tried:
                return False
            return now < backend.caution.look_from or self._is_given(backend, now)

        chosen = self._policy.choose(fit, now, chance, key) or self._doubtful(now, tried, chance, key)
        if chosen is None:
            return None
        if ramp.earned:
            ramp.taken(chosen, now)
        chosen.picked = now
        return chosen.lease(tokens, now, stream)

    def _doubtful(self, now: float, tried: Sequence[Backend], chance: float, key: float | None) -> Backend | None:
        """Whom to ask where nobody is fit."""

        def choose(fit: Callable[[Backend], bool]) -> Backend | None:
            return self._policy.choose(fit, now, chance, key)

        def sound(backend: Backend) -> bool:
            return backend.has_place(now) and backend not in tried

        chosen = choose(lambda b: sound(b) and b.caution.invites(now))
        if chosen is not None or self._is_waited_for(tried, now):
            return chosen
        if tried:
            chosen = choose(lambda b: sound(b) and not b.caution.refuses(now))
        else:
            chosen = choose(sound) or choose(lambda b: b.routable and not b.full)
        if chosen is None and not self.routable:
            left = self.others(tried, now) if tried else self.asked
            chosen = choose(lambda b: b in left and not b.full) if left else None
            if chosen is not None:
                chosen.panics += 1
        return chosen

    def _is_given(self, backend: Backend, now: float) -> bool:
        """Whether one that is to be treated with caution may have this exchange."""
        if backend.caution.reason(now) is WARMING:
            return self._ramp.is_due(backend, now)
        return backend.caution.invites(now)

    def nobody(self, model: str | None = None) -> Refusal:
        """Why there is no backend to be picked, for `model` or for any."""
        which = "backend" if model is None else f"backend that serves {model[:128]}"
        if self.asked:
            return Refusal("overloaded", f"every {which} is at its limit (backends[].max_in_flight)", retry_after=1)
        down = ", ".join(f"{b.name} is {b.standing}" for b in self.backends) or "there is none, or all drain"
        return Refusal("no_backend", f"no {which} can be reached: {down}", retry_after=5)
