"""Two ways for an answer to leave.

`Ordinary`: the head at once, one HTTP chunk an event, as vLLM has it, and one write for all that comes at one moment. `Raw`
is for answers whose bytes are to be cut, gathered, framed or broken in another way. Both write to the connection
themselves: aiohttp is left with nothing to write.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Callable
from email.utils import formatdate
from functools import lru_cache
from http import HTTPStatus
from typing import Final, Protocol

from aiohttp import web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.http import HttpVersion11

from gateway.net.sockets import reset_on_close
from gateway.synthetic.behaviour import Behaviour
from gateway.synthetic.segments import LAST, chunked, writes
from gateway.synthetic.sendlog import Entry

Fields = list[tuple[str, str]]
STREAM_TYPE: Final = "text/event-stream; charset=utf-8"
# Of a rate, so many pieces a second.
_TRICKLE: Final = 20
_OURS: Final = (("vary", "Origin"), ("x-synthetic", "1"))
_CHUNKED: Final = ("transfer-encoding", "chunked")
# How long a broken end waits for the peer to take what was written before it, in seconds.
_FLUSH: Final = 1.0


class Outlet(Protocol):
    """`due`: when the bytes were to leave. A client that left shows as CancelledError or ConnectionError."""

    async def open(self, fields: Fields, due: float) -> None:
        """Send the head of a stream. `fields` come besides vLLM's own."""
        ...

    async def send(self, data: bytes, due: float) -> None:
        """One event, or one comment."""
        ...

    async def end(self) -> web.StreamResponse:
        """The body's proper end. What it returns goes to aiohttp."""
        ...


class Ordinary:
    """For a client that knows chunks. What is written is written at once: a moment in the log is one on the wire."""

    def __init__(self, request: web.Request, entry: Entry):
        self._transport = _transport_of(request)
        self._protocol, self._writer, self._entry = request.protocol, request.writer, entry
        self._keep = request.keep_alive
        self._ended = False
        # uvloop gathers what is below the mark until its round is over.
        self._transport.set_write_buffer_limits(0)

    async def open(self, fields: Fields, due: float) -> None:
        closing = () if self._keep else (("connection", "close"),)
        self._write(render_head(200, [("content-type", STREAM_TYPE), *_OURS, *closing, _CHUNKED, *fields]))
        self._entry.add(due, time.monotonic(), 0)
        await self._writer.drain()

    async def send(self, data: bytes, due: float) -> None:
        self.put(b"%x\r\n%b\r\n" % (len(data), data), due, len(data))
        await self._writer.drain()

    async def end(self) -> web.StreamResponse:
        if not self._ended:
            self._write(LAST)
        return Written(keep=self._keep)

    def put(self, chunk: bytes, due: float, size: int) -> bool:
        """One event of `size` bytes, as an HTTP chunk. Whether the client takes more, for now."""
        self._write(chunk)
        self._entry.add(due, time.monotonic(), size)
        return not self._protocol.writing_paused

    def put_all(self, events: list[bytes], due: float, *, last: bool) -> bool:
        """Events of one moment in one write, and the body's end."""
        chunks = [b"%x\r\n%b\r\n" % (len(event), event) for event in events]
        if last:
            self._ended = True
            chunks.append(LAST)
        if chunks:
            self._write(b"".join(chunks))
        now = time.monotonic()
        for event in events:
            self._entry.add(due, now, len(event))
        return not self._protocol.writing_paused

    async def settled(self) -> None:
        """Until the client takes more. Raises ConnectionError if it never will."""
        await self._writer.drain()

    def _write(self, data: bytes) -> None:
        transport = self._transport
        if transport.is_closing():
            raise ConnectionResetError("the client has left")
        transport.write(data)


class Raw:
    """Bytes, as asked for. `length` is the body's, where it is to be framed by that."""

    def __init__(self, request: web.Request, behaviour: Behaviour, entry: Entry, length: int | None = None):
        self._request, self._behaviour, self._entry = request, behaviour, entry
        self._transport = _transport_of(request)
        self._writer: AbstractStreamWriter = request.writer
        self._length = length
        self._chunks = length is None and behaviour.framing == "chunked" and request.version >= HttpVersion11
        self._held = bytearray()
        self._events = 0
        self._sent = 0  # of the body, without its chunks
        self._rate = math.inf
        self.headless = False
        self.trailer = b""
        self.keep = (self._chunks or length is not None) and request.keep_alive
        # What a fault makes of the fields of the head.
        self.edit: Callable[[Fields], Fields] = lambda fields: fields

    async def open(self, fields: Fields, due: float) -> None:
        await self.head(200, [("content-type", STREAM_TYPE), *fields], due)

    async def head(self, status: int, fields: Fields, due: float) -> None:
        if self.headless:
            return
        framed = [*fields, *_OURS]
        if self._length is not None:
            framed.append(("content-length", str(self._length)))
        if not self.keep:
            framed.append(("connection", "close"))
        if self._chunks:
            framed.append(_CHUNKED)
        head = render_head(status, self.edit(framed))
        if self._behaviour.coalesce == 0:
            self._held += head
            return
        await self.write(head)
        self._entry.add(due, time.monotonic(), 0)

    async def send(self, data: bytes, due: float) -> None:
        size, most = self._behaviour.chunk, self._behaviour.coalesce
        self._held += chunked(data, size) if self._chunks else data
        self._events += 1
        self._sent += len(data)
        if most and self._events >= most:
            await self.flush()
        self._entry.add(due, time.monotonic(), len(data))

    async def end(self) -> web.StreamResponse:
        if self._chunks:
            self._held += b"0\r\n%b\r\n" % self.trailer if self.trailer else LAST
        await self.flush()
        return self.done()

    def frame_by(self, length: int | None) -> None:
        """A body of that length, or one that ends with the connection."""
        self._length, self._chunks = length, False
        self.keep = self.keep and length is not None

    def unframed(self) -> None:
        """From here on bytes go as they are, and the connection ends with them."""
        self._chunks, self.keep = False, False

    def done(self) -> web.StreamResponse:
        """For aiohttp: an answer that was written already. One that is shorter than it said takes the connection with it."""
        return Written(keep=self.keep and self._length in (None, self._sent))

    async def flush(self) -> None:
        data, self._events = bytes(self._held), 0
        self._held.clear()
        await self.write(data)

    async def write(self, data: bytes) -> None:
        """Bytes as they are, in the pieces asked for."""
        split, gap = self._behaviour.split, self._behaviour.gap
        if self._rate < math.inf:
            split, gap = max(1, int(self._rate / _TRICKLE)), 0.0
        if split == "none":
            await self._put(data)
            return
        due = time.monotonic()
        for piece in writes(data, split):
            await self._put(piece)
            due += len(piece) / self._rate
            # A gap is one between any two writes; a rate is kept over all of them.
            await asyncio.sleep(gap if self._rate == math.inf else max(0.0, due - time.monotonic()))

    def slow_down(self, rate: float) -> None:
        self._rate = rate

    async def reset(self) -> web.StreamResponse:
        """The connection's end by RST, once what was sent before it is out."""
        await self._flushed()
        reset_on_close(self._transport.get_extra_info("socket"))
        self._transport.abort()
        return Written(keep=False)

    async def close(self) -> web.StreamResponse:
        """Its end by FIN, whatever is owed."""
        await self.flush()
        self._transport.close()
        return Written(keep=False)

    async def _flushed(self) -> None:
        await self.flush()
        self._transport.set_write_buffer_limits(0)  # so that draining is done once nothing is left
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_FLUSH):
                await self._writer.drain()

    async def _put(self, data: bytes) -> None:
        if self._transport.is_closing():
            raise ConnectionResetError("the client has left")
        self._transport.write(data)
        await self._writer.drain()


class Written(web.StreamResponse):
    """An answer of which aiohttp has nothing left to write."""

    def __init__(self, *, keep: bool):
        super().__init__()
        self._keep_alive = keep

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter | None:
        return None

    async def write_eof(self, data: bytes = b"") -> None:
        return


def _transport_of(request: web.Request) -> asyncio.Transport:
    if request.transport is None:
        raise ConnectionResetError("the client has left")
    return request.transport


@lru_cache(maxsize=1)
def _date(second: int) -> str:
    return formatdate(second, usegmt=True)


def render_head(status: int, fields: Fields) -> bytes:
    """As uvicorn writes it: lower-case names, date and server first."""
    phrase = HTTPStatus(status).phrase if status in HTTPStatus._value2member_map_ else ""
    ours = [("date", _date(int(time.time()))), ("server", "uvicorn"), *fields]
    lines = [f"HTTP/1.1 {status} {phrase}", *(f"{name}: {value}" for name, value in ours)]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1", "replace")
