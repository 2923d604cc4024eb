"""Connectors whose legs run together, or as one: SGLang's bootstrap, and llm-d's sidecar."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import aiohttp
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


@pytest.mark.parametrize("field", ["x-prefiller-host-port", "X-LLM-D-Prefiller-Host-Port"])
async def test_as_a_sidecar(start_gateway: Start, field: str) -> None:
    """The other way round: the request says who prefills; only backends of the configuration are asked."""
    async with engines(2, 2) as (ps, ds, ledger):
        gateway = await start_gateway(config=config(ps, ds, disaggregation={"prefiller_header": "follow"}))

        def asks(*places: str) -> bytes:
            return s.post(fields=[(field, ",".join(places))])

        name, other = (f"127.0.0.1:{p.port}" for p in ps)
        for _ in range(4):
            assert (await gateway.ask(asks(name))).status == 200
        assert [len(p.requests) for p in ps] == [4, 0]
        assert all(request.get(field) is None for one in (*ps, *ds) for request in one.requests)
        nobodies = ("169.254.169.254:80", f"127.0.0.1:{ds[0].port}", f"{name},evil:1")
        for place, status in (*((place, 403) for place in nobodies), ("x", 400)):
            answer = await gateway.ask(asks(place))
            assert (answer.status, b"x-prefiller-host-port" in answer.body) == (status, True)
        assert (await gateway.ask()).status == 200  # nobody is named: decode alone
        assert await gateway.metric("tokenpipe_pd_bypass_total", reason="unnamed") == 1
        assert [len(p.requests) for p in ps] == [4, 0]
        ps[0].script = s.reply(500, b"{}")
        assert (await gateway.ask(asks(name))).status == 500
        assert (await gateway.ask(asks(name, other))).status == 200  # any of those that are named
        assert len(ps[1].requests) == 1
        await gateway.admin(s.post({"type": "prefill", "instances": other}, "/instances/remove"))
        assert (await gateway.ask(asks(other))).status == 403
        await at_rest(gateway, ledger, *ps, *ds)


# ---- Mooncake: what must be known of prefill beforehand


async def test_mooncake(start_gateway: Start) -> None:
    """Prefill's engine id is asked for once, and again after a failure: it may have been started anew."""
    async with engines(2) as ((p, boot), (d,), _):
        ids = iter(("old", "new"))

        async def query(wire: HttpWire, request: Message) -> None:
            await s.reply(200, {"0": {"engine_id": next(ids)}})(wire, request)

        boot.probes["/query"] = query
        p.script = s.reply(200, b'{"choices": []}')
        gone = s.stream(s.event({"error": {"message": "x", "type": "InternalServerError", "code": 500}}), s.DONE)
        d.script = s.in_turn(s.stream(*OUTPUT), s.stream(*OUTPUT), gone, s.stream(*OUTPUT))
        text = json.loads(config([p], [d], disaggregation={"connector": "mooncake"}))
        text["backends"][0]["connector"] = {"bootstrap_port": boot.port}
        gateway = await start_gateway(config=json.dumps(text))
        for _ in range(2):
            assert (await gateway.ask()).body == b"".join(OUTPUT)
        assert boot.probed.count("/query") == 1
        params = d.requests[0].json()["kv_transfer_params"]
        assert (params["remote_engine_id"], params["remote_bootstrap_addr"]) == ("old", f"http://127.0.0.1:{boot.port}")
        assert p.requests[0].json()["kv_transfer_params"]["transfer_id"] == params["transfer_id"]
        assert p.requests[0].get("x-data-parallel-rank") == "0"
        # started anew: one attempt fails, and the next one, under another id, knows
        assert (await gateway.ask()).body == b"".join(OUTPUT)
        asked = [request.json() for request in d.requests[2:] if request.json()["stream"]]
        assert [one["kv_transfer_params"]["remote_engine_id"] for one in asked] == ["old", "new"]
        assert len({one["kv_transfer_params"]["transfer_id"] for one in asked}) == 2
        assert boot.probed.count("/query") == 2
        await at_rest(gateway, Ledger(), p, d)


async def test_56_mooncake_s_prefill_fails(start_gateway: Start) -> None:
    """Decode, which would wait for ever, is closed; prefill's words are the client's."""
    async with engines(2) as ((p, boot), (d,), _):
        boot.probes["/query"] = s.reply(200, {"0": {"engine_id": "e"}})
        p.script, d.script = s.reply(400, b'{"error": "mine"}'), s.Held()
        text = json.loads(config([p], [d], disaggregation={"connector": "mooncake"}))
        text["backends"][0]["connector"] = {"bootstrap_port": boot.port}
        gateway = await start_gateway(config=json.dumps(text))
        answer = await gateway.ask()
        assert (answer.status, answer.body) == (400, b'{"error": "mine"}')
        for wire in d.script.wires:
            await wire.wait_closed(timeout=2)
        await at_rest(gateway, Ledger(), p, d)


async def test_mooncake_whose_bootstrap_says_nothing(start_gateway: Start) -> None:
    async with engines() as ((p,), (d,), _):
        with refusing() as nowhere:
            port = int(nowhere.rpartition(":")[2])
            text = json.loads(config([p], [d], disaggregation={"connector": "mooncake"}))
            text["backends"][0]["connector"] = {"bootstrap_port": port}
            gateway = await start_gateway(config=json.dumps(text))
            answer = await gateway.ask()
        assert (answer.status, answer.get("x-gateway-error")) == (503, "no_backend")
        assert not p.requests and not d.requests
        await at_rest(gateway, Ledger(), p, d)


# ---- layerwise: decode calls back


class CallsBack:
    """A decode engine that asks the metaserver for its prefill, once for each prompt, and answers when prefill was asked."""

    def __init__(self, p: RawUpstream, d: RawUpstream) -> None:
        self.asked, self.answers = asyncio.Event(), list[int]()
        self.p = p
        d.script = self.decode

    async def decode(self, wire: HttpWire, request: Message) -> None:
        body = request.json()
        name = request.get("x-request-id")
        prompt = body.get("prompt")
        if "messages" in body:
            names = [f"chatcmpl-{name}"]
        else:
            names = [f"cmpl-{name}-{i}" for i in range(len(prompt) if isinstance(prompt, list) else 1)]
        await wire.send(s.SSE_HEAD)
        before = len(self.p.requests)
        for child in names:
            self.answers.append(await callback(body["kv_transfer_params"]["metaserver"], child))
        async with asyncio.timeout(5):
            while len(self.p.requests) == before and wire.ended is None:
                await asyncio.sleep(0.01)
        if self.p.script is not REFUSES:
            await wire.send(b"".join(map(s.chunk, OUTPUT)) + s.LAST)
        else:
            await wire.wait_closed(timeout=5)


REFUSES = s.reply(400, b'{"error": "prefills"}')


async def callback(url: str, name: str) -> int:
    said = {"request_id": name, "token_ids": [], "do_remote_prefill": False, "do_remote_decode": True,
            "remote_block_ids": [[3]], "remote_host": "127.0.0.1", "remote_port": 30100}  # fmt: skip
    async with aiohttp.ClientSession() as session, session.post(url, json=said) as answer:
        return answer.status


@contextlib.asynccontextmanager
async def layerwise(start_gateway: Start) -> AsyncIterator[tuple[Gateway, RawUpstream, RawUpstream, CallsBack]]:
    async with engines() as ((p,), (d,), _):
        p.script = s.reply(200, b'{"choices": []}')
        engine = CallsBack(p, d)
        meta = {"connector": "layerwise", "metaserver": {"listen": "127.0.0.1:0"}}
        gateway = await start_gateway(config=config([p], [d], disaggregation=meta))
        yield gateway, p, d, engine
        await at_rest(gateway, Ledger(), p, d)


async def test_layerwise(start_gateway: Start) -> None:
    """Decode first; prefill gets what decode posted, once for all prompts; an id that nobody waits for is 404."""
    async with layerwise(start_gateway) as (gateway, p, d, engine):
        assert (await gateway.ask()).body == b"".join(OUTPUT)
        (to_p,) = p.requests
        assert to_p.json()["kv_transfer_params"]["remote_port"] == 30100
        assert (to_p.json()["max_tokens"], to_p.json()["min_tokens"]) == (1, 1)
        answer = await gateway.ask(s.post({"model": "m", "prompt": ["a", "b"], "stream": True}, "/v1/completions"))
        assert answer.status == 200
        assert len(p.requests) == 2
        assert len(p.requests[1].json()["kv_transfer_params"]["batch_kv_transfer_params"]) == 2
        assert engine.answers == [200] * 3
        url = d.requests[0].json()["kv_transfer_params"]["metaserver"]
        assert await callback(url, "chatcmpl-" + "0" * 32) == 404
        assert await callback(url, f"chatcmpl-{d.requests[0].get('x-request-id')}") == 404
        assert len(p.requests) == 2


async def test_layerwise_prefill_fails(start_gateway: Start) -> None:
    """Decode, which waits, is closed; prefill's words are the client's."""
    async with layerwise(start_gateway) as (gateway, p, d, _):
        p.script = REFUSES
        answer = await gateway.ask()
        assert (answer.status, answer.body) == (400, b'{"error": "prefills"}')
        await d.wires[0].wait_closed(timeout=2)
        assert (len(p.requests), len(d.requests)) == (1, 1)


async def test_layerwise_the_client_leaves(start_gateway: Start) -> None:
    async with layerwise(start_gateway) as (gateway, p, d, _):
        p.script = held = s.Held()
        client = await gateway.connect()
        await client.send(s.post())
        await held.wire()
        client.reset()
        for wire in (await held.wire(), d.wires[0]):
            await wire.wait_closed(timeout=2)
