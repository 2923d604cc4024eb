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
import dataclasses
import http
import logging
import random
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import NamedTuple, TypeVar

from gateway.core import headers
from gateway.core.admission import Admission
from gateway.core.backend import Backend, Lease
from gateway.core.dialects import DEFAULT, Dialect, for_path
from gateway.core.exchange import Exchange, Observer
from gateway.core.framing import LAST_CHUNK, ChunkedReader, CloseReader, LengthReader, frame
from gateway.core.head import Framing, RequestHead, ResponseHead
from gateway.core.inspection import JSON_PATHS, Inspector, not_json
from gateway.core.jsonbody import Members, NotAnObject
from gateway.core.meter import Meter
from gateway.core.outcome import BACKEND_FAILURES, Outcome, Phase
from gateway.core.pool import Pool
from gateway.core.retry import Retries
from gateway.core.routing import Paths, authority, check_path, split_target
from gateway.errors import Ended, Refusal, UpstreamFailed
from gateway.net.clock import http_date
from gateway.net.downstream import Answered, Downstream, Request
from gateway.core.edits import UsageStripper
from gateway.net.relay import Relay
from gateway.net.tasks import Tasks
from gateway.net.tunnel import Tunnel
from gateway.net.upstream import Connection, ConnectionPool
from gateway.net.watch import Timeouts, Watch

log = logging.getLogger(__name__)
T = TypeVar("T")

# Octets of a body that are gathered before it is sent on. Nearly every prompt is smaller, and can then be tried again
# elsewhere; a larger one is streamed, so that memory does not depend on what clients send.
HELD_JSON = 1 << 20
HELD_OTHER = 65536
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
METHODS = frozenset((b"GET", b"HEAD", b"POST", b"PUT", b"PATCH", b"DELETE", b"OPTIONS"))


@dataclasses.dataclass(frozen=True, slots=True)
class Policy:
    """What the operator decided, as one snapshot: an exchange lives by the one it began with."""

    paths: Paths
    inspector: Inspector
    timeouts: Timeouts
    request_body: int = 67108864
    forwarded: bool = True
    error_events: bool = False  # on_truncation: error_event
    comment: float | None = None  # keepalive_comment.interval
    coalesce: tuple[float, int] | None = None  # seconds, octets
    looks: bool = True  # some rule needs the body to be looked into


class Local(NamedTuple):
    """An answer that the gateway gives itself, where several backends stand behind one page."""

    status: int
    body: bytes


class Upload:
    """A request's body on its way to the backend: what is held, and, if it is not all of it, a source for the rest."""

    __slots__ = ("held", "kept", "length", "members", "usage_asked")

    def __init__(self, held: bytes, length: int | None, *, kept: bool = True, members: Members | None = None):
        self.held = held
        self.length = length  # of the whole body; None where only its end will tell
        self.kept = kept  # what is held is all of it
        self.usage_asked = False  # the gateway itself asked for the stream's usage
        self.members = members  # still looking for refused members in what comes


class Call:
    """What one exchange holds, and what can end it from outside."""

    __slots__ = ("connection", "dialect", "exchange", "head", "interrupted", "lease", "policy", "relay", "request", "slot", "task", "upload", "usage_asked", "watch")

    def __init__(self, exchange: Exchange, request: Request, policy: Policy):
        self.exchange, self.request, self.policy = exchange, request, policy
        self.head: RequestHead | None = request.head
        self.dialect: Dialect | None = None
        self.task = asyncio.current_task()
        self.interrupted: Ended | None = None
        self.slot = False
        self.lease: Lease | None = None
        self.connection: Connection | None = None
        self.relay: Relay | Tunnel | None = None
        self.watch: Watch | None = None
        self.upload: asyncio.Task[None] | None = None
        self.usage_asked = False

    def interrupt(self, reason: Ended) -> None:
        """End the exchange from outside: the drain limit, an operator's word."""
        if self.interrupted is None:
            self.interrupted = reason
            if self.relay is not None and not self.relay.done.done():
                self.relay.fail(reason)
            elif self.task is not None:
                self.task.cancel()


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
        self._prefix, self._count = random.getrandbits(96), 0

    # the life of a request --------------------------------------------------------------------------------------------

    async def handle(self, request: Request) -> Answered:
        if request.head is not None and request.head.target == b"/health" and request.head.method in (b"GET", b"HEAD"):
            return await self._health(request)
        call = self._open(request)
        exchange, client = call.exchange, request.client
        keep_alive = False
        try:
            target, path = self._accept(call)
            upload = await self._read(call, path)
            call.usage_asked = upload.usage_asked
            await self._admit(call)
            if path == b"/v1/models" and self.models is not None and len(self.pool.backends) > 1 and exchange.method == "GET":
                keep_alive = await self._answer(call, await self.models())
            else:
                response = await self._attempts(call, target, upload)
                if response.status == 101:
                    await self._tunnel(call, response)
                else:
                    keep_alive = self._commit(call, response)
                    await self._relay(call)
        except Refusal as refusal:
            keep_alive = await self._refuse(call, refusal)
        except Ended as ended:
            self._cut(call, ended)
        except asyncio.CancelledError:
            if call.interrupted is None:
                exchange.end(Outcome.CLIENT_GONE, client.gone_at or time.monotonic())
                raise
            if call.task is not None:
                call.task.uncancel()
            keep_alive = await self._interrupted(call, call.interrupted)
        except Exception:
            log.exception("the exchange %s failed by a fault of ours", exchange.request_id)
            keep_alive = await self._refuse(call, Refusal("internal", "the gateway failed by a fault of its own"))
        finally:
            self._close(call)
        if client.transport is None or self.draining:
            keep_alive = False
        if keep_alive:
            client.answered()
        elif exchange.outcome is Outcome.REFUSED or (call.head is not None and client.reader.in_body):
            await client.linger()
        return Answered(keep_alive)

    def _open(self, request: Request) -> Call:
        head, client = request.head, request.client
        given = self._request_id(head)
        method = head.method.decode() if head is not None else ""
        exchange = Exchange(given.decode(), client.peer.address.decode(), method, "", request.accepted)
        call = Call(exchange, request, self.policy)
        self.live[id(call)] = call
        client.on_gone = lambda: self._gone(call)
        self.observer.began(exchange)
        return call

    def _request_id(self, head: RequestHead | None) -> bytes:
        given = headers.request_id(head.fields) if head is not None else None
        if given is None:
            self._count += 1
            given = b"%024x%08x" % (self._prefix, self._count & 0xFFFFFFFF)
        return given

    # ACCEPT -----------------------------------------------------------------------------------------------------------

    def _accept(self, call: Call) -> tuple[bytes, bytes]:
        """The target to be sent on, and its path. Raises Refusal."""
        request, exchange, policy = call.request, call.exchange, call.policy
        if request.refusal is not None:
            raise request.refusal
        head = call.head
        assert head is not None
        target, path = split_target(head.target)
        exchange.path = path.decode("latin-1")
        if self.draining:
            raise Refusal("draining", "the gateway is shutting down", retry_after=1)
        if path.startswith(b"/loadtest/") and self.loopback is not None:
            target, path = target[len(b"/loadtest") :], path[len(b"/loadtest") :]
        check_path(path)
        if not policy.paths.served(path):
            raise Refusal("unknown_path", f"{exchange.path[:200]} is not served here (paths.allow)")
        call.dialect = for_path(path.decode("latin-1"))
        if head.method not in METHODS:
            raise Refusal("method_not_allowed", "this method is not served here")
        expected = headers.value(head.fields, b"expect")
        if expected is not None and head.minor and expected.lower() != b"100-continue":
            raise Refusal("expectation_failed", "the only expectation that can be met here is 100-continue")
        if head.framing is Framing.LENGTH and head.length > policy.request_body:
            raise self._too_large(policy)
        return target, path

    @staticmethod
    def _too_large(policy: Policy) -> Refusal:
        return Refusal("body_too_large", f"the request body is larger than limits.request_body, {policy.request_body} octets")

    # READ -------------------------------------------------------------------------------------------------------------

    async def _read(self, call: Call, path: bytes) -> Upload:
        """The body, as far as it must be looked at before anything is sent. Raises Refusal."""
        head, exchange, policy = call.head, call.exchange, call.policy
        assert head is not None
        if head.framing is Framing.NONE:
            exchange.body_read = time.monotonic()
            return Upload(b"", 0)
        looks = policy.looks and _is_json(head, path)
        if looks:
            coding = headers.value(head.fields, b"content-encoding")
            if coding is not None and coding.lower() not in (b"", b"identity"):
                raise Refusal(
                    "unsupported_media",
                    f"a request body coded as {coding.decode('latin-1')[:40]} cannot be looked into; send it uncoded, or let "
                    "the operator set every rule of `fields` to pass",
                )
        whole = looks and policy.inspector.edits(path)
        most = policy.request_body if whole else HELD_JSON if looks else HELD_OTHER
        body = call.request.body
        if headers.value(head.fields, b"expect") is not None and head.minor and not body.total_bytes:
            self._write(call, CONTINUE)
        pieces, size = [], 0
        while size <= most and (piece := await self._piece(call)):
            pieces.append(piece)
            size += len(piece)
        held = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        exchange.bytes_in = size
        rest = not body.at_eof()
        exchange.body_read = time.monotonic()
        if not looks:
            return Upload(held, head.length if rest and head.framing is Framing.LENGTH else None if rest else size, kept=not rest)
        return self._looked_into(call, path, held, rest, whole)

    def _looked_into(self, call: Call, path: bytes, held: bytes, rest: bool, whole: bool) -> Upload:
        head, exchange, inspector = call.head, call.exchange, call.policy.inspector
        assert head is not None
        if rest:
            members = Members()
            _feed(members, held)
            facts = inspector.facts(members.found)
            exchange.model, exchange.stream = facts.model, facts.stream
            return Upload(held, head.length if head.framing is Framing.LENGTH else None, kept=False, members=members)
        if not held:
            return Upload(held, 0)
        if not whole:
            exchange.model, exchange.stream = inspector.read(held)
            return Upload(held, len(held))
        (exchange.model, exchange.stream), held, usage_asked = inspector.rewrite(path, held)
        upload = Upload(held, len(held))
        upload.usage_asked = usage_asked
        return upload

    async def _piece(self, call: Call) -> bytes:
        """The next octets of the body; b"" at its end. Raises Refusal."""
        body, policy = call.request.body, call.policy
        if body.is_eof() and body.total_bytes == 0:
            return b""
        try:
            # what has arrived is taken without a timer
            piece = body.read_nowait() or await self._timed(
                call, body.readany(), policy.timeouts.request_body, "request_timeout", "the request body stalled (timeouts.request_body)"
            )
        except ConnectionResetError:
            raise asyncio.CancelledError from None
        if body.total_bytes > policy.request_body:
            raise self._too_large(policy)
        return piece

    async def _timed(self, call: Call, awaitable: Awaitable[T], seconds: float, code: str, message: str) -> T:
        """`awaitable`, within `seconds` and the exchange's total. Raises Refusal."""
        total = call.policy.timeouts.total
        left = seconds if total is None else min(seconds, call.exchange.accepted + total - time.monotonic())
        try:
            async with asyncio.timeout(left):
                return await awaitable
        except TimeoutError:
            if total is not None and left < seconds:
                raise _total_passed(total) from None
            raise Refusal(code, message) from None

    # QUEUE ------------------------------------------------------------------------------------------------------------

    async def _admit(self, call: Call) -> None:
        """Take a slot, after waiting for it where there is none. Raises Refusal."""
        admission, exchange = self.admission, call.exchange
        if not admission.enter():
            exchange.phase = Phase.QUEUE
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            ticket = admission.ticket(lambda: self._granted(call, turn))
            seconds = call.policy.timeouts.queue
            try:
                await self._timed(call, turn, seconds, "queue_timeout", f"no slot came free within {seconds:g} s (timeouts.queue)")
            finally:
                admission.leave(ticket)
        call.slot = True
        exchange.selected = time.monotonic()

    def _granted(self, call: Call, turn: asyncio.Future[None]) -> None:
        call.slot = True  # at once, so that it is given back also if the turn comes in the moment in which the client leaves
        if not turn.done():
            turn.set_result(None)

    # PICK, CONNECT, SEND, WAIT ----------------------------------------------------------------------------------------

    async def _attempts(self, call: Call, target: bytes, upload: Upload) -> ResponseHead:
        """One attempt, and others where that can harm nobody, until a backend's response head is here. Raises Refusal."""
        head, exchange = call.head, call.exchange
        assert head is not None
        self.retries.request()
        tried: list[Backend] = []
        stale = False
        while True:
            exchange.attempts += 1
            self._pick(call, tried)
            assert call.lease is not None
            try:
                return await self._attempt(call, target, upload, fresh=stale)
            except UpstreamFailed as failure:
                self._attempt_failed(call, failure)
                stale = failure.code == "stale_connection"
                if not stale:
                    tried.append(call.lease.backend)
                    if not self._another(call, tried):
                        raise
                if not self.retries.again(failure, head.method, exchange.attempts, body_kept=upload.kept):
                    raise
                self.observer.retried(exchange, failure.code)
                call.lease.release()
                call.lease = None

    def _another(self, call: Call, tried: list[Backend]) -> bool:
        pool, _ = self._backends(call)
        return any(b.routable and b not in tried for b in pool.backends)

    def _backends(self, call: Call) -> tuple[Pool, dict[str, ConnectionPool]]:
        if self.loopback is not None and call.exchange.path.startswith("/loadtest/"):
            return self.loopback
        return self.pool, self.connections

    def _pick(self, call: Call, tried: list[Backend]) -> None:
        pool, _ = self._backends(call)
        lease = pool.pick(time.monotonic(), tried)
        if lease is None:
            raise pool.nobody()
        call.lease = lease
        call.exchange.backend = lease.backend.name

    async def _attempt(self, call: Call, target: bytes, upload: Upload, *, fresh: bool) -> ResponseHead:
        head, exchange = call.head, call.exchange
        assert head is not None and call.lease is not None
        connections = self._backends(call)[1][call.lease.backend.name]
        exchange.phase, exchange.connect_began = Phase.CONNECT, time.monotonic()
        connection = None if fresh else connections.take()
        self.observer.connection(connections.origin.name, reused=connection is not None)
        if connection is None:
            seconds = call.policy.timeouts.connect
            connection = await self._connect(call, connections, seconds)
        call.connection = connection
        exchange.phase, exchange.sent = Phase.WAIT, time.monotonic()
        exchange.connected = exchange.sent
        origin = connections.origin
        octets = headers.upstream_head(
            head,
            target,
            host=origin.host_field,
            request_id=exchange.request_id.encode(),
            peer=call.request.client.peer if call.policy.forwarded else None,
            client_host=authority(head.target),
            length=upload.length,
            credential=origin.credential,
            websocket=headers.asks_for_websocket(head),
        )
        if not upload.kept:
            answer = connection.send(octets + _framed(upload, upload.held), head.method)
            call.upload = self._tasks.spawn(self._send_rest(call, connection, upload), "upload")
        else:
            answer = connection.send(octets + upload.held if upload.held else octets, head.method)
        if call.watch is None:
            call.watch = Watch(exchange, call.policy.timeouts, asyncio.get_running_loop(), lambda what: self._expired(call, what), call.policy.comment)
        response = await answer
        exchange.head_received = time.monotonic()
        return response

    async def _connect(self, call: Call, connections: ConnectionPool, seconds: float) -> Connection:
        name = connections.origin.name
        try:
            return await self._timed(
                call, connections.open(), seconds, "timeout_connect", f"the backend {name} took no connection within {seconds:g} s (timeouts.connect)"
            )
        except Refusal as refusal:
            if refusal.code == "timeout_connect":
                raise UpstreamFailed(refusal.code, refusal.message, unsent=True) from None
            raise

    async def _send_rest(self, call: Call, connection: Connection, upload: Upload) -> None:
        """Stream what is not held, at the pace of the slower side. Its failures reach the exchange as its own."""
        try:
            while piece := await self._piece(call):
                call.exchange.bytes_in += len(piece)
                if upload.members is not None:
                    # the last octets go out only once all is known to be fit: till then no engine can begin
                    _feed(upload.members, piece)
                    facts = call.policy.inspector.facts(upload.members.found)
                    call.exchange.model, call.exchange.stream = facts.model, facts.stream
                    if call.request.body.at_eof() and not upload.members.complete:
                        raise not_json("it ends before the object does")
                connection.write(_framed(upload, piece))
                await connection.drain()
            if upload.length is None:
                connection.write(LAST_CHUNK)
        except Refusal as refusal:
            if call.relay is not None:
                call.relay.fail(Ended(Outcome.REFUSED, refusal.message, code=refusal.code))
            else:
                connection.fail(refusal)

    def _attempt_failed(self, call: Call, failure: UpstreamFailed) -> None:
        """What one attempt's failure says of its backend. That a kept connection was stale says nothing."""
        assert call.lease is not None
        if failure.code != "stale_connection":
            call.lease.backend.breaker.failed(time.monotonic())
            self.observer.failed(call.exchange, failure.code)
        else:
            call.lease.backend.breaker.neither()
        if call.watch is not None:
            call.watch.stop()
            call.watch = None
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
            call.request.client.give_up_flushing(ended)
        elif call.connection is not None:
            if outcome is Outcome.TIMEOUT_TOTAL:
                assert timeouts.total is not None
                call.connection.fail(_total_passed(timeouts.total))
            else:
                message = f"the backend sent no response head within {timeouts.first_byte:g} s (timeouts.first_byte)"
                call.connection.fail(UpstreamFailed("timeout_first_byte", message))

    # COMMIT, STREAM ---------------------------------------------------------------------------------------------------

    def _commit(self, call: Call, response: ResponseHead) -> bool:
        """Write our head, and make the relay. Returns whether the client's connection can go on afterwards."""
        exchange, client, head, connection = call.exchange, call.request.client, call.head, call.connection
        assert head is not None and connection is not None and client.transport is not None
        keep_alive = headers.keeps_alive(head) and not client.reader.in_body and not self.draining
        framing = response.framing
        if framing is Framing.CHUNKED or framing is Framing.CLOSE:
            framing = Framing.CHUNKED if head.minor else Framing.CLOSE
            keep_alive = keep_alive and framing is Framing.CHUNKED
        meter = self._meter(call, response)
        edit = UsageStripper() if call.usage_asked and meter is not None and meter.streamed else None
        reader: ChunkedReader | LengthReader | CloseReader
        if response.framing is Framing.CHUNKED:
            reader = ChunkedReader()
        elif response.framing is Framing.CLOSE:
            reader = CloseReader()
        else:
            reader = LengthReader(response.length)
        exchange.status, exchange.committed, exchange.phase = response.status, True, Phase.FIRST_TOKEN
        relay = call.relay = Relay(exchange, client, connection, reader, framing, meter, self.observer, edit)
        exchange.meter = meter
        self._write(
            call,
            headers.client_head(
                response,
                request_id=exchange.request_id.encode(),
                date=http_date(),
                framing=framing,
                connection=None if keep_alive and head.minor else b"keep-alive" if keep_alive else b"close",
            ),
        )
        client.source = relay
        if call.watch is not None:
            call.watch.relaying(relay)
        pending = connection.pending
        connection.hand_over(relay)
        if pending:
            relay.data_received(pending)
        elif reader.done:
            relay.nothing_comes()
        if connection.lost:
            relay.already_ended()
        return keep_alive

    def _meter(self, call: Call, response: ResponseHead) -> Meter | None:
        """Who watches this body: nobody, unless it is a 2xx in a dialect that is known, and not coded."""
        if call.dialect is None or not 200 <= response.status < 300 or response.framing is Framing.NONE:
            return None
        kind = (headers.value(response.fields, b"content-type") or b"").partition(b";")[0].strip().lower()
        coding = headers.value(response.fields, b"content-encoding")
        if coding is not None and coding.lower() != b"identity":
            return None
        streamed = kind == b"text/event-stream" or (call.exchange.stream is True and kind != b"application/json")
        if not streamed and kind != b"application/json":
            return None
        return Meter(call.dialect, self._edges, streamed)

    async def _relay(self, call: Call) -> None:
        """Wait for the body's end, and for the client to take it. Raises Ended."""
        exchange, client, relay, connection = call.exchange, call.request.client, call.relay, call.connection
        assert isinstance(relay, Relay) and connection is not None
        await relay.done
        exchange.phase = Phase.DONE
        relay.let_go()
        self._keep_or_drop(call, connection)
        if client.buffered:
            relay.taken_at, relay.taken_left = time.monotonic(), client.outstanding
            await client.flushed()
        if client.transport is None:
            raise asyncio.CancelledError
        outcome = Outcome.COMPLETE
        if exchange.status is not None and exchange.status >= 400:
            outcome = Outcome.UPSTREAM_STATUS
        elif relay.meter is not None:
            outcome = relay.meter.verdict(True)
        exchange.end(outcome, time.monotonic())

    def _keep_or_drop(self, call: Call, connection: Connection) -> None:
        relay = call.relay
        assert isinstance(relay, Relay)
        sent = call.upload is None or call.upload.done()
        if sent and not connection.closes and not relay.reader.extra and type(relay.reader) is not CloseReader:
            connection.give_back()
        else:
            connection.drop()
        call.connection = None

    async def _tunnel(self, call: Call, response: ResponseHead) -> None:
        """The backend has agreed to speak WebSocket: from now on octets pass both ways as they come."""
        exchange, client, connection = call.exchange, call.request.client, call.connection
        assert connection is not None
        if call.head is None or not headers.asks_for_websocket(call.head):
            raise UpstreamFailed("upstream_malformed", "the backend switched protocols, which nobody had asked for")
        if call.watch is not None:
            call.watch.stop()
        exchange.status, exchange.committed, exchange.phase = 101, True, Phase.STREAM
        self._write(
            call,
            headers.client_head(
                response, request_id=exchange.request_id.encode(), date=http_date(), framing=Framing.NONE, connection=None, upgrade=True
            ),
        )
        tunnel = Tunnel(exchange, client, connection, self.observer, call.policy.timeouts)
        call.relay = tunnel
        await tunnel.run()
        exchange.end(Outcome.COMPLETE, time.monotonic())

    # how it ends ------------------------------------------------------------------------------------------------------

    async def _refuse(self, call: Call, refusal: Refusal) -> bool:
        """Answer with the refusal's status, in the caller's dialect. Returns whether the connection can go on."""
        exchange, client, head = call.exchange, call.request.client, call.head
        now = time.monotonic()
        if exchange.committed:  # by a fault of ours: nothing but the end is left
            exchange.end(Outcome.INTERNAL, now, refusal.code)
            client.cut(reset=True)
            return False
        ruling = refusal.ruling
        exchange.status = ruling.status
        exchange.end(refusal.outcome or ruling.outcome, now, refusal.code)
        if client.transport is None:
            return False
        dialect = call.dialect or DEFAULT
        body = dialect.error_body(refusal.code, refusal.message, ruling.type, refusal.param)
        keep_alive = head is not None and headers.keeps_alive(head) and not client.reader.in_body and not self.draining and ruling.status != 400
        if head is not None and head.framing is not Framing.NONE and headers.value(head.fields, b"expect") is not None and client.reader.in_body:
            keep_alive = False
        octets = headers.refusal_head(
            ruling.status,
            http.HTTPStatus(ruling.status).phrase.encode(),
            code=refusal.code.encode(),
            request_id=exchange.request_id.encode(),
            date=http_date(),
            length=len(body),
            retry_after=refusal.retry_after,
            allow=b", ".join(sorted(METHODS)) if ruling.status == 405 else b"",
            connection=(None if head is not None and head.minor else b"keep-alive") if keep_alive else b"close",
        )
        self._write(call, octets if head is not None and head.method == b"HEAD" else octets + body)
        return keep_alive

    async def _answer(self, call: Call, answer: Local) -> bool:
        """Answer with a page of the gateway's own."""
        exchange, head = call.exchange, call.head
        assert head is not None
        keep_alive = headers.keeps_alive(head) and not self.draining
        exchange.status = answer.status
        lines = [
            b"HTTP/1.1 %d OK" % answer.status,
            b"Content-Type: application/json",
            b"Content-Length: %d" % len(answer.body),
            b"Date: " + http_date(),
            b"X-Request-Id: " + exchange.request_id.encode(),
        ]
        if not keep_alive or not head.minor:
            lines.append(b"Connection: keep-alive" if keep_alive else b"Connection: close")
        self._write(call, b"\r\n".join(lines) + b"\r\n\r\n" + answer.body)
        exchange.end(Outcome.COMPLETE, time.monotonic())
        return keep_alive

    def _cut(self, call: Call, ended: Ended) -> None:
        """The response had begun and will not be whole: end the client's connection so that it can tell."""
        exchange, client, relay = call.exchange, call.request.client, call.relay
        exchange.end(ended.outcome, time.monotonic(), ended.code)
        if client.transport is None:
            return
        stalled = ended.outcome is Outcome.CLIENT_STALLED
        if isinstance(relay, Relay):
            if call.policy.error_events and relay.meter is not None and relay.meter.streamed and not relay.paused and not stalled:
                dialect = call.dialect or DEFAULT
                relay.insert(dialect.error_event(ended.code or ended.outcome.value, _told(ended)))
            client.cut(reset=stalled or relay.framing is Framing.CLOSE)
        else:
            client.cut(reset=stalled)

    async def _interrupted(self, call: Call, reason: Ended) -> bool:
        """Somebody ended the exchange before its response had begun."""
        if call.exchange.committed:
            self._cut(call, reason)
            return False
        code = "draining" if reason.outcome is Outcome.DRAINING else "overloaded"
        return await self._refuse(call, Refusal(code, reason.args[0], outcome=reason.outcome))

    def _gone(self, call: Call) -> None:
        """The client has left: the engine is told at once, whatever the coroutine is waiting for."""
        exchange, client = call.exchange, call.request.client
        gone = client.gone_at or time.monotonic()
        if call.interrupted is None:
            exchange.end(Outcome.CLIENT_GONE, gone)
        if call.upload is not None:
            call.upload.cancel()
        if call.connection is not None:
            call.connection.drop()
            self.observer.aborted(exchange, time.monotonic() - gone)

    def _close(self, call: Call) -> None:
        """Give everything back, synchronously and once; then tell whoever observes."""
        exchange, relay = call.exchange, call.relay
        del self.live[id(call)]
        call.request.client.on_gone = None
        if call.watch is not None:
            call.watch.stop()
        if call.upload is not None:
            call.upload.cancel()
        if call.connection is not None:
            call.connection.drop()
            call.connection = None
        if relay is not None:
            relay.close()
            exchange.bytes_out = relay.body_octets
        if exchange.outcome is None:
            exchange.end(Outcome.INTERNAL, time.monotonic())
        if call.lease is not None:
            self._judge(call.lease.backend, exchange)
            call.lease.release()
            call.lease = None
        if call.slot:
            call.slot = False
            self.admission.release()
        self.observer.ended(exchange)

    def _judge(self, backend: Backend, exchange: Exchange) -> None:
        """What the whole exchange says of its backend. Attempts that failed have been judged before."""
        if not exchange.committed:
            backend.breaker.neither()
        elif exchange.outcome in BACKEND_FAILURES:
            backend.breaker.failed(time.monotonic())
            assert exchange.outcome is not None
            self.observer.failed(exchange, exchange.outcome.value)
        elif exchange.outcome in (Outcome.CLIENT_GONE, Outcome.CLIENT_STALLED, Outcome.DRAINING):
            backend.breaker.neither()
        else:
            backend.breaker.succeeded()

    # the gateway's own page -------------------------------------------------------------------------------------------

    async def _health(self, request: Request) -> Answered:
        """Constant work, no backend asked, no exchange counted: load balancers ask this every second."""
        head, client = request.head, request.client
        assert head is not None
        well = self.pool.routable and not self.draining
        keep_alive = headers.keeps_alive(head) and not client.reader.in_body and not self.draining
        connection = b"" if keep_alive and head.minor else b"Connection: keep-alive\r\n" if keep_alive else b"Connection: close\r\n"
        status = b"200 OK" if well else b"503 Service Unavailable"
        answer = b"HTTP/1.1 %b\r\nContent-Length: 0\r\nDate: %b\r\nX-Request-Id: %b\r\n%b\r\n"
        if client.transport is not None:
            client.transport.write(answer % (status, http_date(), self._request_id(head), connection))
        if keep_alive:
            client.answered()
        return Answered(keep_alive)

    # from outside -----------------------------------------------------------------------------------------------------

    def exchanges(self) -> Iterable[Exchange]:
        for call in self.live.values():
            if call.relay is not None:
                call.exchange.bytes_out = call.relay.body_octets
        return [call.exchange for call in self.live.values()]

    def interrupt(self, reason: Ended, request_id: str | None = None) -> int:
        """End all exchanges, or those of one id. Returns how many."""
        calls = [c for c in self.live.values() if request_id is None or c.exchange.request_id == request_id]
        for call in calls:
            call.interrupt(reason)
        return len(calls)

    async def stop(self) -> None:
        await self._tasks.stop()

    def _write(self, call: Call, octets: bytes) -> None:
        transport = call.request.client.transport
        if transport is not None:
            transport.write(octets)


def _is_json(head: RequestHead, path: bytes) -> bool:
    """Whether an engine would read this body as JSON."""
    kind = (headers.value(head.fields, b"content-type") or b"").partition(b";")[0].strip().lower()
    if path in JSON_PATHS:
        return not kind.startswith(b"multipart/")
    return kind == b"application/json" or kind.endswith(b"+json")


def _feed(members: Members, piece: bytes) -> None:
    try:
        members.feed(piece)
    except NotAnObject as error:
        raise not_json(str(error)) from None


def _framed(upload: Upload, piece: bytes) -> bytes:
    return piece if upload.length is not None or not piece else frame(piece)


def _total_passed(seconds: float) -> Refusal:
    return Refusal("timeout_first_byte", f"the exchange took longer than {seconds:g} s (timeouts.total)", outcome=Outcome.TIMEOUT_TOTAL)


def _told(ended: Ended) -> str:
    return ended.args[0] if ended.args else ended.outcome.value
