"""The deadlines of exchanges, from the moment their request is sent: one timer for all, that looks rather than is reset.

To start, reset and stop a timer for each exchange, or for each event, would cost more than relaying it. So one timer looks
at regular intervals, a tenth of the shortest deadline there is and a second at most, at whoever is due to be looked at. A
deadline is never early, and late by one interval at most; by more where this process itself was held up (`net.deadline`).
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from gateway.core.outcome import Outcome, Phase
from gateway.net.deadline import put_off
from gateway.net.relay import Relay
from gateway.net.sockets import VANISHED
from gateway.net.upstream import Connection

if TYPE_CHECKING:
    from gateway.net.call import Call

log = logging.getLogger(__name__)

TICK_MOST, TICK_LEAST = 1.0, 0.01  # seconds between looks
NEVER = math.inf


class Timeouts(NamedTuple):
    """Seconds; None: no such deadline."""

    request_body: float = 60.0
    queue: float = 30.0
    connect: float = 5.0
    first_byte: float = 600.0
    idle: float = 300.0
    client_write: float = 60.0
    progress: float | None = None
    total: float | None = None

    def shortest(self, comment: float | None) -> float:
        """Of all that run once a request has been sent, and of what is looked at by itself."""
        running = (self.first_byte, self.idle, self.client_write, self.progress, self.total, comment, VANISHED)
        return min(seconds for seconds in running if seconds is not None)


class Watch:
    """Looks at all exchanges under way. `expired` is told of a deadline that has passed."""

    def __init__(self, live: Mapping[int, Call], expired: Callable[[Call, Outcome], None]) -> None:
        self._live, self._expired = live, expired
        self._timer: asyncio.TimerHandle | None = None
        self._step = math.inf  # the shortest deadline that the timer has been set for
        self._due, self._put_off = math.inf, 0  # when the timer is to run; how many times it has been put off

    def begin(self, call: Call, now: float) -> None:
        """Its request is being sent: from now on its deadlines run. To end them, let it be looked at `NEVER`."""
        step, total = call.policy.step, call.policy.timeouts.total
        call.look_at = now + step if total is None else min(now + step, call.exchange.accepted + total)
        if step < self._step:  # else a timer runs already that is fine enough, and is left to come to its end
            self._step = step
            if self._timer is not None:
                self._timer.cancel()
            self._start()

    def _start(self) -> None:
        tick = max(min(self._step / 10, TICK_MOST), TICK_LEAST)
        self._due = time.monotonic() + tick
        self._timer = asyncio.get_running_loop().call_later(tick, self._look)

    def _look(self) -> None:
        now = time.monotonic()
        more = put_off(self._due, self._step, self._put_off)
        if more and self._live:  # what came meanwhile is to be read first
            self._due, self._put_off = now + more, self._put_off + 1
            self._timer = asyncio.get_running_loop().call_later(more, self._look)
            return
        self._put_off = 0
        for call in [c for c in self._live.values() if c.look_at <= now or _held_back(c)]:
            if call.look_at != NEVER:  # it may have ended meanwhile
                try:
                    outcome = _look_at(call, now)
                    if outcome is not None:
                        self._expired(call, outcome)
                except Exception:  # a fault of ours in one exchange must not take their deadlines from all others
                    log.exception("the deadlines of the exchange %s could not be looked at", call.exchange.request_id)
                    call.look_at = now + call.policy.step
        if self._live:
            self._start()
        else:
            self._timer, self._step = None, math.inf


def _held_back(call: Call) -> bool:
    """Its client takes nothing just now. Whether it does again is only seen by looking, and often enough to tell when."""
    return call.relay is not None and (call.relay.paused or call.exchange.phase is Phase.DONE)


def _look_at(call: Call, now: float) -> Outcome | None:
    """What has expired, if anything."""
    relay = call.relay
    if relay is not None:
        relay.settle()
    else:
        for leg in (call, *call.others):
            if isinstance(leg.waiting, Connection) and leg.exchange.sent is not None:
                leg.waiting.give_up_vanished()
    deadline, outcome = min(_deadlines(call, now), default=(NEVER, Outcome.TIMEOUT_TOTAL))
    if deadline <= now:
        return outcome
    call.look_at = min(deadline, now + call.policy.step)
    if isinstance(relay, Relay) and call.policy.comment is not None:
        call.look_at = min(call.look_at, _say_something(relay, now, call.policy.comment))
    return None


def _deadlines(call: Call, now: float) -> list[tuple[float, Outcome]]:
    timeouts, exchange, relay = call.policy.timeouts, call.exchange, call.relay
    found = []
    if timeouts.total is not None:
        found.append((exchange.accepted + timeouts.total, Outcome.TIMEOUT_TOTAL))
    if relay is None:
        sent = [leg.exchange.sent for leg in (call, *call.others) if leg.exchange.sent is not None and leg.waiting is not None]
        if sent:
            found.append((min(sent) + timeouts.first_byte, Outcome.TIMEOUT_FIRST_BYTE))
    elif _held_back(call):
        found.append((call.client.taken_at(now) + timeouts.client_write, Outcome.CLIENT_STALLED))
    else:
        found.append((relay.last + timeouts.idle, Outcome.TIMEOUT_IDLE))
        meter = exchange.meter
        if timeouts.progress is not None and meter is not None and meter.streamed and isinstance(relay, Relay):
            since = max(meter.last_output or 0.0, relay.began)
            found.append((since + timeouts.progress, Outcome.TIMEOUT_PROGRESS))
    return found


def _say_something(relay: Relay, now: float, interval: float) -> float:
    """A comment, where the stream has been silent for so long; returns when to look again."""
    last = max(relay.last, relay.said)
    if now - last < interval:
        return last + interval
    if not relay.paused and relay.event_stream and relay.body_octets and relay.insert(b": keep-alive\n\n"):
        relay.said = now
    return now + interval
