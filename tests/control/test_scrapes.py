"""Reading engines' metrics over real sockets: what is taken in, what expires, and who is left alone."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import Counter
from collections.abc import AsyncIterator

import pytest

from gateway.control import scrapes
from gateway.control.scrapes import phase
from gateway.core.backend import Backend, HealthSettings
from gateway.core.load import EngineLoad
from gateway.net.upstream import ConnectionPool, Origin, PoolSettings
from tests.support import script as s
from tests.support.gateway import until
from tests.support.messages import HttpWire, Message
from tests.support.upstream import RawUpstream, running

TEXT = ("content-type", "text/plain; version=1.0.0; charset=utf-8")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scrapes, "INTERVAL", 0.05)


def page(running: int, waiting: int = 0, kv_usage: float = 0.0, padding: int = 0) -> s.Script:
    labels = '{engine="0",model_name="m"}'
    lines = [
        "# HELP padding " + "x" * padding,
        f"vllm:num_requests_running{labels} {running}.0",
        f"vllm:num_requests_waiting{labels} {waiting}.0",
        f"vllm:kv_cache_usage_perc{labels} {kv_usage}",
        "",
    ]
    return s.reply(200, "\n".join(lines).encode(), [TEXT])


async def silent(wire: HttpWire, request: Message) -> None:
    await wire.wait_closed(timeout=60)


@contextlib.asynccontextmanager
async def scraped(first: s.Script, timeout: float = 2.0) -> AsyncIterator[tuple[Backend, RawUpstream]]:
    """A backend that is looked at, and the upstream that it is."""
    async with running() as upstream:
        upstream.probes["/metrics"] = first
        backend, found = Backend("b", upstream.url), scrapes.Scrapes()
        origin = Origin("b", "127.0.0.1", upstream.port, None, b"b")
        connections = ConnectionPool(origin, PoolSettings(), asyncio.get_running_loop())
        found.watch([(backend, connections)], timeout)
        try:
            yield backend, upstream
        finally:
            await found.stop()


async def looked(upstream: RawUpstream, times: int = 2) -> None:
    """Until it has been looked at so many times more."""
    count = len(upstream.probed)
    await until(lambda: len(upstream.probed) >= count + times, "another look")


@pytest.mark.parametrize("of", [1, 8, 9, 64, 1000])
def test_few_are_looked_at_in_one_go(of: int) -> None:
    """And all of them within the interval, in even parts of it."""
    parts = Counter(phase(place, of) for place in range(of))
    assert max(parts.values()) == min(8, of)
    assert 0 == min(parts) <= max(parts) < 1
    gaps = [after - before for before, after in itertools.pairwise(sorted(parts))]
    assert gaps == pytest.approx([8 / of] * (len(parts) - 1))


async def test_figures_come_and_are_replaced() -> None:
    async with scraped(page(3, 2, 0.5)) as (backend, upstream):
        await until(lambda: backend.engine == EngineLoad(3, 2, 0.5), "the first figures")
        assert backend.load(0.0) == 5 + 2
        upstream.probes["/metrics"] = page(0)
        await until(lambda: backend.engine == EngineLoad(0, 0, 0.0), "the next ones")
        await until(lambda: backend.load(0.0) < 0.01, "their weight")


async def test_our_own_requests_count_once() -> None:
    """Those that were in flight when the page was asked for, and those that began or ended until it had come."""
    asked, answer = asyncio.Event(), asyncio.Event()

    async def slow(wire: HttpWire, request: Message) -> None:
        asked.set()
        await answer.wait()
        await page(4)(wire, request)

    async with scraped(s.reply(503, b"")) as (backend, upstream):
        await looked(upstream, 1)
        leases = [backend.lease() for _ in range(2)]
        upstream.probes["/metrics"] = slow
        await asked.wait()
        leases[0].release()
        leases.append(backend.lease())
        answer.set()
        await until(lambda: backend.engine == EngineLoad(4, 0), "the figures")
        assert backend.load(0.0) == 2 + 1  # two are in flight; of the engine's four, three may have been ours


@pytest.mark.parametrize("ill", [silent, s.vanish, s.reply(503, b"loading"), s.raw(b"nonsense\r\n\r\n", then="fin")])
async def test_stale_figures_expire(ill: s.Script) -> None:
    """After some looks in vain they are taken off, and others come as soon as there are some."""
    async with scraped(page(9), timeout=0.1) as (backend, upstream):
        await until(lambda: backend.engine is not None, "figures")
        upstream.probes["/metrics"] = ill
        await until(lambda: backend.engine is None, "their end")
        assert backend.load(0.0) == 0
        upstream.probes["/metrics"] = page(1)
        await until(lambda: backend.engine == EngineLoad(1, 0), "new ones")


async def test_one_look_in_vain_changes_nothing() -> None:
    async with scraped(page(9)) as (backend, upstream):
        await until(lambda: backend.engine is not None, "figures")
        upstream.probes["/metrics"] = s.in_turn(s.reply(503, b""), page(9))
        seen = set[object]()
        for _ in range(3):
            await looked(upstream, 1)
            seen.add(backend.engine)
        assert seen == {EngineLoad(9, 0)}


@pytest.mark.parametrize("without", [s.reply(404, b"{}"), s.reply(200, b"up 1\n", [TEXT]), s.reply(200, b"", [TEXT])])
async def test_a_backend_without_metrics_is_not_blended(without: s.Script, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor asked again soon; but now and then, for it may have been restarted as something else."""
    async with scraped(without) as (backend, upstream):
        await looked(upstream, 1)
        await asyncio.sleep(0.3)
        assert len(upstream.probed) == 1
        assert backend.engine is None
    monkeypatch.setattr(scrapes, "WITHOUT", 0.05)
    async with scraped(without) as (backend, upstream):
        await looked(upstream)
        upstream.probes["/metrics"] = page(2)
        await until(lambda: backend.engine is not None, "figures")


async def test_a_page_without_end_is_not_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is read as far as a page may be long, and not taken."""
    monkeypatch.setattr(scrapes, "PAGE_MOST", 100_000)
    sent = 0

    async def endless(wire: HttpWire, request: Message) -> None:
        nonlocal sent
        await wire.send(s.head(200, [TEXT]))
        while not wire.ended:
            await wire.send(b"vllm:num_requests_running 9\n" * 1000)
            sent += 28_000

    async with scraped(page(1, padding=90_000)) as (backend, upstream):
        await until(lambda: backend.engine is not None, "figures")
        upstream.probes["/metrics"] = endless
        await until(lambda: backend.engine is None, "their end")
        assert sent < 20 << 20
        upstream.failures.clear()  # it was cut off while it wrote


async def test_one_that_is_down_is_not_asked() -> None:
    async with scraped(page(1)) as (backend, upstream):
        await until(lambda: backend.engine is not None, "figures")
        backend.probed(False, HealthSettings(fail=1))
        await until(lambda: backend.engine is None, "their end")
        count = len(upstream.probed)
        await asyncio.sleep(0.2)
        assert len(upstream.probed) == count
        backend.probed(True, HealthSettings(pass_=1))
        await until(lambda: backend.engine is not None, "figures")


async def test_memberships() -> None:
    """Who stays is looked at as before, without a break; who leaves is not asked any more, and what was learnt is forgotten."""
    async with running() as stays, running() as leaves:
        found, loop = scrapes.Scrapes(), asyncio.get_running_loop()
        targets = []
        for name, upstream in (("stays", stays), ("leaves", leaves)):
            upstream.probes["/metrics"] = page(3)
            connections = ConnectionPool(Origin(name, "127.0.0.1", upstream.port, None, b"b"), PoolSettings(), loop)
            targets.append((Backend(name, upstream.url), connections))
        found.watch(targets, 2.0)
        await until(lambda: all(backend.engine for backend, _ in targets), "figures")
        found.watch(targets[:1], 2.0)
        assert [backend.engine for backend, _ in targets] == [EngineLoad(3, 0), None]
        count = len(leaves.probed)
        await looked(stays, 3)
        assert len(leaves.probed) == count
        found.watch(targets, 2.0)
        await until(lambda: all(backend.engine for backend, _ in targets), "figures")
        found.watch([], 2.0)
        assert not any(backend.engine for backend, _ in targets)
        await found.stop()
