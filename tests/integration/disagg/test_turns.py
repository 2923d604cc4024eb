"""Prefill and decode backends at their max_in_flight: who needs them waits, and nobody else."""

from __future__ import annotations

import asyncio
import json

import pytest

from tests.support import script as s
from tests.support.disagg import Start
from tests.support.gateway import until
from tests.support.messages import HttpWire, Message
from tests.support.pairs import OUTPUT, at_rest, config, decode, engines, prefill


@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_they_wait(start_gateway: Start, side: str) -> None:
    async with engines() as ((p,), (d,), ledger):
        running, most = 0, 0
        inner = prefill(ledger, seconds=0.05) if side == "prefill" else decode(ledger, seconds=0.05)

        async def counted(wire: HttpWire, request: Message) -> None:
            nonlocal running, most
            running += 1
            most = max(most, running)
            try:
                await inner(wire, request)
            finally:
                running -= 1

        full = p if side == "prefill" else d
        full.script = counted
        said = json.loads(config([p], [d]))
        next(b for b in said["backends"] if b["role"] == side)["max_in_flight"] = 1
        gateway = await start_gateway(config=json.dumps(said))
        answers = await asyncio.gather(*(gateway.ask() for _ in range(6)))
        assert [answer.body for answer in answers] == [b"".join(OUTPUT)] * 6
        assert len(full.requests) == 6 and (most == 1 or side == "prefill")
        await at_rest(gateway, ledger, p, d)


async def test_nobody_else_waits_and_whoever_leaves_holds_nothing(start_gateway: Start) -> None:
    async with engines() as ((p,), (d,), ledger):
        go_on = asyncio.Event()
        inner = prefill(ledger)

        async def slow(wire: HttpWire, request: Message) -> None:
            await go_on.wait()
            await inner(wire, request)

        p.script = slow
        said = json.loads(config([p], [d]))
        said["backends"][0]["max_in_flight"] = 1
        gateway = await start_gateway(config=json.dumps(said))
        first = asyncio.ensure_future(gateway.ask())
        await until(lambda: len(p.requests) == 1, "the first at prefill")
        leaving = await gateway.connect()
        await leaving.send(s.post(s.CHAT))
        second = asyncio.ensure_future(gateway.ask())

        async def waiting(count: int) -> None:
            while await gateway.metric("tokenpipe_queue_depth") != count:
                await asyncio.sleep(0.02)

        await asyncio.wait_for(waiting(2), 5)
        bypass = await gateway.ask(s.post({"model": "m", "prompt": "p", "max_tokens": 1}, "/v1/completions"))
        assert bypass.status == 200
        ledger.unknown = 0
        leaving.reset()
        await asyncio.wait_for(waiting(1), 5)
        assert len(p.requests) == 1
        go_on.set()
        assert [(await one).body for one in (first, second)] == [b"".join(OUTPUT)] * 2
        assert len(p.requests) == 2
        await at_rest(gateway, ledger, p, d)


async def test_the_queues_own_limit(start_gateway: Start) -> None:
    async with engines() as ((p,), (d,), ledger):
        go_on = asyncio.Event()
        inner = prefill(ledger)

        async def slow(wire: HttpWire, request: Message) -> None:
            await go_on.wait()
            await inner(wire, request)

        p.script = slow
        said = json.loads(config([p], [d], timeouts={"queue": 0.2}))
        said["backends"][0]["max_in_flight"] = 1
        gateway = await start_gateway(config=json.dumps(said))
        first = asyncio.ensure_future(gateway.ask())
        await until(lambda: len(p.requests) == 1, "the first at prefill")
        answer = await gateway.ask()
        assert answer.get("x-gateway-error") == "queue_timeout" and answer.status in (429, 503)
        go_on.set()
        assert (await first).status == 200
        await at_rest(gateway, ledger, p, d)
