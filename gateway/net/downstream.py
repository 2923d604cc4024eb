"""One client's connection: aiohttp's server protocol, mended at its edge.

aiohttp keeps the connection's life (one task a connection, one handler a request, keep-alive, cancellation when the client
leaves). What a client sends is read by `core.framing.RequestReader` in place of aiohttp's own parser, so that one strict
reading of each message is both what is checked and what is passed on, and so that

- a request is handed on only when the one before it has been answered: what is pipelined waits in a bounded buffer;
- a malformed body ends its exchange at once, also when the handler is long under way;
- a head that never ends, or never comes, has a deadline;
- an early refusal reaches a client that is still sending (`linger`).

Writing needs no coroutine: the relay writes to `transport`, and is held back by `pause_writing` and `resume_writing`.
"""

from __future__ import annotations

import asyncio
import logging
import math
import resource
import socket
import time
from typing import TYPE_CHECKING, NamedTuple, Protocol

from aiohttp import web
from aiohttp.base_protocol import BaseProtocol
from aiohttp.streams import StreamReader
from aiohttp.web_protocol import RequestHandler

from gateway.core.framing import RequestReader
from gateway.core.head import Malformed, RequestHead
from gateway.core.headers import Peer, forwarding
from gateway.errors import Refusal
from gateway.net import sockets
from gateway.net.deadline import put_off

if TYPE_CHECKING:
    from gateway.net.call import Call

log = logging.getLogger(__name__)

IN_A_ROW = 16  # requests of one client that are served before others have a turn
DESCRIPTORS_KEPT = 32  # for listeners, probes, the admin listener and its clients
DESCRIPTORS_LAST = 8  # of them no client has for longer than it takes to close it: or nobody could ask whether we live
TELL_AGAIN = 60.0  # seconds between lines of the log about them
AHEAD_MOST = 65536  # octets that a client may send ahead of their turn before it is no longer read
BODY_BUFFER = 65536  # octets of a body that wait for their reader before the client is no longer read
LINGER_MOST = 10.0  # seconds; interface.md section 4
LINGER_QUIET = 2.0  # seconds without an octet after which nobody is sending any more
CUT_MOST = 10.0  # seconds that a client whose response was cut may take for what is still buffered
LEFT_CHECK = 0.05  # seconds between looks at clients that are not being read


class ClientSettings(NamedTuple):
    request_head: int = 65536
    header_timeout: float = 30.0
    keepalive: float = 75.0
    write_buffer: int = 65536


class Held(Protocol):
    """Whoever feeds this client, and can be held back."""

    def pause(self) -> None: ...

    def resume(self) -> None: ...


class Tunnel(Held, Protocol):
    """Whoever takes a client's octets once they are not HTTP any more."""

    def from_client(self, data: bytes) -> None: ...


class Request:
    """One request as it is handed to the handler: a head, or the refusal of what was no head."""

    __slots__ = ("accepted", "body", "client", "head", "refusal", "whole")

    def __init__(
        self,
        head: RequestHead | None,
        refusal: Refusal | None,
        client: Downstream,
        body: StreamReader | None,
        whole: bytes,
    ):
        self.head, self.refusal, self.client = head, refusal, client
        self.body = body  # that is still coming; None where `whole` is all of it
        self.whole = whole
        self.accepted = time.monotonic()

    def _cancel(self, exc: BaseException) -> None:
        """aiohttp's RequestHandler: the client has left."""
        if self.body is not None:
            self.body.set_exception(ConnectionResetError("the client has left"))


class Handler(Protocol):
    """Whoever serves requests (net.handler.Gateway)."""

    async def handle(self, request: Request) -> bool:
        """Serve one; returns whether the client's connection goes on afterwards."""

    def gone(self, call: Call) -> None:
        """The client of an exchange under way has left. Called synchronously."""


class Server(web.Server):
    """aiohttp's low-level server, with `Downstream` as its protocol."""

    def __init__(self, handler: Handler, settings: ClientSettings, scheme: bytes):
        super().__init__(handler.handle, handler_cancellation=True)  # type: ignore[arg-type]  # not aiohttp's request and response
        self.settings, self.scheme, self.handle, self.gone = settings, scheme, handler.handle, handler.gone
        self.clients: set[Downstream] = set()
        self.crowded = False  # there are more clients than there may soon be descriptors for
        # each may come to need a second descriptor, for its backend
        descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._most = max((descriptors - DESCRIPTORS_KEPT) // 2, 1)
        self.last = descriptors - DESCRIPTORS_LAST
        self._told = -math.inf

    def came(self, client: Downstream) -> None:
        self.clients.add(client)
        if len(self.clients) > self._most:
            self.crowded = True
            self._tell()

    def _tell(self) -> None:
        """Those whom the kernel turns away for lack of a descriptor are in no other line, and in no figure."""
        now = time.monotonic()
        if now - self._told >= TELL_AGAIN:
            self._told = now
            most = "more than %d clients are connected: there may be no descriptors for others (LimitNOFILE, ulimit -n)"
            log.warning(most, self._most)

    def left(self, client: Downstream) -> None:
        self.clients.discard(client)
        self.crowded = len(self.clients) > self._most

    def __call__(self) -> RequestHandler:
        return Downstream(self, self._loop)


class _Tuned(BaseProtocol):
    """aiohttp's protocol, but that its socket options come from the listener (`sockets.tune`)."""

    __slots__ = ()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]


class Downstream(RequestHandler, _Tuned):
    __slots__ = (
        "_body",
        "_discard",
        "_discarded_at",
        "_flushed",
        "_header_timer",
        "_reading_held",
        "_settings",
        "_taken_at",
        "_taken_left",
        "_watch_left",
        "_who",
        "address",
        "call",
        "gone_at",
        "opened",
        "peer",
        "reader",
        "served",
        "server",
        "sock",
        "source",
        "tunnel",
    )

    def __init__(self, server: Server, loop: asyncio.AbstractEventLoop):
        settings = server.settings
        super().__init__(
            server,
            loop=loop,
            keepalive_timeout=settings.keepalive,
            access_log=None,  # type: ignore[arg-type]  # ours is another one
            tcp_keepalive=False,
            lingering_time=0,
        )
        self._settings, self.server = settings, server
        self.reader = RequestReader(settings.request_head)
        self.peer = Peer(b"unknown", server.scheme)
        self.address = "unknown"
        self.sock: socket.socket | None = None
        self.source: Held | None = None  # what is being written to this client, to be held back when it is slow
        self.tunnel: Tunnel | None = None  # set once the connection has become a tunnel
        self.call: Call | None = None  # the exchange under way
        self.gone_at: float | None = None
        self._body: StreamReader | None = None  # of the request in hand, while it is still coming
        self._discard = False  # what comes is of no use any more
        self._discarded_at = 0.0
        self._flushed: asyncio.Future[None] | None = None
        self.opened = time.monotonic()
        self.served = False  # a request has come on it
        self._header_timer: asyncio.TimerHandle | None = None
        self._reading_held = False
        self._watch_left: asyncio.TimerHandle | None = None
        self._taken_at, self._taken_left = 0.0, 0
        self._who: tuple[bytes, bytes] = (b"", b"")  # a Host, and the forwarding fields that go with it

    # the connection's life --------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.server.came(self)
        self.sock = transport.get_extra_info("socket")
        high = self._settings.write_buffer
        transport.set_write_buffer_limits(high=high, low=high // 4)  # type: ignore[attr-defined]
        name = transport.get_extra_info("peername")
        if isinstance(name, tuple):
            self.address = name[0]
            self.peer = Peer(self.address.encode(), self.server.scheme)
        self._arm_header_timer()
        if self.server.crowded and self.sock is not None and self.sock.fileno() >= self.server.last:
            transport.abort()  # type: ignore[attr-defined]  # the lowest free descriptor is taken: hardly any is left

    def connection_lost(self, exc: BaseException | None) -> None:
        self.gone_at = time.monotonic()
        self.server.left(self)
        self._disarm_header_timer()
        if self._watch_left is not None:
            self._watch_left.cancel()
            self._watch_left = None
        if self.call is not None:
            self.server.gone(self.call)
        if self._flushed is not None and not self._flushed.done():
            self._flushed.set_result(None)
        super().connection_lost(exc)

    def eof_received(self) -> None:
        """A client that closes its sending side has left, as for vLLM: it must not wait for what is still buffered."""
        if (self.reader.busy or self.tunnel is not None) and not self._discard and self.transport is not None:
            self.transport.abort()

    # what the client sends --------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        if self.tunnel is not None:
            self.tunnel.from_client(data)
        elif self._discard or self._force_close or self._close:
            self._discarded_at = time.monotonic()
        elif not self.reader.busy:
            self._head(data)
        elif self.reader.in_body:
            self._more_body(data)
        else:
            self._keep(data)

    def _keep(self, data: bytes) -> None:
        self.reader.keep(data)
        if self.reader.ahead > AHEAD_MOST and not self._reading_held:
            self.hold_reading()

    def _head(self, data: bytes = b"") -> None:
        try:
            found = self.reader.head(data)
        except Refusal as refusal:
            self._disarm_header_timer()
            self._discard = True
            self._hand_on(Request(None, refusal, self, None, b""))
            return
        if found is None:
            if self._header_timer is None and self.reader.begun:
                self._arm_header_timer()
            return
        if self._header_timer is not None:
            self._disarm_header_timer()
        whole = self.reader.whole_body() or b""
        if self.reader.in_body:
            self._body = StreamReader(self, BODY_BUFFER, loop=self._loop)
        self._hand_on(Request(found, None, self, self._body, whole))
        if self.reader.in_body and self.reader.held:
            self._more_body(b"")

    def _hand_on(self, request: Request) -> None:
        self.served = True
        self._messages.append(request)  # type: ignore[arg-type]  # the deque is aiohttp's, what is in it ours
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    async def start(self) -> None:
        """aiohttp's loop over a connection's requests, without a task, a writer and a response object for each."""
        loop, handle = self._loop, self.server.handle
        keep_alive, served = True, 0
        while keep_alive and not self._force_close and not self._close:
            if not self._messages:
                self._waiter = loop.create_future()
                try:
                    await self._waiter
                finally:
                    self._waiter = None
            elif (served := served + 1) % IN_A_ROW == 0:
                await asyncio.sleep(0)  # a client that sends ahead is not to have the loop for itself
            request: Request = self._messages.popleft()  # type: ignore[assignment]
            self._current_request = request  # type: ignore[assignment]
            try:
                keep_alive = await handle(request)
            except asyncio.CancelledError:
                self.force_close()
                raise
            except Exception:  # the handler answers for its own faults; this is one of ours in doing so
                log.exception("a connection is given up by a fault of ours")
                self.force_close()
                return
            finally:
                self._current_request = None
            del request
            self._next_keepalive_close_time = loop.time() + self._settings.keepalive
            if self._keepalive_handle is None and keep_alive:
                self._keepalive_handle = loop.call_at(self._next_keepalive_close_time, self._process_keepalive)
        self._task_handler = None
        if self.transport is not None:
            self.transport.close()

    def _more_body(self, data: bytes) -> None:
        body = self._body
        assert body is not None
        try:
            pieces, complete = self.reader.body(data)
        except Malformed as error:
            self._discard, self._body = True, None
            body.set_exception(Refusal("bad_request", f"the request body's chunks are malformed: {error}"))
            return
        for piece in pieces:
            body.feed_data(piece)
        if complete:
            self._body = None
            body.feed_eof()
            if self.reader.ahead > AHEAD_MOST and not self._reading_held:
                self.hold_reading()

    def answered(self) -> None:
        """The request in hand has been answered, and the connection goes on: take up what was sent ahead."""
        self.source = None
        self.reader.next_request()
        if self.reader.held:
            self._head()
        if self._reading_held and self.reader.ahead <= AHEAD_MOST:
            self.release_reading()

    # reading held back ------------------------------------------------------------------------------------------------

    def pause_reading(self) -> None:
        """aiohttp's StreamReader: the body's reader is slower than the client."""
        self._reading_paused = True
        self._pause_transport_reading()
        self._watch()

    def resume_reading(self, resume_parser: bool = True) -> None:
        self._reading_paused = False
        if not self._reading_held:
            self._resume_transport_reading()

    def hold_reading(self) -> None:
        self._reading_held = True
        self._pause_transport_reading()
        self._watch()

    def release_reading(self) -> None:
        self._reading_held = False
        if not self._reading_paused:
            self._resume_transport_reading()

    def _watch(self) -> None:
        """A client that is not read, or not written to, cannot always be seen leaving: ask the kernel now and then."""
        if self._watch_left is None and self.sock is not None:
            self._watch_left = self._loop.call_later(LEFT_CHECK, self._look)

    def _look(self) -> None:
        self._watch_left = None
        if self.transport is None or not (self._reading_held or self._reading_paused or self._paused or self._flushed):
            return
        if self.sock is not None and sockets.peer_has_left(self.sock):
            self.transport.abort()
        else:
            self._watch()

    # deadlines of the connection itself -------------------------------------------------------------------------------

    def _arm_header_timer(self) -> None:
        if self._settings.header_timeout > 0:
            seconds = self._settings.header_timeout
            self._header_timer = self._loop.call_later(seconds, self._header_late, time.monotonic() + seconds)

    def _disarm_header_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _header_late(self, due: float, times: int = 0) -> None:
        self._header_timer, seconds = None, self._settings.header_timeout
        more = put_off(due, seconds, times)
        if more:
            self._header_timer = self._loop.call_later(more, self._header_late, time.monotonic() + more, times + 1)
            return
        if self.reader.begun:
            self._discard = True
            late = Refusal(
                "request_timeout", f"the request head did not come whole within {seconds:g} s (timeouts.request_header)"
            )
            self._hand_on(Request(None, late, self, None, b""))
        elif not self.reader.busy:
            self.force_close()

    def _process_keepalive(self) -> None:
        """aiohttp's timer for idle connections: one on which the next request has begun to arrive is not idle."""
        if self.reader.begun:
            self._keepalive_handle = None
            return
        super()._process_keepalive()

    def forwarding(self, host: bytes) -> bytes:
        """The lines that tell a backend who this client is, and which host it asked for."""
        if self._who[0] != host or not self._who[1]:
            self._who = host, forwarding(self.peer, host)
        return self._who[1]

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        return self._loop

    @property
    def task(self) -> asyncio.Task[None] | None:
        """What serves this connection."""
        return self._task_handler

    @property
    def idle(self) -> bool:
        """No request in hand, and none begun."""
        return not self.reader.busy and not self.reader.begun and not self._messages and self.tunnel is None

    # a tunnel ---------------------------------------------------------------------------------------------------------

    @property
    def buffer_limit(self) -> int:
        return self._settings.write_buffer

    def become_tunnel(self, tunnel: Tunnel) -> None:
        """From now on what the client sends is not HTTP any more."""
        self.tunnel = self.source = tunnel
        ahead = self.reader.take()
        self.release_reading()
        if ahead:
            tunnel.from_client(ahead)

    def end_tunnel(self) -> None:
        self.source = None
        self._discard = True

    # what the client gets ---------------------------------------------------------------------------------------------

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch()  # over TLS, an end that comes while writing is blocked is not seen otherwise
        if self.source is not None:
            self.source.pause()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._flushed is not None and not self._flushed.done():
            self._flushed.set_result(None)
        if self.source is not None:
            self.source.resume()

    @property
    def keeps_up(self) -> bool:
        """It has taken most of the answers that it was given, and its connection goes on."""
        transport = self.transport
        return (
            transport is not None
            and transport.get_write_buffer_size() <= self._settings.write_buffer
            and not transport.is_closing()
        )

    @property
    def buffered(self) -> int:
        """Octets held here for the client."""
        return self.transport.get_write_buffer_size() if self.transport is not None else 0

    @property
    def outstanding(self) -> int:
        """Octets handed over that the client's kernel has not taken: it shrinks if and only if the client takes some."""
        if self.transport is None or self.sock is None:
            return 0
        return self.transport.get_write_buffer_size() + sockets.untaken(self.sock)

    def watch_taking(self, now: float) -> None:
        """From now on it is of interest whether it takes anything."""
        self._taken_at, self._taken_left = now, self.outstanding

    def taken_at(self, now: float) -> float:
        """When it last took anything, as far as can be told at `now`."""
        left = self.outstanding
        if left != self._taken_left:
            self._taken_at, self._taken_left = now, left
        return self._taken_at

    async def flushed(self) -> None:
        """Wait until all that was written has been taken by the kernel. Returns also when the client has left."""
        transport = self.transport
        if transport is None or not transport.get_write_buffer_size():
            return
        high = self._settings.write_buffer
        self._flushed = self._loop.create_future()
        self._watch()
        try:
            transport.set_write_buffer_limits(high=0)
            while transport.get_write_buffer_size() and self.transport is not None:
                if self._flushed.done():
                    self._flushed = self._loop.create_future()
                await self._flushed
        finally:
            self._flushed = None
            if self.transport is not None:
                transport.set_write_buffer_limits(high=high, low=high // 4)

    def give_up_flushing(self, failure: BaseException) -> None:
        if self._flushed is not None and not self._flushed.done():
            self._flushed.set_exception(failure)

    async def linger(self) -> None:
        """After an early refusal: go on taking what the client sends, or the kernel would answer it with a reset that
        destroys the refusal on its way (RFC 9112 section 9.6)."""
        transport = self.transport
        if transport is None:
            return
        self._discard, self._body = True, None
        if self._reading_held:
            self.release_reading()
        if self._reading_paused:
            self.resume_reading()
        if transport.can_write_eof():
            transport.write_eof()
        began = self._discarded_at = time.monotonic()
        while self.transport is not None and time.monotonic() - began < LINGER_MOST:
            await asyncio.sleep(0.1)
            if time.monotonic() - self._discarded_at > LINGER_QUIET:
                break

    def cut(self, *, reset: bool) -> None:
        """End the connection so that the client can tell that its message is not complete. `reset`: where the end of the
        connection would be the proper end of the message."""
        transport = self.transport
        if transport is None:
            return
        if reset:
            if self.sock is not None:
                sockets.reset_on_close(self.sock)
            transport.abort()
        else:
            transport.close()
            if transport.get_write_buffer_size():
                self._loop.call_later(CUT_MOST, self._cut_off)

    def _cut_off(self) -> None:
        """It has had its time to take what was buffered; if it has, asyncio's transport bears no second end."""
        if self.transport is not None:
            self.transport.abort()
