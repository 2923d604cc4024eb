"""The scripted sockets against each other: what they say about bytes, ends and framing is so."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support import script as s
from tests.support.client import RawClient
from tests.support.clock import ManualClock
from tests.support.gateway import LISTENING, UNTIDY, Samples, until
from tests.support.messages import HttpWire, Message
from tests.support.tls import Certificates
from tests.support.upstream import RawUpstream
from tests.support.wire import Closed

EVENTS = (s.delta("a"), s.delta("\u00e9\U0001f600"), *s.FINISHED)


@pytest.fixture
async def near(upstream: RawUpstream) -> AsyncIterator[RawClient]:
    """A client of the upstream itself, with no gateway between them."""
    client = await RawClient.connect(port=upstream.port)
    yield client
    client.reset()


def whole(*pieces: bytes) -> bytes:
    return s.head(200, [("content-length", str(sum(map(len, pieces))))]) + b"".join(pieces)


class TestReading:
    async def test_content_length(self, upstream: RawUpstream, near: RawClient) -> None:
        upstream.script = s.reply(201, {"a": 1}, [("X-Two", " a  b "), s.JSON_TYPE, ("x-two", "\xe9")], "Made")
        answer = await near.ask()
        assert (answer.status, answer.reason, answer.framing, answer.complete) == (201, "Made", "length", True)
        assert answer.json() == {"a": 1}
        assert answer.all("X-TWO") == ["a  b", "\xe9"]
        assert answer.without("x-two") == [s.JSON_TYPE, ("content-length", "8")]

    async def test_an_event_stream(self, upstream: RawUpstream, near: RawClient) -> None:
        upstream.script = s.stream(*EVENTS)
        answer = await near.ask()
        assert (answer.framing, answer.complete, answer.trailers) == ("chunked", True, [])
        assert answer.body == b"".join(EVENTS)
        assert [data for _, data in answer.chunks] == list(EVENTS)
        assert answer.text() == "a\u00e9\U0001f600"
        assert answer.events()[-1] == "[DONE]"

    @pytest.mark.parametrize("size", [1, 2, 7, 100])
    async def test_in_any_pieces(self, upstream: RawUpstream, near: RawClient, size: int) -> None:
        stream = s.SSE_HEAD + b"".join(map(s.chunk, EVENTS)) + s.LAST

        async def script(wire: HttpWire, request: Message) -> None:
            await wire.send_split(stream, size=size)

        upstream.script = script
        await near.send_split(s.post(), size=size)
        answer = await near.read_response()
        assert answer.complete
        assert answer.body == b"".join(EVENTS)
        assert near.received == stream
        assert upstream.requests[0].json() == s.CHAT
        assert upstream.connections[0].received == s.post()

    async def test_trailers_and_interim_heads(self, upstream: RawUpstream, near: RawClient) -> None:
        upstream.script = s.raw(s.head(100, [], "Continue"), s.SSE_HEAD + s.chunk(b"x") + b"0\r\nA: b\r\n\r\n")
        answer = await near.ask()
        assert [interim.status for interim in answer.interim] == [100]
        assert answer.trailers == [("A", "b")]

    async def test_until_the_end(self, upstream: RawUpstream, near: RawClient) -> None:
        upstream.script = s.raw(s.head(200), b"abc", then="fin")
        answer = await near.ask()
        assert (answer.framing, answer.body, answer.complete) == ("close", b"abc", True)

    @pytest.mark.parametrize("then", ["fin", "reset"])
    @pytest.mark.parametrize(
        ("sent", "body"),
        [
            (s.head(200, [("content-length", "10")]) + b"12345", b"12345"),
            (s.SSE_HEAD + s.chunk(b"12345"), b"12345"),
            (s.SSE_HEAD + s.chunk(b"12345") + b"0\r\n", b"12345"),
            (s.SSE_HEAD + s.chunk(b"12345") + b"5\r\n67", b"1234567"),
            (s.SSE_HEAD + s.chunk(b"12345") + b"5", b"12345"),
        ],
    )
    async def test_cut_short(self, upstream: RawUpstream, near: RawClient, sent: bytes, body: bytes, then: str) -> None:
        upstream.script = s.raw(sent, gap=0.01, then=then)
        answer = await near.ask()
        assert (answer.complete, answer.body) == (False, body)
        assert near.ended == {"fin": "fin", "reset": "rst"}[then]

    async def test_a_reset_ends_no_message(self, upstream: RawUpstream, near: RawClient) -> None:
        upstream.script = s.raw(s.head(200), b"abc", gap=0.01, then="reset")
        assert not (await near.ask()).complete

    async def test_no_body_where_none_can_be(self, upstream: RawUpstream, near: RawClient) -> None:
        upstream.script = s.in_turn(s.reply(200, b"abc"), s.raw(s.head(204)), s.raw(s.head(304)), s.reply(200, b"last"))
        for method in ("HEAD", "POST", "POST"):
            answer = await near.ask(s.get("/x", method=method))
            assert (answer.complete, answer.body) == (True, b"")
        assert (await near.ask()).body == b"last"
        assert len(upstream.connections) == 1

    @pytest.mark.parametrize(
        "sent",
        [
            b"HTTP/2 200 OK\r\n\r\n",
            b"HTTP/1.1 200\r\n\r\n",
            s.head(200, [("a b", "c")]),
            s.head(200, [("content-length", "+1")]),
            s.head(200, [("content-length", "1"), ("content-length", "1")]),
            s.head(200, [("content-length", "1"), ("transfer-encoding", "chunked")]),
            s.head(200, [("transfer-encoding", "gzip, chunked")]),
            s.SSE_HEAD + b"1;a=b\r\nx\r\n",
            s.SSE_HEAD + b"0x1\r\nx\r\n",
            s.SSE_HEAD + b" 1\r\nx\r\n",
            s.SSE_HEAD + b"1\r\nxy\r\n",
        ],
    )
    async def test_strictly(self, upstream: RawUpstream, near: RawClient, sent: bytes) -> None:
        upstream.script = s.raw(sent, then="fin")
        with pytest.raises(AssertionError):
            await near.ask()

    async def test_a_request_that_is_none_fails_the_test(self) -> None:
        upstream = RawUpstream()
        await upstream.start()
        client = await RawClient.connect(port=upstream.port)
        await client.send(b"POST  /x HTTP/1.1\r\n\r\n")
        await client.wait_closed()
        client.fin()
        with pytest.raises(AssertionError, match="no start line"):
            await upstream.stop()

    async def test_nothing_at_all(self, upstream: RawUpstream, near: RawClient) -> None:
        upstream.script = s.vanish
        with pytest.raises(Closed):
            await near.ask()
        assert near.ended == "rst"

    async def test_a_timeout(self, upstream: RawUpstream, near: RawClient) -> None:
        upstream.script = s.Held(s.SSE_HEAD + s.chunk(b"abc"))
        await near.send(s.post())
        answer = await near.read_response_head()
        with pytest.raises(TimeoutError):
            await near.read_response_body(answer, timeout=0.05)
        assert answer.body == b"abc"


class TestUpstream:
    async def test_probes_are_no_requests(self, upstream: RawUpstream, near: RawClient) -> None:
        assert (await near.ask(s.get("/v1/models"))).json()["data"][0]["id"] == "m"
        assert (await near.ask(s.get("/health"))).body == b""
        upstream.probes["/health"] = s.reply(503)
        assert (await near.ask(s.get("/health"))).status == 503
        assert upstream.requests == []
        assert upstream.probed == ["/v1/models", "/health", "/health"]

    @pytest.mark.parametrize("how", ["fin", "rst"])
    async def test_sees_when_and_how_its_client_left(self, upstream: RawUpstream, near: RawClient, how: str) -> None:
        """Also while the script does something else, and only then."""
        upstream.script = held = s.Held(s.SSE_HEAD)
        await near.send(s.post())
        await near.receive_until(s.SSE_HEAD)
        wire = await held.wire()
        assert wire.ended is None
        before = time.monotonic()
        if how == "fin":
            near.fin()
        else:
            near.reset()
        closed_at = await wire.wait_closed()
        assert wire.ended == how
        assert before <= closed_at < before + 1

    async def test_a_half_close_is_an_end_too(self, upstream: RawUpstream, near: RawClient) -> None:
        async def script(wire: HttpWire, request: Message) -> None:
            await wire.wait_closed()
            await wire.send(whole(b"still"))

        upstream.script = script
        await near.send(s.post())
        near.half_close()
        assert (await near.read_response()).body == b"still"
        assert upstream.connections[0].ended == "fin"

    async def test_bytes_before_a_reset_are_not_lost(self, upstream: RawUpstream, near: RawClient) -> None:
        upstream.script = s.raw(whole(b"x" * 1000), then="reset")
        await near.send(s.post())
        await until(lambda: upstream.connections and upstream.connections[0].closed, "the reset")
        answer = await near.read_response()
        assert answer.complete
        await near.wait_closed()
        assert near.ended == "rst"

    async def test_a_send_after_a_reset_keeps_what_came(self, upstream: RawUpstream, near: RawClient) -> None:
        upstream.script = s.raw(whole(b"early"), then="reset")
        await near.send(s.post())
        await until(lambda: upstream.connections and upstream.connections[0].closed, "the reset")
        with pytest.raises(ConnectionError):
            for _ in range(100):
                await near.send(b"x")
                await asyncio.sleep(0.01)
        assert (await near.read_response()).body == b"early"
        assert near.ended == "rst"

    async def test_a_reset_interrupts_a_send(self, upstream: RawUpstream) -> None:
        client = await RawClient.connect(port=upstream.port, receive_buffer=4096)
        upstream.script = held = s.Held()
        await client.send(s.post())
        wire = await held.wire()
        sending = asyncio.create_task(wire.send(bytes(2**24)))
        await until(lambda: wire.sent_bytes > 0, "a full socket")
        await asyncio.sleep(0.02)
        wire.reset()
        with pytest.raises(ConnectionAbortedError):
            await sending
        await client.wait_closed()
        assert client.ended == "rst"
        client.fin()

    async def test_a_client_that_does_not_read_holds_the_sender(self, upstream: RawUpstream) -> None:
        client = await RawClient.connect(port=upstream.port, receive_buffer=4096)
        upstream.script = s.reply(200, bytes(2**24))
        await client.send(s.post())
        await until(lambda: upstream.connections and upstream.connections[0].sent_bytes, "the first bytes")
        await asyncio.sleep(0.05)
        held = upstream.connections[0].sent_bytes
        assert held < 2**23
        client.keep_log = False
        assert len((await client.read_response(timeout=20)).body) == 2**24
        client.fin()

    async def test_a_read_rate(self, upstream: RawUpstream) -> None:
        client = await RawClient.connect(port=upstream.port, rate=100_000)
        upstream.script = s.reply(200, bytes(20_000))
        began = time.monotonic()
        assert (await client.ask()).complete
        assert 0.15 < time.monotonic() - began < 2
        client.fin()

    async def test_a_paused_wire_leaves_bytes_in_the_kernel(self, upstream: RawUpstream, near: RawClient) -> None:
        upstream.script = held = s.Held()
        await near.send(s.post())
        wire = await held.wire()
        wire.pause()
        await near.send(b"abc")
        await asyncio.sleep(0.02)
        assert b"abc" not in wire.received[-3:]
        wire.resume()
        await until(lambda: wire.received.endswith(b"abc"), "what was sent")

    async def test_refuses_once_its_listener_is_closed(self, upstream: RawUpstream, near: RawClient) -> None:
        """On an address of its own: the session's listener stays open behind `upstream`."""
        other = RawUpstream()
        await other.start()
        client = await RawClient.connect(port=other.port)
        other.close_listener()
        with pytest.raises(ConnectionRefusedError):
            await RawClient.connect(port=other.port)
        client.fin()
        await other.stop()

    async def test_a_unix_socket(self, tmp_path: Path) -> None:
        upstream = RawUpstream(s.reply(200, b"here"))
        await upstream.start(unix=tmp_path / "u")
        client = await RawClient.connect(unix=tmp_path / "u")
        assert (await client.ask()).body == b"here"
        client.fin()
        await upstream.stop()


class TestTls:
    @pytest.fixture
    async def secure(self, certificates: Certificates) -> AsyncIterator[RawUpstream]:
        upstream = RawUpstream()
        await upstream.start(tls=certificates.server_context())
        yield upstream
        await upstream.stop()

    @pytest.mark.parametrize("hostname", ["localhost", "127.0.0.1"])
    async def test_an_exchange(self, secure: RawUpstream, certificates: Certificates, hostname: str) -> None:
        secure.script = s.stream(*EVENTS, bytes(200_000))
        client = await RawClient.connect(port=secure.port, tls=certificates.client_context(), hostname=hostname)
        answer = await client.ask()
        assert answer.complete
        assert answer.body == b"".join(EVENTS) + bytes(200_000)
        assert secure.url.startswith("https://")
        client.fin()

    @pytest.mark.parametrize("notify", [True, False])
    async def test_close_notify(self, secure: RawUpstream, certificates: Certificates, notify: bool) -> None:
        async def script(wire: HttpWire, request: Message) -> None:
            await wire.send(s.head(200) + b"abc")
            wire.fin(notify=notify)

        secure.script = script
        client = await RawClient.connect(port=secure.port, tls=certificates.client_context())
        answer = await client.ask()
        assert (answer.body, answer.complete, client.close_notify) == (b"abc", notify, notify)
        client.fin()

    async def test_a_certificate_that_is_not_trusted(self, secure: RawUpstream) -> None:
        with pytest.raises(ssl.SSLCertVerificationError):
            await RawClient.connect(port=secure.port, tls=ssl.create_default_context())

    async def test_client_certificates(self, certificates: Certificates) -> None:
        upstream = RawUpstream()
        await upstream.start(tls=certificates.server_context(client_ca=True))
        client = await RawClient.connect(port=upstream.port, tls=certificates.client_context(certificate=True))
        assert (await client.ask()).status == 200
        client.fin()
        stranger = await RawClient.connect(port=upstream.port, tls=certificates.client_context())
        with pytest.raises((Closed, ssl.SSLError)):
            await stranger.ask()
        stranger.fin()
        await upstream.stop()


def test_a_manual_clock() -> None:
    clock, rung = ManualClock(10), []
    clock.call_at(12, lambda: rung.append(clock()))
    clock.call_at(11, lambda: rung.append(clock()))
    clock.call_at(20, lambda: rung.append(clock()))
    assert clock.advance(5) == clock() == 15
    assert rung == [11, 12]


def test_samples() -> None:
    text = 'a_total{x="1",y="2"} 3\na_total{x="1",y="3"} 4\nb 5\n'
    samples = Samples((x.name, x.labels, x.value) for f in text_string_to_metric_families(text) for x in f.samples)
    assert samples.value("a_total") == 7
    assert samples.value("a_total", y="2") == 3
    assert samples.value("nothing") == 0
    assert samples.has("b")
    assert not samples.has("b", x="1")


def test_the_listening_line() -> None:
    match = LISTENING.search("2026 info listening on http://127.0.0.1:81, admin on http://[::1]:82\n")
    assert match
    assert match.groups() == ("http", "127.0.0.1", "81", "[::1]", "82")
    assert UNTIDY.search("Task exception was never retrieved")
