"""vLLM Ascend's MooncakeLayerwiseConnector: the decoder comes first, and asks for its prefill by a call to the metaserver.

The decoder tells the metaserver of its request which blocks wait for KV, without heeding the answer, and waits until the
prefill has pushed. Nothing is held on the prefill's side; here the ledger is the decoder's: what waits for a push.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from typing import Any, Final

from aiohttp import web

from gateway.synthetic.ask import Ask
from gateway.synthetic.connectors.base import Connector, Incoming, Params, given, url_of
from gateway.synthetic.generation import Generation
from gateway.synthetic.ledger import End

PUSH: Final = "/admin/synth/kv/push"
_TRIES: Final = 3


class Layerwise(Connector):
    name = "layerwise"
    lease = math.inf

    def __init__(self, engine: Any, role: str):
        super().__init__(engine, role)
        self._pushed: dict[str, asyncio.Event] = {}

    def prepare(self, ask: Ask, generation: Generation, incoming: Incoming) -> None:
        params = given(ask)
        if self._prefills and params.get("do_remote_decode"):
            generation.on_finish = lambda: self._push_all(params, ask)
        elif self._decodes and params.get("do_remote_prefill"):
            if not params.get("metaserver"):
                generation.prelude = self.for_ever
            else:
                children = [incoming.name]
                if incoming.name.startswith("cmpl-"):
                    children = [f"{incoming.name}-{at}" for at in range(ask.prompts)]
                generation.prelude = lambda: self._ask(str(params["metaserver"]), children, ask, generation)

    def routes(self) -> Sequence[web.RouteDef]:
        return (web.post(PUSH, self._take),)

    # the prefill's side

    def _push_all(self, params: Params, ask: Ask) -> None:
        batch = params.get("batch_kv_transfer_params")
        for child in batch.values() if isinstance(batch, dict) else (params,):
            if isinstance(child, dict) and child.get("remote_host") and child.get("remote_port"):
                where = url_of(child["remote_host"], child["remote_port"])
                pushed = {"request_id": child.get("request_id"), "tokens": ask.prompt_tokens}
                self._tasks.start(self.call(where, PUSH, pushed), "kv push")

    # the decoder's side

    async def _take(self, request: web.Request) -> web.Response:
        asked = await request.json()
        waiting = self._pushed.get(str(asked.get("request_id")))
        if waiting is None:
            self.ledger.unknown += 1
            return web.json_response({"error": "nobody waits for it"}, status=404)
        waiting.set()
        return web.json_response({})

    async def _ask(self, metaserver: str, children: list[str], ask: Ask, generation: Generation) -> None:
        how = End.ABORTED
        self._pushed |= {child: asyncio.Event() for child in children}
        try:
            for child, held in zip(children, self.hold(children, ask), strict=True):
                await self._post(metaserver, self._called(child, list(held.blocks)))
            for child in children:
                await self._pushed[child].wait()
            how = End.PULLED
            self.spare(generation)
        finally:
            for child in children:
                self._pushed.pop(child, None)
                self.let_go(child, how)

    def _called(self, child: str, blocks: list[int]) -> Params:
        host, port = self.address or (None, None)
        return {
            "request_id": child,
            "token_ids": [],
            "do_remote_prefill": False,
            "do_remote_decode": True,
            "remote_block_ids": [blocks],
            "remote_block_size": 128,
            "remote_engine_id": self.engine_id,
            "remote_host": host,
            "remote_port": port,
            "remote_tp_size": 1,
            "remote_pcp_size": 1,
            "remote_dcp_size": 1,
            "remote_cached_tokens": 0,
        }

    async def _post(self, metaserver: str, body: Params) -> None:
        """Three tries where nobody answers; what is answered, it does not look at."""
        for _ in range(_TRIES):
            status, _answer = await self.call(metaserver, "", body, patience=300)
            if status:
                return
