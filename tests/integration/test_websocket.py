"""A WebSocket, relayed: the same frames both ways, both sides closed together, at the pace of the slower one."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import signal
import struct
import time
from collections.abc import Awaitable, Callable

import aiohttp
import pytest

from tests.support import script as s
from tests.support.client import RawClient
from tests.support.gateway import Gateway
from tests.support.messages import HttpWire, Message
from tests.support.upstream import RawUpstream

Connect = Callable[..., Awaitable[RawClient]]
KEY = base64.b64encode(b"0123456789abcdef").decode()
UPGRADE = [("Connection", "keep-alive, Upgrade"), ("Upgrade", "websocket"), ("Sec-WebSocket-Version", "13"),
           ("Sec-WebSocket-Key", KEY), ("Sec-WebSocket-Protocol", "realtime, other")]  # fmt: skip


def accept(key: str) -> str:
    return base64.b64encode(hashlib.sha1((key + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11").encode()).digest()).decode()


def ask(request_id: str = "ws", fields: list[tuple[str, str]] = UPGRADE) -> bytes:
    return s.get("/v1/realtime?model=m", [*fields, ("X-Request-Id", request_id)])


def frame(opcode: int, data: bytes = b"", *, masked: bool = False, fin: bool = True) -> bytes:
    size, mask = len(data), 0x80 if masked else 0
    head = bytes([opcode | (0x80 if fin else 0)])
    if size < 126:
        head += bytes([size | mask])
    elif size < 65536:
        head += bytes([126 | mask]) + struct.pack("!H", size)
    else:
        head += bytes([127 | mask]) + struct.pack("!Q", size)
    return head + (b"\x00\x00\x00\x00" if masked else b"") + data


CORPUS = [
    frame(1, "é\U0001f600".encode(), masked=True), frame(2, bytes(range(256)), masked=True),
    frame(9, b"ping", masked=True), frame(1, b"fra", masked=True, fin=False), frame(9, masked=True),
    frame(0, b"gment", masked=True),
    frame(2, b"x" * 126, masked=True), frame(2, b"x" * 70_000, masked=True), frame(10, b"", masked=True),
    frame(8, struct.pack("!H", 4001) + b"bye", masked=True), b"\xff\x00 no frame at all \x00",
]  # fmt: skip


async def agree(wire: HttpWire, request: Message, protocol: str = "realtime", more: bytes = b"") -> None:
    fields = [("Upgrade", "websocket"), ("Connection", "Upgrade"),
              ("Sec-WebSocket-Accept", accept(request.get("sec-websocket-key") or "")),
              ("Sec-WebSocket-Protocol", protocol), ("X-Extra", "1")]  # fmt: skip
    await wire.send(s.head(101, fields, "Switching Protocols") + more)


class Talk:
    """A script that agrees, and hands its wire to the test."""

    def __init__(self, more: bytes = b"") -> None:
        self.more, self.ready = more, asyncio.get_running_loop().create_future()

    async def __call__(self, wire: HttpWire, request: Message) -> None:
        await agree(wire, request, more=self.more)
        self.ready.set_result((wire, request))
        await wire.wait_closed(60)

    async def wire(self) -> HttpWire:
        wire, _ = await asyncio.wait_for(self.ready, 5)
        assert isinstance(wire, HttpWire)
        return wire


async def opened(client: RawClient, request_id: str = "ws") -> Message:
    await client.send(ask(request_id))
    answer = await client.read_response_head()
    assert answer.status == 101
    return answer


async def test_the_handshake(gateway: Gateway, upstream: RawUpstream, client: RawClient) -> None:
    """The backend sees the client's, the client sees the backend's answer: key, subprotocol, and all."""
    upstream.script = talk = Talk()
    answer = await opened(client)
    await talk.wire()
    request = upstream.requests[0]
    assert request.target == "/v1/realtime?model=m"
    assert request.get("sec-websocket-key") == KEY
    assert request.get("sec-websocket-version") == "13"
    assert request.get("sec-websocket-protocol") == "realtime, other"
    assert (request.get("upgrade") or "").lower() == "websocket"
    assert (request.get("connection") or "").lower() == "upgrade"
    assert answer.get("sec-websocket-accept") == accept(KEY)
    assert (answer.get("sec-websocket-protocol"), answer.get("x-extra")) == ("realtime", "1")
    assert (answer.get("upgrade"), (answer.get("connection") or "").lower()) == ("websocket", "upgrade")
    assert answer.get("x-request-id") == "ws"
    assert answer.get("content-length") is None
    assert answer.get("transfer-encoding") is None


@pytest.mark.parametrize("upgrade", [[], [("Upgrade", "h2c")]])
async def test_another_protocol(gateway: Gateway, upstream: RawUpstream, upgrade: list[tuple[str, str]]) -> None:
    """A 101 that does not say WebSocket is none, and is not made one."""
    upstream.script = s.raw(s.head(101, [*upgrade, ("Connection", "Upgrade")], "Switching Protocols"))
    answer = await gateway.ask(ask())
    assert (answer.status, answer.get("x-gateway-error")) == (502, "upstream_malformed")


@pytest.mark.parametrize("status", [400, 401, 403, 404, 426, 503])
async def test_a_refused_handshake(gateway: Gateway, upstream: RawUpstream, client: RawClient, status: int) -> None:
    """What the backend says instead is the answer, and the connection goes on."""
    upstream.script = s.reply(status, b'{"error": 1}')
    answer = await client.ask(ask())
    assert (answer.status, answer.body) == (status, b'{"error": 1}')
    upstream.script = s.reply()
    assert (await client.ask()).status == 200


async def test_a_handshake_that_is_ignored(gateway: Gateway, upstream: RawUpstream, client: RawClient) -> None:
    """A backend that does not know the word answers 200, and that is relayed."""
    upstream.script = s.stream(s.delta("a"), *s.FINISHED)
    answer = await client.ask(ask())
    assert (answer.status, answer.complete) == (200, True)


async def test_nobody_had_asked(gateway: Gateway, upstream: RawUpstream, client: RawClient) -> None:
    """A backend that switches protocols by itself is malformed: 502, and none of its octets."""

    async def script(wire: HttpWire, request: Message) -> None:
        await agree(wire, request, more=frame(1, b"injected"))

    upstream.script = script
    for request in (s.post(), ask(fields=[("Upgrade", "h2c"), ("Connection", "Upgrade")])):
        answer = await gateway.ask(request)
        assert (answer.status, answer.get("x-gateway-error")) == (502, "upstream_malformed")
        assert b"injected" not in answer.body


async def test_frames_pass_both_ways(gateway: Gateway, upstream: RawUpstream, client: RawClient) -> None:
    """Octet for octet, whole and one octet at a time, control frames and what is no frame included."""
    upstream.script = talk = Talk(more=frame(1, b"first"))
    await opened(client)
    wire = await talk.wire()
    await client.receive_until(frame(1, b"first"))
    everything = b"".join(CORPUS)
    got = wire.received_bytes
    await client.send(everything)
    await client.send_split(CORPUS[0] + CORPUS[2])
    await wait_bytes(wire, got + len(everything) + len(CORPUS[0] + CORPUS[2]))
    assert bytes(wire.received[got:]) == everything + CORPUS[0] + CORPUS[2]
    got = client.received_bytes
    await wire.send(everything)
    await wire.send_split(CORPUS[0])
    while client.received_bytes < got + len(everything) + len(CORPUS[0]):
        assert await client.more()
    assert bytes(client.received[got:]) == everything + CORPUS[0]


async def wait_bytes(wire: HttpWire, count: int) -> None:
    while wire.received_bytes < count:
        assert await wire.more()


async def test_octets_sent_ahead(gateway: Gateway, upstream: RawUpstream, client: RawClient) -> None:
    """A client that does not wait for the 101 loses nothing."""
    upstream.script = talk = Talk()
    await client.send(ask() + CORPUS[0])
    wire = await talk.wire()
    await asyncio.wait_for(wire.receive_until(CORPUS[0]), 5)
    assert (await client.read_response_head()).status == 101


@pytest.mark.parametrize("how", ["fin", "rst", "half"])
async def test_the_client_ends(gateway: Gateway, upstream: RawUpstream, client: RawClient, how: str) -> None:
    """The backend's side is closed with it, in silence too."""
    upstream.script = talk = Talk()
    await opened(client, f"c-{how}")
    wire = await talk.wire()
    began = time.monotonic()
    {"fin": client.fin, "rst": client.reset, "half": client.half_close}[how]()
    took = await wire.wait_closed() - began
    print(f"websocket, {how}: {took * 1000:.1f} ms")
    assert took < 0.25
    (entry,) = await gateway.logged(request_id=f"c-{how}")
    assert entry["status"] == 101
    assert entry["outcome"] == "client_gone"


@pytest.mark.parametrize("how", ["fin", "rst"])
async def test_the_backend_ends(gateway: Gateway, upstream: RawUpstream, client: RawClient, how: str) -> None:
    """Its last frame, with code and reason, is delivered first; then the client's side is closed."""
    upstream.script = talk = Talk()
    await opened(client, f"b-{how}")
    wire = await talk.wire()
    last = frame(8, struct.pack("!H", 4001) + b"bye")
    await wire.send(last)
    if how == "fin":
        wire.fin()
    else:
        await client.receive_until(last)
        wire.reset()
    await client.receive_until(last)
    await client.wait_closed(2)
    (entry,) = await gateway.logged(request_id=f"b-{how}")
    assert (entry["status"], entry["bytes_out"]) == (101, len(last))
    assert entry["outcome"] == ("complete" if how == "fin" else "upstream_reset")
    await gateway.idle()


async def test_counts(gateway: Gateway, upstream: RawUpstream, client: RawClient) -> None:
    """One line when it is over, with the octets of both directions; in flight until then."""
    upstream.script = talk = Talk()
    await opened(client, "counted")
    wire = await talk.wire()
    await client.send(CORPUS[0])
    await wire.send(frame(1, b"answer"))
    await client.receive_until(b"answer")
    (stream,) = (await gateway.admin(s.get("/-/streams"))).json()
    assert (stream["request_id"], stream["phase"]) == ("counted", "stream")
    wire.fin()
    (entry,) = await gateway.logged(request_id="counted")
    assert (entry["bytes_in"], entry["bytes_out"]) == (len(CORPUS[0]), len(frame(1, b"answer")))


@pytest.mark.parametrize("direction", ["down", "up"])
async def test_backpressure(gateway: Gateway, upstream: RawUpstream, connect: Connect, direction: str) -> None:
    """A side that does not read holds back the other one, in bounded memory; once it reads, nothing is missing."""
    client = await connect(receive_buffer=4096 if direction == "down" else None)
    upstream.script = talk = Talk()
    await opened(client, direction)
    wire = await talk.wire()
    source, sink = (wire, client) if direction == "down" else (client, wire)
    if direction == "up":
        wire.pause()
    before, got = gateway.rss(), sink.received_bytes
    data = hashlib.shake_128(direction.encode()).digest(20_000_000)
    sending = asyncio.create_task(source.send(data))
    sent = -1
    while sent != source.sent_bytes:
        sent = source.sent_bytes
        await asyncio.sleep(0.2)
    print(f"{direction}: {sent} octets under way, {(gateway.rss() - before) / 1024:.0f} KiB")
    assert not sending.done()
    assert gateway.rss() - before < 2 << 20
    if direction == "up":
        wire.resume()
        await wait_bytes(wire, got + len(data))
    while sink.received_bytes < got + len(data):
        assert await sink.more()
    await sending
    assert bytes(sink.received[got:]) == data


@pytest.mark.config({"timeouts": {"idle": 0.4, "first_byte": 0.3, "keepalive": 0.3, "request_header": 0.3}})
async def test_idle(gateway: Gateway, upstream: RawUpstream, connect: Connect) -> None:
    """Only silence on both sides ends it, and no other clock does."""
    upstream.script = talk = Talk()
    client = await connect()
    await opened(client, "idle")
    wire = await talk.wire()
    for number in range(5):
        await asyncio.sleep(0.25)
        await (client if number % 2 else wire).send(frame(9))
    began = time.monotonic()
    await client.wait_closed()
    assert 0.3 < time.monotonic() - began < 0.9
    await wire.wait_closed(1)
    (entry,) = await gateway.logged(request_id="idle")
    assert entry["outcome"] == "timeout_idle"


@pytest.mark.config({"timeouts": {"client_write": 0.4}})
@pytest.mark.parametrize("backend", ["ends", "goes on"])
async def test_a_client_that_takes_nothing(gateway: Gateway, upstream: RawUpstream, connect: Connect, backend: str) -> None:
    """It ends by its deadline, however much of what the backend said is still here: also where the backend has ended, and
    what is left is more than the kernel takes and less than what holds the backend back."""
    sizes = range(40_000, 160_000, 10_000) if backend == "ends" else [4_000_000]

    async def script(wire: HttpWire, request: Message) -> None:
        await agree(wire, request)
        with contextlib.suppress(ConnectionError):
            await wire.send(b"z" * int((request.get("x-request-id") or "").removeprefix("size-")))
        if backend == "ends":
            wire.fin()
        else:
            await wire.wait_closed(20)

    upstream.script = script
    clients = []
    for size in sizes:
        client = await connect(receive_buffer=4096)
        await client.send(ask(f"size-{size}"))
        clients.append(client)
    for size in sizes:
        (entry,) = await gateway.logged(request_id=f"size-{size}")
        assert entry["outcome"] in ("client_stalled", "complete")
        assert backend == "ends" or entry["outcome"] == "client_stalled"
    await gateway.idle()


@pytest.mark.config({"timeouts": {"total": 0.5}})
async def test_total(gateway: Gateway, upstream: RawUpstream, connect: Connect) -> None:
    """The whole of it may take no longer, however busy it is."""
    upstream.script = talk = Talk()
    client = await connect()
    await opened(client, "total")
    wire = await talk.wire()
    with contextlib.suppress(ConnectionError):
        for _ in range(200):
            await asyncio.sleep(0.05)
            await wire.send(frame(9))
    (entry,) = await gateway.logged(request_id="total")
    assert entry["outcome"] == "timeout_total"


async def test_an_ordinary_client(gateway: Gateway, upstream: RawUpstream) -> None:
    """aiohttp's own client talks through it: text, ping, and a close with code and reason."""

    async def script(wire: HttpWire, request: Message) -> None:
        await agree(wire, request)
        await wire.send(frame(1, b"hello") + frame(9, b"p"))
        await asyncio.wait_for(wire.receive_until(b"\x8a\x81"), 5)  # its pong, masked
        await wire.send(frame(8, struct.pack("!H", 4002) + b"enough"))
        with contextlib.suppress(TimeoutError):
            await wire.wait_closed(1)
        wire.fin()

    upstream.script = script
    async with aiohttp.ClientSession() as session:
        url = f"{gateway.url}/v1/realtime"
        async with session.ws_connect(url, protocols=("realtime",)) as ws:
            assert ws.protocol == "realtime"
            assert (await ws.receive()).data == "hello"
            closing = await ws.receive()
            assert (closing.type, closing.data, closing.extra) == (aiohttp.WSMsgType.CLOSE, 4002, "enough")


async def test_paths_hold_for_it_too(gateway: Gateway, upstream: RawUpstream, client: RawClient) -> None:
    """A path that is not served is refused before any backend hears of it."""
    answer = await client.ask(s.get("/metrics", UPGRADE))
    assert (answer.status, answer.get("x-gateway-error")) == (404, "unknown_path")
    assert not upstream.requests


@pytest.mark.parametrize("drain", [0.3, 30])
async def test_shutdown(start_gateway: Callable[..., Awaitable[Gateway]], upstream: RawUpstream, drain: float) -> None:
    """Ten of them end at the limit, or by their own close before it; both sides are closed, and the status is 0."""
    gateway = await start_gateway(config={"timeouts": {"drain": drain}}, backends=[upstream.url])
    clients, wires = [await gateway.connect() for _ in range(10)], []
    for number, client in enumerate(clients):
        upstream.script = talk = Talk()
        await opened(client, f"d-{number}")
        wires.append(await talk.wire())
    began = time.monotonic()
    gateway.signal(signal.SIGTERM)
    if drain > 1:
        for wire in wires:
            wire.fin()
    ended = await gateway.stopped(timeout=6)
    assert ended - began < 2.5
    for client in clients:
        await client.wait_closed(1)
        client.fin()
    if drain < 1:
        for wire in wires:
            await wire.wait_closed(1)
