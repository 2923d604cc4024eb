"""A front of TLS that lets a hand-off last: whoever comes before it is opened waits for its handshake for ever."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

from tests.support.tls import Certificates
from tests.support.upstream import listening_socket


class Shy:
    """Before a decode engine, with TLS: it shakes hands with nobody that comes before `open`. A hand-off lasts until then."""

    def __init__(self, port: int, certificates: Certificates):
        self._port, self._tls = port, certificates.server_context()
        self._kept: list[Any] = []
        self._writers: list[asyncio.StreamWriter] = []
        self.open = False

    @contextlib.asynccontextmanager
    async def listening(self) -> AsyncIterator[str]:
        loop, sock = asyncio.get_running_loop(), listening_socket()
        sock.setblocking(False)

        def accept() -> None:
            with contextlib.suppress(BlockingIOError):
                while True:
                    accepted, _ = sock.accept()
                    if self.open:
                        tasks.append(loop.create_task(self._pass(accepted)))
                    else:
                        self._kept.append(accepted)

        tasks: list[asyncio.Task[None]] = []
        loop.add_reader(sock, accept)
        try:
            yield f"https://127.0.0.1:{sock.getsockname()[1]}"
        finally:
            loop.remove_reader(sock)
            for task in tasks:
                task.cancel()
            for one in (sock, *self._kept, *self._writers):
                one.close()

    @property
    def waiting(self) -> int:
        return len(self._kept)

    async def _pass(self, accepted: Any) -> None:
        reader = asyncio.StreamReader()
        protocol = asyncio.StreamReaderProtocol(reader)
        loop = asyncio.get_running_loop()
        transport, _ = await loop.connect_accepted_socket(lambda: protocol, accepted, ssl=self._tls)
        writer = asyncio.StreamWriter(transport, protocol, reader, loop)
        inner, inside = await asyncio.open_connection("127.0.0.1", self._port)
        self._writers += (writer, inside)
        await asyncio.gather(_pump(reader, inside), _pump(inner, writer))


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(1 << 16):
            writer.write(data)
    writer.close()
