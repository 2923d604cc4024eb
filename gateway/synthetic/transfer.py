"""KV from a prefill engine to a decode engine, in the shape of vLLM's NixlConnector (pull).

The prefill's answer carries `kv_transfer_params`; the request that brings them to a decode engine has it pull, over HTTP
from the prefill's own port (where NIXL has its side channel), before its first token. As with vLLM:

    a streamed prefill holds its KV, and tells nobody
    n choices hold n times, and one of them is told
    a pull that fails is an error within the stream; one that comes too late is silently other text
    a decode request that is refused, or whose client left before the pull, has the prefill let go
    `do_remote_prefill` with nothing besides kills the engine; without the engine's id it hangs for ever
"""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any, Final
from uuid import uuid4

import aiohttp
from aiohttp import web

from gateway.net.tasks import Tasks
from gateway.synthetic.ask import Ask, Body
from gateway.synthetic.engine import Engine
from gateway.synthetic.generation import EngineDied, EngineFault, Generation
from gateway.synthetic.ledger import End, Held, Ledger
from gateway.synthetic.metrics import BLOCK_SIZE, BLOCKS

PULL: Final = "/admin/synth/kv/pull"
REJECT: Final = "/admin/synth/kv/reject"
_NEEDED: Final = ("remote_request_id", "remote_host", "remote_port", "remote_block_ids")
_PATIENCE: Final = 6.0  # seconds for a pull; NIXL gave up after 5.8


class Transfer:
    """The connector of one engine. `address`: where its own port is, once it listens."""

    def __init__(self, engine: Engine, role: str):
        self._engine = engine
        self._prefills, self._decodes = role in ("both", "prefill"), role in ("both", "decode")
        self.engine_id = str(uuid4())  # another one after each start, as vLLM's
        self.address: tuple[str, int] | None = None
        self.ledger = Ledger(engine.capacity.lease, engine.capacity.kv_blocks or BLOCKS)
        self._series = engine.metrics.kv(lambda: len(self.ledger.held))
        self._tasks = Tasks()
        self._session: aiohttp.ClientSession | None = None

    async def stop(self) -> None:
        await self._tasks.stop()
        if self._session is not None:
            await self._session.close()

    def prepare(self, ask: Ask, generation: Generation, request_id: str) -> None:
        """See to what a request asks of the connector. `request_id`: as the answer has it, `chatcmpl-...`."""
        params = ask.body.get("kv_transfer_params") or {}
        if self._prefills and params.get("do_remote_decode"):
            generation.on_finish = lambda: self._hold(ask, generation, request_id)
        elif self._decodes and params.get("do_remote_prefill"):
            if not any(params.get(name) for name in (*_NEEDED, "remote_engine_id")):
                generation.prelude = self._fatal
            elif not params.get("remote_engine_id"):
                generation.prelude = self._for_ever
            else:
                generation.prelude = lambda: self._pull(params, ask, generation)

    def refused(self, body: Body) -> None:
        """A decode request that will not be served, or whose client has left before the pull."""
        params = body.get("kv_transfer_params")
        if self._decodes and isinstance(params, dict) and params.get("do_remote_prefill") and self._complete(params):
            self._tasks.start(self._call(REJECT, params), "kv reject")

    # the prefill's side -----------------------------------------------------------------------------------------------

    def _hold(self, ask: Ask, generation: Generation, request_id: str) -> None:
        if generation.finish not in ("length", "stop"):
            return
        now, blocks = time.monotonic(), -(-ask.prompt_tokens // ask.prompts // BLOCK_SIZE)
        suffix = generation.plan.random("kv").randbytes(4).hex()
        self.ledger.lease = self._engine.capacity.lease
        held = [
            self.ledger.hold(f"{request_id}-{suffix}{f'-{choice}' if choice else ''}", blocks, ask.prompt_tokens, now)
            for choice in range(ask.choices)
        ]
        self._engine.hold(blocks * len(held))
        assert self._engine.alarm is not None
        self._engine.alarm.at(held[0].until, self._expire)
        generation.handoff = json.dumps(self._params(held[0], generation), separators=(",", ":"))

    def _params(self, held: Held, generation: Generation) -> dict[str, Any]:
        host, port = self.address or (None, None)
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [list(held.blocks)],
            "remote_engine_id": self.engine_id,
            "remote_request_id": held.request_id,
            "remote_host": host,
            "remote_port": port,
            "tp_size": 1,
            "dcp_size": 1,
            "pp_size": 1,
            "remote_num_tokens": held.tokens,
            "remote_blocks_expiry_time": None,
            "transfer_mode": "pull",
            "remote_prefill_cached_tokens": generation.cached,
        }

    def _expire(self) -> None:
        for held in self.ledger.expire(time.monotonic()):
            self._over(held, End.EXPIRED)
            self._engine.metrics.kv_expired.inc()

    def _over(self, held: Held, how: End) -> None:
        self._engine.hold(-len(held.blocks))
        self._series[how.value].inc()

    async def end(self, how: End, request: web.Request) -> web.Response:
        """The decoder's call: 200 and the blocks, 404 for another engine, 410 for what is held no more."""
        asked = await request.json()
        if asked.get("remote_engine_id") != self.engine_id:
            return web.json_response({"error": f"this is {self.engine_id}"}, status=404)
        held = self.ledger.end(str(asked.get("remote_request_id")), how, time.monotonic())
        if held is None:
            return web.json_response({"error": "not held"}, status=410)
        self._over(held, how)
        return web.json_response({"blocks": len(held.blocks), "tokens": held.tokens})

    def state(self) -> dict[str, Any]:
        now = time.monotonic()
        held = [
            {"request_id": one.request_id, "blocks": len(one.blocks), "tokens": one.tokens, "left_s": one.until - now}
            for one in self.ledger.held
        ]
        ends = {end.value: self.ledger.ends[end] for end in End}
        return {"engine_id": self.engine_id, "held": held, "ends": ends, "unknown": self.ledger.unknown}

    # the decoder's side -----------------------------------------------------------------------------------------------

    async def _pull(self, params: dict[str, Any], ask: Ask, generation: Generation) -> None:
        if not self._complete(params):
            return  # it computes the prompt itself, and says so in its log only
        try:
            status, answer = await self._call(PULL, params)
        except asyncio.CancelledError:
            self.refused(ask.body)
            raise
        if status not in (200, 410):
            raise EngineFault("Internal server error")
        if status == 410 or answer.get("tokens") != ask.prompt_tokens:
            # Somebody else's blocks by now, or those of another prompt: no error, and text that is wrong.
            generation.garble()

    async def _fatal(self) -> None:
        self._engine.die()
        raise EngineDied

    async def _for_ever(self) -> None:
        await asyncio.get_running_loop().create_future()

    def _complete(self, params: dict[str, Any]) -> bool:
        return all(params.get(name) is not None for name in (*_NEEDED, "remote_engine_id"))

    async def _call(self, path: str, params: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """Ask the prefill engine that the parameters name; status 0 where it cannot be reached."""
        if self._session is None:
            self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_PATIENCE))
        host = str(params["remote_host"])
        url = f"http://[{host}]:{params['remote_port']}" if ":" in host else f"http://{host}:{params['remote_port']}"
        named = {name: params[name] for name in ("remote_engine_id", "remote_request_id")}
        try:
            async with self._session.post(url + path, json=named) as response:
                return response.status, await response.json(content_type=None)
        except (aiohttp.ClientError, TimeoutError, ValueError):
            return 0, {}
