"""One request in, at most one request out: expectations, interim answers, redirects, and what is never done twice."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable

import pytest

from tests.support import script
from tests.support.client import RawClient
from tests.support.gateway import Gateway
from tests.support.messages import HttpWire
from tests.support.script import LAST, SSE_HEAD, chunk, delta, get, head, post, raw, reply
from tests.support.upstream import RawUpstream, listening_socket, running

Connect = Callable[..., Awaitable[RawClient]]
QUIET = {"breaker": {"failures": 1_000_000}}
pytestmark = pytest.mark.config({**QUIET, "limits": {"request_body": 5000}})

BODY = b'{"model":"m"}'
EXPECT = ("Expect", "100-continue")


def without_body(*fields: tuple[str, str], path: str = "/v1/chat/completions", version: str = "1.1") -> bytes:
    return post(BODY, path, fields, version=version)[: -len(BODY)]


# --- Expect


@pytest.mark.parametrize("value", ["100-continue", "100-Continue", "100-CONTINUE"])
async def test_100_is_sent_once_and_in_time(upstream: RawUpstream, client: RawClient, value: str) -> None:
    """To a client that waits for it; the expectation itself goes no further, and the connection goes on."""
    for _ in range(2):
        await client.send(without_body(("Expect", value)))
        assert await client.receive_until(b"HTTP/1.1 100 Continue\r\n\r\n", timeout=1)
        await asyncio.sleep(0.01)
        assert not upstream.requests or upstream.requests[-1].complete
        await client.send(BODY)
        answer = await client.read_response()
        assert answer.status == 200 and len(answer.interim) == 1
        client.received.clear()
    assert [r.body for r in upstream.requests] == [BODY] * 2 and not any(r.get("expect") for r in upstream.requests)


async def test_100_for_a_chunked_upload_and_for_another_path(upstream: RawUpstream, client: RawClient) -> None:
    """Whatever the framing, and where nobody looks into the body."""
    octets = post(b"", "/v1/audio/transcriptions", [EXPECT, ("Transfer-Encoding", "chunked")], length=False)
    await client.send(octets.replace(b"application/json", b"audio/wav"))
    await client.receive_until(b"100 Continue\r\n\r\n", timeout=1)
    await client.send(chunk(b"audio") + LAST)
    assert (await client.read_response()).status == 200 and upstream.requests[0].body == b"audio"


async def test_a_body_that_does_not_wait_needs_no_100(upstream: RawUpstream, client: RawClient) -> None:
    """It may be left out, and must not come twice."""
    for octets in (post(BODY, fields=[EXPECT]), post(b"", fields=[EXPECT]), get("/v1/x", [EXPECT])):
        await client.send(octets)
        answer = await client.read_response()
        assert answer.status == 200 and len(answer.interim) <= 1
    assert not client.pending


async def test_expect_of_http_1_0_is_ignored(upstream: RawUpstream, client: RawClient) -> None:
    """No 100 to a client that does not know it."""
    await client.send(without_body(EXPECT, version="1.0"))
    await asyncio.sleep(0.05)
    await client.send(BODY)
    answer = await client.read_response()
    assert answer.status == 200 and not answer.interim


@pytest.mark.parametrize(
    "fields",
    [
        [("Expect", "200-ok")],
        [("Expect", "")],
        [("Expect", "100-continue, x")],
        [("Expect", "100-continue;q=1")],
        [EXPECT, ("Expect", "x")],
    ],
)
async def test_an_unknown_expectation_is_417(
    upstream: RawUpstream, client: RawClient, fields: list[tuple[str, str]]
) -> None:
    """At once, and nothing reaches the backend."""
    await client.send(without_body(*fields))
    answer = await client.read_response(timeout=1)
    assert (
        answer.status == 417
        and answer.get("x-gateway-error") == "expectation_failed"
        and not answer.interim
        and not upstream.requests
    )


@pytest.mark.parametrize(
    ("octets", "status"),
    [
        (without_body(EXPECT, path="/nowhere"), 404),
        (post(b"x" * 6000, fields=[EXPECT])[:-6000], 413),
        (without_body(EXPECT, ("Content-Encoding", "gzip")), 415),
        (without_body(EXPECT).replace(b"POST", b"BREW"), 405),
    ],
)
async def test_a_request_that_will_not_be_read_gets_no_100(
    upstream: RawUpstream, client: RawClient, octets: bytes, status: int
) -> None:
    """A final status at once, and the connection's end: whether a body follows cannot be told."""
    await client.send(octets)
    answer = await client.read_response(timeout=1)
    assert (
        answer.status == status and not answer.interim and answer.get("connection") == "close" and not upstream.requests
    )


# --- interim answers, redirects


async def test_interim_answers_hold_nothing_up(upstream: RawUpstream, client: RawClient) -> None:
    """They are never taken for the final one, and the first event passes at once."""
    upstream.script = held = script.Held(
        b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n", b"HTTP/1.1 103 \r\n\r\nHTTP/1.1 102 Processing\r\n\r\n"
    )
    await client.send(post())
    wire = await held.wire()
    await wire.send(SSE_HEAD + chunk(delta("a")))
    await client.receive_until(b'"content":"a"', timeout=1)
    await wire.send(LAST)
    answer = await client.read_response()
    assert answer.status == 200 and answer.complete and len(upstream.requests) == 1


REDIRECTS = [
    (301, "/v1/x/"),
    (302, "https://attacker.example/"),
    (303, "/v1/y"),
    (307, "/v1/x/"),
    (308, "//attacker.example/v1"),
    (300, ""),
    (304, "/x"),
]


@pytest.mark.parametrize(("status", "location"), REDIRECTS)
async def test_redirects_are_the_clients_business(
    gateway: Gateway, upstream: RawUpstream, status: int, location: str
) -> None:
    """Relayed with their Location as it is; one request, and none to the other host."""
    async with running() as other:
        location = location.replace("attacker.example", f"127.0.0.1:{other.port}")
        upstream.script = raw(head(status, [("Location", location), ("Content-Length", "0")], "Moved"))
        for octets in (post(fields=[("Authorization", "Bearer k"), ("Cookie", "a=b")]), get("/v1/x")):
            answer = await gateway.ask(octets)
            assert (answer.status, answer.all("location")) == (status, [location])
        assert len(upstream.requests) == 2 and not other.connections


async def test_cookies_are_nobodys_memory(gateway: Gateway, upstream: RawUpstream) -> None:
    """What a backend sets for one client is not sent for another one."""
    upstream.script = reply(200, b"{}", [("Set-Cookie", "session=1; Path=/")])
    for _ in range(2):
        await gateway.ask(post())
    assert [r.get("cookie") for r in upstream.requests] == [None, None]


@pytest.mark.parametrize("method", ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"])
async def test_each_method_passes_as_it_is(connect: Connect, upstream: RawUpstream, method: str) -> None:
    """With its body, if it has one; the answer to HEAD has none."""
    upstream.script = reply(200, b"{}")
    client = await connect()
    for body in (b"", BODY):
        octets = post(body, "/v1/files/1").replace(b"POST", method.encode(), 1)
        answer = await client.ask(octets, method=method)
        assert answer.status == 200 and answer.body == (b"" if method == "HEAD" else b"{}")
    assert [(r.method, r.body) for r in upstream.requests] == [(method, b""), (method, BODY)]
    client.fin()


# --- how often


class Counting:
    """Counts requests by their id, and fails each connection at one point. `warm` requests are answered."""

    def __init__(self, at: str) -> None:
        self.at, self.seen = at, Counter[str]()

    async def serve(self, wire: HttpWire) -> None:
        used = False
        while True:
            if self.at == "at once" and not used:
                wire.reset()
                return
            request = await wire.read_request(timeout=60, body=False)
            if request.path in ("/health", "/v1/models", "/metrics", "/version"):
                await reply(200, b'{"data":[{"id":"m"}]}')(wire, request)
                used = True
                continue
            key = request.get("x-key") or ""
            if key.startswith("warm"):
                await wire.read_request_body(request)
                await reply(200, b"{}")(wire, request)
                used = True
                continue
            self.seen[key] += 1
            if self.at != "half the request":
                await wire.read_request_body(request)
            await self.fail(wire)
            return

    async def fail(self, wire: HttpWire) -> None:
        pieces = {
            "a part of the head": b"HTTP/1.1 200 O",
            "the head": SSE_HEAD,
            "an event": SSE_HEAD + chunk(delta("a")),
            "a bad head": b"nonsense\r\n\r\n",
            "an interim head": b"HTTP/1.1 103 X\r\n\r\n",
            "502": head(502, [("content-length", "0")], "Bad Gateway"),
            "503": head(503, [("content-length", "0"), ("retry-after", "0")], "Busy"),
        }
        if self.at in pieces:
            await wire.send(pieces[self.at])
        if self.at == "no answer, reset":
            wire.reset()
        elif self.at == "silence":
            await wire.wait_closed(timeout=20)
        else:
            wire.fin()


POINTS = [
    "half the request",
    "no answer",
    "no answer, reset",
    "a part of the head",
    "the head",
    "an event",
    "a bad head",
    "an interim head",
    "502",
    "503",
    "silence",
]
COUNTED = {**QUIET, "timeouts": {"first_byte": 0.3}, "retry": {"attempts": 3, "budget": 1.0}}


@pytest.mark.config(COUNTED)
@pytest.mark.parametrize("kept", [False, True], ids=["fresh connection", "kept connection"])
@pytest.mark.parametrize("at", POINTS)
async def test_nothing_is_done_twice(
    gateway: Gateway, connect: Connect, upstream: RawUpstream, at: str, kept: bool
) -> None:
    """A POST is seen at most once wherever it fails, and a GET at most twice, and then only before any answer."""
    counting = Counting(at)
    upstream.on_connect = counting.serve
    for method, most in (("POST", 1), ("PUT", 1), ("DELETE", 1), ("PATCH", 1), ("GET", 2), ("HEAD", 2)):
        key = f"{method} {at}"
        if kept:
            assert (await gateway.ask(get("/v1/x", [("X-Key", "warm")]))).status == 200
        octets = (
            post(BODY, "/v1/chat/completions", [("X-Key", key)])
            if method != "HEAD"
            else get("/v1/x", [("X-Key", key)], method=method)
        )
        client = await connect()
        answer = await client.ask(octets.replace(b"POST", method.encode(), 1), method=method)
        client.fin()
        assert 1 <= counting.seen[key] <= most, (key, counting.seen)
        if at not in ("no answer", "no answer, reset", "half the request"):
            assert counting.seen[key] == 1, "tried again behind an octet of an answer, or a deadline"
        expected = {"the head": 200, "an event": 200, "502": 502, "503": 503, "silence": 504}.get(at, 502)
        assert answer.status == expected and answer.complete == (expected != 200 or method == "HEAD"), (key, answer)


@pytest.mark.config(COUNTED)
async def test_failures_before_anything_was_sent_may_be_tried_elsewhere(
    start_gateway: Callable[..., Awaitable[Gateway]],
) -> None:
    """A refused connection: the request goes to the other backend, once, a POST as well."""
    with listening_socket() as dead:
        port = dead.getsockname()[1]
    async with running() as alive:
        backends = [{"url": f"http://127.0.0.1:{port}"}, {"url": alive.url}]
        gateway = await start_gateway(
            config={"backends": backends, "balance": "round_robin", "health": {"interval": 60}, **QUIET}
        )
        for i in range(6):
            answer = await gateway.ask(post(fields=[("X-Key", str(i))]))
            assert answer.status == 200
        assert Counter(r.get("x-key") for r in alive.requests) == {str(i): 1 for i in range(6)}


@pytest.mark.config(COUNTED)
async def test_a_large_upload_is_never_sent_twice(gateway: Gateway, connect: Connect, upstream: RawUpstream) -> None:
    """A stream that has been consumed cannot be repeated, a GET with a large body neither."""
    counting = Counting("half the request")
    upstream.on_connect = counting.serve
    body = b"x" * 3_000_000
    for method in ("PUT", "GET"):
        assert (await gateway.ask(get("/v1/x", [("X-Key", "warm")]))).status == 200
        octets = (
            post(body, "/v1/files", [("X-Key", method)])
            .replace(b"POST", method.encode(), 1)
            .replace(b"application/json", b"audio/wav")
        )
        client = await connect()
        answer = await client.ask(octets, method=method)
        client.fin()
        assert answer.status == 502 and counting.seen[method] == 1


async def test_nothing_restarts_a_committed_answer(connect: Connect, upstream: RawUpstream) -> None:
    """One status line, whatever comes behind it."""
    upstream.script = raw(SSE_HEAD + chunk(delta("a")), b"HTTP/1.1 500 Oops\r\nContent-Length: 0\r\n\r\n", gap=0.01)
    client = await connect()
    answer = await client.ask()
    assert not answer.complete and bytes(client.received).count(b"HTTP/1.") == 1 and b"Oops" not in client.received
    assert len(upstream.requests) == 1
    client.fin()


@pytest.mark.parametrize("reason", ["", "OK", "Everything is fine \xe9", "200 OK HTTP/1.1"])
async def test_the_status_line_passes(gateway: Gateway, upstream: RawUpstream, reason: str) -> None:
    """Also with a reason of the backend's own."""
    for status in (200, 201, 202, 206, 299, 404, 418, 429, 451, 500, 599):
        upstream.script = reply(status, b"{}", [], reason)
        answer = await gateway.ask(get("/v1/x"))
        assert (answer.status, answer.reason, answer.body) == (status, reason, b"{}")
