"""vLLM's NixlConnector, and those that hand over as it does: the prefill's answer says where its KV is.

a streamed prefill holds its KV, and tells nobody
n choices hold n times, and one of them is told
a pull that fails is an error within the stream; one that comes too late is silently other text
a decode request that is refused, or whose client left before the pull, has the prefill let go
`do_remote_prefill` with nothing besides kills the engine; without the engine's id it hangs for ever
parameters of which some are missing are no error: the decoder computes the prompt again
"""

from __future__ import annotations

import asyncio
from typing import ClassVar, Final

from gateway.synthetic.ask import Ask, Body
from gateway.synthetic.connectors.base import PULL, REJECT, Connector, Incoming, Params, compact, given, url_of
from gateway.synthetic.generation import EngineFault, Generation
from gateway.synthetic.ledger import Held

ALL: Final = ("length", "stop")


class Nixl(Connector):
    name = "nixl"
    staged: ClassVar[tuple[str, ...]] = ALL  # with which ends a prefill's KV is held
    needed: ClassVar[tuple[str, ...]] = ("remote_request_id", "remote_host", "remote_port", "remote_block_ids")

    def prepare(self, ask: Ask, generation: Generation, incoming: Incoming) -> None:
        params = given(ask)
        if self._prefills and params.get("do_remote_decode"):
            generation.on_finish = lambda: self._stage(ask, generation, incoming)
        elif self._decodes and params.get("do_remote_prefill"):
            if not any(params.get(name) for name in (*self.needed, "remote_engine_id")):
                generation.prelude = self.fatal
            elif not params.get("remote_engine_id"):
                generation.prelude = self.for_ever
            else:
                generation.prelude = lambda: self._pull(params, ask, generation)

    def refused(self, body: Body) -> None:
        params = body.get("kv_transfer_params")
        if self._decodes and isinstance(params, dict) and params.get("do_remote_prefill") and self.complete(params):
            self._tasks.start(self._end(REJECT, params), "kv reject")

    def complete(self, params: Params) -> bool:
        return all(params.get(name) is not None for name in (*self.needed, "remote_engine_id"))

    # the prefill's side

    def _stage(self, ask: Ask, generation: Generation, incoming: Incoming) -> None:
        if generation.finish not in self.staged:
            return
        suffix = generation.plan.random("kv").randbytes(4).hex()
        names = [f"{incoming.name}-{suffix}{f'-{choice}' if choice else ''}" for choice in range(ask.choices)]
        generation.handoff = compact(self.params(self.hold(names, ask)[0], ask, generation))

    def params(self, held: Held, ask: Ask, generation: Generation) -> Params:
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

    # the decoder's side

    async def _pull(self, params: Params, ask: Ask, generation: Generation) -> None:
        if not self.complete(params):
            self.recompute()
            return
        try:
            status, answer = await self._end(PULL, params)
        except asyncio.CancelledError:
            self.refused(ask.body)
            raise
        if status not in (200, 410):
            self._engine.metrics.kv_failed.inc()
            raise EngineFault("Internal server error")
        if status == 410 or answer.get("tokens") != ask.prompt_tokens:
            # Somebody else's blocks by now, or those of another prompt: no error, and text that is wrong.
            generation.garble()
        else:
            self.spare(generation)

    async def _end(self, path: str, params: Params) -> tuple[int, Params]:
        named = {name: params[name] for name in ("remote_engine_id", "remote_request_id")}
        return await self.call(url_of(params["remote_host"], params["remote_port"]), path, named)


class NixlPush(Nixl):
    """The decoder registers with the prefill, by the coordinates that this one's answer had, and is written to. With
    `remote_block_ids` there is nothing to push to: it fails."""

    name = "nixl_push"
    needed = ("remote_request_id", "remote_host", "remote_port")

    def params(self, held: Held, ask: Ask, generation: Generation) -> Params:
        return {**super().params(held, ask, generation), "transfer_mode": "push"}

    async def _pull(self, params: Params, ask: Ask, generation: Generation) -> None:
        if params.get("remote_block_ids"):
            await self.failure()
        await super()._pull(params, ask, generation)


class NixlBidirectional(Nixl):
    """And the decoder holds what it has at the end, for the prefill of the conversation's next turn."""

    name = "nixl_bidirectional"
    ttl: ClassVar[float] = 480.0  # decoder_kv_blocks_ttl

    @property
    def seconds(self) -> float:
        given = self._engine.capacity.lease
        return (self.ttl if self.role == "decode" else self.lease) if given is None else given

    def prepare(self, ask: Ask, generation: Generation, incoming: Incoming) -> None:
        params = given(ask)
        super().prepare(ask, generation, incoming)
        if self._prefills and params.get("do_remote_decode") and self.complete(params):
            generation.prelude = lambda: self._last_turn(params, generation)
        elif self._decodes and params.get("do_remote_prefill"):
            generation.on_finish = lambda: self._stage(ask, generation, incoming)

    async def _last_turn(self, params: Params, generation: Generation) -> None:
        status, _ = await self._end(PULL, params)
        if status == 200:
            self.loaded += 1
        else:
            self.recompute()  # it is gone, or was used: this prompt is computed in full


class MooncakeAscend(Nixl):
    """vLLM Ascend's MooncakeConnector: only a prefill that was cut by its length is held, and for 480 s."""

    name = "mooncake_ascend"
    lease = 480.0
    staged = ("length",)

    def params(self, held: Held, ask: Ask, generation: Generation) -> Params:
        kept = super().params(held, ask, generation)
        names = ("do_remote_prefill", "do_remote_decode", "remote_block_ids", "remote_engine_id", "remote_request_id")
        return {
            **{name: kept[name] for name in (*names, "remote_host", "remote_port")},
            "remote_pcp_size": 1,
            "remote_dcp_size": 1,
            "remote_ptp_size": 1,
            "last_token_id": 1,
            "remote_multi_nodes_meta_mapping": {},
            "num_prompt_blocks": len(held.blocks),
            "remote_block_size": 128,
        }


class MoriioRead(Nixl):
    """As NIXL's pull, with a transfer id; a decoder that comes without the prefill's blocks dies of it (vLLM 46115)."""

    name = "moriio_read"
    needed = ("remote_request_id", "remote_host", "remote_block_ids", "transfer_id")

    def prepare(self, ask: Ask, generation: Generation, incoming: Incoming) -> None:
        params = given(ask)
        if self._decodes and params.get("do_remote_prefill") and not params.get("remote_block_ids"):
            generation.prelude = self.fatal
        else:
            super().prepare(ask, generation, incoming)

    def params(self, held: Held, ask: Ask, generation: Generation) -> Params:
        asked = {name: given(ask)[name] for name in ("transfer_id",) if name in given(ask)}
        more = {"remote_dp_rank": 0, "remote_dp_size": 1, "remote_tp_size": 1}
        return {**super().params(held, ask, generation), **asked, **more}
