"""The deadlines of exchanges, from the moment their request is sent: one timer for all, that looks rather than is reset.

To start, reset and stop a timer for each exchange, or for each event, would cost more than relaying it. So one timer looks
at regular intervals, a tenth of the shortest deadline there is and a second at most, at whoever is due to be looked at. A
deadline is never early, and late by one interval at most.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import NamedTuple

from gateway.core.exchange import Exchange
from gateway.core.outcome import Outcome, Phase
from gateway.net.relay import Relay

TICK_MOST, TICK_LEAST = 1.0, 0.01  # seconds between looks


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
        """Of all that run once a request has been sent."""
        running = (self.first_byte, self.idle, self.client_write, self.progress, self.total, comment)
        return min(seconds for seconds in running if seconds is not None)


class Watch:
    """One exchange's deadlines. `look_at`: when to look at it next."""

    __slots__ = ("_comment", "_exchange", "_expire", "_step", "_timeouts", "look_at", "relay")

    def __init__(
        self,
        exchange: Exchange,
        timeouts: Timeouts,
        step: float,
        comment: float | None,
        now: float,
        expire: Callable[[Outcome], None],
    ):
        self._exchange, self._timeouts, self._step, self._comment, self._expire = (
            exchange,
            timeouts,
            step,
            comment,
            expire,
        )
        self.relay: Relay | None = None
        self.look_at = now + step
        if timeouts.total is not None:
            self.look_at = min(self.look_at, exchange.accepted + timeouts.total)

    def look(self, now: float) -> None:
        if self.relay is not None:
            self.relay.settle()
        deadline, outcome = min(self._deadlines(now))
        if deadline <= now:
            self._expire(outcome)
            return
        self.look_at = min(deadline, now + self._step)
        if self.relay is not None and (self.relay.paused or self._exchange.phase is Phase.DONE):
            self.look_soon(now)
        if self._comment is not None and self.relay is not None:
            self.look_at = min(self.look_at, self._say_something(self.relay, now, self._comment))

    def look_soon(self, now: float) -> None:
        """The client holds us back: whether it takes anything is only seen by looking, and often enough to tell when."""
        self.look_at = min(self.look_at, now + self._timeouts.client_write / 8)

    def _deadlines(self, now: float) -> list[tuple[float, Outcome]]:
        timeouts, exchange, relay = self._timeouts, self._exchange, self.relay
        found = []
        if timeouts.total is not None:
            found.append((exchange.accepted + timeouts.total, Outcome.TIMEOUT_TOTAL))
        if relay is None:
            assert exchange.sent is not None
            found.append((exchange.sent + timeouts.first_byte, Outcome.TIMEOUT_FIRST_BYTE))
        elif relay.paused or exchange.phase is Phase.DONE:
            found.append((relay.taken_since(now) + timeouts.client_write, Outcome.CLIENT_STALLED))
        else:
            found.append((relay.last + timeouts.idle, Outcome.TIMEOUT_IDLE))
            if timeouts.progress is not None and relay.meter is not None and exchange.head_received is not None:
                since = max(relay.meter.last_output or 0.0, exchange.head_received)
                found.append((since + timeouts.progress, Outcome.TIMEOUT_PROGRESS))
        return found

    @staticmethod
    def _say_something(relay: Relay, now: float, interval: float) -> float:
        """A comment, where the stream has been silent for so long; returns when to look again."""
        last = max(relay.last, relay.said)
        if now - last < interval:
            return last + interval
        if not relay.paused and relay.event_stream and relay.body_octets and relay.insert(b": keep-alive\n\n"):
            relay.said = now
        return now + interval


class Watches:
    """All that are watched, and the timer."""

    def __init__(self) -> None:
        self._watched: set[Watch] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._tick = TICK_MOST

    def add(self, watch: Watch, step: float) -> None:
        self._watched.add(watch)
        if step < self._tick * 10:
            self._tick = max(step / 10, TICK_LEAST)
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._tick, self._look)

    def remove(self, watch: Watch) -> None:
        self._watched.discard(watch)

    def _look(self) -> None:
        now = time.monotonic()
        for watch in [w for w in self._watched if w.look_at <= now]:
            if watch in self._watched:  # it may have ended meanwhile
                watch.look(now)
        self._timer = asyncio.get_running_loop().call_later(self._tick, self._look) if self._watched else None
        if not self._watched:
            self._tick = TICK_MOST
