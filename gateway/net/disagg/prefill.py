"""The prefill leg: one token is asked for, and the answer says where its KV is."""

from __future__ import annotations

import time

from gateway.core.disagg.base import HandoffMissing
from gateway.core.disagg.base import Leg as Request
from gateway.core.disagg.parting import State
from gateway.core.head import ResponseHead
from gateway.core.outcome import Phase
from gateway.errors import Refusal, UpstreamFailed
from gateway.net.call import Call
from gateway.net.disagg.common import AGAIN, LegFailed, Means, asked_of, worded
from gateway.net.fetch import Page
from gateway.net.legs import Leg
from gateway.net.paired import Paired
from gateway.net.promise import Promise
from gateway.net.releases import PREFILL_MOST
from gateway.net.timed import Timed
from gateway.net.upstream import Connection, ConnectionPool


async def prefill(means: Means, call: Call, paired: Paired, given: bytes = b"", leg: Leg | None = None) -> None:
    """`leg`: which, where others may have taken it from the pair meanwhile. Raises LegFailed, EngineRefused."""
    leg, exchange, settings = leg or paired.prefill, call.exchange, paired.settings
    assert leg.lease is not None and leg.connections is not None and paired.pair is not None
    backend, connector = leg.lease.backend, settings.connector
    if paired.state in (State.QUEUED, State.ENCODING, State.PROBING):
        paired.become(State.PREFILLING)
        exchange.phase, exchange.connect_began = Phase.PREFILL, time.monotonic()
    request = asked_of(backend, connector.prefill, paired, given)
    seconds = settings.prefill_timeout or call.policy.timeouts.first_byte
    key = "disaggregation.prefill_timeout" if settings.prefill_timeout else "timeouts.first_byte"
    try:
        words = "the prefill leg: the backend %s gave no answer within %g s (%s)"
        with Timed(call, seconds, "timeout_first_byte", words, backend.name, seconds, key):
            response = await _ask(means, call, paired, request, leg)
    except Refusal as failure:
        paired.end_prefill()
        means.blame(leg.exchange, backend, failure)
        if (refused := worded(call, backend, failure)) is not None:
            exchange.backend = backend.name
            raise refused from None
        raise LegFailed("prefill", backend, failure) from None
    if response is not None:
        doubted = response.status in AGAIN and means.doubts(backend, response)
        raise LegFailed("prefill", backend, response=response, doubted=doubted)


async def _ask(means: Means, call: Call, paired: Paired, request: Request, leg: Leg) -> ResponseHead | None:
    """None: its answer has been taken. Else the head of an error, whose body is still to come. Raises Refusal."""
    settings, connections = paired.settings, leg.connections
    assert leg.lease is not None and connections is not None and paired.pair is not None
    backend = leg.lease.backend  # whoever ends the leg takes its lease
    octets = paired.octets(request, connections.origin, prefill=True)
    # decode may be waiting for whoever read it first, at a rendezvous that holds once
    twice = settings.connector.order.hands_over
    connection, response = await sent(means, call, leg, connections, octets, twice=twice)
    if response.status >= 400:
        return response
    if response.status != 200:  # no answer for a client: it has neither an error nor what decode needs
        name = backend.name
        raise HandoffMissing(f"the prefill engine {name} answered with {response.status}, expected 200 and kv_transfer_params")
    page = leg.page = Page(connection, response)
    try:
        answer = await page.whole(PREFILL_MOST)
    except UpstreamFailed:
        leg.drop()
        paired.cut_off(backend)
        raise
    paired.answered = time.monotonic()
    if page.clean and not connection.has_unsent(len(octets)):
        connection.give_back()
    else:
        connection.drop()
    leg.connection = None
    assert leg.exchange.sent is not None
    means.told.prefilled(call.exchange, settings.connector.name, paired.answered - leg.exchange.sent)
    try:
        paired.said = settings.connector.take(paired.asked, paired.pair, answer)
    except HandoffMissing as missing:
        if missing.holds:
            paired.strand(backend, paired.answered)
        if not missing.error:
            backend.answered(200, paired.answered)
        raise
    backend.answered(200, paired.answered)
    serial = settings.connector.order.hands_over
    if serial:
        paired.handoff = paired.said
    if settings.hold and paired.state in (State.PREFILLING, State.DECODE_WAIT):
        paired.holding = backend.hold(paired.tokens)
    if serial:
        paired.become(State.HANDOFF)
    leg.end()
    call.others = ()
    means.admission.wake()
    return None


async def sent(
    means: Means, call: Call, leg: Leg, connections: ConnectionPool, octets: bytes, *, twice: bool = True
) -> tuple[Connection, ResponseHead]:
    """A request that may be sent `twice`: on a kept connection, and if that proves stale on a fresh one. Raises Refusal."""
    marks, fresh = leg.exchange, False
    while True:
        kept = None if fresh else means.kept(connections)
        connection = leg.connection = kept or await means.fresh(call, connections)
        marks.sent = marks.connected = call.exchange.connected = time.monotonic()
        try:
            reply = leg.reply = Promise()
            connection.send_for(reply, octets, b"POST")
            response = await reply
        except UpstreamFailed as failure:
            if failure.code == "stale_connection":
                connections.drop_idle()
            if fresh or not twice or failure.code != "stale_connection":
                raise
            fresh = True
            continue
        marks.head_received = time.monotonic()
        return connection, response
