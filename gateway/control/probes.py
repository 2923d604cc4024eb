"""Looking at backends: whether each is well, and which models it serves. Nothing here generates a token.

One task a backend, each on its own clock, so that a backend that hangs delays nobody's probe. What is learnt is written
on the backend; the data path reads it there.
"""

from __future__ import annotations

import asyncio
import json
import logging
import ssl
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import aiohttp

from gateway.core.backend import Backend, Health, HealthSettings
from gateway.net.tasks import Tasks

log = logging.getLogger(__name__)

MODELS_MOST = 1 << 22  # octets of a model list
NAMED_MOST = 1000  # models of one backend


class ProbeSettings(NamedTuple):
    path: str = "/health"
    interval: float = 5.0
    timeout: float = 2.0
    models_interval: float = 5.0
    thresholds: HealthSettings = HealthSettings()


class Target(NamedTuple):
    """Where to look: `base` is the backend's URL, `unix` its socket if it has one."""

    backend: Backend
    base: str
    unix: str | None
    tls: ssl.SSLContext | None
    credential: bytes | None


class Probes:
    """The tasks that look, and the last whole model list of each backend."""

    def __init__(self, changed: Callable[[], None]):
        self._changed = changed  # some backend's health has
        self._tasks = Tasks()
        self._settings = ProbeSettings()
        self._targets: dict[str, Target] = {}
        self._cards: dict[str, list[dict[str, Any]]] = {}

    async def watch(self, targets: list[Target], settings: ProbeSettings) -> None:
        """Look at these from now on, and at no others."""
        await self._tasks.stop()
        self._settings, self._targets = settings, {t.backend.name: t for t in targets}
        self._cards = {name: cards for name, cards in self._cards.items() if name in self._targets}
        for target in targets:
            self._tasks.start(self._watch(target), f"probes of {target.backend.name}")

    async def stop(self) -> None:
        await self._tasks.stop()

    async def cards(self, name: str) -> list[dict[str, Any]]:
        """The models of a backend, as it described them itself the last time that it did so in full; if it never has, it
        is asked now."""
        if name not in self._cards and name in self._targets:
            async with _session(self._targets[name], self._settings.timeout) as session:
                await self._learn_models(session, self._targets[name])
        return self._cards.get(name, [])

    async def _watch(self, target: Target) -> None:
        settings = self._settings
        async with _session(target, settings.timeout) as session:
            next_models = 0.0
            while True:
                began = time.monotonic()
                well = await self._is_well(session, target)
                if target.backend.probed(well, settings.thresholds):
                    level = logging.INFO if target.backend.health is Health.UP else logging.WARNING
                    log.log(level, "the backend %s is %s", target.backend.name, target.backend.health.value)
                    self._changed()
                if well and began >= next_models:
                    next_models = began + settings.models_interval
                    await self._learn_models(session, target)
                await asyncio.sleep(max(settings.interval - (time.monotonic() - began), 0.05))

    async def _is_well(self, session: aiohttp.ClientSession, target: Target) -> bool:
        try:
            async with session.get(target.base + self._settings.path, allow_redirects=False) as response:
                return 200 <= response.status < 300
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            log.debug("the probe of %s failed: %r", target.backend.name, error)
            return False

    async def _learn_models(self, session: aiohttp.ClientSession, target: Target) -> None:
        """Take the list only where it came whole: half of one would hide models that are served."""
        try:
            async with session.get(target.base + "/v1/models", allow_redirects=False) as response:
                if response.status != 200:
                    return
                body = await response.content.read(MODELS_MOST)
                if not response.content.at_eof() and await response.content.read(1):
                    return
            cards = [card for card in json.loads(body)["data"] if isinstance(card, dict) and isinstance(card.get("id"), str)]
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError, KeyError, TypeError) as error:
            log.debug("the model list of %s could not be had: %r", target.backend.name, error)
            return
        self._cards[target.backend.name] = cards[:NAMED_MOST]
        target.backend.models = tuple(card["id"] for card in cards[:NAMED_MOST])


def _session(target: Target, timeout: float) -> aiohttp.ClientSession:
    """A connection of its own for each look, with nothing of the environment's and no cookies."""
    options: dict[str, Any] = {"force_close": True}
    connector: aiohttp.BaseConnector
    if target.unix is not None:
        connector = aiohttp.UnixConnector(target.unix, **options)
    else:
        connector = aiohttp.TCPConnector(ssl=target.tls if target.tls is not None else True, **options)
    headers = {"User-Agent": "tokenpipe-probe"}
    if target.credential is not None:
        headers["Authorization"] = "Bearer " + target.credential.decode()
    return aiohttp.ClientSession(
        connector=connector,
        headers=headers,
        timeout=aiohttp.ClientTimeout(total=timeout),
        cookie_jar=aiohttp.DummyCookieJar(),
        trust_env=False,
    )
