"""Prefill and decode engines on scripted sockets, with the ledger of what prefill holds (NIXL's pull)."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

from tests.support import script as s
from tests.support.gateway import Gateway, Samples, until
from tests.support.messages import HttpWire, Message
from tests.support.script import Script
from tests.support.upstream import RawUpstream

OUTPUT = (s.delta("a"), s.delta("b"), *s.FINISHED)
NULLS = {
    "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None,
    "remote_host": None, "remote_port": None,
}  # fmt: skip


class Ledger:
    """What is held; `unknown`: what was asked for that was not; `alone`: requests that ask for nothing."""

    def __init__(self) -> None:
        self.held: set[str] = set()
        self.ever = 0
        self.unknown = self.alone = 0

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
        if not name:
            self.alone += 1
            return False
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
    """I1 to I4 of pd.md 7.0: nothing is held that is not counted, all loads and gauges are 0, no connection but idle ones,
    nothing pending; and decode has come for nothing that was not there."""
    busy: dict[str, Any] = {}
    try:
        async with asyncio.timeout(5):
            while True:
                samples = await gateway.metrics()
                stranded = samples.value("tokenpipe_pd_stranded_total")
                busy = await loads(gateway, samples, held=stranded > 0)
                busy |= {"connections": found} if (found := [u for u in upstreams if u.under_way]) else {}
                busy |= {"held": ledger.held} if len(ledger.held) > stranded else {}
                if not busy:
                    break
                await asyncio.sleep(0.02)
    except TimeoutError:
        raise AssertionError(f"not at rest: {busy}") from None
    assert not [u.failures for u in upstreams if u.failures]
    assert not ledger.unknown
    gateway.check_tidy()


GAUGES = (
    "tokenpipe_requests_in_flight", "tokenpipe_backend_in_flight", "tokenpipe_queue_depth", "tokenpipe_write_buffer_bytes",
    "tokenpipe_pd_release_inflight",
)  # fmt: skip
LOADS = ("in_flight", "unread_tokens", "held_tokens")


async def loads(gateway: Gateway, samples: Samples, *, held: bool) -> dict[str, Any]:
    """I2: what is not 0. `held`: some KV is left behind, and counts until prefill's time for it is over."""
    found: dict[str, Any] = {name: value for name in GAUGES if (value := samples.value(name))}
    for backend in (await gateway.admin(s.get("/-/backends"))).json():
        for name in LOADS[: 2 if held else 3]:
            if backend[name]:
                found[f"{name} of {backend['name']}"] = backend[name]
    return found


async def fetched(ledger: Ledger, count: int) -> None:
    await until(lambda: ledger.ever >= count and not ledger.held, "KV that is fetched")
