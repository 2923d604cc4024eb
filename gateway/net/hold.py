"""Where the operator asks for it (`commit: first_event`), a stream is held back until it says something.

vLLM sends the head of a stream before it schedules the request, and the errors that it finds then come inside a 200. Held
back, such an error can still become a status, and a stream that breaks before its first event can be asked for elsewhere.

What says something is an output event, an end or an error; what comes before them (a role, `message_start`,
`response.created`, comments) is held as well, for at most as much as a connection takes in unread.
"""

from __future__ import annotations

from gateway.core.dialects import Dialect
from gateway.core.framing import CloseReader, reader_of
from gateway.core.head import ResponseHead
from gateway.core.sse import Event, Scanner
from gateway.errors import Refusal, UpstreamFailed
from gateway.net.promise import Promise
from gateway.net.upstream import PENDING_MOST, Connection


class Hold:
    """Receives the beginning of a stream (`net.upstream.Receiver`), which stays with the connection as pending.

    `done`: the octets of the error that it begins with, if it does; or UpstreamFailed, where it broke before it had begun.
    """

    def __init__(self, connection: Connection, head: ResponseHead, dialect: Dialect):
        self.done: Promise[bytes | None] = Promise()
        self._connection, self._reader, self._dialect = connection, reader_of(head), dialect
        self._scanner = Scanner()
        pending, connection.pending = connection.pending, b""
        connection.hand_over(self)
        self.received(pending, 0.0)
        if connection.lost:
            self.connection_lost(None)

    def received(self, data: bytes, now: float) -> None:
        self._connection.pending += data
        if self.done.done():
            return
        for piece in self._reader.feed(data):
            for event in self._scanner.feed(piece):
                if self._says_something(event):
                    return
        if self._reader.failure is not None:
            self._broke(f"sent a malformed body: {self._reader.failure}", "upstream_malformed")
        elif self._reader.done:
            self._broke("ended its stream before the first event")
        elif self._scanner.overflowed or len(self._connection.pending) >= PENDING_MOST:
            self._begun(None)

    def _says_something(self, event: Event) -> bool:
        reading = self._dialect.read(event)
        if reading.error is not None:
            self._begun(event.data)
        elif reading.output or reading.terminal or reading.finish_reason is not None:
            self._begun(None)
        return self.done.done()

    def _begun(self, error: bytes | None) -> None:
        self.done.set_result(error)
        self._connection.set_aside()  # until whoever waits has seen it

    def connection_lost(self, exc: Exception | None) -> None:
        if self.done.done():
            return
        if exc is None and self._connection.ended_well and type(self._reader) is CloseReader:
            self._broke("ended its stream before the first event")
        else:
            self._broke("closed the connection before the stream's first event")

    def _broke(self, what: str, code: str = "upstream_reset") -> None:
        # nothing has been generated that anybody has seen, and nothing goes on being generated
        self.done.set_exception(UpstreamFailed(code, f"the backend {self._connection.pool.origin.name} {what}", unsent=True))

    @property
    def has_come(self) -> bool:
        """It is known how the stream begins."""
        return self.done.done()

    def fail(self, failure: Refusal) -> None:
        """Wait no longer, for a reason of ours."""
        if not self.done.done():
            self.done.set_exception(failure)
        self._connection.drop()

    def settle(self) -> None:
        """Nothing is put off."""

    def pause_writing(self) -> None:
        """The backend takes no more of an upload that is still under way: the upload's affair."""

    def resume_writing(self) -> None: ...
