"""The synthetic upstream as a server: alone (`tokenpipe mock`), or inside another process (the gateway, a test).

It is a stand-in for `vllm serve`: the same paths, the same bytes, the same manners on a connection, tokens on a
schedule instead of from a model. It stops working for a client that left, which is what a gateway in front of it is to
be tested for.
"""

from __future__ import annotations

import asyncio
import gc
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

from aiohttp import web

from gateway.net.tasks import Tasks
from gateway.synthetic.alarm import Alarm
from gateway.synthetic.connectors import connector_of
from gateway.synthetic.engine import Engine
from gateway.synthetic.metrics import EngineMetrics
from gateway.synthetic.routes import application
from gateway.synthetic.settings import MockSettings

__all__ = ["MockSettings", "SyntheticUpstream", "run"]

# uvicorn with httptools takes heads of any size; so far, and no further.
_MAX_FIELD: Final = 1024 * 1024
_MAX_FIELDS: Final = 1000
# How long an orderly stop waits for readers to take the last event of their streams, in seconds.
_STOP_GRACE: Final = 0.5


class SyntheticUpstream:
    """One server with one engine. It is started and stopped once."""

    def __init__(self, settings: MockSettings | None = None):
        self.settings = settings or MockSettings()
        self._engine = Engine(self.settings, EngineMetrics(self.settings.model))
        self._engine.close_port = self._close_port
        self._transfer = connector_of(self._engine)
        self._tasks = Tasks()
        self._runner: web.AppRunner | None = None
        self._site: web.BaseSite | None = None
        self._socket: Path | None = None
        self._url: str | None = None

    @property
    def url(self) -> str:
        """Where it listens; known once it was started."""
        if self._url is None:
            raise RuntimeError("the synthetic upstream was not started")
        return self._url

    @property
    def running(self) -> int:
        """Requests being generated now."""
        return self._engine.running

    @property
    def waiting(self) -> int:
        """Requests that wait for a slot."""
        return self._engine.waiting

    async def start(self, *, unix_path: str | Path | None = None) -> str:
        """Bind and accept. Port 0 picks one. Raises OSError where the address cannot be had."""
        if self._runner is not None:
            raise RuntimeError("the synthetic upstream was started already")
        self._runner = runner = web.AppRunner(
            application(self._engine, self._transfer),
            handler_cancellation=True,
            access_log=None,
            keepalive_timeout=self._engine.capacity.idle_close,
            shutdown_timeout=_STOP_GRACE,
            max_line_size=_MAX_FIELD,
            max_field_size=_MAX_FIELD,
            max_headers=_MAX_FIELDS,
        )
        await runner.setup()
        self._engine.alarm = Alarm()
        host, port = self.settings.host, self.settings.port
        self._socket = None if unix_path is None else Path(unix_path)
        try:
            self._site = await self._listen(port)
        except OSError:
            await self._close(runner)
            self._runner = None
            raise
        if self._socket is not None:
            self._url = f"unix:{unix_path}"
        else:
            port = runner.addresses[0][1]
            self._url = _http_url(host, port)
            if self._transfer is not None:
                self._transfer.address = host, port
        return self._url

    async def _listen(self, port: int) -> web.BaseSite:
        assert self._runner is not None
        site: web.BaseSite
        if self._socket is not None:
            site = web.UnixSite(self._runner, str(self._socket), backlog=2048)
        else:
            site = web.TCPSite(self._runner, self.settings.host, port, backlog=2048)
        await site.start()
        return site

    def _close_port(self, seconds: float) -> None:
        """For so long no connection is taken; those that are there go on."""
        self._tasks.start(self._down(seconds), "a port that is closed")

    async def _down(self, seconds: float) -> None:
        site, runner = self._site, self._runner
        if site is None or runner is None:
            return  # it is closed already
        self._site = None
        port = int(runner.addresses[0][1]) if self._socket is None else 0
        await site.stop()
        await asyncio.sleep(seconds)
        self._site = await self._listen(port)

    async def _close(self, runner: web.AppRunner) -> None:
        await runner.cleanup()
        if self._transfer is not None:
            await self._transfer.stop()
        if self._engine.alarm is not None:
            self._engine.alarm.close()

    async def stop(self) -> None:
        """Close the listener, end what runs with `finish_reason: "abort"`, and wait for the readers a little."""
        runner, self._runner = self._runner, None
        if runner is None:
            return
        self._engine.stop()
        await self._tasks.stop()
        await self._close(runner)
        if self._socket is not None:
            self._socket.unlink(missing_ok=True)


def run(settings: MockSettings) -> int:
    """`tokenpipe mock`: serve until SIGTERM or SIGINT. Returns the exit status."""
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(_serve(settings))


async def _serve(settings: MockSettings) -> int:
    upstream, stopped = SyntheticUpstream(settings), asyncio.Event()
    loop = asyncio.get_running_loop()
    # Before the port is open: a signal that comes right after "listening" must find its handler.
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    try:
        url = await upstream.start()
    except OSError as error:
        where = _http_url(settings.host, settings.port)
        hint = "; choose another one (--port, --host)"
        print(f"tokenpipe mock: cannot listen on {where}: {error.strerror or error}{hint}", file=sys.stderr)
        return 1
    # What is here now stays: the collector need not look at it in the midst of streams.
    gc.collect()
    gc.freeze()
    print(f"listening on {url}", file=sys.stderr, flush=True)
    await stopped.wait()
    await upstream.stop()
    return 0


def _http_url(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop
