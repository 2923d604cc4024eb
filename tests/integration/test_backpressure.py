"""A slow client holds back its own upstream and nobody else, in bounded memory, and loses nothing by it."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from tests.support import script as s
from tests.support.client import RawClient
from tests.support.gateway import Gateway
from tests.support.messages import HttpWire, Message
from tests.support.upstream import RawUpstream

Connect = Callable[..., Awaitable[RawClient]]
EVENTS = s.chunk(s.delta("y" * 4000)) * 16
TINY = s.chunk(s.delta("t")) * 300
STALLED = 50
EACH = 256 * 1024  # octets of the gateway's that a stalled client may cost
PER_STREAM = 1 << 20  # octets that an upstream can get rid of for one stalled client: buffers, the kernel's too


def flood(wire_log: dict[str, HttpWire], piece: bytes = EVENTS) -> s.Script:
    """An endless stream, as fast as it is taken."""

    async def script(wire: HttpWire, request: Message) -> None:
        wire.keep_log = False
        wire_log[request.get("x-request-id") or ""] = wire
        with contextlib.suppress(ConnectionError):
            await wire.send(s.SSE_HEAD)
            while True:
                await wire.send(piece)

    return script


def chat(request_id: str) -> bytes:
    return s.post(fields=[("X-Request-Id", request_id)])


async def settled(count: Callable[[], int], quiet: float = 0.3) -> int:
    """Wait until it grows no more."""
    seen, since = count(), time.monotonic()
    async with asyncio.timeout(15):
        while time.monotonic() - since < quiet:
            await asyncio.sleep(0.02)
            if count() != seen:
                seen, since = count(), time.monotonic()
    return seen


@pytest.mark.parametrize("piece", [EVENTS, TINY, b"10000000\r\n" + b"z" * 65536], ids=["events", "tiny", "one line"])
async def test_a_client_that_does_not_read(
    gateway: Gateway, upstream: RawUpstream, connect: Connect, piece: bytes
) -> None:
    """Its upstream's sending stalls: whatever the stream is made of, a bounded part of it is under way."""
    wires: dict[str, HttpWire] = {}
    plain = flood(wires, piece)

    async def line(wire: HttpWire, request: Message) -> None:
        wires[""] = wire
        with contextlib.suppress(ConnectionError):
            await wire.send(s.SSE_HEAD + piece)
            while True:
                await wire.send(piece[-65536:])

    upstream.script = line if piece.startswith(b"1000") else plain
    client = await connect(receive_buffer=4096)
    await client.send(s.post())
    await upstream.wait_requests()
    sent = await settled(lambda: upstream.wires[-1].sent_bytes)
    print(f"under way for a stalled client: {sent} octets")
    assert sent < PER_STREAM + 4 * 1024 * 1024  # the test's own sending buffer is the kernel's to choose
    samples = await gateway.metrics()
    assert samples.value("tokenpipe_write_buffer_bytes") <= 65536 + 2 * 65536
    assert samples.value("tokenpipe_backpressure_pauses_total") >= 1


@pytest.mark.seconds(60)
async def test_memory_of_stalled_clients(gateway: Gateway, upstream: RawUpstream, connect: Connect) -> None:
    """Fifty of them, with an endless stream each: at most 256 KiB each, and not growing."""
    await asyncio.gather(*(gateway.ask() for _ in range(50)))
    before = gateway.rss()
    wires: dict[str, HttpWire] = {}
    upstream.script = flood(wires)
    clients = await asyncio.gather(*(connect(receive_buffer=4096) for _ in range(STALLED)))
    await asyncio.gather(*(client.send(chat(f"s-{n}")) for n, client in enumerate(clients)))
    await settled(lambda: sum(wire.sent_bytes for wire in wires.values()), 1.0)
    assert len(wires) == STALLED
    grown = gateway.rss() - before
    print(f"{STALLED} stalled clients: {grown / STALLED / 1024:.0f} KiB each")
    assert grown < STALLED * EACH
    upstream.script = s.stream(s.delta("a"), *s.FINISHED)
    began = time.monotonic()
    assert (await gateway.ask()).complete
    assert time.monotonic() - began < 0.5
    for client in clients:
        client.reset()
    await gateway.idle()
    assert await gateway.metric("tokenpipe_write_buffer_bytes") == 0


async def test_memory_of_tiny_chunks(gateway: Gateway, upstream: RawUpstream, connect: Connect) -> None:
    """A hundred thousand events to a client that reads: nothing is kept of any of them."""
    await gateway.ask()
    before = gateway.rss()
    client = await connect()
    client.keep_log = False
    upstream.script = s.stream(*[s.delta("t") * 100] * 1000, *s.FINISHED)
    answer = await client.ask(timeout=20)
    assert answer.complete
    grown = gateway.rss() - before
    print(f"100,000 events: {grown / 1024:.0f} KiB")
    assert grown < 8 << 20


@pytest.mark.parametrize("framing", ["chunked", "length", "close"])
async def test_a_reader_that_resumes_gets_every_octet(
    gateway: Gateway, upstream: RawUpstream, connect: Connect, framing: str
) -> None:
    """Five megabytes, paused now and then, also behind the upstream's end: not an octet is missing."""
    body = b"".join(hashlib.sha256(b"%d" % n).digest() for n in range(5 * 2**20 // 32))
    fields = [("content-type", "application/octet-stream")]
    if framing == "chunked":
        pieces = [body[at : at + 30_000] for at in range(0, len(body), 30_000)]
        whole = s.head(200, [*fields, ("transfer-encoding", "chunked")]) + b"".join(map(s.chunk, pieces)) + s.LAST
    elif framing == "length":
        whole = s.head(200, [*fields, ("content-length", str(len(body)))]) + body
    else:
        whole = s.head(200, [*fields, ("connection", "close")]) + body
    upstream.script = s.raw(whole, then="keep" if framing != "close" else "fin")
    client = await connect(receive_buffer=16384)
    await client.send(chat(f"resumed-{framing}"))
    await asyncio.sleep(0.3)
    head = await client.read_response_head()
    for _ in range(3):
        await client.more()
        await asyncio.sleep(0.1)
    answer = await client.read_response_body(head, timeout=20)
    assert answer.complete
    assert hashlib.sha256(answer.body).digest() == hashlib.sha256(body).digest()
    (entry,) = await gateway.logged(request_id=f"resumed-{framing}")
    assert entry["bytes_out"] == len(body)


async def test_a_trickling_reader(gateway: Gateway, upstream: RawUpstream, connect: Connect) -> None:
    """One that reads at its own pace gets all of it, at that pace, and its upstream goes no faster."""
    wires: dict[str, HttpWire] = {}
    upstream.script = flood(wires)
    client = await connect(receive_buffer=4096, rate=200_000)
    client.keep_log = False
    await client.send(chat("trickle"))
    await client.read_response_head()
    start = await settled_rate(wires["trickle"], client)
    assert start < 2_000_000, f"{start:.0f} octets a second"


async def settled_rate(wire: HttpWire, client: RawClient) -> float:
    """Octets a second that the upstream gets rid of once all buffers are full."""
    deadline, sent, began = time.monotonic() + 2.5, 0, 0.0
    while (now := time.monotonic()) < deadline:
        await client.more()
        client.pending.clear()
        if not began and now > deadline - 1.0:
            sent, began = wire.sent_bytes, now
    return (wire.sent_bytes - sent) / (time.monotonic() - began)


async def test_neighbours_keep_pace(gateway: Gateway, upstream: RawUpstream, connect: Connect) -> None:
    """While twenty are stalled and one floods a fast reader, another stream's events come as they are sent."""
    wires: dict[str, HttpWire] = {}
    endless = flood(wires)

    async def script(wire: HttpWire, request: Message) -> None:
        if request.get("x-request-id") == "paced":
            await s.stream(*[s.delta("p")] * 60, *s.FINISHED, gap=0.02)(wire, request)
        else:
            await endless(wire, request)

    upstream.script = script
    stalled = await asyncio.gather(*(connect(receive_buffer=4096) for _ in range(20)))
    await asyncio.gather(*(client.send(chat(f"n-{n}")) for n, client in enumerate(stalled)))
    await settled(lambda: sum(wire.sent_bytes for wire in wires.values()))
    answer = await (await connect()).ask(chat("paced"), timeout=10)
    assert answer.complete
    times = [at for at, _ in answer.chunks]
    gaps = [b - a for a, b in itertools.pairwise(times[:-1])]
    print(f"the widest gap of a neighbour: {max(gaps) * 1000:.1f} ms of 20")
    assert sorted(gaps)[len(gaps) // 2] < 0.05  # the pace is kept; single gaps are also the machine's


async def test_a_connection_used_while_paused_is_fit_again(
    gateway: Gateway, upstream: RawUpstream, connect: Connect
) -> None:
    """Behind a paused download that ended well, and behind one that was left, the next request is answered at once."""
    body = b"b" * 3_000_000
    for leave in (False, True):
        upstream.script = s.reply(200, body)
        client = await connect(receive_buffer=4096)
        await client.send(s.post())
        await asyncio.sleep(0.15)
        if leave:
            client.reset()
        else:
            assert (await client.read_response(timeout=20)).body == body
        upstream.script = s.reply()
        began = time.monotonic()
        assert (await gateway.ask()).status == 200
        assert time.monotonic() - began < 0.5


async def test_an_upload_waits_for_its_backend(gateway: Gateway, upstream: RawUpstream, connect: Connect) -> None:
    """A backend that does not read holds back its client; once it reads, it gets every octet."""
    go = asyncio.Event()
    body = b"u" * 30_000_000
    got: list[Message] = []

    async def slow(wire: HttpWire) -> None:
        wire.keep_log = False
        wire.pause()
        await go.wait()
        wire.resume()
        request = await wire.read_request(timeout=20)
        if request.method == "POST":  # and no probe
            got.append(request)
        await s.reply()(wire, request)

    upstream.on_connect = slow
    before = gateway.rss()
    client = await connect()
    head = s.get("/v1/audio/transcriptions", [("Content-Length", str(len(body)))], method="POST")
    sending = asyncio.create_task(client.send(head + body))
    sent = await settled(lambda: client.sent_bytes)
    print(f"taken of an upload that nobody reads: {sent} octets")
    assert sent < 12_000_000
    assert gateway.rss() - before < 4 << 20
    go.set()
    await sending
    assert (await client.read_response(timeout=20)).status == 200
    assert got[0].body == body


async def test_events_are_not_joined(gateway: Gateway, upstream: RawUpstream, connect: Connect) -> None:
    """Nothing waits for what comes next: without `coalesce.delay` each event arrives when it was sent."""
    sent: list[float] = []

    async def script(wire: HttpWire, request: Message) -> None:
        await wire.send(s.SSE_HEAD)
        for number in range(20):
            sent.append(time.monotonic())
            await wire.send(s.chunk(s.delta(str(number))))
            await asyncio.sleep(0.01)
        await wire.send(b"".join(map(s.chunk, s.FINISHED)) + s.LAST)

    upstream.script = script
    answer = await (await connect()).ask()
    assert answer.complete
    assert len(answer.chunks) >= 20
    late = sorted(at - then for (at, _), then in zip(answer.chunks, sent, strict=False))
    print(f"median delay of an event: {late[len(late) // 2] * 1000:.2f} ms")
    assert late[len(late) // 2] < 0.005
    assert "coalesce" in (await gateway.admin(s.get("/-/config"))).json()
    assert (await gateway.admin(s.get("/-/config"))).json()["coalesce"]["delay"] is None


@pytest.mark.config({"coalesce": {"delay": 0.05, "bytes": 2048}})
async def test_coalesced_events_are_the_same_octets(
    gateway: Gateway, upstream: RawUpstream, connect: Connect
) -> None:
    """With `coalesce`: fewer writes, the same octets, none later than `delay`, and the end is not held back."""
    events = [s.delta(str(number)) for number in range(40)]
    upstream.script = s.stream(*events, *s.FINISHED, gap=0.002)
    client = await connect()
    answer = await client.ask()
    assert answer.complete
    assert answer.body == b"".join(events) + b"".join(s.FINISHED)
    print(f"{len(client.reads)} reads of 43 writes")
    assert len(client.reads) < 30
    upstream.script = s.stream(s.delta("lone"), s.delta("other"), *s.FINISHED, gap=0.3)
    client = await connect()
    began = time.monotonic()
    await client.send(s.post())
    await client.receive_until(b"lone")
    assert time.monotonic() - began < 0.2


@pytest.mark.config({"timeouts": {"client_write": 0.5}})
async def test_a_stalled_client_is_cut_and_its_upstream_told(
    gateway: Gateway, upstream: RawUpstream, connect: Connect
) -> None:
    """Ten of them at once: each ends by itself, and what was held for them is free."""
    wires: dict[str, HttpWire] = {}
    upstream.script = flood(wires)
    clients = await asyncio.gather(*(connect(receive_buffer=4096) for _ in range(10)))
    await asyncio.gather(*(client.send(chat(f"c-{n}")) for n, client in enumerate(clients)))
    entries = await gateway.logged(10, outcome="client_stalled")
    assert len(entries) == 10
    await asyncio.gather(*(wire.wait_closed(1) for wire in wires.values()))
    assert await gateway.metric("tokenpipe_write_buffer_bytes") == 0
    answers = await asyncio.gather(*(client.read_response(timeout=5) for client in clients))
    assert not any(a.complete for a in answers)


async def test_a_cut_client_that_takes_the_rest(
    start_gateway: Callable[..., Awaitable[Gateway]], upstream: RawUpstream, tmp_path: Path
) -> None:
    """Its connection is closed once it has taken what was buffered, and not once more when its time for that is over; also
    where there is no uvloop, whose transports bear that."""
    inside = "import sys; sys.modules['uvloop'] = None; sys.path.insert(0, '.')\n"
    inside += "from gateway.net import downstream; downstream.CUT_MOST = 1.0\n"
    (tmp_path / "sitecustomize.py").write_text(inside)
    gateway = await start_gateway(backends=[upstream.url], environment={"PYTHONPATH": str(tmp_path)})

    async def cut(wire: HttpWire, request: Message) -> None:
        await wire.send(s.SSE_HEAD + s.chunk(s.delta("y" * 1000)) * request.json()["max_tokens"])
        wire.fin()

    upstream.script = cut
    sizes = range(20, 180, 10)  # kilobytes: some are more than the kernel takes, and less than what the upstream waits for
    clients = [await gateway.connect(receive_buffer=4096) for _ in sizes]
    await asyncio.gather(*(c.send(s.post({**s.CHAT, "max_tokens": n})) for c, n in zip(clients, sizes, strict=True)))
    await asyncio.sleep(0.3)
    for client in clients:
        await client.wait_closed()
        client.fin()
    await gateway.logged(len(sizes), outcome="upstream_reset")
    await asyncio.sleep(1.2)
    gateway.check_tidy()
