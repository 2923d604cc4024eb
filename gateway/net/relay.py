"""The data path: a backend's response body on its way to one client.

From the commit on no coroutine runs for what passes. The upstream transport calls `data_received`; that takes one
timestamp, writes to the client's transport, and shows the octets to the meter. The exchange's coroutine awaits `done`.

Back-pressure is two calls: the client's transport says `pause_writing` when more than its high watermark is buffered, and
the upstream is not read until it says `resume_writing`. What is held for one client is therefore at most the high
watermark and one read, which the upstream's receive buffer bounds.

The usual event, one plain chunk that differs from the one before it only in its text, is recognised by comparing its
ends, and costs no parsing. Everything else takes the careful path through a body reader, the meter's scanner, and where
an option asks for it an edit of the stream.
"""

from __future__ import annotations

import asyncio
import re
import time
from typing import TYPE_CHECKING, Protocol

from gateway.core import framing
from gateway.core.exchange import Exchange, Observer
from gateway.core.framing import BodyReader, ChunkedReader, CloseReader
from gateway.core.head import Framing
from gateway.core.meter import Meter
from gateway.core.outcome import Outcome, Phase
from gateway.errors import Ended

if TYPE_CHECKING:
    from gateway.net.downstream import Downstream
    from gateway.net.upstream import Connection

_SIZES = framing.SIZES
_odd = re.compile(rb'["\r\n]').search  # what cannot stand within one JSON string on one line


class Edit(Protocol):
    """Changes a stream's payload. What it holds back comes with a later piece, or at the end."""

    def feed(self, pieces: list[bytes]) -> list[bytes]: ...

    def end(self) -> list[bytes]: ...


class Relay(asyncio.Protocol):
    __slots__ = (
        "_attached", "_edit", "_learnt", "_least", "_output", "_paused", "_quick", "_saw_end", "_shape", "_write", "body_octets", "client", "connection",
        "done", "exchange", "framing", "last", "meter", "observer", "reader", "said", "taken_at", "taken_left",
    )  # fmt: skip

    def __init__(
        self,
        exchange: Exchange,
        client: Downstream,
        connection: Connection,
        reader: BodyReader,
        to_client: Framing,
        meter: Meter | None,
        observer: Observer,
        edit: Edit | None = None,
    ):
        self.exchange, self.client, self.connection, self.reader = exchange, client, connection, reader
        self.framing, self.meter, self.observer, self._edit = to_client, meter, observer, edit
        assert client.transport is not None
        self._write = client.transport.write
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.body_octets = 0
        self.last = time.monotonic()  # when the upstream last sent anything
        self.said = 0.0  # when a comment of ours was last put in
        self._attached = True  # the connection is ours
        # the usual event: its ends (with its chunk's), the least length of its text, and whoever counts it
        self._quick = False  # the next read may be recognised by its shape
        self._shape: tuple[bytes, bytes] = (b"", b"")
        self._learnt: tuple[bytes, bytes] | None = None
        self._least = 0
        self._output = meter.output if meter is not None else None
        self._saw_end = False
        self._paused = False
        self.taken_at, self.taken_left = 0.0, 0  # the client's progress, while it holds us back

    # the upstream's side ----------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        now = time.monotonic()
        if self._quick:
            line_end = data.find(b"\r\n", 0, 10)
            size = _SIZES.get(data[:line_end])
            total = len(data)
            if size is not None and line_end + size + 4 == total:
                prefix, suffix = self._shape
                begin, end = line_end + 2 + len(prefix), total - len(suffix)
                if (
                    begin + self._least <= end
                    and data.startswith(prefix, line_end + 2)
                    and data.endswith(suffix)
                    and _odd(data, begin, end) is None
                    and data[end - 1] != 0x5C  # a backslash: the quote behind it would be one of the text
                ):
                    self._write(data)
                    self._output(now)
                    self.body_octets += size
                    self.last = now
                    return
        self._careful(data, now)

    def _careful(self, data: bytes, now: float) -> None:
        if self.done.done():
            return
        self.last = now
        reader, meter, exchange = self.reader, self.meter, self.exchange
        pieces = reader.feed(data)
        if pieces and exchange.first_byte is None:
            exchange.first_byte = now
        if self._edit is not None:
            out = b"".join(framing.frame(p) for p in self._edit.feed(pieces) if p)
        elif self.framing is Framing.CLOSE or type(reader) is CloseReader and self.framing is not Framing.CHUNKED:
            out = b"".join(pieces)
        else:
            out = reader.out
        if out:
            if reader.done and self._edit is not None and self.framing is Framing.CHUNKED:
                out = self._end_edit(out)
            self._write(out)
        elif reader.done and self._edit is not None:
            self._write(self._end_edit(b""))
        for piece in pieces:
            self.body_octets += len(piece)
            if meter is not None:
                meter.feed(piece, now)
        if meter is not None:
            self._learn(meter)
        if reader.failure is not None:
            self.fail(Ended(Outcome.UPSTREAM_RESET, f"the backend's body is malformed: {reader.failure}", code="upstream_malformed"))
        elif reader.done:
            self._finish()

    def _end_edit(self, out: bytes) -> bytes:
        assert self._edit is not None
        return out + b"".join(framing.frame(p) for p in self._edit.end() if p) + framing.LAST_CHUNK

    def _learn(self, meter: Meter) -> None:
        exchange = self.exchange
        if exchange.first_output_written is None and meter.first_output is not None:
            exchange.first_output_written = time.monotonic()
            exchange.phase = Phase.STREAM
        shape = meter.shape
        self._quick = (
            shape is not None
            and self._edit is None
            and type(self.reader) is ChunkedReader
            and self.reader.between
            and self.framing is Framing.CHUNKED
        )
        if shape is not None and shape is not self._learnt:
            self._learnt, self._least = shape, meter.least
            self._shape = (shape[0], shape[1] + b"\r\n")

    def eof_received(self) -> None:
        self._saw_end = True

    def connection_lost(self, exc: Exception | None) -> None:
        self.connection.connection_lost(exc)
        if self.done.done():
            return
        if exc is None and self._saw_end and type(self.reader) is CloseReader:
            self._close_delimited_end()
        else:
            self.fail(Ended(Outcome.UPSTREAM_RESET, "the backend's connection ended within the response"))

    def nothing_comes(self) -> None:
        """The response has no body."""
        self._finish()

    def already_ended(self) -> None:
        """The upstream's end had come before this relay took over."""
        self._saw_end = self.connection.ended_well
        self.connection_lost(None)

    def _close_delimited_end(self) -> None:
        self.reader.done = True
        if self.framing is Framing.CHUNKED:
            self._write(self._end_edit(b"") if self._edit is not None else framing.LAST_CHUNK)
        self._finish()

    def _finish(self) -> None:
        if self.meter is not None:
            self.meter.end()
            if self.exchange.first_output_written is None and self.meter.first_output is not None:
                self.exchange.first_output_written = time.monotonic()
        if not self.done.done():
            self.done.set_result(None)

    def fail(self, failure: BaseException) -> None:
        """End the relay: nothing more passes."""
        if not self.done.done():
            self.done.set_exception(failure)
            self.connection.drop()

    # the client's side ------------------------------------------------------------------------------------------------

    def pause(self) -> None:
        if self._paused:
            return
        self._paused = True
        self.exchange.paused_at = self.taken_at = time.monotonic()
        self.taken_left = self.client.outstanding
        self.observer.paused(self.exchange)
        if not self.done.done() and not self.connection.lost:
            self.connection.transport.pause_reading()

    def resume(self) -> None:
        if not self._paused:
            return
        self._paused = False
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
            self._attached = False
            if self._paused and not self.connection.lost:
                self.connection.transport.resume_reading()

    def close(self) -> None:
        """The exchange is over, however it went."""
        self.let_go()
        if self._paused:
            self.resume()

    @property
    def paused(self) -> bool:
        return self._paused

    def taken_since(self, now: float) -> float:
        """When the client last took anything, as far as can be told at `now`."""
        left = self.client.outstanding
        if left != self.taken_left:
            self.taken_at, self.taken_left = now, left
        return self.taken_at

    def insert(self, octets: bytes) -> bool:
        """Put an event or a comment of our own between two of the upstream's, if it is between two just now."""
        if self.framing is not Framing.CHUNKED or not self.reader.at_boundary or self.meter is None or not self.meter.at_boundary:
            return False
        self._write(framing.frame(octets))
        return True
