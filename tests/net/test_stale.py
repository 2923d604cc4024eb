"""A kept connection that the backend ends just as it is used again: what its end acknowledges tells whether the request can
have been read."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Iterator

import pytest

from gateway.errors import UpstreamFailed
from gateway.net.upstream import Connection, ConnectionPool, Origin, PoolSettings
from tests.support.gateway import until
from tests.support.upstream import listening_socket

REQUEST = b"POST /v1/completions HTTP/1.1\r\nHost: m\r\nContent-Length: 2\r\n\r\n{}"
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with contextlib.closing(listening_socket()) as sock:
        yield sock


@pytest.fixture
async def pool(listener: socket.socket) -> AsyncIterator[ConnectionPool]:
    host, port = listener.getsockname()
    pool = ConnectionPool(Origin("m", host, port, None, b"m"), PoolSettings(idle=60.0), asyncio.get_running_loop())
    yield pool
    pool.close()
    await asyncio.sleep(0)


async def kept(pool: ConnectionPool, listener: socket.socket) -> tuple[Connection, socket.socket]:
    """A connection that has served one request, taken for another; and the backend's end of it, from where nothing has been
    done in between."""
    connection = await pool.open()
    theirs, _ = listener.accept()
    answered = connection.send(REQUEST, b"POST")
    assert theirs.recv(65536) == REQUEST
    theirs.sendall(ANSWER)
    await answered
    connection.give_back()
    taken = pool.take()
    assert taken is connection
    return connection, theirs


async def failure(answer: asyncio.Future[object]) -> UpstreamFailed:
    with pytest.raises(UpstreamFailed) as failed:
        async with asyncio.timeout(10):
            await answer
    assert failed.value.code == "stale_connection"
    return failed.value


async def test_closed_before_the_request_came(pool: ConnectionPool, listener: socket.socket) -> None:
    """The end and the request cross: as it acknowledges nothing of it, the request may be sent again."""
    connection, theirs = await kept(pool, listener)
    theirs.close()
    failed = await failure(connection.send(REQUEST, b"POST"))  # type: ignore[arg-type]
    assert failed.unsent


async def test_a_large_one(pool: ConnectionPool, listener: socket.socket) -> None:
    """Of which the kernel has taken a part only."""
    connection, theirs = await kept(pool, listener)
    theirs.close()
    failed = await failure(connection.send(REQUEST + bytes(1 << 22), b"POST"))  # type: ignore[arg-type]
    assert failed.unsent


async def test_half_a_body(pool: ConnectionPool, listener: socket.socket) -> None:
    """The rest of which is still to be sent, and what has been is not kept: there is nothing to send again."""
    connection, theirs = await kept(pool, listener)
    theirs.close()
    assert not (await failure(connection.send(REQUEST[:-1], b"POST", whole=False))).unsent  # type: ignore[arg-type]


@pytest.mark.parametrize("read", [True, False])
async def test_closed_after_it_came(pool: ConnectionPool, listener: socket.socket, read: bool) -> None:
    """It may have been read, whether the backend then ends in order, or resets as it has left something unread."""
    connection, theirs = await kept(pool, listener)
    answer = connection.send(REQUEST, b"POST")
    if read:
        assert theirs.recv(65536) == REQUEST
    else:
        await until(lambda: theirs.recv(1, socket.MSG_PEEK), "the request")
    theirs.close()
    assert not (await failure(answer)).unsent  # type: ignore[arg-type]


async def test_a_part_came(pool: ConnectionPool, listener: socket.socket) -> None:
    connection, theirs = await kept(pool, listener)
    theirs.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    answer = connection.send(REQUEST + bytes(1 << 22), b"POST")
    assert theirs.recv(len(REQUEST), socket.MSG_WAITALL) == REQUEST
    theirs.shutdown(socket.SHUT_WR)
    assert not (await failure(answer)).unsent  # type: ignore[arg-type]
    theirs.close()
