"""The decode leg, up to the first octet of its body: only then something may pass to the client."""

from __future__ import annotations

import time

from gateway.core.backend import Backend
from gateway.core.disagg.base import Handoff, TransferFailed
from gateway.core.disagg.base import Leg as Request
from gateway.core.disagg.budget import dead
from gateway.core.disagg.parting import State
from gateway.core.disagg.signs import Sign
from gateway.core.head import ResponseHead
from gateway.core.headers import is_event_stream
from gateway.core.outcome import Phase
from gateway.errors import EngineRefused, UpstreamFailed
from gateway.net.call import Call
from gateway.net.disagg.common import AGAIN, LegFailed, Means, asked_of, of_leg
from gateway.net.hold import Hold
from gateway.net.opening import Opening
from gateway.net.paired import Paired
from gateway.net.promise import Promise
from gateway.net.upstream import Connection


async def decode(
    means: Means,
    call: Call,
    paired: Paired,
    tried: list[Backend],
    request: Request | None = None,
    begin: type[Opening] = Opening,
) -> ResponseHead:
    """Decode's head, once its body has begun. `request`: instead of one that fetches what prefill holds; `begin`: what its
    body's beginning is. Raises LegFailed, EngineRefused."""
    exchange, settings = call.exchange, paired.settings
    assert call.connections is not None
    connection = call.connection = means.kept(call.connections) or await _reach(means, call, paired, tried)
    assert call.lease is not None and paired.pair is not None
    backend, name = call.lease.backend, settings.connector.name
    now = time.monotonic()
    if request is None:
        if paired.holding is not None and dead(settings.hold, paired.answered, now):
            raise LegFailed("decode", backend, TransferFailed("what prefill held was too old to be handed over"))
        request = asked_of(backend, settings.connector.decode, paired, paired.handoff or Handoff())
        if paired.handoff is not None:
            means.told.handed_over(exchange, name, now - paired.answered)
        if paired.state is State.QUEUED:
            paired.become(State.PREFILLING)
        paired.become(State.DECODE_WAIT)
    exchange.phase = Phase.WAIT
    paired.sent = exchange.sent = now
    try:
        connection, response = await _head(means, call, paired, connection, paired.octets(request, call.connections.origin))
        exchange.head_received = time.monotonic()
        if 200 <= response.status < 300:
            await _begun(means, call, paired, connection, response, begin)
    except UpstreamFailed as failure:
        if failure.code == "stale_connection":
            call.connections.drop_idle()
        means.blame(call.exchange, backend, failure)
        raise LegFailed("decode", backend, of_leg("decode", failure)) from None
    except EngineRefused as refused:
        means.attempts.failed(call, refused)
        raise
    if response.status in AGAIN:
        raise LegFailed("decode", backend, response=response, doubted=means.doubts(backend, response))
    now = time.monotonic()
    if 200 <= response.status < 300:
        if paired.transfers:
            means.mistrust.succeeded(paired.pair.prefill.name, backend.name)
        if not paired.missed:
            means.told.decoding(exchange, name, now - paired.sent)
        if paired.holding is not None:
            means.told.held(name, now - paired.answered)
        paired.fetched()
    else:
        paired.refused(response.status)
    if paired.state is State.DECODE_WAIT:
        paired.become(State.STREAMING)
        paired.opening = None  # and the event that it has, which may be large
    return response


async def _head(
    means: Means, call: Call, paired: Paired, connection: Connection, octets: bytes
) -> tuple[Connection, ResponseHead]:
    """Decode's head, and the connection that it came on. Raises Refusal."""
    while True:
        call.connection = connection
        answer = paired.answer = Promise()
        paired.opening = None  # that of a probe's answer
        connection.send_for(answer, octets, b"POST")
        means.watch.begin(call, time.monotonic())
        try:
            return connection, await answer
        except UpstreamFailed as failure:
            if not failure.crossed:
                raise
        assert call.connections is not None
        call.connection = paired.answer = None  # prefill's KV waits, whatever becomes of this
        connection = await means.fresh(call, call.connections)


async def _reach(means: Means, call: Call, paired: Paired, tried: list[Backend]) -> Connection:
    """A connection to the decode backend, or to another one where it takes none: nothing has been sent yet, so that what
    prefill holds can go there instead."""
    while True:
        assert call.connections is not None and call.lease is not None and paired.pair is not None
        backend = call.lease.backend
        try:
            return means.kept(call.connections) or await means.fresh(call, call.connections)
        except UpstreamFailed as failure:
            means.blame(call.exchange, backend, failure)
            tried.append(backend)
            failed = LegFailed("decode", backend, of_leg("decode", failure))
        before = call.lease
        if not paired.settings.connector.reusable or not means.retries.another(call.exchange.attempts):
            raise failed
        if means.fleet.pick_of("decode", call, call, tried) is None:
            raise failed
        means.retries.spend()
        before.release()
        call.exchange.attempts += 1
        means.observer.retried(call.exchange, failed.word)
        name = call.exchange.backend = call.lease.backend.name
        paired.pair = paired.pair._replace(decode=means.fleet.engines[name])


async def _begun(
    means: Means, call: Call, paired: Paired, connection: Connection, response: ResponseHead, begin: type[Opening]
) -> None:
    """Wait for the first octet of decode's body. Raises UpstreamFailed, LegFailed, EngineRefused."""
    hold = call.policy.hold and is_event_stream(response) and begin is Opening
    opening = paired.opening = call.hold = (Hold if hold else begin)(connection, response, call.dialect)
    try:
        error = await opening.done
    finally:
        call.hold = None
    said = error or (opening.data if isinstance(opening, Opening) else b"")
    sign = paired.settings.connector.sign(said, response.status, paired.asked) if said else Sign.NOTHING
    paired.missed = sign is Sign.MISSED
    if sign is Sign.FAILED and paired.transfers:
        assert call.lease is not None and paired.pair is not None
        backend = call.lease.backend
        means.mistrust.failed(paired.pair.prefill.name, backend.name, backend.breaker.settings, time.monotonic())
        failed = TransferFailed("the decode engine could not take over what the prefill engine had computed")
        raise LegFailed("decode", backend, failed)
    if error is not None:
        paired.end()
        raise EngineRefused(*call.dialect.as_status(error))
