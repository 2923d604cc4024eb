"""Connectors whose legs run together, or as one: SGLang's bootstrap, and llm-d's sidecar."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tests.integration.test_fleet import refusing
from tests.support import script as s
from tests.support.gateway import Gateway
from tests.support.messages import HttpWire, Message
from tests.support.pairs import OUTPUT, Ledger, at_rest, config, engines
from tests.support.upstream import RawUpstream

Start = Callable[..., Awaitable[Gateway]]
SGLANG: dict[str, Any] = {"disaggregation": {"connector": "sglang"}}


class Rooms:
    """Where both engines of a request meet: prefill answers only when decode has come."""

    def __init__(self, p: RawUpstream, d: RawUpstream) -> None:
        self.met: dict[Any, asyncio.Event] = {}
        self.used: list[Any] = []
        p.script, d.script = self.prefill, self.decode

    def room(self, request: Message) -> asyncio.Event:
        name = json.dumps(json.loads(request.body)["bootstrap_room"])
        return self.met.setdefault(name, asyncio.Event())

    async def prefill(self, wire: HttpWire, request: Message) -> None:
        self.used.append(json.loads(request.body)["bootstrap_room"])
        await self.room(request).wait()
        await s.stream(*OUTPUT)(wire, request)

    async def decode(self, wire: HttpWire, request: Message) -> None:
        self.room(request).set()
        await s.stream(*OUTPUT)(wire, request)


async def test_they_meet(start_gateway: Start) -> None:
    """The same body to both, with one room; a batch has one for each of its prompts. Decode's answer is the client's."""
    async with engines() as ((p,), (d,), _):
        rooms = Rooms(p, d)
        gateway = await start_gateway(config=config([p], [d], **SGLANG))
        for _ in range(2):
            answer = await gateway.ask()
            assert (answer.status, answer.body) == (200, b"".join(OUTPUT))
        to_p, to_d = p.requests[0].json(), d.requests[0].json()
        assert to_p == to_d == {**s.CHAT, "bootstrap_host": "127.0.0.1", "bootstrap_port": 8998,
                                "bootstrap_room": to_p["bootstrap_room"]}  # fmt: skip
        assert 0 <= to_p["bootstrap_room"] < 1 << 63
        assert rooms.used[0] != rooms.used[1]
        batch = await gateway.ask(s.post({"model": "m", "prompt": ["a", "b", "c"]}, "/v1/completions"))
        assert batch.status == 200
        assert len(rooms.used[2]) == 3
        await at_rest(gateway, Ledger(), p, d)


@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.parametrize("status", [400, 500])
async def test_the_first_that_fails_ends_the_other(start_gateway: Start, side: str, status: int) -> None:
    """At once, and in its own words; after a 5xx of decode's, in another room."""
    async with engines() as ((p,), (d,), _):
        held = s.Held()
        failing = s.reply(status, b'{"error": "mine"}')
        p.script, d.script = (failing, held) if side == "prefill" else (held, failing)
        gateway = await start_gateway(config=config([p], [d], **SGLANG))
        answer = await gateway.ask()
        assert (answer.status, answer.body) == (status, b'{"error": "mine"}')
        for wire in held.wires:
            await wire.wait_closed(timeout=2)
        rooms = {json.loads(r.body)["bootstrap_room"] for r in (*p.requests, *d.requests)}
        assert len(rooms) == (2 if side == "decode" and status == 500 else 1)
        await at_rest(gateway, Ledger(), p, d)


async def test_no_connection_to_decode(start_gateway: Start) -> None:
    async with engines() as ((p,), _, _):
        p.script = held = s.Held()
        with refusing() as nowhere:
            gateway = await start_gateway(config=config([p], [nowhere], **SGLANG))
            answer = await gateway.ask()
        assert (answer.status, answer.get("x-gateway-error")) == (503, "no_backend")
        for wire in held.wires:
            await wire.wait_closed(timeout=2)
        await at_rest(gateway, Ledger(), p)


async def test_the_client_leaves(start_gateway: Start) -> None:
    """Both legs are closed at once; or, with engines that do not survive that, when decode has begun."""
    async with engines() as ((p,), (d,), _):
        for unsafe in (False, True):
            p.script, d.script = held, other = s.Held(), s.Held(s.SSE_HEAD)
            text = config([p], [d], disaggregation={"connector": "sglang", "abort_unsafe": unsafe})
            gateway = await start_gateway(config=text)
            client = await gateway.connect()
            await client.send(s.post())
            legs = (await held.wire(), await other.wire())
            client.reset()
            await gateway.logged(outcome="client_gone")
            if unsafe:
                await asyncio.sleep(0.1)
                assert not any(wire.ended for wire in legs)
                await legs[1].send(s.chunk(OUTPUT[0]))
            for wire in legs:
                await wire.wait_closed(timeout=2)
            await at_rest(gateway, Ledger(), p, d)


async def test_prefill_is_read_beside_the_stream(start_gateway: Start) -> None:
    """It may take as long as it likes, and break: nothing of that is the client's once decode has begun."""
    async with engines() as ((p,), (d,), _):
        go_on = asyncio.Event()

        async def slow(wire: HttpWire, request: Message) -> None:
            await wire.send(s.SSE_HEAD + s.chunk(OUTPUT[0]))
            await go_on.wait()
            await wire.send(b"".join(map(s.chunk, OUTPUT[1:])) + s.LAST)

        p.script, d.script = s.Held(), slow
        gateway = await start_gateway(config=config([p], [d], **SGLANG))
        client = await gateway.connect()
        await client.send(s.post())
        assert (await client.read_response_head()).status == 200
        (await p.script.wire()).reset()
        await asyncio.sleep(0.05)
        go_on.set()
        await gateway.logged(outcome="complete")
        client.fin()
        await at_rest(gateway, Ledger(), p, d)


async def test_a_sidecar(start_gateway: Start) -> None:
    """One leg, which says where the sidecar finds prefill."""
    async with engines() as ((p,), (d,), _):
        d.script = s.stream(*OUTPUT)
        gateway = await start_gateway(config=config([p], [d], disaggregation={"connector": "sidecar"}))
        answer = await gateway.ask(s.post(fields=[("x-prefiller-host-port", "evil:1")]))
        assert (answer.status, answer.body) == (200, b"".join(OUTPUT))
        (request,) = d.requests
        assert request.get("x-prefiller-host-port") == f"127.0.0.1:{p.port}"
        assert (request.json(), p.requests) == (s.CHAT, [])
        await at_rest(gateway, Ledger(), p, d)
