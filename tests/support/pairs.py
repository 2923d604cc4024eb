"""Prefill and decode engines on scripted sockets, with the ledger of what prefill holds (NIXL's pull)."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

from tests.support import script as s
from tests.support.gateway import Gateway, until
from tests.support.messages import HttpWire, Message
from tests.support.script import Script
from tests.support.upstream import RawUpstream

OUTPUT = (s.delta("a"), s.delta("b"), *s.FINISHED)
NULLS = {
    "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None,
    "remote_host": None, "remote_port": None,
}  # fmt: skip


class Ledger:
    """What is held, and what was asked for that was not."""

    def __init__(self) -> None:
        self.held: set[str] = set()
        self.ever = 0
        self.unknown = 0

    def hold(self, request_id: str) -> dict[str, Any]:
        self.held.add(request_id)
        self.ever += 1
        return {"do_remote_prefill": True, "do_remote_decode": False, "remote_engine_id": "engine",
                "odd_key": [1, {"a": 2**60}], "remote_request_id": request_id, "remote_host": "127.0.0.1", "remote_port": 5600,
                "remote_block_ids": [[1, 2]]}  # fmt: skip

    def fetch(self, request: Message) -> bool:
        """As a decode engine does; whether it was there."""
        params = json.loads(request.body).get("kv_transfer_params") or {}
        name = params.get("remote_request_id")
        if name in self.held:
            self.held.discard(name)
            return True
        self.unknown += 1
        return False


def prefill(ledger: Ledger, *, seconds: float = 0.0, **changed: Any) -> Script:
    async def script(wire: HttpWire, request: Message) -> None:
        await asyncio.sleep(seconds)
        if wire.ended:  # aborted
            return
        name = request.get("x-request-id") or ""
        params = ledger.hold(name)
        for key, value in changed.items():
            params[key] = value
        answer = {"id": "cmpl-1", "choices": [{"index": 0, "finish_reason": "length"}],
                  "usage": {"prompt_tokens": 3, "completion_tokens": 1}, "kv_transfer_params": params}  # fmt: skip
        await s.reply(200, answer)(wire, request)

    return script


def decode(ledger: Ledger, then: Script | None = None, *, seconds: float = 0.0) -> Script:
    """Fetches, after so many seconds in which nothing is sent but the head; a release leg is answered with JSON."""

    async def script(wire: HttpWire, request: Message) -> None:
        streams = json.loads(request.body).get("stream")
        if streams and then is None:
            await wire.send(s.SSE_HEAD)
        await asyncio.sleep(seconds)
        ledger.fetch(request)
        if not streams:
            choice = {"index": 0, "message": {"content": "ab"}, "finish_reason": "stop"}
            await s.reply(200, {"choices": [choice]})(wire, request)
        elif then is not None:
            await then(wire, request)
        else:
            await wire.send(b"".join(map(s.chunk, OUTPUT)) + s.LAST)

    return script


@contextlib.asynccontextmanager
async def engines(prefills: int = 1, decodes: int = 1) -> AsyncIterator[tuple[list[RawUpstream], list[RawUpstream], Ledger]]:
    ledger = Ledger()
    ps = [RawUpstream(prefill(ledger)) for _ in range(prefills)]
    ds = [RawUpstream(decode(ledger)) for _ in range(decodes)]
    async with contextlib.AsyncExitStack() as stack:
        for engine in (*ps, *ds):
            await engine.start()
            stack.push_async_callback(engine.stop)
        yield ps, ds, ledger


def config(ps: Sequence[Any], ds: Sequence[Any], both: Sequence[Any] = (), **more: Any) -> str:
    """`ps`, `ds`, `both`: engines, or URLs."""
    listed = [
        {"url": getattr(one, "url", one), "role": role}
        for role, all_ in (("prefill", ps), ("decode", ds), ("both", both))
        for one in all_
    ]
    return json.dumps(
        {"listen": "127.0.0.1:0", "admin": {"listen": "127.0.0.1:0"}, "health": {"interval": 60}, "backends": listed, **more}
    )


async def at_rest(gateway: Gateway, ledger: Ledger, *upstreams: RawUpstream) -> None:
    """I1 to I4 of pd.md 7.0: nothing is held that is not counted, nothing in flight, no connection but idle ones."""
    async with asyncio.timeout(5):
        while True:
            samples = await gateway.metrics()
            flying = samples.value("tokenpipe_pd_release_inflight")
            flying += sum(v for n, _, v in samples if n in ("tokenpipe_requests_in_flight", "tokenpipe_backend_in_flight"))
            stranded = sum(v for n, _, v in samples if n == "tokenpipe_pd_stranded_total")
            if not flying and len(ledger.held) <= stranded:
                break
            await asyncio.sleep(0.02)
    assert not [u.failures for u in upstreams if u.failures]
    gateway.check_tidy()


async def fetched(ledger: Ledger, count: int) -> None:
    await until(lambda: ledger.ever >= count and not ledger.held, "KV that is fetched")
