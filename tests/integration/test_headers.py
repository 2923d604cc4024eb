"""End-to-end fields pass in both directions; what is added and taken away is a short documented list."""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Awaitable, Callable, Sequence

import pytest

from tests.support import script
from tests.support.client import RawClient
from tests.support.gateway import Gateway
from tests.support.messages import HttpWire, Message
from tests.support.script import CHAT, chunk, get, head, post, raw, reply
from tests.support.upstream import RawUpstream

Connect = Callable[..., Awaitable[RawClient]]
LF = Sequence[tuple[str, str]]
QUIET = {"breaker": {"failures": 1_000_000}, "retry": {"attempts": 1}}
DATE = ("date", "Tue, 01 Dec 2026 06:28:10 GMT")
NAMES = [
    "X-A",
    "x-a",
    "X-Long-Name",
    "ACCEPT",
    "Accept-Language",
    "User-Agent",
    "Cookie",
    "Range",
    "If-None-Match",
    "x_under",
    "X-1!#$%&'*+-.^_`|~",
    "Last-Event-ID",
    "OpenAI-Organization",
    "anthropic-version",
    "traceparent",
    "Pragma",
    "Origin",
    "X-Stainless-Lang",
    "Cache-Control",
    "Accept-Encoding",
    "Content-Language",
    "Max-Forwards",
    "Priority",
    "baggage",
    "content-md5",
]
RESPONSE_NAMES = [
    "Set-Cookie",
    "set-cookie",
    "Link",
    "WWW-Authenticate",
    "Server-Timing",
    "Server",
    "X-A",
    "x-a",
    "ETag",
    "Vary",
    "Warning",
    "Cache-Control",
    "x-ratelimit-remaining-tokens",
    "Retry-After",
    "retry-after-ms",
    "Content-Encoding",
    "Location",
    "Age",
    "Content-Security-Policy",
    "X-Accel-Buffering",
    "Access-Control-Allow-Origin",
    "x-should-retry",
    "openai-processing-ms",
    "Via",
    "Alt-Svc",
    "P3P",
    "Content-Type",
]
OCTETS = [chr(c) for c in range(256) if (c >= 0x20 and c != 0x7F) or c == 9]


def fields_at_random(names: list[str], seed: int) -> list[tuple[str, str]]:
    """A legal list: doubled names, odd cases, empty values, obs-text, all sorts of marks."""
    rng = random.Random(seed)
    found = []
    for _ in range(rng.randrange(1, 30)):
        value = "".join(rng.choices(OCTETS, k=rng.choice([0, 1, 5, 30, 300]))).strip(" \t")
        found.append((rng.choice(names), value))
    return found


def lines(head_: bytes) -> list[str]:
    return head_[:-4].decode("latin-1").split("\r\n")


def spelt(fields: LF) -> list[str]:
    return [f"{name}: {value}" for name, value in fields]


@pytest.mark.config(QUIET)
@pytest.mark.parametrize("seed", range(8))
async def test_any_legal_fields_pass_both_ways(connect: Connect, upstream: RawUpstream, seed: int) -> None:
    """Raw blocks at both ends differ by the documented changes, and by nothing else."""
    client = await connect()
    for turn in range(10):
        sent, answered = fields_at_random(NAMES, seed * 100 + turn), fields_at_random(RESPONSE_NAMES, seed * 100 + turn)
        upstream.script = reply(200, b"ok", [DATE, *answered])
        answer = await client.ask(post(CHAT, fields=sent))
        got = upstream.requests[-1]
        body = len(got.body)
        assert lines(got.head) == [
            "POST /v1/chat/completions HTTP/1.1",
            f"Host: 127.0.0.1:{upstream.port}",
            "Content-Type: application/json",
            *spelt(sent),
            "Via: 1.1 tokenpipe",
            f"X-Request-Id: {got.get('x-request-id')}",
            "X-Forwarded-For: 127.0.0.1",
            "X-Forwarded-Proto: http",
            "X-Forwarded-Host: gateway.test",
            'Forwarded: for=127.0.0.1;proto=http;host="gateway.test"',
            f"Content-Length: {body}",
        ]
        assert lines(answer.head) == [
            "HTTP/1.1 200 OK",
            *spelt([DATE, *answered]),
            "content-length: 2",
            f"X-Request-Id: {got.get('x-request-id')}",
        ]
    client.fin()


@pytest.mark.config({**QUIET, "headers": {"forwarded": False}})
async def test_nothing_else_is_added(gateway: Gateway, upstream: RawUpstream) -> None:
    """No Accept, Accept-Encoding, User-Agent or Content-Type of a library's; no Server on the way back."""
    upstream.script = raw(b"HTTP/1.1 200 \r\n\r\nx", then="fin")
    answer = await gateway.ask(b"GET /v1/x HTTP/1.1\r\nhost: a\r\n\r\n")
    request_id = upstream.requests[0].get("x-request-id")
    assert lines(upstream.requests[0].head) == [
        "GET /v1/x HTTP/1.1",
        f"Host: 127.0.0.1:{upstream.port}",
        "Via: 1.1 tokenpipe",
        f"X-Request-Id: {request_id}",
    ]
    assert re.fullmatch(
        rf"HTTP/1.1 200 \r\nDate: [^\r]* GMT\r\nX-Request-Id: {request_id}\r\nTransfer-Encoding: chunked\r\n\r\n",
        answer.head.decode(),
    )
    upstream.script = raw(b"HTTP/1.1 204 No Content\r\n\r\n")
    answer = await gateway.ask(
        get("/v1/x", [("X-Request-Id", "mine-1"), ("X-Forwarded-For", "10.0.0.1"), ("Forwarded", "for=1.1.1.1")])
    )
    assert [name for name, _ in answer.fields] == ["Date", "X-Request-Id"] and answer.get("x-request-id") == "mine-1"
    assert (
        upstream.requests[1].get("x-forwarded-for") == "10.0.0.1"
        and upstream.requests[1].get("forwarded") == "for=1.1.1.1"
    )


async def test_doubled_fields_stay_apart(gateway: Gateway, upstream: RawUpstream) -> None:
    """Five cookies are five lines, in their order, on errors too."""
    several = [("Set-Cookie", f"c{i}=v, x; Path=/") for i in range(5)] + [
        ("Link", "<a>"),
        ("WWW-Authenticate", "Basic"),
        ("Link", "<b>"),
        ("www-authenticate", "Bearer"),
        ("Server-Timing", "a"),
        ("Server-Timing", "b"),
    ]
    for status in (200, 401, 500):
        upstream.script = reply(status, b"{}", [DATE, *several])
        answer = await gateway.ask(
            post(fields=[("X-A", "1"), ("X-B", "2"), ("X-A", "2"), ("Accept", "a"), ("accept", "b")])
        )
        assert answer.without("date", "content-length", "x-request-id") == several
        assert upstream.requests[-1].all("x-a") == ["1", "2"] and upstream.requests[-1].all("accept") == ["a", "b"]


HOP = [
    ("Keep-Alive", "timeout=5"),
    ("Proxy-Connection", "keep-alive"),
    ("TE", "trailers"),
    ("te", "gzip"),
    ("TRAILER", "X-T"),
    ("Upgrade", "h2c"),
    ("Proxy-Authorization", "Basic eA=="),
    ("HTTP2-Settings", "AAMAAABk"),
]
ABUSE = (
    "content-length, host, authorization, transfer-encoding, content-type, cookie, x-request-id, via, x-forwarded-for"
)


async def test_hop_by_hop_fields_never_pass(gateway: Gateway, upstream: RawUpstream) -> None:
    """The fixed set and what Connection names, in any case, both ways; what is for all cannot be stripped so."""
    hop = [*HOP, ("X-Hop", "1"), ("x-hop", "2")]
    ends = [("Authorization", "Bearer k"), ("Cookie", "a=b"), ("X-End", "3")]
    for connection in (
        ["close, X-Hop, keep-alive"],
        ["x-HOP"],
        ["close", "X-HOP"],
        [",, \tX-Hop ,"],
        [ABUSE + ", X-Hop"],
    ):
        named = [("Connection", value) for value in connection]
        back = [f for f in hop if f[0] != "Proxy-Authorization"]
        upstream.script = reply(200, b"{}", [DATE, *named, *back, ("Set-Cookie", "a=b"), ("X-End", "4")])
        answer = await gateway.ask(post(fields=[*hop[:3], *named, *hop[3:], *ends]))
        got = upstream.requests[-1]
        kept = got.without(
            "host",
            "via",
            "x-request-id",
            "content-length",
            "x-forwarded-for",
            "x-forwarded-proto",
            "x-forwarded-host",
            "forwarded",
        )
        assert kept == [("Content-Type", "application/json"), *ends] and got.complete and got.json() == CHAT
        assert len(got.all("host")) == len(got.all("via")) == len(got.all("x-forwarded-for")) == 1
        assert answer.without("date", "content-length", "x-request-id", "connection") == [
            ("Set-Cookie", "a=b"),
            ("X-End", "4"),
        ]
        assert answer.body == b"{}" and answer.complete


async def test_what_a_client_says_of_its_way_is_replaced(gateway: Gateway, upstream: RawUpstream) -> None:
    """An untrusted peer's forwarding fields; Via is continued in one line."""
    await gateway.ask(
        post(
            fields=[
                ("X-Forwarded-For", "10.0.0.1"),
                ("x-forwarded-for", "10.0.0.2"),
                ("Forwarded", "for=1.1.1.1"),
                ("Via", "1.0 x"),
                ("via", "1.1 y"),
                ("X-Forwarded-Host", "evil"),
                ("X-Forwarded-Proto", "https"),
            ]
        )
    )
    got = upstream.requests[0]
    assert got.all("x-forwarded-for") == ["127.0.0.1"] and got.all("via") == ["1.0 x, 1.1 y, 1.1 tokenpipe"]
    assert got.all("forwarded") == ['for=127.0.0.1;proto=http;host="gateway.test"'] and got.all("x-forwarded-host") == [
        "gateway.test"
    ]
    await gateway.ask(get("http://asked.example:81/v1/x"))
    assert upstream.requests[1].get("x-forwarded-host") == "asked.example:81" and upstream.requests[1].target == "/v1/x"
    assert upstream.requests[1].get("forwarded") == 'for=127.0.0.1;proto=http;host="asked.example:81"'


@pytest.mark.parametrize(
    ("sent", "passes"),
    [
        ("mine-1/a:b", True),
        ("a" * 128, True),
        ("a" * 129, False),
        ("a b", False),
        ('a"b', False),
        ("é", False),
        ("", False),
    ],
)
async def test_the_requests_id(gateway: Gateway, upstream: RawUpstream, sent: str, passes: bool) -> None:
    """The client's own where it is sane, else a fresh one; the same for the backend, the client and the refusal."""
    upstream.script = reply(200, b"{}", [DATE, ("X-Request-Id", "the-engines")])
    answer = await gateway.ask(post(fields=[("x-request-id", sent)]))
    (given,) = answer.all("x-request-id")
    assert upstream.requests[0].all("x-request-id") == [given] and (given == sent) == passes
    refused = await gateway.ask(get("/nowhere", [("X-Request-Id", sent)]))
    assert refused.status == 404 and (refused.get("x-request-id") == sent) == passes and refused.get("x-request-id")


@pytest.mark.config({**QUIET, "limits": {"request_head": 65536}})
@pytest.mark.parametrize("size", [7_000, 9_000, 20_000, 60_000])
async def test_large_fields_pass_both_ways(gateway: Gateway, upstream: RawUpstream, size: int) -> None:
    """A library's 8190 octets are no limit here."""
    upstream.script = reply(200, b"{}", [DATE, ("X-Debug", "d" * size)])
    answer = await gateway.ask(post(fields=[("Cookie", "c" * size)]))
    assert (
        answer.status == 200
        and answer.get("x-debug") == "d" * size
        and upstream.requests[0].get("cookie") == "c" * size
    )


@pytest.mark.config({**QUIET, "limits": {"request_head": 65536}})
async def test_beyond_the_limit_is_431_or_502(gateway: Gateway, upstream: RawUpstream) -> None:
    """The same number on both legs; neither content is told."""
    answer = await gateway.ask(post(fields=[("Cookie", "secret" * 12_000)]))
    assert (answer.status, answer.get("x-gateway-error")) == (431, "headers_too_large") and not upstream.requests
    upstream.script = reply(200, b"{}", [DATE, ("X-Debug", "secret" * 12_000)])
    answer = await gateway.ask(post())
    assert (answer.status, answer.get("x-gateway-error")) == (502, "upstream_malformed")
    assert "secret" not in gateway.stderr() and b"secret" not in answer.body
    exact = head(200, [("x-d", ""), ("content-length", "2")])
    for size, status in ((65536, 200), (65537, 502)):
        upstream.script = raw(head(200, [("x-d", "d" * (size - len(exact))), ("content-length", "2")]) + b"{}")
        assert (await gateway.ask(post())).status == status


ERRORS = [
    (429, "Too Many Requests"),
    (503, "Service Unavailable"),
    (529, "Site is overloaded"),
    (401, "Unauthorized"),
    (404, "Not Found"),
    (422, "X"),
    (400, ""),
    (500, "Internal Server Error"),
    (413, "\xb3\xc9"),
]


@pytest.mark.config(QUIET)
@pytest.mark.parametrize(("status", "reason"), ERRORS)
async def test_an_error_of_the_backends_passes_as_it_is(
    gateway: Gateway, upstream: RawUpstream, status: int, reason: str
) -> None:
    """Its status, reason, fields and body, for a stream too; exactly one request."""
    fields = [
        DATE,
        ("Retry-After", "34"),
        ("retry-after-ms", "340"),
        ("x-ratelimit-remaining-tokens", "0"),
        ("x-should-retry", "true"),
        ("Content-Type", "application/json"),
    ]
    body = b'{ "error" : {"message":"\xc3\xa9", "code":1.0} }\n'
    upstream.script = reply(status, body, fields, reason)
    for request in (post(), post({"model": "m"}), get("/v1/x")):
        answer = await gateway.ask(request)
        assert (answer.status, answer.reason, answer.body) == (status, reason, body)
        assert answer.without("content-length", "x-request-id") == fields and answer.get("x-gateway-error") is None
    assert len(upstream.requests) == 3


TYPES = [
    "text/event-stream",
    "text/event-stream;charset=UTF-8",
    "Text/Event-Stream; charset=utf-8",
    "application/json",
    "audio/mpeg",
    "application/octet-stream",
    'text/event-stream ; x="a;b"',
    "",
    "nonsense",
]


@pytest.mark.parametrize("kind", TYPES)
async def test_the_content_type_is_the_responses_own(gateway: Gateway, upstream: RawUpstream, kind: str) -> None:
    """Octet for octet, whatever the request asked for; and what is in the body is nobody's business."""
    noise = random.Random(kind).randbytes(20_000)
    for stream in (True, False):
        upstream.script = raw(
            head(200, [("Content-Type", kind), ("transfer-encoding", "chunked")])
            + chunk(noise[:7])
            + chunk(noise[7:])
            + script.LAST
        )
        answer = await gateway.ask(post({"model": "m", "stream": stream}))
        assert answer.all("content-type") == [kind] and answer.body == noise and answer.complete


async def test_response_fields_do_not_change_the_timing(connect: Connect, upstream: RawUpstream) -> None:
    """Connection, Cache-Control, X-Accel-Buffering: the first event still passes at once."""
    fields = [
        DATE,
        ("Connection", "keep-alive"),
        ("Cache-Control", "no-cache"),
        ("X-Accel-Buffering", "yes"),
        script.SSE_TYPE,
        ("transfer-encoding", "chunked"),
    ]
    upstream.script = held = script.Held(head(200, fields), chunk(script.delta("a")))
    client = await connect()
    await client.send(post(fields=[("Accept-Encoding", "gzip, deflate, br, zstd")]))
    await client.receive_until(b'"content":"a"', timeout=1)
    wire: HttpWire = await held.wire()
    await wire.send(chunk(script.DONE) + script.LAST)
    answer: Message = await client.read_response()
    assert answer.complete and answer.get("cache-control") == "no-cache" and answer.get("connection") is None
    client.fin()
    await asyncio.sleep(0)
