"""The beginning of a decode engine's answer, for which a disaggregated exchange waits before anything passes.

An engine sends its head before it has fetched the KV, and what goes wrong in between comes inside a 200. With the first octet
of the body it is certain that KV has arrived, or what has happened instead.
"""

from __future__ import annotations

from gateway.core.dialects import Dialect
from gateway.core.disagg.signs import silent
from gateway.core.head import ResponseHead
from gateway.core.headers import is_event_stream
from gateway.core.sse import Event
from gateway.net.hold import Hold
from gateway.net.upstream import PENDING_MOST, Connection


class Opening(Hold):
    """Waits for a body's first octet, or where it is a stream for its first whole event, whose data is `data`. What has come
    stays with the connection as pending."""

    def __init__(self, connection: Connection, head: ResponseHead, dialect: Dialect):
        self.data = b""
        self._events = is_event_stream(head)
        super().__init__(connection, head, dialect)

    def received(self, data: bytes, now: float) -> None:
        if self._events:
            super().received(data, now)
            return
        self._connection.pending += data
        if self.done.done():
            return
        if self._reader.feed(data) or self._reader.done or len(self._connection.pending) >= PENDING_MOST:
            self._begun(None)
        elif self._reader.failure is not None:
            self._broke(f"sent a malformed body: {self._reader.failure}", "upstream_malformed")

    def _says_something(self, event: Event) -> bool:
        self.data = event.data
        self._begun(None)
        return True


class Probe(Opening):
    """The beginning of an answer to a probe (`core.disagg.base.Order.PROBE`): up to the first event that says something, or a
    whole unstreamed answer. One too long to wait here is an answer."""

    def __init__(self, connection: Connection, head: ResponseHead, dialect: Dialect):
        self._body: list[bytes] = []
        super().__init__(connection, head, dialect)

    def received(self, data: bytes, now: float) -> None:
        if self._events:
            Hold.received(self, data, now)
            return
        self._connection.pending += data
        if self.done.done():
            return
        self._body += self._reader.feed(data)
        if self._reader.failure is not None:
            self._broke(f"sent a malformed body: {self._reader.failure}", "upstream_malformed")
        elif self._reader.done:
            self.data = b"".join(self._body)
            self._begun(None)
        elif len(self._connection.pending) >= PENDING_MOST:
            self._begun(None)

    def _says_something(self, event: Event) -> bool:
        self.data = event.data
        return not silent(event.data) and Hold._says_something(self, event)
