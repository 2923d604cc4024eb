"""Prefill engines whose 200 is none: an error inside it, an answer that a failure ended, a page of somebody else's. Decode is
not asked, or no longer waits, whatever the connector; and KV that nobody can fetch is counted.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tests.integration.test_disagg_concurrent import callback
from tests.support import script as s
from tests.support.gateway import Gateway, until
from tests.support.messages import HttpWire, Message
from tests.support.pairs import OUTPUT, Ledger, at_rest, config, engines
from tests.support.upstream import RawUpstream

Start = Callable[..., Awaitable[Gateway]]
PORTS = {
    "p2p_nccl": ("kv_port",), "offloading_p2p": ("kv_port",), "sglang": ("bootstrap_port",), "mooncake": ("bootstrap_port",),
    "moriio_read": ("handshake_port", "notify_port"), "moriio_write": ("handshake_port", "notify_port"),
}  # fmt: skip
PARAMS = {"do_remote_prefill": True, "remote_engine_id": "e", "remote_request_id": "r", "remote_host": "127.0.0.1",
          "remote_port": 5600, "remote_block_ids": [[1]], "transfer_id": "tx-1"}  # fmt: skip
BOOM = {"message": "boom", "type": "InternalServerError", "param": None, "code": 500}
UNKNOWN = {"message": "no such adapter", "type": "NotFoundError", "param": None, "code": 404}


def answer(finish: str = "length", **more: Any) -> dict[str, Any]:
    return {"id": "x", "choices": [{"index": 0, "finish_reason": finish}], "kv_transfer_params": PARAMS, **more}


FALSE: dict[str, Any] = {
    "an error": {"error": BOOM},
    "an error beside an answer": answer(error=BOOM),
    "an error of older engines": {"object": "error", **BOOM},
    "aborted": answer("abort"),
    "failed": answer("error"),
    "a page": b"<html>sign in</html>",
    "nothing": b"",
    "half": json.dumps(answer()).encode()[:-9],
}


def configured(connector: str, p: RawUpstream, d: RawUpstream, **more: Any) -> str:
    meta = {"metaserver": {"listen": "127.0.0.1:0"}} if connector == "layerwise" else {}
    found = json.loads(config([p], [d], disaggregation={"connector": connector, **meta}, **{"retry": {"attempts": 1}, **more}))
    for backend, engine in zip(found["backends"], (p, d), strict=True):
        backend["connector"] = dict.fromkeys(PORTS.get(connector, ()), engine.port)
    p.probes["/query"] = s.reply(200, {"0": {"engine_id": "e"}})
    return json.dumps(found)


@pytest.mark.parametrize("connector", ["nixl", "mooncake_ascend", "moriio_read", "lmcache", "p2p_nccl", "offloading_p2p"])
async def test_decode_is_not_asked(start_gateway: Start, connector: str) -> None:
    async with engines() as ((p,), (d,), _):
        gateway = await start_gateway(config=configured(connector, p, d))
        for what, said in FALSE.items():
            p.script = s.reply(200, said)
            told = await gateway.ask()
            assert (told.status, told.get("x-gateway-error")) == (502, "pd_handoff_missing"), what
            assert f"127.0.0.1:{p.port}" in told.json()["error"]["message"], told.body
        assert not d.requests
        await at_rest(gateway, Ledger(), p, d)


async def called_back(request: Message) -> None:
    given = request.json().get("kv_transfer_params") or {}
    if "metaserver" in given:
        await callback(given["metaserver"], f"chatcmpl-{request.get('x-request-id')}")


@pytest.mark.parametrize("connector", ["sglang", "mooncake", "moriio_write", "layerwise"])
async def test_decode_waits_no_longer(start_gateway: Start, connector: str) -> None:
    async with engines() as ((p,), (d,), _):
        gateway = await start_gateway(config=configured(connector, p, d))
        for what, said in FALSE.items():
            if connector == "sglang" and what == "half":
                continue  # it may be of a stream
            held = s.Held()

            async def waits(wire: HttpWire, request: Message, held: s.Held = held) -> None:
                await called_back(request)
                await held(wire, request)

            async def says(wire: HttpWire, request: Message, held: s.Held = held, said: Any = said) -> None:
                await held.wire()
                await s.reply(200, said)(wire, request)

            p.script, d.script = says, waits
            told = await gateway.ask()
            assert (told.status, told.get("x-gateway-error")) == (502, "pd_handoff_missing"), (what, told.body)
            await held.wires[0].wait_closed(timeout=2)
        await at_rest(gateway, Ledger(), p, d)


@pytest.mark.parametrize("streamed", [True, False])
async def test_a_refusal_inside_a_200_is_the_clients(start_gateway: Start, streamed: bool) -> None:
    """As SGLang's engines word it within a stream, whose head had gone out before."""
    async with engines() as ((p,), (d,), _):
        d.script = held = s.Held()
        refusing = s.stream(s.event({"error": UNKNOWN}), s.DONE) if streamed else s.reply(200, {"object": "error", **UNKNOWN})

        async def refuses(wire: HttpWire, request: Message) -> None:
            await held.wire()
            await refusing(wire, request)

        p.script = refuses
        gateway = await start_gateway(config=configured("sglang", p, d, retry={"attempts": 3}))
        told = await gateway.ask()
        assert (told.status, told.get("content-type"), len(p.requests)) == (404, "application/json", 1)
        assert b"no such adapter" in told.body
        await held.wires[0].wait_closed(timeout=2)
        (entry,) = await gateway.logged()
        assert (entry["outcome"], entry["backend"]) == ("upstream_status", f"127.0.0.1:{p.port}")
        await at_rest(gateway, Ledger(), p, d)


async def test_another_prefill_where_one_answers_with_an_error(start_gateway: Start) -> None:
    async with engines(2) as (ps, (d,), ledger):
        good, ps[0].script = ps[0].script, s.reply(200, {"error": BOOM})
        gateway = await start_gateway(config=config(ps, [d]))
        for _ in range(4):
            assert (await gateway.ask()).body == b"".join(OUTPUT)
        assert ps[0].requests and len(ps[1].requests) == 4
        ps[0].script = good
        await at_rest(gateway, ledger, *ps, d)


@pytest.mark.parametrize("connector", ["nixl", "nixl_push", "nixl_bidirectional", "mooncake_ascend", "moriio_read"])
async def test_kv_that_nobody_can_fetch_is_counted(start_gateway: Start, connector: str) -> None:
    """The engine has answered with where it is, and not so that decode could be asked; and that is never the client's fault."""
    keeps = {
        "half of it": answer(kv_transfer_params={**PARAMS, "remote_engine_id": None}),
        "ended": answer("abort"),
        "not to be read": b'{"x": NaN, "kv_transfer_params": {"a"}}',
    }
    nothing = {"null": None, "none of it": {}, "a list": [PARAMS], "words": json.dumps(PARAMS)}
    async with engines() as ((p,), (d,), _):
        gateway = await start_gateway(config=configured(connector, p, d))
        for count, said in enumerate((*keeps.values(), *(answer(kv_transfer_params=given) for given in nothing.values())), 1):
            p.script = s.reply(200, said)
            told = await gateway.ask()
            assert (told.status, told.get("x-gateway-error")) == (502, "pd_handoff_missing"), told.body
            assert await gateway.metric("tokenpipe_pd_stranded_total") == min(count, len(keeps))
        assert not d.requests
        await at_rest(gateway, Ledger(), p, d)


async def test_kv_of_a_client_that_left_is_counted_where_nobody_can_fetch_it(start_gateway: Start) -> None:
    """It left while prefill computed, and prefill's answer had been written by then."""
    async with engines() as ((p,), (d,), _):
        p.script = held = s.Held()
        gateway = await start_gateway(config=config([p], [d], disaggregation={"prefill_grace": 0.25}))
        client = await gateway.connect()
        await client.send(s.post())
        wire = await held.wire()
        client.reset()
        await gateway.logged(outcome="client_gone")
        await s.reply(200, answer(kv_transfer_params={**PARAMS, "remote_host": None}))(wire, held.requests[0])
        await until(lambda: wire.ended, "the leg's end")
        assert await gateway.metric("tokenpipe_pd_stranded_total") == 1
        assert not d.requests
        await at_rest(gateway, Ledger(), p, d)


async def test_moriio_write_on_another_rank(start_gateway: Start) -> None:
    """Decode waits for the rank that it was told of."""
    async with engines() as ((p,), (d,), _):
        held = s.Held()

        async def ran(wire: HttpWire, request: Message) -> None:
            await held.wire()
            rank = 1 - request.json()["kv_transfer_params"]["remote_dp_rank"]
            await s.reply(200, answer(kv_transfer_params={**PARAMS, "remote_dp_rank": rank}))(wire, request)

        p.script, d.script = ran, held
        text = json.loads(configured("moriio_write", p, d))
        for backend in text["backends"]:
            backend["connector"]["dp_size"] = 2
        gateway = await start_gateway(config=json.dumps(text))
        told = await gateway.ask()
        assert (told.status, told.get("x-gateway-error")) == (502, "pd_handoff_missing")
        assert "DP rank" in told.json()["error"]["message"]
        await held.wires[0].wait_closed(timeout=2)
        await at_rest(gateway, Ledger(), p, d)


@pytest.mark.parametrize("attempts", [1, 2])
async def test_mooncake_whose_prefill_was_started_anew(start_gateway: Start, attempts: int) -> None:
    """Its engine id is another one: at most one attempt fails by that."""
    async with engines() as ((p,), (d,), _):
        ids = iter(("old", "new"))

        async def query(wire: HttpWire, request: Message) -> None:
            await s.reply(200, {"0": {"engine_id": next(ids)}})(wire, request)

        async def decodes(wire: HttpWire, request: Message) -> None:
            known = request.json()["kv_transfer_params"]["remote_engine_id"] == "new"
            await s.stream(*(OUTPUT if known else (s.event({"error": BOOM}), s.DONE)))(wire, request)

        p.script, d.script = s.reply(200, {"choices": []}), decodes
        text = configured("mooncake", p, d, retry={"attempts": attempts})
        p.probes["/query"] = query
        gateway = await start_gateway(config=text)
        first = await gateway.ask()
        if attempts == 1:
            assert (first.status, first.get("x-gateway-error")) == (502, "pd_transfer_failed")
        else:
            assert (first.status, first.body) == (200, b"".join(OUTPUT))
        assert (await gateway.ask()).body == b"".join(OUTPUT)
        assert p.probed.count("/query") == 2
        await at_rest(gateway, Ledger(), p, d)


async def test_an_answer_before_the_request_has_been_read(start_gateway: Start) -> None:
    """The connection is not used again: what comes next would stand behind the rest of it."""
    async with engines() as ((p,), (d,), ledger):
        seen = 0

        async def early(wire: HttpWire) -> None:
            nonlocal seen
            try:
                request = await wire.read_request(timeout=600, body=False)
            except Exception:
                return
            if request.method == "GET":
                await p.probes[request.path](wire, request)
            else:
                seen += 1
                await s.reply(200, answer(kv_transfer_params=ledger.hold(str(seen))))(wire, request)
            await wire.wait_closed(timeout=600)

        p.on_connect = early
        gateway = await start_gateway(config=config([p], [d], timeouts={"first_byte": 3}, retry={"attempts": 1}))
        large = {**s.CHAT, "messages": [{"role": "user", "content": "a" * (24 << 20)}]}
        for _ in range(2):
            told = await gateway.ask(s.post(large), timeout=20)
            assert (told.status, told.body) == (200, b"".join(OUTPUT))
        assert seen == 2
        await asyncio.sleep(0)
        await at_rest(gateway, ledger, p, d)


@pytest.mark.parametrize("connector", ["sglang", "mooncake", "moriio_write"])
@pytest.mark.parametrize("how", ["fin", "reset"])
async def test_a_rendezvous_is_not_for_an_engine_that_was_started_anew(start_gateway: Start, connector: str, how: str) -> None:
    """Prefill closes a kept connection with the request on its way: decode waits for one that is no more. Both are asked anew,
    under another id, though one attempt is all there is; and no other connection of that engine is tried before."""
    async with engines() as ((p,), (d,), _):
        old = s.Held()
        asked: list[str] = []

        async def decodes(wire: HttpWire, request: Message) -> None:
            asked.append(request.get("x-request-id") or "")
            await (old if len(asked) == 4 else s.stream(*OUTPUT))(wire, request)

        async def prefills(wire: HttpWire, request: Message) -> None:
            if len(p.requests) == 4:
                await old.wire()
                await s.raw(then=how)(wire, request)
            await s.reply(200, {"choices": []})(wire, request)

        p.script, d.script = prefills, decodes
        gateway = await start_gateway(config=configured(connector, p, d))
        clients = [await gateway.connect() for _ in range(3)]
        for told in await asyncio.gather(*(client.ask() for client in clients)):
            assert told.status == 200
        told = await clients[0].ask(timeout=5)
        assert (told.status, told.body) == (200, b"".join(OUTPUT))
        await old.wires[0].wait_closed(timeout=2)
        ids = [request.get("x-request-id") for request in p.requests]
        assert len(set(ids)) == len(set(asked)) == len(ids) == len(asked) == 5
        for client in clients:
            client.fin()
        await at_rest(gateway, Ledger(), p, d)


async def test_a_prefill_that_has_not_been_asked_ends_with_its_decode(start_gateway: Start) -> None:
    """The client has left, and decode, which must not be aborted, went on to its first octet without asking for its prefill:
    who asks afterwards is not known here, and prefill is not asked for nobody."""
    async with engines() as ((p,), (d,), _):
        d.script = held = s.Held(s.SSE_HEAD)
        text = json.loads(configured("layerwise", p, d))
        text["disaggregation"]["abort_unsafe"] = True
        gateway = await start_gateway(config=json.dumps(text))
        client = await gateway.connect()
        await client.send(s.post())
        wire = await held.wire()
        client.reset()
        await gateway.logged(outcome="client_gone")
        assert wire.ended is None
        await wire.send(s.chunk(OUTPUT[0]))
        await wire.wait_closed(timeout=2)
        await at_rest(gateway, Ledger(), p, d)
        (request,) = d.requests
        place = request.json()["kv_transfer_params"]["metaserver"]
        assert await callback(place, f"chatcmpl-{request.get('x-request-id')}") == 404
        assert not p.requests
        await at_rest(gateway, Ledger(), p, d)


async def test_both_fail_in_one_moment(start_gateway: Start) -> None:
    """Prefill's words are the client's, and nothing is left of decode's, which was half said."""
    async with engines() as ((p,), (d,), _):
        go: asyncio.Event
        half = s.head(503, [s.JSON_TYPE, ("content-length", "100")]) + b"{"

        async def refuses(wire: HttpWire, request: Message) -> None:
            await go.wait()
            await s.reply(400, b'{"error": "prefills"}')(wire, request)

        async def fails(wire: HttpWire, request: Message) -> None:
            await go.wait()
            await wire.send(half)
            await wire.wait_closed(timeout=30)

        p.script, d.script = refuses, fails
        gateway = await start_gateway(config=configured("sglang", p, d))
        for _ in range(5):
            go = asyncio.Event()
            clients = [await gateway.connect() for _ in range(8)]
            asked = len(d.requests), len(p.requests)
            for client in clients:
                await client.send(s.post())
            await p.wait_requests(asked[1] + len(clients))
            await d.wait_requests(asked[0] + len(clients))
            go.set()
            for client in clients:
                assert (await client.read_response()).status in (400, 503)
                client.fin()
        for wire in d.wires:
            await wire.wait_closed(timeout=2)
        await at_rest(gateway, Ledger(), p, d)


async def test_decode_asks_for_its_prefill_when_its_client_has_left(start_gateway: Start) -> None:
    """It must not be aborted, and waits for what it has asked for: prefill is asked, and both end with decode's first octet."""
    async with engines() as ((p,), (d,), _):
        p.script, d.script = asked, held = s.Held(), s.Held(s.SSE_HEAD)
        text = json.loads(configured("layerwise", p, d))
        text["disaggregation"]["abort_unsafe"] = True
        gateway = await start_gateway(config=json.dumps(text))
        client = await gateway.connect()
        await client.send(s.post())
        wire = await held.wire()
        client.reset()
        await gateway.logged(outcome="client_gone")
        await called_back(held.requests[0])
        prefilling = await asked.wire()
        assert prefilling.ended is None
        await wire.send(s.chunk(OUTPUT[0]))
        await wire.wait_closed(timeout=2)
        await prefilling.wait_closed(timeout=2)
        await at_rest(gateway, Ledger(), p, d)
