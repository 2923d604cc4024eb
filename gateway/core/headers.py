"""Which fields pass, in which direction, and the heads that the gateway itself writes (RFC 9110 section 7.6).

End-to-end fields pass in both directions with the same names, values, count and order; what belongs to one connection
(a fixed set, and what the Connection field names) does not. Towards the backend the gateway adds Via and X-Request-Id,
and X-Forwarded-For, -Proto, -Host and Forwarded where `headers.forwarded` asks for it; towards the client X-Request-Id,
and Date where the backend sent none (RFC 9110 section 6.6.1). Framing is always this hop's own.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from gateway.core.head import Field, Framing, RequestHead, ResponseHead

VIA = b"1.1 tokenpipe"

# Fields of one connection only, whatever Connection says; and Expect, which the gateway answers itself.
_HOP_BY_HOP = frozenset(
    b"connection keep-alive proxy-connection proxy-authorization te trailer transfer-encoding upgrade http2-settings".split()
)
# Replaced, not passed: what a client claims here would be taken for the gateway's own word.
_FORWARDING = frozenset(b"x-forwarded-for x-forwarded-proto x-forwarded-host forwarded".split())
_OF_THE_GATEWAY = frozenset(b"host content-length expect via x-request-id".split())
_NOT_UPSTREAM = _HOP_BY_HOP | _OF_THE_GATEWAY
_NOT_UPSTREAM_FORWARDED = _NOT_UPSTREAM | _FORWARDING
_NOT_DOWNSTREAM = (_HOP_BY_HOP - {b"proxy-authorization"}) | {b"content-length", b"x-request-id"}
# Connection may not be used to strip these from a message: RFC 9110 section 7.6.1 forbids naming fields for all recipients.
_END_TO_END = frozenset(
    b"host content-length transfer-encoding authorization x-api-key api-key cookie content-type content-encoding accept "
    b"accept-encoding date set-cookie location retry-after cache-control www-authenticate via x-request-id".split()
) | _FORWARDING

# What may stand in a log line, a URL and a header field alike; vLLM makes it a part of its own ids.
_SANE_ID = re.compile(rb"[A-Za-z0-9._~:/+=@\-]{1,128}")
_WEBSOCKET = b"websocket"


class Peer(NamedTuple):
    """What the forwarding fields say of one client connection."""

    address: bytes  # an IP address, or "unknown" (a unix socket)
    scheme: bytes  # http or https


def request_id(fields: list[Field]) -> bytes | None:
    """The client's own X-Request-Id, where it is sane and given once."""
    given = [value for key, _, value in fields if key == b"x-request-id"]
    return given[0] if len(given) == 1 and _SANE_ID.fullmatch(given[0]) else None


def tokens(fields: list[Field], name: bytes) -> list[bytes]:
    """The members, in lower case, of a field that is a comma-separated list."""
    return [t for key, _, value in fields if key == name for m in value.split(b",") if (t := m.strip(b" \t").lower())]


def value(fields: list[Field], name: bytes) -> bytes | None:
    """The value of the first field of that name (in lower case)."""
    for key, _, found in fields:
        if key == name:
            return found
    return None


def keeps_alive(head: RequestHead) -> bool:
    """Whether the client lets its connection be used again (RFC 9112 section 9.3)."""
    options = tokens(head.fields, b"connection")
    return b"close" not in options and (head.minor > 0 or b"keep-alive" in options)


def backend_keeps_alive(head: ResponseHead) -> bool:
    """Whether the backend lets its connection be used again."""
    options = tokens(head.fields, b"connection")
    return b"close" not in options and (head.minor > 0 or b"keep-alive" in options)


def asks_for_websocket(head: RequestHead) -> bool:
    return (
        head.method == b"GET"
        and head.minor > 0
        and head.framing is Framing.NONE
        and b"upgrade" in tokens(head.fields, b"connection")
        and tokens(head.fields, b"upgrade") == [_WEBSOCKET]
    )


def _named_by_connection(fields: list[Field]) -> frozenset[bytes]:
    named = tokens(fields, b"connection")
    if not named or named == [b"keep-alive"] or named == [b"close"]:
        return frozenset()
    return frozenset(named) - _END_TO_END


def upstream_head(
    head: RequestHead,
    target: bytes,
    *,
    host: bytes,
    request_id: bytes,
    peer: Peer | None,
    length: int | None,
    client_host: bytes | None = None,
    credential: bytes | None = None,
    websocket: bool = False,
) -> bytes:
    """The head of the request to the backend. `client_host`: the authority of an absolute-form target, else None.

    `peer`: None where the operator wants no forwarding fields, and then the client's own pass. `length`: of the body;
    None for chunks. `credential`: the backend's own Authorization, in place of the client's.
    """
    dropped = _NOT_UPSTREAM if peer is None else _NOT_UPSTREAM_FORWARDED
    if credential is not None:
        dropped = dropped | {b"authorization", b"x-api-key", b"api-key"}
    named = _named_by_connection(head.fields)
    if named:
        dropped = dropped | named
    lines = [b"%b %b HTTP/1.1" % (head.method, target), b"Host: " + host]
    via, asked_host, had_length = b"", b"", False
    for key, name, val in head.fields:
        if key not in dropped:
            lines.append(name + b": " + val)
        elif key == b"via":
            via = via + val + b", " if val else via
        elif key == b"host":
            asked_host = val
        elif key == b"content-length":
            had_length = True
    lines.append(b"Via: " + via + VIA)
    lines.append(b"X-Request-Id: " + request_id)
    if peer is not None:
        lines.append(forwarding(peer, asked_host if client_host is None else client_host))
    if credential is not None:
        lines.append(b"Authorization: Bearer " + credential)
    if length is None:
        lines.append(b"Transfer-Encoding: chunked")
    elif length or had_length or head.framing is Framing.CHUNKED:
        lines.append(b"Content-Length: %d" % length)
    if websocket:
        lines.append(b"Connection: Upgrade\r\nUpgrade: websocket")
    return b"\r\n".join(lines) + b"\r\n\r\n"


def forwarding(peer: Peer, host: bytes) -> bytes:
    """The forwarding fields, as lines (RFC 7239 sections 4 to 6: an IPv6 address is bracketed and quoted)."""
    address, scheme = peer
    node = b'"[%b]"' % address if b":" in address else address
    lines = b"X-Forwarded-For: %b\r\nX-Forwarded-Proto: %b" % (address, scheme)
    if host:
        return lines + b'\r\nX-Forwarded-Host: %b\r\nForwarded: for=%b;proto=%b;host="%b"' % (host, node, scheme, host)
    return lines + b"\r\nForwarded: for=%b;proto=%b" % (node, scheme)


def client_head(
    head: ResponseHead,
    *,
    request_id: bytes,
    date: bytes,
    framing: Framing,
    connection: bytes | None,
    upgrade: bool = False,
) -> bytes:
    """The head of the response to the client. `framing` is that of the body on this hop; `connection` the Connection
    field's value, None for none."""
    named = _named_by_connection(head.fields)
    dropped = _NOT_DOWNSTREAM | named if named else _NOT_DOWNSTREAM
    lines = [b"HTTP/1.1 %d %b" % (head.status, head.reason)]
    dated, length = False, None
    for key, name, val in head.fields:
        if key not in dropped:
            lines.append(name + b": " + val)
            if key == b"date":
                dated = True
        elif key == b"content-length" and length is None:
            length = name + b": " + val
    if length is not None and framing is not Framing.CHUNKED and head.status != 204 and head.status >= 200:
        lines.append(length)
    if not dated:
        lines.append(b"Date: " + date)
    lines.append(b"X-Request-Id: " + request_id)
    if framing is Framing.CHUNKED:
        lines.append(b"Transfer-Encoding: chunked")
    if upgrade:
        lines.append(b"Connection: Upgrade\r\nUpgrade: websocket")
    elif connection is not None:
        lines.append(b"Connection: " + connection)
    return b"\r\n".join(lines) + b"\r\n\r\n"


def refusal_head(
    status: int, reason: bytes, *, code: bytes, request_id: bytes, date: bytes, length: int, retry_after: int | None, allow: bytes = b"",
    connection: bytes | None,
) -> bytes:
    """The head of an answer of the gateway's own, whose body is JSON."""
    lines = [
        b"HTTP/1.1 %d %b" % (status, reason),
        b"Content-Type: application/json",
        b"Content-Length: %d" % length,
        b"Date: " + date,
        b"X-Request-Id: " + request_id,
        b"X-Gateway-Error: " + code,
    ]
    if retry_after is not None:
        lines.append(b"Retry-After: %d" % retry_after)
    if allow:
        lines.append(b"Allow: " + allow)
    if connection is not None:
        lines.append(b"Connection: " + connection)
    return b"\r\n".join(lines) + b"\r\n\r\n"
