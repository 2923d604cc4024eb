"""models.NAME.hedge: a second backend is asked while the first one has not said anything, and the first word counts."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tests.integration.test_fleet import SLOW, fleet, reached, served, states, urls
from tests.support import script as s
from tests.support.gateway import Gateway, until
from tests.support.messages import HttpWire, Message
from tests.support.upstream import RawUpstream

Start = Callable[..., Awaitable[Gateway]]
AFTER = 0.2
OUTPUT = (s.delta("a"), *s.FINISHED)
WHOLE = b"".join(OUTPUT)
ROLE = s.event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]})
LATE = s.chunk(ROLE)  # what an engine may send before it has computed anything
UNSTREAMED = {**s.CHAT, "stream": False}


def hedged(**more: Any) -> dict[str, Any]:
    hedge = {"after": AFTER, "unstreamed": AFTER}
    return {"models": {"m": {"hedge": hedge}}, "health": SLOW, "balance": "round_robin", **more}


async def at_rest(gateway: Gateway) -> None:
    await gateway.idle()
    assert {b["in_flight"] for b in await states(gateway)} == {0}


async def start(start_gateway: Start, backends: list[RawUpstream], **more: Any) -> Gateway:
    return await start_gateway(config=hedged(**more), backends=urls(backends))


@pytest.mark.parametrize("first", [b"", s.SSE_HEAD, s.SSE_HEAD + LATE], ids=["no head", "a head alone", "a role alone"])
async def test_the_hedge_wins(start_gateway: Start, first: bytes) -> None:
    """The late one's connection is closed, nothing of it passes, and its leases are back."""
    async with fleet(2) as backends:
        late = backends[0].script = s.Held(first)
        backends[1].script = s.stream(*OUTPUT)
        gateway = await start(start_gateway, backends, headers={"receipt": True})
        answer = await gateway.ask()
        assert (answer.status, answer.body) == (200, WHOLE)
        wire = await late.wire()
        await until(lambda: wire.ended, "the late one's connection is closed")
        await at_rest(gateway)
        assert backends[0].requests[0].body == backends[1].requests[0].body
        (line,) = await gateway.logged()
        assert (line["outcome"], line["attempts"], line["backend"]) == ("complete", 2, f"127.0.0.1:{backends[1].port}")
        samples = await gateway.metrics()
        assert samples.value("tokenpipe_retries_total", reason="hedge") == 1
        assert samples.value("tokenpipe_hedges_total", result="won") == 1
        assert samples.value("tokenpipe_backend_failures_total") == 0
        assert {b["breaker"] for b in await states(gateway)} == {"closed"}


@pytest.mark.parametrize("streamed", [True, False])
async def test_the_first_wins_after_all(start_gateway: Start, streamed: bool) -> None:
    async with fleet(2) as backends:
        go_on = asyncio.Event()
        plain = s.stream(*OUTPUT) if streamed else s.reply(200, b'{"choices":[]}')

        async def late(wire: HttpWire, request: Message) -> None:
            await go_on.wait()
            await plain(wire, request)

        backends[0].script = late
        hedge = backends[1].script = s.Held(s.SSE_HEAD)
        gateway = await start(start_gateway, backends)
        client = await gateway.connect()
        await client.send(s.post(s.CHAT if streamed else UNSTREAMED))
        wire = await hedge.wire()
        assert [b["in_flight"] for b in await states(gateway)] == [1, 1]
        go_on.set()
        answer = await client.read_response()
        assert (answer.status, answer.body) == (200, WHOLE if streamed else b'{"choices":[]}')
        await until(lambda: wire.ended, "the hedge's connection is closed")
        client.fin()
        await at_rest(gateway)
        assert await gateway.metric("tokenpipe_hedges_total", result="lost") == 1
        (line,) = await gateway.logged()
        assert line["backend"] == f"127.0.0.1:{backends[0].port}"


async def test_who_is_full_and_overtaken_is_blamed_once(start_gateway: Start) -> None:
    """The first one says that it is full while the hedge is under way, which wins: it was not late, too."""
    async with fleet(2) as backends:
        go_on = asyncio.Event()
        first, hedge = backends
        first.script = behind(go_on, s.reply(429, b"{}", [s.JSON_TYPE, ("retry-after", "20")]))
        said = asyncio.Event()
        hedge.script = behind(said, s.stream(*OUTPUT))
        gateway = await start(start_gateway, backends)
        asked = asyncio.create_task(gateway.ask())
        await until(lambda: len(hedge.requests) == 1, "the hedge")
        go_on.set()
        await reached(gateway, 1, state="busy")
        said.set()
        assert (await asked).status == 200
        await at_rest(gateway)
        found = await states(gateway)
        assert 0 < found[0]["penalty"] <= 1, found


async def test_a_hedge_that_is_turned_away_leaves_its_backend_in_peace(start_gateway: Start) -> None:
    """It says that it is full: that counts also where the first one's answer is taken."""
    async with fleet(2) as backends:
        go_on = asyncio.Event()
        backends[0].script = behind(go_on, s.stream(*OUTPUT))
        backends[1].script = s.reply(429, b"{}", [s.JSON_TYPE, ("retry-after", "20")])
        gateway = await start(start_gateway, backends)
        asked = asyncio.create_task(gateway.ask())
        await until(lambda: len(backends[1].requests) == 1, "the hedge")
        await asyncio.sleep(0.1)
        go_on.set()
        assert (await asked).status == 200
        await at_rest(gateway)
        assert [b["state"] for b in await states(gateway)][1] == "busy"


async def test_who_answers_in_time_is_alone(start_gateway: Start) -> None:
    async with fleet(2, s.stream(*OUTPUT)) as backends:
        gateway = await start(start_gateway, backends)
        for _ in range(4):
            assert (await gateway.ask()).body == WHOLE
        assert served(backends) == [2, 2]
        await gateway.idle()
        assert not (await gateway.metrics()).has("tokenpipe_hedges_total")


async def test_other_models_are_never_hedged(start_gateway: Start) -> None:
    async with fleet(2) as backends:
        late = backends[0].script = s.Held()
        gateway = await start(start_gateway, backends)
        client = await gateway.connect()
        await client.send(s.post({**s.CHAT, "model": "m0"}))
        await late.wire()
        await asyncio.sleep(2 * AFTER)
        assert served(backends) == [1, 0]
        client.fin()
        await at_rest(gateway)


RESET = s.vanish
BROKEN = s.stream(s.event({"error": {"message": "boom", "type": "E", "param": None, "code": 500}}), s.DONE)
BUSY = s.reply(503, b"busy", ())


def behind(gate: asyncio.Event, script: s.Script) -> s.Script:
    async def held(wire: HttpWire, request: Message) -> None:
        await gate.wait()
        await script(wire, request)

    return held


@pytest.mark.parametrize("failure", [RESET, BROKEN, BUSY], ids=["reset", "error", "503"])
@pytest.mark.parametrize("which", [0, 1], ids=["first", "hedge"])
async def test_one_fails_while_both_are_under_way(start_gateway: Start, failure: s.Script, which: int) -> None:
    """It leaves the other one to answer."""
    async with fleet(2) as backends:
        fail, answer = asyncio.Event(), asyncio.Event()
        backends[which].script = behind(fail, failure)
        backends[1 - which].script = behind(answer, s.stream(*OUTPUT))
        gateway = await start(start_gateway, backends)
        client = await gateway.connect()
        await client.send(s.post())
        await backends[1].wait_requests()
        fail.set()
        if failure is not BUSY:  # that one is kept, in case that the other one does worse
            await reached(gateway, 1, in_flight=0)
        answer.set()
        response = await client.read_response()
        assert (response.status, response.body) == (200, WHOLE)
        client.fin()
        await at_rest(gateway)
        failures = await gateway.metric("tokenpipe_backend_failures_total", backend=f"127.0.0.1:{backends[which].port}")
        assert failures == (1 if failure is RESET else 0)
        assert await gateway.metric("tokenpipe_requests_total", outcome="complete") == 1


@pytest.mark.parametrize(
    ("first", "second", "status"),
    [(RESET, RESET, 502), (RESET, BROKEN, 500), (BROKEN, RESET, 500), (BUSY, RESET, 503), (RESET, BUSY, 503)],
)
async def test_both_fail(start_gateway: Start, first: s.Script, second: s.Script, status: int) -> None:
    """An engine's own words tell more than a connection's end. Nobody else is asked: that was the second try."""
    async with fleet(3) as backends:
        fail = asyncio.Event()
        backends[0].script, backends[1].script = behind(fail, first), behind(fail, second)
        gateway = await start(start_gateway, backends, retry={"attempts": 3})
        client = await gateway.connect()
        await client.send(s.post())
        await backends[1].wait_requests()
        fail.set()
        assert (await client.read_response()).status == status
        assert served(backends) == [1, 1, 0]
        client.fin()
        await at_rest(gateway)
        assert (await gateway.metrics()).value("tokenpipe_requests_in_flight") == 0


async def test_the_clients_leaving_ends_both(start_gateway: Start) -> None:
    async with fleet(2) as backends:
        scripts = [s.Held(s.SSE_HEAD), s.Held()]
        backends[0].script, backends[1].script = scripts
        gateway = await start(start_gateway, backends)
        client = await gateway.connect()
        await client.send(s.post())
        wires = [await script.wire() for script in scripts]
        client.fin()
        await until(lambda: all(wire.ended for wire in wires), "both connections are closed")
        await at_rest(gateway)
        samples = await gateway.metrics()
        assert samples.value("tokenpipe_client_aborts_total") == 1
        assert samples.value("tokenpipe_backend_failures_total") == 0
        assert samples.value("tokenpipe_abort_seconds_bucket", le="0.1") == 1


@pytest.mark.parametrize("deadline", ["first_byte", "total"])
async def test_deadlines_go_on_for_both(start_gateway: Start, deadline: str) -> None:
    async with fleet(2) as backends:
        scripts = [s.Held(s.SSE_HEAD), s.Held()]
        backends[0].script, backends[1].script = scripts
        gateway = await start(start_gateway, backends, timeouts={deadline: 1})
        answer = await gateway.ask()
        assert answer.status == 504
        wires = [await script.wire() for script in scripts]
        await until(lambda: all(wire.ended for wire in wires), "both connections are closed")
        await at_rest(gateway)
        (line,) = await gateway.logged()
        assert line["outcome"] == f"timeout_{deadline}"


async def test_there_must_be_room_and_credit(start_gateway: Start) -> None:
    """A backend at its limit, and a body that is not kept: then the first one is waited for."""
    async with fleet(2) as backends:
        go_on = asyncio.Event()
        for backend in backends:
            backend.script = behind(go_on, s.stream(*OUTPUT))
        limited = [{"url": b.url, "max_in_flight": 1} for b in backends]
        gateway = await start_gateway(config=hedged(backends=limited))
        clients = [await gateway.connect() for _ in range(2)]
        for number, client in enumerate(clients):
            await client.send(s.post())
            await backends[number].wait_requests()
        await asyncio.sleep(2 * AFTER)
        go_on.set()
        for client in clients:
            assert (await client.read_response()).body == WHOLE
            client.fin()
        assert served(backends) == [1, 1]
        await at_rest(gateway)


async def test_one_alone_has_nobody_beside_it(start_gateway: Start) -> None:
    async with fleet(1) as backends:
        go_on = asyncio.Event()
        backends[0].script = behind(go_on, s.stream(*OUTPUT))
        gateway = await start(start_gateway, backends)
        client = await gateway.connect()
        await client.send(s.post())
        await backends[0].wait_requests()
        await asyncio.sleep(2 * AFTER)
        go_on.set()
        assert (await client.read_response()).body == WHOLE
        assert served(backends) == [1]
        client.fin()
        await at_rest(gateway)


async def test_an_operator_ends_both(start_gateway: Start) -> None:
    async with fleet(2) as backends:
        scripts = [s.Held(), s.Held()]
        backends[0].script, backends[1].script = scripts
        gateway = await start(start_gateway, backends)
        client = await gateway.connect()
        await client.send(s.post(fields=[("X-Request-Id", "one")]))
        wires = [await script.wire() for script in scripts]
        assert (await gateway.admin(b"DELETE /-/streams/one HTTP/1.1\r\nHost: a\r\n\r\n")).status == 204
        assert (await client.read_response()).status == 503
        await until(lambda: all(wire.ended for wire in wires), "both connections are closed")
        client.fin()
        await at_rest(gateway)
