"""The life of a request: one coroutine, read from top to bottom.

    ACCEPT   the head is judged: path, method, expectation
    READ     the body, as far as it must be looked at; what is larger is streamed
    QUEUE    admitted, or made to wait, or turned away
    PICK, CONNECT, SEND, WAIT    an attempt, and perhaps another one
    COMMIT   our head goes to the client; from here on there is no second try
    STREAM   the relay passes the body; this coroutine waits for its end
    DONE     one outcome; the connection kept or dropped, the lease and the slot given back

Whatever goes wrong leaves as an exception of `gateway.errors`, in one of three ways: a `Refusal` is answered, an `Ended`
cuts the client's connection, a cancellation means that the client has left or that somebody ended the exchange.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence

from gateway.core import headers
from gateway.core.admission import Admission
from gateway.core.backend import Backend, Lease
from gateway.core.dialects import Dialect
from gateway.core.edits import UsageStripper
from gateway.core.exchange import Exchange, Observer
from gateway.core.framing import CloseReader, reader_of
from gateway.core.head import CHUNKED, CLOSE, LENGTH, NONE, RequestHead, ResponseHead
from gateway.core.meter import Meter
from gateway.core.outcome import BACKEND_FAILURES, Outcome, Phase
from gateway.core.pool import Pool
from gateway.core.retry import Retries
from gateway.core.routing import Route
from gateway.errors import Ended, EngineRefused, Refusal, UpstreamFailed
from gateway.net import answers, body
from gateway.net.call import Call, Local, Policy, Upload
from gateway.net.clock import http_date
from gateway.net.downstream import Downstream, Request
from gateway.net.hold import Hold
from gateway.net.relay import Relay
from gateway.net.tasks import Tasks
from gateway.net.tunnel import Tunnel
from gateway.net.upstream import Connection, ConnectionPool
from gateway.net.watch import NEVER, Watch

log = logging.getLogger(__name__)

# Looked up once: see core.head.
_CONNECT, _WAIT, _FIRST_TOKEN, _DONE = Phase.CONNECT, Phase.WAIT, Phase.FIRST_TOKEN, Phase.DONE
_COMPLETE = Outcome.COMPLETE
_SAYS_NOTHING = (Outcome.CLIENT_GONE, Outcome.CLIENT_STALLED, Outcome.DRAINING)  # of the backend


class Gateway:
    """Handles every request of the public listener."""

    def __init__(
        self,
        policy: Policy,
        pool: Pool,
        connections: dict[str, ConnectionPool],
        admission: Admission,
        retries: Retries,
        observer: Observer,
        edges: tuple[float, ...],
        loopback: tuple[Pool, dict[str, ConnectionPool]] | None = None,
        models: Callable[[], Awaitable[Local]] | None = None,
    ):
        self.policy, self.pool, self.connections = policy, pool, connections
        self.admission, self.retries, self.observer = admission, retries, observer
        self.loopback = loopback  # the embedded synthetic upstream, where /loadtest is served
        self.models = models
        self.draining = False
        self.live: dict[int, Call] = {}
        self._edges = edges  # of the histogram of gaps, which each stream fills by itself
        self._tasks = Tasks()
        self._watch = Watch(self.live, self._expired)
        self._prefix, self._count = b"%024x" % random.getrandbits(96), 0

    # the life of a request --------------------------------------------------------------------------------------------

    async def handle(self, request: Request) -> bool:
        """Serve one request; returns whether its connection goes on. Every way out records exactly one outcome."""
        head = request.head
        if head is not None and head.target == b"/health" and head.method in (b"GET", b"HEAD"):
            return await self._health(request.client, head)
        call = self._open(request)
        exchange, client = call.exchange, call.client
        keep_alive = False
        try:
            head, route = self._accept(call)
            upload = body.at_hand(call, head, route) or await body.read(call, head, route)
            body.weigh(call, head, route, upload)
            if not self.admission.enter():
                await self._queue(call)
            call.slot = True
            exchange.selected = time.monotonic()
            if (
                route.path == b"/v1/models"
                and not route.loopback
                and self.models is not None
                and len(self.pool.backends) > 1
                and head.method == b"GET"
            ):
                keep_alive = answers.answer(call, head, await self.models(), self.draining)
            else:
                response = await self._attempts(call, head, route, upload)
                if response.status == 101:
                    await self._tunnel(call, head, response)
                else:
                    keep_alive = self._commit(call, head, response)
                    await self._relay(call)
        except Refusal as refusal:
            keep_alive = answers.refuse(call, refusal, self.draining)
            refusal.__traceback__ = None  # the future that it came from is held by the frames that it holds
        except EngineRefused as refused:
            keep_alive = answers.engine_refused(call, refused, self.draining)
            refused.__traceback__ = None
        except Ended as ended:
            answers.cut(call, ended)
            keep_alive = False
            ended.__traceback__ = None
        except asyncio.CancelledError:
            keep_alive = False
            if call.interrupted is None:
                exchange.end(Outcome.CLIENT_GONE, client.gone_at or time.monotonic())
                raise
            if call.task is not None:
                call.task.uncancel()
            self._interrupted(call, call.interrupted)
        except Exception:
            log.exception("the exchange %s failed by a fault of ours", exchange.request_id)
            keep_alive = answers.refuse(call, Refusal("internal", "the gateway failed by a fault of its own"), self.draining)
        finally:
            self._close(call)
        if client.transport is None:
            return False
        if keep_alive and not self.draining and (client.keeps_up or await self._catches_up(client)):
            client.answered()
            return True
        if exchange.outcome is Outcome.REFUSED or client.reader.in_body:
            await client.linger()
        return False

    async def _catches_up(self, client: Downstream) -> bool:
        """Let the client take most of the answers that it was given. Returns whether its connection goes on."""
        try:
            async with asyncio.timeout(self.policy.timeouts.client_write):
                await client.flushed()
        except TimeoutError:
            client.cut(reset=True)
        return client.transport is not None and not client.transport.is_closing()

    def _open(self, request: Request) -> Call:
        head, client = request.head, request.client
        request_id = self._request_id(head)
        method = head.method.decode() if head is not None else ""
        exchange = Exchange(request_id.decode(), client.address, method, "", request.accepted)
        if head is not None and b"traceparent" in head.named:
            exchange.trace_id, exchange.sampled = headers.trace(head)
        call = client.call = Call(exchange, request_id, request, self.policy)
        self.live[id(call)] = call
        return call

    def _request_id(self, head: RequestHead | None) -> bytes:
        given = headers.request_id(head) if head is not None and b"x-request-id" in head.named else None
        if given is None:
            self._count += 1
            given = self._prefix + b"%08x" % (self._count & 0xFFFFFFFF)
        return given

    # ACCEPT -----------------------------------------------------------------------------------------------------------

    def _accept(self, call: Call) -> tuple[RequestHead, Route]:
        """Judge the head. Raises Refusal."""
        request, exchange, policy = call.request, call.exchange, call.policy
        head = request.head
        if head is None:
            assert request.refusal is not None
            raise request.refusal
        exchange.path = head.target.partition(b"?")[0].decode("latin-1")
        if self.draining:
            raise Refusal("draining", "the gateway is shutting down", retry_after=1)
        if request.client.server.crowded:
            raise Refusal("overloaded", "the gateway has no file descriptors to spare (LimitNOFILE, ulimit -n)", retry_after=1)
        route = call.route = policy.paths.route(head.target)
        if head.method not in answers.METHODS:
            raise Refusal("method_not_allowed", "this method is not served here")
        expected = head.named.get(b"expect")
        if expected is not None and head.minor and expected.lower() != b"100-continue":
            raise Refusal("expectation_failed", "the only expectation that can be met here is 100-continue")
        if head.length > policy.request_body:
            raise body.too_large(policy)
        return head, route

    # READ -------------------------------------------------------------------------------------------------------------

    # QUEUE ------------------------------------------------------------------------------------------------------------

    async def _queue(self, call: Call) -> None:
        """Wait for a slot. Raises Refusal."""
        admission = self.admission
        call.exchange.phase, call.exchange.queued = Phase.QUEUE, time.monotonic()
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        ticket = admission.ticket(lambda: self._granted(call, turn))
        seconds = call.policy.timeouts.queue
        try:
            message = f"no slot came free within {seconds:g} s (timeouts.queue)"
            await body.timed(call, turn, seconds, "queue_timeout", message, retry_after=1)
        finally:
            admission.leave(ticket)

    def _granted(self, call: Call, turn: asyncio.Future[None]) -> None:
        # both at once, so that nobody else is let in for the same place, and that they are given back whatever comes next
        call.slot = True
        call.lease = self._pick(call)
        if not turn.done():
            turn.set_result(None)

    # PICK, CONNECT, SEND, WAIT ----------------------------------------------------------------------------------------

    async def _attempts(self, call: Call, head: RequestHead, route: Route, upload: Upload) -> ResponseHead:
        """One attempt, and others where that can harm nobody, until a backend's response head is here. Raises Refusal."""
        exchange = call.exchange
        self.retries.request()
        tried: list[Backend] = []
        stale = False
        lease = call.lease or self._pick(call)
        if lease is None:
            raise self._backends(call)[0].nobody()
        while True:
            call.lease = lease
            exchange.attempts += 1
            exchange.backend = lease.backend.name
            try:
                return await self._attempt(call, head, route, upload, fresh=stale)
            except (UpstreamFailed, EngineRefused) as failure:
                self._attempt_failed(call, lease.backend, failure)
                stale = failure.code == "stale_connection"
                if isinstance(failure, EngineRefused) and failure.status < 500:
                    raise  # the client's own fault: it would be no better elsewhere
                if stale:  # of the backend it says nothing: the same one, with the same lease
                    if not self.retries.again(failure, head.method, exchange.attempts, body_kept=upload.kept):
                        raise
                    self.observer.retried(exchange, failure.code)
                    continue
                tried.append(lease.backend)
                following = self._pick(call, tried)
                if following is None:
                    raise  # what went wrong says more than that there is nobody else
                if not self.retries.again(failure, head.method, exchange.attempts, body_kept=upload.kept):
                    following.release()
                    raise
                self.observer.retried(exchange, failure.code)
                lease.release()
                lease = call.lease = following
                self.admission.wake()

    def _pick(self, call: Call, tried: Sequence[Backend] = ()) -> Lease | None:
        """A lease, and in the same step the connections that belong to it: a reload may come at any await."""
        pool, connections = self._backends(call)
        lease = pool.pick(time.monotonic(), tried, key=call.key, tokens=call.tokens, chance=random.random())
        if lease is not None:
            call.connections = connections[lease.backend.name]
        return lease

    def _backends(self, call: Call) -> tuple[Pool, dict[str, ConnectionPool]]:
        if self.loopback is not None and call.route is not None and call.route.loopback:
            return self.loopback
        return self.pool, self.connections

    async def _attempt(self, call: Call, head: RequestHead, route: Route, upload: Upload, *, fresh: bool) -> ResponseHead:
        connections = call.connections
        assert connections is not None
        exchange, policy, origin = call.exchange, call.policy, connections.origin
        exchange.phase, exchange.connect_began = _CONNECT, time.monotonic()
        connection = None if fresh else connections.take()
        self.observer.connection(origin.name, reused=connection is not None)
        if connection is None:
            connection = await self._connect(call, connections, policy.timeouts.connect)
        call.connection = connection
        exchange.phase = _WAIT
        now = exchange.sent = exchange.connected = time.monotonic()
        host = head.named.get(b"host", b"") if route.authority is None else route.authority
        octets = headers.upstream_head(
            head,
            route.target,
            host=origin.host_field,
            request_id=call.request_id,
            forwarding=call.client.forwarding(host) if policy.forwarded else None,
            length=upload.length,
            credential=origin.credential,
            websocket=headers.asks_for_websocket(head),
        )
        if upload.kept:
            answer = connection.send(octets + upload.held, head.method)
        else:
            answer = connection.send(octets + body.framed(upload, upload.held), head.method)
            call.upload = self._tasks.spawn(body.send_rest(call, connection, upload), "upload")
        self._watch.begin(call, now)
        response = await answer
        exchange.head_received = time.monotonic()
        if policy.hold and route.dialect is not None and _is_event_stream(response):
            await self._first_event(call, connection, response, route.dialect)
        return response

    async def _first_event(self, call: Call, connection: Connection, response: ResponseHead, dialect: Dialect) -> None:
        """Wait until the stream says something. Raises EngineRefused where that is an error."""
        call.exchange.phase = _FIRST_TOKEN
        hold = call.hold = Hold(connection, response, dialect)
        try:
            error = await hold.done
        finally:
            call.hold = None
        if error is not None:
            raise EngineRefused(*dialect.as_status(error))

    async def _connect(self, call: Call, connections: ConnectionPool, seconds: float) -> Connection:
        name = connections.origin.name
        try:
            return await body.timed(
                call,
                connections.open(),
                seconds,
                "timeout_connect",
                f"the backend {name} took no connection within {seconds:g} s (timeouts.connect)",
            )
        except Refusal as refusal:
            if refusal.code == "timeout_connect":
                raise UpstreamFailed(refusal.code, refusal.message, unsent=True) from None
            raise

    def _attempt_failed(self, call: Call, backend: Backend, failure: UpstreamFailed | EngineRefused) -> None:
        """What one attempt's failure says of its backend. That a kept connection was stale says nothing, and an error that
        the backend chose to send does not eject it."""
        if isinstance(failure, EngineRefused):
            if failure.status >= 500:
                backend.penalty.failed(time.monotonic())
        elif failure.code != "stale_connection":
            backend.failed(time.monotonic())
            self.observer.failed(call.exchange, failure.code)
        self._let_go(call)

    def _let_go(self, call: Call) -> None:
        """End whatever is under way with the backend."""
        call.look_at = NEVER
        if call.upload is not None:
            call.upload.cancel()
        if call.connection is not None:
            call.connection.drop()
            call.connection = None

    def _expired(self, call: Call, outcome: Outcome) -> None:
        """A deadline has passed."""
        timeouts = call.policy.timeouts
        if call.relay is not None:
            ended = Ended(outcome)
            call.relay.fail(ended)
            call.client.give_up_flushing(ended)
        elif call.connection is not None:
            waiting = call.hold or call.connection
            if outcome is Outcome.TIMEOUT_TOTAL:
                assert timeouts.total is not None
                waiting.fail(body.total_passed(timeouts.total))
            else:
                what = "response head" if call.hold is None else "first event"
                message = f"the backend sent no {what} within {timeouts.first_byte:g} s (timeouts.first_byte)"
                waiting.fail(UpstreamFailed("timeout_first_byte", message))

    # COMMIT, STREAM ---------------------------------------------------------------------------------------------------

    def _commit(self, call: Call, head: RequestHead, response: ResponseHead) -> bool:
        """Write our head, and make the relay. Returns whether the client's connection can go on afterwards."""
        exchange, client, connection = call.exchange, call.client, call.connection
        assert connection is not None and client.transport is not None
        keep_alive = answers.can_go_on(call, head, self.draining)
        kind = headers.media_type(response.named)
        meter = exchange.meter = self._meter(call, response, kind)
        edit = UsageStripper() if call.usage_asked and meter is not None and meter.streamed else None
        framing = response.framing
        if framing is CHUNKED or framing is CLOSE or (framing is LENGTH and edit is not None):
            framing = CHUNKED if head.minor else CLOSE
            keep_alive = keep_alive and framing is CHUNKED
        exchange.status, exchange.committed, exchange.phase = response.status, True, _FIRST_TOKEN
        now = exchange.head_received
        assert now is not None
        relay = call.relay = Relay(
            exchange,
            client,
            connection,
            reader_of(response),
            framing,
            meter,
            self.observer,
            now,
            kind == b"text/event-stream",
            edit,
            call.policy.coalesce,
            call.lease.prompt_read if call.lease is not None else None,
        )
        octets = headers.client_head(
            response,
            request_id=call.request_id,
            date=http_date(),
            framing=framing,
            connection=answers.connection_field(head, keep_alive),
            receipt=_receipt(exchange) if call.policy.receipt else b"",
        )
        client.source = relay
        pending = connection.pending
        connection.hand_over(relay)
        relay.begin(octets, pending)
        if connection.lost:
            relay.already_ended()
        return keep_alive

    def _meter(self, call: Call, response: ResponseHead, kind: bytes) -> Meter | None:
        """Who watches this body: nobody, unless it is a 2xx in a dialect that is known, and not coded."""
        route = call.route
        if route is None or route.dialect is None or response.framing is NONE or not 200 <= response.status < 300:
            return None
        if _is_coded(response):
            return None
        if kind == b"application/json":
            return Meter(route.dialect, self._edges, False)
        if kind == b"text/event-stream" or call.exchange.stream is True:
            return Meter(route.dialect, self._edges, True)
        return None

    async def _relay(self, call: Call) -> None:
        """Wait for the body's end, and for the client to take it. Raises Ended."""
        exchange, client, relay, connection = call.exchange, call.client, call.relay, call.connection
        assert isinstance(relay, Relay) and connection is not None
        await relay.done
        exchange.phase = _DONE
        relay.let_go()
        self._keep_or_drop(call, connection)
        if client.buffered:
            client.watch_taking(time.monotonic())
            await client.flushed()
        if client.transport is None:
            raise asyncio.CancelledError
        outcome = _COMPLETE
        if exchange.status is not None and exchange.status >= 400:
            outcome = Outcome.UPSTREAM_STATUS
        elif relay.meter is not None:
            outcome = relay.meter.verdict(True)
        exchange.end(outcome, time.monotonic())

    def _keep_or_drop(self, call: Call, connection: Connection) -> None:
        relay = call.relay
        assert isinstance(relay, Relay)
        sent = call.upload is None or call.upload.done()
        sent = sent and not connection.has_unsent(call.exchange.bytes_in)
        if sent and not connection.closes and not relay.reader.extra and type(relay.reader) is not CloseReader:
            connection.give_back()
        else:
            connection.drop()
        call.connection = None

    async def _tunnel(self, call: Call, head: RequestHead, response: ResponseHead) -> None:
        """The backend has agreed to speak WebSocket: from now on octets pass both ways as they come."""
        exchange, client, connection = call.exchange, call.client, call.connection
        assert connection is not None
        if not headers.asks_for_websocket(head):
            raise UpstreamFailed("upstream_malformed", "the backend switched protocols, which nobody had asked for")
        if response.named.get(b"upgrade", b"").lower() != b"websocket":
            raise UpstreamFailed("upstream_malformed", "the backend switched to another protocol than WebSocket")
        exchange.status, exchange.committed, exchange.phase = 101, True, Phase.STREAM
        call.write(
            headers.client_head(
                response,
                request_id=call.request_id,
                date=http_date(),
                framing=NONE,
                connection=None,
                upgrade=True,
            ),
        )
        tunnel = call.relay = Tunnel(exchange, client, connection, self.observer)
        await tunnel.run()
        exchange.end(_COMPLETE, time.monotonic())

    # how it ends ------------------------------------------------------------------------------------------------------

    def _interrupted(self, call: Call, reason: Ended) -> None:
        """Somebody ended the exchange from outside."""
        if call.exchange.committed:
            answers.cut(call, reason)
        else:
            answers.refuse(call, Refusal("draining", reason.args[0], outcome=reason.outcome), self.draining)

    def gone(self, call: Call) -> None:
        """The client has left: the engine is told at once, whatever the coroutine is waiting for."""
        exchange, client = call.exchange, call.client
        gone = client.gone_at or time.monotonic()
        if call.interrupted is None:
            exchange.end(Outcome.CLIENT_GONE, gone)
        if call.connection is not None:
            self._let_go(call)
            self.observer.aborted(exchange, time.monotonic() - gone)

    def _close(self, call: Call) -> None:
        """Give everything back, synchronously and once; then tell whoever observes."""
        exchange, relay = call.exchange, call.relay
        del self.live[id(call)]
        call.client.call = call.client.source = None
        self._let_go(call)
        if relay is not None:
            relay.close()
            exchange.bytes_out = relay.body_octets
        # a task that was cancelled, and a body that was given an error, hold the frames that hold them
        call.upload = call.task = call.request.body = None
        if exchange.outcome is None:
            exchange.end(Outcome.INTERNAL, time.monotonic())
        if call.lease is not None:
            self._judge(call.lease.backend, exchange)
            call.lease.release()
        if call.slot:
            self.admission.release()
        try:
            self.observer.ended(exchange)
        except Exception:
            log.exception("the exchange %s could not be counted", exchange.request_id)

    def _judge(self, backend: Backend, exchange: Exchange) -> None:
        """What the whole exchange says of its backend. Attempts that failed have been judged before."""
        outcome = exchange.outcome
        if not exchange.committed:
            return
        if outcome is _COMPLETE:
            backend.answered(200, time.monotonic())
        elif outcome in BACKEND_FAILURES:
            backend.failed(time.monotonic())
            assert outcome is not None
            self.observer.failed(exchange, outcome.value)
        elif outcome not in _SAYS_NOTHING:
            backend.answered(exchange.status or 0, time.monotonic())

    # the gateway's own page -------------------------------------------------------------------------------------------

    async def _health(self, client: Downstream, head: RequestHead) -> bool:
        """Constant work, no backend asked, no exchange counted: load balancers ask this every second."""
        well = self.pool.routable and not self.draining
        keep_alive = headers.keeps_alive(head) and not client.reader.in_body and not self.draining
        if client.transport is not None:
            client.transport.write(
                headers.own_head(
                    200 if well else 503,
                    b"OK" if well else b"Service Unavailable",
                    request_id=self._request_id(head),
                    date=http_date(),
                    length=0,
                    connection=answers.connection_field(head, keep_alive),
                )
            )
        goes_on = keep_alive and (client.keeps_up or await self._catches_up(client))
        if goes_on:
            client.answered()
        return goes_on

    # from outside -----------------------------------------------------------------------------------------------------

    def exchanges(self) -> Iterator[Exchange]:
        """All under way, the oldest first, each as it stands when it is come to: there is time between two of them."""
        for call in list(self.live.values()):
            if call.relay is not None:
                call.relay.settle()
                call.exchange.bytes_out = call.relay.body_octets
            yield call.exchange

    def interrupt(self, reason: Ended, request_id: str | None = None) -> int:
        """End all exchanges, or those of one id. Returns how many."""
        calls = [c for c in self.live.values() if request_id is None or c.exchange.request_id == request_id]
        for call in calls:
            call.interrupt(reason)
        return len(calls)

    async def stop(self) -> None:
        await self._tasks.stop()


def _is_event_stream(response: ResponseHead) -> bool:
    """One that can be read: the stream of a success, and not coded."""
    kind = headers.media_type(response.named)
    return 200 <= response.status < 300 and kind == b"text/event-stream" and not _is_coded(response)


def _is_coded(response: ResponseHead) -> bool:
    named = response.named
    return b"content-encoding" in named and named[b"content-encoding"].lower() != b"identity"


def _receipt(exchange: Exchange) -> bytes:
    assert exchange.backend is not None and exchange.selected is not None
    queued = 0.0 if exchange.queued is None else exchange.selected - exchange.queued
    return headers.receipt(exchange.backend, exchange.attempts, queued)
