"""Before its turn: a request waits in the line of its model, or is turned away, if that can be told even before its body."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from gateway.core.admission import Admission, Line
from gateway.core.backend import Backend
from gateway.core.head import RequestHead
from gateway.core.models import Way
from gateway.core.outcome import Outcome, Phase
from gateway.core.priority import Classes
from gateway.core.routing import Route
from gateway.errors import Refusal
from gateway.net import body
from gateway.net.call import Call, Upload
from gateway.net.fleet import Fleet
from gateway.net.timed import Timed

LOOK = 0.5  # seconds


class _Others:
    """Where a second try's line leads to: whoever has not been tried (`core.admission.Room`)."""

    in_flight = None

    def __init__(self, fleet: Fleet, call: Call, tried: Sequence[Backend]):
        self._fleet, self._call, self._tried = fleet, call, tried

    def has_room(self, clock: Callable[[], float]) -> bool:
        """Or nobody can be reached: then waiting is in vain."""
        return not self._fleet.held_up(self._call, self._tried)


class Waiting:
    def __init__(self, fleet: Fleet, admission: Admission):
        self._fleet, self._admission = fleet, admission
        self._timer: asyncio.TimerHandle | None = None  # while somebody waits

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

    def leave(self, call: Call) -> None:
        """Give back the slot of an exchange that has ended, if it has one. Where there is a limit, how long it was held tells
        whoever waits how long that may take."""
        slot, way, exchange = call.slot, call.way, call.exchange
        if slot is None:
            return
        selected, ended = exchange.selected, exchange.ended
        limited = slot or self._admission.limit is not None or (way is not None and way.backends.limited)
        if limited and way is not None and selected is not None and ended is not None:
            way.pace.held(ended - selected, ended)
        self._admission.release(slot)

    async def turn(self, call: Call, head: RequestHead) -> None:
        """Wait for a slot, and a backend of the call's way. Raises Refusal.

        Where nobody of that way can be reached any more, an alias leads on to the next one; where that is full, it is waited
        for, too, within the same time.
        """

        def pick() -> None:
            call.lease = self._fleet.pick(call)

        way, waited = call.way, 0.0
        while way is not None:
            await self.stand(call, head, way, way.rank, pick, waited)
            before, way = way, call.way
            if call.lease is not None or way is before or way is None or way.backends.has_room(time.monotonic):
                return
            self._give_up_slot(call)
            assert call.exchange.queued is not None
            waited = time.monotonic() - call.exchange.queued

    def _give_up_slot(self, call: Call) -> None:
        """While it waits once more."""
        slot, call.slot = call.slot, None
        assert slot is not None
        self._admission.release(slot)

    async def once_more(self, call: Call, head: RequestHead, tried: Sequence[Backend]) -> bool:
        """Wait for a backend that is not among `tried`, where all of these are full: in the queue, as for the first one.
        Returns whether the call has a lease now; if not, it has its slot all the same, to be told what went wrong before."""
        fleet, way = self._fleet, call.way
        assert way is not None

        def pick() -> None:
            call.lease = fleet.pick(call, tried)

        await self.again(call, head, Line(_Others(fleet, call, tried), way.model, way.quotas, way.rank), pick)
        return call.lease is not None

    async def again(self, call: Call, head: RequestHead, line: Line, take: Callable[[], None]) -> None:
        """Wait in a line of one's own for a second try; `take` as in `stand`, and not called where that was in vain: the call
        has its slot all the same, to be told what went wrong before."""
        exchange, way = call.exchange, call.way
        assert way is not None
        began = time.monotonic()
        waited = 0.0 if exchange.queued is None or exchange.selected is None else exchange.selected - exchange.queued
        exchange.queued = began - waited  # so that it tells of both waits
        self._give_up_slot(call)
        try:
            await self.stand(call, head, line, way.rank, take, waited)
        except Refusal as refusal:
            if call.slot is None:  # its turn may have come in the moment in which its time was over
                self._admission.take(way)
                call.slot = way.quotas
            if refusal.outcome is Outcome.TIMEOUT_TOTAL:
                raise
        finally:
            exchange.selected = time.monotonic()

    async def stand(
        self, call: Call, head: RequestHead, line: Line, rank: int | None, take: Callable[[], None], waited: float = 0.0
    ) -> None:
        """Wait in a line. `take` takes what it leads to, in the same step as the slot; it must not raise. `waited`: seconds
        before, of those that it may. Raises Refusal."""
        admission, seconds, exchange = self._admission, call.policy.timeouts.queue, call.exchange
        left = max(seconds - waited, 0.0)
        exchange.phase, now = Phase.QUEUE, time.monotonic()
        exchange.queued = now if exchange.queued is None else exchange.queued
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def granted() -> None:
            # both at once, so that nobody else is let in for the same place, and that they are given back whatever comes next
            call.slot = line.quotas
            take()
            if not turn.done():
                turn.set_result(None)

        ticket = admission.ticket(line, granted, _rank(call, head, rank), left)
        self._look_again()
        try:
            words = "no slot came free within %g s (timeouts.queue)"
            with Timed(call, left, "queue_timeout", words, seconds, retry_after=1):
                await turn
        finally:
            admission.leave(ticket)

    def _look_again(self) -> None:
        """Places come with time, too: a breaker half opens, a backend has rested."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(LOOK, self._look)

    def _look(self) -> None:
        self._timer = None
        self._admission.wake()
        if self._admission.waiting:
            self._look_again()


def _rank(call: Call, head: RequestHead, rank: int | None) -> int:
    classes: Classes = call.policy.classes
    return classes.rank(head.fields, rank)
