"""What systemd and a daemon say to each other: readiness by datagram, listening sockets by inheritance.

Both protocols are a few lines, and stable by systemd's promise, so no library is needed. Without systemd, both
do nothing.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import MutableMapping

from gateway.errors import ConfigError

log = logging.getLogger(__name__)

FIRST_FD = 3  # SD_LISTEN_FDS_START


def notify(state: str, environ: MutableMapping[str, str] = os.environ) -> bool:
    """Tell the service manager, such as `READY=1` or `STOPPING=1\\nSTATUS=draining`. Whether it was told."""
    address = environ.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):  # vsock: and whatever comes: nothing that we speak
        return False
    if address.startswith("@"):
        address = "\0" + address[1:]  # Linux's abstract namespace
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
            sender.setblocking(False)  # a manager that hangs must not hang the gateway
            sender.connect(address)
            sender.sendall(state.encode())
    except OSError as error:
        log.warning("cannot tell the service manager %r: %s", state, error)
        return False
    return True


def listen_fds(environ: MutableMapping[str, str] = os.environ, first: int = FIRST_FD) -> list[socket.socket]:
    """The listening sockets that were handed to this very process, in their order. The second call finds none."""
    pid, count = environ.pop("LISTEN_PID", ""), environ.pop("LISTEN_FDS", "")
    environ.pop("LISTEN_FDNAMES", None)  # children are told nothing: the sockets are not theirs
    if pid != str(os.getpid()) or not count.isascii() or not count.isdigit():
        return []
    return [_adopt(fd) for fd in range(first, first + int(count))]


def _adopt(fd: int) -> socket.socket:
    try:
        adopted = socket.socket(fileno=fd)  # which finds out family and type by itself
    except OSError as error:
        raise ConfigError(f"file descriptor {fd}, passed by systemd: {error.strerror}, expected a socket") from None
    if adopted.type != socket.SOCK_STREAM or not adopted.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        adopted.detach()
        raise ConfigError(f"file descriptor {fd}, passed by systemd: expected a listening stream socket")
    adopted.set_inheritable(False)
    adopted.setblocking(False)
    return adopted
