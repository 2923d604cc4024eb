"""Heads: what is HTTP/1.1 and what is not, and how long the body behind one is."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.head import Field, Framing, Malformed, parse_fields, parse_request, parse_response
from gateway.errors import Refusal


def request(*lines: bytes, first: bytes = b"POST /v1/x HTTP/1.1", host: bytes | None = b"gw") -> bytes:
    hosts = [b"Host: " + host] if host is not None else []
    return b"\r\n".join([first, *hosts, *lines, b"", b""])


def response(*lines: bytes, first: bytes = b"HTTP/1.1 200 OK") -> bytes:
    return b"\r\n".join([first, *lines, b"", b""])


ACCEPTED = [
    (request(), Framing.NONE, 0),
    (request(b"Content-Length: 0"), Framing.NONE, 0),
    (request(b"Content-Length: 5"), Framing.LENGTH, 5),
    (request(b"content-length:5"), Framing.LENGTH, 5),
    (request(b"CONTENT-LENGTH: \t 5 \t"), Framing.LENGTH, 5),
    (request(b"Content-Length: 0005"), Framing.LENGTH, 5),
    (request(b"Content-Length: 9999999999999999999"), Framing.LENGTH, 9999999999999999999),
    (request(b"Transfer-Encoding: chunked"), Framing.CHUNKED, 0),
    (request(b"Transfer-Encoding: Chunked"), Framing.CHUNKED, 0),
    (request(b"Transfer-Encoding: \tchunked\t"), Framing.CHUNKED, 0),
    (request(first=b"GET /v1/x HTTP/1.1"), Framing.NONE, 0),
    (request(b"Content-Length: 2", first=b"GET /v1/x HTTP/1.1"), Framing.LENGTH, 2),
    (request(first=b"GET /v1/x HTTP/1.0", host=None), Framing.NONE, 0),
    (request(first=b"M-SEARCH /v1/x HTTP/1.1"), Framing.NONE, 0),
    (request(first=b"GET http://evil.example/v1/x HTTP/1.1"), Framing.NONE, 0),
    (request(first=b"GET /v1/\xc3\xa9 HTTP/1.1"), Framing.NONE, 0),
    (request(b"X-A: caf\xe9 \xff", b"X-B:", b"X-B: ", b"!#$%&'*+-.^_`|~0aZ: \t"), Framing.NONE, 0),
    (request(host=b""), Framing.NONE, 0),
    (request(host=b"127.0.0.1:8000"), Framing.NONE, 0),
    (request(host=b"[::1]:8000"), Framing.NONE, 0),
    (request(host=b"a-b.example.:80"), Framing.NONE, 0),
]


@pytest.mark.parametrize(("head", "framing", "length"), ACCEPTED, ids=lambda v: repr(v)[:50])
def test_what_is_http_is_read(head: bytes, framing: Framing, length: int) -> None:
    """Legal heads are read, and say how long their body is."""
    parsed = parse_request(head)
    assert (parsed.framing, parsed.length) == (framing, length)


CL, TE = b"Content-Length: 5", b"Transfer-Encoding: chunked"
DIGIT = b"\xd9\xa5"  # ARABIC-INDIC DIGIT FIVE
REFUSED = [
    # framed twice, or in a way that two recipients read differently
    (request(CL, TE), "bad_request"),
    (request(TE, CL), "bad_request"),
    (request(TE, TE), "bad_request"),
    (request(CL, CL), "bad_request"),
    (request(b"Content-Length: 1", CL), "bad_request"),
    (request(b"Content-Length: 0", TE), "bad_request"),
    (request(b"Content-Length: ", TE), "bad_request"),
    *(
        (request(b"Content-Length: " + v), "bad_request")
        for v in (
            b"",
            b"+5",
            b"-5",
            b"5, 5",
            b"5,5",
            b"0x5",
            b"5 5",
            b"5.0",
            b"5e0",
            b"five",
            b"5_0",
            b'"5"',
            b"5;q=1",
            DIGIT,
            b"\xef\xbc\x95",
            b"1" * 20,
            b"1" * 4000,
            b"\xa05",
            b"Infinity",
        )
    ),
    *(
        (request(b"Transfer-Encoding: " + v), "bad_request")
        for v in (
            b"",
            b"chunked, chunked",
            b"chunked, gzip",
            b"chunked;q=1",
            b'"chunked"',
            b"chunked,",
            b",chunked",
            b"chunked gzip",
            b"chunked, identity",
            b"\xa0chunked",
            b"chunked\xa0",
            b"gzip, chunked, chunked",
            b"gzip;level=1, chunked",
        )
    ),
    *(
        (request(b"Transfer-Encoding: " + v), "not_implemented")
        for v in (
            b"gzip, chunked",
            b"identity",
            b"xchunked",
            b"notchunked",
            b"chunke",
            b"gzip",
            b"deflate, chunked",
            b"x-chunked",
        )
    ),
    (request(b"Transfer-Encoding: gzip", TE), "not_implemented"),
    (request(TE, b"Transfer-Encoding: gzip"), "bad_request"),
    (request(TE, first=b"POST /v1/x HTTP/1.0"), "bad_request"),
    # field lines
    *(
        (request(line), "bad_request")
        for line in (
            b"X-Abc: \rxTransfer-Encoding: chunked",
            b"X: a\nTransfer-Encoding: chunked",
            b"X: a\x00b",
            b"X: a\x0bb",
            b"X: a\x01",
            b"X: a\x7f",
            b"X\r: a",
            b"X\n: a",
            b"X\x00: a",
            b"X\x0b: a",
            b"X : a",
            b"X\t: a",
            b" X: a",
            b"\tX: a",
            b": a",
            b":",
            b"X",
            b"X a",
            b"Content-Length",
            b"(X): a",
            b"X[1]: a",
            b"X@: a",
            b"X\xe9: a",
            b"X,Y: a",
            b"X=1;: a",
            b'"X": a',
            b"Transfer-Encoding : chunked",
            b"Content-Length\xa0: 5",
            b"X/: a",
            b"X: a\x0c",
            b"X: a\r",
            b"X: \x1b[2J",
            b"X: a\r\r",
            b"{}: a",
            b"X: a\x1f",
            b"Host : gw",
            b"Transfer\x00-Encoding: chunked",
        )
    ),
    # Host
    (request(host=None), "bad_request"),
    (request(b"Host: gw"), "bad_request"),
    (request(b"host: other"), "bad_request"),
    (request(b"Host:", host=b""), "bad_request"),
    *(
        (request(host=v), "bad_request")
        for v in (
            b"a, b",
            b"x/../y",
            b"a b",
            b"user@gw",
            b"gw:port",
            b"gw:80:80",
            b"gw:123456",
            b"http://gw",
            b"[::1",
            b"gw?x",
            b"gw#x",
            b"gw\\x",
            b'g"w',
            b"gw\xe9",
            b"[::1]x",
            b"<gw>",
            b"gw, gw",
            b"gw:-1",
            b"gw:" + DIGIT,
        )
    ),
    # the request line
    *(
        (request(first=line), "bad_request")
        for line in (
            b"GET  /v1/x HTTP/1.1",
            b"GET /v1/x  HTTP/1.1",
            b" GET /v1/x HTTP/1.1",
            b"GET /v1/x HTTP/1.1 ",
            b"GET\t/v1/x\tHTTP/1.1",
            b"GET /v1/x",
            b"GET",
            b"",
            b"GET /v1/x HTTP/1.2",
            b"GET /v1/x HTTP/2.0",
            b"GET /v1/x HTTP/0.9",
            b"GET /v1/x http/1.1",
            b"GET /v1/x HTTP/1.10",
            b"GET /v1/x HTTP/01.1",
            b"GET /v1/x HTTP/1,1",
            b"GET /v1/x HTTP/\xd9\xa1.1",
            b"GET /v1/x HTTP",
            b"GET /v1/x HTTPS/1.1",
            b"GET /v1/x\x00 HTTP/1.1",
            b"GET /v1/x\x7f HTTP/1.1",
            b"GE\tT /v1/x HTTP/1.1",
            b"G(T /v1/x HTTP/1.1",
            b"G\xc3\x89T /v1/x HTTP/1.1",
            b"GET /a b HTTP/1.1",
            b"GET /v1/x\rHTTP/1.1",
            b"PRI * HTTP/2.0",
            b"GET /v1/x HTTP/1.1\r",
            b"G:T /v1/x HTTP/1.1",
            b"HTTP/1.1 200 OK",
            b"/v1/x GET HTTP/1.1,",
        )
    ),
    (request(first=b"CONNECT u:443 HTTP/1.1"), "method_not_allowed"),
    (request(first=b"TRACE /v1/x HTTP/1.1"), "method_not_allowed"),
]


@pytest.mark.parametrize(("head", "code"), REFUSED, ids=lambda v: repr(v)[:70])
def test_what_two_parsers_could_read_in_two_ways_is_refused(head: bytes, code: str) -> None:
    """Nothing is repaired: the head is refused as a whole, and the text repeats nothing of it."""
    with pytest.raises(Refusal) as caught:
        parse_request(head)
    assert caught.value.code == code
    assert caught.value.message.isascii() and caught.value.message.isprintable()


@pytest.mark.parametrize("octet", list(range(256)))
def test_each_octet_within_a_value_and_a_name(octet: int) -> None:
    """In a value all but the control octets may stand, in a name only those of a token."""
    char = bytes([octet])
    value_ok = octet == 9 or (octet >= 0x20 and octet != 0x7F)
    name_ok = octet < 0x80 and (chr(octet).isalnum() or char in b"!#$%&'*+-.^_`|~")

    def fields(line: bytes) -> list[Field] | None:
        try:
            return parse_request(request(line)).fields[1:]
        except Refusal:
            return None

    assert fields(b"X: a" + char + b"b") == ([(b"x", b"X: a" + char + b"b", b"a" + char + b"b", 0)] if value_ok else None)
    if octet != ord(":"):
        name = b"Xa" + char + b"b"
        assert fields(name + b": 1") == ([(name.lower(), name + b": 1", b"1", 0)] if name_ok else None)


@pytest.mark.parametrize("octet", range(256))
def test_each_octet_within_a_target(octet: int) -> None:
    """No control octet and no blank; all else is the path table's business, and passes as it came."""
    char = bytes([octet])
    legal = octet > 0x20 and octet != 0x7F
    try:
        target = parse_request(request(first=b"GET /v1/" + char + b" HTTP/1.1")).target
    except Refusal:
        target = None
    assert target == (b"/v1/" + char if legal else None)


NAME = st.text("abcXYZ019-_!~", min_size=1, max_size=12).map(str.encode).filter(lambda n: n.lower() != b"host")
VALUE = st.binary(max_size=20).map(lambda b: bytes(c for c in b if c == 9 or (c >= 0x20 and c != 0x7F)))


@given(st.lists(st.tuples(NAME, VALUE), max_size=10))
def test_fields_keep_name_value_count_and_order(fields: list[tuple[bytes, bytes]]) -> None:
    """What stood there is what is read, but for the blanks around a value."""
    fields = [(n, v) for n, v in fields if n.lower() not in (b"content-length", b"transfer-encoding")]
    plain = [(n, v.strip(b" \t")) for n, v in fields]
    for blank in (b" ", b"", b"\t "):  # as lines not met before, and as remembered ones
        parsed = parse_request(request(*(n + b":" + blank + v for n, v in fields)))
        assert [(line, value) for _, line, value, _ in parsed.fields[1:]] == [(n + b": " + v, v) for n, v in plain]
        assert [key for key, _, _, _ in parsed.fields] == [b"host", *(n.lower() for n, _ in plain)]
        assert parsed.named == {b"host": b"gw"}


@given(st.binary(max_size=80))
def test_no_octets_at_all_upset_the_parsers(junk: bytes) -> None:
    """Whatever comes is read or refused, never an error of ours."""
    for head in (junk + b"\r\n\r\n", b"GET / HTTP/1.1\r\nHost: h\r\n" + junk + b"\r\n\r\n"):
        if head.find(b"\r\n\r\n") != len(head) - 4:
            continue
        with contextlib.suppress(Refusal):
            parse_request(head)
        with contextlib.suppress(Malformed):
            parse_response(b"HTTP/1.1 200 OK\r\n" + head, b"GET")


RESPONSES = [
    (response(), b"POST", Framing.CLOSE, 0),
    (response(b"Content-Length: 5"), b"POST", Framing.LENGTH, 5),
    (response(b"Content-Length: 0"), b"POST", Framing.NONE, 0),
    (response(b"Content-Length: 5", b"Content-Length: 5"), b"POST", Framing.LENGTH, 5),
    (response(TE), b"POST", Framing.CHUNKED, 0),
    (response(b"transfer-encoding:CHUNKED"), b"POST", Framing.CHUNKED, 0),
    (response(CL), b"HEAD", Framing.NONE, 0),
    (response(TE), b"HEAD", Framing.NONE, 0),
    (response(), b"HEAD", Framing.NONE, 0),
    (response(first=b"HTTP/1.1 204 No Content"), b"POST", Framing.NONE, 0),
    (response(CL, first=b"HTTP/1.1 204 No Content"), b"POST", Framing.NONE, 0),
    (response(TE, first=b"HTTP/1.1 204 No Content"), b"POST", Framing.NONE, 0),
    (response(CL, first=b"HTTP/1.1 304 Not Modified"), b"GET", Framing.NONE, 0),
    (response(first=b"HTTP/1.1 100 Continue"), b"POST", Framing.NONE, 0),
    (response(first=b"HTTP/1.0 200 OK"), b"POST", Framing.CLOSE, 0),
    (response(first=b"HTTP/1.1 200 "), b"POST", Framing.CLOSE, 0),
    (response(first=b"HTTP/1.1 200 \xb3\xc9\t!"), b"POST", Framing.CLOSE, 0),
    (response(b"X-T: caf\xe9", first=b"HTTP/1.1 599 Odd"), b"POST", Framing.CLOSE, 0),
]


@pytest.mark.parametrize(("head", "method", "framing", "length"), RESPONSES, ids=lambda v: repr(v)[:50])
def test_responses_that_are_read(head: bytes, method: bytes, framing: Framing, length: int) -> None:
    """By RFC 9112 section 6.3: the method and the status say whether there is a body at all."""
    parsed = parse_response(head, method)
    assert (parsed.framing, parsed.length) == (framing, length)
    assert parse_response(head, b"HEAD").framing is Framing.NONE  # whatever is remembered of these octets
    assert parse_response(head, method) == parsed


BAD_RESPONSES = [
    response(CL, TE),
    response(TE, CL),
    response(b"Content-Length: 5", b"Content-Length: 6"),
    *(response(b"Content-Length: " + v) for v in (b"", b"+5", b"-1", b"5, 5", b"0x5", DIGIT, b"5 ,5", b"1" * 20)),
    *(
        response(b"Transfer-Encoding: " + v)
        for v in (
            b"",
            b"gzip",
            b"gzip, chunked",
            b"chunked, chunked",
            b"xchunked",
            b"identity",
            b"chunked, gzip",
            b'"chunked"',
        )
    ),
    response(TE, TE),
    response(TE, first=b"HTTP/1.0 200 OK"),
    response(CL, TE, first=b"HTTP/1.1 204 No Content"),
    *(
        response(line)
        for line in (
            b"X-T: a\x00b",
            b"X-T: a\x01b",
            b"X-T: a\x7fb",
            b"X-T: a\rb",
            b"X-T: a\nb",
            b" folded",
            b"no colon",
            b"X : a",
            b": a",
            b"X-XSS-Protection=1;: x",
            b"Set-Cookie: a=\x01b",
            b"X\xe9: a",
        )
    ),
    *(
        response(first=line)
        for line in (
            b"HTTP/1.1 200 OK\rSet-Cookie: a=b",
            b"HTTP/1.1 200 O\x00K",
            b"HTTP/1.1 20 OK",
            b"HTTP/1.1 2000 OK",
            b"HTTP/1.1 abc OK",
            b"HTTP/1.1  200 OK",
            b"HTTP/1.1 099 OK",
            b"HTTP/2 200 OK",
            b"HTTP/1.1",
            b"",
            b"ICY 200 OK",
            b"HTTP/1.1 2\xd9\xa50 OK",
            b"http/1.1 200 OK",
            b"HTTP/1.1\t200\tOK",
            b"HTTP/1.1 +20 OK",
            b"HTTP/1.2 200 OK",
            b"HTTP/1.1 200 O\x7fK",
            b"<html>",
            b"HTTP/1.1 -20 OK",
            b"HTTP/1.1 2 0 OK",
        )
    ),
]


@pytest.mark.parametrize("head", BAD_RESPONSES, ids=lambda v: repr(v)[:70])
def test_responses_that_are_none(head: bytes) -> None:
    """A response that could be read in two ways is malformed, and the reason repeats nothing of it."""
    with pytest.raises(Malformed) as caught:
        parse_response(head, b"POST")
    assert str(caught.value).isascii() and str(caught.value).isprintable()


def test_a_trailer_section_is_read_as_strictly() -> None:
    """Trailers are fields like others."""
    assert parse_fields(b"X-A: 1\r\nX-B: 2\r\n\r\n") == [
        (b"x-a", b"X-A: 1", b"1", 0),
        (b"x-b", b"X-B: 2", b"2", 0),
    ]
    for bad in (
        b"X A: 1\r\n\r\n",
        b"X-A: 1\n\r\n\r\n",
        b" X: 1\r\n\r\n",
        b"X: \x00\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
    ):
        with pytest.raises(Malformed):
            parse_fields(bad)
