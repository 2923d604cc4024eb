"""RawUpstream: a scripted origin server on bare sockets.

Each request is read strictly and given to `script(wire, request)`. When the script returns and has not ended the
connection, the next request on it is read: keep-alive, as vLLM does, and no idle timeout. The gateway's own probes
(`probes`) are answered without the script and kept out of `requests`. What goes wrong in a script, or a request that
is no HTTP, fails the test when the upstream stops.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path

from tests.support.messages import HttpWire, Message
from tests.support.script import JSON_TYPE, Script, head, reply
from tests.support.wire import ORDINARY, Closed


def listening_socket(host: str = "127.0.0.1", port: int = 0) -> socket.socket:
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind((host, port))
    sock.listen(1024)
    return sock


class RawUpstream:
    def __init__(self, script: Script | None = None, *, models: Sequence[str] = ("m",)) -> None:
        self.script: Script = script or reply(200, b"{}")
        self.on_connect: Callable[[HttpWire], Awaitable[None]] | None = None  # serves the whole connection instead
        self.connections: list[HttpWire] = []
        self.requests: list[Message] = []
        self.wires: list[HttpWire] = []  # of each request: the newest connection may be a probe's
        self.busy: set[HttpWire] = set()  # with a request whose script has not come to its end
        self.probed: list[str] = []  # the paths of probes that were answered
        listed = [{"id": name, "object": "model", "created": 1, "owned_by": "vllm", "root": name, "parent": None,
                   "max_model_len": 4096} for name in models]  # fmt: skip
        self.probes: dict[str, Script] = {
            "/health": reply(200, b"", ()),
            "/v1/models": reply(200, json.dumps({"object": "list", "data": listed}).encode()),
            "/metrics": reply(200, b"", [("content-type", "text/plain; version=0.0.4; charset=utf-8")]),
            "/is_sleeping": reply(404, b'{"detail":"Not Found"}'),
            "/version": reply(200, b'{"version":"0.32.0"}'),
        }
        self.half_heads: list[bytes] = []  # of connections that ended within one
        self.failures: list[BaseException] = []
        self._tls: ssl.SSLContext | None = None
        self._listener: socket.socket | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._arrived = asyncio.Event()

    def __repr__(self) -> str:
        return f"<RawUpstream {len(self.connections)} connections, {len(self.requests)} requests>"

    async def start(
        self, listener: socket.socket | None = None, *, unix: Path | None = None, tls: ssl.SSLContext | None = None
    ) -> None:
        """On a free port, on `listener` (which is closed at the end), or on a Unix socket."""
        self._tls = tls
        if unix is not None:
            listener = socket.socket(socket.AF_UNIX)
            listener.bind(str(unix))
            listener.listen(1024)
            self.url = f"unix:{unix}"
        else:
            listener = listener or listening_socket()
            self.port = listener.getsockname()[1]
            self.url = f"{'https' if tls else 'http'}://127.0.0.1:{self.port}"
        listener.setblocking(False)
        self._listener = listener
        asyncio.get_running_loop().add_reader(listener, self._accept)

    def close_listener(self) -> None:
        """From now on connections are refused; those that stand go on."""
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener)
            self._listener.close()
            self._listener = None

    async def stop(self, *, check: bool = True) -> None:
        self.close_listener()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for wire in self.connections:
            wire.fin(notify=False)
        if check and self.failures:
            raise self.failures[0]

    async def wait_requests(self, count: int = 1, timeout: float = ORDINARY) -> list[Message]:
        """Wait until that many requests have been read in full."""
        async with asyncio.timeout(timeout):
            while len(self.requests) < count:
                self._arrived.clear()
                await self._arrived.wait()
        return self.requests

    @property
    def open_connections(self) -> list[HttpWire]:
        return [wire for wire in self.connections if not wire.ended and not wire.closed]

    @property
    def under_way(self) -> list[HttpWire]:
        """Connections that the other side keeps open, and on which it waits for an answer."""
        return [wire for wire in self.open_connections if wire in self.busy]

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            sock, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        wire = HttpWire(sock, eager=True)
        self.connections.append(wire)
        task = asyncio.create_task(self._serve(wire))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, wire: HttpWire) -> None:
        try:
            if self._tls:
                await wire.start_tls(self._tls, server_side=True)
            if self.on_connect:
                await self.on_connect(wire)
                return
            while not wire.closed:
                await self._serve_request(wire)
        except (Closed, ConnectionError, ssl.SSLError) as error:
            if isinstance(error, Closed) and error.args[0].strip(b"\r\n"):
                self.half_heads.append(error.args[0])
        except Exception as error:
            self.failures.append(error)
        finally:
            if wire.ended or self.on_connect is None:
                wire.fin(notify=wire.ended is None)

    async def _serve_request(self, wire: HttpWire) -> None:
        request = await wire.read_request(timeout=3600, body=False)
        probe = self.probes.get(request.path) if request.method == "GET" else None
        await wire.read_request_body(request, timeout=600)
        if probe:
            self.probed.append(request.path)
            await probe(wire, request)
            return
        self.requests.append(request)
        self.wires.append(wire)
        self._arrived.set()
        if request.complete:
            self.busy.add(wire)
            try:
                await self.script(wire, request)
            finally:
                self.busy.discard(wire)


@contextlib.asynccontextmanager
async def running(script: Script | None = None, **options: object) -> AsyncIterator[RawUpstream]:
    """An upstream on a free port for the time of a `with`."""
    upstream = RawUpstream(script)
    await upstream.start(**options)  # type: ignore[arg-type]
    try:
        yield upstream
    finally:
        await upstream.stop()


def probe_status(status: int) -> Script:
    """For `upstream.probes["/health"]`: an engine that says so of itself."""

    async def script(wire: HttpWire, request: Message) -> None:
        await wire.send(head(status, [JSON_TYPE, ("content-length", "0")], "Probe"))

    return script
