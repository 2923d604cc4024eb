"""Reading engines' own metrics, for the balancing: how many requests each has, how many wait, how full its cache is.

Only where there is something to choose by it. What is learnt is written on the backend as one snapshot, and taken off when
it is stale; a backend without such metrics is simply not blended, and looked at again now and then. Each backend has its own
time, so that one which hangs keeps nobody else's figures from coming, and pages come one after the other, not all at once.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable

from gateway.core import engine_metrics
from gateway.core.backend import Backend
from gateway.errors import GatewayError
from gateway.net.deadline import within
from gateway.net.fetch import fetch
from gateway.net.tasks import Tasks
from gateway.net.upstream import ConnectionPool

Target = tuple[Backend, ConnectionPool]  # whom to look at, and over which connections

log = logging.getLogger(__name__)

PATH = "/metrics"
PAGE_MOST = 1 << 22  # octets of a page; vLLM's has 70,000 for one engine
INTERVAL = 1.0  # seconds between looks at one backend
PAGES = 32  # a second at most, of all backends: a larger fleet is looked at less often
WITHOUT = 30.0  # seconds until a backend that has no such metrics is asked again
TOGETHER = 8  # backends looked at in one go: whoever is relayed waits for a millisecond or two, and each costs half
MISSED = 3  # looks without a result after which what was learnt is stale


class Scrapes:
    """The tasks that look, one a backend."""

    def __init__(self, sleeps: Callable[[Backend, bool], None] = lambda backend, asleep: None) -> None:
        """`sleeps`: told of an engine that says whether it does."""
        self._sleeps = sleeps
        self._tasks = Tasks()
        self._timeout = 0.0
        self._watching: dict[Target, asyncio.Task[None]] = {}

    def watch(self, targets: Iterable[Target], timeout: float) -> None:
        """Look at these from now on, and at no others. `timeout`: seconds for a page."""
        wanted = dict.fromkeys(targets)
        for target in list(self._watching):
            if target not in wanted or timeout != self._timeout:
                self._watching.pop(target).cancel()
                if target not in wanted:
                    target[0].scraped(None)
        self._timeout = timeout
        for place, target in enumerate(wanted):
            if target not in self._watching:
                looking = self._watch(*target, phase(place, len(wanted)))
                self._watching[target] = self._tasks.spawn(looking, f"scrapes of {target[0].name}")

    async def stop(self) -> None:
        await self._tasks.stop()

    async def _watch(self, backend: Backend, connections: ConnectionPool, part: float) -> None:
        """`part`: of the interval, from 0 to 1; it comes first."""
        fresh_until = 0.0
        await asyncio.sleep(part * self._interval)
        try:
            while True:
                began = time.monotonic()
                found = await _scrape(backend, connections, self._timeout) if backend.routable else None
                now = time.monotonic()
                if found and backend.engine is not None and backend.engine.asleep is not None:
                    self._sleeps(backend, backend.engine.asleep)
                if found:
                    fresh_until = now + MISSED * self._interval
                elif backend.engine is not None and (found is False or now >= fresh_until):
                    backend.scraped(None)
                    log.info("the backend %s does not say any more how loaded its engine is", backend.name)
                await asyncio.sleep(WITHOUT if found is False else max(self._interval - (now - began), 0.05))
        except Exception:
            backend.scraped(None)  # nobody would take it off when it is stale
            raise

    @property
    def _interval(self) -> float:
        return max(INTERVAL, len(self._watching) / PAGES)


def phase(place: int, of: int) -> float:
    """What part of an interval the looks at one of so many backends come after those at the first one."""
    return place // TOGETHER * TOGETHER / of


async def _scrape(backend: Backend, connections: ConnectionPool, timeout: float) -> bool | None:
    """Whether the backend has such metrics; None: that could not be learnt."""
    # what is in flight now, or will be by the end, may be among its figures, and is not counted twice
    before = backend.in_flight - backend.taken
    try:
        with within(timeout):
            status, page = await fetch(connections, PATH, PAGE_MOST)
    except (GatewayError, TimeoutError) as error:
        log.debug("the metrics of %s could not be had: %r", backend.name, error)
        return None
    engine = engine_metrics.read(page) if status == 200 else None
    if status >= 500:
        return None
    if engine is None:
        log.debug("the backend %s has no metrics that are known (status %d)", backend.name, status)
        return False
    if backend.engine is None:
        log.info("the backend %s says how loaded its engine is", backend.name)
    backend.scraped(engine, before + backend.taken)
    return True
