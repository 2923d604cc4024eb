"""The heads of HTTP/1.1 messages, read strictly: RFC 9112 sections 3 to 6, RFC 9110 section 5.

Two recipients that read a head in two ways are how requests are smuggled, so nothing here is repaired: a head is what the
grammar says, or it is refused as a whole, before any other parser sees it.

A head is checked with operations that run in C over the whole of it, then field by field: once all control octets are
known to be the line ends, a field can only be wrong in its name. (A regular expression over the whole head took three
times as long.) Size limits are those of the whole head: no line may be longer than the head it stands in.
"""

from __future__ import annotations

import enum
import re
from typing import NamedTuple

from gateway.errors import Refusal


# (the name in lower case, the name as it was sent, the value without surrounding blanks). Octets 0x80 to 0xFF are legal
# in a value (obs-text) and pass. A bare tuple: there are some ten of them in each head.
Field = tuple[bytes, bytes, bytes]


class Framing(enum.Enum):
    """How a body's end is known."""

    NONE = "none"
    LENGTH = "length"
    CHUNKED = "chunked"
    CLOSE = "close"


class RequestHead(NamedTuple):
    method: bytes
    target: bytes
    minor: int  # of the version HTTP/1.minor
    fields: list[Field]
    framing: Framing
    length: int  # of the body; 0 unless framed by LENGTH


class ResponseHead(NamedTuple):
    status: int
    reason: bytes
    minor: int
    fields: list[Field]
    framing: Framing
    length: int


class Malformed(ValueError):
    """Octets that are no HTTP message. The text says which rule they break, and repeats nothing of them."""


TCHAR = b"!#$%&'*+-.^_`|~0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_CONTROLS = bytes(c for c in range(0x20) if c != 9) + b"\x7f"
_TOKEN = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_TARGET = re.compile(rb"[!-~\x80-\xff]+")
_DIGITS = re.compile(rb"[0-9]{1,19}")
# RFC 3986 section 3.2.2, a port behind it; RFC 9110 section 4.2.4 forbids user information
_HOST = re.compile(rb"(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9\-._~%!$&'()*+;=]*)(?::[0-9]{0,5})?")
_VERSIONS = {b"HTTP/1.1": 1, b"HTTP/1.0": 0}

# Names met often, so that their grammar and their lower case need no second look. Filled once, never by a peer.
_COMMON = (
    b"Accept Accept-Encoding Accept-Language Authorization Cache-Control Connection Content-Encoding Content-Length "
    b"Content-Type Cookie Date ETag Expect Forwarded Host Keep-Alive Location Origin Referer Retry-After Server Set-Cookie "
    b"TE Trailer Transfer-Encoding Upgrade User-Agent Vary Via X-Forwarded-For X-Forwarded-Host X-Forwarded-Proto "
    b"X-Request-Id X-Api-Key Anthropic-Version X-Stainless-Lang X-Stainless-Package-Version X-Stainless-Os "
    b"X-Stainless-Arch X-Stainless-Runtime X-Stainless-Runtime-Version X-Stainless-Async X-Stainless-Retry-Count "
    b"X-Stainless-Read-Timeout"
).split()
_KEYS = {name: name.lower() for name in _COMMON} | {name.lower(): name.lower() for name in _COMMON}


def _lines(head: bytes) -> list[bytes]:
    """The lines of `head`, which ends in its empty line. Raises Malformed where a control octet is no line end."""
    lines = head.split(b"\r\n")
    if len(head) - len(head.translate(None, _CONTROLS)) != 2 * (len(lines) - 1):
        raise Malformed("the head holds a control octet, or a line end that is not CRLF")
    if lines[-1] or lines[-2]:
        raise Malformed("the head does not end in an empty line")
    return lines


def _fields(lines: list[bytes]) -> list[Field]:
    """The fields of all lines but the first and the last two. Raises Malformed."""
    fields = []
    for line in lines[1:-2]:
        name, colon, value = line.partition(b":")
        key = _KEYS.get(name)
        if key is None:
            if not colon or not name or name.translate(None, TCHAR):
                raise Malformed(_what_is_wrong(name, colon))
            key = name.lower()
        elif not colon:
            raise Malformed("a field line has no colon")
        fields.append((key, name, value.strip(b" \t")))
    return fields


def parse_fields(block: bytes) -> list[Field]:
    """A trailer section's fields; `block` ends in its empty line. Raises Malformed."""
    return _fields(_lines(b"\r\n" + block))


def _what_is_wrong(name: bytes, colon: bytes) -> str:
    if name[:1] in (b" ", b"\t"):
        return "a field is continued on a second line, which RFC 9112 section 5.2 forbids"
    if not colon:
        return "a field line has no colon"
    return "a field's name is no token, or something stands between it and its colon"


def parse_request(head: bytes) -> RequestHead:
    """`head` ends in its empty line. Raises Refusal: 400, 405 or 501."""
    try:
        lines = _lines(head)
        method, target, minor = _request_line(lines[0])
        fields = _fields(lines)
    except Malformed as error:
        raise Refusal("bad_request", str(error)) from None
    framing, length = request_framing(fields, minor)
    if method == b"CONNECT" or method == b"TRACE":
        raise Refusal("method_not_allowed", f"the method {method.decode()} is not served here")
    return RequestHead(method, target, minor, fields, framing, length)


def _request_line(line: bytes) -> tuple[bytes, bytes, int]:
    parts = line.split(b" ")
    if len(parts) != 3 or not _TOKEN.fullmatch(parts[0]) or not _TARGET.fullmatch(parts[1]):
        raise Malformed("the request line is not: method, one blank, target, one blank, version")
    minor = _VERSIONS.get(parts[2])
    if minor is None:
        raise Malformed("the version is neither HTTP/1.1 nor HTTP/1.0")
    return parts[0], parts[1], minor


_FRAMING = frozenset((b"host", b"content-length", b"transfer-encoding"))


def _framing_values(fields: list[Field]) -> tuple[list[bytes], list[bytes], list[bytes]]:
    """The values of Host, Content-Length and Transfer-Encoding."""
    found: dict[bytes, list[bytes]] = {b"host": [], b"content-length": [], b"transfer-encoding": []}
    for key, _, value in fields:
        if key in _FRAMING:
            found[key].append(value)
    return found[b"host"], found[b"content-length"], found[b"transfer-encoding"]


def request_framing(fields: list[Field], minor: int) -> tuple[Framing, int]:
    """How the body's end is known, by RFC 9112 section 6.3; and section 3.2 for Host. Raises Refusal."""
    hosts, lengths, codings = _framing_values(fields)
    if len(hosts) > 1:
        raise Refusal("bad_request", "there is more than one Host field")
    if not hosts and minor:
        raise Refusal("bad_request", "an HTTP/1.1 request needs a Host field")
    if hosts and not _HOST.fullmatch(hosts[0]):
        raise Refusal("bad_request", "the Host field is no host and port")
    if codings:
        if lengths:
            raise Refusal("bad_request", "Content-Length and Transfer-Encoding exclude each other")
        if not minor:
            raise Refusal("bad_request", "an HTTP/1.0 request cannot have a Transfer-Encoding")
        _only_chunked(codings)
        return Framing.CHUNKED, 0
    if len(lengths) > 1:
        raise Refusal("bad_request", "there is more than one Content-Length field")
    if lengths and not _DIGITS.fullmatch(lengths[0]):
        raise Refusal("bad_request", "Content-Length is no decimal number")
    length = int(lengths[0]) if lengths else 0
    return (Framing.LENGTH, length) if length else (Framing.NONE, 0)


def _codings(lines: list[bytes]) -> list[bytes]:
    return [coding.strip(b" \t").lower() for line in lines for coding in line.split(b",")]


def _only_chunked(lines: list[bytes]) -> None:
    codings = _codings(lines)
    if codings == [b"chunked"]:
        return
    if not all(_TOKEN.fullmatch(coding) for coding in codings):
        raise Refusal("bad_request", "Transfer-Encoding is no list of codings")
    if codings.count(b"chunked") > 1 or (b"chunked" in codings and codings[-1] != b"chunked"):
        raise Refusal("bad_request", "chunked must be the last transfer coding, and only once")
    raise Refusal("not_implemented", "the only transfer coding served here is chunked")


def parse_response(head: bytes, method: bytes) -> ResponseHead:
    """`head` ends in its empty line, `method` is that of the request it answers. Raises Malformed."""
    lines = _lines(head)
    version, _, rest = lines[0].partition(b" ")
    minor = _VERSIONS.get(version)
    status, blank, reason = rest.partition(b" ")
    if minor is None or len(status) != 3 or not status.isdigit() or status[0] == 48:
        raise Malformed("its status line is none of HTTP/1.1")
    fields = _fields(lines)
    framing, length = response_framing(fields, minor, int(status), method)
    return ResponseHead(int(status), reason, minor, fields, framing, length)


def response_framing(fields: list[Field], minor: int, status: int, method: bytes) -> tuple[Framing, int]:
    """How the body's end is known, by RFC 9112 section 6.3. Raises Malformed where two recipients could differ."""
    _, lengths, codings = _framing_values(fields)
    if codings and lengths:
        raise Malformed("it has both Content-Length and Transfer-Encoding")
    if len(set(lengths)) > 1:
        raise Malformed("it has several Content-Length fields that differ")
    length = lengths[0] if lengths else None
    if length is not None and not _DIGITS.fullmatch(length):
        raise Malformed("its Content-Length is no decimal number")
    if method == b"HEAD" or status in (204, 304) or status < 200:
        return Framing.NONE, 0
    if codings:
        if not minor or _codings(codings) != [b"chunked"]:
            raise Malformed("its Transfer-Encoding is not chunked alone, or it is HTTP/1.0")
        return Framing.CHUNKED, 0
    if length is not None:
        return (Framing.LENGTH, int(length)) if int(length) else (Framing.NONE, 0)
    return Framing.CLOSE, 0
