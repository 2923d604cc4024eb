"""Which fields pass, in which direction, and the heads that the gateway itself writes (RFC 9110 section 7.6).

End-to-end fields pass in both directions with the same names, values, count and order; what belongs to one connection
(a fixed set, and what the Connection field names) does not. Towards the backend the gateway adds Via and X-Request-Id,
and X-Forwarded-For, -Proto, -Host and Forwarded where `headers.forwarded` asks for it; towards the client X-Request-Id,
and Date where the backend sent none (RFC 9110 section 6.6.1). Framing is always this hop's own.
"""

from __future__ import annotations

import re
from email.utils import parsedate_to_datetime
from typing import NamedTuple

from gateway.core.head import CHUNKED, CLOSE, FORWARDING, NONE, NOT_DOWNSTREAM, NOT_UPSTREAM, Framing, RequestHead, ResponseHead

VIA = b"1.1 tokenpipe"

_CREDENTIALS = frozenset(b"authorization x-api-key api-key".split())
# Connection may not be used to strip these from a message: they are meant for all recipients (RFC 9110 section 7.6.1).
_END_TO_END = frozenset(
    b"host content-length transfer-encoding authorization x-api-key api-key cookie content-type content-encoding accept "
    b"accept-encoding date set-cookie location retry-after cache-control www-authenticate via x-request-id "
    b"x-forwarded-for x-forwarded-proto x-forwarded-host forwarded".split()
)
_media_types: dict[bytes, bytes] = {}  # by the field's value: they are few, and come with every message
_REMEMBERED_MOST, _REMEMBERED_LENGTH = 256, 160  # values, octets of one
# What may stand in a log line, a URL and a header field alike; vLLM makes it a part of its own ids.
_SANE_ID = re.compile(rb"[A-Za-z0-9._~:/+=@\-]{1,128}")
# W3C Trace Context, section 3.2: version, trace id, parent id, flags. A later version may have more behind them.
_TRACEPARENT = re.compile(rb"(?!ff)([0-9a-f]{2})-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-([0-9a-f]{2})(-.*)?")


class Peer(NamedTuple):
    """What the forwarding fields say of one client connection."""

    address: bytes  # an IP address, or "unknown" (a unix socket)
    scheme: bytes  # http or https


def request_id(head: RequestHead) -> bytes | None:
    """The client's own X-Request-Id, where it is sane and given once."""
    given = head.named.get(b"x-request-id")
    return given if given is not None and _SANE_ID.fullmatch(given) else None


def trace(head: RequestHead) -> tuple[str | None, bool]:
    """The trace that the request belongs to, by its traceparent field, and whether somebody keeps it (sampled)."""
    found = _TRACEPARENT.fullmatch(head.named[b"traceparent"])
    if found is None or (found[1] == b"00" and found[4] is not None):
        return None, False
    return found[2].decode(), bool(int(found[3], 16) & 1)


def options(named: dict[bytes, bytes], name: bytes) -> list[bytes]:
    """The members, in lower case, of a field that is a comma-separated list."""
    given = named.get(name)
    return [] if given is None else [option for part in given.split(b",") if (option := part.strip(b" \t").lower())]


def media_type(named: dict[bytes, bytes]) -> bytes:
    """The Content-Type without its parameters, in lower case; b"" without one."""
    given = named.get(b"content-type", b"")
    known = _media_types.get(given)
    if known is None:
        known = given.partition(b";")[0].strip(b" \t").lower()
        if len(given) <= _REMEMBERED_LENGTH:
            if len(_media_types) >= _REMEMBERED_MOST:
                _media_types.clear()
            _media_types[given] = known
    return known


def keeps_alive(head: RequestHead | ResponseHead) -> bool:
    """Whether its sender lets the connection be used again (RFC 9112 section 9.3)."""
    if b"connection" not in head.named:
        return head.minor > 0
    given = options(head.named, b"connection")
    return b"close" not in given and (head.minor > 0 or b"keep-alive" in given)


def asks_for_websocket(head: RequestHead) -> bool:
    return (
        b"upgrade" in head.named
        and head.method == b"GET"
        and head.minor > 0
        and head.framing is NONE
        and options(head.named, b"upgrade") == [b"websocket"]
        and b"upgrade" in options(head.named, b"connection")
    )


def _named_by_connection(named: dict[bytes, bytes]) -> frozenset[bytes]:
    """The fields that Connection declares to be of this connection only."""
    given = named.get(b"connection")
    if given is None or given in (b"keep-alive", b"close"):
        return frozenset()
    return frozenset(options(named, b"connection")) - _END_TO_END


def upstream_head(
    head: RequestHead,
    target: bytes,
    *,
    host: bytes,
    request_id: bytes,
    forwarding: bytes | None,
    length: int | None,
    credential: bytes | None = None,
    websocket: bool = False,
    without: frozenset[bytes] = frozenset(),
    fields: tuple[tuple[bytes, bytes], ...] = (),
    method: bytes = b"",
) -> bytes:
    """The head of the request to the backend.

    `forwarding`: lines that say who the client is; None where the operator wants none, and then the client's own pass.
    `length`: of the body; None for chunks. `credential`: the backend's own Authorization, in place of the client's.
    `without`: names of further fields that do not pass; `fields`: further ones that are put in; `method`: instead of the
    client's.
    """
    dropped = NOT_UPSTREAM if forwarding is None else NOT_UPSTREAM | FORWARDING
    lines = [b"%b %b HTTP/1.1\r\nHost: %b" % (method or head.method, target, host)]
    named = _named_by_connection(head.named)
    if without:
        named = named | without if named else without
    if named or credential is not None:
        if credential is not None:
            named = named | _CREDENTIALS
        lines += [line for key, line, _, known in head.fields if not known & dropped and key not in named]
    else:
        lines += [line for _, line, _, known in head.fields if not known & dropped]
    via = head.named.get(b"via")
    lines.append(b"Via: %b\r\nX-Request-Id: %b" % (VIA if not via else via + b", " + VIA, request_id))
    if forwarding is not None:
        lines.append(forwarding)
    if credential is not None:
        lines.append(b"Authorization: Bearer " + credential)
    if fields:
        lines += [b"%b: %b" % field for field in fields]
    if length is None:
        lines.append(b"Transfer-Encoding: chunked")
    elif length or b"content-length" in head.named or head.framing is CHUNKED:
        lines.append(b"Content-Length: %d" % length)
    if websocket:
        lines.append(b"Connection: Upgrade\r\nUpgrade: websocket")
    lines.append(b"\r\n")
    return b"\r\n".join(lines)


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
    receipt: bytes = b"",
) -> bytes:
    """The head of the response to the client. `framing` is that of the body on this hop; `connection` the Connection
    field's value, None for none; `receipt` whole lines, for clients that are to know how they were served."""
    begin = head.begin or _begin(head)
    if b"date" not in head.named:
        begin += b"Date: %b\r\n" % date
    if framing is CHUNKED:
        own = b"X-Request-Id: %b\r\nTransfer-Encoding: chunked\r\n" % request_id
    elif framing is not CLOSE and b"content-length" in head.named and head.status != 204 and head.status >= 200:
        length = next(line for key, line, _, _ in head.fields if key == b"content-length")
        own = b"%b\r\nX-Request-Id: %b\r\n" % (length, request_id)
    else:
        own = b"X-Request-Id: %b\r\n" % request_id
    if upgrade:
        own += b"Connection: Upgrade\r\nUpgrade: websocket\r\n"
    elif connection is not None:
        own += b"Connection: %b\r\n" % connection
    return b"%b%b%b\r\n" % (begin, own, receipt)


def receipt(backend: str, attempts: int, queued: float) -> bytes:
    """`headers.receipt`: lines that say which backend answered, at which attempt, and how long the request had waited for
    its turn, in seconds."""
    lines = f"X-Gateway-Backend: {backend}\r\nX-Gateway-Attempts: {attempts}\r\nX-Gateway-Queue-Seconds: {queued:.6f}\r\n"
    return lines.encode()


def _begin(head: ResponseHead) -> bytes:
    """The status line, and the fields that pass. Kept with the head: many streams of one engine get the same one."""
    lines = [b"HTTP/1.1 %d %b" % (head.status, head.reason)]
    named = _named_by_connection(head.named)
    lines += [line for key, line, _, known in head.fields if not known & NOT_DOWNSTREAM and key not in named]
    lines.append(b"")
    head.begin = b"\r\n".join(lines)
    return head.begin


def own_head(
    status: int,
    reason: bytes,
    *,
    request_id: bytes,
    date: bytes,
    length: int,
    code: bytes = b"",
    retry_after: int | None = None,
    allow: bytes = b"",
    connection: bytes | None,
    receipt: bytes = b"",
) -> bytes:
    """The head of an answer of the gateway's own, whose body, if it has one, is JSON. `code`: of a refusal; `receipt`: as
    `client_head`."""
    lines = [b"HTTP/1.1 %d %b" % (status, reason)]
    if length:
        lines.append(b"Content-Type: application/json")
    lines.append(b"Content-Length: %d\r\nDate: %b\r\nX-Request-Id: %b" % (length, date, request_id))
    if code:
        lines.append(b"X-Gateway-Error: " + code)
    if retry_after is not None:
        lines.append(b"Retry-After: %d" % retry_after)
    if allow:
        lines.append(b"Allow: " + allow)
    if connection is not None:
        lines.append(b"Connection: " + connection)
    lines.append(receipt + b"\r\n")
    return b"\r\n".join(lines)


def is_event_stream(response: ResponseHead) -> bool:
    """One that can be read: the stream of a success, and not coded."""
    return 200 <= response.status < 300 and media_type(response.named) == b"text/event-stream" and not is_coded(response)


def is_coded(response: ResponseHead) -> bool:
    named = response.named
    return b"content-encoding" in named and named[b"content-encoding"].lower() != b"identity"


def retry_after(response: ResponseHead, wall: float) -> float | None:
    """Seconds until a refused request may be made again, as the response says (RFC 9110 section 10.2.3); None: it does not.

    `wall`: the time of day, as seconds since 1970, to which a date is compared.
    """
    value = next((value for name, _, value, _ in response.fields if name == b"retry-after"), None)
    if value is None:
        return None
    if re.fullmatch(rb"[0-9]{1,9}", value):
        return float(value)
    try:
        return max(parsedate_to_datetime(value.decode("latin-1")).timestamp() - wall, 0.0)
    except (ValueError, OverflowError):
        return None
