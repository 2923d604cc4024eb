"""From the pick to a response head: one attempt, and others where that can harm nobody.

Until the head is here, and where `commit: first_event` asks for it until the stream says something, nothing has been sent to
the client: what goes wrong can be answered with a status, or tried elsewhere. `core.retry` decides which.
"""

from __future__ import annotations

import asyncio
import functools
import random
import time
from collections.abc import Mapping, Sequence

from gateway.core import headers
from gateway.core.admission import Admission
from gateway.core.backend import Backend
from gateway.core.caution import BUSY
from gateway.core.dialects import Dialect
from gateway.core.exchange import Observer
from gateway.core.head import RequestHead, ResponseHead
from gateway.core.hedging import Hedge
from gateway.core.outcome import Outcome, Phase
from gateway.core.retry import Retries, pause
from gateway.core.routing import Route
from gateway.errors import EngineRefused, Refusal, UpstreamFailed
from gateway.net import body, hedge, migrate
from gateway.net.aim import REALTIME
from gateway.net.call import Call, Upload
from gateway.net.fleet import Fleet
from gateway.net.hold import Hold
from gateway.net.legs import Leg
from gateway.net.putoff import PutOff, put_off
from gateway.net.tasks import Tasks
from gateway.net.timed import Timed, total_passed
from gateway.net.upstream import Connection, ConnectionPool
from gateway.net.waiting import Waiting
from gateway.net.watch import Watch

# How an attempt fails after which nothing of it goes on
_GIVEN_UP = ("upstream_reset", "upstream_malformed", "timeout_first_byte", "stale_connection")

# Looked up once: see core.head.
_CONNECT, _WAIT, _FIRST_TOKEN = Phase.CONNECT, Phase.WAIT, Phase.FIRST_TOKEN


class Attempts:
    def __init__(
        self,
        fleet: Fleet,
        admission: Admission,
        retries: Retries,
        observer: Observer,
        tasks: Tasks,
        watch: Watch,
        waiting: Waiting,
    ) -> None:
        self.fleet, self.admission, self.retries, self.observer = fleet, admission, retries, observer
        self.tasks, self._watch, self._waiting = tasks, watch, waiting

    async def response(
        self, call: Call, head: RequestHead, route: Route, upload: Upload, without: Sequence[Backend] = ()
    ) -> ResponseHead:
        """A backend's response head; the lease and the connection that it came on are the call's. `without`: backends that
        are not to be asked. Raises Refusal."""
        exchange = call.exchange
        self.retries.request()
        tried = [*without]
        refusal: PutOff | None = None
        stale = False
        if call.policy.migrations is not None:
            migrate.asks(call, route, upload)
        after = None if call.policy.hedges is None else _hedged_after(call, call.policy.hedges, upload)
        call.lease = call.lease or self.fleet.pick(call, tried)
        if call.lease is None:
            raise self.fleet.nobody(call)
        try:
            while True:
                backend = call.lease.backend
                exchange.attempts += 1
                exchange.backend = backend.name
                try:
                    if after is None:
                        response = await self.attempt(call, call, head, route, upload, fresh=stale)
                    else:
                        attempt = functools.partial(self._held_attempt, call, head, route, upload, stale)
                        response = await hedge.race(self, call, attempt, after, tried)
                    if response.status < 429 or not self._is_turned_away(call, response, upload, tried):
                        return response
                    if refusal is not None:
                        refusal.connection.drop()
                    refusal = put_off(call, response, backend)
                    if not await self._is_next(call, head, f"status_{response.status}", tried):
                        return refusal.take_up(call, self._watch)
                except (UpstreamFailed, EngineRefused) as failure:
                    if call.hedged:  # that was the other try, and both are judged and over
                        if refusal is None:
                            raise
                        return refusal.take_up(call, self._watch)
                    self.failed(call, failure)
                    call.let_go()
                    stale = failure.code == "stale_connection"
                    if isinstance(failure, EngineRefused) and failure.status < 500:
                        raise  # the client's own fault: it would be no better elsewhere
                    # of the backend a stale connection says nothing: the same one, with the same lease
                    again = self._retries_after(call, failure, head, upload, None if stale else tried)
                    if not again or not await self._is_next(call, head, failure.code, None if stale else tried):
                        if refusal is None:
                            raise
                        return refusal.take_up(call, self._watch)
        finally:
            if refusal is not None and call.connection is not refusal.connection:
                refusal.connection.drop()

    async def _is_next(self, call: Call, head: RequestHead, reason: str, tried: list[Backend] | None) -> bool:
        """At the time of the next attempt: after a pause, or when somebody has room. False: that was waited for in vain."""
        if call.lease is None:
            if not await self._waiting.once_more(call, head, tried or ()):
                return False
            self.observer.retried(call.exchange, reason)
        else:
            self.observer.retried(call.exchange, reason)
            if tried is not None and (seconds := pause(reason, call.exchange.attempts, random.random())):
                await asyncio.sleep(seconds)
        return True

    def _retries_after(
        self,
        call: Call,
        failure: UpstreamFailed | EngineRefused,
        head: RequestHead,
        upload: Upload,
        tried: list[Backend] | None,
    ) -> bool:
        """Whether there is another attempt; its lease is then the call's, or None if that is to be waited for. `tried`: None
        where it is to be the same backend."""
        attempts = call.exchange.attempts - call.repeated
        if not self.retries.again(failure, head.method, attempts, body_kept=upload.kept):
            return False
        if tried is None:
            call.repeated += 1
        elif not self._moves(call, tried):
            return False  # what went wrong says more than that there is nobody else
        self.retries.spend()
        return True

    def _is_turned_away(self, call: Call, response: ResponseHead, upload: Upload, tried: list[Backend]) -> bool:
        """Whether somebody else is to be asked than the backend that answered so; the new lease is then the call's, or None if
        that is to be waited for."""
        assert call.lease is not None
        backend, now = call.lease.backend, time.monotonic()
        seconds, attempts = self.rest(backend, response), call.exchange.attempts - call.repeated
        if call.hedged or not self.retries.turned_away(response.status, seconds, attempts, body_kept=upload.kept):
            return False
        if not self._moves(call, tried):
            return False
        self.retries.spend()
        backend.answered(response.status, now)
        return True

    def turned_down(self, backend: Backend, response: ResponseHead) -> None:
        """What an answer says of its backend that is not the client's, or not yet."""
        self.rest(backend, response)
        backend.answered(response.status, time.monotonic())

    @staticmethod
    def rest(backend: Backend, response: ResponseHead) -> float | None:
        """Seconds that its answer asks for, if it says how many. One that says that it is full is left in peace for so long,
        also where somebody else's answer is taken."""
        seconds = headers.retry_after(response, time.time()) if response.status in (429, 503) else None
        if seconds is not None or response.status == 429:
            backend.caution.busy(BUSY if seconds is None else seconds, time.monotonic())
        return seconds

    def _moves(self, call: Call, tried: list[Backend]) -> bool:
        """The call's lease is one on a backend that has not been tried, or None where it may wait for such a one. False: there
        is none, and its lease is what it was."""
        assert call.lease is not None
        tried.append(call.lease.backend)
        following = self.fleet.pick(call, tried)
        if following is None and not self.fleet.held_up(call, tried):
            return False
        call.lease.release()
        call.lease = following
        self.admission.wake()
        return True

    async def attempt(
        self, call: Call, leg: Leg, head: RequestHead, route: Route, upload: Upload, *, fresh: bool = False, hold: bool = False
    ) -> ResponseHead:
        """One attempt on the backend that `leg` has a lease on. `fresh`: on a new connection; `hold`: as `commit: first_event`.
        Raises UpstreamFailed, EngineRefused, Refusal."""
        connections = leg.connections
        assert connections is not None
        exchange, policy, origin = leg.exchange, call.policy, connections.origin
        exchange.phase, exchange.connect_began = _CONNECT, time.monotonic()
        connection = None if fresh else connections.take()
        self.observer.connection(origin.name, reused=connection is not None)
        if connection is None:
            connection = await self.connect(call, connections, policy.timeouts.connect)
        leg.connection = connection
        exchange.phase = _WAIT
        now = exchange.sent = exchange.connected = time.monotonic()
        host = head.named.get(b"host", b"") if route.authority is None else route.authority
        octets = headers.upstream_head(
            head,
            route.target if call.target is None else call.target,
            host=origin.host_field,
            request_id=call.request_id,
            forwarding=call.client.forwarding(host) if policy.forwarded else None,
            length=upload.length,
            credential=origin.credential,
            websocket=headers.asks_for_websocket(head),
            without=policy.without,
        )
        if upload.kept:
            answer = connection.send(octets + upload.held, head.method)
        else:
            answer = connection.send(octets + body.framed(upload, upload.held), head.method, whole=False)
            leg.upload = self.tasks.spawn(body.send_rest(call, connection, upload), "upload")
        self._watch.begin(call, now)
        try:
            response = await answer
        except UpstreamFailed as failure:
            if not failure.crossed or not upload.kept:
                if (hold or policy.hold) and failure.code in _GIVEN_UP and _streams_from_one(call, route):
                    failure.unsent = True  # as behind the head: nobody has seen anything, and nothing goes on being generated
                raise
            call.exchange.attempts += 1
            call.repeated += 1
            self.observer.retried(call.exchange, failure.code)
            return await self.attempt(call, leg, head, route, upload, fresh=True, hold=hold)
        exchange.head_received = time.monotonic()
        if (hold or policy.hold) and route.dialect is not None and headers.is_event_stream(response):
            await self._first_event(leg, connection, response, route.dialect)
        return response

    async def _first_event(self, leg: Leg, connection: Connection, response: ResponseHead, dialect: Dialect) -> None:
        """Wait until the stream says something. Raises EngineRefused where that is an error."""
        leg.exchange.phase = _FIRST_TOKEN
        hold = leg.hold = Hold(connection, response, dialect)
        try:
            error = await hold.done
        finally:
            leg.hold = None
        if error is not None:
            raise EngineRefused(*dialect.as_status(error))

    async def connect(self, call: Call, connections: ConnectionPool, seconds: float) -> Connection:
        name = connections.origin.name
        try:
            words = "the backend %s took no connection within %g s (timeouts.connect)"
            with Timed(call, seconds, "timeout_connect", words, name, seconds):
                return await connections.open()
        except Refusal as refusal:
            if refusal.code == "timeout_connect":
                raise UpstreamFailed(refusal.code, refusal.message, unsent=True) from None
            raise

    async def _held_attempt(
        self, call: Call, head: RequestHead, route: Route, upload: Upload, fresh: bool, leg: Leg
    ) -> ResponseHead:
        """One of two: what says nothing yet does not count."""
        return await self.attempt(call, leg, head, route, upload, fresh=fresh and leg is call, hold=True)

    def failed(self, leg: Leg, failure: UpstreamFailed | EngineRefused) -> None:
        """What one attempt's failure says of its backend. That a kept connection was stale says nothing, and an error that
        the backend chose to send does not eject it."""
        assert leg.lease is not None
        backend = leg.lease.backend
        if isinstance(failure, EngineRefused):
            if failure.status >= 500:
                backend.penalty.failed(time.monotonic())
        elif failure.code != "stale_connection":
            backend.failed(time.monotonic())
            self.observer.failed(leg.exchange, failure.code)
        leg.drop()

    def expired(self, call: Call, outcome: Outcome) -> None:
        """A deadline has passed before anything could be relayed."""
        timeouts, now = call.policy.timeouts, time.monotonic()
        if outcome is Outcome.TIMEOUT_TOTAL and call.paired is not None and call.paired.transfers:
            assert timeouts.total is not None
            call.interrupt(total_passed(timeouts.total))  # decode may not have fetched yet what prefill holds
            return
        for leg in (call, *call.others):
            waiting, sent = leg.waiting, leg.exchange.sent
            if waiting is None:
                continue
            if outcome is Outcome.TIMEOUT_TOTAL:
                assert timeouts.total is not None
                waiting.fail(total_passed(timeouts.total))
            elif sent is not None and sent + timeouts.first_byte <= now:
                what = "response head" if leg.hold is None else "first event"
                name = "" if leg.lease is None else f" {leg.lease.backend.name}"
                message = f"the backend{name} sent no {what} within {timeouts.first_byte:g} s (timeouts.first_byte)"
                # a stream that is held back and is now given up has shown nobody anything, and generates nothing any more
                waiting.fail(UpstreamFailed("timeout_first_byte", message, unsent=leg.hold is not None))


def _streams_from_one(call: Call, route: Route) -> bool:
    """It is a stream of events that is asked for, of one engine: a pair's KV may be fetched once only."""
    return route.dialect is not None and call.exchange.stream is True and call.paired is None


def _hedged_after(call: Call, hedges: Mapping[str, Hedge], upload: Upload) -> float | None:
    """Seconds after which a second backend is asked; None: never."""
    rule = hedges.get(call.exchange.model or "")
    if rule is None or not upload.kept or (call.route is not None and call.route.path == REALTIME):
        return None
    return rule.delay(call.exchange.stream)
