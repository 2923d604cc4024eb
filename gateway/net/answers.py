"""What the gateway itself says to a client: refusals, pages of its own, and the cut that ends a response which will not
be whole."""

from __future__ import annotations

import http
import time

from gateway.core import headers
from gateway.core.head import Framing, RequestHead
from gateway.core.outcome import Outcome
from gateway.errors import Ended, EngineRefused, Refusal
from gateway.net.call import Call, Local
from gateway.net.clock import http_date
from gateway.net.relay import Relay

METHODS = frozenset((b"GET", b"HEAD", b"POST", b"PUT", b"PATCH", b"DELETE", b"OPTIONS"))


def refuse(call: Call, refusal: Refusal, draining: bool) -> bool:
    """Answer with the refusal's status, in the caller's dialect. Returns whether the connection can go on."""
    exchange, client, head = call.exchange, call.client, call.request.head
    ruling = refusal.ruling
    if exchange.committed:  # by a fault of ours: nothing but the end is left
        exchange.end(Outcome.INTERNAL, time.monotonic(), refusal.code)
        client.cut(reset=True)
        return False
    exchange.status = ruling.status
    exchange.end(refusal.outcome or ruling.outcome, time.monotonic(), refusal.code)
    body = call.dialect.error_body(refusal.code, refusal.message, ruling.type, refusal.param)
    # a request refused for its form may hide another one, and the client of too large a one is told to stop sending
    keep_alive = head is not None and ruling.status not in (400, 413) and can_go_on(call, head, draining)
    octets = headers.own_head(
        ruling.status,
        http.HTTPStatus(ruling.status).phrase.encode(),
        request_id=call.request_id,
        date=http_date(),
        length=len(body),
        code=refusal.code.encode(),
        retry_after=refusal.retry_after,
        allow=b", ".join(sorted(METHODS)) if ruling.status == 405 else b"",
        connection=connection_field(head, keep_alive),
    )
    call.write(octets if head is not None and head.method == b"HEAD" else octets + body)
    return keep_alive


def engine_refused(call: Call, refused: EngineRefused, draining: bool) -> bool:
    """Answer with the error that the backend's stream began with, in its own words."""
    exchange, head = call.exchange, call.request.head
    assert head is not None
    keep_alive = can_go_on(call, head, draining)
    exchange.status, exchange.bytes_out = refused.status, len(refused.body)
    octets = headers.own_head(
        refused.status,
        http.HTTPStatus(refused.status).phrase.encode(),
        request_id=call.request_id,
        date=http_date(),
        length=len(refused.body),
        connection=connection_field(head, keep_alive),
        receipt=receipt(call),
    )
    call.write(octets + refused.body)
    exchange.end(Outcome.UPSTREAM_STATUS, time.monotonic())
    return keep_alive


def answer(call: Call, head: RequestHead, page: Local, draining: bool) -> bool:
    """Answer with a page of the gateway's own."""
    exchange = call.exchange
    keep_alive = can_go_on(call, head, draining)
    exchange.status = page.status
    octets = headers.own_head(
        page.status,
        b"OK",
        request_id=call.request_id,
        date=http_date(),
        length=len(page.body),
        connection=connection_field(head, keep_alive),
    )
    call.write(octets + page.body)
    exchange.bytes_out = len(page.body)
    exchange.end(Outcome.COMPLETE, time.monotonic())
    return keep_alive


def can_go_on(call: Call, head: RequestHead, draining: bool) -> bool:
    """Whether another request may follow on the client's connection."""
    reader = call.client.reader
    crowded = call.client.server.crowded
    return not draining and not crowded and not reader.in_body and headers.keeps_alive(head)


def cut(call: Call, ended: Ended) -> None:
    """The response had begun and will not be whole: end the client's connection so that it can tell."""
    exchange, client, relay = call.exchange, call.client, call.relay
    exchange.end(ended.outcome, time.monotonic(), ended.code)
    if client.transport is None:
        return
    stalled = ended.outcome is Outcome.CLIENT_STALLED
    if isinstance(relay, Relay):
        if call.policy.error_events and relay.meter is not None and relay.meter.streamed and not relay.paused and not stalled:
            relay.insert(call.dialect.error_event(ended.code or ended.outcome.value, _told(ended)))
        client.cut(reset=stalled or relay.framing is Framing.CLOSE)
    else:
        client.cut(reset=stalled)


def receipt(call: Call) -> bytes:
    """Lines for the head of a backend's answer: how the client was served."""
    if not call.policy.receipt:
        return call.receipt
    exchange = call.exchange
    assert exchange.backend is not None and exchange.selected is not None
    queued = 0.0 if exchange.queued is None else exchange.selected - exchange.queued
    return call.receipt + headers.receipt(exchange.backend, exchange.attempts, queued)


def connection_field(head: RequestHead | None, keep_alive: bool) -> bytes | None:
    """The Connection field's value in our answer: what an HTTP/1.1 client expects anyway is not said."""
    if not keep_alive:
        return b"close"
    return None if head is None or head.minor else b"keep-alive"


def _told(ended: Ended) -> str:
    return ended.args[0] if ended.args else ended.outcome.value
