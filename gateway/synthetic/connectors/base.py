"""What the connectors of a mock engine have in common: the ledger of what is held for whom, and how engines reach each other.

Where real engines have side channels (NIXL, ZMQ, a bootstrap server), these have paths of their own HTTP port: whoever is
told an address (`remote_host`, `remote_bootstrap_addr`, a ZMQ address within an id) is to be told that one. A decoder fetches
by a key, a request id or one that both sides agreed upon; it may come before the prefill has anything, and waits then.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final
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
PATIENCE: Final = 6.0  # seconds for a pull; NIXL gave up after 5.8
FAILED: Final = "Internal server error"

Params = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Incoming:
    """A request's ids. `name`: as the answer has it, `chatcmpl-...`; `header`: its X-Request-Id."""

    name: str
    header: str | None


class Connector:
    """Of one engine. `address`: where its own port is, once it listens. A subclass says what happens in `prepare`."""

    name: ClassVar[str]
    lease: ClassVar[float] = 30.0  # seconds that a prefill's KV is held, where no knob says otherwise

    def __init__(self, engine: Engine, role: str):
        self._engine, self.role = engine, role
        self._prefills, self._decodes = role in ("both", "prefill"), role in ("both", "decode")
        self.engine_id = str(uuid4())  # another one after each start, as vLLM's
        self.address: tuple[str, int] | None = None
        self.ledger = Ledger(self.seconds, engine.capacity.kv_blocks or BLOCKS)
        self._series = engine.metrics.kv(lambda: len(self.ledger.held))
        self._tasks = Tasks()
        self._session: aiohttp.ClientSession | None = None
        self._awaited: dict[str, asyncio.Future[None]] = {}  # keys that a decoder came for before they were there
        self.recomputed = 0  # prompts that a decoder computed though somebody had prefilled them
        self.loaded = 0  # prompts that a decoder was spared

    @property
    def seconds(self) -> float:
        given = self._engine.capacity.lease
        return self.lease if given is None else given

    async def stop(self) -> None:
        await self._tasks.stop()
        if self._session is not None:
            await self._session.close()

    # what a connector says for itself ---------------------------------------------------------------------------------

    def shape(self, ask: Ask) -> Ask:
        """What the engine makes of a request before it runs. Raises VllmRefusal."""
        return ask

    def prepare(self, ask: Ask, generation: Generation, incoming: Incoming) -> None:
        """See to what a request asks of the connector."""
        raise NotImplementedError

    def refused(self, body: Body) -> None:
        """A decode request that will not be served, or whose client has left before it had its KV."""

    def routes(self) -> Sequence[web.RouteDef]:
        """Paths besides those that all have."""
        return ()

    # the prefill's side -----------------------------------------------------------------------------------------------

    def hold(self, keys: Sequence[str], ask: Ask) -> list[Held]:
        """The blocks of a finished prefill, once for each key, until somebody fetches them or the lease is over."""
        now, blocks = time.monotonic(), -(-ask.prompt_tokens // ask.prompts // BLOCK_SIZE)
        self.ledger.lease = self.seconds
        held = [self.ledger.hold(key, blocks, ask.prompt_tokens, now) for key in keys]
        self._engine.hold(blocks * len(held))
        if held[0].until < math.inf:
            assert self._engine.alarm is not None
            self._engine.alarm.at(held[0].until, self._expire)
        for key in keys:
            waiter = self._awaited.get(key)
            if waiter is not None and not waiter.done():
                waiter.set_result(None)
        return held

    def holds(self, key: str) -> bool:
        return any(held.request_id == key for held in self.ledger.held)

    def let_go(self, key: str, how: End = End.ABORTED) -> None:
        """What is still held for it is held no more."""
        if self.holds(key):
            held = self.ledger.end(key, how, time.monotonic())
            if held is not None:
                self.over(held, how)

    def over(self, held: Held, how: End) -> None:
        self._engine.hold(-len(held.blocks))
        self._series[how.value].inc()

    def _expire(self) -> None:
        for held in self.ledger.expire(time.monotonic()):
            self.over(held, End.EXPIRED)
            self._engine.metrics.kv_expired.inc()

    async def end(self, how: End, request: web.Request) -> web.Response:
        """The decoder's call: 200 and the blocks, 404 for another engine, 410 for what is held no more. `wait`: seconds
        that it waits for what is not there yet."""
        asked = await request.json()
        if asked.get("remote_engine_id") not in (None, self.engine_id):
            return web.json_response({"error": f"this is {self.engine_id}"}, status=404)
        key = str(asked.get("remote_request_id"))
        self.came(key)
        if asked.get("wait") and not self.holds(key):
            await self._arrival(key, float(asked["wait"]))
        held = self.ledger.end(key, how, time.monotonic())
        if held is None:
            return web.json_response({"error": "not held"}, status=410)
        self.over(held, how)
        self.fetched(key)
        return web.json_response({"blocks": len(held.blocks), "tokens": held.tokens})

    def came(self, key: str) -> None:
        """A decoder is there."""

    def fetched(self, key: str) -> None:
        """It has what it came for."""

    async def _arrival(self, key: str, seconds: float) -> None:
        waiter = self._awaited[key] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(seconds):
                await waiter
        except TimeoutError:
            pass
        finally:
            if self._awaited.get(key) is waiter:
                del self._awaited[key]

    # the decoder's side -----------------------------------------------------------------------------------------------

    async def fetch(
        self, url: str, key: str, ask: Ask, generation: Generation, *, engine_id: Any = None, wait: float = 0
    ) -> int:
        """Get KV by its key. What comes is 200, what is gone already is other text; all else is for the caller to judge."""
        status, answer = await self.call(
            url, PULL, {"remote_engine_id": engine_id, "remote_request_id": key, "wait": wait}, wait
        )
        if status == 200 and answer.get("tokens") == ask.prompt_tokens:
            self.spare(generation)
        elif status == 200:
            generation.garble()  # the KV of another prompt: no error, and text that is wrong
        elif status != 410:
            self._engine.metrics.kv_failed.inc()
        return status

    def spare(self, generation: Generation) -> None:
        """Its prompt need not be computed."""
        self.loaded += 1
        generation.spared()

    def recompute(self) -> None:
        """The decoder computes the prompt itself, and says so in its log only."""
        self.recomputed += 1
        self._engine.metrics.kv_recomputed.inc()

    async def fatal(self) -> None:
        self._engine.die()
        raise EngineDied

    async def for_ever(self) -> None:
        await asyncio.get_running_loop().create_future()

    async def failure(self) -> None:
        self._engine.metrics.kv_failed.inc()
        raise EngineFault(FAILED)

    async def call(self, url: str, path: str, body: Params, patience: float = 0.0) -> tuple[int, Params]:
        """Ask another engine; status 0 where it cannot be reached."""
        if self._session is None:
            self._session = aiohttp.ClientSession()
        timeout = aiohttp.ClientTimeout(total=None if patience == math.inf else PATIENCE + patience)
        wait = {"wait": 1e9} if body.get("wait") == math.inf else {}
        try:
            async with self._session.post(url + path, json={**body, **wait}, timeout=timeout) as response:
                said = await response.json(content_type=None)
                return response.status, said if isinstance(said, dict) else {}
        except (aiohttp.ClientError, TimeoutError, ValueError):
            return 0, {}

    # ------------------------------------------------------------------------------------------------------------------

    def state(self) -> Params:
        now = time.monotonic()
        held = [
            {
                "request_id": one.request_id,
                "blocks": len(one.blocks),
                "tokens": one.tokens,
                "left_s": None if one.until == math.inf else one.until - now,
            }
            for one in self.ledger.held
        ]
        ends = {end.value: self.ledger.ends[end] for end in End}
        counts = {"unknown": self.ledger.unknown, "loaded": self.loaded, "recomputed": self.recomputed}
        return {"engine_id": self.engine_id, "connector": self.name, "held": held, "ends": ends, **counts}


def given(ask: Ask) -> Params:
    params = ask.body.get("kv_transfer_params")
    return params if isinstance(params, dict) else {}


def url_of(host: Any, port: Any) -> str:
    host = str(host)
    return f"http://[{host}]:{port}" if ":" in host and not host.startswith("[") else f"http://{host}:{port}"


def compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))
