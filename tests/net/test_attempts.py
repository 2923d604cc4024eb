"""One attempt on a kept connection that the backend had given up: what is sent once more, and what cannot be."""

from __future__ import annotations

import asyncio
import socket
import types
from typing import Any

import pytest

from gateway.core.dialects import DEFAULT
from gateway.core.exchange import Exchange
from gateway.core.head import ResponseHead, parse_request
from gateway.core.outcome import Outcome
from gateway.core.retry import Retries, RetrySettings
from gateway.errors import UpstreamFailed
from gateway.net import body
from gateway.net.attempts import Attempts
from gateway.net.call import Upload
from gateway.net.hold import Hold
from gateway.net.legs import Leg
from gateway.net.promise import Promise
from gateway.net.tasks import Tasks
from gateway.net.upstream import ConnectionPool
from gateway.net.watch import Timeouts
from tests.net.test_stale import ANSWER, kept, listener, pool  # noqa: F401

HEAD = parse_request(b"POST /v1/audio/transcriptions HTTP/1.1\r\nHost: m\r\nContent-Length: 10\r\n\r\n")
ROUTE: Any = types.SimpleNamespace(authority=None, target=HEAD.target, dialect=None)


class Silent:
    """Whoever is told, and does nothing."""

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments, **more: None


@pytest.mark.parametrize("whole", [True, False])
async def test_only_a_body_that_is_kept_is_sent_once_more(
    pool: ConnectionPool, listener: socket.socket, whole: bool, monkeypatch: pytest.MonkeyPatch  # noqa: F811
) -> None:
    """Half of one that streams through is not held any more: whatever the backend has read, it cannot be sent again."""
    connection, theirs = await kept(pool, listener)
    theirs.close()
    monkeypatch.setattr(pool, "take", lambda: connection)  # as if its end came just now
    monkeypatch.setattr(body, "send_rest", lambda *arguments: asyncio.sleep(60))
    listener.setblocking(False)
    tasks, observer = Tasks(), Silent()
    attempts = Attempts(*([observer] * 2), Retries(RetrySettings()), observer, tasks, observer, observer)  # type: ignore[call-overload]
    call: Any = types.SimpleNamespace(
        exchange=types.SimpleNamespace(attempts=1, bytes_in=5), repeated=0, target=None, request_id=b"q", relay=None,
        policy=types.SimpleNamespace(timeouts=Timeouts(), forwarded=False, without=frozenset(), hold=False),
        request=types.SimpleNamespace(body=None), client=types.SimpleNamespace(gone_at=None, transport=object()),
    )  # fmt: skip
    marks = types.SimpleNamespace()
    leg: Any = types.SimpleNamespace(exchange=marks, connections=pool, connection=None, upload=None, hold=None)
    upload = Upload(b"0123456789" if whole else b"01234", 10, kept=whole)
    attempt = asyncio.create_task(attempts.attempt(call, leg, HEAD, ROUTE, upload))
    loop = asyncio.get_running_loop()
    if whole:
        fresh, _ = await asyncio.wait_for(loop.sock_accept(listener), 10)
        assert (await loop.sock_recv(fresh, 65536)).endswith(b"\r\n\r\n0123456789")
        await loop.sock_sendall(fresh, ANSWER)
        assert (await attempt).status == 200
        assert (call.exchange.attempts, call.repeated) == (2, 1)
        leg.connection.drop()
        fresh.close()
    else:
        with pytest.raises(UpstreamFailed) as failed:
            await asyncio.wait_for(attempt, 10)
        assert failed.value.code == "stale_connection"
        with pytest.raises(BlockingIOError):
            listener.accept()
    await tasks.stop()
    await asyncio.sleep(0)


@pytest.mark.parametrize("outcome", [Outcome.TIMEOUT_FIRST_BYTE, Outcome.TIMEOUT_TOTAL])
@pytest.mark.parametrize("held", [False, True])
async def test_a_deadline_in_the_step_in_which_an_answer_comes(
    pool: ConnectionPool, listener: socket.socket, outcome: Outcome, held: bool  # noqa: F811
) -> None:
    """What has come has come in time: its connection is not dropped, which would cut it, and accuse its backend of that."""
    connection, theirs = await kept(pool, listener)
    head: Promise[ResponseHead] = Promise()
    connection.send_for(head, b"GET / HTTP/1.1\r\n\r\n", b"GET")
    event = b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n'
    answer = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n" + event
    theirs.sendall(answer)
    response = await head
    call: Any = Leg(Exchange("q", "c", "POST", "/", 0.0))
    call.connection, call.paired, call.others = connection, None, ()
    call.policy = types.SimpleNamespace(timeouts=Timeouts(first_byte=1, total=1))
    call.exchange.sent = 0.0
    if held:
        call.hold = Hold(connection, response, DEFAULT)
    silent: list[Any] = [Silent()] * 7
    attempts = Attempts(*silent)
    attempts.expired(call, outcome)
    assert not connection.lost and connection.pending == event
    if held:
        assert await call.hold.done is None
    connection.drop()
    theirs.close()
    await asyncio.sleep(0)
