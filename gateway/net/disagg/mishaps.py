"""What is done about a leg that failed: another attempt, or what the client is told."""

from __future__ import annotations

import time

from gateway.core.backend import Backend
from gateway.core.disagg.base import HandoffMissing
from gateway.core.disagg.parting import State
from gateway.core.head import ResponseHead
from gateway.core.outcome import Outcome, Phase
from gateway.errors import Refusal
from gateway.net.call import Call
from gateway.net.disagg.common import AGAIN, LegFailed, Means, of_leg
from gateway.net.disagg.decode import decode
from gateway.net.legs import Leg
from gateway.net.paired import Paired
from gateway.net.putoff import PutOff
from gateway.net.watch import NEVER

FALLBACK_FIELD = b"X-Gateway-Prefill: local\r\n"


def another(means: Means, call: Call, failed: LegFailed, tried: dict[str, list[Backend]]) -> bool:
    """Whether another attempt is made: with another prefill backend, or after decode failed with a fresh prefill."""
    if not failed.again:
        return False
    if isinstance(failed.cause, HandoffMissing) and failed.cause.early:  # not its fault: it is asked once more, capped
        return means.retries.another(call.exchange.attempts) and means.retries.afford()
    stale = failed.word == "stale_connection"  # which says nothing of the engine: the same one is asked, and it is no attempt
    if not stale:
        tried[failed.side].append(failed.backend)
    now = time.monotonic()
    full = failed.backend.caution.refuses(now)  # a fresh prefill is no room there
    unreached = failed.cause is not None and failed.cause.code in ("upstream_connect", "timeout_connect")
    elsewhere = unreached or full or (failed.side != "decode" and not stale)
    if elsewhere and not means.fleet.of(failed.side, call).others(tried[failed.side], now):
        return False
    return means.retries.another(call.exchange.attempts - stale) and means.retries.afford()


async def last(means: Means, call: Call, paired: Paired, failed: LegFailed) -> ResponseHead:
    """There is no other attempt: what the client is told. Raises Refusal."""
    response = failed.response
    if failed.side == "encode":
        if response is not None and failed.leg is not None:
            return relayed(means, call, paired, response, failed.leg)
    elif failed.side == "prefill":
        if paired.settings.fallback and failed.again:
            return await _fall_back(means, call, paired, failed)
        if response is not None:
            return relayed(means, call, paired, response, paired.prefill)
    elif response is not None:
        call.judged = response.status in AGAIN
        paired.refused(response.status)
        if paired.state is State.DECODE_WAIT:
            paired.become(State.STREAMING)
        return response
    paired.give_up()
    paired.end()
    raise told(failed)


def told(failed: LegFailed) -> Refusal:
    """What the client is told of a leg that failed by something else than an answer."""
    cause = failed.cause
    assert cause is not None
    if cause.code in ("upstream_connect", "timeout_connect"):
        outcome = Outcome.UPSTREAM_CONNECT if cause.code == "upstream_connect" else Outcome.TIMEOUT_CONNECT
        return of_leg(failed.side, Refusal("no_backend", cause.message, retry_after=1, outcome=outcome))
    return of_leg(failed.side, cause)


def put_off(call: Call, paired: Paired, failed: LegFailed) -> PutOff | None:
    """The answer of a leg that failed by one, kept while another attempt waits for room."""
    if failed.response is None:
        return None
    leg = failed.leg or (paired.prefill if failed.side == "prefill" else call)
    connection, leg.connection = leg.connection, None
    assert connection is not None
    call.look_at = NEVER
    return PutOff(failed.response, connection, failed.backend)


def answered(means: Means, call: Call, failed: LegFailed, kept: PutOff | None) -> ResponseHead:
    """No room was found for another attempt: what went wrong before is told. Raises Refusal."""
    call.exchange.phase = Phase.WAIT
    if kept is None:
        raise told(failed)
    return kept.take_up(call, means.watch)


def relayed(means: Means, call: Call, paired: Paired, response: ResponseHead, leg: Leg) -> ResponseHead:
    """Prefill's or an encoder's error is the client's answer: its leg becomes the call's."""
    exchange, marks = call.exchange, leg.exchange
    if call.lease is not None:
        call.lease.release()
    call.become(leg)
    call.judged = response.status in AGAIN
    paired.end()
    exchange.backend, exchange.phase = marks.backend, Phase.WAIT
    exchange.sent, exchange.head_received = marks.sent, marks.head_received
    assert marks.sent is not None
    means.watch.begin(call, marks.sent)
    return response


async def _fall_back(means: Means, call: Call, paired: Paired, failed: LegFailed) -> ResponseHead:
    """Decode computes the prompt itself, as the operator allows."""
    means.told.fell_back(failed.word)
    paired.end()
    paired.transferred = False
    call.receipt = FALLBACK_FIELD
    assert paired.pair is not None
    try:
        return await decode(means, call, paired, [], paired.settings.connector.alone(paired.asked, paired.pair))
    except LegFailed as again:
        return await last(means, call, paired, again)
