"""The deadlines of one exchange, from the moment its request is sent: one timer, that looks rather than is reset.

Resetting a timer for each event would cost more than relaying it. So the timer fires at intervals no longer than the
shortest deadline that may come up, finds out which one is next, and never fires late for it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import NamedTuple

from gateway.core.exchange import Exchange
from gateway.core.outcome import Outcome, Phase
from gateway.net.relay import Relay


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


class Watch:
    __slots__ = ("_exchange", "_expire", "_loop", "_relay", "_step", "_timeouts", "_timer", "comment")

    def __init__(
        self, exchange: Exchange, timeouts: Timeouts, loop: asyncio.AbstractEventLoop, expire: Callable[[Outcome], None], comment: float | None
    ):
        self._exchange, self._timeouts, self._loop, self._expire = exchange, timeouts, loop, expire
        self._relay: Relay | None = None
        self.comment = comment  # seconds of silence after which a comment is put into the stream
        self._step = min(
            t
            for t in (timeouts.first_byte, timeouts.idle, timeouts.client_write, timeouts.progress, timeouts.total, comment)
            if t is not None
        )
        self._timer = loop.call_later(self._step, self._look)

    def relaying(self, relay: Relay) -> None:
        self._relay = relay

    def stop(self) -> None:
        self._timer.cancel()

    def _look(self) -> None:
        now = time.monotonic()
        deadline, outcome = min(self._deadlines(now), key=lambda pair: pair[0])
        if deadline <= now:
            self._expire(outcome)
            return
        wait = min(deadline - now, self._step)
        if self.comment is not None and self._relay is not None:
            wait = min(wait, self._say_something(now, self.comment))
        self._timer = self._loop.call_later(max(wait, 0.001), self._look)

    def _deadlines(self, now: float) -> list[tuple[float, Outcome]]:
        timeouts, exchange, relay = self._timeouts, self._exchange, self._relay
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
            if timeouts.progress is not None and relay.meter is not None:
                since = relay.meter.last_output or exchange.head_received or now
                found.append((max(since, exchange.head_received or 0.0) + timeouts.progress, Outcome.TIMEOUT_PROGRESS))
        return found

    def _say_something(self, now: float, interval: float) -> float:
        """A comment, where the stream has been silent for so long; returns when to look again."""
        relay = self._relay
        assert relay is not None
        silent = now - max(relay.last, relay.said)
        if silent < interval:
            return interval - silent
        if not relay.paused and relay.body_octets and relay.insert(b": keep-alive\n\n"):
            relay.said = now
        return interval
