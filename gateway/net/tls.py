"""TLS with a backend, as a transport over a plain TCP connection.

asyncio's and uvloop's own lose the tail of a response (cases.md G026): a backend writes 2 MiB and ends TCP at once,
without close_notify, while we have paused reading for a slow client; on resumption they decrypt what they hold, the
relay pauses again in the midst of it, and they close with decrypted octets undelivered. Nor does asyncio tell
close_notify from a bare FIN, which anybody can forge; whether a body is complete hangs on it (G023).

Here an end is acted on once all that came before it has been delivered, however often the protocol pauses. close_notify
is eof_received() and connection_lost(None); FIN alone connection_lost(None); RST or broken TLS connection_lost(error).

Ciphertext stays in the incoming BIO until the protocol takes its plaintext, a record at a time, and TCP is not read
while the protocol has paused: no more is held than one read. OpenSSL is never told of TCP's end, so that its b"" means
close_notify and nothing else. One object is both the protocol of the TCP transport and the transport of ours.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import ssl
from typing import Any

from gateway.net import sockets

Loop = asyncio.AbstractEventLoop
RECORD = 16384  # octets of plaintext in one record at most; RFC 8446 section 5.1
FLUSH = 65536  # octets of ciphertext after which a long write is passed on
_CUT = "the connection ended within the TLS handshake"
_NOBODY = asyncio.Protocol()  # the protocol of what has ended, so that it holds no other object alive


async def open_tls(
    loop: Loop, sock: socket.socket, context: ssl.SSLContext, server_hostname: str, protocol: asyncio.Protocol
) -> TlsTransport:
    """Shake hands on a connected socket. Raises OSError, of which ssl.SSLError is one; then the socket is closed."""
    transport: TlsTransport | None = None
    try:
        context.options |= ssl.OP_NO_RENEGOTIATION  # in TLS 1.2 it could fall in the midst of a write
        transport = wrapped = TlsTransport(loop, context, server_hostname, protocol)
        transport.sock = sock
        await loop.create_connection(lambda: wrapped, sock=sock)
        if not transport._raw_open:  # closed already; uvloop leaves the descriptor with `sock`, to be closed once more
            sock.detach()
        await transport.opened
    except BaseException:
        if transport is not None:
            transport.abort()
        sock.close()
        raise
    return transport


class Quiet(sockets.Quiet):
    """As for a plain socket, and nothing has been read that is still to be delivered."""

    def __init__(self, sock: socket.socket, transport: TlsTransport):
        super().__init__(sock)
        self._incoming = transport.incoming

    def __call__(self) -> bool:
        return not self._incoming.pending and super().__call__()


class TlsTransport(asyncio.Transport, asyncio.Protocol):
    def __init__(self, loop: Loop, context: ssl.SSLContext, server_hostname: str, protocol: asyncio.Protocol):
        super().__init__()
        self._loop, self._protocol = loop, protocol
        self.incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self.incoming, self._outgoing, server_hostname=server_hostname)
        self.opened: asyncio.Future[None] = loop.create_future()
        self._raw: asyncio.Transport
        self.sock: socket.socket | None = None
        self._raw_open, self._raw_paused = False, False  # whether the TCP transport is there, and not reading
        self._serving = False  # the protocol knows of the connection, and not yet of its end
        self._paused = False  # by the protocol
        self._ended = False  # nothing more comes from TCP
        self._closing = False  # nothing more is delivered
        self._why: Exception | None = None  # of the end

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._raw = transport  # type: ignore[assignment]
        self._raw_open = True
        self._shake_hands()

    def data_received(self, data: bytes) -> None:
        if not self._closing:
            self.incoming.write(data)
            (self._deliver if self._serving else self._shake_hands)()

    def eof_received(self) -> bool:
        self._ended = True
        if self._serving:
            self._deliver()
        elif not self._closing:
            self._refuse(ConnectionResetError(errno.ECONNRESET, _CUT))
        return True  # it is closed here, once all has been delivered

    def connection_lost(self, exc: Exception | None) -> None:
        self._raw_open = False
        if exc is not None and self.sock is not None and self._serving and not self._closing:
            self.incoming.write(sockets.left(self.sock))  # a write failed: what had come before it has come
        if not self.opened.done():
            self.opened.set_exception(self._why or exc or ConnectionResetError(errno.ECONNRESET, _CUT))
            self.opened.exception()  # there may be nobody left to be told
        elif self._closing:
            self._lose(self._why or exc)
        elif self._serving:
            if not self._ended:
                self._ended, self._why = True, exc
            self._deliver()

    def pause_writing(self) -> None:
        if self._serving:
            self._protocol.pause_writing()

    def resume_writing(self) -> None:
        if self._serving:
            self._protocol.resume_writing()

    def _shake_hands(self) -> None:
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            self._flush()
        except OSError as error:
            self._flush()  # the alert
            self._refuse(error)
        else:
            self._flush()
            if not self.opened.done():  # else it was cancelled, and abort() is to come
                self._serving = True
                self._protocol.connection_made(self)
                self.opened.set_result(None)
                self._deliver()

    def _refuse(self, error: Exception) -> None:
        """The handshake has failed. Whoever waits for it is told once the socket is closed."""
        self._closing, self._why = True, error
        self._raw.close()

    def _deliver(self) -> None:
        """Hand on what has been read, record by record and then its end, for as long as the protocol takes it."""
        while not (self._paused or self._closing):
            try:
                data = self._tls.read(RECORD)
            except ssl.SSLWantReadError:
                self._all_delivered()
                return
            except OSError as error:
                self._finish(error)
                return
            try:
                if data:
                    self._protocol.data_received(data)
                else:
                    self._protocol.eof_received()
                    self._finish(None)
            except Exception as error:
                self.abort(error)
                raise

    def _all_delivered(self) -> None:
        self._flush()  # what OpenSSL had to answer
        if self._ended:
            self._finish(self._why)
        elif self._raw_paused:
            self._raw_paused = False
            self._raw.resume_reading()

    def _flush(self) -> None:
        if self._outgoing.pending and self._raw_open:
            self._raw.write(self._outgoing.read())

    def _finish(self, exc: Exception | None) -> None:
        self._say_goodbye()
        if self._raw_open and self._raw.get_write_buffer_size():  # whoever has ended takes no more of it
            self._raw.abort()
        self._lose(exc)

    def _say_goodbye(self) -> None:
        self._closing = True
        with contextlib.suppress(ssl.SSLError):  # always one: the peer's close_notify is not waited for
            self._tls.unwrap()
        self._flush()
        if self._raw_open:
            self._raw.close()

    def _lose(self, exc: Exception | None) -> None:
        if self._serving:
            self._serving = False
            protocol, self._protocol = self._protocol, _NOBODY
            protocol.connection_lost(exc)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self._closing or not self._raw_open:
            return
        left = memoryview(data)
        try:
            while left:
                left = left[self._tls.write(left) :]  # one record at a time
                if self._outgoing.pending >= FLUSH:
                    self._flush()
        except OSError as error:
            self.abort(error)
        else:
            self._flush()

    def close(self) -> None:
        """close_notify, and FIN behind all that was written. Nothing more is delivered but connection_lost(None)."""
        if not self._closing:
            self._say_goodbye()
            if not self._raw_open:
                self._loop.call_soon(self._lose, None)

    def abort(self, error: Exception | None = None) -> None:
        self._closing = True
        self._why = self._why or error
        if self._raw_open:
            self._raw.abort()  # connection_lost follows
        else:
            self._loop.call_soon(self._lose, self._why)

    def is_closing(self) -> bool:
        return self._closing

    def pause_reading(self) -> None:
        self._paused = True
        if not self._raw_paused and not self._ended and self._raw_open:
            self._raw_paused = True
            self._raw.pause_reading()

    def resume_reading(self) -> None:
        if self._paused:
            self._paused = False
            self._loop.call_soon(self._deliver)  # never out of the protocol's own call

    def get_write_buffer_size(self) -> int:
        return self._raw.get_write_buffer_size() if self._raw_open else 0

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        if self._raw_open:
            self._raw.set_write_buffer_limits(high, low)

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._tls if name == "ssl_object" else self._raw.get_extra_info(name, default)
