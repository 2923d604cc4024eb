"""Looking at backends: whether each is well, which models it serves, and (`scrapes`) how much its engine has on its hands.
Nothing here generates a token.

One task a backend, each on its own clock, so that a backend that hangs delays nobody's probe. What is learnt is written
on the backend; the data path reads it there. Of those that are not known to be well, who may all hang, only so many are
looked at at a time (`AT_ONCE`): they would take the descriptors that clients need.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from gateway.control.scrapes import Scrapes, phase
from gateway.core import engine_metrics
from gateway.core.backend import Backend, Health, HealthSettings
from gateway.errors import GatewayError, UpstreamFailed
from gateway.net.deadline import within
from gateway.net.fetch import fetch_first, fetch_next
from gateway.net.tasks import Tasks
from gateway.net.upstream import ConnectionPool

log = logging.getLogger(__name__)

AT_ONCE = 64  # looks at backends that are down, or of whom nothing is known yet
PAGE_MOST = 1 << 22  # octets of what a backend says of itself
NAMED_MOST = 1000  # models of one backend
SLEEP = "/is_sleeping"  # of a vLLM in development mode (vllm/entrypoints/serve/sleep), for those whose metrics do not say it
UNASKED = 600.0  # seconds until a backend that does not know of sleep is asked again; at once where it was away meanwhile
TOLD = 60.0  # seconds between the model lists of a backend whose models are told: they describe, and decide nothing


class ProbeSettings(NamedTuple):
    path: str = "/health"
    interval: float = 5.0
    timeout: float = 2.0
    models_interval: float = 5.0
    thresholds: HealthSettings = HealthSettings()
    scraped: bool = False  # the balancing goes by what engines say of their load


class Target(NamedTuple):
    """Whom to look at, and over which connections: they are no requests', and are not counted with them."""

    backend: Backend
    connections: ConnectionPool


class Probes:
    """The tasks that look, and the last whole model list of each backend."""

    def __init__(self, changed: Callable[[], None], learnt: Callable[[], None] = lambda: None):
        self._changed = changed  # some backend's health has
        self._learnt = learnt  # ... which models it serves has
        self._tasks = Tasks()
        self._scrapes = Scrapes(self._sleeps)
        self._settings = ProbeSettings()
        self._targets: dict[str, Target] = {}
        self._watching: dict[str, asyncio.Task[None]] = {}
        self._cards: dict[str, list[dict[str, Any]]] = {}
        self._asking: dict[str, asyncio.Task[None]] = {}
        self._ask_again: dict[str, float] = {}
        self._doubtful = asyncio.Semaphore(AT_ONCE)

    def watch(self, targets: Iterable[Target], settings: ProbeSettings) -> None:
        """Look at these from now on, and at no others. Those that are looked at already, in the same way, are left to
        their own clocks."""
        before, self._targets = self._targets, {t.backend.name: t for t in targets}
        same = settings == self._settings
        self._settings = settings
        for name, target in before.items():
            if not same or self._targets.get(name) != target:
                self._watching.pop(name).cancel()
            if (held := self._targets.get(name)) is None or held.backend is not target.backend:
                self._cards.pop(name, None)
                self._ask_again.pop(name, None)
        for place, (name, target) in enumerate(self._targets.items()):
            if name not in self._watching:
                looking = self._watch(target, phase(place, len(self._targets)))
                self._watching[name] = self._tasks.spawn(looking, f"probes of {name}")
        # with one backend there is nothing to choose
        scraped = self._targets.values() if settings.scraped and len(self._targets) > 1 else ()
        self._scrapes.watch(scraped, settings.timeout)

    async def stop(self) -> None:
        await self._tasks.stop()
        await self._scrapes.stop()

    async def cards(self, name: str) -> list[dict[str, Any]]:
        """The models of a backend, as it described them itself the last time that it did so in full; if it never has, it
        is asked now."""
        if name not in self._cards and name in self._targets:
            asking = self._asking.get(name)
            if asking is None:  # once for all who want to know, and not again at once where it failed
                now = time.monotonic()
                if now < self._ask_again.get(name, 0.0):
                    return []
                self._ask_again[name] = now + self._settings.models_interval
                asking = self._asking[name] = self._tasks.spawn(self._learn_models(self._targets[name]), f"models of {name}")
                asking.add_done_callback(lambda _: self._asking.pop(name))
            await asyncio.wait([asking])
        return self._cards.get(name, [])

    async def _watch(self, target: Target, part: float) -> None:
        """`part`: its phase, which spreads over half an interval the second looks of those whose first ones come at once."""
        settings, backend = self._settings, target.backend
        next_models = next_sleep = 0.0
        pause = settings.interval * (1 - part / 2)
        while True:
            began = time.monotonic()
            models_due = began >= next_models
            seen_by_scrapes = backend.engine is not None and backend.engine.asleep is not None and not backend.asleep
            sleep_due = began >= next_sleep and not seen_by_scrapes  # they look at no backend that is asleep
            well, connected = await self._is_well(target, more=sleep_due or (models_due and not backend.asleep))
            if well is not None and backend.probed(well, settings.thresholds, time.monotonic(), connected):
                level = logging.INFO if backend.health is Health.UP else logging.WARNING
                last = ", and asked where no other can be (health.panic)" if backend.last_resort else ""
                log.log(level, "the backend %s is %s%s", backend.name, backend.health.value, last)
                self._changed()
            if not connected or (backend.health is Health.DOWN and not well):
                next_sleep = 0.0  # who comes back may be another program, or have been started with other flags
            elif well and sleep_due and not await self._look_for_sleep(target, more=models_due):
                next_sleep = began + UNASKED
            if well and not backend.asleep and models_due:
                next_models = began + (max(settings.models_interval, TOLD) if backend.told else settings.models_interval)
                await self._learn_models(target)
            target.connections.drop_idle()  # left for a page that did not follow, for what the one before it said
            await asyncio.sleep(max(pause - (time.monotonic() - began), 0.05))
            pause = settings.interval

    async def _is_well(self, target: Target, *, more: bool) -> tuple[bool | None, bool]:
        """Whether it is, and whether it took a connection. None: it could not be asked, for lack of something of ours, which
        says nothing of it."""
        made: list[None] = []
        turn = contextlib.nullcontext() if target.backend.health is Health.UP else self._doubtful
        try:
            async with turn:
                path, connections = self._settings.path, target.connections
                with within(self._settings.timeout):
                    status, _ = await fetch_first(connections, path, PAGE_MOST, lambda: made.append(None), more=more)
        except (GatewayError, TimeoutError) as error:
            log.debug("the probe of %s failed: %r", target.backend.name, error)
            return False if isinstance(error, UpstreamFailed | TimeoutError) else None, bool(made)
        return 200 <= status < 300, True

    async def _look_for_sleep(self, target: Target, *, more: bool) -> bool:
        """An engine that sleeps is well, and can do nothing. Returns whether it can tell.

        A vLLM without `vllm:` metrics (`--disable-log-stats`) has the page all the same, so that all are asked for it but those
        whose metrics name another engine, or say nothing at all: who has been told to sleep has counted that request.
        """
        try:
            status, body = await self._page(target, "/metrics", more=True)
            asleep: object = engine_metrics.asleep(body) if status == 200 else None
            if status == 200 and not body:
                asleep = False
            if asleep is None and not (status == 200 and engine_metrics.of_another_engine(body)):
                status, body = await self._page(target, SLEEP, more=more)
                asleep = json.loads(body)["is_sleeping"] if status == 200 else None
        except (GatewayError, TimeoutError):
            return True  # another time
        except (ValueError, KeyError, TypeError, RecursionError):
            asleep = None
        self._sleeps(target.backend, asleep is True)
        return isinstance(asleep, bool)

    def _sleeps(self, backend: Backend, asleep: bool) -> None:
        if backend.fell_asleep(asleep, time.monotonic()):
            log.info("the backend %s %s", backend.name, "sleeps" if asleep else "is awake")
            self._changed()

    async def _learn_models(self, target: Target) -> None:
        """Take the list only where it came whole: half of one would hide models that are served."""
        try:
            status, body = await self._page(target, "/v1/models")
            if status != 200:
                self._cannot_tell(target, f"status {status}")
                return
            cards = [card for card in json.loads(body)["data"] if isinstance(card, dict) and isinstance(card.get("id"), str)]
        except (GatewayError, TimeoutError, ValueError, KeyError, TypeError, RecursionError) as error:
            self._cannot_tell(target, repr(error))
            return
        if self._targets.get(target.backend.name) is target:  # else it has gone meanwhile
            self._cards[target.backend.name] = cards[:NAMED_MOST]
        self._serves(target.backend, tuple(dict.fromkeys(card["id"] for card in cards[:NAMED_MOST])))

    def _cannot_tell(self, target: Target, why: str) -> None:
        """What it said before still holds: a list that cannot be had for a moment hides nothing."""
        log.debug("the model list of %s could not be had: %s", target.backend.name, why)
        if target.backend.models is None:
            self._serves(target.backend, ())

    def _serves(self, backend: Backend, models: tuple[str, ...]) -> None:
        if not backend.told and backend.models != models:
            backend.models = models
            self._learnt()

    async def _page(self, target: Target, path: str, *, more: bool = False) -> tuple[int, bytes]:
        """One of those that follow the probe. `more`: so does another one."""
        with within(self._settings.timeout):
            return await fetch_next(target.connections, path, PAGE_MOST, more=more)
