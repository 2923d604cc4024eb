"""One page of a backend's, for the gateway itself: a GET over a connection of its own, as requests have them.

What looks after backends sees them by the very way that requests go: addresses, TLS and the strictness with responses are
the same, and so are the errors.
"""

from __future__ import annotations

import asyncio

from gateway.core.framing import CloseReader, reader_of
from gateway.core.head import ResponseHead
from gateway.errors import UpstreamFailed
from gateway.net.upstream import Connection, ConnectionPool


async def fetch(connections: ConnectionPool, path: str, most: int) -> tuple[int, bytes]:
    """Status and body, of `most` octets at most. Raises Refusal, of which UpstreamFailed is one.

    A deadline is the caller's: however this is left, the connection is closed.
    """
    connection = await connections.open()
    try:
        head = await connection.send(_request(connections, path), b"GET")
        page = _Page(connection, head, most)
        return head.status, await page.done
    finally:
        connection.drop()


def _request(connections: ConnectionPool, path: str) -> bytes:
    origin = connections.origin
    credential = b"" if origin.credential is None else b"Authorization: Bearer %b\r\n" % origin.credential
    return b"GET %b HTTP/1.1\r\nHost: %b\r\nUser-Agent: tokenpipe-probe\r\nAccept: */*\r\n%bConnection: close\r\n\r\n" % (
        path.encode(),
        origin.host_field,
        credential,
    )


class _Page:
    """Receives a body whole (`net.upstream.Receiver`)."""

    def __init__(self, connection: Connection, head: ResponseHead, most: int):
        self.done: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._connection, self._reader, self._most = connection, reader_of(head), most
        self._pieces: list[bytes] = []
        self._octets = 0
        pending = connection.pending
        connection.hand_over(self)
        self.received(pending, 0.0)
        if connection.lost:
            self.connection_lost(None)

    def received(self, data: bytes, now: float) -> None:
        if self.done.done():
            return
        reader = self._reader
        pieces = reader.feed(data)
        self._pieces += pieces
        self._octets += sum(map(len, pieces))
        if self._octets > self._most:
            self._fail(f"the backend's page is larger than {self._most} octets")
        elif reader.failure is not None:
            self._fail(f"the backend's body is malformed: {reader.failure}")
        elif reader.done:
            self.done.set_result(b"".join(self._pieces))

    def connection_lost(self, exc: Exception | None) -> None:
        if self.done.done():
            return
        if exc is None and self._connection.ended_well and type(self._reader) is CloseReader:
            self.done.set_result(b"".join(self._pieces))
        else:
            self._fail("the backend's connection ended within the response")

    def _fail(self, reason: str) -> None:
        self.done.set_exception(UpstreamFailed("upstream_malformed", reason))

    def settle(self) -> None:
        """Nothing is put off."""

    def pause_writing(self) -> None:
        """What is sent is sent at once."""

    def resume_writing(self) -> None: ...
