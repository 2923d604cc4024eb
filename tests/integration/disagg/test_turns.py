"""Prefill and decode backends at their max_in_flight: who needs them waits, and nobody else."""

from __future__ import annotations

import asyncio
import json

import pytest

from tests.support import script as s
from tests.support.disagg import Start
from tests.support.gateway import Gateway, until
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


@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.parametrize("comes_free", [True, False])
async def test_a_second_try_waits(start_gateway: Start, side: str, comes_free: bool) -> None:
    """One engine fails while the other one of its role is full: the second try has its turn there, as the first one would;
    where that does not come in time, the client is told what had gone wrong, in the engine's words."""
    two = {"prefills": 2} if side == "prefill" else {"decodes": 2}
    async with engines(**two) as (ps, ds, ledger):
        alike, go_on = ps if side == "prefill" else ds, asyncio.Event()
        inner = alike[0].script

        async def slow(wire: HttpWire, request: Message) -> None:
            await go_on.wait()
            await inner(wire, request)

        for one in alike:
            one.script = slow
        said = json.loads(config(ps, ds, timeouts={"queue": 10 if comes_free else 0.3}))
        for backend in said["backends"]:
            if backend["role"] == side:
                backend["max_in_flight"] = 1
        gateway = await start_gateway(config=json.dumps(said))
        first = asyncio.ensure_future(gateway.ask())
        await until(lambda: any(one.requests for one in alike), "one of them busy")
        (failing,) = (one for one in alike if not one.requests)
        failing.script = s.reply(500, {"error": {"message": "of the engine"}}, [("x-engine", "failing")])
        second = asyncio.ensure_future(gateway.ask())
        if comes_free:
            await depth(gateway, 1)
            go_on.set()
            assert (await second).body == b"".join(OUTPUT)
        else:
            answer = await second
            assert (answer.status, answer.get("x-engine")) == (500, "failing"), answer
            assert answer.json() == {"error": {"message": "of the engine"}}
            go_on.set()
        assert (await first).body == b"".join(OUTPUT)
        await at_rest(gateway, ledger, *ps, *ds)


async def depth(gateway: Gateway, count: int) -> None:
    async with asyncio.timeout(5):
        while await gateway.metric("tokenpipe_queue_depth") != count:
            await asyncio.sleep(0.02)


async def test_whoever_leaves_while_its_second_try_waits(start_gateway: Start) -> None:
    """What it was told before is thrown away with its connection."""
    async with engines(prefills=2) as (ps, (d,), ledger):
        go_on = asyncio.Event()
        inner = ps[0].script

        async def slow(wire: HttpWire, request: Message) -> None:
            await go_on.wait()
            await inner(wire, request)

        for p in ps:
            p.script = slow
        said = json.loads(config(ps, [d]))
        for backend in said["backends"][:2]:
            backend["max_in_flight"] = 1
        gateway = await start_gateway(config=json.dumps(said))
        first = asyncio.ensure_future(gateway.ask())
        await until(lambda: any(p.requests for p in ps), "one of them busy")
        (failing,) = (p for p in ps if not p.requests)
        wires: list[HttpWire] = []

        async def large(wire: HttpWire, request: Message) -> None:
            wires.append(wire)
            await wire.send(s.head(503, [s.JSON_TYPE, ("content-length", "300000")]) + b"x" * 1000)

        failing.script = large
        client = await gateway.connect()
        await client.send(s.post())
        await depth(gateway, 1)
        client.reset()
        await depth(gateway, 0)
        await wires[0].wait_closed(timeout=2)
        go_on.set()
        assert (await first).body == b"".join(OUTPUT)
        await at_rest(gateway, ledger, *ps, d)
