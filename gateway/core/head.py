"""The heads of HTTP/1.1 messages, read strictly: RFC 9112 sections 3 to 6, RFC 9110 section 5.

Two recipients that read a head in two ways are how requests are smuggled, so nothing here is repaired: a head is what the
grammar says, or it is refused as a whole, before anything is made of it.

Peers send the same lines again and again, so a line that has been read is remembered with all that is known of it: to meet
it once more costs one look-up. What is remembered is bounded, holds no credentials, and only ever holds lines that have
passed the whole check. Size limits are those of the whole head: no line may be longer than the head it stands in.
"""

from __future__ import annotations

import dataclasses
import enum
import re
from typing import NamedTuple

from gateway.errors import Refusal

# What is known of a field by its name alone.
NOT_UPSTREAM = 1  # of one connection only, or written by the gateway itself
FORWARDING = 2  # says who the client is: the gateway's own word, unless the operator wants none
NOT_DOWNSTREAM = 4
NAMED = 8  # the gateway looks at its value

# (the name in lower case, the line as it is passed on, the value without surrounding blanks, what is known of it). A bare
# tuple: there are some ten of them in each head. Octets 0x80 to 0xFF are legal in a value (obs-text), and pass.
Field = tuple[bytes, bytes, bytes, int]


class Framing(enum.Enum):
    """How a body's end is known."""

    NONE = "none"
    LENGTH = "length"
    CHUNKED = "chunked"
    CLOSE = "close"


# To look an enumeration's member up costs a tenth of a microsecond in Python 3.11; some are asked for ten times a request.
NONE, LENGTH, CHUNKED, CLOSE = Framing


class RequestHead(NamedTuple):
    method: bytes
    target: bytes
    minor: int  # of the version HTTP/1.minor
    fields: list[Field]
    named: dict[bytes, bytes]  # the values of NAMED fields; of several lines one list (RFC 9110 section 5.3)
    framing: Framing
    length: int  # of the body; 0 unless framed by LENGTH


@dataclasses.dataclass(slots=True)
class ResponseHead:
    status: int
    reason: bytes
    minor: int
    fields: list[Field]
    named: dict[bytes, bytes]
    framing: Framing
    length: int
    begin: bytes = dataclasses.field(default=b"", compare=False)  # what every client gets of it (`headers.client_head`)


class Malformed(ValueError):
    """Octets that are no HTTP message. The text says which rule they break, and repeats nothing of them."""


TCHAR = b"!#$%&'*+-.^_`|~0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_CONTROLS = bytes(c for c in range(0x20) if c != 9) + b"\x7f"
_TOKEN = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_TARGET = re.compile(rb"[!-~\x80-\xff]+")
_DIGITS = re.compile(rb"[0-9]{1,19}")
# RFC 3986 section 3.2.2, a port behind it; RFC 9110 section 4.2.4 forbids user information
HOST = re.compile(rb"(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9\-._~%!$&'()*+;=]*)(?::[0-9]{0,5})?")
_VERSIONS = {b"HTTP/1.1": 1, b"HTTP/1.0": 0}

_NAMED = (
    b"host content-length transfer-encoding connection upgrade expect content-type content-encoding x-request-id via date "
    b"traceparent"
)
# Hop-by-hop fields (RFC 9110 section 7.6.1); Expect, which the gateway answers; and what it writes itself.
_NOT_UPSTREAM = (
    b"connection keep-alive proxy-connection proxy-authorization te trailer transfer-encoding upgrade http2-settings "
    b"host content-length expect via x-request-id"
)
_FORWARDING = b"x-forwarded-for x-forwarded-proto x-forwarded-host forwarded"
_NOT_DOWNSTREAM = (
    b"connection keep-alive proxy-connection te trailer transfer-encoding upgrade http2-settings content-length x-request-id"
)
_KNOWN = {
    key: sum(
        mark
        for mark, names in (
            (NOT_UPSTREAM, _NOT_UPSTREAM),
            (FORWARDING, _FORWARDING),
            (NOT_DOWNSTREAM, _NOT_DOWNSTREAM),
            (NAMED, _NAMED),
        )
        if key in names.split()
    )
    for key in b" ".join((_NOT_UPSTREAM, _FORWARDING, _NOT_DOWNSTREAM, _NAMED)).split()
}
_SECRET = frozenset(b"authorization proxy-authorization cookie set-cookie x-api-key api-key".split())

_REMEMBERED_MOST = 4096  # lines; then all are forgotten, so that new ones come in
_REMEMBERED_LENGTH = 160  # octets of a line
_fields: dict[bytes, Field] = {}
_starts: dict[bytes, tuple[bytes, bytes, int]] = {}
# Whole heads of responses: those of one engine's streams in one second are the same to the octet.
_REMEMBERED_HEADS = 64
_REMEMBERED_HEAD = 512
_responses: dict[bytes, ResponseHead] = {}


def _field(line: bytes) -> Field:
    """A field that was not met before. Raises Malformed."""
    name, colon, rest = line.partition(b":")
    if line.translate(None, _CONTROLS) != line:
        raise Malformed("the head holds a control octet, or a line end that is not CRLF")
    if not colon or not name or name.translate(None, TCHAR):
        raise Malformed(_what_is_wrong(name, colon))
    key, value = name.lower(), rest.strip(b" \t")
    field = (key, name + b": " + value, value, _KNOWN.get(key, 0))
    if len(line) <= _REMEMBERED_LENGTH and key not in _SECRET:
        if len(_fields) >= _REMEMBERED_MOST:
            _fields.clear()
        _fields[line] = field
    return field


def _what_is_wrong(name: bytes, colon: bytes) -> str:
    if name[:1] in (b" ", b"\t"):
        return "a field is continued on a second line, which RFC 9112 section 5.2 forbids"
    if not colon:
        return "a field line has no colon"
    return "a field's name is no token, or something stands between it and its colon"


def _read_fields(lines: list[bytes]) -> tuple[list[Field], dict[bytes, bytes]]:
    """The fields of all lines but the first, up to the empty one that ends the head. Raises Malformed."""
    fields: list[Field] = []
    named: dict[bytes, bytes] = {}
    for line in lines[1:-2]:
        field = _fields.get(line)
        if field is None:
            field = _field(line)
        fields.append(field)
        if field[3] & NAMED:
            key = field[0]
            named[key] = named[key] + b", " + field[2] if key in named else field[2]
    return fields, named


def _lines(head: bytes) -> list[bytes]:
    lines = head.split(b"\r\n")
    if len(lines) < 3 or lines[-1] or lines[-2]:
        raise Malformed("the head does not end in an empty line")
    return lines


def parse_fields(block: bytes) -> list[Field]:
    """A trailer section's fields; `block` ends in its empty line. Raises Malformed."""
    return _read_fields(_lines(b"\r\n" + block))[0]


def parse_request(head: bytes) -> RequestHead:
    """`head` ends in its empty line. Raises Refusal: 400, 405 or 501."""
    try:
        lines = _lines(head)
        start = _starts.get(lines[0])
        method, target, minor = start if start is not None else _request_line(lines[0])
        fields, named = _read_fields(lines)
    except Malformed as error:
        raise Refusal("bad_request", str(error)) from None
    framing, length = request_framing(named, minor)
    if method == b"CONNECT" or method == b"TRACE":
        raise Refusal("method_not_allowed", f"the method {method.decode()} is not served here")
    return RequestHead(method, target, minor, fields, named, framing, length)


def _request_line(line: bytes) -> tuple[bytes, bytes, int]:
    parts = line.split(b" ")
    if len(parts) != 3 or not _TOKEN.fullmatch(parts[0]) or not _TARGET.fullmatch(parts[1]):
        raise Malformed("the request line is not: method, one blank, target, one blank, version")
    minor = _VERSIONS.get(parts[2])
    if minor is None:
        raise Malformed("the version is neither HTTP/1.1 nor HTTP/1.0")
    start = parts[0], parts[1], minor
    if len(line) <= _REMEMBERED_LENGTH and b"?" not in line:
        if len(_starts) >= _REMEMBERED_MOST:
            _starts.clear()
        _starts[line] = start
    return start


def request_framing(named: dict[bytes, bytes], minor: int) -> tuple[Framing, int]:
    """How the body's end is known, by RFC 9112 section 6.3; and section 3.2 for Host. Raises Refusal."""
    host = named.get(b"host")
    if host is None:
        if minor:
            raise Refusal("bad_request", "an HTTP/1.1 request needs a Host field")
    elif not HOST.fullmatch(host):
        raise Refusal("bad_request", "the Host field is no host and port, or there are several")
    length, coding = named.get(b"content-length"), named.get(b"transfer-encoding")
    if coding is not None:
        if length is not None:
            raise Refusal("bad_request", "Content-Length and Transfer-Encoding exclude each other")
        if not minor:
            raise Refusal("bad_request", "an HTTP/1.0 request cannot have a Transfer-Encoding")
        _only_chunked(coding)
        return CHUNKED, 0
    if length is None:
        return NONE, 0
    if not _DIGITS.fullmatch(length):
        raise Refusal("bad_request", "Content-Length is no decimal number, or there are several")
    octets = int(length)
    return (LENGTH, octets) if octets else (NONE, 0)


def _codings(value: bytes) -> list[bytes]:
    return [coding.strip(b" \t").lower() for coding in value.split(b",")]


def _only_chunked(value: bytes) -> None:
    codings = _codings(value)
    if codings == [b"chunked"]:
        return
    if not all(_TOKEN.fullmatch(coding) for coding in codings):
        raise Refusal("bad_request", "Transfer-Encoding is no list of codings")
    if codings.count(b"chunked") > 1 or (b"chunked" in codings and codings[-1] != b"chunked"):
        raise Refusal("bad_request", "chunked must be the last transfer coding, and only once")
    raise Refusal("not_implemented", "the only transfer coding served here is chunked")


def parse_response(head: bytes, method: bytes) -> ResponseHead:
    """`head` ends in its empty line, `method` is that of the request it answers. Raises Malformed."""
    known = _responses.get(head) if method != b"HEAD" else None
    if known is not None:
        return known
    lines = _lines(head)
    version, _, rest = lines[0].partition(b" ")
    minor = _VERSIONS.get(version)
    status, _, reason = rest.partition(b" ")
    if minor is None or len(status) != 3 or not status.isdigit() or status[0] == 48:
        raise Malformed("its status line is none of HTTP/1.1")
    if reason and reason.translate(None, _CONTROLS) != reason:
        raise Malformed("its status line holds a control octet")
    fields, named = _read_fields(lines)
    code = int(status)
    framing, length = response_framing(fields, named, minor, code, method)
    parsed = ResponseHead(code, reason, minor, fields, named, framing, length)
    if method != b"HEAD" and len(head) <= _REMEMBERED_HEAD and b"set-cookie" not in {field[0] for field in fields}:
        if len(_responses) >= _REMEMBERED_HEADS:
            _responses.clear()
        _responses[head] = parsed
    return parsed


def response_framing(
    fields: list[Field], named: dict[bytes, bytes], minor: int, status: int, method: bytes
) -> tuple[Framing, int]:
    """How the body's end is known, by RFC 9112 section 6.3. Raises Malformed where two recipients could differ."""
    given, coding = named.get(b"content-length"), named.get(b"transfer-encoding")
    if coding is not None and given is not None:
        raise Malformed("it has both Content-Length and Transfer-Encoding")
    length = 0
    if given is not None:
        # of several lines the same number is one number; within one line a list is none
        lengths = {value for key, _, value, _ in fields if key == b"content-length"} if b"," in given else {given}
        if len(lengths) != 1 or not _DIGITS.fullmatch(first := lengths.pop()):
            raise Malformed("its Content-Length is no decimal number, or there are several")
        length = int(first)
    if method == b"HEAD" or status in (204, 304) or status < 200:
        return NONE, 0
    if coding is not None:
        if not minor or _codings(coding) != [b"chunked"]:
            raise Malformed("its Transfer-Encoding is not chunked alone, or it is HTTP/1.0")
        return CHUNKED, 0
    if given is not None:
        return (LENGTH, length) if length else (NONE, 0)
    return CLOSE, 0
