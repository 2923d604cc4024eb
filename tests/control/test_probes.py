"""Probes of many backends at once."""

from __future__ import annotations

import asyncio

import pytest

from gateway.control import probes as module
from gateway.control.probes import Probes, ProbeSettings, Target
from gateway.core.backend import Backend, Health, HealthSettings
from gateway.net.upstream import ConnectionPool, Origin, PoolSettings
from tests.support.gateway import until
from tests.support.messages import HttpWire, Message
from tests.support.upstream import RawUpstream, running

FEW = 5
SETTINGS = ProbeSettings(interval=0.02, timeout=0.05, thresholds=HealthSettings(fail=1, pass_=1))


async def silent(wire: HttpWire, request: Message) -> None:
    await wire.wait_closed(timeout=60)


def target(name: str, upstream: RawUpstream) -> Target:
    origin = Origin(name, "127.0.0.1", upstream.port, None, b"m")
    return Target(Backend(name, upstream.url), ConnectionPool(origin, PoolSettings(), asyncio.get_running_loop()))


async def test_many_that_hang_take_few_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor do they take anything from one that is well: it is looked at as often as ever. And each of them has its turn."""
    monkeypatch.setattr(module, "AT_ONCE", FEW)
    async with running() as hanging, running() as well:
        answers, hanging.probes["/health"] = hanging.probes["/health"], silent
        ill, good = [target(f"ill-{number}", hanging) for number in range(60)], target("well", well)
        most = 0

        def all_are(health: Health) -> bool:
            nonlocal most
            most = max(most, sum(one.connections.size for one in ill))
            return all(one.backend.health is health for one in ill)

        probes = Probes(lambda: None)
        try:
            probes.watch([*ill, good], SETTINGS)
            await until(lambda: good.backend.health is Health.UP, "the well one")
            await until(lambda: all_are(Health.DOWN), "the others", 20)
            assert 1 <= most <= FEW
            before, others = len(well.probed), len(hanging.probed)
            await until(lambda: all_are(Health.DOWN) and len(hanging.probed) >= others + 60, "another look at each", 20)
            assert most <= FEW
            assert len(well.probed) - before > 10
            hanging.probes["/health"] = answers
            await until(lambda: all_are(Health.UP), "all of them", 20)
        finally:
            await probes.stop()
