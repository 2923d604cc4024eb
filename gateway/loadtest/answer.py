"""One response, read as it comes: the tester's share of what is done for each event.

The response's octets come straight from the connection's read with that read's one timestamp (`net.upstream`), head and
body alike, and no coroutine runs for them. What an output event is, how many tokens there are and how the stream ended is
the gateway's own meter's word (`core.meter`); kept here beside it is the time of each event, in the order of the stream.
"""

from __future__ import annotations

import asyncio
import time

from gateway.core.dialects import Dialect
from gateway.core.framing import BodyReader, CloseReader, reader_of
from gateway.core.head import Malformed, ResponseHead, parse_response
from gateway.core.headers import keeps_alive
from gateway.core.meter import Meter
from gateway.core.outcome import Outcome
from gateway.net.upstream import HEAD_MOST, Connection

KEPT_MOST = 65536  # octets of an answer that is no stream, for the text of its error
_SHOWN_MOST = 300  # of them in an error's text


class Answer:
    """Receives one response (`net.upstream.Receiver`). `done` is set, never to an exception, once `outcome` is known.

    `times`: when each output event came. `ended`: when the terminal event came, or else when the outcome was decided.
    """

    __slots__ = (
        "_connection", "_dialect", "_head_octets", "_keep", "_reader", "_terminal", "body", "clean", "done", "ended", "error",
        "first_byte", "head", "headed", "meter", "outcome", "times",
    )  # fmt: skip

    def __init__(self, connection: Connection, dialect: Dialect, loop: asyncio.AbstractEventLoop, keep: bool = False):
        self._connection, self._dialect, self._keep = connection, dialect, keep
        self.done: asyncio.Future[None] = loop.create_future()
        self.head: ResponseHead | None = None
        self.headed: float | None = None
        self.first_byte: float | None = None
        self.meter: Meter | None = None  # of a 2xx response only
        self.times: list[float] = []
        self.body = bytearray()  # of what is no stream, up to KEPT_MOST; all of a stream's only if `keep`
        self.outcome = Outcome.INTERNAL
        self.error = ""
        self.ended = 0.0  # not yet
        self.clean = False  # the connection may serve another request
        self._reader: BodyReader | None = None
        self._head_octets = b""
        self._terminal: float | None = None

    def received(self, data: bytes, now: float) -> None:
        if self._reader is not None:
            self._body(data, now)
        elif not self.done.done():
            self._begin(data, now)

    def _begin(self, data: bytes, now: float) -> None:
        """Octets up to the end of the head; interim (1xx) heads are skipped."""
        rest = self._head_octets + data
        while True:
            end = rest.find(b"\r\n\r\n") + 4
            if end < 4 or end > HEAD_MOST:
                self._head_octets = rest
                if b"HTTP/1.".startswith(rest[:7]) and len(rest) > HEAD_MOST:
                    self._end(now, Outcome.UPSTREAM_RESET, f"the response's head has more than {HEAD_MOST} octets")
                elif not b"HTTP/1.".startswith(rest[:7]):
                    self._end(now, Outcome.UPSTREAM_RESET, "what the endpoint answered is no HTTP/1.1")
                return
            try:
                head = parse_response(rest[:end], b"POST")
            except Malformed as error:
                self._end(now, Outcome.UPSTREAM_RESET, f"the response's head is malformed: {error}")
                return
            rest = rest[end:]
            if head.status >= 200:
                break
        self.head, self.headed = head, now
        self._reader = reader = reader_of(head)
        if 200 <= head.status < 300 and b"content-encoding" not in head.named:
            whole = head.named.get(b"content-type", b"").lower().startswith(b"application/json")
            self.meter = Meter(self._dialect, (), streamed=not whole)
        if rest or reader.done:
            self._body(rest, now)

    def _body(self, data: bytes, now: float) -> None:
        reader, meter = self._reader, self.meter
        assert reader is not None
        if self.done.done():  # octets behind the response's end
            self.clean = False
            return
        pieces = reader.feed(data)
        if self.first_byte is None and pieces:
            self.first_byte = now
        for piece in pieces:
            if meter is not None and meter.streamed:
                self._see(meter, piece, now)
                if self._keep:
                    self.body += piece
            else:
                if len(self.body) < KEPT_MOST:
                    self.body += piece
                if meter is not None:
                    meter.feed(piece, now)
        if reader.done:
            self._complete(now)
        elif reader.failure is not None:
            self._end(now, Outcome.UPSTREAM_RESET, f"the response's body is malformed: {reader.failure}")

    def _see(self, meter: Meter, piece: bytes, now: float) -> None:
        """Show a piece to the meter, and write down when its output events came."""
        if not meter.at_boundary and piece[0] in b"\r\n":
            # The blank line of an event whose data an earlier read had brought: that event is as old as that read.
            begin = len(piece) - len(piece.lstrip(b"\r\n"))
            meter.feed(piece[:begin], now)
            self._note(meter)
            piece = piece[begin:]
        meter.feed(piece, now)
        new = meter.events - len(self.times)
        if new == 1:
            self.times.append(meter.last_output)  # type: ignore[arg-type]  # there is one
        elif new:
            self.times.extend([now] * new)
        if meter.terminal and self._terminal is None:
            self._terminal = now

    def _note(self, meter: Meter) -> None:
        last = meter.last_output
        if last is not None:
            self.times.extend([last] * (meter.events - len(self.times)))

    def _complete(self, now: float) -> None:
        """The body came to the end that its framing announced."""
        head, reader, meter = self.head, self._reader, self.meter
        assert head is not None and reader is not None
        self.clean = not reader.extra and keeps_alive(head)
        if not 200 <= head.status < 300:
            said = bytes(self.body[:_SHOWN_MOST]).decode("utf-8", "replace").strip()
            reason = head.reason.decode("latin-1")
            self._end(now, Outcome.UPSTREAM_STATUS, " ".join(filter(None, (f"status {head.status}", reason, said))))
        elif meter is None:
            self._end(now, Outcome.COMPLETE, "its events could not be read: the response has a Content-Encoding")
        else:
            meter.end()
            self._note(meter)
            if meter.terminal and self._terminal is None:
                self._terminal = now
            outcome = meter.verdict(True)
            self._end(now, outcome, _why(outcome, meter))

    def connection_lost(self, exc: Exception | None) -> None:
        self.clean = False
        if self.done.done():
            return
        now = time.monotonic()
        if self._reader is None:
            self._end(now, Outcome.UPSTREAM_RESET, "the endpoint closed the connection before it answered")
        elif exc is None and self._connection.ended_well and type(self._reader) is CloseReader:
            self._complete(now)
        elif self.meter is not None and self.meter.error is not None:
            self._end(now, Outcome.STREAM_ERROR, _why(Outcome.STREAM_ERROR, self.meter))
        else:
            self._end(now, Outcome.UPSTREAM_RESET, "the endpoint closed the connection within the response")

    def _end(self, now: float, outcome: Outcome, error: str) -> None:
        self.outcome, self.error = outcome, error
        self.ended = now if self._terminal is None else self._terminal
        if not self.done.done():
            self.done.set_result(None)
        if outcome is Outcome.UPSTREAM_RESET:
            self.clean = False

    def settle(self) -> None:
        """Nothing is put off."""

    def pause_writing(self) -> None:
        """A request is written whole."""

    def resume_writing(self) -> None: ...


def _why(outcome: Outcome, meter: Meter) -> str:
    if outcome is Outcome.STREAM_ERROR:
        if meter.error is not None:
            return f"an error event in the stream: {meter.error}"
        reason = "none" if meter.finish_reason is None else meter.finish_reason
        return f"the stream ended with the finish reason: {reason}"
    if outcome is Outcome.UPSTREAM_TRUNCATED:
        return "the stream ended without its terminal event"
    if outcome is Outcome.EMPTY:
        return "the stream ended without any output"
    if meter.opaque:
        return "its events could not be read: one has more than 1 MiB"
    return ""
