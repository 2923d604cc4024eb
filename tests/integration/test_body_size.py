"""Limits of bodies: exact, the same however a body is framed, enforced while it streams, and told to the client."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import random
from collections.abc import Awaitable, Callable

import pytest

from tests.support.client import RawClient
from tests.support.gateway import Gateway, until
from tests.support.messages import HttpWire, Message
from tests.support.script import JSON_TYPE, LAST, chunk, get, head, post, reply
from tests.support.upstream import RawUpstream

LIMIT = 200_000  # beyond what is held of an upload before it is sent on
LARGE = {"limits": {"request_body": LIMIT}, "breaker": {"failures": 1_000_000}}
pytestmark = pytest.mark.config(LARGE)
Connect = Callable[..., Awaitable[RawClient]]
PATHS = {"json": "/v1/chat/completions", "upload": "/v1/audio/transcriptions"}


def body_of(kind: str, size: int) -> bytes:
    if kind == "upload":
        return random.Random(size).randbytes(size)
    start, end = b'{"model":"m","prompt":"', b'"}'
    return start + b"x" * (size - len(start) - len(end)) + end


def framed(kind: str, framing: str, body: bytes) -> tuple[bytes, bytes]:
    """A request's head, and the octets of its body."""
    fields = [("Expect", "100-continue")] if framing == "expect" else []
    if framing == "chunked":
        head_ = post(b"", PATHS[kind], [("Transfer-Encoding", "chunked")], length=False)
        octets = b"".join(chunk(body[i : i + 16_000]) for i in range(0, len(body), 16_000)) + LAST
    else:
        head_, octets = post(body, PATHS[kind], fields)[: -len(body)], body
    return (head_ if kind == "json" else head_.replace(b"application/json", b"audio/wav")), octets


async def push(client: RawClient, octets: bytes) -> None:
    """Send as much as the other side takes."""
    with contextlib.suppress(ConnectionError):
        for at in range(0, len(octets), 65536):
            await client.send(octets[at : at + 65536])
            await asyncio.sleep(0)


async def write_then_read(client: RawClient, framing: str, head_: bytes, octets: bytes) -> Message:
    """A client that writes all it has before it reads anything; one that expects 100 waits for that first."""
    await client.send(head_)
    if framing == "expect":
        while b"\r\n\r\n" not in client.received:
            if not await client.more():
                break
        if not client.received.startswith(b"HTTP/1.1 100"):
            return await client.read_response()
    await asyncio.wait_for(push(client, octets), 15)
    return await client.read_response(timeout=5)


@pytest.mark.parametrize("framing", ["length", "chunked", "expect"])
@pytest.mark.parametrize("kind", PATHS)
async def test_the_limit_is_exact(upstream: RawUpstream, connect: Connect, kind: str, framing: str) -> None:
    """At the limit it passes whole; one octet more, or ten times as much, is a 413 that arrives."""
    for size in (LIMIT - 1, LIMIT, LIMIT + 1, 10 * LIMIT):
        upstream.requests.clear()
        client, body = await connect(), body_of(kind, size)
        answer = await write_then_read(client, framing, *framed(kind, framing, body))
        if size <= LIMIT:
            assert answer.status == 200
            assert hashlib.sha256(upstream.requests[0].body).digest() == hashlib.sha256(body).digest()
        else:
            assert (answer.status, answer.get("x-gateway-error")) == (413, "body_too_large") and answer.complete
            assert answer.json()["error"]["message"] and not (answer.interim and framing == "expect")
            if size == LIMIT + 1 and answer.get("connection") is None:  # it had come whole, and the connection goes on
                assert (await client.ask(get("/v1/x"))).status == 200
            else:
                assert answer.get("connection") == "close"
            assert not [r for r in upstream.requests if r.complete and r.method == "POST"]
        client.fin()


@pytest.mark.parametrize("framing", ["length", "chunked"])
async def test_a_slow_sender_reads_its_refusal(upstream: RawUpstream, connect: Connect, framing: str) -> None:
    """The connection lingers while the client still sends, so that no reset destroys the answer."""
    client = await connect()
    head_, octets = framed("upload", framing, body_of("upload", 10 * LIMIT))
    await client.send(head_)
    for at in range(0, len(octets), 100_000):
        await push(client, octets[at : at + 100_000])
        await asyncio.sleep(0.02)
    answer = await client.read_response()
    assert answer.status == 413 and answer.complete
    assert not [r for r in upstream.requests if r.complete]


async def test_a_client_that_never_reads_is_let_go(gateway: Gateway, upstream: RawUpstream, connect: Connect) -> None:
    """It is refused, lingers for a while, and nothing of it stays."""
    clients = [await connect(receive_buffer=4096) for _ in range(5)]
    for client in clients:
        await push(client, framed("upload", "length", b"x" * (LIMIT + 1))[0] + b"x" * 100_000)
    assert (await gateway.logged(5, status=413))[-1]["outcome"] == "refused"
    await asyncio.sleep(0.01)
    for client in clients:
        client.reset()
    assert not [r for r in upstream.requests if r.complete]


@pytest.mark.parametrize("status", [401, 404, 405])
async def test_every_refusal_reaches_a_client_that_writes_first(
    upstream: RawUpstream, connect: Connect, status: int
) -> None:
    """Whatever it is refused for: the whole answer arrives, also over a body that nobody reads."""
    if status == 401:
        upstream.script = reply(401, b"{}", [JSON_TYPE])
    client, body = await connect(), body_of("upload", LIMIT)
    head_, octets = framed("upload", "length", body)
    head_ = {
        401: head_,
        404: head_.replace(b"/v1/audio/transcriptions", b"/nowhere"),
        405: head_.replace(b"POST", b"BREW"),
    }[status]
    answer = await write_then_read(client, "length", head_, octets)
    assert answer.status == status and answer.complete


EARLY = {"limits": {"request_body": 50_000_000}, "breaker": {"failures": 1_000_000}}
UPLOAD = 8_000_000


class Early:
    """A backend that answers once it has read so much of the upload, and then does as it is told."""

    def __init__(self, after: float, then: str, framing: str) -> None:
        self.after, self.then, self.framing = after, then, framing

    async def __call__(self, wire: HttpWire) -> None:
        while True:
            request = await wire.read_request(timeout=60, body=False)
            if request.method == "GET":
                await reply(200, b'{"data":[]}')(wire, request)
                continue
            while wire.received_bytes < self.after * UPLOAD and await wire.more():
                pass
            if self.then in ("stops reading", "closes", "resets"):
                wire.pause()
            body = b'{"error":"no"}'
            fields = [JSON_TYPE, ("connection", "close")]
            if self.framing == "length":
                await wire.send(head(413, [*fields, ("content-length", str(len(body)))], "Too Large") + body)
            else:
                await wire.send(
                    head(413, [*fields, ("transfer-encoding", "chunked")], "Too Large") + chunk(body) + LAST
                )
            if self.then == "closes":
                wire.half_close()
                await asyncio.sleep(0.05)
                wire.resume()
            elif self.then == "resets":
                await asyncio.sleep(0.03)  # for an answer that is overtaken by its reset is nobody's
                wire.reset()
                return
            with contextlib.suppress(TimeoutError):
                await wire.wait_closed(timeout=10)
            return


@pytest.mark.config(EARLY)
@pytest.mark.parametrize("then", ["reads on", "stops reading", "closes", "resets"])
@pytest.mark.parametrize("after", [0, 65536 / UPLOAD, 0.5, 1.0])
async def test_an_early_answer_beats_any_write_error(
    upstream: RawUpstream, connect: Connect, after: float, then: str
) -> None:
    """The client gets the backend's answer whole, whether it reads at once or writes first."""
    body = b"x" * UPLOAD
    for framing in ("length", "chunked"):
        upstream.on_connect = Early(after, then, framing)
        client = await connect()
        head_, octets = framed("upload", framing, body)
        await client.send(head_)
        sending = asyncio.create_task(push(client, octets))
        answer = await client.read_response(timeout=8)
        sending.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await sending
        assert (answer.status, answer.body, answer.complete) == (413, b'{"error":"no"}', True), answer
        client.reset()
        late = await connect()
        answer = await write_then_read(late, framing, head_, octets)
        assert (answer.status, answer.body, answer.complete) == (413, b'{"error":"no"}', True), answer
        late.reset()


@pytest.mark.seconds(60)
@pytest.mark.config({"limits": {"request_body": 1_000_000_000}})
async def test_a_large_multipart_upload_needs_no_memory(
    gateway: Gateway, upstream: RawUpstream, client: RawClient
) -> None:
    """200 MB stream through at the pace of the slower side, octet for octet; the parts are nobody's business."""
    piece, count = random.Random(3).randbytes(1_000_000), 200
    digest, got, before, most = hashlib.sha256(), hashlib.sha256(), gateway.rss(), 0
    opening = b"--b\r\nContent-Disposition: form-data; name=file; filename=\r\nContent-Length: +5\r\n\r\n"
    length = len(opening) + len(piece) * count

    async def swallow(wire: HttpWire) -> None:
        wire.keep_log = False
        while True:
            request = await wire.read_request(timeout=60, body=False)
            if request.method == "GET":
                await reply(200, b'{"data":[]}')(wire, request)
                continue
            left = int(request.get("content-length") or 0)
            assert request.get("content-type") == "multipart/form-data; boundary=b"
            while left:
                data = await wire.receive(timeout=20)
                assert data
                got.update(data)
                left -= len(data)
            await reply(200, b"{}")(wire, request)

    upstream.on_connect = swallow
    fields = [("Content-Length", str(length))]
    await client.send(
        post(b"", PATHS["upload"], fields, length=False).replace(
            b"application/json", b"multipart/form-data; boundary=b"
        )
    )
    for data in [opening, *[piece] * count]:
        digest.update(data)
        await client.send(data)
        most = max(most, gateway.rss())
    answer = await client.read_response(timeout=20)
    assert answer.status == 200 and got.digest() == digest.digest()
    assert most - before < 24_000_000, f"{(most - before) / 1e6:.0f} MB more"


@pytest.mark.config(EARLY)
async def test_many_uploads_that_are_not_taken_need_no_memory(
    gateway: Gateway, upstream: RawUpstream, connect: Connect
) -> None:
    """A backend that reads nothing holds its clients back: each costs a bounded buffer, and its end is seen."""
    arrived: list[HttpWire] = []

    async def stuck(wire: HttpWire) -> None:
        request = await wire.read_request(timeout=60, body=False)
        while request.method == "GET":
            await reply(200, b'{"data":[]}')(wire, request)
            request = await wire.read_request(timeout=60, body=False)
        wire.pause()
        arrived.append(wire)
        while not wire.ended:
            await asyncio.sleep(0.05)
            wire.resume()
            with contextlib.suppress(TimeoutError):
                await wire.more(timeout=0.01)
            wire.pause()
            wire.pending.clear()
            wire.received.clear()

    upstream.on_connect = stuck
    before = gateway.rss()
    clients = [await connect() for _ in range(10)]
    tasks = [
        asyncio.create_task(
            push(c, post(b"x" * 20_000_000, PATHS["upload"]).replace(b"application/json", b"audio/wav"))
        )
        for c in clients
    ]
    await asyncio.sleep(0.05)
    for _ in range(10):
        await asyncio.sleep(0.05)
        assert gateway.rss() - before < 30_000_000
    for task, client in zip(tasks, clients, strict=True):
        client.reset()
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    async with asyncio.timeout(5):
        while [w for w in arrived if not w.ended]:
            await asyncio.sleep(0.02)
    assert len(arrived) == 10


@pytest.mark.config({"limits": {"request_body": 30_000_000}})
async def test_large_json_is_streamed_and_still_looked_into(gateway: Gateway, upstream: RawUpstream) -> None:
    """It arrives octet for octet; a forbidden member at its end is refused, and so is half an object."""
    body = body_of("json", 5_000_000)
    for framing in ("length", "chunked"):
        upstream.requests.clear()
        assert (await gateway.ask(b"".join(framed("json", framing, body)))).status == 200
        (whole,) = [r for r in upstream.requests if r.complete]
        assert whole.body == body and whole.framing == framing
        for wrong in (body[:-1] + b',"kv_tr\\u0061nsfer_params":{"do_remote_prefill":true}}', body[:-2], body + b"x"):
            answer = await gateway.ask(b"".join(framed("json", framing, wrong)))
            assert answer.status == 400 and answer.get("x-gateway-error") == "bad_request", (framing, wrong[-30:])
        assert len([r for r in upstream.requests if r.complete]) == 1


async def test_the_last_chunk_in_a_packet_of_its_own(
    connect: Connect, upstream: RawUpstream, client: RawClient
) -> None:
    """Half an object is refused also where its end comes late."""
    head_, octets = framed("json", "chunked", body_of("json", 190_000)[:-2])
    for pause in (0.0, 0.02):
        wire = await connect()
        await wire.send(head_ + octets[: -len(LAST)])
        await asyncio.sleep(pause)
        await wire.send(LAST)
        assert (await wire.read_response()).status == 400
        wire.fin()
    assert not upstream.requests


@pytest.mark.config({"limits": {"request_body": 30_000_000}})
async def test_the_last_chunk_of_a_streamed_upload_in_a_packet_of_its_own(
    connect: Connect, upstream: RawUpstream
) -> None:
    """The same where the first part is on its way already: the backend never gets a whole request."""
    size = 3_000_000
    head_, octets = framed("json", "chunked", body_of("json", size)[:-2])
    wire = await connect()
    await wire.send(head_ + octets[: -len(LAST)])
    await until(lambda: any(w.received_bytes >= size - 2 for w in upstream.connections), "all of it at the backend")
    await wire.send(LAST)
    answer = await wire.read_response()
    wire.fin()
    assert answer.status == 400 and not [r for r in upstream.requests if r.complete]


@pytest.mark.parametrize("path", ["/nowhere", "/health", "/v1/chat/completions", "/v1/audio/transcriptions"])
@pytest.mark.parametrize("size", [1_000, 70_000, 140_000, 199_000, 201_000])
async def test_a_connection_that_goes_on_is_read_again(
    upstream: RawUpstream, client: RawClient, path: str, size: int
) -> None:
    """Whatever a body that came along with its head was refused for: the next request is answered, or it ends."""
    method = "GET" if path == "/health" else "POST"
    for _ in range(3):
        octets = post(b"[" + b"1," * (size // 2), path).replace(b"POST", method.encode(), 1)
        await client.send(octets)
        answer = await client.read_response(timeout=2)
        assert answer.complete
        if answer.get("connection") == "close":
            return
        second = await client.ask(get("/v1/x"), timeout=2)
        assert second.status == 200


async def test_bodies_of_get_and_of_health_count_too(upstream: RawUpstream, client: RawClient) -> None:
    """A body is read to its very end whatever the method: the next request begins behind it."""
    body = body_of("upload", 5000)
    octets = get("/v1/x", [("Content-Length", "5000")]) + body
    await client.send(octets + get("/v1/y"))
    assert [(await client.read_response("GET")).status for _ in range(2)] == [200, 200]
    assert [(r.path, r.body) for r in upstream.requests] == [("/v1/x", body), ("/v1/y", b"")]
