"""A leg: what an exchange has under way with one backend.

Nearly every exchange has one at a time, and is written on the call itself (`net.call.Call` is a leg). Where several are under
way at once (a hedge, a prefill beside its decode), the further ones are records of their own in `Call.others`, and whatever
ends the exchange ends them all.
"""

from __future__ import annotations

import asyncio

from gateway.core.backend import Lease
from gateway.core.exchange import Exchange
from gateway.core.head import ResponseHead
from gateway.net.fetch import Page
from gateway.net.hold import Hold
from gateway.net.promise import Promise
from gateway.net.upstream import Connection, ConnectionPool


class Leg:
    """Attributes stand at what the class says until they come. `exchange`: the record that the leg's marks are written on
    (backend, phase, times): the exchange's own, or for a further leg one aside (`beside`)."""

    lease: Lease | None = None
    connections: ConnectionPool | None = None  # of the leased backend, as it was when the lease was taken
    connection: Connection | None = None
    upload: asyncio.Task[None] | None = None
    hold: Hold | None = None  # of a stream that is held back until it says something
    reply: Promise[ResponseHead] | None = None  # of a request whose answer is read as a whole
    page: Page | None = None  # its body, once its head has come

    def __init__(self, exchange: Exchange):
        self.exchange = exchange

    @property
    def waiting(self) -> Hold | Connection | None:
        """What is to be told that nobody waits for it any more (`fail`). None also where what is waited for has come, and was
        not looked at yet: it came in time, and if its connection ended now, that would be taken for its backend's doing."""
        found = self.hold or self.connection
        return None if found is None or found.has_come else found

    def drop(self) -> None:
        """End whatever is under way with the backend, at once. The lease stays."""
        if self.upload is not None:
            self.upload.cancel()
        if self.connection is not None:
            self.connection.drop()
            self.connection = None

    def end(self) -> None:
        """Drop it, and give its lease back. May be called again."""
        self.drop()
        lease, self.lease = self.lease, None
        if lease is not None:
            lease.release()

    def become(self, other: Leg) -> None:
        """Take over all that `other` has, which is left with nothing. Its marks stay where they are."""
        self.lease, self.connections, self.connection = other.lease, other.connections, other.connection
        self.upload, self.hold = other.upload, other.hold
        other.lease = other.connections = other.connection = other.upload = other.hold = None


def beside(exchange: Exchange) -> Leg:
    """A further leg of the same exchange, with a record of its own for the marks."""
    return Leg(Exchange(exchange.request_id, exchange.client, exchange.method, exchange.path, exchange.accepted))
