"""Every clock alone: just under it a request survives, just over it that clock ends it, and no other one speaks.

Before the response has begun a deadline is a status; afterwards it is an abort, with no second status line.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import pytest

from tests.support import script as s
from tests.support.client import RawClient
from tests.support.gateway import Gateway
from tests.support.messages import HttpWire, Message
from tests.support.tls import Certificates
from tests.support.upstream import RawUpstream, listening_socket

T = 0.3  # the clock under test; the others stand at many times that
UNDER, SLACK = 0.18, 0.25
FLOOD = s.chunk(s.delta("y" * 4000)) * 16
EVENT = s.chunk(s.delta("a"))
END = b"".join(map(s.chunk, s.FINISHED)) + s.LAST


def clock(name: str, **config: Any) -> pytest.MarkDecorator:
    return pytest.mark.config({"timeouts": {name: T}, **config})


def ask(request_id: str, *, streaming: bool = True, path: str = "/v1/chat/completions") -> bytes:
    return s.post({**s.CHAT, "stream": streaming}, path, [("X-Request-Id", request_id)])


def upload(request_id: str, size: int) -> bytes:
    """The head of a body that is passed on as it comes."""
    fields = [("Content-Type", "audio/wav"), ("Content-Length", str(size)), ("X-Request-Id", request_id)]
    return s.get("/v1/audio/transcriptions", fields, method="POST")


@contextlib.asynccontextmanager
async def client_of(gateway: Gateway, **options: Any) -> AsyncIterator[RawClient]:
    client = await gateway.connect(**options)
    try:
        yield client
    finally:
        client.reset()


async def entry(gateway: Gateway, request_id: str) -> dict[str, Any]:
    """The one line of this exchange."""
    await gateway.logged(request_id=request_id)
    await asyncio.sleep(0.05)
    (found,) = gateway.access_log(request_id=request_id)
    return found


def refused(answer: Message, status: int, code: str) -> None:
    assert (answer.status, answer.get("x-gateway-error")) == (status, code)
    assert answer.complete
    assert answer.json()["error"]["code"] == code


async def aborted(client: RawClient, *, after: float, since: float) -> Message:
    """The answer that the client got, which had begun and is not whole; nothing but its own octets came."""
    answer = await client.read_response()
    assert answer.status == 200
    assert not answer.complete
    assert await client.wait_closed() - since < after + SLACK
    assert bytes(client.received).count(b"HTTP/1.1 ") == 1
    assert s.LAST not in bytes(client.received)
    return answer


def paced(*pieces: bytes, gap: float = UNDER) -> s.Script:
    async def script(wire: HttpWire, request: Message) -> None:
        for piece in pieces:
            await wire.send(piece)
            await asyncio.sleep(gap)

    return script


async def within(low: float, what: Awaitable[Any]) -> Any:
    """What it returns, if it took about `low` seconds."""
    began = time.monotonic()
    result = await what
    took = time.monotonic() - began
    assert low - 0.02 <= took < low + SLACK, f"{took:.3f} s"
    return result


class TestRequestHeader:
    @clock("request_header")
    async def test_under(self, gateway: Gateway, upstream: RawUpstream) -> None:
        """A head in two halves, on a fresh connection and on one that was used."""
        async with client_of(gateway) as client:
            for _ in range(2):
                request = ask("under")
                await client.send(request[:40])
                await asyncio.sleep(UNDER)
                await client.send(request[40:])
                assert (await client.read_response()).status == 200

    @clock("request_header")
    async def test_over(self, gateway: Gateway, upstream: RawUpstream) -> None:
        """The clock is absolute: octets that trickle do not wind it up. 408, and the connection ends."""

        async def trickle(client: RawClient) -> None:
            with contextlib.suppress(ConnectionError):
                await client.send_split(ask("over")[:60], size=1, gap=0.04)

        async with client_of(gateway) as client:
            for used in (False, True):
                if used:
                    client = await gateway.connect()
                    await client.ask()
                sending = asyncio.create_task(trickle(client))
                answer = await within(T, client.read_response())
                refused(answer, 408, "request_timeout")
                assert answer.get("connection") == "close"
                assert await client.wait_closed()
                await sending
                client.reset()
        assert len(upstream.requests) == 1
        for line in gateway.access_log(code="request_timeout"):
            assert (line["outcome"], line["phase"], line["status"]) == ("refused", "read", 408)

    @clock("request_header")
    async def test_a_client_that_says_nothing(self, gateway: Gateway) -> None:
        """It is closed when its time is up, without a word, for it asked nothing."""
        async with client_of(gateway) as client:
            await within(T, client.wait_closed())
            assert not client.received

    @clock("request_header")
    async def test_quiet_elsewhere(self, gateway: Gateway, upstream: RawUpstream) -> None:
        """A slow body, a slow answer and an idle connection are none of its business."""
        upstream.script = paced(s.SSE_HEAD, EVENT, END, gap=T + 0.2)
        async with client_of(gateway) as client:
            request = ask("quiet")
            await client.send(request[:-10])
            await asyncio.sleep(T + 0.2)
            await client.send(request[-10:])
            assert (await client.read_response()).complete
            await asyncio.sleep(T + 0.2)
            assert (await client.ask()).complete


class TestRequestBody:
    @clock("request_body")
    async def test_under(self, gateway: Gateway, upstream: RawUpstream) -> None:
        """Between octets, not in all: a body that takes three times as long, held or passed on."""

        async def slowly(head: bytes, body: bytes) -> Message:
            async with client_of(gateway) as client:
                await client.send(head)
                for at in range(0, len(body), len(body) // 5 + 1):
                    await asyncio.sleep(UNDER)
                    await client.send(body[at : at + len(body) // 5 + 1])
                return await client.read_response()

        head, _, body = ask("held").partition(b"\r\n\r\n")
        answers = await asyncio.gather(
            slowly(head + b"\r\n\r\n", body), slowly(upload("passed", 400_000), b"x" * 400_000)
        )
        assert [a.status for a in answers] == [200, 200]

    @clock("request_body")
    async def test_over(self, gateway: Gateway, upstream: RawUpstream) -> None:
        """408, held or passed on; the backend's connection is closed with its request half sent."""

        async def half(request: bytes) -> None:
            async with client_of(gateway) as client:
                await client.send(request)
                refused(await within(T, client.read_response()), 408, "request_timeout")

        await asyncio.gather(half(ask("half-held")[:-20]), half(upload("half-passed", 400_000) + b"x" * 200_000))
        held, passed = await entry(gateway, "half-held"), await entry(gateway, "half-passed")
        assert (held["outcome"], held["code"], held["phase"]) == ("refused", "request_timeout", "read")
        assert (passed["outcome"], passed["code"], passed["phase"]) == ("refused", "request_timeout", "wait")
        for wire in upstream.connections:
            if b"audio" in wire.received:
                await wire.wait_closed(1)
        assert not [r for r in upstream.requests if r.complete]

    @clock("request_body")
    async def test_over_behind_an_early_answer(self, gateway: Gateway, upstream: RawUpstream) -> None:
        """The backend answers before it has all: then it is an abort, and no second status line."""

        async def early(wire: HttpWire) -> None:
            await wire.read_request(body=False)
            await wire.send(s.SSE_HEAD + EVENT)
            await wire.wait_closed()

        upstream.on_connect = early
        async with client_of(gateway) as client:
            began = time.monotonic()
            await client.send(upload("early", 400_000) + b"x" * 100_000)
            await aborted(client, after=T, since=began)
        line = await entry(gateway, "early")
        assert (line["status"], line["code"]) == (200, "request_timeout")


class TestKeepalive:
    @clock("keepalive")
    async def test_under_and_over(self, gateway: Gateway) -> None:
        """Another request in time is served; then the idle connection is closed without a word."""
        async with client_of(gateway) as client:
            for _ in range(3):
                assert (await client.ask()).status == 200
                await asyncio.sleep(UNDER)
            await client.ask()
            octets, lines = client.received_bytes, len(gateway.access_log())
            await within(T, client.wait_closed())
            assert (client.ended, client.received_bytes) == ("fin", octets)
            assert len(gateway.access_log()) <= lines + 1  # the last one's own

    @clock("keepalive")
    async def test_quiet_elsewhere(self, gateway: Gateway, upstream: RawUpstream) -> None:
        """A head, a body and an answer may take longer."""
        upstream.script = paced(s.SSE_HEAD, EVENT, END, gap=T + 0.2)
        async with client_of(gateway) as client:
            assert (await client.ask()).complete
            request = ask("slow")
            for piece in (request[:40], request[40:-10], request[-10:]):
                await client.send(piece)
                await asyncio.sleep(T + 0.2)
            assert (await client.read_response()).complete


class TestQueue:
    @clock("queue", limits={"in_flight": 1})
    async def test_under_and_over(self, gateway: Gateway, upstream: RawUpstream) -> None:
        """503 queue_timeout for one that waits too long; one whose turn comes in time is served."""
        upstream.script = held = s.Held(s.SSE_HEAD)
        async with client_of(gateway) as holder, client_of(gateway) as late, client_of(gateway) as early:
            await holder.send(ask("holder"))
            wire = await held.wire()
            await late.send(ask("late"))
            answer = await within(T, late.read_response())
            refused(answer, 503, "queue_timeout")
            assert answer.get("retry-after") == "1"
            await early.send(ask("early"))
            await asyncio.sleep(UNDER)
            upstream.script = s.stream(s.delta("a"), *s.FINISHED)
            await wire.send(EVENT + END)
            wire.fin()
            assert (await holder.read_response()).complete
            assert (await early.read_response()).complete
        line = await entry(gateway, "late")
        assert (line["outcome"], line["code"], line["phase"]) == ("refused", "queue_timeout", "queue")
        assert 0 < line["queue_s"] <= line["duration_s"]
        assert line["backend"] is None
        assert (await entry(gateway, "holder"))["outcome"] == "complete"  # which took longer than the queue's time

    @pytest.mark.config({"timeouts": {"queue": 0}, "limits": {"in_flight": 1}})
    async def test_zero(self, gateway: Gateway, upstream: RawUpstream) -> None:
        """Nobody waits: 503 at once."""
        upstream.script = held = s.Held(s.SSE_HEAD)
        async with client_of(gateway) as holder, client_of(gateway) as client:
            await holder.send(ask("holder"))
            await held.wire()
            answer = await within(0, client.ask(ask("none")))
            assert answer.status == 503


@pytest.fixture(scope="module")
def full_backlog() -> Iterator[str]:
    """A backend that takes no connection: its kernel drops the first packet of each."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(listening_socket())
        listener.listen(0)
        for _ in range(4):
            sock = stack.enter_context(socket.socket())
            sock.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                sock.connect(listener.getsockname())
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


Start = Callable[..., Awaitable[Gateway]]


class TestConnect:
    async def test_over(self, start_gateway: Start, full_backlog: str) -> None:
        """504 timeout_connect; there is nobody else to be asked, so there is one attempt."""
        config = {"timeouts": {"connect": T}, "health": {"interval": 60}}
        gateway = await start_gateway(config=config, backends=[full_backlog])
        answer = await within(T, gateway.ask(ask("over")))
        refused(answer, 504, "timeout_connect")
        line = await entry(gateway, "over")
        assert (line["outcome"], line["code"], line["phase"]) == ("timeout_connect", "timeout_connect", "connect")
        assert line["attempts"] == 1

    async def test_a_tls_handshake(self, start_gateway: Start, certificates: Certificates) -> None:
        """It is part of connecting: one that takes less passes, one that hangs is 504 timeout_connect."""
        upstream = RawUpstream()
        delay = UNDER

        async def late(wire: HttpWire) -> None:
            wire.pause()
            await asyncio.sleep(delay)
            wire.resume()
            await wire.start_tls(certificates.server_context(), server_side=True)
            await s.reply(fields=[("connection", "close")])(wire, await wire.read_request())
            wire.fin()

        await upstream.start(tls=certificates.server_context())
        upstream._tls, upstream.on_connect = None, late
        backend = {"url": upstream.url, "tls": {"ca": str(certificates.ca)}}
        config = {"timeouts": {"connect": T}, "backends": [backend], "health": {"interval": 60}}
        gateway = await start_gateway(config=config)
        assert (await gateway.ask(ask("under"))).status == 200
        delay = 3 * T
        refused(await within(T, gateway.ask(ask("over"))), 504, "timeout_connect")
        assert (await entry(gateway, "over"))["outcome"] == "timeout_connect"
        await upstream.stop(check=False)


class TestFirstByte:
    @clock("first_byte")
    async def test_under(self, gateway: Gateway, upstream: RawUpstream) -> None:
        """A head in time; then the body may take longer than that between octets."""
        upstream.script = paced(s.SSE_HEAD[:10], s.SSE_HEAD[10:])

        async def script(wire: HttpWire, request: Message) -> None:
            await asyncio.sleep(UNDER)
            await paced(s.SSE_HEAD, EVENT, END, gap=T + 0.2)(wire, request)

        upstream.script = script
        assert (await gateway.ask(ask("under"))).complete
        assert (await entry(gateway, "under"))["outcome"] == "complete"

    @clock("first_byte")
    async def test_over(self, gateway: Gateway, upstream: RawUpstream) -> None:
        """504; octets of a head that does not become whole, and interim answers, are no answer."""
        early_hints = s.head(103, [("link", "</a>")], "Early Hints")
        for number, begun in enumerate((b"", s.SSE_HEAD[:-4], early_hints)):
            upstream.script = s.raw(*filter(None, [begun])) if begun else s.Held()
            before = len(upstream.connections)
            answer = await within(T, gateway.ask(ask(f"over-{number}")))
            refused(answer, 504, "timeout_first_byte")
            line = await entry(gateway, f"over-{number}")
            assert (line["outcome"], line["phase"]) == ("timeout_first_byte", "wait")
            for wire in upstream.connections[before:]:
                if b"POST" in wire.received:
                    await wire.wait_closed(1)

    @clock("first_byte")
    async def test_an_upload_that_takes_longer(self, gateway: Gateway, upstream: RawUpstream) -> None:
        """The clock is from the request sent to the response head: while the body is still coming it has not begun."""
        async with client_of(gateway) as client:
            await client.send(upload("upload", 500_000))
            for _ in range(5):
                await client.send(b"x" * 100_000)
                await asyncio.sleep(UNDER)
            answer = await client.read_response()
            assert (answer.status, answer.get("x-gateway-error")) == (200, None)
        assert upstream.requests[0].complete


class TestIdle:
    @clock("idle")
    async def test_under(self, gateway: Gateway, upstream: RawUpstream) -> None:
        """Any octet winds it up: events, comments, parts of events."""
        upstream.script = paced(s.SSE_HEAD, EVENT, s.chunk(b": ping\n\n"), s.chunk(b"da"), s.chunk(b"ta: x\n\n"), END)
        assert (await gateway.ask(ask("under"))).complete
        assert (await entry(gateway, "under"))["outcome"] == "complete"

    @clock("idle")
    @pytest.mark.parametrize("begun", [b"", EVENT, s.chunk(s.delta("b"))[:30]], ids=["head", "event", "mid event"])
    async def test_over(self, gateway: Gateway, upstream: RawUpstream, begun: bytes) -> None:
        """Silence behind the head or within the stream: an abort, and the upstream's socket closed."""
        upstream.script = held = s.Held(s.SSE_HEAD, begun) if begun else s.Held(s.SSE_HEAD)
        async with client_of(gateway) as client:
            request_id = f"over-{len(begun)}"
            began = time.monotonic()
            await client.send(ask(request_id))
            wire = await held.wire()
            await aborted(client, after=T, since=began)
            assert await wire.wait_closed() - began < T + SLACK
        line = await entry(gateway, request_id)
        assert (line["outcome"], line["status"]) == ("timeout_idle", 200)
        assert line["phase"] == ("stream" if begun == EVENT else "first_token")

    @clock("idle")
    async def test_over_in_a_whole_answer(self, gateway: Gateway, upstream: RawUpstream) -> None:
        """The same where the body has a Content-Length, or ends with its connection."""
        length = s.head(200, [s.JSON_TYPE, ("content-length", "512")]) + b'{"id": '
        close = s.head(200, [s.JSON_TYPE, ("connection", "close")]) + b'{"id": '
        for number, begun in enumerate((length, close)):
            upstream.script = s.Held(begun)
            async with client_of(gateway) as client:
                began = time.monotonic()
                await client.send(ask(f"whole-{number}.", streaming=False))
                await aborted(client, after=T, since=began)
            assert (await entry(gateway, f"whole-{number}."))["outcome"] == "timeout_idle"

    @clock("idle")
    async def test_quiet_before_the_head(self, gateway: Gateway, upstream: RawUpstream) -> None:
        """A long prefill is first_byte's business."""

        async def script(wire: HttpWire, request: Message) -> None:
            await asyncio.sleep(T + 0.3)
            await wire.send(s.SSE_HEAD + EVENT + END)

        upstream.script = script
        assert (await gateway.ask(ask("prefill"))).complete

    @clock("idle")
    async def test_quiet_while_the_client_holds_back(self, gateway: Gateway, upstream: RawUpstream) -> None:
        """The upstream's silence that a slow client causes is not the upstream's."""
        upstream.script = s.stream(*[s.delta("y" * 4000)] * 300, *s.FINISHED)
        async with client_of(gateway, receive_buffer=4096) as client:
            await client.send(ask("held back"))
            await asyncio.sleep(2 * T)
            assert (await client.read_response(timeout=20)).complete
        line = gateway.access_log()[-1]
        assert line["outcome"] == "complete", line


class TestClientWrite:
    @clock("client_write")
    @pytest.mark.parametrize("streaming", [True, False], ids=["stream", "whole"])
    async def test_over(self, gateway: Gateway, upstream: RawUpstream, streaming: bool) -> None:
        """A client that takes no octet ends, and its upstream's socket is closed."""

        async def flood(wire: HttpWire, request: Message) -> None:
            with contextlib.suppress(ConnectionError):
                await wire.send(s.SSE_HEAD if streaming else s.head(200, [("content-length", str(10**12))]))
                while True:
                    await wire.send(FLOOD)

        upstream.script = flood
        async with client_of(gateway, receive_buffer=4096) as client:
            request_id = f"over-{streaming}"
            began = time.monotonic()
            await client.send(ask(request_id, streaming=streaming))
            await upstream.wait_requests()
            took = await upstream.wires[-1].wait_closed() - began
            assert T <= took < T + SLACK
            answer = await client.read_response()
            assert not answer.complete
        line = await entry(gateway, request_id)
        assert line["outcome"] == "client_stalled"
        assert line["phase"] in ("stream", "first_token")

    @clock("client_write")
    async def test_over_at_the_end(self, gateway: Gateway, upstream: RawUpstream) -> None:
        """The upstream is done, and the client does not take what is left."""
        upstream.script = s.stream(s.delta("y" * 105_000), *s.FINISHED)
        async with client_of(gateway, receive_buffer=4096) as client:
            await client.send(ask("end"))
            (line,) = await within(T, gateway.logged(request_id="end"))
            assert (line["outcome"], line["phase"]) == ("client_stalled", "done")
            assert not (await client.read_response()).complete

    @clock("client_write")
    async def test_under(self, gateway: Gateway, upstream: RawUpstream) -> None:
        """A client that takes a little now and then lives, however long it takes in all."""
        upstream.script = s.stream(*[s.delta("y" * 4000)] * 60, *s.FINISHED)
        async with client_of(gateway, receive_buffer=4096) as client:
            await client.send(ask("slow"))
            for _ in range(5):
                await asyncio.sleep(UNDER)
                await client.more()
            assert (await client.read_response(timeout=20)).complete
        assert (await entry(gateway, "slow"))["outcome"] == "complete"

    @clock("client_write")
    async def test_quiet_in_silence(self, gateway: Gateway, upstream: RawUpstream) -> None:
        """A client that has taken all there is, and waits, takes no octet either: that is no stall."""
        upstream.script = paced(s.SSE_HEAD, EVENT, END, gap=T + 0.3)
        assert (await gateway.ask(ask("silence"))).complete


class TestProgress:
    @clock("progress")
    async def test_under(self, gateway: Gateway, upstream: RawUpstream) -> None:
        """An output event now and then."""
        upstream.script = paced(s.SSE_HEAD, *[EVENT] * 4, END)
        assert (await gateway.ask(ask("under"))).complete

    @clock("progress")
    @pytest.mark.parametrize("begun", [(), (EVENT,)], ids=["none", "some"])
    async def test_over(self, gateway: Gateway, upstream: RawUpstream, begun: tuple[bytes, ...]) -> None:
        """Comments and empty events are signs of life, but no output."""
        signs = [s.chunk(b": ping\n\n"), s.chunk(s.event({"choices": []}))] * 20
        upstream.script = paced(s.SSE_HEAD, *begun, *signs, gap=0.1)
        async with client_of(gateway) as client:
            began = time.monotonic()
            await client.send(ask(f"over-{len(begun)}"))
            await aborted(client, after=T + 0.1 * len(begun), since=began)
        line = await entry(gateway, f"over-{len(begun)}")
        assert (line["outcome"], line["phase"]) == ("timeout_progress", "stream" if begun else "first_token")


class TestTotal:
    @clock("total")
    async def test_over_behind_the_head(self, gateway: Gateway, upstream: RawUpstream) -> None:
        """However lively the stream: an abort."""
        upstream.script = paced(s.SSE_HEAD, *[EVENT] * 30, gap=0.05)
        async with client_of(gateway) as client:
            began = time.monotonic()
            await client.send(ask("stream"))
            await aborted(client, after=T, since=began)
        line = await entry(gateway, "stream")
        assert (line["outcome"], line["phase"]) == ("timeout_total", "stream")
        assert line["duration_s"] < T + SLACK / 2

    @clock("total", limits={"in_flight": 1})
    async def test_over_before_the_head(self, gateway: Gateway, upstream: RawUpstream) -> None:
        """While the body comes, in the queue, and waiting for the head: a 504, when the time is up."""
        async with client_of(gateway) as reading:
            await reading.send(ask("reading")[:-20])
            answer = await within(T, reading.read_response())
            assert answer.status == 504
        upstream.script = s.Held()
        async with client_of(gateway) as waiting, client_of(gateway) as queued:
            await waiting.send(ask("waiting"))
            await upstream.wait_requests()
            await asyncio.sleep(0.1)
            await queued.send(ask("queued"))
            first, second = await asyncio.gather(within(T - 0.1, waiting.read_response()), queued.read_response())
            assert first.status == second.status == 504
        for name, phase in {"reading": "read", "waiting": "wait"}.items():
            line = await entry(gateway, name)
            assert (line["outcome"], line["phase"], line["status"]) == ("timeout_total", phase, 504)
        # its turn may have come in the moment in which its time was up
        assert (await entry(gateway, "queued"))["outcome"] == "timeout_total"

    @clock("total")
    async def test_counts_from_the_request_not_from_its_sending(self, gateway: Gateway, upstream: RawUpstream) -> None:
        """A body that took most of the time leaves the rest of it to the backend."""
        upstream.script = s.Held()
        async with client_of(gateway) as client:
            request = ask("late")
            began = time.monotonic()
            await client.send(request[:-20])
            await asyncio.sleep(T - 0.1)
            await client.send(request[-20:])
            answer = await client.read_response()
            assert answer.status == 504
            assert time.monotonic() - began < T + SLACK / 2
        assert (await entry(gateway, "late"))["outcome"] == "timeout_total"


ALL = {"request_header": T, "request_body": T, "keepalive": T, "queue": T, "connect": T, "first_byte": T, "idle": T,
       "client_write": T, "progress": T}  # fmt: skip


@pytest.mark.config({"timeouts": ALL, "limits": {"in_flight": 1}})
async def test_each_stage_has_its_own_time(gateway: Gateway, upstream: RawUpstream) -> None:
    """With every clock at the same time, an exchange that stays under each lives through all of them, one by one."""

    async def script(wire: HttpWire, request: Message) -> None:
        await asyncio.sleep(UNDER)
        await paced(s.SSE_HEAD, EVENT, EVENT, EVENT, END)(wire, request)

    async def slowly(request_id: str) -> Message:
        async with client_of(gateway) as client:
            request = ask(request_id)
            for piece in (request[:40], request[40:-40], request[-40:-20], request[-20:]):
                await client.send(piece)
                await asyncio.sleep(UNDER)
            return await client.read_response()

    upstream.script = script
    assert (await slowly("alone")).complete
    held = s.Held(s.SSE_HEAD)
    upstream.script = held
    async with client_of(gateway) as holder:
        await holder.send(ask("holder"))
        await held.wire()
        upstream.script = script
        queued = asyncio.create_task(slowly("queued"))
        await asyncio.sleep(3 * UNDER + UNDER / 2)
    assert (await queued).complete
    for name in ("alone", "queued"):
        line = await entry(gateway, name)
        assert (line["outcome"], line["code"]) == ("complete", None)
