"""Complete stays complete, incomplete stays incomplete: over real sockets, cut at every octet."""

from __future__ import annotations

import asyncio
import itertools
import random
import ssl
from collections.abc import Awaitable, Callable

import pytest

from tests.support import script
from tests.support.client import RawClient
from tests.support.gateway import Gateway
from tests.support.messages import HttpWire, Message
from tests.support.script import (
    DONE,
    FINISHED,
    LAST,
    SSE_HEAD,
    SSE_TYPE,
    chunk,
    delta,
    get,
    head,
    post,
    raw,
    reply,
)
from tests.support.tls import Certificates
from tests.support.upstream import RawUpstream, running
from tests.support.wire import Closed

Connect = Callable[..., Awaitable[RawClient]]
EVENTS = (delta("a"), delta("b"), *FINISHED)
TEXT = b"data: {}\n\n" + DONE
FRAMED = {
    "chunked": head(200, [SSE_TYPE, ("transfer-encoding", "chunked")]) + chunk(TEXT[:10]) + chunk(TEXT[10:]) + LAST,
    "length": head(200, [SSE_TYPE, ("content-length", str(len(TEXT)))]) + TEXT,
    "close": head(200, [SSE_TYPE]) + TEXT,
}
BODY_AT = {name: whole.index(b"\r\n\r\n") + 4 for name, whole in FRAMED.items()}
QUIET = {"breaker": {"failures": 1_000_000}, "retry": {"attempts": 1}}  # failures on purpose are nobody's fault here


def payload(framing: str, octets: bytes) -> bytes:
    """What of the body lies in a prefix of the upstream's octets."""
    body = octets[BODY_AT[framing] :]
    if framing != "chunked":
        return body
    found = b""
    while b"\r\n" in body:
        line, _, rest = body.partition(b"\r\n")
        found += rest[: int(line, 16)]
        body = rest[int(line, 16) + 2 :]
    return found


def is_complete(framing: str, cut: int, how: str) -> bool:
    if framing == "close":
        return how == "fin" and cut >= BODY_AT["close"]
    return cut == len(FRAMED[framing])


async def many(jobs: list[Awaitable[None]], width: int = 24) -> None:
    """Run them all, so many at a time; what went wrong first is told."""
    gate = asyncio.Semaphore(width)

    async def one(job: Awaitable[None]) -> None:
        async with gate:
            await job

    async with asyncio.TaskGroup() as group:
        for job in jobs:
            group.create_task(one(job))


async def asked(gateway: Gateway, request: bytes, method: str = "POST") -> Message:
    client = await gateway.connect()
    try:
        return await client.ask(request, method=method)
    finally:
        client.reset()


@pytest.mark.seconds(60)
@pytest.mark.config(QUIET)
@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize("how", ["fin", "reset"])
@pytest.mark.parametrize("framing", FRAMED)
async def test_cut_at_every_octet(
    gateway: Gateway, upstream: RawUpstream, framing: str, how: str, version: str
) -> None:
    """The client gets a prefix, and is told that it is whole if and only if the upstream's framing came to its end."""
    whole = FRAMED[framing]

    async def cut_there(wire: HttpWire, request: Message) -> None:
        cut = int(request.get("x-cut") or 0)
        if cut:
            await wire.send(whole[:cut])
        if how == "fin":
            wire.fin()
        else:
            await asyncio.sleep(0.002 if cut % 2 else 0)  # together with the octets, and behind them
            wire.reset()

    async def one(cut: int) -> None:
        answer = await asked(gateway, post(fields=[("X-Cut", str(cut))], version=version))
        if cut < BODY_AT[framing]:
            # a reset that comes with a whole message may overtake it, never the other way round
            assert answer.status == 502 and answer.complete, (cut, answer)
            return
        if how == "reset" and answer.status == 502:
            assert answer.get("x-gateway-error") == "upstream_reset" and answer.complete
            return
        assert answer.status == 200, (cut, answer)
        expected = payload(framing, whole[:cut])
        assert expected.startswith(answer.body) and TEXT.startswith(answer.body), (cut, answer.body)
        if how == "fin":
            assert answer.body == expected, (cut, answer.body)
            assert answer.complete == is_complete(framing, cut, how), (cut, answer)
        else:
            assert not answer.complete or is_complete(framing, cut, how), (cut, answer)
        assert ("chunked" in answer.all("transfer-encoding")) == (version == "1.1" and framing != "length")
        if version == "1.0":
            assert answer.get("connection") == "close"

    upstream.script = cut_there
    await many([one(cut) for cut in range(len(whole) + 1)])


@pytest.mark.config(QUIET)
@pytest.mark.parametrize("framing", FRAMED)
async def test_a_stream_that_ends_well_behind_a_pause_is_whole(
    gateway: Gateway, upstream: RawUpstream, framing: str
) -> None:
    """Split over two writes at every octet, with time in between, nothing changes."""
    whole = FRAMED[framing]

    async def in_two(wire: HttpWire, request: Message) -> None:
        cut = int(request.get("x-cut") or 0)
        await wire.send(whole[:cut])
        await asyncio.sleep(0.01)
        await wire.send(whole[cut:])
        if framing == "close":
            wire.fin()

    async def one(cut: int, version: str) -> None:
        answer = await asked(gateway, post(fields=[("X-Cut", str(cut))], version=version))
        assert (answer.status, answer.body, answer.complete) == (200, TEXT, True), (cut, answer)

    upstream.script = in_two
    await many([one(cut, v) for cut, v in itertools.product(range(1, len(whole)), ("1.0", "1.1"))])


@pytest.mark.config(QUIET)
async def test_one_octet_at_a_time(gateway: Gateway, upstream: RawUpstream) -> None:
    """Packet boundaries carry no meaning."""
    for framing, whole in FRAMED.items():
        upstream.script = raw(
            *(whole[i : i + 1] for i in range(len(whole))), then="fin" if framing == "close" else "keep"
        )
        for version in ("1.1", "1.0"):
            answer = await asked(gateway, post(version=version))
            assert (answer.status, answer.body, answer.complete) == (200, TEXT, True)


async def test_a_plain_stream_passes_octet_for_octet(connect: Connect, upstream: RawUpstream) -> None:
    """Chunks as they came, also many in one write, and the connection is used again on both sides."""
    upstream.script = raw(SSE_HEAD + b"".join(chunk(e) for e in EVENTS) + LAST)
    client = await connect()
    for _ in range(3):
        answer = await client.ask()
        assert answer.body == b"".join(EVENTS) and answer.complete and answer.framing == "chunked"
    client.fin()
    assert len({id(w) for w in upstream.connections}) <= 1 + len(upstream.probed)


TRAILED = [
    b"0\r\nX-Checksum: abc\r\n\r\n",
    b"0\r\nX-A: 1\r\nX-B: 2\r\n\r\n",
    b"0;ext=1\r\n\r\n",
    b"000\r\nContent-Length: 5\r\n\r\n",
    b'0;a="b;c"\r\nTransfer-Encoding: chunked\r\nX: y\r\n\r\n',
]


@pytest.mark.parametrize("end", TRAILED)
@pytest.mark.parametrize("split", [False, True])
async def test_trailers_and_extensions_go_no_further(
    gateway: Gateway, connect: Connect, upstream: RawUpstream, end: bytes, split: bool
) -> None:
    """The body is whole, the trailers and their announcement are gone, and the next answer is the next answer."""
    octets = (
        head(200, [("trailer", "X-Checksum"), SSE_TYPE, ("transfer-encoding", "chunked")])
        + b"5;a=b\r\nhello\r\n6\r\n world\r\n"
        + end
    )
    pieces = [octets[i : i + 1] for i in range(len(octets))] if split else [octets]
    upstream.script = raw(*pieces)
    client = await connect()
    for _ in range(2):
        answer = await client.ask()
        assert (answer.body, answer.complete, answer.trailers) == (b"hello world", True, [])
        assert answer.get("trailer") is None and b"a=b" not in bytes(client.received)
    client.fin()
    assert (await asked(gateway, post(version="1.0"))).body == b"hello world"


NO_BODY = [
    (204, [("transfer-encoding", "chunked")], LAST, "POST"),
    (204, [("content-length", "5")], b"", "POST"),
    (204, [], b"stray", "POST"),
    (204, [], b"", "POST"),
    (304, [("content-length", "120")], b"", "GET"),
    (304, [("transfer-encoding", "chunked")], LAST, "GET"),
    (304, [], b"", "GET"),
    (200, [("content-length", "120")], b"", "HEAD"),
    (200, [("transfer-encoding", "chunked")], b"", "HEAD"),
    (200, [], b"", "HEAD"),
    (404, [("content-length", "7")], b"", "HEAD"),
    (200, [("content-length", "0")], b"", "POST"),
    (200, [("content-length", "0")], b"HTTP/1.1 200 OK\r\ncontent-length: 8\r\n\r\ninjected", "POST"),
    (204, [], b"HTTP/1.1 200 OK\r\ncontent-length: 8\r\n\r\ninjected", "POST"),
    (200, [("content-length", "9")], b"stray", "HEAD"),
]


@pytest.mark.parametrize(("status", "fields", "behind", "method"), NO_BODY)
@pytest.mark.parametrize("late", [False, True])
async def test_answers_without_a_body(
    connect: Connect,
    upstream: RawUpstream,
    status: int,
    fields: list[tuple[str, str]],
    behind: bytes,
    method: str,
    late: bool,
) -> None:
    """Not an octet of a body, no coding, no Content-Length on 204; and the next answer on the connection is intact."""
    first = raw(head(status, fields), behind, gap=0.005) if late else raw(head(status, fields) + behind)
    upstream.script = script.in_turn(first, reply(200, b"second", []))
    request = post() if method == "POST" else get("/v1/x", method=method)
    client = await connect()
    await client.send(request if late else request + get("/v1/x"))
    answer = await client.read_response(method)
    if late:
        await asyncio.sleep(0.03)  # only what has arrived can be told apart
        await client.send(get("/v1/x"))
    assert answer.status == status and answer.complete and answer.get("transfer-encoding") is None
    if status == 204:
        assert answer.get("content-length") is None
    elif fields and fields[0][0] == "content-length":
        assert answer.get("content-length") == fields[0][1]
    second = await client.read_response("GET")
    assert (second.status, second.body) == (200, b"second")
    assert b"stray" not in client.received and b"injected" not in client.received and not client.pending
    client.fin()


@pytest.mark.parametrize(
    "pieces",
    [
        (b"HTTP/1.1 103 Early Hints\r\nlink: </a>\r\n\r\n" * 2, b"HTTP/1.1 102 Processing\r\n\r\n"),
        (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 \r\n\r\nHTT", b"P/1.1 199 X\r\n\r\n"),
        (b"", b"HTTP/1.1 103 Early Hints\r\ncontent-length: 5\r\n\r\n"),
    ],
)
@pytest.mark.parametrize("version", ["1.0", "1.1"])
async def test_interim_answers_are_no_final_ones(
    gateway: Gateway, upstream: RawUpstream, pieces: tuple[bytes, ...], version: str
) -> None:
    """However many of them, and however they are cut: the final answer is what the client gets."""
    upstream.script = raw(*pieces, SSE_HEAD + chunk(TEXT) + LAST, gap=0.005)
    answer = await asked(gateway, post(version=version))
    assert (answer.status, answer.body, answer.complete) == (200, TEXT, True)
    upstream.script = raw(pieces[0] + pieces[1] + SSE_HEAD + chunk(TEXT) + LAST)
    assert (await asked(gateway, post(version=version))).body == TEXT


WRONG_CHUNKS = [
    b"4\r\nhello\r\n",
    b"zz\r\n",
    b"-1\r\n",
    b"FFFFFFFFFFFFFFFFF\r\n",
    b"+5\r\nhello\r\n",
    b"0x5\r\nhello\r\n",
    b"5\nhello\r\n",
    b"5 \r\nhello\r\n",
    b"\r\n",
    b"5\r\nhello\n",
    b"5;a\nb\r\nhello\r\n",
    b"5;\x00\r\nhello\r\n",
    b"\xd9\xa5\r\nhello\r\n",
    b" 5\r\nhello\r\n",
    b"0\r\nno field\r\n\r\n",
    b"0\r\n bad: x\r\n\r\n",
    b"5;" + b"a" * 5000,
    b"0\r\nHTTP/1.1 200 OK\r\n\r\n",
]


@pytest.mark.config(QUIET)
@pytest.mark.parametrize("wrong", WRONG_CHUNKS, ids=lambda b: repr(b[:20]))
async def test_wrong_chunks_end_the_answer(
    gateway: Gateway, connect: Connect, upstream: RawUpstream, wrong: bytes
) -> None:
    """What came before the fault may pass; then the client's connection is cut at once, without a proper end."""
    upstream.script = raw(SSE_HEAD + chunk(b"first") + wrong)
    for version in ("1.0", "1.1"):
        client = await connect()
        await client.send(post(version=version))
        try:
            answer = await client.read_response(timeout=2)
        except Closed as closed:  # with HTTP/1.0 the reset that tells of the fault may take the head with it
            assert version == "1.0" and client.ended == "rst" and not closed.args[0]
            continue
        assert (
            not answer.complete
            and b"firsthello".startswith(answer.body)
            and (version == "1.1" or client.ended == "rst")
        )
        client.fin()
    log = await gateway.logged(code="upstream_malformed")
    assert log[-1]["outcome"] == "upstream_reset"


@pytest.mark.config({"limits": {"write_buffer": 16384}, **QUIET})
@pytest.mark.parametrize("framing", ["chunked", "length", "close"])
async def test_a_slow_client_gets_all_of_it(
    upstream: RawUpstream,
    connect: Callable[..., Awaitable[RawClient]],
    framing: str,
) -> None:
    """The upstream's end drops nothing of what the client has not read yet."""
    body = random.Random(7).randbytes(1_500_000)
    framed = {
        "chunked": head(200, [("transfer-encoding", "chunked")])
        + b"".join(chunk(body[i : i + 9000]) for i in range(0, len(body), 9000))
        + LAST,
        "length": head(200, [("content-length", str(len(body)))]) + body,
        "close": head(200) + body,
    }
    upstream.script = raw(framed[framing], then="fin")
    for version in ("1.1", "1.0"):
        client = await connect(receive_buffer=4096, rate=3_000_000)
        await client.send(post(version=version))
        await asyncio.sleep(0.05)
        answer = await client.read_response(timeout=20)
        assert answer.complete and answer.body == body


@pytest.mark.parametrize("framing", ["chunked", "length", "close"])
@pytest.mark.parametrize("notify", [True, False])
async def test_a_tls_upstream_that_closes_behind_its_last_octet(
    start_gateway: Callable[..., Awaitable[Gateway]],
    certificates: Certificates,
    framing: str,
    notify: bool,
) -> None:
    """All octets arrive; a close-delimited body is whole only where TLS itself said goodbye (RFC 9112 section 9.8)."""
    body = b"data: " + b"x" * 300_000 + b"\n\n" + DONE
    framed = {
        "chunked": SSE_HEAD + chunk(body) + LAST,
        "length": head(200, [SSE_TYPE, ("content-length", str(len(body)))]) + body,
        "close": head(200, [SSE_TYPE]) + body,
    }
    small = FRAMED["close"]

    async def answer(wire: HttpWire, request: Message) -> None:
        await wire.send(small if request.get("x-small") else framed[framing])
        wire.fin(notify=notify)

    context: ssl.SSLContext = certificates.server_context()
    async with running(answer, tls=context) as upstream:
        url = upstream.url.replace("127.0.0.1", "localhost")
        gateway = await start_gateway(config={"backends": [{"url": url, "tls": {"ca": str(certificates.ca)}}], **QUIET})
        for _ in range(5):
            got = await asked(gateway, post())
            assert got.complete == (notify or framing != "close"), (got.start, len(got.body))
            assert got.body == body or (framing == "close" and not notify and body.startswith(got.body))
        if framing == "close":
            for _ in range(10):
                got = await asked(gateway, post(fields=[("X-Small", "1")]))
                assert got.complete == notify and TEXT.startswith(got.body)
