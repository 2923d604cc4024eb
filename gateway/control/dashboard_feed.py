"""The live feed: one task that samples while anybody looks, and a viewer's connection each.

Nobody looks, and nothing runs, nothing is observed: only the points of the last minutes lie here until the next viewer.
However many look, there is one task, and each sample is put into octets once. A viewer that is slower than the samples
misses some, never points; one that takes nothing for `SEND_TIMEOUT` is dropped.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import time
from collections import deque
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any, Final, Protocol

from aiohttp import web
from aiohttp_sse import EventSourceResponse

from gateway.control.dashboard_sample import Sampler, short
from gateway.core.exchange import Exchange, Observer
from gateway.net.tasks import Tasks

log = logging.getLogger(__name__)

INTERVAL: Final = 1.0  # seconds between samples
HISTORY: Final = 300  # points that are kept for the plots
VIEWERS_MOST: Final = 16
SEND_TIMEOUT: Final = 10.0  # seconds that a viewer may take nothing
SEND_BUFFER: Final = 131072  # octets that the kernel holds for a viewer
AT_A_TIME: Final = 100  # exchanges that are looked at before relays have their turn
BACKENDS_MOST: Final = 100  # that one sample describes, those in trouble first where there are more
MODELS_MOST: Final = 3  # of a backend, by name


class Source(Protocol):
    """What the feed asks of the gateway."""

    def observe(self, observer: Observer | None) -> None:
        """Tell this observer too of exchanges from now on; None: nobody any more."""

    def exchanges(self) -> Iterable[Exchange]:
        """All in flight, the oldest first, each as it stands when it is come to. It may be left and taken up again."""

    def backends(self) -> list[dict[str, Any]]: ...

    def outcomes(self) -> Mapping[str, int]:
        """How many exchanges have ended so since the start."""

    def status(self) -> dict[str, Any]:
        """version, uptime_s, queued, and `trouble`: None when requests can be served, else why not."""


class Feed:
    def __init__(
        self, source: Source, *, interval: float = INTERVAL, most: int = VIEWERS_MOST, send_timeout: float = SEND_TIMEOUT
    ):
        self._source, self._interval, self._most, self._send_timeout = source, interval, most, send_timeout
        self._tasks = Tasks()
        self._viewers = 0
        self._sampling: asyncio.Task[None] | None = None
        self._points: deque[tuple[int, str]] = deque(maxlen=HISTORY)  # numbered from 1, as JSON
        self._taken = 0  # points
        self._state = ""  # the last sample but for its points, as JSON; empty before the first
        self._event = b""  # the last sample, with its own point alone
        self._news = asyncio.Event()  # a new one for each sample

    @property
    def full(self) -> bool:
        return self._viewers >= self._most

    async def serve(self, request: web.Request) -> web.StreamResponse:
        """Show it to one viewer until the viewer leaves, falls behind, or the feed ends. Ask `full` first."""
        response = EventSourceResponse(sep="\n", send_timeout=self._send_timeout)
        response.headers.update({"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"})
        sampling = self._enter()
        try:
            _bound_buffer(request)
            await response.prepare(request)
            async with response:
                await self._show(request, response, sampling)
        except (ConnectionError, TimeoutError) as error:
            log.debug("a viewer of the live page has gone: %r", error)
        finally:
            self._leave()
        return response

    async def stop(self) -> None:
        """End all viewers' feeds, in order."""
        self._end()
        await self._tasks.stop()

    # viewers ----------------------------------------------------------------------------------------------------------

    def _enter(self) -> asyncio.Task[None]:
        self._viewers += 1
        if self._sampling is None:
            sampler = Sampler(time.monotonic())
            self._source.observe(sampler)
            self._sampling = self._tasks.spawn(self._sample(sampler), "samples for the live page")
        return self._sampling

    def _leave(self) -> None:
        self._viewers -= 1
        if not self._viewers:
            self._end()

    def _end(self) -> None:
        """Stop sampling, and wake whoever waits for samples."""
        if self._sampling is not None:
            self._sampling.cancel()
            self._sampling, self._state, self._event = None, "", b""
            self._source.observe(None)
        self._tell()

    async def _show(self, request: web.Request, response: EventSourceResponse, sampling: asyncio.Task[None]) -> None:
        seen = 0  # points
        while self._sampling is sampling:
            news = self._news
            if self._state:
                event = self._event if seen == self._taken - 1 else self._event_since(seen)
                seen = self._taken
                try:
                    async with asyncio.timeout(self._send_timeout):
                        await response.write(event)  # not `send`, which looks for line ends in it for each viewer anew
                except TimeoutError:
                    if request.transport is not None:
                        request.transport.abort()  # it would not take the end either
                    raise
            await news.wait()

    def _event_since(self, seen: int) -> bytes:
        """The last sample, with all points after this one. JSON has no line ends, so that it is one data line."""
        points = ",".join([point for number, point in self._points if number > seen])
        return f'event: sample\ndata: {{"points":[{points}],{self._state[1:]}\n\n'.encode()

    # sampling ---------------------------------------------------------------------------------------------------------

    async def _sample(self, sampler: Sampler) -> None:
        try:
            while True:
                began = time.monotonic()
                await self._look(sampler)
                self._tell()
                await asyncio.sleep(max(began + self._interval - time.monotonic(), self._interval / 2))
        finally:
            if self._sampling is asyncio.current_task():  # it failed: viewers are let go, and come again
                self._end()

    async def _look(self, sampler: Sampler) -> None:
        """Take one sample, with turns for the relays between."""
        exchanges = iter(self._source.exchanges())
        while some := list(islice(exchanges, AT_A_TIME)):
            now = time.monotonic()
            for exchange in some:
                sampler.look(exchange, now)
            await asyncio.sleep(0)
        rows, phases = sampler.rows, sampler.phases
        point, tokens = sampler.point(time.monotonic(), time.time())
        self._taken += 1
        self._points.append((self._taken, json.dumps(point, separators=(",", ":"))))
        backends = self._source.backends()
        state = {
            "interval_s": self._interval,
            **self._source.status(),
            "in_flight": phases.total(),
            "phases": dict(phases),
            "streams": rows,
            "backends_total": len(backends),
            "backends": [_backend(one, tokens) for one in _of_interest(backends)],
            "outcomes": dict(self._source.outcomes()),
        }
        self._state = json.dumps(state, separators=(",", ":"))
        self._event = self._event_since(self._taken - 1)

    def _tell(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()


def _of_interest(backends: list[dict[str, Any]]) -> list[dict[str, Any]]:
    if len(backends) > BACKENDS_MOST:
        backends = sorted(backends, key=lambda one: one["state"] == "up")
    return backends[:BACKENDS_MOST]


def _backend(one: dict[str, Any], tokens: Mapping[str | None, float]) -> dict[str, Any]:
    models = one["models"]
    shown = {name: one[name] for name in ("state", "in_flight", "max_in_flight", "weight", "connections")}
    return {
        "name": short(one["name"]),
        **shown,
        "tokens_per_s": tokens.get(one["name"], 0.0),
        "models": [short(model) for model in models[:MODELS_MOST]],
        "models_total": len(models),
    }


def _bound_buffer(request: web.Request) -> None:
    """The kernel would let it grow to megabytes before a viewer that does not read were noticed."""
    sock = request.transport.get_extra_info("socket") if request.transport is not None else None
    if sock is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
