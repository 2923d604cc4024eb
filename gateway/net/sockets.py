"""What the kernel is asked about sockets, and told."""

from __future__ import annotations

import array
import asyncio
import contextlib
import errno
import fcntl
import os
import select
import socket
import struct
import termios

NOTSENT_LOWAT = 65536  # octets that the kernel takes before the peer's window has room for them
LEFT_MOST = 1 << 20  # octets taken in from a connection that is broken
KEEPALIVE_IDLE, KEEPALIVE_INTERVAL, KEEPALIVE_COUNT = 30, 10, 3  # a peer that has vanished is noticed within a minute
VANISHED = float(KEEPALIVE_IDLE + KEEPALIVE_INTERVAL * KEEPALIVE_COUNT)  # ... also where it owes acknowledgements
_TCP, _SOCKET = int(socket.IPPROTO_TCP), socket.SOL_SOCKET
_OPTIONS = (
    (_TCP, socket.TCP_NODELAY, 1),
    (_TCP, socket.TCP_NOTSENT_LOWAT, NOTSENT_LOWAT),
    (_SOCKET, socket.SO_KEEPALIVE, 1),
    (_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE),
    (_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_INTERVAL),
    (_TCP, socket.TCP_KEEPCNT, KEEPALIVE_COUNT),
)
_SIOCOUTQNSD = 0x894B  # linux/sockios.h
_INFO = struct.Struct("24xI28xI")  # Linux's struct tcp_info: segments in flight, milliseconds since the last acknowledgement
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)


def tune(sock: socket.socket, *, receive_buffer: int | None = None) -> None:
    """Bound what the kernel holds for a connection, and have it notice a peer that is no longer there.

    What is said of a listening socket holds for all that it accepts (Linux, tcp(7)): to say it of each one would cost a
    new connection a dozen system calls.
    """
    if sock.family == socket.AF_UNIX:
        return
    for level, option, value in _OPTIONS:
        sock.setsockopt(level, option, value)
    if receive_buffer:
        sock.setsockopt(_SOCKET, socket.SO_RCVBUF, receive_buffer)


def family_of(host: str) -> socket.AddressFamily | None:
    """Of an IP address; None for a name, and for what needs a look-up still (an IPv6 zone)."""
    for family in (socket.AF_INET, socket.AF_INET6):
        with contextlib.suppress(OSError):
            socket.inet_pton(family, host)
            return family
    return None


async def connect(sock: socket.socket, address: object) -> None:
    """Connect to an address that needs no look-up: uvloop's own `sock_connect` has a thread look it up all the same."""
    try:
        sock.connect(address)  # type: ignore[arg-type]  # also takes a unix path
    except BlockingIOError as error:
        if error.errno != errno.EINPROGRESS:  # a unix socket's backlog is full
            raise
    else:
        return
    loop = asyncio.get_running_loop()
    writable = loop.create_future()
    loop.add_writer(sock, _wake, writable)
    try:
        await writable
    finally:
        loop.remove_writer(sock)
    failed = sock.getsockopt(_SOCKET, socket.SO_ERROR)
    if failed:
        raise OSError(failed, os.strerror(failed))


def _wake(writable: asyncio.Future[None]) -> None:
    if not writable.done():
        writable.set_result(None)


class Quiet:
    """Tells whether nothing has arrived on an idle connection, not even its end: then it may be used again.

    To ask the kernel with `poll` costs a third of a `recv` that has to raise BlockingIOError.
    """

    __slots__ = ("_poll", "_sock")

    def __init__(self, sock: socket.socket):
        self._sock = sock  # whose descriptor it is: as long as this is, it is no other's
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)

    def __call__(self) -> bool:
        return self._sock.fileno() >= 0 and not self._poll.poll(0)


def left(sock: socket.socket) -> bytes:
    """What the peer had sent before a write to it failed. The kernel tells of the reset once, and still has what came
    before it."""
    pieces: list[bytes] = []
    told = False
    while sum(map(len, pieces)) < LEFT_MOST:
        try:
            piece = sock.recv(65536)
        except BlockingIOError:
            break
        except OSError:
            if told:
                break
            told = True
            continue
        if not piece:
            break
        pieces.append(piece)
    return b"".join(pieces)


def unsent(sock: socket.socket) -> int:
    """Octets handed to the kernel for which the peer has had no room so far (SIOCOUTQNSD)."""
    return _queue(sock, _SIOCOUTQNSD)


def untaken(sock: socket.socket) -> int:
    """Octets handed to the kernel that the peer's kernel has not acknowledged (tcp(7), SIOCOUTQ)."""
    return _queue(sock, termios.TIOCOUTQ)


def _queue(sock: socket.socket, which: int) -> int:
    count = array.array("i", [0])
    try:
        fcntl.ioctl(sock.fileno(), which, count)
    except OSError:
        return 0
    return count[0]


def unheard(sock: socket.socket) -> float:
    """Seconds for which a peer has acknowledged nothing of what is on its way to it; 0 where nothing is.

    The kernel sends that again for a quarter of an hour (tcp(7), tcp_retries2), and no keep-alive meanwhile. A peer that only
    has no room is heard of.
    """
    with contextlib.suppress(OSError):  # closed meanwhile
        in_flight, last = _INFO.unpack(sock.getsockopt(_TCP, socket.TCP_INFO, _INFO.size))
        return last / 1000 if in_flight else 0.0
    return 0.0


def peer_has_left(sock: socket.socket) -> bool:
    """The peer has ended the connection, though its octets, and so its end, are not being read just now."""
    look = select.poll()
    look.register(sock.fileno(), select.POLLRDHUP)  # POLLHUP and POLLERR are always told of
    return bool(look.poll(0))


def reset_on_close(sock: socket.socket) -> None:
    """Have the connection end with RST: for a peer who would take FIN for a proper end."""
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
