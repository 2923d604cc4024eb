"""Engines that are killed and frozen under load: the gateway recovers by itself, counts exactly, and nothing is left."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import aiohttp
import pytest

from tests.bench.troubled import Mock, Served, ask
from tests.integration.test_fleet import reached, states
from tests.support.gateway import Gateway

Start = Callable[..., Awaitable[Gateway]]
CONFIG: dict[str, Any] = {
    "commit": "first_event",
    "timeouts": {"first_byte": 2, "connect": 1, "idle": 2},
    "health": {"interval": 0.3, "timeout": 1, "fail": 2, "silence": 0.5, "slow_start": 1},
    "headers": {"receipt": True},
}


class Load:
    """Requests at a rate, until it is told to stop."""

    def __init__(self, gateway: Gateway, rate: float = 25.0):
        self.found: list[Served] = []
        self._gateway, self._rate = gateway, rate

    async def run(self, session: aiohttp.ClientSession, end: asyncio.Event) -> None:
        async with asyncio.TaskGroup() as group:
            while not end.is_set():
                group.create_task(self._one(session))
                await asyncio.sleep(1 / self._rate)

    async def _one(self, session: aiohttp.ClientSession) -> None:
        self.found.append(await ask(session, self._gateway.url, len(self.found)))


@contextlib.asynccontextmanager
async def under_load(gateway: Gateway) -> AsyncIterator[list[Served]]:
    """For the time of a `with`; then everything has ended."""
    load, end = Load(gateway), asyncio.Event()
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(30)) as session:
        running = asyncio.create_task(load.run(session, end))
        try:
            yield load.found
        finally:
            end.set()
            await running


@contextlib.asynccontextmanager
async def two() -> AsyncIterator[list[Mock]]:
    mocks = [Mock(f"m{number}", "0.03") for number in range(2)]
    try:
        for mock in mocks:
            await mock.start()
        for mock in mocks:
            await mock.ready()
        yield mocks
    finally:
        for mock in mocks:
            await mock.kill()


async def settled(gateway: Gateway, found: list[Served]) -> None:
    """Every request was counted once, and nothing is in flight."""
    await gateway.idle(20)
    samples = await gateway.metrics()
    assert samples.value("tokenpipe_requests_total") == len(found)
    assert samples.value("tokenpipe_backend_in_flight") == 0
    assert {b["in_flight"] for b in await states(gateway)} == {0}


@pytest.mark.seconds(60)
async def test_killed_and_started_again(start_gateway: Start) -> None:
    """kill -9, and a new process on the same port."""
    async with two() as mocks:
        listed = [{"url": mock.url, "name": mock.name} for mock in mocks]
        gateway = await start_gateway(config=CONFIG | {"backends": listed})
        async with under_load(gateway) as found:
            await asyncio.sleep(0.5)
            await mocks[0].kill()
            await reached(gateway, 1, state="down")
            at = len(found)
            await asyncio.sleep(0.5)
            assert {one.status for one in found[at + 5 :]} == {200}
            await mocks[0].start()
            await mocks[0].ready()
            await reached(gateway, 0, state="down")
            at = len(found)
            async with asyncio.timeout(20):
                while sum(one.backend == "m0" for one in found[at:]) < 5:
                    await asyncio.sleep(0.1)
        assert sum(one.status != 200 for one in found) <= 8  # what it had in hand
        await settled(gateway, found)


@pytest.mark.seconds(60)
async def test_frozen_and_thawed(start_gateway: Start) -> None:
    """SIGSTOP: it accepts still. SIGCONT: it is back."""
    async with two() as mocks:
        listed = [{"url": mock.url, "name": mock.name} for mock in mocks]
        gateway = await start_gateway(config=CONFIG | {"backends": listed})
        async with under_load(gateway) as found:
            await asyncio.sleep(0.5)
            assert mocks[0].process is not None
            mocks[0].process.send_signal(signal.SIGSTOP)
            try:
                await reached(gateway, 1, state="down")
                at = len(found)
                await asyncio.sleep(0.5)
                served = [one for one in found[at:] if one.backend == "m1"]
                assert served
                assert {one.status for one in served} == {200}
            finally:
                mocks[0].process.send_signal(signal.SIGCONT)
            await reached(gateway, 0, state="down")
            at = len(found)
            async with asyncio.timeout(20):
                while sum(one.backend == "m0" for one in found[at:]) < 5:
                    await asyncio.sleep(0.1)
        await settled(gateway, found)
