"""One engine process at one address: what is known of it, and the leases on it.

    health     input              next
    UNKNOWN    probe well         UP
    UNKNOWN    `fail` probes ill  DOWN
    UP         `fail` probes ill  DOWN
    DOWN       `pass` probes well UP

UNKNOWN is routable: a gateway that has just started serves at once, and learns from what happens.

Whatever its health, a backend that is draining is given nothing new; what it has goes on, and with the last of it the
backend is gone.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import NamedTuple

from gateway.core.breaker import Breaker, BreakerSettings
from gateway.core.breaker import State as BreakerState


class Health(enum.StrEnum):
    UNKNOWN = "unknown"
    UP = "up"
    DOWN = "down"


class HealthSettings(NamedTuple):
    """Consecutive probes that change a backend's health."""

    fail: int = 3
    pass_: int = 2


class Backend:
    __slots__ = (
        "_probes",
        "breaker",
        "credit",
        "draining",
        "emptied",
        "health",
        "in_flight",
        "max_in_flight",
        "models",
        "name",
        "picked",
        "role",
        "url",
        "weight",
    )

    def __init__(
        self,
        name: str,
        url: str,
        *,
        weight: float = 1,
        max_in_flight: int | None = None,
        role: str = "both",
        breaker: BreakerSettings = BreakerSettings(),
    ):
        self.name, self.url, self.weight, self.max_in_flight, self.role = name, url, weight, max_in_flight, role
        self.models: tuple[str, ...] = ()  # as it last said itself
        self.in_flight = 0
        self.health = Health.UNKNOWN
        self.breaker = Breaker(breaker)
        self.picked = 0  # the turn in which it was last picked
        self.credit = 0.0  # of the smooth weighted round robin
        self.draining = False
        self.emptied: Callable[[], None] | None = None  # called when the last lease is given back
        self._probes = 0  # consecutive ones: well above zero, ill below

    @property
    def routable(self) -> bool:
        return self.health is not Health.DOWN and not self.draining

    @property
    def full(self) -> bool:
        return self.max_in_flight is not None and self.in_flight >= self.max_in_flight

    @property
    def state(self) -> str:
        """One word for people and metrics."""
        if self.draining:
            return "draining"
        if self.health is Health.DOWN:
            return "down"
        return "ejected" if self.breaker.state is not BreakerState.CLOSED else self.health.value

    def probed(self, well: bool, settings: HealthSettings) -> bool:
        """Take in a probe's result; returns whether the health changed."""
        self._probes = max(self._probes, 0) + 1 if well else min(self._probes, 0) - 1
        before = self.health
        if self._probes <= -settings.fail:
            self.health = Health.DOWN
        elif self._probes >= settings.pass_ or (well and before is Health.UNKNOWN):
            self.health = Health.UP
        return self.health is not before

    def lease(self) -> Lease:
        self.in_flight += 1
        return Lease(self, self.breaker.sent())

    def __repr__(self) -> str:
        return f"<Backend {self.name} {self.state} in_flight={self.in_flight}>"


class Lease:
    """The right to count one in-flight exchange on a backend; given back exactly once, synchronously.

    `trial`: of a half-open breaker, whose number it is. It ends with the lease, whatever became of it.
    """

    __slots__ = ("_held", "_trial", "backend")

    def __init__(self, backend: Backend, trial: int = 0):
        self.backend, self._trial, self._held = backend, trial, True

    def release(self) -> None:
        if not self._held:
            raise AssertionError(f"a lease on {self.backend.name} was given back twice")
        self._held = False
        if self._trial:
            self.backend.breaker.over(self._trial)
        self.backend.in_flight -= 1
        if self.backend.in_flight < 0:
            raise AssertionError(f"{self.backend.name} has {self.backend.in_flight} exchanges in flight")
        if not self.backend.in_flight and self.backend.emptied is not None:
            self.backend.emptied()
