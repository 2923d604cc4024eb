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
from gateway.core.outcome import Outcome, Phase
from gateway.errors import Ended

if TYPE_CHECKING:
    from gateway.net.downstream import Downstream
    from gateway.net.upstream import Connection


class Tunnel:
    def __init__(self, exchange: Exchange, client: Downstream, connection: Connection, observer: Observer):
        self.exchange, self.client, self.connection, self.observer = exchange, client, connection, observer
        self.body_octets = 0
        self.done: asyncio.Future[None] = client.loop.create_future()
        self.last = time.monotonic()  # when either side last sent anything
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
        try:
            await self.done
            self.exchange.phase = Phase.DONE
            client.watch_taking(time.monotonic())
            await client.flushed()
        finally:
            client.end_tunnel()

    # from the backend

    def received(self, data: bytes, now: float) -> None:
        self.last = now
        self.body_octets += len(data)
        if self.client.transport is not None:
            self.client.transport.write(data)

    def connection_lost(self, exc: BaseException | None) -> None:
        if self.done.done():
            return
        if exc is None:
            self.done.set_result(None)
        else:
            self.done.set_exception(Ended(Outcome.UPSTREAM_RESET, "the backend broke off the WebSocket"))

    def pause_writing(self) -> None:
        """The backend takes no more."""
        self.client.hold_reading()

    def resume_writing(self) -> None:
        self.client.release_reading()

    # from the client

    def from_client(self, data: bytes) -> None:
        self.last = time.monotonic()
        self.exchange.bytes_in += len(data)
        self.connection.write(data)

    def pause(self) -> None:
        self.paused = True
        self.exchange.paused_at = time.monotonic()
        self.client.watch_taking(self.exchange.paused_at)
        self.observer.paused(self.exchange)
        if not self.connection.lost:
            self.connection.transport.pause_reading()

    def resume(self) -> None:
        self.paused = False
        now = self.last = time.monotonic()
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
