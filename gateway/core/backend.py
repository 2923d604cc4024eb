"""One engine process at one address: what is known of it, and the leases on it.

    health     input              next
    UNKNOWN    probe well         UP
    UNKNOWN    `fail` probes ill  DOWN
    UP         `fail` probes ill  DOWN
    DOWN       `pass` probes well UP

UNKNOWN is routable: a gateway that has just started serves at once, and learns from what happens.

With `health.panic`, one that is DOWN and whose last probe was connected is a last resort: it is asked where nobody is routable.

Whatever its health, a backend that is draining is given nothing new; what it has goes on, and with the last of it the
backend is gone. One that is asleep (vLLM's sleep mode) is given nothing until it has woken up.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import NamedTuple

from gateway.core.breaker import Breaker, BreakerSettings
from gateway.core.breaker import State as BreakerState
from gateway.core.caution import Caution, CautionSettings, Silence
from gateway.core.load import FOLLOWED, HELD, KV_HIGH, REQUEST, EngineLoad, Penalty


class Health(enum.StrEnum):
    UNKNOWN = "unknown"
    UP = "up"
    DOWN = "down"


# Looked up once: see core.head.
_UNKNOWN, _UP, _DOWN = Health
_CLOSED, _OPEN, _HALF_OPEN = BreakerState


class HealthSettings(NamedTuple):
    """Consecutive probes that change a backend's health. `panic`: one that is down, but takes connections, is a last resort."""

    fail: int = 3
    pass_: int = 2
    panic: bool = False


class Backend:
    __slots__ = (
        "_beyond",
        "_pressure",
        "_probes",
        "_spared",
        "_work",
        "asleep",
        "breaker",
        "caution",
        "draining",
        "emptied",
        "engine",
        "health",
        "held",
        "holds",
        "in_flight",
        "max_in_flight",
        "models",
        "name",
        "panics",
        "penalty",
        "picked",
        "role",
        "taken",
        "told",
        "tokens",
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
        caution: CautionSettings = CautionSettings(),
    ):
        self.name, self.url, self.weight, self.max_in_flight, self.role = name, url, weight, max_in_flight, role
        self.models: tuple[str, ...] | None = None  # as it last said itself, or as the operator says (`core.models`)
        self.told = False  # ... by the operator: what it says itself is not asked
        self.in_flight = 0
        self.tokens = 0  # of the prompts that it has not read yet, as far as their size tells
        self.held, self.holds = 0, 0  # prefilled KV that waits to be fetched: in tokens, and of so many exchanges
        self.taken = 0  # leases ever given
        self.panics = 0  # ... as a last resort
        self.penalty = Penalty()
        self.engine: EngineLoad | None = None  # what it said of itself, while that is fresh
        self._beyond, self._pressure = 0.0, 1.0
        self._work: float | None = 0.0  # its load but for the penalty; None: to be reckoned anew
        self.health = Health.UNKNOWN
        self.breaker = Breaker(breaker)
        self.caution = Caution(caution)
        self.asleep = False
        self.picked = 0.0  # when it was last picked
        self.draining = False
        self.emptied: Callable[[], None] | None = None  # called when the last lease is given back
        self._probes = 0  # consecutive ones: well above zero, ill below
        self._spared = False  # down, but it takes connections

    @property
    def routable(self) -> bool:
        return self.health is not _DOWN and not self.draining and not self.asleep

    @property
    def last_resort(self) -> bool:
        """Not routable, by probes alone, which may be wrong."""
        return self._spared and not self.draining and not self.asleep

    @property
    def full(self) -> bool:
        return self.max_in_flight is not None and self.in_flight >= self.max_in_flight

    def has_place(self, now: float) -> bool:
        """It is routable, has room, and no breaker keeps it out: asked of several for each exchange, so in one piece."""
        return (
            self.health is not _DOWN
            and not self.draining
            and not self.asleep
            and (self.max_in_flight is None or self.in_flight < self.max_in_flight)
            and (self.breaker.state is _CLOSED or self.breaker.allows(now))
        )

    @property
    def standing(self) -> str:
        """One word for why it is not routable; or what is known of its health."""
        if self.draining:
            return "draining"
        return "asleep" if self.asleep and self.health is not _DOWN else self.health.value

    @property
    def heard_of(self) -> bool:
        """It has been looked at, and which models it serves is known as far as it ever may be."""
        return self.models is not None or self._probes < 0

    def state_at(self, now: float) -> str:
        """One word for people and metrics: the same, or where it is routable, why it is given less just now."""
        breaker = self.breaker.state_at(now)
        if not self.routable:
            return self.standing
        if breaker is not _CLOSED:
            return "ejected" if breaker is _OPEN else "trial"
        reason = self.caution.reason(now)
        return self.standing if reason is None else reason.value

    def probed(self, well: bool, settings: HealthSettings, now: float = 0.0, connected: bool = False) -> bool:
        """Take in a probe's result; returns whether it changed what the backend can be asked for. `connected`: a connection was
        made, whatever became of it."""
        self._probes = max(self._probes, 0) + 1 if well else min(self._probes, 0) - 1
        before, spared = self.health, self._spared
        if self._probes <= -settings.fail:
            self.health = _DOWN
        elif self._probes >= settings.pass_ or (well and before is _UNKNOWN):
            self.health = _UP
        if well:
            self.caution.proven(now)
        if before is _UNKNOWN and not well:
            self.caution.doubted()
        elif before is _DOWN and self.health is _UP:
            self.caution.returned(now)
        self._spared = settings.panic and connected and self.health is _DOWN
        return self.health is not before or self._spared is not spared

    def fell_asleep(self, asleep: bool, now: float) -> bool:
        """Take in what it says of its sleep; returns whether that changed."""
        before, self.asleep = self.asleep, asleep
        if before and not asleep:
            self.caution.returned(now)
        return before is not asleep

    def scraped(self, engine: EngineLoad | None, ours: int = 0) -> None:
        """Take in what its engine says, of which `ours` requests may be from here; None: that is not known any more."""
        if engine is None:
            self._beyond, self._pressure = 0.0, 1.0
        else:
            beyond, before = engine.beyond(ours), self._beyond
            self._beyond = beyond if self.engine is None else before + FOLLOWED * (beyond - before)
            self._pressure = engine.pressure
        self.engine, self._work = engine, None

    def load(self, now: float) -> float:
        """In requests (`core.load`). Asked of several for each exchange, and changed by it for one."""
        work = self._work
        if work is None:
            requests = self.in_flight + (self.tokens + HELD * self.held) / REQUEST + self._beyond
            work = self._work = requests * self._pressure
        return work + self.penalty.at(now) if self.penalty.value else work

    def failed(self, now: float) -> None:
        """An exchange failed, by the backend's fault."""
        self.doubted(now)
        self.judged(now, at_fault=True)

    def answered(self, status: int, now: float) -> None:
        """An exchange came to an end that was the backend's own choice. That it is full, or an error of its own, is no reason
        to eject it, nor to prefer it."""
        self._spoke(now)
        if status == 429 or status >= 500:
            self.penalty.failed(now)
        else:
            self.penalty.succeeded()

    def _spoke(self, now: float) -> None:
        closes = self.breaker.state is _HALF_OPEN
        self.breaker.succeeded()
        if closes:
            self.caution.returned(now)

    def doubted(self, now: float) -> None:
        """It has answered with an error that may be its own fault, or what any other would have answered: for now it costs it
        load. To be `judged` by what the next one makes of the same request."""
        self.penalty.failed(now)

    def judged(self, now: float, *, at_fault: bool) -> None:
        if not at_fault:
            self._spoke(now)
        else:
            self.breaker.failed(now)
            if self.breaker.state is _OPEN:
                self.penalty.value = 0.0  # it gets nothing, and then one trial

    def lease(self, tokens: int = 0, now: float = 0.0, stream: bool = False) -> Lease:
        """For one exchange, whose prompt has about so many tokens, and which asks for a stream."""
        self.taken += 1
        self.in_flight += 1
        self.tokens += tokens
        self._work = None
        caution = self.caution
        kind = caution.streams if stream else caution.wholes
        caution.sent(kind, now)
        return Lease(self, self.breaker.sent(), tokens, kind, now)

    def hold(self, tokens: int) -> Holding:
        """It has prefilled a prompt of about so many tokens, whose KV a decode engine is to fetch."""
        self.holds += 1
        self.held += tokens
        self._work = None
        return Holding(self, tokens)

    @property
    def busy(self) -> bool:
        """It is needed still, by exchanges or for what it holds."""
        return self.in_flight > 0 or self.holds > 0

    def __repr__(self) -> str:
        return f"<Backend {self.name} {self.standing} in_flight={self.in_flight}>"


class Lease:
    """The right to count one in-flight exchange on a backend; given back exactly once, synchronously.

    `trial`: of a half-open breaker, whose number it is. It ends with the lease, whatever became of it.
    """

    __slots__ = ("_began", "_held", "_kind", "_tokens", "_trial", "backend")

    def __init__(self, backend: Backend, trial: int, tokens: int, kind: Silence, began: float):
        self.backend, self._trial, self._tokens, self._held = backend, trial, tokens, True
        self._kind: Silence | None = kind  # among whom it waits; None: no more
        self._began = began

    def release(self) -> None:
        if not self._held:
            raise AssertionError(f"a lease on {self.backend.name} was given back twice")
        self._held = False
        backend = self.backend
        backend.tokens -= self._tokens
        if self._kind is not None:
            self._kind.waiting -= 1
        if self._trial:
            backend.breaker.over(self._trial)
        self._tokens, self._trial, self._kind = 0, 0, None  # an answer that begins later is somebody else's
        backend.in_flight -= 1
        backend._work = None
        if backend.in_flight < 0:
            raise AssertionError(f"{backend.name} has {backend.in_flight} exchanges in flight")
        if backend.emptied is not None and not backend.busy:
            backend.emptied()

    def prompt_read(self, now: float) -> None:
        """The answer has begun: whatever the prompt asked to be computed has been."""
        backend = self.backend
        backend.tokens -= self._tokens
        backend._work = None
        self._tokens = 0
        if self._trial:  # nobody else may be kept out for as long as a stream goes on
            backend.breaker.over(self._trial)
            self._trial = 0
        if self._kind is not None:
            kind, self._kind = self._kind, None
            backend.caution.answered(kind, self._began, now)


class Holding:
    """KV that a prefill backend keeps for a decode backend; over exactly once, synchronously."""

    __slots__ = ("_backend", "_tokens")

    def __init__(self, backend: Backend, tokens: int):
        self._backend: Backend | None = backend
        self._tokens = tokens

    @property
    def pressed(self) -> bool:
        """Whether the backend has little room for more, or does not say."""
        engine = None if self._backend is None else self._backend.engine
        return engine is None or engine.kv_usage >= KV_HIGH

    def end(self) -> None:
        backend, self._backend = self._backend, None
        if backend is None:
            raise AssertionError("what a prefill backend held was given up twice")
        backend.holds -= 1
        backend.held -= self._tokens
        backend._work = None
        if backend.emptied is not None and not backend.busy:
            backend.emptied()
