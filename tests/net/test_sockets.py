"""What the kernel is told of sockets holds where it is relied on."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest
import uvloop

from gateway.net import sockets

OPTIONS = [(level, option, value) for level, option, value in sockets._OPTIONS]


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_what_is_accepted_has_the_listeners_options(family: socket.AddressFamily) -> None:
    host = "127.0.0.1" if family == socket.AF_INET else "::1"
    with socket.create_server((host, 0), family=family) as listener:
        sockets.tune(listener)
        with socket.create_connection(listener.getsockname()[:2]), listener.accept()[0] as accepted:
            for level, option, value in OPTIONS:
                assert accepted.getsockopt(level, option) == value, (level, option)


@pytest.fixture(params=[uvloop.new_event_loop, asyncio.new_event_loop], ids=["uvloop", "asyncio"])
def runner(request: pytest.FixtureRequest) -> asyncio.Runner:
    return asyncio.Runner(loop_factory=request.param)


def _nonblocking(family: socket.AddressFamily) -> socket.socket:
    sock = socket.socket(family)
    sock.setblocking(False)
    return sock


def test_connect(runner: asyncio.Runner) -> None:
    with runner, socket.create_server(("127.0.0.1", 0)) as listener, _nonblocking(socket.AF_INET) as sock:
        runner.run(sockets.connect(sock, listener.getsockname()))
        assert sock.getpeername() == listener.getsockname()


def test_connect_where_nobody_listens(runner: asyncio.Runner) -> None:
    with socket.socket() as closed, runner, _nonblocking(socket.AF_INET) as sock:
        closed.bind(("127.0.0.1", 0))
        with pytest.raises(ConnectionRefusedError, match="refused"):
            runner.run(sockets.connect(sock, closed.getsockname()))


def test_connect_given_up(runner: asyncio.Runner) -> None:
    """A listener whose backlog is full lets a connection wait: to give up leaves nothing behind."""
    with socket.socket() as listener, runner:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        waiting = [_nonblocking(socket.AF_INET) for _ in range(3)]

        async def fill() -> None:
            for sock in waiting:
                async with asyncio.timeout(0.2):
                    await sockets.connect(sock, listener.getsockname())

        with pytest.raises(TimeoutError):
            runner.run(fill())
        for sock in waiting:
            assert not runner.get_loop().remove_writer(sock)
            sock.close()


def test_connect_to_a_unix_socket(runner: asyncio.Runner, tmp_path: Path) -> None:
    path = str(tmp_path / "sock")
    with runner, socket.socket(socket.AF_UNIX) as listener, _nonblocking(socket.AF_UNIX) as sock:
        listener.bind(path)
        listener.listen(0)
        runner.run(sockets.connect(sock, path))
        assert sock.getpeername() == path
        others = [_nonblocking(socket.AF_UNIX) for _ in range(3)]

        async def too_many() -> None:
            for one in others:
                await sockets.connect(one, path)

        with pytest.raises(BlockingIOError):  # its backlog is full, and the kernel would not tell when that ends
            runner.run(too_many())
        for one in others:
            one.close()


@pytest.mark.parametrize(
    ("host", "family"),
    [("127.0.0.1", socket.AF_INET), ("::1", socket.AF_INET6)] + [(h, None) for h in ("localhost", "127.1", "fe80::1%lo", "")],
)
def test_what_is_an_address_needs_no_look_up(host: str, family: socket.AddressFamily | None) -> None:
    assert sockets.family_of(host) is family
