"""Pages that the gateway itself asks for, of a backend or of a Kubernetes API: a GET over a connection of its own, or several
in a row over one.

What looks after backends sees them by the very way that requests go: addresses, TLS and the strictness with responses are
the same, and so are the errors. Deadlines are the caller's: however a page is left, its connection is closed, or it is clean
and kept for the page that follows.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from gateway.core.framing import CloseReader, reader_of
from gateway.core.head import ResponseHead
from gateway.errors import UpstreamFailed
from gateway.net.upstream import Connection, ConnectionPool

HELD_MOST = 1 << 20  # octets of a page that wait for their reader before no more are read from the connection

Field = tuple[bytes, bytes]


async def fetch(connections: ConnectionPool, path: str, most: int) -> tuple[int, bytes]:
    """Status and body, of `most` octets at most. Raises Refusal, of which UpstreamFailed is one."""
    return await _over(connections, await connections.open(), path, most, False)


async def fetch_next(connections: ConnectionPool, path: str, most: int, *, more: bool) -> tuple[int, bytes]:
    """The same, over the connection that the page before it has left, if it has. `more`: another page follows at once."""
    connection = connections.take()
    if connection is not None:
        try:
            return await _over(connections, connection, path, most, more)
        except UpstreamFailed as failure:
            if failure.code != "stale_connection":
                raise
    return await _over(connections, await connections.open(), path, most, more)


async def fetch_first(
    connections: ConnectionPool, path: str, most: int, connected: Callable[[], None], *, more: bool
) -> tuple[int, bytes]:
    """The same, over a fresh connection. `connected`: called when it is. `more`: it is left for `fetch_next`."""
    connection = await connections.open()
    connected()
    return await _over(connections, connection, path, most, more)


async def _over(connections: ConnectionPool, connection: Connection, path: str, most: int, more: bool) -> tuple[int, bytes]:
    try:
        page = Page(connection, await connection.send(_request(connections, path, (), more), b"GET"))
        found = page.head.status, await page.whole(most)
        if more and page.clean:
            connection.give_back()
            return found
    except BaseException:
        connection.drop()
        raise
    connection.drop()
    return found


async def open_page(connections: ConnectionPool, path: str, fields: Iterable[Field] = ()) -> Page:
    """A page whose head has come; whoever has it closes it. Raises Refusal, of which UpstreamFailed is one."""
    connection = await connections.open()
    try:
        head = await connection.send(_request(connections, path, fields), b"GET")
        return Page(connection, head)
    except BaseException:
        connection.drop()
        raise


def _request(connections: ConnectionPool, path: str, fields: Iterable[Field], more: bool = False) -> bytes:
    origin = connections.origin
    credential = b"" if origin.credential is None else b"Authorization: Bearer %b\r\n" % origin.credential
    wanted = b"".join(b"%b: %b\r\n" % field for field in fields)
    return b"GET %b HTTP/1.1\r\nHost: %b\r\nUser-Agent: tokenpipe-probe\r\nAccept: */*\r\n%b%b%b\r\n" % (
        path.encode(),
        origin.host_field,
        credential,
        wanted,
        b"" if more else b"Connection: close\r\n",
    )


class Page:
    """Receives a response's body (`net.upstream.Receiver`) for one reader, as it comes."""

    def __init__(self, connection: Connection, head: ResponseHead):
        self.head = head
        self._connection, self._reader = connection, reader_of(head)
        self._pieces: list[bytes] = []
        self._taken: list[bytes] = []  # by `whole`: whoever waits for it may leave it to somebody else
        self._held = 0
        self._paused = False
        self._ended = False
        self._failure: UpstreamFailed | None = None
        self._more: asyncio.Future[None] | None = None  # somebody waits
        pending = connection.pending
        connection.hand_over(self)
        self.received(pending, 0.0)
        if connection.lost:
            self.connection_lost(None)

    async def read(self) -> bytes:
        """What has come, once something has; nothing at the body's proper end. Raises UpstreamFailed at any other."""
        while not self._pieces and not self._ended:
            self._more = asyncio.get_running_loop().create_future()
            await self._more
        octets = b"".join(self._pieces)
        self._pieces, self._held = [], 0
        if self._paused:
            self._paused = False
            if not self._connection.lost:
                self._connection.transport.resume_reading()
        if not octets and self._failure is not None:
            raise self._failure
        return octets

    async def whole(self, most: int) -> bytes:
        """The body, of so many octets at most. Raises UpstreamFailed."""
        octets = sum(map(len, self._taken))
        while piece := await self.read():
            self._taken.append(piece)
            octets += len(piece)
            if octets > most:
                raise UpstreamFailed("upstream_malformed", f"the backend's page is larger than {most} octets")
        return b"".join(self._taken)

    @property
    def clean(self) -> bool:
        """It has come to its proper end, and another request may follow on its connection."""
        reader = self._reader
        whole = self._ended and self._failure is None and not reader.extra
        return whole and type(reader) is not CloseReader and not self._connection.closes and not self._connection.lost

    def close(self) -> None:
        self._connection.drop()

    def received(self, data: bytes, now: float) -> None:
        if self._ended:
            return
        reader = self._reader
        pieces = reader.feed(data)
        self._pieces += pieces
        self._held += sum(map(len, pieces))
        if reader.failure is not None:
            self._end(UpstreamFailed("upstream_malformed", f"the backend's body is malformed: {reader.failure}"))
        elif reader.done:
            self._end(None)
        elif self._held > HELD_MOST and not self._paused:
            self._paused = True
            self._connection.transport.pause_reading()
        if pieces:
            self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._ended:
            return
        if exc is None and self._connection.ended_well and type(self._reader) is CloseReader:
            self._end(None)
        else:
            self._end(UpstreamFailed("upstream_reset", "the backend's connection ended within the response"))

    def _end(self, failure: UpstreamFailed | None) -> None:
        self._ended, self._failure = True, failure
        self._wake()

    def _wake(self) -> None:
        if self._more is not None and not self._more.done():
            self._more.set_result(None)

    def settle(self) -> None:
        """Nothing is put off."""

    def pause_writing(self) -> None:
        """What is sent is sent at once."""

    def resume_writing(self) -> None: ...
