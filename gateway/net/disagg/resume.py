"""recompute: resume. An answer that its decode engine drops under pressure goes on in the same stream, as a new pair of legs.

The relay waits, as it does for a migration (`net.migrate`), while a request for the rest is prefilled anew and decoded: an
attempt like any other, with its own id and leases, and as many tries as `retry` allows. It is written on a call aside, so that
the exchange's own record stays that of a stream under way; `Call.others` and `Call.paired` have whatever ends the exchange end
the new legs too, in the way of the state that they are in (`core.disagg.parting`). Where nobody goes on, the engine's marker
passes to the client, as with `recompute: relay`; where that has been done three times before, the stream is cut.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from gateway.core.backend import Backend
from gateway.core.disagg.asked import Asked
from gateway.core.disagg.recompute import RecomputedSeam
from gateway.core.outcome import Outcome
from gateway.errors import Ended, EngineRefused, Refusal
from gateway.net.call import Call
from gateway.net.disagg.common import LegFailed
from gateway.net.legs import beside
from gateway.net.migrate import SeamedRelay, is_fit

if TYPE_CHECKING:
    from gateway.net.disagg.pairs import Pairs


async def ended(pairs: Pairs, call: Call, relay: SeamedRelay) -> None:
    """Wait for the stream's end, and see to it that what is dropped goes on. Raises Ended."""
    seam, told = relay.seam, pairs.means.told
    assert isinstance(seam, RecomputedSeam)
    while (why := await relay.left) is not None:
        wanted = relay.wanted
        if wanted is None and seam.spent:  # whoever asked for whole answers does not get one that only looks so (pd.md 6.7)
            told.recomputed()
            told.resumed("most")
            relay.fail(Ended(Outcome.STREAM_ERROR, "the decode engine has dropped the answer once more"))
            break
        if wanted is None:
            _passes_on(call, "inexact")
            relay.give_up(why)
            break
        result = "ended"
        try:
            result = await _resumed(pairs, call, relay, wanted)
        finally:
            if result != "failed":  # of the marker that the client gets, its meter tells
                told.recomputed()
                told.resumed(result)
        if result == "failed":
            _passes_on(call, result)
            relay.give_up(why)
        if result != "done":
            break
    await relay.done


def _passes_on(call: Call, reason: str) -> None:
    assert call.paired is not None
    call.paired.unresumed = reason


async def _resumed(pairs: Pairs, call: Call, relay: SeamedRelay, wanted: bytes) -> str:
    """What came of it: `done`, `failed`, or `ended`: the exchange did meanwhile, and whoever closes it ends the legs."""
    dropped = _let_go(call)
    aside = _aside(call)
    call.others = (aside,)
    task = pairs.means.tasks.spawn(_answers(pairs, call, relay, aside, wanted, dropped), "a resumption")
    try:
        await asyncio.wait((task, relay.done), return_when=asyncio.FIRST_COMPLETED)
        if relay.done.done():
            return "ended"
        if task.result():
            _take_over(call, relay, aside)
            return "done"
        call.others = ()
        return "failed"
    finally:
        task.cancel()
        call.exchange.attempts += aside.exchange.attempts


def _let_go(call: Call) -> Backend:
    """Of the engine that has dropped the answer: it has room again, and has done nothing wrong."""
    assert call.lease is not None and call.paired is not None
    backend = call.lease.backend
    backend.answered(200, time.monotonic())
    call.paired.part()
    call.end()
    return backend


def _aside(call: Call) -> Call:
    """The same request on a record of its own."""
    aside = Call(beside(call.exchange).exchange, call.request_id, call.request, call.policy)
    aside.exchange.model, aside.exchange.stream = call.exchange.model, call.exchange.stream
    aside.route, aside.way, aside.key = call.route, call.way, call.key
    return aside


async def _answers(pairs: Pairs, call: Call, relay: SeamedRelay, aside: Call, wanted: bytes, dropped: Backend) -> bool:
    """Whether an answer has begun that the stream can go on with. If not, nothing is left of the attempts."""
    assert call.paired is not None and call.route is not None
    paired, path = call.paired, call.route.path
    settings, means = paired.settings, pairs.means
    answers = False
    try:
        asked = Asked(path, wanted)
        others = pairs.unnamed(aside) if settings.named else None
        tried = pairs.roles(aside, asked, others)
        tried["decode"].append(dropped)
        while True:
            paired = call.paired = pairs.begin(aside, asked, settings, tried)
            paired.task = asyncio.current_task()
            means.admission.wake()  # only now: whoever has been dropped goes before those that wait
            try:
                answers = is_fit(await pairs.attempt(aside, paired, tried))
                break
            except LegFailed as failed:
                if failed.cause is not None and failed.cause.outcome is Outcome.TIMEOUT_TOTAL:
                    relay.fail(Ended(Outcome.TIMEOUT_TOTAL))
                if not pairs.tries_again(aside, paired, failed, tried):
                    if failed.leg is not None:
                        failed.leg.end()
                    break
    except (Refusal, EngineRefused):
        pass
    finally:
        aside.paired = None  # which may hold it
    if not answers:
        pairs.end(aside, paired)
    return answers


def _take_over(call: Call, relay: SeamedRelay, aside: Call) -> None:
    """The stream is the new pair's now."""
    exchange, marks, paired = call.exchange, aside.exchange, call.paired
    assert paired is not None
    call.become(aside)
    call.others, paired.call = aside.others, call
    exchange.backend, exchange.prefill_backend = marks.backend, marks.prefill_backend
    lease, connection = call.lease, call.connection
    assert lease is not None and connection is not None
    lease.prompt_read(time.monotonic())
    relay.go_on(connection)
