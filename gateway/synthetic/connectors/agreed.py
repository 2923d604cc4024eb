"""Connectors whose two sides meet by a key that the gateway made up: whoever is there first waits for the other."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import re
from collections.abc import Sequence
from typing import Any, ClassVar, Final

from aiohttp import web

from gateway.synthetic.ask import Ask
from gateway.synthetic.connectors.base import FAILED, Connector, Incoming, Params, compact, given, url_of
from gateway.synthetic.generation import EngineFault, Generation
from gateway.synthetic.refusals import bad_request

_P2P: Final = re.compile(r"___prefill_addr_(.+?)___decode_addr_(.+)_[0-9a-f]{32}")


class Mooncake(Connector):
    """vLLM's: by `transfer_id`, at the prefill's bootstrap server (`GET /query`). Only a prefill that was cut by its length
    is held; a decoder waits for what does not come; one that is told the prefill's part kills its engine."""

    name = "mooncake"
    lease = 480.0

    def prepare(self, ask: Ask, generation: Generation, incoming: Incoming) -> None:
        params = given(ask)
        key = params.get("transfer_id")
        if params.get("do_remote_prefill") and self.role == "prefill":
            generation.prelude = self.fatal  # assert not is_kv_producer
        elif self._prefills and params.get("do_remote_decode"):
            if key:
                generation.on_finish = lambda: self._stage(str(key), ask, generation)
        elif self._decodes and params.get("do_remote_prefill"):
            generation.prelude = lambda: self._meet(params, ask, generation)

    def routes(self) -> Sequence[web.RouteDef]:
        return (web.get("/query", self._query),)

    async def _query(self, request: web.Request) -> web.Response:
        return web.json_response({"0": {"engine_id": self.engine_id}})

    def _stage(self, key: str, ask: Ask, generation: Generation) -> None:
        if generation.finish == "length":
            self.hold([key], ask)

    async def _meet(self, params: Params, ask: Ask, generation: Generation) -> None:
        key, where = params.get("transfer_id"), params.get("remote_bootstrap_addr")
        if not key or not where:
            self.recompute()  # a warning in its log
            return
        engine_id = params.get("remote_engine_id") or "none"
        if await self.fetch(str(where), str(key), ask, generation, engine_id=engine_id, wait=self.seconds) != 200:
            raise EngineFault(FAILED)


class MoriioWrite(Connector):
    """By `transfer_id`: the decoder gives its blocks to the prefill (`remote_notify_port`), which writes into them."""

    name = "moriio_write"

    def prepare(self, ask: Ask, generation: Generation, incoming: Incoming) -> None:
        params = given(ask)
        key = str(params.get("transfer_id") or "")
        if self._prefills and params.get("do_remote_decode"):
            if not key.startswith("tx") or not params.get("remote_host") or not params.get("remote_notify_port"):
                generation.prelude = self.failure
            else:
                generation.on_finish = lambda: self._stage(key, ask, generation)
        elif self._decodes and params.get("do_remote_prefill"):
            if params.get("remote_block_ids") is None:
                generation.prelude = self.fatal
            else:
                generation.prelude = lambda: self._meet(key, params, ask, generation)

    def _stage(self, key: str, ask: Ask, generation: Generation) -> None:
        self.hold([key], ask)
        generation.handoff = compact({"remote_dp_rank": 0, "transfer_id": key})

    async def _meet(self, key: str, params: Params, ask: Ask, generation: Generation) -> None:
        where = url_of(params.get("remote_host"), params.get("remote_notify_port"))
        if await self.fetch(where, key, ask, generation, wait=self.seconds) != 200:
            raise EngineFault(FAILED)


class OffloadingP2p(Connector):
    """llm-d's: the prefill stores under `kv_request_id`; a decoder that comes too early, or finds nothing, waits for its
    load's deadline and computes the prompt itself."""

    name = "offloading_p2p"
    lease = math.inf  # until it is evicted
    deadline: ClassVar[float] = 2.0

    def prepare(self, ask: Ask, generation: Generation, incoming: Incoming) -> None:
        params = given(ask)
        wanted, source = params.get("remote_decoder"), params.get("remote_prefiller")
        if self._prefills and isinstance(wanted, dict) and wanted.get("kv_request_id"):
            generation.on_finish = lambda: self._stage(str(wanted["kv_request_id"]), ask)
        elif self._decodes and isinstance(source, dict):
            generation.prelude = lambda: self._load(source, ask, generation)

    def _stage(self, key: str, ask: Ask) -> None:
        self.hold([key], ask)

    async def _load(self, source: Params, ask: Ask, generation: Generation) -> None:
        where = url_of(source.get("remote_host"), source.get("remote_port"))
        if await self.fetch(where, str(source.get("kv_request_id")), ask, generation, wait=self.deadline) != 200:
            self.recompute()


class P2pNccl(Connector):
    """vLLM's: the id that both legs have names both ZMQ addresses. An id without them kills the engine, and so do several
    choices; ids that differ have the decoder wait for ever, and the prefill hold for ever."""

    name = "p2p_nccl"
    lease = math.inf

    def prepare(self, ask: Ask, generation: Generation, incoming: Incoming) -> None:
        found = _P2P.fullmatch(incoming.header or "")
        if found is None or ask.choices > 1:
            generation.prelude = self.fatal
            return
        key, where = found[0], found[1]
        if self._prefills:
            generation.on_finish = lambda: self._stage(key, ask)
        else:
            generation.prelude = lambda: self._receive(where, key, ask, generation)

    def _stage(self, key: str, ask: Ask) -> None:
        self.hold([key], ask)

    async def _receive(self, where: str, key: str, ask: Ask, generation: Generation) -> None:
        if await self.fetch(f"http://{where}", key, ask, generation, wait=math.inf) != 200:
            await self.for_ever()


class Sglang(Connector):
    """SGLang's: both have the same body, with `bootstrap_host`, `bootstrap_port` and `bootstrap_room`. The prefill computes one
    token whatever was asked for, and answers once the decoder has fetched; a room in use kills it. Until the other side
    is there each waits, for 300 s (`lease`)."""

    name = "sglang"
    lease = 300.0

    def __init__(self, engine: Any, role: str):
        super().__init__(engine, role)
        self._rooms: dict[str, asyncio.Event] = {}

    def shape(self, ask: Ask) -> Ask:
        rooms = ask.body.get("bootstrap_room")
        if rooms is None:
            raise bad_request("Disaggregated request received without bootstrap room id.", "bootstrap_room")
        if isinstance(rooms, list) and len(rooms) != ask.choices:
            raise bad_request(f"{len(rooms)} rooms for {ask.choices} requests.", "bootstrap_room")
        return dataclasses.replace(ask, max_tokens=1, min_tokens=0) if self._prefills else ask

    def prepare(self, ask: Ask, generation: Generation, incoming: Incoming) -> None:
        keys = _each(ask.body.get("bootstrap_room"))
        if self._prefills:
            if any(key in self._rooms for key in keys):
                generation.prelude = self.fatal
                return
            self._rooms |= {key: asyncio.Event() for key in keys}
            generation.on_finish = lambda: self._stage(keys, ask)
            generation.on_leave = lambda: self._leave(keys)
            generation.coda = lambda: self._wait(keys)
        else:
            hosts, ports = _each(ask.body.get("bootstrap_host")), _each(ask.body.get("bootstrap_port"))
            generation.prelude = lambda: self._meet(hosts, ports, keys, ask, generation)

    def _stage(self, keys: list[str], ask: Ask) -> None:
        self.hold(keys, ask)

    def fetched(self, key: str) -> None:
        if key in self._rooms:
            self._rooms[key].set()

    async def _wait(self, keys: list[str]) -> None:
        try:
            async with asyncio.timeout(self.seconds):
                for key in keys:
                    await self._rooms[key].wait()
        except TimeoutError:
            raise EngineFault(f"Request {keys[0]} timed out after {self.seconds:g}s in KVPoll.Bootstrapping") from None

    def _leave(self, keys: list[str]) -> None:
        """Fetched or not: the decoder that comes now comes too late."""
        for key in keys:
            del self._rooms[key]
            self.let_go(key)

    async def _meet(self, hosts: list[str], ports: list[str], keys: list[str], ask: Ask, generation: Generation) -> None:
        for host, port, key in zip(hosts, ports, keys, strict=False):
            if await self.fetch(url_of(host, port), key, ask, generation, wait=self.seconds) != 200:
                raise EngineFault(f"Decode transfer failed for request {key}")


def _each(value: Any) -> list[str]:
    return [str(one) for one in (value if isinstance(value, list) else [value])]
