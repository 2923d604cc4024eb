"""A stream goes on elsewhere when its backend dies, where a model opts in (models.NAME.migrate).

The stream is read by a `core.seam.Seam`, which knows what another backend must be asked for. When the backend leaves it, the
relay does not end: it waits, while this coroutine makes another attempt, and goes on with that one's answer. The client sees a
longer gap between two events. Where nobody goes on, all ends as it would have without.

The first attempt to go on after a break takes nothing from the budget of second tries: who is cut off comes back with a request
for the whole answer, and costs more. Any other after the same break does, as by then more than one backend fails.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

from gateway.core import headers
from gateway.core.backend import Backend
from gateway.core.continuation import continuation
from gateway.core.disagg.recompute import RecomputedSeam
from gateway.core.head import CHUNKED, ResponseHead
from gateway.core.outcome import BACKEND_FAILURES, Outcome
from gateway.core.routing import Route
from gateway.core.seam import Seam
from gateway.errors import Ended, EngineRefused, UpstreamFailed
from gateway.net.call import Call, Upload
from gateway.net.hedge import said
from gateway.net.legs import Leg, beside
from gateway.net.relay import Relay

if TYPE_CHECKING:
    from gateway.net.attempts import Attempts
    from gateway.net.upstream import Connection

# What another backend may mend, of what ends a relay.
_MENDED_ELSEWHERE = (Outcome.UPSTREAM_RESET, Outcome.TIMEOUT_IDLE, Outcome.TIMEOUT_PROGRESS)


def asks(call: Call, route: Route, upload: Upload) -> None:
    """Before the first attempt: whether the request is of a model that opts in; its body is kept while the stream lasts."""
    assert call.policy.migrations is not None
    if upload.kept and not route.loopback and call.policy.migrations.get(call.exchange.model or ""):
        call.asked = upload


def seam(call: Call, response: ResponseHead) -> Seam | None:
    """What reads the response, if it is one that may be gone on with."""
    upload, head, route = call.asked, call.request.head, call.route
    assert upload is not None
    assert route is not None
    if not is_fit(response) or head is None or not head.minor:
        return None
    # as it was sent: an alias may have changed it
    wanted = continuation(route.path, upload.held, injected=call.usage_asked)
    if wanted is None:
        return None
    return Seam(wanted) if call.paired is None else RecomputedSeam(wanted)


def is_fit(response: ResponseHead) -> bool:
    """Whether it is a stream that can be read."""
    streams = response.framing is CHUNKED and headers.is_event_stream(response)
    return response.status == 200 and streams and not headers.is_coded(response)


class SeamedRelay(Relay):
    """A relay whose backend may be another one in the end. `left`: why the backend has left the stream; None: it is over."""

    __slots__ = ("left", "seam")

    def __init__(self, seam: Seam, *arguments: Any):
        super().__init__(*arguments)
        self.seam = seam
        self.left: asyncio.Future[Ended | None] = self.client.loop.create_future()

    def _careful(self, data: bytes, now: float) -> None:
        if self.left.done():
            return
        super()._careful(data, now)
        seam = self.seam
        if seam.ended and seam.broke is not None and not self.done.done():
            self._leave(Ended(seam.broke))

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.left.done():
            super().connection_lost(exc)

    def fail(self, failure: BaseException) -> None:
        mended = isinstance(failure, Ended) and failure.outcome in _MENDED_ELSEWHERE
        if mended and self.seam.mendable and not self.left.done() and not self.done.done():
            assert isinstance(failure, Ended)
            self.connection.drop()
            self._leave(failure)
        else:
            super().fail(failure)
            self._over()

    def _finish(self) -> None:
        super()._finish()
        self._over()

    def _over(self) -> None:
        if not self.left.done():
            self.left.set_result(None)

    def _leave(self, why: Ended) -> None:
        self.began = self.last = time.monotonic()  # from now on the silence is that of whoever is asked next
        self.left.set_result(why)

    @property
    def wanted(self) -> bytes | None:
        """The request for the rest, if it may be asked for."""
        return self.seam.body()

    def go_on(self, connection: Connection) -> None:
        """With what comes on this connection: an answer to the seam's request, of which the head has been read."""
        pending, now = connection.pending, time.monotonic()
        self.connection, self.began, self.last = connection, now, now
        self._begun = None  # that was to be told to the first one's lease
        self.left = self.client.loop.create_future()
        self.seam.go_on()
        connection.hand_over(self)
        if self.paused and not connection.lost:
            connection.transport.pause_reading()
        self._careful(pending, now)
        if connection.lost:
            self.already_ended()

    def give_up(self, why: Ended) -> None:
        """Nobody goes on: it ends as its backend ended it."""
        held = self.seam.give_up()
        out = self._encoded(held)
        if out:
            self._write(out)
        now = time.monotonic()
        for piece in held:
            self.body_octets += len(piece)
            if self.meter is not None:
                self.meter.feed(piece, now)
        if self.seam.done:
            self._finish()
        else:
            super().fail(why)


async def ended(attempts: Attempts, call: Call, relay: SeamedRelay) -> None:
    """Wait for the stream's end, and see to it that it comes. Raises Ended."""
    assert call.lease is not None and call.policy.migrations is not None
    left = call.policy.migrations.get(call.exchange.model or "", 0)
    tried = [call.lease.backend]
    while (why := await relay.left) is not None:
        found, again = None, False
        while left and found is None and not relay.done.done() and (wanted := relay.wanted) is not None:
            if again and not attempts.retries.solvent:
                break
            leg = _leg(attempts, call, tried)
            if leg is None:
                break
            if again:
                attempts.retries.spend()
            left, again = left - 1, True
            found = await _asked(attempts, call, relay, leg, Upload(wanted, len(wanted)))
        if relay.done.done():  # its time is over, or somebody has ended it
            break
        if found is None:
            relay.give_up(why)
            break
        _take_over(attempts, call, relay, found, why)
    await relay.done


def _leg(attempts: Attempts, call: Call, tried: list[Backend]) -> Leg | None:
    """A leg on a backend that has not failed this stream, and has room."""
    leg = beside(call.exchange)
    leg.lease = attempts.fleet.pick(call, tried, leg)
    if leg.lease is None:
        return None
    tried.append(leg.lease.backend)
    leg.exchange.backend = leg.lease.backend.name
    call.exchange.attempts += 1
    call.others = (leg,)
    return leg


async def _asked(attempts: Attempts, call: Call, relay: SeamedRelay, leg: Leg, upload: Upload) -> Leg | None:
    """The leg, once its answer has begun; None where it does not, or where the relay has ended meanwhile."""
    head, route = call.request.head, call.route
    assert head is not None and route is not None
    # on a fresh connection: a kept one that proved stale would end the stream
    attempt = attempts.attempt(call, leg, head, route, upload, fresh=True, hold=True)
    task = attempts.tasks.spawn(said(attempt), "a migration")
    found: Leg | None = None
    try:
        await asyncio.wait((task, relay.done), return_when=asyncio.FIRST_COMPLETED)
        if not relay.done.done():
            answer = task.result()
            if isinstance(answer, ResponseHead):
                found = leg if is_fit(answer) else None
                if found is None and leg.lease is not None:
                    attempts.turned_down(leg.lease.backend, answer)
            elif isinstance(answer, (UpstreamFailed, EngineRefused)):
                attempts.failed(leg, answer)
        return found
    finally:
        task.cancel()
        call.others = ()
        if found is None:
            leg.end()
            attempts.admission.wake()


def _take_over(attempts: Attempts, call: Call, relay: SeamedRelay, leg: Leg, why: Ended) -> None:
    """The stream is the other backend's now."""
    exchange, observer = call.exchange, attempts.observer
    assert call.lease is not None
    first, now = call.lease.backend, time.monotonic()
    if why.outcome in BACKEND_FAILURES:
        first.failed(now)
        observer.failed(exchange, why.outcome.value)
    else:
        first.penalty.failed(now)
    observer.migrated(exchange, why.outcome.value)
    exchange.migrated_from = first.name if exchange.migrated_from is None else f"{exchange.migrated_from},{first.name}"
    call.end()
    attempts.admission.wake()
    call.become(leg)
    exchange.backend = leg.exchange.backend
    lease, connection = call.lease, call.connection
    assert lease is not None
    assert connection is not None
    lease.prompt_read(now)
    relay.go_on(connection)
