"""A WebSocket, relayed: octets pass both ways as they come, at the pace of the slower side.

Frames are between the client and the backend: pings are answered, limits are kept and close codes are chosen by the two
ends, so that nothing here can misunderstand them. What is the gateway's business is that neither side outlives the
other, that a slow side holds back the other one, and that a silent tunnel ends.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from gateway.core.exchange import Exchange, Observer
from gateway.core.outcome import Outcome
from gateway.errors import Ended
from gateway.net.watch import Timeouts

if TYPE_CHECKING:
    from gateway.net.downstream import Downstream
    from gateway.net.upstream import Connection


class Tunnel:
    def __init__(self, exchange: Exchange, client: Downstream, connection: Connection, observer: Observer, timeouts: Timeouts):
        self.exchange, self.client, self.connection, self.observer = exchange, client, connection, observer
        self._timeouts = timeouts
        self.body_octets = 0
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._last = time.monotonic()
        self.paused = False

    async def run(self) -> None:
        """Pass everything until one side ends. Raises Ended."""
        client, connection = self.client, self.connection
        pending = connection.pending
        connection.hand_over(self)
        high = client.buffer_limit
        connection.transport.set_write_buffer_limits(high=high, low=high // 4)
        client.become_tunnel(self)
        if pending:
            self.received(pending, time.monotonic())
        if connection.lost:
            self.connection_lost(None)
        timer = asyncio.get_running_loop().call_later(self._timeouts.idle, self._look)
        self._timer = timer
        try:
            await self.done
            await client.flushed()
        finally:
            self._timer.cancel()
            client.end_tunnel()

    def _look(self) -> None:
        now = time.monotonic()
        silent = now - self._last
        if silent >= self._timeouts.idle:
            self.fail(
                Ended(
                    Outcome.CLIENT_STALLED if self.paused else Outcome.TIMEOUT_IDLE,
                    "the WebSocket was silent (timeouts.idle)",
                )
            )
        else:
            self._timer = asyncio.get_running_loop().call_later(self._timeouts.idle - silent, self._look)

    # from the backend

    def received(self, data: bytes, now: float) -> None:
        self._last = now
        self.body_octets += len(data)
        if self.client.transport is not None:
            self.client.transport.write(data)

    def connection_lost(self, exc: BaseException | None) -> None:
        if not self.done.done():
            self.done.set_result(None)

    def pause_writing(self) -> None:
        """The backend takes no more."""
        self.client.hold_reading()

    def resume_writing(self) -> None:
        self.client.release_reading()

    # from the client

    def from_client(self, data: bytes) -> None:
        self._last = time.monotonic()
        self.exchange.bytes_in += len(data)
        self.connection.write(data)

    def pause(self) -> None:
        self.paused = True
        self.exchange.paused_at = time.monotonic()
        self.observer.paused(self.exchange)
        if not self.connection.lost:
            self.connection.transport.pause_reading()

    def resume(self) -> None:
        self.paused = False
        now = self._last = time.monotonic()
        seconds = now - (self.exchange.paused_at or now)
        self.exchange.paused_at = None
        self.exchange.paused_seconds += seconds
        self.observer.resumed(self.exchange, seconds)
        if not self.connection.lost:
            self.connection.transport.resume_reading()

    def settle(self) -> None:
        """As a relay's: nothing is put off here."""

    def close(self) -> None:
        if self.paused:
            self.resume()

    def fail(self, failure: BaseException) -> None:
        if not self.done.done():
            self.done.set_exception(failure)
            self.connection.drop()
