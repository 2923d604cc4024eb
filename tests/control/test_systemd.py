from __future__ import annotations

import contextlib
import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway.control.systemd import listen_fds, notify
from gateway.errors import ConfigError


@pytest.fixture
def manager_address() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:  # pytest's own paths may be too long for a socket
        yield Path(folder) / "notify"


def test_notify(manager_address: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(manager_address))
        assert notify("READY=1\nSTATUS=serving", {"NOTIFY_SOCKET": str(manager_address)})
        assert manager.recv(100) == b"READY=1\nSTATUS=serving"


def test_notify_in_the_abstract_namespace() -> None:
    name = f"tokenpipe-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind("\0" + name)
        assert notify("STOPPING=1", {"NOTIFY_SOCKET": "@" + name})
        assert manager.recv(100) == b"STOPPING=1"


@pytest.mark.parametrize("environ", [{}, {"NOTIFY_SOCKET": ""}, {"NOTIFY_SOCKET": "vsock:2:1234"}])
def test_notify_without_a_manager(environ: dict[str, str]) -> None:
    assert not notify("READY=1", environ)


def test_notify_survives_a_manager_that_is_gone(manager_address: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert not notify("READY=1", {"NOTIFY_SOCKET": str(manager_address)})
    assert "cannot tell the service manager" in caplog.text


def test_notify_does_not_wait_for_a_manager_that_hangs(manager_address: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(manager_address))
        told = [notify("READY=1", {"NOTIFY_SOCKET": str(manager_address)}) for _ in range(10_000)]
    assert told[0]
    assert not told[-1]


def environment(count: int | str, pid: int | None = None) -> dict[str, str]:
    pid = os.getpid() if pid is None else pid
    return {"LISTEN_PID": str(pid), "LISTEN_FDS": str(count), "LISTEN_FDNAMES": "http:admin", "OTHER": "stays"}


@pytest.fixture
def descriptors() -> Iterator[int]:
    """The first of two neighbouring descriptors of listening sockets, inheritable as systemd passes them."""
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    first = 500
    for number, listener in enumerate(listeners):
        os.dup2(listener.fileno(), first + number, inheritable=True)
        listener.close()
    yield first
    for fd in (first, first + 1):
        with contextlib.suppress(OSError):  # adopted and closed by the test
            os.close(fd)


def test_listen_fds(descriptors: int) -> None:
    environ = environment(2)
    adopted = listen_fds(environ, first=descriptors)
    assert [each.fileno() for each in adopted] == [descriptors, descriptors + 1]
    assert environ == {"OTHER": "stays"}
    assert not any(each.get_inheritable() or each.getblocking() for each in adopted)
    with socket.create_connection(adopted[0].getsockname()):
        pass
    for each in adopted:
        each.close()
    assert listen_fds(environ, first=descriptors) == []


@pytest.mark.parametrize("environ", [{}, environment(2, pid=1), environment("x"), environment("-1"), environment("")])
def test_nothing_was_passed_to_us(environ: dict[str, str]) -> None:
    before = dict(environ)
    assert listen_fds(environ) == []
    assert "LISTEN_PID" not in environ
    environ.update(before)


def test_what_is_no_listening_socket_is_refused() -> None:
    environ = environment(1)
    with open(os.devnull) as nothing, pytest.raises(ConfigError, match=f"descriptor {nothing.fileno()}.*socket"):
        listen_fds(environ, first=nothing.fileno())
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as idle:
        with pytest.raises(ConfigError, match="listening"):
            listen_fds(environment(1), first=idle.fileno())
        idle.getsockname()  # still ours to close
