"""Which fields pass, and what the gateway adds: RFC 9110 section 7.6."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core import headers
from gateway.core.head import Framing, parse_request, parse_response
from gateway.core.headers import Peer, client_head, upstream_head

PEER = Peer(b"192.0.2.7", b"http")
DATE = b"Tue, 01 Dec 2026 06:28:10 GMT"


def up(
    *lines: bytes, peer: Peer | None = PEER, target: bytes = b"/v1/x", host: bytes = b"gw", **options: object
) -> list[bytes]:
    """The lines of the head that the backend gets."""
    head = parse_request(b"\r\n".join([b"POST " + target + b" HTTP/1.1", b"Host: " + host, *lines, b"", b""]))
    who = None if peer is None else headers.forwarding(peer, head.named[b"host"])
    given_: dict[str, object] = {"host": b"b:1", "request_id": b"rid", "forwarding": who, "length": 0, **options}
    octets = upstream_head(head, target, **given_)  # type: ignore[arg-type]
    assert octets.endswith(b"\r\n\r\n")
    return octets[:-4].split(b"\r\n")


def down(*lines: bytes, status: bytes = b"200 OK", method: bytes = b"POST", framing: Framing | None = None) -> list[bytes]:
    """The lines of the head that the client gets."""
    head = parse_response(b"\r\n".join([b"HTTP/1.1 " + status, *lines, b"", b""]), method)
    octets = client_head(head, request_id=b"rid", date=DATE, framing=framing or head.framing, connection=None)
    assert octets.endswith(b"\r\n\r\n")
    return octets[:-4].split(b"\r\n")


ADDED = [
    b"X-Forwarded-For: 192.0.2.7",
    b"X-Forwarded-Proto: http",
    b"X-Forwarded-Host: gw",
    b'Forwarded: for=192.0.2.7;proto=http;host="gw"',
]


def test_only_the_documented_fields_are_added() -> None:
    """Via, the request's id and, where asked for, the forwarding fields; no Accept, no User-Agent, no Content-Type."""
    assert up() == [b"POST /v1/x HTTP/1.1", b"Host: b:1", b"Via: 1.1 tokenpipe", b"X-Request-Id: rid", *ADDED]
    assert up(peer=None) == [b"POST /v1/x HTTP/1.1", b"Host: b:1", b"Via: 1.1 tokenpipe", b"X-Request-Id: rid"]
    assert down(b"Content-Length: 0") == [
        b"HTTP/1.1 200 OK",
        b"Date: " + DATE,
        b"Content-Length: 0",
        b"X-Request-Id: rid",
    ]


OWN = frozenset(
    b"host content-length transfer-encoding expect via x-request-id connection keep-alive proxy-connection "
    b"proxy-authorization te trailer upgrade http2-settings x-forwarded-for x-forwarded-proto x-forwarded-host "
    b"forwarded date".split()
)
NAME = st.text("abcXYZ019-_!~", min_size=1, max_size=10).map(str.encode).filter(lambda n: n.lower() not in OWN)
VALUE = st.binary(max_size=16).map(lambda b: bytes(c for c in b if c >= 0x20 and c != 0x7F).strip(b" \t"))
FIELDS = st.lists(st.tuples(NAME, VALUE), max_size=10)


@given(FIELDS)
def test_end_to_end_fields_pass_both_ways_as_they_were(fields: list[tuple[bytes, bytes]]) -> None:
    """Names, their case, values, their count and order."""
    lines = [n + b": " + v for n, v in fields]
    got = up(*lines)
    assert got[2 : 2 + len(lines)] == lines and len(got) == 2 + len(lines) + 2 + len(ADDED)
    assert down(*lines)[1 : 1 + len(lines)] == lines


HOP = [
    b"Connection: keep-alive",
    b"Keep-Alive: timeout=5",
    b"Proxy-Connection: x",
    b"TE: trailers",
    b"Trailer: X-T",
    b"Upgrade: h2c",
    b"HTTP2-Settings: AAMAAABk",
]


@pytest.mark.parametrize("line", [*HOP, b"Proxy-Authorization: Basic eA=="])
def test_fields_of_one_connection_do_not_pass(line: bytes) -> None:
    """In any case of letters, in both directions."""
    name = line.partition(b":")[0].lower()
    for form in (line, line.lower(), line.upper()):
        assert not [x for x in up(form) if x.lower().startswith(name + b":")]
        if name != b"proxy-authorization":
            assert not [x for x in down(form) if x.lower().startswith(name + b":")]


@pytest.mark.parametrize(
    "connection",
    [
        [b"Connection: close, X-Hop, keep-alive"],
        [b"Connection: x-hop"],
        [b"connection: close", b"CONNECTION: ,X-HOP ,"],
        [b"Connection: ,,\t X-Hop\t,,"],
        [b"Connection: keep-alive", b"Connection: X-Hop"],
    ],
)
def test_fields_that_connection_names_do_not_pass(connection: list[bytes]) -> None:
    """However many Connection lines, in whatever case."""
    lines = [b"X-Hop: 1", *connection, b"x-hop: 2", b"X-End: 3"]
    for got in (up(*lines), down(*lines)):
        assert b"X-End: 3" in got and not [x for x in got if x.lower().startswith((b"x-hop", b"connection"))]


PROTECTED = [
    b"Authorization: Bearer k",
    b"X-Api-Key: k",
    b"Cookie: a=b",
    b"Content-Type: application/json",
    b"Content-Encoding: br",
    b"Accept: */*",
    b"Accept-Encoding: gzip",
]


@pytest.mark.parametrize("line", PROTECTED)
def test_connection_strips_nothing_that_is_for_all(line: bytes) -> None:
    """Naming Authorization in Connection must not take it from the request, nor Set-Cookie from an answer."""
    name = line.partition(b":")[0]
    assert line in up(b"Connection: close, " + name, line)
    assert b"Host: b:1" in up(b"Connection: host, content-length, transfer-encoding, via, x-request-id, x-forwarded-for")
    assert b"Set-Cookie: a=b" in down(b"Connection: set-cookie, content-length, date", b"Set-Cookie: a=b", b"Content-Length: 2")
    assert b"Content-Length: 2" in down(b"Connection: content-length", b"Content-Length: 2")


def test_framing_is_made_anew() -> None:
    """Towards the backend by what is sent, towards the client by what is relayed."""
    body = b"Content-Length: 7"
    assert up(body, length=7).count(b"Content-Length: 7") == 1
    assert up(body, length=9).count(b"Content-Length: 9") == 1 and b"Content-Length: 7" not in up(body, length=9)
    assert b"Transfer-Encoding: chunked" in up(b"Transfer-Encoding: chunked", length=None)
    assert b"Content-Length: 0" in up(b"Transfer-Encoding: chunked", length=0)
    assert b"Content-Length: 0" in up(b"Content-Length: 0")
    assert b"Transfer-Encoding: chunked" in down(b"Transfer-Encoding: chunked")
    assert b"Transfer-Encoding: chunked" in down(framing=Framing.CHUNKED)
    assert not [x for x in down(b"Transfer-Encoding: chunked", framing=Framing.CLOSE) if b"ransfer" in x]


@pytest.mark.parametrize(
    ("status", "method", "kept"),
    [
        (b"204 No Content", b"POST", False),
        (b"304 Not Modified", b"GET", True),
        (b"200 OK", b"HEAD", True),
        (b"200 OK", b"GET", True),
    ],
)
def test_content_length_where_it_may_stand(status: bytes, method: bytes, kept: bool) -> None:
    """Not on 204; on 304 and on the answer to HEAD it tells of a body that is not there. Never a coding."""
    assert (b"Content-Length: 9" in down(b"Content-Length: 9", status=status, method=method)) == kept
    framing = None if status == b"200 OK" and method == b"GET" else Framing.NONE
    assert not [
        x
        for x in down(b"Transfer-Encoding: chunked", status=status, method=method, framing=framing)
        if b"ransfer" in x and framing
    ]


def test_what_a_client_claims_of_the_way_is_replaced() -> None:
    """Forwarding fields are the gateway's own word, one line each; Via is continued, ours last."""
    got = up(
        b"X-Forwarded-For: 10.0.0.1",
        b"x-forwarded-for: 10.0.0.2",
        b"Forwarded: for=1.1.1.1",
        b"Via: 1.0 a",
        b"VIA: 1.1 b",
        b"X-Forwarded-Proto: https",
        b"X-Forwarded-Host: evil",
    )
    assert [x for x in got if b"orwarded" in x] == ADDED
    assert [x for x in got if x.lower().startswith(b"via")] == [b"Via: 1.0 a, 1.1 b, 1.1 tokenpipe"]
    passed = up(b"X-Forwarded-For: 10.0.0.1", peer=None)
    assert b"X-Forwarded-For: 10.0.0.1" in passed


def test_forwarded_writes_addresses_as_rfc_7239_has_them() -> None:
    """An IPv6 address is bracketed and quoted; without a Host there is no host parameter."""
    assert b'for="[2001:db8::1]"' in headers.forwarding(Peer(b"2001:db8::1", b"https"), b"gw:80")
    assert b'host="gw:80"' in headers.forwarding(PEER, b"gw:80")
    assert b"ost" not in headers.forwarding(PEER, b"")


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ([], None),
        ([b"X-Request-Id: abc-1"], b"abc-1"),
        ([b"x-request-id: a/b+c=:@~._"], b"a/b+c=:@~._"),
        ([b"X-Request-Id: " + b"a" * 128], b"a" * 128),
        ([b"X-Request-Id: " + b"a" * 129], None),
        ([b"X-Request-Id: a b"], None),
        ([b"X-Request-Id: "], None),
        ([b'X-Request-Id: a"b'], None),
        ([b"X-Request-Id: a\xe9"], None),
        ([b"X-Request-Id: a,b"], None),
        ([b"X-Request-Id: a", b"X-Request-Id: b"], None),
        ([b"X-Request-Id: <a>"], None),
        ([b"X-Request-Id: a\\b"], None),
        ([b"X-Request-Id: a{b}"], None),
    ],
)
def test_a_sane_request_id_is_the_clients_own(lines: list[bytes], expected: bytes | None) -> None:
    """Anything else could not stand in a log line, a URL and a field alike."""
    head = parse_request(b"\r\n".join([b"GET / HTTP/1.1", b"Host: gw", *lines, b"", b""]))
    assert headers.request_id(head) == expected
    assert [x for x in up(*lines) if x.lower().startswith(b"x-request-id")] == [b"X-Request-Id: rid"]


@pytest.mark.parametrize(
    ("version", "lines", "kept"),
    [
        (b"1", [], True),
        (b"1", [b"Connection: close"], False),
        (b"1", [b"Connection: Keep-Alive, CLOSE"], False),
        (b"1", [b"Connection: x"], True),
        (b"0", [], False),
        (b"0", [b"Connection: keep-alive"], True),
        (b"0", [b"Connection: Keep-Alive"], True),
        (b"0", [b"Connection: keep-alive", b"Connection: close"], False),
        (b"1", [b"Connection: closed"], True),
    ],
)
def test_whether_a_connection_may_be_used_again(version: bytes, lines: list[bytes], kept: bool) -> None:
    """RFC 9112 section 9.3, on both sides."""
    assert headers.keeps_alive(parse_request(b"\r\n".join([b"GET / HTTP/1." + version, b"Host: gw", *lines, b"", b""]))) == kept
    answer = parse_response(b"\r\n".join([b"HTTP/1." + version + b" 200 OK", *lines, b"", b""]), b"GET")
    assert headers.keeps_alive(answer) == kept


@pytest.mark.parametrize(
    ("lines", "asks"),
    [
        ([b"Connection: Upgrade", b"Upgrade: websocket"], True),
        ([b"Connection: keep-alive, UPGRADE", b"Upgrade: WebSocket"], True),
        ([b"Upgrade: websocket"], False),
        ([b"Connection: Upgrade"], False),
        ([b"Connection: Upgrade", b"Upgrade: h2c"], False),
        ([b"Connection: Upgrade", b"Upgrade: websocket, h2c"], False),
        ([b"Connection: Upgrade", b"Upgrade: websocket", b"Content-Length: 2"], False),
    ],
)
def test_what_asks_for_a_websocket(lines: list[bytes], asks: bool) -> None:
    """Only a GET without a body that says so in both fields."""
    head = parse_request(b"\r\n".join([b"GET /v1/realtime HTTP/1.1", b"Host: gw", *lines, b"", b""]))
    assert headers.asks_for_websocket(head) == asks


def test_the_backends_own_credential_replaces_the_clients() -> None:
    """In whichever field the client gave its own."""
    got = up(b"Authorization: Bearer client", b"X-Api-Key: client", b"api-key: client", credential=b"secret")
    assert [x for x in got if b"client" in x] == [] and got.count(b"Authorization: Bearer secret") == 1


TRACE, PARENT = b"0af7651916cd43dd8448eb211c80319c", b"b7ad6b7169203331"


@pytest.mark.parametrize(
    ("given_", "trace"),
    [
        (b"00-%b-%b-01" % (TRACE, PARENT), (TRACE.decode(), True)),
        (b"00-%b-%b-00" % (TRACE, PARENT), (TRACE.decode(), False)),
        (b"00-%b-%b-03" % (TRACE, PARENT), (TRACE.decode(), True)),
        (b"cc-%b-%b-01-what-will-be" % (TRACE, PARENT), (TRACE.decode(), True)),
        (b"00-%b-%b-01-extra" % (TRACE, PARENT), (None, False)),
        (b"ff-%b-%b-01" % (TRACE, PARENT), (None, False)),
        (b"00-%b-%b-01" % (b"0" * 32, PARENT), (None, False)),
        (b"00-%b-%b-01" % (TRACE, b"0" * 16), (None, False)),
        (b"00-%b-%b-01" % (TRACE.upper(), PARENT), (None, False)),
        (b"00-%b-01" % TRACE, (None, False)),
        (b"", (None, False)),
        (b"00-%b-%b-01\r\ntraceparent: 00-%b-%b-01" % (TRACE, PARENT, TRACE, PARENT), (None, False)),
    ],
)
def test_the_trace_that_a_request_belongs_to(given_: bytes, trace: tuple[str | None, bool]) -> None:
    """W3C Trace Context: a field that cannot be read, or stands twice, is as none at all."""
    head = parse_request(b"GET / HTTP/1.1\r\nHost: a\r\ntraceparent: " + given_ + b"\r\n\r\n")
    assert headers.trace(head) == trace
