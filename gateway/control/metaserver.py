"""The metaserver of vLLM Ascend's layerwise connector: decode engines post here, and ask for the prefill of their request.

It is a listener of its own, for the network of the engines: what is posted makes the gateway send a request to a prefill engine
with addresses in it. It takes nothing but callbacks of requests that are under way.
"""

from __future__ import annotations

import socket
from collections.abc import Callable

from aiohttp import web

from gateway.control.listener import listening
from gateway.control.replies import error, reply
from gateway.errors import Refusal

PATH = "/v1/metaserver"
CALLBACK_MOST = 16 << 20  # octets: block ids of a long prompt


class Metaserver:
    """`called_back`: takes what was posted; raises Refusal."""

    def __init__(self, called_back: Callable[[bytes], None], sock: socket.socket):
        self._called_back, self._sock = called_back, sock
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        app = web.Application(client_max_size=CALLBACK_MOST)
        app.router.add_post(PATH, self._posted)
        self._runner = await listening(app, self._sock)

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    async def _posted(self, request: web.Request) -> web.Response:
        try:
            self._called_back(await request.read())
        except Refusal as refusal:
            return error(refusal.ruling.status, refusal.code, refusal.message)
        return reply({"status": "ok"})
