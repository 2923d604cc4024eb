"""What the legs of a disaggregated exchange have in common: by what means they are sent, and how they fail."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

from gateway.core.admission import Admission
from gateway.core.backend import Backend
from gateway.core.disagg.base import HandoffMissing, TransferFailed
from gateway.core.disagg.base import Leg as Request
from gateway.core.disagg.mistrust import Mistrust
from gateway.core.exchange import Exchange, Observer
from gateway.core.head import ResponseHead
from gateway.core.pool import Pool
from gateway.core.retry import Retries
from gateway.errors import EngineRefused, Refusal, forget
from gateway.net.attempts import Attempts
from gateway.net.call import Call
from gateway.net.fleet import Fleet
from gateway.net.legs import Leg
from gateway.net.paired import Paired, PairObserver
from gateway.net.tasks import Tasks
from gateway.net.upstream import Connection, ConnectionPool
from gateway.net.watch import Watch

AGAIN = frozenset((408, 429, 500, 502, 503, 504))  # statuses of a leg for which another attempt is made
_THEIR_FAULT = frozenset(("upstream_connect", "upstream_reset", "upstream_malformed", "timeout_connect", "timeout_first_byte"))


class LegFailed(Exception):
    """One leg of an attempt did. `response`: the error that it answered with, which may be relayed; else `cause` says what.
    `leg`: that the response is on, where it is an encoder's; whoever catches this ends it. `doubted`: by `Means.doubts`."""

    def __init__(
        self,
        side: str,
        backend: Backend,
        cause: Refusal | None = None,
        response: ResponseHead | None = None,
        leg: Leg | None = None,
        doubted: bool = False,
    ):
        super().__init__(side)
        if cause is not None:
            forget(cause)
        self.side, self.backend, self.cause, self.response, self.leg = side, backend, cause, response, leg
        self.doubted = doubted

    @property
    def word(self) -> str:
        return self.cause.code if self.cause is not None else f"{self.side}_status"

    @property
    def again(self) -> bool:
        """Whether another attempt may be made."""
        if self.response is not None:
            return self.response.status in AGAIN
        return self.cause is not None and self.cause.code not in ("timeout_first_byte", "overloaded")


class Means(NamedTuple):
    fleet: Fleet
    admission: Admission
    retries: Retries
    observer: Observer
    told: PairObserver
    attempts: Attempts
    watch: Watch
    tasks: Tasks
    mistrust: Mistrust

    def kept(self, connections: ConnectionPool) -> Connection | None:
        """A connection that is there already, if there is one."""
        connection = connections.take()
        if connection is not None:
            self.observer.connection(connections.origin.name, reused=True)
        return connection

    async def fresh(self, call: Call, connections: ConnectionPool) -> Connection:
        self.observer.connection(connections.origin.name, reused=False)
        return await self.attempts.connect(call, connections, call.policy.timeouts.connect)

    def doubts(self, backend: Backend, response: ResponseHead) -> bool:
        """What an error says of the engine that answered with it. Returns whether that is to be seen yet (pd.md 7, case 17): a
        5xx that no other engine answers with is its own fault, one that all answer with is the request's."""
        if self.attempts.rest(backend, response) is None and response.status >= 500:
            backend.doubted(time.monotonic())
            return True
        backend.answered(response.status, time.monotonic())
        return False

    def judge(self, call: Call, *, at_fault: bool) -> None:
        """All who were doubted: another one has served, or nobody has."""
        doubted, call.doubted = call.doubted, ()
        for backend in doubted:
            backend.judged(time.monotonic(), at_fault=at_fault)

    def blame(self, exchange: Exchange, backend: Backend, failure: Refusal) -> None:
        """What a leg's failure says of its backend."""
        if failure.code in ("stale_connection", "overloaded") or failure.code not in _THEIR_FAULT:
            return
        backend.failed(time.monotonic())
        self.observer.failed(exchange, failure.code)


def worded(call: Call, backend: Backend, failure: Refusal) -> EngineRefused | None:
    """Where an engine has answered with 200 and an error: what that says of it, and its own words where it refuses the request,
    for which 200 is but the wrong status."""
    if not isinstance(failure, HandoffMissing) or not failure.error:
        return None
    status, words = call.dialect.as_status(failure.error)
    backend.answered(status, time.monotonic())
    return EngineRefused(status, words) if status < 500 and status not in AGAIN else None


def asked_of(backend: Backend, make: Callable[..., Request], paired: Paired, *more: object) -> Request:
    """A leg's request. Raises Refusal where the connector lacks something about the engines."""
    try:
        return make(paired.asked, paired.pair, *more)
    except LookupError as missing:
        raise Refusal("no_backend", f"the connector cannot use this backend: {missing}", retry_after=5) from None


def of_leg(side: str, failure: Refusal) -> Refusal:
    """The same, naming the leg."""
    forget(failure)
    if failure.message.startswith("the ") and side in failure.message.partition(":")[0]:
        return failure
    if isinstance(failure, HandoffMissing | TransferFailed):
        return failure
    return Refusal(failure.code, f"the {side} leg: {failure.message}", retry_after=failure.retry_after, outcome=failure.outcome)


def nobody(side: str, pool: Pool) -> Refusal:
    found = pool.nobody()
    return Refusal(found.code, f"the {side} leg: {found.message}", retry_after=found.retry_after)
