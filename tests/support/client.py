"""RawClient: a client whose every byte is the test's own. It reads only when it is asked to."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

from tests.support.messages import HttpWire, Message
from tests.support.script import post
from tests.support.wire import ORDINARY


class RawClient(HttpWire):
    @classmethod
    async def connect(
        cls, host: str = "127.0.0.1", port: int = 0, *, unix: Path | None = None, receive_buffer: int | None = None,
        rate: float | None = None, tls: ssl.SSLContext | None = None, hostname: str = "localhost",
    ) -> RawClient:  # fmt: skip
        """`receive_buffer` (SO_RCVBUF) bounds what the kernel takes for us, `rate` how many bytes a second we read."""
        address: str | tuple[str, int] = str(unix) if unix else (host, port)
        sock = socket.socket(socket.AF_UNIX if unix else socket.AF_INET6 if ":" in host else socket.AF_INET)
        try:
            if receive_buffer:
                # before the connection, for it sets the window that is offered
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
            sock.setblocking(False)
            async with asyncio.timeout(ORDINARY):
                await asyncio.get_running_loop().sock_connect(sock, address)
            client = cls(sock, eager=False)
            client.rate = rate
            if tls:
                await client.start_tls(tls, server_side=False, hostname=hostname)
        except BaseException:
            sock.close()
            raise
        return client

    async def ask(
        self, request: bytes | None = None, *, method: str | None = None, timeout: float = ORDINARY
    ) -> Message:
        """Send `request` (a streamed chat by default) and read the whole answer."""
        request = post() if request is None else request
        await self.send(request)
        return await self.read_response(method or request.split(b" ", 1)[0].decode("latin-1"), timeout)


@contextlib.asynccontextmanager
async def connected(*args: object, **options: object) -> AsyncIterator[RawClient]:
    client = await RawClient.connect(*args, **options)  # type: ignore[arg-type]
    try:
        yield client
    finally:
        client.fin()
