"""Connections follow the addresses of a backend's name (cases.md G127)."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from gateway.errors import UpstreamFailed
from gateway.net import names as module
from gateway.net.upstream import Connection, ConnectionPool, Origin, PoolSettings
from tests.support.gateway import until
from tests.support.upstream import RawUpstream, listening_socket


class Names:
    """The resolver: what `vllm.test` is. None: the look-up fails. While it does not speak, look-ups hang."""

    def __init__(self) -> None:
        self.addresses: list[str] | None = ["127.0.0.1"]
        self.asked = 0
        self.speaks = threading.Event()
        self.speaks.set()

    def __call__(self, host: str, port: int, *_: Any, **__: Any) -> list[Any]:
        self.asked += 1
        assert host == "vllm.test"
        self.speaks.wait(30)
        if self.addresses is None:
            raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in self.addresses]


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Iterator[Names]:
    names = Names()
    monkeypatch.setattr(socket, "getaddrinfo", names)
    monkeypatch.setattr(module, "RESOLVED_FOR", 0.02)
    yield names
    names.speaks.set()


@pytest.fixture
async def backends() -> AsyncIterator[list[RawUpstream]]:
    first, second = RawUpstream(), RawUpstream()
    await first.start(listening_socket("127.0.0.1"))
    await second.start(listening_socket("127.0.0.2", first.port))
    yield [first, second]
    await first.stop()
    await second.stop()


@pytest.fixture
async def pool(names: Names, backends: list[RawUpstream]) -> AsyncIterator[ConnectionPool]:
    origin = Origin("vllm", "vllm.test", backends[0].port, None, b"vllm.test")
    pool = ConnectionPool(origin, PoolSettings(idle=60.0), asyncio.get_running_loop())
    yield pool
    pool.close()
    await asyncio.sleep(0)


def leads_to(connection: Connection) -> str:
    host: str = connection.address[0]  # type: ignore[index]
    return host


async def test_kept_ones_are_closed_when_their_address_has_gone(pool: ConnectionPool, names: Names) -> None:
    """However busy they are: requests that reuse them have the name looked up, in the background."""
    connection, other = await pool.open(), await pool.open()
    connection.give_back()
    other.give_back()
    names.addresses = ["127.0.0.2"]

    def gone() -> bool:
        taken = pool.take()
        if taken is not None:
            taken.give_back()
        return connection.lost and other.lost

    await until(gone, "the kept connections to be closed")
    assert pool.take() is None
    connection = await pool.open()
    assert leads_to(connection) == "127.0.0.2"
    connection.drop()


async def test_one_in_use_goes_on_and_is_not_kept(pool: ConnectionPool, names: Names) -> None:
    old = await pool.open()
    names.addresses = ["127.0.0.2"]
    await asyncio.sleep(0.03)
    new = await pool.open()  # looks the name up
    assert (leads_to(old), leads_to(new)) == ("127.0.0.1", "127.0.0.2")
    assert not old.lost
    old.give_back()
    assert old.lost
    new.give_back()
    assert pool.take() is new
    new.drop()


async def test_what_stays_is_kept(pool: ConnectionPool, names: Names) -> None:
    connection = await pool.open()
    connection.give_back()
    names.addresses = ["127.0.0.3", "127.0.0.1"]
    asked = names.asked

    def looked_up() -> bool:
        assert pool.take() is connection
        connection.give_back()
        return names.asked > asked + 2

    await until(looked_up, "look-ups")
    connection.drop()


async def test_a_look_up_that_fails_changes_nothing(pool: ConnectionPool, names: Names) -> None:
    """Neither for kept connections nor for new ones."""
    connection = await pool.open()
    connection.give_back()
    names.addresses = None
    asked = names.asked

    def looked_up() -> bool:
        assert pool.take() is connection
        connection.give_back()
        return names.asked > asked + 2

    await until(looked_up, "look-ups")
    fresh = await pool.open()
    assert leads_to(fresh) == "127.0.0.1"
    fresh.drop()
    connection.drop()


async def test_it_has_moved_while_it_could_not_be_looked_up(
    pool: ConnectionPool, names: Names, backends: list[RawUpstream]
) -> None:
    """Where the old address leads nowhere, the first connection after the resolver is back goes to the new one: it may be a
    breaker's only trial."""
    (await pool.open()).drop()
    names.addresses = None
    backends[0].close_listener()
    for _ in range(2):
        await asyncio.sleep(0.03)
        with pytest.raises(UpstreamFailed):
            await pool.open()
    await asyncio.sleep(0.03)
    names.addresses = ["127.0.0.2"]
    fresh = await pool.open()
    assert leads_to(fresh) == "127.0.0.2"
    fresh.drop()


async def test_a_pool_that_was_closed_meanwhile(pool: ConnectionPool, names: Names) -> None:
    connection = await pool.open()
    connection.give_back()
    await asyncio.sleep(0.03)
    taken = pool.take()
    assert taken is connection
    pool.close()
    await until(lambda: names.asked > 1, "the look-up")
    taken.give_back()
    assert taken.lost


async def test_a_resolver_that_says_nothing(pool: ConnectionPool, names: Names) -> None:
    """What was found last holds, however many connections are opened: one look-up is under way for them all, and whoever comes
    later does not wait for it at all. When it is heard of again, they follow."""
    (await pool.open()).drop()
    names.addresses, asked = ["127.0.0.2"], names.asked
    names.speaks.clear()
    await asyncio.sleep(0.03)
    async with asyncio.timeout(10):
        for connection in await asyncio.gather(*[pool.open() for _ in range(20)]):
            assert leads_to(connection) == "127.0.0.1"
            connection.drop()
        loop = asyncio.get_running_loop()
        began = loop.time()
        for _ in range(50):
            (await pool.open()).drop()
        assert loop.time() - began < 50 * module.PATIENCE / 2
    assert names.asked == asked + 1
    names.speaks.set()

    async def moved() -> bool:
        connection = await pool.open()
        connection.drop()
        return leads_to(connection) == "127.0.0.2"

    async with asyncio.timeout(10):
        while not await moved():
            await asyncio.sleep(0.01)


async def test_the_first_look_up_is_waited_for(pool: ConnectionPool, names: Names) -> None:
    """By all who come meanwhile, one of whom may leave; and where it fails, each is told."""
    names.speaks.clear()
    names.addresses = None
    first, *others = [asyncio.ensure_future(pool.open()) for _ in range(3)]
    await until(lambda: names.asked == 1, "the look-up")
    first.cancel()
    names.speaks.set()
    for failed in await asyncio.gather(*others, return_exceptions=True):
        assert isinstance(failed, UpstreamFailed)
        assert "Temporary failure" in failed.message
    assert names.asked == 1
    names.addresses = ["127.0.0.1"]
    (await pool.open()).drop()


async def test_no_thread_keeps_the_process_from_its_end(pool: ConnectionPool, names: Names) -> None:
    names.speaks.clear()
    opening = asyncio.ensure_future(pool.open())
    await until(lambda: names.asked == 1, "the look-up")
    (looking,) = [thread for thread in threading.enumerate() if thread.name == "look-up of vllm.test"]
    assert looking.daemon
    opening.cancel()
