"""`/admin/synth`: what holds for every request, what was sent when, and who holds KV for whom."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from typing import Any

from aiohttp import web

from gateway.synthetic.behaviour import SERVER_KNOBS, changed, shown
from gateway.synthetic.connectors.base import PULL, REJECT, Connector
from gateway.synthetic.engine import Engine
from gateway.synthetic.ledger import End
from gateway.synthetic.refusals import bad_request, failed
from gateway.synthetic.sendlog import SendLog
from gateway.synthetic.settings import allowed
from gateway.synthetic.text import json_text
from gateway.synthetic.wire import json_response

# Settled when the server starts.
_FIXED = ("idle_close",)


class Control:
    def __init__(self, engine: Engine, log: SendLog, transfer: Connector | None):
        self._engine, self._log, self._transfer = engine, log, transfer

    def add_to(self, router: web.UrlDispatcher) -> None:
        router.add_get("/admin/synth", self.show, allow_head=False)
        router.add_post("/admin/synth", self.change)
        router.add_delete("/admin/synth", self.reset)
        router.add_get("/admin/synth/log", self.log, allow_head=False)
        router.add_get("/admin/synth/log/{id}", self.entry, allow_head=False)
        if self._transfer is not None:
            router.add_get("/admin/synth/kv", self.kv, allow_head=False)
            router.add_post(PULL, partial(self._transfer.end, End.PULLED))
            router.add_post(REJECT, partial(self._transfer.end, End.REJECTED))
            router.add_routes(self._transfer.routes())

    async def show(self, request: web.Request) -> web.Response:
        engine = self._engine
        counts = {"running": engine.running, "waiting": engine.waiting, "arrived": engine.arrived}
        return _json({"knobs": shown(engine.behaviour), "server": shown(engine.capacity), **counts})

    async def change(self, request: web.Request) -> web.Response:
        """Turn knobs for all requests to come; all of them, or none."""
        try:
            asked = json.loads(await request.read())
        except ValueError:
            asked = None
        if not isinstance(asked, dict):
            raise bad_request('The body must be a JSON object of knobs, as {"ttft": 0.2, "fault": "reset@token:3"}.')
        try:
            self._turn(asked)
        except ValueError as error:
            raise bad_request(f"{error}.") from None
        return await self.show(request)

    def _turn(self, asked: Mapping[str, object]) -> None:
        engine = self._engine
        fixed = [name for name in asked if name in _FIXED]
        if fixed:
            raise ValueError(f"{fixed[0]}: cannot be changed while it runs; start it with --set {fixed[0]}=...")
        server = {name: value for name, value in asked.items() if name in SERVER_KNOBS}
        own = {name: value for name, value in asked.items() if name not in SERVER_KNOBS}
        behaviour = allowed(changed(engine.behaviour, own), embedded=engine.settings.embedded)
        engine.changed(changed(engine.capacity, server))
        engine.behaviour = behaviour

    async def reset(self, request: web.Request) -> web.Response:
        self._engine.reset()
        return await self.show(request)

    async def log(self, request: web.Request) -> web.Response:
        return _json({"requests": self._log.summaries()})

    async def entry(self, request: web.Request) -> web.Response:
        found = self._log.find(request.match_info["id"])
        if found is None:
            raise failed(404, "No such request, or one of too long ago.")
        return _json(found.whole())

    async def kv(self, request: web.Request) -> web.Response:
        assert self._transfer is not None
        return _json(self._transfer.state())


def _json(value: Any) -> web.Response:
    return json_response(json_text(value))
