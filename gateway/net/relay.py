"""The data path: a backend's response body on its way to one client.

From the commit on no coroutine runs for what passes. The connection takes one timestamp and calls `received`; that writes
to the client's transport, and shows the octets to the meter. The exchange's coroutine awaits `done`.

Back-pressure is two calls: the client's transport says `pause_writing` when more than its high watermark is buffered, and
the upstream is not read until it says `resume_writing`. What is held for one client is therefore at most the high
watermark and one read, which the upstream's receive buffer bounds.

The usual event passes by itself (`net.lane`), and the meter is shown some dozens of them together (`settle`). Everything
else takes the careful path through a body reader, the meter's scanner, and where an option asks for it an edit of the
stream.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from gateway.core import framing
from gateway.core.edits import Editor
from gateway.core.exchange import Exchange, Observer
from gateway.core.framing import BodyReader, ChunkedReader, CloseReader, LengthReader
from gateway.core.head import CHUNKED, Framing
from gateway.core.meter import Meter
from gateway.core.outcome import Outcome, Phase
from gateway.core.seam import Seam
from gateway.errors import Ended
from gateway.net.coalesce import Coalescer

if TYPE_CHECKING:
    from gateway.net.downstream import Downstream
    from gateway.net.upstream import Connection

_clock = time.monotonic
_STREAM = Phase.STREAM
_QUOTE, _BACKSLASH, _LF, _CR = b'"\\\n\r'
_BETWEEN, _AT_END = b"\0", b"\\\0"  # what parts texts that are looked at together; a backslash at the end of one


class Relay:
    __slots__ = (
        "_as_it_comes", "_attached", "_before", "_begun", "_edit", "_joined", "_learnt", "_write", "began", "body_octets",
        "client", "connection", "done", "event_stream", "exchange", "framing", "last", "meter", "observer", "paused", "reader",
        "said",
    )  # fmt: skip

    def __init__(
        self,
        exchange: Exchange,
        client: Downstream,
        connection: Connection,
        reader: BodyReader | Seam,
        to_client: Framing,
        meter: Meter | None,
        observer: Observer,
        now: float,
        event_stream: bool = False,
        edit: Editor | None = None,
        coalesce: tuple[float, int] | None = None,
        begun: Callable[[float], None] | None = None,
    ):
        self.exchange, self.client, self.connection, self.reader = exchange, client, connection, reader
        self.framing, self.meter, self.observer, self._edit = to_client, meter, observer, edit
        assert client.transport is not None
        self._write: Callable[[bytes], None] = client.transport.write
        self._joined: Coalescer | None = None
        if coalesce is not None:
            self._write = self._joined = Coalescer(client.transport.write, *coalesce)
        self.done: asyncio.Future[None] = client.loop.create_future()
        self.body_octets = 0
        self.began = self.last = now  # when the upstream's head came, and when it last sent anything
        self._begun = begun  # to be told of the body's first octets
        self.said = 0.0  # when a comment of ours was last put in
        # the reader's own output is what the client gets: nothing is edited, and both sides have the same framing
        self._as_it_comes = edit is None and (to_client is CHUNKED or type(reader) is LengthReader)
        self.event_stream = event_stream  # by its Content-Type, so that an event or a comment may be put in
        self._attached = True  # the connection is ours
        self._before = b""  # our head, to be written with the body's first octets
        self._learnt: tuple[bytes, bytes] | None = None  # the shape of usual events
        self.paused = False

    # the upstream's side ----------------------------------------------------------------------------------------------

    def received(self, data: bytes, now: float) -> None:
        if self.connection.times:
            self.settle()
        self._careful(data, now)

    def settle(self) -> None:
        """Show the meter the usual events that have passed since it was last shown any."""
        lane, meter, shape = self.connection, self.meter, self._learnt
        if not lane.times or not self._attached:
            return
        assert meter is not None and shape is not None
        texts, times = lane.take_passed()
        self.last = max(self.last, times[-1])  # it may have been resumed since
        joined = _BETWEEN.join(texts)
        self.body_octets += len(joined) - (len(texts) - 1) + len(texts) * (len(shape[0]) + len(shape[1]))
        odd = _BACKSLASH in joined and (_AT_END in joined or joined.endswith(b"\\"))
        if odd or _QUOTE in joined or _LF in joined or _CR in joined:
            self._settle_one_by_one(meter, shape, texts, times)
        else:
            meter.outputs(times)

    def _settle_one_by_one(self, meter: Meter, shape: tuple[bytes, bytes], texts: list[bytes], times: list[float]) -> None:
        """A text with a quote or a line end in it, or a backslash at its end, may be more than a text."""
        seen = 0  # of them, by the meter
        for place, text in enumerate(texts):
            odd = _QUOTE in text or _LF in text or _CR in text or text.endswith(b"\\")
            if odd or meter.shape is not shape:
                if seen < place:
                    meter.outputs(times[seen:place])
                meter.feed(shape[0] + text + shape[1], times[place])
                seen = place + 1
        if seen < len(texts):
            meter.outputs(times[seen:])
        if meter.shape is not shape:
            self._unlearn()

    def _expect(self, data: bytes) -> None:
        """The next read of this length, if it is a usual event, can be told by its ends."""
        meter, size, lane = self.meter, len(data), self.connection
        assert meter is not None and meter.shape is not None
        begin = b"%x\r\n%b" % (size - data.find(b"\r\n") - 4, meter.shape[0])
        if len(begin) + len(lane.end) + meter.least <= size and data.startswith(begin) and data.endswith(lane.end):
            lane.expect(begin, size)

    def _careful(self, data: bytes, now: float) -> None:
        if self.done.done():  # octets behind the end: the connection is not clean
            self.reader.extra += data
            return
        self.last = now
        reader, meter, exchange = self.reader, self.meter, self.exchange
        pieces = reader.feed(data)
        if exchange.first_byte is None and pieces:
            exchange.first_byte = now
            if self._begun is not None:
                self._begun(now)
        out = reader.out if self._as_it_comes else self._encoded(pieces)
        if out:
            if self._before:
                out, self._before = self._before + out, b""
            self._write(out)
        for piece in pieces:
            self.body_octets += len(piece)
            if meter is not None:
                meter.feed(piece, now)
        if len(pieces) > 1 and self._learnt is not None:
            self.connection.joined(len(pieces), now)
        if reader.done:
            self._finish()
        elif reader.failure is not None:
            self.fail(
                Ended(
                    Outcome.UPSTREAM_RESET,
                    f"the backend's body is malformed: {reader.failure}",
                    code="upstream_malformed",
                )
            )
        elif meter is not None:
            self._learn(meter, data)

    def _encoded(self, pieces: list[bytes]) -> bytes:
        """The payload, edited where it is to be, in the framing of the client's side."""
        if self._edit is not None:
            pieces = self._edit.feed(pieces)
            if self.reader.done:
                pieces += self._edit.end()
        if self.framing is not CHUNKED:
            return b"".join(pieces)
        framed = b"".join([framing.frame(piece) for piece in pieces if piece])
        return framed + framing.LAST_CHUNK if self.reader.done else framed

    def _learn(self, meter: Meter, data: bytes) -> None:
        exchange = self.exchange
        if exchange.first_output_written is None and meter.first_output is not None:
            exchange.first_output_written = time.monotonic()
            exchange.phase = _STREAM
        shape = meter.shape
        reader = self.reader
        passes = type(reader) is ChunkedReader and reader.between and self._as_it_comes and self.framing is CHUNKED
        if shape is None or not passes:
            self._unlearn()
        else:
            if shape is not self._learnt:
                self._learnt = shape
                self.connection.open_lane(shape[1] + b"\r\n", self._write)
            self._expect(data)

    def connection_lost(self, exc: Exception | None) -> None:
        if self.done.done():
            return
        self.settle()
        if exc is None and self.connection.ended_well and type(self.reader) is CloseReader:
            self._close_delimited_end()
        else:
            self.fail(Ended(Outcome.UPSTREAM_RESET, "the backend's connection ended within the response"))

    def _unlearn(self) -> None:
        if self._learnt is not None:
            self._learnt = None
            self.connection.close_lane()

    def pause_writing(self) -> None:
        """The backend takes no more of an upload that is still under way: the upload's affair."""

    def resume_writing(self) -> None: ...

    def begin(self, head: bytes, pending: bytes) -> None:
        """Write our head, at once, and together with what has come of the body already."""
        if not pending:
            self._write(head)
            self._flush()
            if self.reader.done:  # there is no body
                self._finish()
            return
        self._before = head
        self._careful(pending, _clock())
        if self._before:  # nothing of it could pass yet
            self._write(self._before)
            self._before = b""
        self._flush()

    def already_ended(self) -> None:
        """The upstream's end had come before this relay took over."""
        self.connection_lost(None)

    def _close_delimited_end(self) -> None:
        self.reader.done = True
        if self.framing is CHUNKED:
            self._write(self._encoded([]) if self._edit is not None else framing.LAST_CHUNK)
        self._finish()

    def _finish(self) -> None:
        if self.meter is not None:
            self.meter.end()
            if self.exchange.first_output_written is None and self.meter.first_output is not None:
                self.exchange.first_output_written = time.monotonic()
        self._flush()
        self._unlearn()
        if not self.done.done():
            self.done.set_result(None)

    def fail(self, failure: BaseException) -> None:
        """End the relay: nothing more passes."""
        if not self.done.done():
            self.settle()
            self._flush()
            self._unlearn()
            self.done.set_exception(failure)
            self.connection.drop()

    # the client's side ------------------------------------------------------------------------------------------------

    def pause(self) -> None:
        if self.paused:
            return
        self.paused = True
        self.exchange.paused_at = time.monotonic()
        self.client.watch_taking(self.exchange.paused_at)
        self.observer.paused(self.exchange)
        if not self.done.done() and not self.connection.lost:
            self.connection.transport.pause_reading()

    def resume(self) -> None:
        if not self.paused:
            return
        self.paused = False
        exchange = self.exchange
        now = self.last = time.monotonic()  # silence that we ordered ourselves is not the upstream's
        seconds = now - exchange.paused_at if exchange.paused_at is not None else 0.0
        exchange.paused_at = None
        exchange.paused_seconds += seconds
        self.observer.resumed(exchange, seconds)
        if self._attached and not self.connection.lost:
            self.connection.transport.resume_reading()

    def let_go(self) -> None:
        """The connection is no longer ours: whatever the client does from now on, it is none of its business."""
        if self._attached:
            self.settle()  # of a client that left nothing else would; and soon the connection may be another relay's
            self._attached = False
            if self.paused and not self.connection.lost:
                self.connection.transport.resume_reading()

    def close(self) -> None:
        """The exchange is over, however it went."""
        self.let_go()
        if self.paused:
            self.resume()

    def insert(self, octets: bytes) -> bool:
        """Put an event or a comment of our own between two of the upstream's, if it is between two just now."""
        self.settle()
        if (
            not self.event_stream
            or self.framing is not CHUNKED
            or not self.reader.at_boundary
            or self.meter is None
            or not self.meter.at_boundary
        ):
            return False
        self._write(framing.frame(octets))
        self._flush()
        return True

    def _flush(self) -> None:
        if self._joined is not None:
            self._joined.flush()
