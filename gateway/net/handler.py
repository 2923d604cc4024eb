"""The life of a request: one coroutine, read from top to bottom.

    ACCEPT   the head is judged: path, method, expectation
    READ     the body, as far as it must be looked at; what is larger is streamed
    QUEUE    admitted, or made to wait, or turned away
    PICK, CONNECT, SEND, WAIT    an attempt, and perhaps another one (`net.attempts`)
    COMMIT   our head goes to the client; from here on there is no second try
    STREAM   the relay passes the body; this coroutine waits for its end
    DONE     one outcome; the connection kept or dropped, the lease and the slot given back

Whatever goes wrong leaves as an exception of `gateway.errors`, in one of three ways: a `Refusal` is answered, an `Ended`
cuts the client's connection, a cancellation means that the client has left or that somebody ended the exchange.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import random
import time
from collections.abc import Awaitable, Callable, Iterator

from gateway.core import headers
from gateway.core.admission import Admission
from gateway.core.backend import Backend
from gateway.core.edits import Editor
from gateway.core.exchange import Exchange, Observer
from gateway.core.framing import CloseReader, reader_of
from gateway.core.head import CHUNKED, CLOSE, LENGTH, NONE, RequestHead, ResponseHead
from gateway.core.meter import Meter
from gateway.core.outcome import BACKEND_FAILURES, Outcome, Phase
from gateway.core.retry import Retries
from gateway.core.routing import Route
from gateway.errors import Ended, EngineRefused, Refusal, UpstreamFailed, forget
from gateway.net import answers, body, changes, migrate
from gateway.net.attempts import Attempts
from gateway.net.call import Call, Local, Policy
from gateway.net.clock import http_date
from gateway.net.deadline import within
from gateway.net.disagg import Pairs
from gateway.net.downstream import Downstream, Request
from gateway.net.fleet import Fleet
from gateway.net.paired import PairObserver
from gateway.net.relay import Relay
from gateway.net.tasks import Tasks
from gateway.net.tunnel import Tunnel
from gateway.net.upstream import Connection
from gateway.net.waiting import Waiting
from gateway.net.watch import Watch

log = logging.getLogger(__name__)

# Looked up once: see core.head.
_FIRST_TOKEN, _DONE = Phase.FIRST_TOKEN, Phase.DONE
_COMPLETE = Outcome.COMPLETE
_BROKEN_OFF = (Outcome.STREAM_ERROR, Outcome.UPSTREAM_TRUNCATED)
_MODELS = b"/v1/models"
_SAYS_NOTHING = (Outcome.CLIENT_GONE, Outcome.CLIENT_STALLED, Outcome.DRAINING)  # of the backend


class Gateway:
    """Handles every request of the public listener."""

    def __init__(
        self,
        policy: Policy,
        fleet: Fleet,
        admission: Admission,
        retries: Retries,
        observer: Observer,
        pair_observer: PairObserver,
        edges: tuple[float, ...],
        page: Callable[[bytes], Awaitable[Local]] | None = None,
    ):
        self.policy, self.fleet, self.admission, self.retries, self.observer = policy, fleet, admission, retries, observer
        self._page = page  # of models, by its path
        self._waiting = Waiting(fleet, admission)
        self.draining = False
        self.live: dict[int, Call] = {}
        self._edges = edges  # of the histogram of gaps, which each stream fills by itself
        self._tasks = Tasks()
        watch = Watch(self.live, self._expired)
        self._attempts = Attempts(fleet, admission, retries, observer, self._tasks, watch, self._waiting)
        self.pairs = Pairs(
            fleet, admission, retries, observer, pair_observer, self._attempts, watch, self._tasks, self._waiting
        )
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
            fleet = self.fleet
            needed = fleet.models.needed
            upload = body.at_hand(call, head, route, needed) or await self._waiting.body(call, head, route, needed)
            body.weigh(call, head, route, upload)
            if route.path.startswith(_MODELS) and self._page is not None and fleet.lists_models(call, head):
                keep_alive = answers.answer(call, head, await self._page(route.path), self.draining)
            else:
                way = fleet.aim(call, upload)
                if not self._waiting.enter(call, way):
                    await self._waiting.turn(call, head)
                exchange.selected = time.monotonic()
                served = self._attempts if call.policy.pairs is None else self.pairs.or_one(call.policy.pairs, head, route)
                response = await served.response(call, head, route, upload)
                if response.status == 101:
                    await self._tunnel(call, head, response)
                else:
                    keep_alive = self._commit(call, head, response)
                    await self._relay(call)
        except Refusal as refusal:
            keep_alive = answers.refuse(call, refusal, self.draining)
            forget(refusal)
        except EngineRefused as refused:
            keep_alive = answers.engine_refused(call, refused, self.draining)
            forget(refused)
        except Ended as ended:
            answers.cut(call, ended)
            keep_alive = False
            forget(ended)
        except asyncio.CancelledError:
            keep_alive = False
            if call.interrupted is None:
                exchange.end(Outcome.CLIENT_GONE, client.gone_at or time.monotonic())
                raise
            if call.task is not None:
                call.task.uncancel()
            keep_alive = self._interrupted(call, call.interrupted)
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
            with within(self.policy.timeouts.client_write):
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

    # COMMIT, STREAM ---------------------------------------------------------------------------------------------------

    def _commit(self, call: Call, head: RequestHead, response: ResponseHead) -> bool:
        """Write our head, and make the relay. Returns whether the client's connection can go on afterwards."""
        exchange, client, connection = call.exchange, call.client, call.connection
        assert connection is not None and client.transport is not None
        keep_alive = answers.can_go_on(call, head, self.draining)
        kind = headers.media_type(response.named)
        meter = exchange.meter = self._meter(call, response, kind)
        edit: Editor | None = None
        if call.usage_asked or call.aim is not None or call.paired is not None:
            edit = changes.edit(call, response, kind, meter)
        framing = response.framing
        if framing is CHUNKED or framing is CLOSE or (framing is LENGTH and edit is not None and edit.resizes):
            framing = CHUNKED if head.minor else CLOSE
            keep_alive = keep_alive and framing is CHUNKED
        exchange.status, exchange.committed, exchange.phase = response.status, True, _FIRST_TOKEN
        now = exchange.head_received
        assert now is not None
        seam = None if call.asked is None else migrate.seam(call, response)
        make = Relay if seam is None else functools.partial(migrate.SeamedRelay, seam)
        relay = call.relay = make(
            exchange,
            client,
            connection,
            seam or reader_of(response),
            framing,
            meter,
            self.observer,
            now,
            kind == b"text/event-stream",
            edit,
            call.policy.coalesce,
            call.lease.prompt_read if call.lease is not None and response.status < 300 else None,
        )
        octets = headers.client_head(
            response,
            request_id=call.request_id,
            date=http_date(),
            framing=framing,
            connection=answers.connection_field(head, keep_alive),
            receipt=answers.receipt(call),
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
        if headers.is_coded(response):
            return None
        if kind == b"application/json":
            return Meter(route.dialect, self._edges, False)
        if kind == b"text/event-stream" or call.exchange.stream is True:
            return Meter(route.dialect, self._edges, True)
        return None

    async def _relay(self, call: Call) -> None:
        """Wait for the body's end, and for the client to take it. Raises Ended."""
        exchange, client, relay = call.exchange, call.client, call.relay
        assert isinstance(relay, Relay)
        if isinstance(relay, migrate.SeamedRelay):
            await (migrate.ended(self._attempts, call, relay) if call.paired is None else self.pairs.ended(call, relay))
        else:
            await relay.done
        exchange.phase = _DONE
        relay.let_go()
        if call.connection is not None:  # else it ended as a disaggregated answer that nobody went on with
            self._keep_or_drop(call, call.connection)
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
            raise UpstreamFailed("upstream_malformed", f"the backend {exchange.backend} switched protocols unasked")
        if response.named.get(b"upgrade", b"").lower() != b"websocket":
            raise UpstreamFailed("upstream_malformed", f"the backend {exchange.backend} speaks no WebSocket there")
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

    def _interrupted(self, call: Call, reason: Ended | Refusal) -> bool:
        """Somebody ended the exchange from outside. Returns whether the client's connection can go on."""
        if isinstance(reason, Refusal):
            return answers.refuse(call, reason, self.draining)
        if call.exchange.committed:
            answers.cut(call, reason)
        else:
            answers.refuse(call, Refusal("draining", reason.args[0], outcome=reason.outcome), self.draining)
        return False

    def gone(self, call: Call) -> None:
        """The client has left: the engine is told at once, whatever the coroutine is waiting for."""
        exchange, client = call.exchange, call.client
        gone = client.gone_at or time.monotonic()
        if call.interrupted is None:
            exchange.end(Outcome.CLIENT_GONE, gone)
        if call.paired is not None:
            self.pairs.gone(call.paired)
        if call.connection is not None or call.others:
            call.let_go()
            self.observer.aborted(exchange, time.monotonic() - gone)

    def _close(self, call: Call) -> None:
        """Give everything back, synchronously and once; then tell whoever observes."""
        exchange, relay = call.exchange, call.relay
        del self.live[id(call)]
        call.client.call = call.client.source = None
        if call.paired is not None:
            self.pairs.closed(call, call.paired)
        call.let_go()
        if relay is not None:
            relay.close()
            exchange.bytes_out = relay.body_octets
        # a task that was cancelled, and a body that was given an error, hold the frames that hold them
        call.upload = call.task = call.request.body = None
        if exchange.outcome is None:
            exchange.end(Outcome.INTERNAL, time.monotonic())
        if call.lease is not None:
            self._judge(call.lease.backend, exchange, call.judged)
            call.lease.release()
        for leg in call.others:
            leg.end()
        self._waiting.leave(call)
        try:
            self.observer.ended(exchange)
        except Exception:
            log.exception("the exchange %s could not be counted", exchange.request_id)

    def _judge(self, backend: Backend, exchange: Exchange, judged: bool) -> None:
        """What the whole exchange says of its backend. Attempts that failed have been judged before. `judged`: so has what
        this one's answer says."""
        outcome = exchange.outcome
        if not exchange.committed:
            return
        if outcome is _COMPLETE:
            backend.answered(200, time.monotonic())
        elif outcome in BACKEND_FAILURES:
            backend.failed(time.monotonic())
            assert outcome is not None
            self.observer.failed(exchange, outcome.value)
        elif outcome in _BROKEN_OFF:
            backend.answered(500, time.monotonic())  # as if it had said so in the head
        elif outcome not in _SAYS_NOTHING and not judged:
            backend.answered(exchange.status or 0, time.monotonic())

    # the gateway's own page -------------------------------------------------------------------------------------------

    async def _health(self, client: Downstream, head: RequestHead) -> bool:
        """Constant work, no backend asked, no exchange counted: load balancers ask this every second."""
        well = self.fleet.routable and not self.draining
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

    def _expired(self, call: Call, outcome: Outcome) -> None:
        """A deadline has passed."""
        if call.relay is None:
            self._attempts.expired(call, outcome)
        else:
            ended = Ended(outcome)
            call.relay.fail(ended)
            call.client.give_up_flushing(ended)

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
