"""Where every message ends: malformed requests and responses, whole and octet by octet, and octets out of turn."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

import pytest

from tests.support import script
from tests.support.client import RawClient
from tests.support.gateway import Gateway
from tests.support.messages import HttpWire, Message
from tests.support.script import LAST, get, post, raw, reply
from tests.support.upstream import RawUpstream

CONFIG = {"breaker": {"failures": 1_000_000}, "retry": {"attempts": 1}, "limits": {"request_head": 8192}}
pytestmark = pytest.mark.config(CONFIG)

Connect = Callable[..., Awaitable[RawClient]]
NEXT = b"GET /v1/smuggled HTTP/1.1\r\nHost: gw\r\n\r\n"
BODY = b'{"model":"m"}'
CL, TE = b"Content-Length: 13", b"Transfer-Encoding: chunked"
CHUNKED_BODY = b"d\r\n" + BODY + b"\r\n" + LAST


def request(
    *lines: bytes, first: bytes = b"POST /v1/chat/completions HTTP/1.1", host: bytes | None = b"gw", body: bytes = b""
) -> bytes:
    hosts = [b"Host: " + host] if host is not None else []
    return b"\r\n".join([first, *hosts, *lines, b"", b""]) + body


def chunks(body: bytes, *lines: bytes) -> bytes:
    return request(TE, *lines, body=body)


HEADS: dict[str, tuple[int, bytes]] = {
    "CL.TE": (400, request(b"Content-Length: 6", TE, body=b"0\r\n\r\nX")),
    "TE.CL": (400, request(TE, b"Content-Length: 6", body=b"0\r\n\r\nX")),
    "TE.TE": (400, request(TE, TE, body=LAST)),
    "CL.CL differ": (400, request(b"Content-Length: 1", b"Content-Length: 5", body=b"abc\r\n\r\n")),
    "CL.CL same": (400, request(CL, CL, body=BODY)),
    "CL list": (400, request(b"Content-Length: 13, 13", body=BODY)),
    "CL plus": (400, request(b"Content-Length: +13", body=BODY)),
    "CL minus": (400, request(b"Content-Length: -1", body=BODY)),
    "CL hex": (400, request(b"Content-Length: 0xd", body=BODY)),
    "CL arabic": (400, request(b"Content-Length: \xd9\xa5", body=BODY)),
    "CL empty": (400, request(b"Content-Length:", body=BODY)),
    "CL blank within": (400, request(b"Content-Length: 1 3", body=BODY)),
    "CL underscore": (400, request(b"Content-Length: 1_3", body=BODY)),
    "CL huge": (400, request(b"Content-Length: " + b"9" * 30, body=BODY)),
    "CL0 and TE": (400, request(b"Content-Length: 0", TE, body=CHUNKED_BODY)),
    "TE notchunked": (501, request(b"Transfer-Encoding: notchunked", body=CHUNKED_BODY)),
    "TE gzip, chunked": (501, request(b"Transfer-Encoding: gzip, chunked", body=CHUNKED_BODY)),
    "TE gzip + chunked": (501, request(b"Transfer-Encoding: gzip", TE, body=CHUNKED_BODY)),
    "TE chunked, gzip": (400, request(b"Transfer-Encoding: chunked, gzip", body=CHUNKED_BODY)),
    "TE chunked, chunked": (400, request(b"Transfer-Encoding: chunked, chunked", body=CHUNKED_BODY)),
    "TE chunked, identity": (400, request(b"Transfer-Encoding: chunked, identity", body=CHUNKED_BODY)),
    "TE identity": (501, request(b"Transfer-Encoding: identity", CL, body=BODY).replace(b"\r\n" + CL, b"")),
    "TE quoted": (400, request(b'Transfer-Encoding: "chunked"', body=CHUNKED_BODY)),
    "TE empty": (400, request(b"Transfer-Encoding:", body=CHUNKED_BODY)),
    "TE vt": (400, request(b"Transfer-Encoding: \x0bchunked", body=CHUNKED_BODY)),
    "TE nbsp": (400, request(b"Transfer-Encoding: \xa0chunked", body=CHUNKED_BODY)),
    "TE 1.0": (400, request(TE, first=b"POST /v1/x HTTP/1.0", body=CHUNKED_BODY)),
    "TE blank colon": (400, request(b"Transfer-Encoding : chunked", body=CHUNKED_BODY)),
    "TE folded": (400, request(b"Transfer-Encoding:\r\n chunked", body=CHUNKED_BODY)),
    "bare CR": (400, request(b"X-Abc: \rxTransfer-Encoding: chunked", body=b"1\r\nA\r\n" + LAST)),
    "bare LF": (400, request(b"X: a\nTransfer-Encoding: chunked", body=CHUNKED_BODY)),
    "NUL in value": (400, request(b"X: a\x00b")),
    "VT in value": (400, request(b"X: a\x0bb")),
    "CR in name": (400, request(b"X\rY: a")),
    "LF in name": (400, request(b"X\nY: a")),
    "NUL in name": (400, request(b"X\x00Y: a")),
    "blank before colon": (400, request(b"X : a")),
    "folding": (400, request(b"X: a\r\n b")),
    "folding first": (400, request(b" X: a", host=None)),
    "no colon": (400, request(b"X")),
    "empty name": (400, request(b": a")),
    "LF line ends": (400, request(CL, body=BODY).replace(b"\r\n", b"\n")),
    "LF for the last": (400, request(CL).replace(b"\r\n\r\n", b"\r\n\n") + BODY),
    "CR line ends": (400, request(CL, body=BODY).replace(b"\r\n", b"\r") + b"\r\n\r\n"),
    "no Host": (400, request(host=None)),
    "two Hosts": (400, request(b"Host: other")),
    "Host list": (400, request(host=b"a, b")),
    "Host path": (400, request(host=b"x/../y")),
    "Host userinfo": (400, request(host=b"user@gw")),
    "two blanks": (400, request(first=b"GET  /v1/models HTTP/1.1")),
    "tab": (400, request(first=b"GET\t/v1/models HTTP/1.1")),
    "blank in target": (400, request(first=b"GET /v1/models x HTTP/1.1")),
    "fragment": (400, request(first=b"GET /v1/models?#frag HTTP/1.1")),
    "authority form": (400, request(first=b"GET gw:80 HTTP/1.1")),
    "asterisk": (400, request(first=b"OPTIONS * HTTP/1.1")),
    "absolute, odd authority": (400, request(first=b'GET http://a";for=1.2.3.4;x="b/v1/x HTTP/1.1')),
    "absolute, empty authority": (400, request(first=b"GET http:///v1/x HTTP/1.1")),
    "connect": (405, request(first=b"CONNECT u:443 HTTP/1.1", host=b"u:443")),
    "trace": (405, request(first=b"TRACE /v1/models HTTP/1.1")),
    "version 2.0": (400, request(first=b"GET /v1/models HTTP/2.0")),
    "version arabic": (400, request(first=b"GET /v1/models HTTP/\xd9\xa1.1")),
    "version 0.9": (400, request(first=b"GET /v1/models")),
    "h2 preface": (400, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"),
    "TLS": (400, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 20),
    "method tab": (400, request(first=b"GE\tT /v1/models HTTP/1.1")),
    "method paren": (400, request(first=b"G(T /v1/models HTTP/1.1")),
    "method lower": (405, request(first=b"get /v1/models HTTP/1.1")),
    "method unknown": (405, request(first=b"BREW /v1/models HTTP/1.1")),
    "long method": (405, request(first=b"A" * 300 + b" /v1/models HTTP/1.1")),
    "dot segments": (400, request(first=b"GET /v1/../metrics HTTP/1.1")),
    "coded dots": (400, request(first=b"GET /v1/%2e%2e/metrics HTTP/1.1")),
    "long target": (414, b"GET /" + b"a" * 9000),
    "long field": (431, request(b"X: " + b"a" * 9000)),
    "many fields": (431, request(*(b"X-%d: y" % i for i in range(900)))),
}
CHUNKS: dict[str, tuple[int, bytes]] = {
    name: (400, chunks(body))
    for name, body in {
        "short size": b"4\r\n{} {}\r\n" + LAST,
        "long size": b"6\r\n{} {}\r\n" + LAST,
        "no hex": b"zz\r\n{}\r\n" + LAST,
        "minus": b"-1\r\n{}\r\n" + LAST,
        "plus": b"+2\r\n{}\r\n" + LAST,
        "0x": b"0x2\r\n{}\r\n" + LAST,
        "arabic": b"\xd9\xa2\r\n{}\r\n" + LAST,
        "huge": b"FFFFFFFFFFFFFFFFF\r\n{}\r\n" + LAST,
        "LF in extension": b"2;\nxx\r\n4c\r\n0\r\n\r\n" + NEXT,
        "quoted LF": b'2;a="\n"\r\n{}\r\n' + LAST,
        "CR in extension": b"2;a\rb\r\n{}\r\n" + LAST,
        "NUL in extension": b"2;a\x00\r\n{}\r\n" + LAST,
        "LF behind size": b"2\n{}\r\n" + LAST,
        "LF behind data": b"2\r\n{}\n" + LAST,
        "blank before size": b" 2\r\n{}\r\n" + LAST,
        "blank behind size": b"2 \r\n{}\r\n" + LAST,
        "empty size": b"\r\n{}\r\n" + LAST,
        "LF behind last": b"2\r\n{}\r\n0\n\n",
        "request as trailer": b"2\r\n{}\r\n0\r\nGET /v1/smuggled HTTP/1.1\r\n\r\n",
        "folded trailer": b"2\r\n{}\r\n0\r\n X: y\r\n\r\n",
        "LF in trailer": b"2\r\n{}\r\n0\r\nX: y\nZ: w\r\n\r\n",
        "long extension": b"2;" + b"a" * 5000 + b"\r\n{}\r\n" + LAST,
    }.items()
}
TABLE = {**HEADS, **{f"chunk: {name}": entry for name, entry in CHUNKS.items()}}


async def exchange(connect: Connect, octets: bytes, size: int) -> tuple[HttpWire, Message]:
    """Send them in pieces of that size, with a request behind them, and read what comes first."""
    client = await connect()
    try:
        if size:
            await client.send_split(octets, size=size)
        else:
            await client.send(octets + NEXT)
    except ConnectionError:
        pass  # an answer before the whole request
    return client, await client.read_response(timeout=2)


@pytest.mark.parametrize("name", TABLE)
async def test_a_malformed_request_gets_one_refusal(connect: Connect, upstream: RawUpstream, name: str) -> None:
    """One refusal, then the connection's end; nothing of it, nor behind it, becomes a request to the backend."""
    for split in (False, True):
        await one_refusal(connect, upstream, *TABLE[name], split)


async def one_refusal(connect: Connect, upstream: RawUpstream, status: int, octets: bytes, split: bool) -> None:
    client, answer = await exchange(connect, octets, 0 if not split else 1 if len(octets) < 600 else 97)
    assert answer.status == status and answer.complete and answer.get("x-gateway-error"), answer
    assert answer.json()["error"]["message"] and b"smuggled" not in answer.body
    if status in (400, 501, 414, 431):
        assert answer.get("connection") == "close", answer.head
        assert not await client.receive(), "a second answer"
    elif not split:
        assert b"smuggled" not in b"".join(r.head for r in upstream.requests) or status == 405
    client.fin()
    seen = [r for r in upstream.requests if not (status == 405 and r.path == "/v1/smuggled")]
    assert not seen and not upstream.half_heads, seen


@pytest.mark.parametrize("name", [n for n in TABLE if n.startswith("chunk")])
async def test_a_malformed_chunk_of_a_streamed_upload(connect: Connect, upstream: RawUpstream, name: str) -> None:
    """Behind a first part that is on its way already: refused, and the backend never gets a whole request."""
    _, octets = TABLE[name]
    first = b"20000\r\n" + b"x" * 0x20000 + b"\r\n"
    at = octets.index(b"\r\n\r\n") + 4
    upload = octets[:at].replace(b"/chat/completions", b"/audio/transcriptions") + first + octets[at:]
    client, answer = await exchange(connect, upload, 0)
    assert answer.status == 400 and answer.complete, answer
    client.fin()
    assert not [r for r in upstream.requests if r.complete]


LEGAL = {
    "extension": (chunks(b"d;a=b\r\n" + BODY + b"\r\n" + LAST), BODY),
    "quoted extension": (chunks(b'd;a="b c"\r\n' + BODY + b"\r\n0;x\r\n\r\n"), BODY),
    "trailer": (chunks(b"d\r\n" + BODY + b"\r\n0\r\nX-T: y\r\n\r\n", b"Trailer: X-T"), BODY),
    "leading zeros": (chunks(b"0000d\r\n" + BODY + b"\r\n000\r\n\r\n"), BODY),
    "upper case": (chunks(b"D\r\n" + BODY + b"\r\n" + LAST), BODY),
    "single octets": (chunks(b"".join(b"1\r\n%c\r\n" % c for c in BODY) + LAST), BODY),
    "empty chunked": (chunks(LAST), b""),
    "TE tab": (request(b"Transfer-Encoding: \tchunked", body=CHUNKED_BODY), BODY),
    "TE case": (request(b"tRANSFER-eNCODING: cHUNKED", body=CHUNKED_BODY), BODY),
    "CL zero": (request(b"Content-Length: 0"), b""),
    "CL leading zeros": (request(b"Content-Length: 0013", body=BODY), BODY),
    "GET with body": (request(CL, first=b"GET /v1/x HTTP/1.1", body=BODY), BODY),
    "absolute form": (request(CL, first=b"POST http://evil.example/v1/x HTTP/1.1", body=BODY), BODY),
    "CR LF before": (b"\r\n" + request(CL, body=BODY), BODY),
    "query coded": (request(CL, first=b"POST /v1/x?a=%0d%0aX:%20y HTTP/1.1", body=BODY), BODY),
}


@pytest.mark.parametrize("name", LEGAL)
@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
async def test_a_legal_request_is_one_request(connect: Connect, upstream: RawUpstream, name: str, split: bool) -> None:
    """Its body arrives as it was meant, framed by us; and the request behind it is the next one, at the right octet."""
    octets, body = LEGAL[name]
    client = await connect()
    await (client.send_split(octets + NEXT) if split else client.send(octets + NEXT))
    assert (await client.read_response()).status == 200 and (await client.read_response("GET")).status == 200
    client.fin()
    first, second = upstream.requests
    assert first.body == body and second.path == "/v1/smuggled" and not second.body
    assert first.trailers == [] and not [
        c for c in upstream.connections if b"a=b\r\n" in c.received or b"X-T" in c.received
    ]
    assert len(first.all("host")) == 1 and first.get("host") == f"127.0.0.1:{upstream.port}"


LATER = b"HTTP/1.1 200 OK\r\nContent-Length: 8\r\n\r\ninjected"
OK = b"HTTP/1.1 200 OK\r\n"
RESPONSES = {
    "CL and TE": OK + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n" + LAST,
    "CL differ": OK + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello!",
    "CL plus": OK + b"Content-Length: +5\r\n\r\nhello",
    "CL list": OK + b"Content-Length: 5, 5\r\n\r\nhello",
    "CL empty": OK + b"Content-Length:\r\n\r\nhello",
    "CL arabic": OK + b"Content-Length: \xd9\xa5\r\n\r\nhello",
    "TE gzip": OK + b"Transfer-Encoding: gzip\r\n\r\nhello",
    "TE xchunked": OK + b"Transfer-Encoding: xchunked\r\n\r\n5\r\nhello\r\n" + LAST,
    "TE twice": OK + b"Transfer-Encoding: chunked, chunked\r\n\r\n5\r\nhello\r\n" + LAST,
    "TE 1.0": b"HTTP/1.0 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n" + LAST,
    "CR in reason": b"HTTP/1.1 200 OK\rSet-Cookie: secret=b\r\nContent-Length: 0\r\n\r\n",
    "NUL in reason": b"HTTP/1.1 200 O\x00K\r\nContent-Length: 0\r\n\r\n",
    "NUL in value": OK + b"X-T: secret\x00b\r\nContent-Length: 0\r\n\r\n",
    "SOH in value": OK + b"Set-Cookie: secret=\x01b\r\nContent-Length: 0\r\n\r\n",
    "DEL in value": OK + b"X-T: secret\x7f\r\nContent-Length: 0\r\n\r\n",
    "CR in value": OK + b"X-T: secret\rX: y\r\nContent-Length: 0\r\n\r\n",
    "LF in value": OK + b"X-T: secret\nX: y\r\nContent-Length: 0\r\n\r\n",
    "LF line ends": b"HTTP/1.1 200 OK\nContent-Length: 5\n\nhello",
    "no colon": OK + b"secret\r\nContent-Length: 0\r\n\r\n",
    "odd name": OK + b"X-XSS-Protection=1;: secret\r\nContent-Length: 0\r\n\r\n",
    "folded": OK + b"X-T: a\r\n secret\r\nContent-Length: 0\r\n\r\n",
    "blank before colon": OK + b"Content-Length : 5\r\n\r\nhello",
    "no status": b"HTTP/1.1 OK\r\nContent-Length: 0\r\n\r\n",
    "status of four": b"HTTP/1.1 2000 OK\r\nContent-Length: 0\r\n\r\n",
    "status 099": b"HTTP/1.1 099 OK\r\nContent-Length: 0\r\n\r\n",
    "HTTP/2": b"HTTP/2 200 OK\r\nContent-Length: 0\r\n\r\n",
    "no HTTP": b"secret hello\r\n\r\n",
    "html": b"<html><body>secret</body></html>",
    "CRLF first": b"\r\n" + OK + b"Content-Length: 0\r\n\r\n",
    "switched unasked": b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\nsecret",
    "large head": OK + b"X-T: " + b"secret" * 12000 + b"\r\nContent-Length: 0\r\n\r\n",
    "endless reason": b"HTTP/1.1 200 " + b"secret" * 12000,
    "malformed 1xx": b"HTTP/1.1 103 Early\r\nX: \x00\r\n\r\n" + OK + b"Content-Length: 0\r\n\r\n",
}


@pytest.mark.parametrize("name", RESPONSES)
async def test_a_malformed_response_is_a_502(
    gateway: Gateway, connect: Connect, upstream: RawUpstream, name: str
) -> None:
    """Nothing of it is shown, its connection is dropped, and the client's own goes on."""
    for split in (False, True):
        await one_502(gateway, connect, upstream, RESPONSES[name], split)


async def one_502(gateway: Gateway, connect: Connect, upstream: RawUpstream, octets: bytes, split: bool) -> None:
    async def answer(wire: HttpWire, request_: Message) -> None:
        if request_.path == "/v1/smuggled":
            await reply(200, b"next", [])(wire, request_)
            return
        try:
            if split:
                await wire.send_split(octets, size=1 if len(octets) < 500 else 997)
            else:
                await wire.send(octets + LATER)
        except ConnectionError:
            return  # refused before its end
        await wire.wait_closed()

    upstream.script = answer
    client = await connect()
    got = await client.ask(post(), timeout=2)
    assert got.status == 502 and got.get("x-gateway-error") == "upstream_malformed" and got.complete, got
    again = await client.ask(NEXT)
    assert (again.status, again.body) == (200, b"next")
    assert b"secret" not in client.received and b"injected" not in client.received and b"hello" not in client.received
    client.fin()
    assert b"secret" not in gateway.stderr().encode()


BEHIND = {
    "a response": LATER,
    "a 408": b"HTTP/1.1 408 Request Timeout\r\nConnection: close\r\nContent-Length: 0\r\n\r\n",
    "an empty line": b"\r\n",
    "junk": b"injected",
}
FIRST = {
    "length": OK + b"Content-Length: 5\r\n\r\nfirst",
    "chunked": OK + b"Transfer-Encoding: chunked\r\n\r\n5\r\nfirst\r\n" + LAST,
    "empty": OK + b"Content-Length: 0\r\n\r\n",
    "204": b"HTTP/1.1 204 No Content\r\n\r\n",
    "304": b"HTTP/1.1 304 Not Modified\r\n\r\n",
    "HEAD": OK + b"Content-Length: 5\r\n\r\n",
}


@pytest.mark.parametrize("first", FIRST)
@pytest.mark.parametrize("behind", BEHIND)
async def test_octets_behind_a_response_are_nobodys_answer(
    connect: Connect, upstream: RawUpstream, first: str, behind: str
) -> None:
    """Sent with it or behind it: the next request, whoever's it is, is answered on another connection."""
    for how in ("one write", "next write", "split"):
        await nobodys_answer(connect, upstream, first, BEHIND[behind], how)


async def nobodys_answer(connect: Connect, upstream: RawUpstream, first: str, extra: bytes, how: str) -> None:
    octets = FIRST[first]
    pieces = {"one write": [octets + extra], "next write": [octets, extra], "split": [octets + extra[:1], extra[1:]]}[
        how
    ]
    upstream.script = script.in_turn(raw(*pieces, gap=0.002), reply(200, b"second", []))
    method = "HEAD" if first == "HEAD" else "GET"
    mine, other = await connect(), await connect()
    answer = await mine.ask(get("/v1/x", method=method))
    assert answer.status in (200, 204, 304) and answer.complete
    if how != "one write":
        await asyncio.sleep(0.02)  # what has arrived can be told apart
    for client in (other, mine):
        again = await client.ask(get("/v1/x"))
        assert (again.status, again.body) == (200, b"second"), again
        assert b"injected" not in client.received and b"HTTP/1.1 408" not in client.received
    mine.fin()
    other.fin()


async def test_pipelined_requests_are_answered_in_order(connect: Connect, upstream: RawUpstream) -> None:
    """One at a time, whatever their bodies are; each answer belongs to its request."""

    async def echo(wire: HttpWire, request_: Message) -> None:
        await reply(200, request_.path.encode() + b" " + request_.body, [])(wire, request_)

    upstream.script = echo
    octets, expected = b"", []
    for i in range(60):
        body = b'{"model":"m%d"}' % i
        path = f"/v1/r{i}"
        octets += [
            get(path),
            post(body, path),
            post(script.chunk(body) + LAST, path, [("Transfer-Encoding", "chunked")], length=False),
        ][i % 3]
        expected.append(path.encode() + b" " + (body if i % 3 else b""))
    for size in (len(octets), 7):
        client = await connect()
        await client.send_split(octets, size=size)
        assert [(await client.read_response("GET")).body for _ in expected] == expected
        client.fin()
    upstream.requests.clear()


async def test_what_is_pipelined_is_bounded(gateway: Gateway, connect: Connect, upstream: RawUpstream) -> None:
    """While a stream runs, only so much of what follows is taken; memory stays, and nothing runs ahead of its turn."""
    held = script.Held(script.SSE_HEAD)
    upstream.script = held
    client = await connect()
    await client.send(post())
    wire = await held.wire()
    before, sent = gateway.rss(), 0
    flood = get("/v1/x") * 1000
    try:
        async with asyncio.timeout(0.5):
            while sent < 64_000_000:
                await client.send(flood)
                sent += len(flood)
    except TimeoutError:
        pass
    assert sent < 30_000_000 and gateway.rss() - before < 8_000_000
    assert len(upstream.requests) == 1
    client.reset()
    await wire.wait_closed()


async def test_a_stream_is_not_held_up_by_requests_without_host(gateway: Gateway, upstream: RawUpstream) -> None:
    """HTTP/1.0 without Host is legal, gets no look-up of any name, and no Host of its own invention."""
    answer = await gateway.ask(b"GET /v1/x HTTP/1.0\r\n\r\n")
    assert answer.status == 200 and answer.get("connection") == "close"
    assert upstream.requests[0].get("x-forwarded-host") is None and len(upstream.requests[0].all("host")) == 1


async def test_a_flood_of_answers_that_nobody_reads_is_held_back(gateway: Gateway, connect: Connect) -> None:
    """Pages of the gateway's own, asked for again and again by a client that does not read, cost bounded memory."""
    before = gateway.rss()
    client = await connect(receive_buffer=4096)
    flood = get("/health") * 2000
    with contextlib.suppress(TimeoutError, ConnectionError):
        async with asyncio.timeout(3):
            for _ in range(200):
                await client.send(flood)
    assert gateway.rss() - before < 6 << 20
    other = await connect()
    assert (await other.ask(get("/health"), timeout=5)).status == 200
    other.fin()
    client.reset()
