"""Before its turn: a request waits in the line of its model, or is turned away, if that can be told even before its body."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from gateway.core.admission import Admission, Line
from gateway.core.head import RequestHead
from gateway.core.models import Way
from gateway.core.outcome import Phase
from gateway.core.priority import Classes
from gateway.core.routing import Route
from gateway.net import body
from gateway.net.call import Call, Upload
from gateway.net.fleet import Fleet


class Waiting:
    def __init__(self, fleet: Fleet, admission: Admission):
        self._fleet, self._admission = fleet, admission

    async def body(self, call: Call, head: RequestHead, route: Route, needed: bool) -> Upload:
        """A body that is still coming (`net.body.read`), unless that would be in vain. Raises Refusal."""
        self._foresee(call, head)
        return await body.read(call, head, route, needed)

    def _foresee(self, call: Call, head: RequestHead) -> None:
        """Turn away, while its body is still on its way, whoever would have to wait for a place and could not. Raises Refusal.

        Where it goes is not known yet: what is said must hold wherever that is.
        """
        admission, models, way = self._admission, self._fleet.models, self._fleet.models.anywhere
        if (call.route is not None and call.route.loopback) or not admission.must_wait(way):
            return
        likely = way if models.needed else models.usual
        patience = None if models.needed else call.policy.timeouts.queue
        admission.foresee(likely, _rank(call, head, likely.rank), patience)

    def enter(self, call: Call, way: Way) -> bool:
        """Take a slot, unless it has to be waited for."""
        entered = self._admission.enter(way)
        if entered:
            call.slot = way.quotas
        return entered

    async def turn(self, call: Call, head: RequestHead) -> None:
        """Wait for a slot, and a backend of the call's way. Raises Refusal."""
        way = call.way
        assert way is not None

        def pick() -> None:
            call.lease = self._fleet.pick(call)

        await self.stand(call, head, way, way.rank, pick)

    async def stand(self, call: Call, head: RequestHead, line: Line, rank: int | None, take: Callable[[], None]) -> None:
        """Wait in a line. `take` takes what it leads to, in the same step as the slot; it must not raise. Raises Refusal."""
        admission, seconds, exchange = self._admission, call.policy.timeouts.queue, call.exchange
        exchange.phase, now = Phase.QUEUE, time.monotonic()
        exchange.queued = now if exchange.queued is None else exchange.queued
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def granted() -> None:
            # both at once, so that nobody else is let in for the same place, and that they are given back whatever comes next
            call.slot = line.quotas
            take()
            if not turn.done():
                turn.set_result(None)

        ticket = admission.ticket(line, granted, _rank(call, head, rank), seconds)
        try:
            message = f"no slot came free within {seconds:g} s (timeouts.queue)"
            await body.timed(call, turn, seconds, "queue_timeout", message, retry_after=1)
        finally:
            admission.leave(ticket)


def _rank(call: Call, head: RequestHead, rank: int | None) -> int:
    classes: Classes = call.policy.classes
    return classes.rank(head.fields, rank)
