"""Listening sockets, and what to do about those that cannot be had."""

from __future__ import annotations

import contextlib
import errno
import resource
import socket
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple, Protocol

from gateway.errors import ConfigError

_HINTS = {
    errno.EADDRINUSE: "if another program listens there, stop it, or choose another port (--port, --admin-port)",
    errno.EACCES: "ports below 1024 need CAP_NET_BIND_SERVICE; or choose another port (--port, --admin-port)",
}
BACKLOG = 4096  # connections that the kernel accepts on our behalf while we are busy


class Place(Protocol):
    """Where to listen: a host and a port, or a unix socket's path."""

    @property
    def host(self) -> str: ...

    @property
    def port(self) -> int: ...

    @property
    def path(self) -> str | None: ...


def bind(address: Place) -> socket.socket:
    """A bound socket. Raises ConfigError, saying what to do about it."""
    if address.path is not None:
        return _bind_unix(Path(address.path))
    try:
        family, _, _, _, where = socket.getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, socket.SOCK_STREAM)
        with _closed_on_failure(sock):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(where)
            sock.listen(BACKLOG)
    except OSError as error:
        hint = _HINTS.get(error.errno or 0, "the host is to be a name or an address of this machine (0.0.0.0: all of them)")
        raise ConfigError(f"cannot listen on {address}: {error.strerror or error}; {hint}") from None
    sock.setblocking(False)
    return sock


@contextlib.contextmanager
def _closed_on_failure(sock: socket.socket) -> Iterator[None]:
    try:
        yield
    except BaseException:
        sock.close()
        raise


class SocketFile(NamedTuple):
    """A unix socket's file: by its inode, as another process may listen at the same path by now."""

    path: Path
    device: int
    inode: int


def file_of(sock: socket.socket) -> SocketFile | None:
    """Of a socket that was bound here."""
    if sock.family != socket.AF_UNIX:
        return None
    path = Path(sock.getsockname())
    found = path.stat()
    return SocketFile(path, found.st_dev, found.st_ino)


def forget(files: Iterable[SocketFile]) -> None:
    """Remove those that are still there."""
    for file in files:
        with contextlib.suppress(OSError):
            found = file.path.stat()
            if (found.st_dev, found.st_ino) == (file.device, file.inode):
                file.path.unlink()


def raise_descriptor_limit() -> None:
    """As far as the operator's hard limit allows, which is there to be used; the soft one is for programs that `select`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _bind_unix(path: Path) -> socket.socket:
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(path.stat().st_mode):
            raise ConfigError(f"cannot listen on unix:{path}: a file that is no socket stands there")
        with socket.socket(socket.AF_UNIX) as probe:
            try:
                probe.connect(str(path))
            except OSError:
                path.unlink(missing_ok=True)  # left behind by a process that is gone
            else:
                raise ConfigError(f"cannot listen on unix:{path}: another program listens there")
    sock = socket.socket(socket.AF_UNIX)
    try:
        with _closed_on_failure(sock):
            sock.bind(str(path))
            sock.listen(BACKLOG)
    except OSError as error:
        raise ConfigError(f"cannot listen on unix:{path}: {error.strerror or error}") from None
    sock.setblocking(False)
    return sock


def url(scheme: str, sock: socket.socket) -> str:
    if sock.family == socket.AF_UNIX:
        return f"unix:{sock.getsockname()}"
    host, port = sock.getsockname()[:2]
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"


def accept_all(listener: socket.socket) -> list[socket.socket]:
    """Accept all that waits at a listener, and close it. Returns the connections, non-blocking."""
    taken = []
    with listener, contextlib.suppress(OSError):  # BlockingIOError: none is left
        listener.setblocking(False)
        while True:
            sock, _ = listener.accept()
            sock.setblocking(False)
            taken.append(sock)
    return taken
