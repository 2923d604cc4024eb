"""The synthetic upstream as a server: alone (`tokenpipe mock`), or inside another process (the gateway, a test).

It is a stand-in for `vllm serve`: the same paths, the same bytes, the same manners on a connection, tokens on a
schedule instead of from a model. It stops working for a client that left, which is what a gateway in front of it is to
be tested for.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

from aiohttp import web

from gateway.synthetic.generation import Engine
from gateway.synthetic.metrics import EngineMetrics
from gateway.synthetic.routes import application
from gateway.synthetic.settings import MockSettings

__all__ = ["MockSettings", "SyntheticUpstream", "run"]

# uvicorn's, as vLLM runs it: an idle connection is closed after this, in seconds.
KEEPALIVE: Final = 5.0
# uvicorn with httptools takes heads of any size; so far, and no further.
_MAX_FIELD: Final = 1024 * 1024
_MAX_FIELDS: Final = 1000
# How long an orderly stop waits for readers to take the last event of their streams, in seconds.
_STOP_GRACE: Final = 0.5


class SyntheticUpstream:
    """One server with one engine. It is started and stopped once."""

    def __init__(self, settings: MockSettings | None = None, *, keepalive: float = KEEPALIVE):
        self.settings = settings or MockSettings()
        self._metrics = EngineMetrics(self.settings.model)
        self._engine = Engine(self.settings, self._metrics)
        self._keepalive = keepalive
        self._runner: web.AppRunner | None = None
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

    async def start(self, *, unix_path: str | Path | None = None) -> str:
        """Bind and accept. Port 0 picks one. Raises OSError where the address cannot be had."""
        if self._runner is not None:
            raise RuntimeError("the synthetic upstream was started already")
        self._runner = runner = web.AppRunner(
            application(self._engine),
            handler_cancellation=True,
            access_log=None,
            keepalive_timeout=self._keepalive,
            shutdown_timeout=_STOP_GRACE,
            max_line_size=_MAX_FIELD,
            max_field_size=_MAX_FIELD,
            max_headers=_MAX_FIELDS,
        )
        await runner.setup()
        try:
            if unix_path is None:
                await web.TCPSite(runner, self.settings.host, self.settings.port, backlog=2048).start()
            else:
                await web.UnixSite(runner, str(unix_path), backlog=2048).start()
        except OSError:
            await runner.cleanup()
            self._runner = None
            raise
        if unix_path is not None:
            self._socket, self._url = Path(unix_path), f"unix:{unix_path}"
        else:
            self._url = _http_url(self.settings.host, runner.addresses[0][1])
        return self._url

    async def stop(self) -> None:
        """Close the listener, end what runs with `finish_reason: "abort"`, and wait for the readers a little."""
        runner, self._runner = self._runner, None
        if runner is None:
            return
        self._engine.stop()
        await runner.cleanup()
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
        print(f"tokenpipe mock: cannot listen on {where}: {error.strerror or error}", file=sys.stderr)
        return 1
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
