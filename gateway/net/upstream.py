"""Connections to backends: opening them, keeping them for reuse, and the wait for a response head.

A `Connection` is an asyncio protocol that serves one request at a time. While it waits for the response head it parses
it; from then on all that comes is told to whoever relays the body (`hand_over`), until it gives the connection back
(`give_back`) or drops it. A connection is used again only when it is provably clean: the last message complete both
ways, no octet behind it, not paused, not past its age, and quiet at the very moment of its reuse.
"""

from __future__ import annotations

import asyncio
import errno
import functools
import logging
import socket
import ssl
import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

from gateway.core.head import Malformed, ResponseHead, parse_response
from gateway.core.headers import keeps_alive
from gateway.errors import Refusal, UpstreamFailed
from gateway.net import sockets, tls
from gateway.net.acks import Acks, Manner
from gateway.net.lane import Lane
from gateway.net.names import Addresses, Name
from gateway.net.promise import Promise

log = logging.getLogger(__name__)

HEAD_MOST = 65536  # octets of a response head; interface.md section 4
Awaited = asyncio.Future[ResponseHead] | Promise[ResponseHead]
PENDING_MOST = 65536  # octets of the body that are taken in before somebody relays them
# What one read of a flood can bring at most, and the kernel hide at most; Linux doubles it for its own book-keeping
RECEIVE_BUFFER = 32768
NEXT_ADDRESS = 1.0  # seconds in which an address is to take a connection where there is another one
LARGE = 65536  # octets of a request that may not fit into what the kernels hold


class Origin(NamedTuple):
    """Where a backend is, and how it is spoken to. Connections are shared only within one origin."""

    name: str
    host: str  # where to connect: a name, an IP address, or a unix socket's path
    port: int | None  # None: a unix socket
    tls: ssl.SSLContext | None
    host_field: bytes
    credential: bytes | None = None
    server_name: str | None = None  # whose certificate is expected; None: host's


class PoolSettings(NamedTuple):
    idle: float = 4.0
    max_idle: int = 64
    max_age: float = 300.0


class Receiver(Protocol):
    """Whoever relays what follows a response head."""

    def received(self, data: bytes, now: float) -> None:
        """Octets, and when they were read."""

    def connection_lost(self, exc: Exception | None) -> None: ...

    def settle(self) -> None:
        """Do what was put off."""

    def pause_writing(self) -> None: ...

    def resume_writing(self) -> None: ...


class Connection(Lane):
    def __init__(self, pool: ConnectionPool, loop: asyncio.AbstractEventLoop):
        super().__init__()
        self.pool, self._loop = pool, loop
        self.transport: asyncio.Transport = None  # type: ignore[assignment]  # set by connection_made, before any use
        self._sock: socket.socket | None = None
        self._quiet: Callable[[], bool] | None = None
        self._left: Callable[[], bytes] | None = None
        self._acks: Acks | None = None
        self.opened = time.monotonic()
        self.address: object = None  # where it leads
        self.idle_since = 0.0
        self.uses = 0
        self.lost = False
        # of the request under way
        self._method = b""
        self._head: Awaited | None = None
        self._received = b""
        self._answered = False  # some octet has come since the request was sent
        self._sent = 0  # octets of it, where that is all
        self._unseen = False  # the backend ended the connection before an octet of it had come there
        self._whole = True  # all of the request has been sent, and the backend has not said that it reads it
        self.pending = b""  # of the body, until somebody relays it
        self.closes = False  # the backend means to end the connection behind this response
        self.ended_well = False  # the peer's end came as an end, not as a reset (while the body was pending)
        self._reading_paused = False
        self._writing_paused = False
        self._drained: asyncio.Future[None] | None = None
        # The transport's protocol stays this one: uvloop would stop and start reading for another, four system calls.
        self._receiver: Receiver | None = None

    # asyncio's side ---------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]

    def unusual(self, data: bytes, now: float) -> None:
        if self._receiver is not None:
            self._receiver.received(data, now)
        elif self._head is None:  # idle: there is no request that this could answer
            self.drop()
        elif self._head.done():
            self.pending += data
            self._hold_back()
        else:
            self._head_octets(data)

    def settle(self) -> None:
        assert self._receiver is not None
        self._receiver.settle()

    def open_lane(self, end: bytes, pass_on: Callable[[bytes], None]) -> None:
        super().open_lane(end, pass_on)
        if self._acks is not None:
            self._acks.begin(time.monotonic())

    def take_passed(self) -> tuple[list[bytes], list[float]]:
        texts, times = super().take_passed()
        if self._acks is not None:
            self._acks.came(len(times), times[-1])
        return texts, times

    def joined(self, events: int, now: float) -> None:
        """Several events of an open lane came in one read."""
        if self._acks is not None:
            self._acks.came(events, now, joined=True)

    def _head_octets(self, data: bytes) -> None:
        self._answered = True
        received = self._received + data if self._received else data
        while True:
            end = received.find(b"\r\n\r\n", max(len(self._received) - 3, 0))
            if end < 0 or end + 4 > HEAD_MOST:
                self._received = received
                if len(received) > HEAD_MOST:
                    self._fail(self._broke("upstream_malformed", f"sent a response head of more than {HEAD_MOST} octets"))
                elif not b"HTTP/1.".startswith(received[:7]) or received.count(b"\n") != received.count(b"\r\n"):
                    self._fail(self._broke("upstream_malformed", "sent what is no HTTP/1.1"))
                return
            try:
                head = parse_response(received[: end + 4], self._method)
            except Malformed as error:
                self._fail(self._broke("upstream_malformed", f"sent a malformed response head: {error}"))
                return
            received, self._received = received[end + 4 :], b""
            if head.status == 408 and self.uses > 1 and self._whole and not keeps_alive(head):
                self._fail(self._broke("stale_connection", "ended a kept connection with 408", unsent=True))
                return
            if head.status >= 200 or head.status == 101:
                self.pending, self.closes = received, not keeps_alive(head)
                assert self._head is not None
                self._head.set_result(head)
                return
            # an interim answer: dropped, which RFC 9110 section 15.2 leaves to a gateway; the final one is still to come
            self._whole = False
            if not received:
                return

    def eof_received(self) -> None:
        self.ended_well = True
        self._unseen = self.uses > 1 and self._whole and self._acks is not None and self._left is not None and self._is_unseen()
        if self.transport.get_write_buffer_size():  # whoever has ended takes no more of it: not to be waited for
            self.transport.abort()

    def _is_unseen(self) -> bool:
        """Nothing of the request has been acknowledged, not even by the end that has come: the backend's kernel did not have it
        when the backend closed the connection, and nobody reads what comes to a closed one (RFC 9112 section 9.6)."""
        assert self._sock is not None
        return sockets.untaken(self._sock) + self.transport.get_write_buffer_size() >= self._sent

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True
        self.pool.lost(self)
        if exc is not None and self._left is not None and self._head is not None:
            data = self._left()  # a write failed: an answer that had come before it is an answer
            if data:
                self.unusual(data, time.monotonic())
        if self._head is not None and not self._head.done():
            if self.uses > 1 and not self._answered:
                what = "closed a kept connection before it answered"
                failure = self._broke("stale_connection", what, unsent=self._unseen)
            else:
                failure = self._broke("upstream_reset", "closed the connection before it answered")
            self._head.set_exception(failure)
        if self._drained is not None and not self._drained.done():
            self._drained.set_result(None)
        if self._receiver is not None:
            receiver, self._receiver = self._receiver, None
            receiver.connection_lost(exc)

    def pause_writing(self) -> None:
        self._writing_paused = True
        if self._receiver is not None:
            self._receiver.pause_writing()

    def resume_writing(self) -> None:
        self._writing_paused = False
        if self._receiver is not None:
            self._receiver.resume_writing()
        if self._drained is not None and not self._drained.done():
            self._drained.set_result(None)

    def opened_on(self, sock: socket.socket, quiet: Callable[[], bool], left: Callable[[], bytes] | None) -> None:
        self._sock, self._quiet, self._left = sock, quiet, left
        if self.pool.origin.port is not None:  # TCP
            self._acks = Acks(self.pool.acks, sock)

    def has_unsent(self, octets: int) -> bool:
        """Whether some of a request of so many octets still stands before the backend."""
        if self.transport.get_write_buffer_size():
            return True
        return octets > LARGE and self._sock is not None and sockets.unsent(self._sock) > 0

    @property
    def has_come(self) -> bool:
        """The response's head has come, or it is known that none will."""
        return self._head is not None and self._head.done()

    @property
    def quiet(self) -> bool:
        """Nothing has arrived on it just now, not even its end."""
        return self._quiet is not None and self._quiet()

    # the exchange's side ----------------------------------------------------------------------------------------------

    def send(self, octets: bytes, method: bytes, *, whole: bool = True) -> asyncio.Future[ResponseHead]:
        """Write a request's head, and what there is of its body. The future is the response's head, or UpstreamFailed.

        `whole`: that is all. Then 408 on a kept connection is no answer to it: the backend had waited long enough for a
        request, and this one has crossed its word on the way (RFC 9110 section 15.5.9). To half a body it would be one.
        """
        head = self._loop.create_future()
        self.send_for(head, octets, method, whole=whole)
        return head

    def send_for(self, head: Awaited, octets: bytes, method: bytes, *, whole: bool = True) -> None:
        """The same, where whoever asks has made what is to be told of the answer."""
        self.uses += 1
        self._method, self._received, self.pending, self.ended_well = method, b"", b"", False
        self._answered, self._unseen, self._sent, self._whole = False, False, len(octets), whole
        self._head = head
        self.transport.write(octets)

    def write(self, octets: bytes) -> None:
        if not self.lost:
            self.transport.write(octets)

    async def drain(self) -> None:
        """Wait until the backend takes more of the upload. Returns also when the connection is lost."""
        while self._writing_paused and not self.lost:
            self._drained = self._loop.create_future()
            await self._drained

    def finish(self) -> bool:
        """End our side alone, which tells an engine to stop as well as `drop` does: what it has written by then still comes.
        Returns whether anything can come; where nothing can, the connection is dropped."""
        if self.lost or self.transport.get_write_buffer_size() or not self.transport.can_write_eof():
            self.drop()
            return False
        self.transport.write_eof()
        return True

    def fail(self, failure: Refusal) -> None:
        """Give up waiting for the head, for a reason of ours."""
        self._fail(failure)

    def give_up_vanished(self) -> None:
        """Give up waiting for the head where the request does not even arrive: the backend's host is gone, or the way to it."""
        if self._acks is not None and self._sock is not None and sockets.unheard(self._sock) >= sockets.VANISHED:
            self._fail(self._broke("upstream_reset", f"has acknowledged nothing for {sockets.VANISHED:g} s"))

    def _broke(self, code: str, what: str, *, unsent: bool = False) -> UpstreamFailed:
        return UpstreamFailed(code, f"the backend {self.pool.origin.name} {what}", unsent=unsent)

    def _fail(self, failure: Refusal) -> None:
        if self._head is not None and not self._head.done():
            self._head.set_exception(failure)
        self.drop()

    def hand_over(self, receiver: Receiver) -> None:
        """From now on `receiver` is told what comes. What has come already is in `pending`."""
        if not self.lost:  # else nobody would let go of it
            self._receiver = receiver
        if self._reading_paused:
            self._reading_paused = False
            self.transport.resume_reading()

    def set_aside(self) -> None:
        """Nobody is told of what comes until `hand_over`: it is pending, as much as there is room for."""
        self._receiver = None
        self._hold_back()

    def _hold_back(self) -> None:
        if len(self.pending) > PENDING_MOST and not self._reading_paused and not self.lost:
            self._reading_paused = True
            self.transport.pause_reading()

    def give_back(self) -> None:
        """The exchange is over and left the connection clean: keep it for another one."""
        self._receiver, self._head, self.pending = None, None, b""
        if self.lost or self.transport.is_closing():
            self.drop()
        else:
            self.pool.keep(self)

    def drop(self) -> None:
        """End the connection at once: for an engine, the only way to be told to stop generating."""
        self.pool.lost(self)
        self.lost = True
        if self.transport is not None:
            self.transport.abort()

    def __repr__(self) -> str:
        state = "lost" if self.lost else "idle" if self._head is None else "in use"
        return f"<Connection {self.pool.origin.name} {state} uses={self.uses}>"


class ConnectionPool:
    """The connections to one origin. All decisions are synchronous; only opening a connection waits.

    A name (`net.names`) is looked up anew as long as it is used, in the background where there are kept connections. Those that
    lead to an address which the name has no more are not used again: they would hold on to what has been taken out of
    service, for as long as it takes connections. A look-up that fails changes nothing.
    """

    def __init__(self, origin: Origin, settings: PoolSettings, loop: asyncio.AbstractEventLoop):
        self.origin, self.settings, self._loop = origin, settings, loop
        self._idle: list[Connection] = []  # the last one used is the first to be used again, so that the others may age
        self._open: set[Connection] = set()
        self._fixed = _fixed_address(origin)
        self._name = None if self._fixed or origin.port is None else Name(origin.host, origin.port, loop, self._drop_vanished)
        self._sweeper: asyncio.TimerHandle | None = None
        self.acks = Manner()
        self.reused = 0
        self.closed = False

    @property
    def size(self) -> int:
        return len(self._open)

    def take(self) -> Connection | None:
        """A kept connection that is fit for use, if there is one."""
        now = time.monotonic()
        if self._name is not None and self._idle:
            self._name.refresh(now)
        while self._idle:
            connection = self._idle.pop()
            if (
                now - connection.idle_since < self.settings.idle
                and now - connection.opened < self.settings.max_age
                and connection.quiet
            ):
                self.reused += 1
                return connection
            connection.drop()
        return None

    def keep(self, connection: Connection) -> None:
        now = connection.idle_since = time.monotonic()
        full = self.closed or len(self._idle) >= self.settings.max_idle
        if full or now - connection.opened >= self.settings.max_age or self._has_vanished(connection):
            connection.drop()
            return
        self._idle.append(connection)
        if self._sweeper is None:
            self._sweeper = self._loop.call_later(self.settings.idle, self._sweep)

    def _sweep(self) -> None:
        """Close what has been idle for too long; the longest idle stand first."""
        self._sweeper = None
        now = time.monotonic()
        while self._idle and now - self._idle[0].idle_since >= self.settings.idle:
            self._idle[0].drop()
        if self._idle:
            wait = self.settings.idle - (now - self._idle[0].idle_since)
            self._sweeper = self._loop.call_later(max(wait, 0.01), self._sweep)

    def lost(self, connection: Connection) -> None:
        """The connection is no more; called once or more for each."""
        self._open.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)

    def close(self) -> None:
        """Keep nothing any more. Connections in use live on until their exchange ends."""
        self.closed = True
        if self._sweeper is not None:
            self._sweeper.cancel()
        self.drop_idle()

    def drop_idle(self) -> None:
        """Close those that are kept: nobody will come for them, or one of them has proved stale, and the others are as old."""
        for connection in list(self._idle):
            connection.drop()

    async def open(self) -> Connection:
        """A fresh connection. Raises UpstreamFailed (nothing has been sent), or Refusal where we lack descriptors."""
        origin = self.origin
        try:
            return await self._dial(await self._addresses())
        except ssl.SSLError as error:
            self._may_have_moved()
            reason = getattr(error, "verify_message", None) or error.reason or "the handshake failed"
            raise UpstreamFailed(
                "upstream_connect", f"TLS with the backend {origin.name} failed: {reason}", unsent=True
            ) from None
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                raise Refusal(
                    "overloaded", "the gateway has no file descriptors left (LimitNOFILE, ulimit -n)", retry_after=1
                ) from None
            self._may_have_moved()
            reason = error.strerror or str(error) or type(error).__name__
            raise UpstreamFailed(
                "upstream_connect", f"no connection to the backend {origin.name}: {reason}", unsent=True
            ) from None

    async def _addresses(self) -> Addresses:
        if self._name is not None:
            return await self._name.addresses()
        assert self._fixed is not None
        return [self._fixed]

    def _may_have_moved(self) -> None:
        if self._name is not None:
            self._name.may_have_moved()

    def _drop_vanished(self) -> None:
        for connection in [c for c in self._idle if self._has_vanished(c)]:
            connection.drop()

    def _has_vanished(self, connection: Connection) -> bool:
        """The name has other addresses now than that of this connection."""
        known = None if self._name is None else self._name.known
        return known is not None and all(connection.address != address for _, address in known)

    async def _dial(self, addresses: Addresses) -> Connection:
        error: OSError = OSError("the name has no address")
        for left, (family, address) in enumerate(addresses, 1 - len(addresses)):
            sock = socket.socket(family, socket.SOCK_STREAM)
            try:
                sock.setblocking(False)
                sockets.tune(sock, receive_buffer=RECEIVE_BUFFER)
                async with asyncio.timeout(NEXT_ADDRESS if left else None):  # the last one has all the time that there is
                    await sockets.connect(sock, address)
                connection = await self._wrap(sock)
                connection.address = address
                return connection
            except OSError as failure:
                sock.close()
                error = failure
            except BaseException:
                sock.close()
                raise
        raise error

    async def _wrap(self, sock: socket.socket) -> Connection:
        origin = self.origin
        connection = Connection(self, self._loop)
        transport: tls.TlsTransport | None = None
        if origin.tls is None:
            await self._loop.create_connection(lambda: connection, sock=sock)
        else:
            transport = await tls.open_tls(self._loop, sock, origin.tls, origin.server_name or origin.host, connection)
        if connection.lost:  # at once: nobody would tell whoever sends on it
            connection.drop()
            await asyncio.sleep(0)  # now it is closed, on both event loops
            sock.detach()  # else uvloop may leave the descriptor with it, to be closed once more when it is another's
            raise ConnectionResetError(errno.ECONNRESET, "the connection ended as soon as it was open")
        if transport is None:
            connection.opened_on(sock, sockets.Quiet(sock), functools.partial(sockets.left, sock))
        else:
            connection.opened_on(sock, tls.Quiet(sock, transport), None)  # the transport sees to it
        self._open.add(connection)
        return connection


def _fixed_address(origin: Origin) -> tuple[int, object] | None:
    """(address family, address) where nothing need be looked up, which would cost a thread, and a turn of the loop in which
    other backends are picked."""
    if origin.port is None:
        return (socket.AF_UNIX, origin.host)
    family = sockets.family_of(origin.host)
    return (family, (origin.host, origin.port)) if family is not None else None
