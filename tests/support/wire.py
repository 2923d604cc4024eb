"""One socket, its bytes and its end, as they really were.

Bare non-blocking sockets rather than asyncio's streams: a stream drops bytes that came before a reset, and cannot say
whether the peer ended by FIN or by RST. TLS runs over memory buffers, so that close_notify is ours to send or not.

`eager`: read whatever comes at once (a server, which is to see at what time its peer left); else only when asked to
read (a client, whose not reading is the point of the test).
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import struct
import time
from typing import Literal

ORDINARY = 5.0  # seconds that anything ordinary may take, on a busy machine too


class Closed(Exception):
    """The connection ended where more was expected. Holds what had come since the last whole message."""


class Wire:
    def __init__(self, sock: socket.socket, *, eager: bool) -> None:
        sock.setblocking(False)
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock, self.eager = sock, eager
        self.opened_at = time.monotonic()
        # what came
        self.keep_log = True  # False: count only; for tests of hundreds of megabytes
        self.received = bytearray()
        self.received_bytes = 0
        self.reads: list[tuple[float, bytes]] = []
        self.pending = bytearray()  # received, and not yet taken by a reader of messages
        # the peer's end
        self.ended: Literal["fin", "rst"] | None = None
        self.closed_at: float | None = None
        self.close_notify = False  # the peer's TLS said goodbye before its FIN
        # what we did
        self.sent_bytes = 0
        self.closed = False
        # how fast we read: bytes per second, None for at once
        self.rate: float | None = None
        self._tls: ssl.SSLObject | None = None
        self._secure = False
        self._loop = asyncio.get_running_loop()
        self._change = asyncio.Event()
        self._writable: asyncio.Future[None] | None = None
        self._watching = False
        if eager:
            self._watch(True)

    def __repr__(self) -> str:
        ours, peer = "closed" if self.closed else "open", self.ended or "open"
        return f"<{type(self).__name__} in={self.received_bytes} out={self.sent_bytes} ours={ours} peer={peer}>"

    # --- sending

    async def send(self, data: bytes) -> None:
        """All of `data`, in as few writes as the kernel takes. Raises ConnectionError when the peer is gone."""
        if self._tls is None:
            await self._send(data)
            return
        for at in range(0, len(data), 2**16):
            self._tls.write(data[at : at + 2**16])
            await self._flush()

    async def send_split(self, data: bytes, *, size: int = 1, gap: float = 0.0) -> None:
        """`data` in writes of `size` bytes, `gap` seconds apart; without a gap the peer still gets a turn."""
        for at in range(0, len(data), size):
            await self.send(data[at : at + size])
            await asyncio.sleep(gap)

    async def send_pieces(self, *pieces: bytes, gap: float = 0.0) -> None:
        for piece in pieces:
            await self.send(piece)
            await asyncio.sleep(gap)

    async def _send(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            if self.closed:
                raise ConnectionAbortedError("this side closed the connection")
            try:
                count = self.sock.send(view)
            except BlockingIOError:
                await self._wait_writable()
                continue
            except OSError as error:
                # this error is now taken from the socket: what lies unread would seem to end with a FIN
                self._absorb(reset=isinstance(error, ConnectionResetError))
                raise
            self.sent_bytes += count
            view = view[count:]

    async def _wait_writable(self) -> None:
        future = self._writable = self._loop.create_future()
        self._loop.add_writer(self.sock, self._on_writable)
        try:
            await future
        finally:
            if not self.closed:
                self._loop.remove_writer(self.sock)
            self._writable = None

    def _on_writable(self) -> None:
        if self._writable is not None and not self._writable.done():
            self._writable.set_result(None)

    # --- receiving

    async def more(self, timeout: float = ORDINARY) -> bool:
        """Wait for bytes beyond those in `pending`; False at the peer's end. Raises TimeoutError when neither comes."""
        if self.ended:
            return False
        if self.closed:
            raise ConnectionAbortedError("this side closed the connection")
        before = self.received_bytes
        if not self.eager:
            self._watch(True)
        try:
            async with asyncio.timeout(timeout):
                while self.received_bytes == before and not self.ended and not self.closed:
                    self._change.clear()
                    await self._change.wait()
        finally:
            if not self.eager:
                self._watch(False)
        got = self.received_bytes - before
        if got and self.rate:
            await asyncio.sleep(got / self.rate)
        return got > 0

    async def receive(self, timeout: float = ORDINARY) -> bytes:
        """The next bytes, b"" at the peer's end."""
        if not self.pending:
            await self.more(timeout)
        data = bytes(self.pending)
        self.pending.clear()
        return data

    async def receive_until(self, marker: bytes, timeout: float = ORDINARY) -> bytes:
        """Wait until `marker` stands in all that was received (nothing is taken from `pending`). Raises Closed."""
        async with asyncio.timeout(timeout):
            while marker not in self.received:
                if not await self.more(timeout):
                    raise Closed(bytes(self.received[-400:]))
        return bytes(self.received)

    async def wait_closed(self, timeout: float = ORDINARY) -> float:
        """Read on until the peer's end; returns when it was seen. Raises TimeoutError."""
        async with asyncio.timeout(timeout):
            while await self.more(timeout):
                pass
        if self.closed_at is None:
            raise ConnectionAbortedError("this side closed the connection first")
        return self.closed_at

    def pause(self) -> None:
        """Leave what comes in the kernel; the peer's end is not seen either until `resume`."""
        self._watch(False)

    def resume(self) -> None:
        self._watch(True)

    def _watch(self, on: bool) -> None:
        if self.closed or self.ended or on == self._watching:
            return
        self._watching = on
        if on:
            self._loop.add_reader(self.sock, self._on_readable)
        else:
            self._loop.remove_reader(self.sock)

    def _on_readable(self) -> None:
        size = 2**18 if self.rate is None else max(1, min(2**16, int(self.rate / 20)))
        try:
            data = self.sock.recv(size)
        except BlockingIOError:
            return
        except OSError:
            self._end("rst")
            return
        if data:
            self._take(data)
        else:
            self._end("fin")

    def _absorb(self, *, reset: bool) -> None:
        """Take what still lies in the kernel."""
        while not self.ended:
            try:
                data = self.sock.recv(2**18)
            except BlockingIOError:
                break
            except OSError:
                self._end("rst")
                return
            if data:
                self._take(data)
            else:
                self._end("rst" if reset else "fin")
        if reset:
            self._end("rst")

    def _take(self, data: bytes) -> None:
        if self._tls is not None:
            self._incoming.write(data)
            if self._secure:
                self._decrypt()
            self._change.set()
        else:
            self._deliver(data)

    def _deliver(self, data: bytes) -> None:
        self.received_bytes += len(data)
        if self.keep_log:
            self.received += data
            self.reads.append((time.monotonic(), data))
        self.pending += data
        self._change.set()

    def _end(self, how: Literal["fin", "rst"]) -> None:
        if not self.ended:
            self._watch(False)
            self.ended, self.closed_at = how, time.monotonic()
        self._change.set()

    # --- TLS

    async def start_tls(
        self, context: ssl.SSLContext, *, server_side: bool, hostname: str | None = None, timeout: float = ORDINARY
    ) -> None:
        """Raises ssl.SSLError, or ConnectionError when the peer leaves during the handshake."""
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=server_side, server_hostname=hostname)
        async with asyncio.timeout(timeout):
            while True:
                try:
                    self._tls.do_handshake()
                    break
                except ssl.SSLWantReadError:
                    await self._flush()
                    await self._handshake_bytes()
                except ssl.SSLError:
                    with contextlib.suppress(OSError):
                        await self._flush()  # the alert that tells the peer why
                    raise
            await self._flush()
        self._secure = True
        self._decrypt()

    async def _handshake_bytes(self) -> None:
        if self.ended:
            raise ConnectionResetError("the peer left during the TLS handshake")
        self._change.clear()
        if not self.eager:
            self._watch(True)
        try:
            await self._change.wait()
        finally:
            if not self.eager:
                self._watch(False)

    async def _flush(self) -> None:
        if data := self._outgoing.read():
            await self._send(data)

    def _decrypt(self) -> None:
        assert self._tls is not None
        while True:
            try:
                data = self._tls.read(2**18)
            except ssl.SSLWantReadError:
                return
            except ssl.SSLZeroReturnError:
                data = b""
            if not data:
                self.close_notify = True
                return
            self._deliver(data)

    # --- our own end

    def half_close(self) -> None:
        """FIN, and go on reading."""
        self.sock.shutdown(socket.SHUT_WR)

    def fin(self, *, notify: bool = True) -> None:
        """Close in order. `notify`: with TLS, say goodbye first (a peer that dies does not)."""
        if self.closed:
            return
        if self._tls is not None and self._secure and notify:
            with contextlib.suppress(ssl.SSLError):
                self._tls.unwrap()
            with contextlib.suppress(OSError):
                self.sock.send(self._outgoing.read())
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_WR)
        self._absorb(reset=False)  # a close over unread bytes would be a reset
        self._close()

    def reset(self) -> None:
        """A hard end: RST, and what was not yet sent is lost."""
        if self.closed:
            return
        with contextlib.suppress(OSError):
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._close()

    def _close(self) -> None:
        self._watch(False)
        self.closed = True
        if self._writable is not None:
            self._loop.remove_writer(self.sock)
            self._on_writable()
        self.sock.close()
        self._change.set()
