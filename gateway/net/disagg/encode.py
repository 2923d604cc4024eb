"""Before prefill, the encoders: a leg for each image, sound and film of a conversation, all of which must be answered (EPD)."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence

from gateway.core.backend import Backend
from gateway.core.disagg.asked import Asked
from gateway.core.disagg.base import HandoffMissing
from gateway.core.disagg.base import Leg as Request
from gateway.core.disagg.encoding import media
from gateway.core.disagg.parting import State
from gateway.core.outcome import Phase
from gateway.errors import EngineRefused, Refusal
from gateway.net.call import Call
from gateway.net.disagg.common import AGAIN, LegFailed, Means, nobody, worded
from gateway.net.disagg.prefill import sent
from gateway.net.fetch import Page
from gateway.net.legs import Leg, beside
from gateway.net.paired import Paired
from gateway.net.timed import Timed

ANSWER_MOST = 1 << 20  # octets of one of up to `encoding.ITEMS_MOST` answers


async def encode(means: Means, call: Call, paired: Paired, tried: Sequence[Backend]) -> None:
    """Nothing, where there is nothing for encoders. Raises LegFailed, EngineRefused, Refusal: of the first leg that
    failed; the others are ended with it.

    There is one leg from the beginning (`Paired.encoder`), and more as encoders have room; each goes on with the next medium.
    """
    first, paired.encoder = paired.encoder, None
    if first is None:
        return
    asked, pool = paired.asked, means.fleet.of("encode", call)
    assert paired.pair is not None
    paired.become(State.ENCODING)
    call.exchange.phase, call.exchange.connect_began = Phase.PREFILL, time.monotonic()
    began = time.monotonic()
    before, idle = call.others, [first]
    running: dict[asyncio.Task[bytes | LegFailed | EngineRefused], tuple[int, Leg]] = {}
    try:
        engines = tuple(means.fleet.engines[backend.name] for backend in pool.backends)
        requests = list(paired.settings.connector.encode(asked, paired.pair._replace(encoders=engines)))
        answers: list[bytes] = [b""] * len(requests)
        waiting = deque(enumerate(requests))
        while waiting or running:
            while waiting and (leg := idle.pop() if idle else _leg(means, call, tried)) is not None:
                at, request = waiting.popleft()
                running[means.tasks.spawn(_outcome(means, call, paired, leg, request), "encoder leg")] = at, leg
                call.others = (*before, *(leg for _, leg in running.values()))
            done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                answer = task.result()
                if isinstance(answer, EngineRefused):
                    call.exchange.backend = running[task][1].exchange.backend
                    raise answer
                if isinstance(answer, LegFailed):
                    if answer.leg is not None:  # its answer may be relayed: it is not ended with the others
                        del running[task]
                    raise answer
                at, leg = running.pop(task)
                answers[at] = answer
                if waiting:
                    idle.append(leg)
                else:
                    leg.end()
                    means.admission.wake()
    finally:
        for task, (_, leg) in running.items():
            task.cancel()
            leg.end()
        for leg in idle:
            leg.end()
        call.others = before
    means.told.encoded(call.exchange, paired.settings.connector.name, time.monotonic() - began)
    paired.settings.connector.gathered(asked, answers)


def _leg(means: Means, call: Call, tried: Sequence[Backend]) -> Leg | None:
    """On the encoder that has least to do; None where none has room."""
    leg = beside(call.exchange)
    if means.fleet.pick_of("encode", call, leg, tried) is None:
        return None
    assert leg.lease is not None
    leg.exchange.backend = leg.lease.backend.name
    return leg


def first_leg(means: Means, call: Call, tried: Sequence[Backend]) -> Leg:
    """That an attempt begins with. Raises Refusal."""
    found = _leg(means, call, tried)
    if found is None:
        raise nobody("encode", means.fleet.of("encode", call))
    return found


def needed(means: Means, call: Call, asked: Asked) -> bool:
    """Whether there are encoders, and something for them. Raises Refusal."""
    return bool(means.fleet.of("encode", call).backends) and bool(media(asked))


async def _outcome(means: Means, call: Call, paired: Paired, leg: Leg, request: Request) -> bytes | LegFailed | EngineRefused:
    """The answer, whose status is 200, or how that failed."""
    assert leg.lease is not None and leg.connections is not None
    backend, settings = leg.lease.backend, paired.settings
    octets = paired.octets(request, leg.connections.origin, prefill=True)
    seconds = settings.prefill_timeout or call.policy.timeouts.first_byte
    key = "disaggregation.prefill_timeout" if settings.prefill_timeout else "timeouts.first_byte"
    words = "the encode leg: the backend %s gave no answer within %g s (%s)"

    async def whole() -> bytes | LegFailed:
        assert leg.connections is not None
        connection, response = await sent(means, call, leg, leg.connections, octets)
        if response.status >= 400:
            doubted = response.status in AGAIN and means.doubts(backend, response)
            return LegFailed("encode", backend, response=response, leg=leg, doubted=doubted)
        if response.status != 200:  # no answer for a client
            raise HandoffMissing(f"the encoder {backend.name} answered with {response.status}; expected 200")
        page = Page(connection, response)
        answer = await page.whole(ANSWER_MOST)
        if page.clean and not connection.has_unsent(len(octets)):
            connection.give_back()
        else:
            connection.drop()
        leg.connection = None
        settings.connector.encoded(backend.name, answer)
        backend.answered(200, time.monotonic())
        return answer

    try:
        with Timed(call, seconds, "timeout_first_byte", words, backend.name, seconds, key):
            return await whole()
    except Refusal as failure:
        leg.drop()
        means.blame(leg.exchange, backend, failure)
        return worded(call, backend, failure) or LegFailed("encode", backend, failure)
