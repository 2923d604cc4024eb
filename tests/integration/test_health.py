"""What streams, sleep and operators say of a backend, beside its probes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tests.integration.test_fleet import FAST, SLOW, fleet, reached, states, urls
from tests.support import script as s
from tests.support.gateway import Gateway, until
from tests.support.messages import HttpWire, Message

Start = Callable[..., Awaitable[Gateway]]
OUTPUT = s.stream(s.delta("a"), *s.FINISHED)


async def silent(wire: HttpWire, request: Message) -> None:
    await wire.wait_closed()


async def head_alone(wire: HttpWire, request: Message) -> None:
    await wire.send(s.SSE_HEAD)
    await wire.wait_closed()


async def one_event(wire: HttpWire, request: Message) -> None:
    await wire.send(s.SSE_HEAD + s.chunk(s.delta("a")))
    await wire.wait_closed()


async def comments(wire: HttpWire, request: Message) -> None:
    await wire.send(s.SSE_HEAD + s.chunk(s.delta("a")))
    while not wire.ended and not wire.closed:
        await wire.send(s.chunk(b": keep-alive\n\n"))
        await asyncio.sleep(0.05)


@pytest.mark.parametrize("script, timeouts, reason, held", [
    (silent, {"first_byte": 0.3}, "timeout_first_byte", False),
    (head_alone, {"first_byte": 0.3}, "timeout_first_byte", True),
    (head_alone, {"idle": 0.3}, "timeout_idle", False),
    (one_event, {"idle": 0.3}, "timeout_idle", False),
    (comments, {"progress": 0.3}, "timeout_progress", False),
])  # fmt: skip
async def test_what_streams_do_counts(
    start_gateway: Start, script: s.Script, timeouts: dict[str, float], reason: str, held: bool
) -> None:
    """No head, no first event, no progress: failures all of them, and probes that go well close no breaker that they opened."""
    async with fleet(2) as backends:
        config: dict[str, Any] = {"timeouts": timeouts, "health": FAST, "balance": "round_robin",
                                  "breaker": {"failures": 2, "open": 60}}  # fmt: skip
        gateway = await start_gateway(config=config | ({"commit": "first_event"} if held else {}), backends=urls(backends))
        backends[0].script = script
        clients = [await gateway.connect() for _ in range(4)]
        for client in clients:
            await client.send(s.post())
        await reached(gateway, 1, state="ejected")
        assert await gateway.metric("tokenpipe_backend_failures_total", reason=reason) == 2
        count = len(backends[0].probed)
        await until(lambda: len(backends[0].probed) > count + 3, "probes that go well")
        assert (await states(gateway))[0]["state"] == "ejected"
        for client in clients:
            client.reset()


async def test_one_that_never_answers_harms_nobody_else(start_gateway: Start) -> None:
    """Also in turn: once it is known to be silent nobody is sent there; it is back with its first answer."""
    async with fleet(3, OUTPUT) as backends:
        frozen = backends[0]
        held = s.Held(s.SSE_HEAD)
        frozen.script = held
        config = {"health": SLOW | {"silence": 0.5}, "balance": "round_robin"}
        gateway = await start_gateway(config=config, backends=urls(backends))
        stuck = await gateway.connect()
        await stuck.send(s.post())
        await held.wire()
        await reached(gateway, 1, state="silent")
        assert await gateway.metric("tokenpipe_backend_state", state="silent") == 1
        before = len(frozen.requests)
        assert {(await gateway.ask()).status for _ in range(12)} == {200}
        assert len(frozen.requests) == before == 1
        frozen.script = OUTPUT
        await frozen.wires[0].send(b"".join(map(s.chunk, (s.delta("a"), *s.FINISHED))) + s.LAST)
        assert (await stuck.read_response()).complete
        stuck.fin()
        frozen.wires[0].reset()
        await gateway.idle()
        await reached(gateway, 0, state="silent")
        assert {(await gateway.ask()).status for _ in range(6)} == {200}
        assert len(frozen.requests) == 3


def gauge(*awake: int) -> s.Script:
    """vLLM's metrics, of so many engines."""
    line = 'vllm:engine_sleep_state{engine="%d",model_name="m",sleep_state="%s"} %.1f\n'
    lines = [line % of for n, a in enumerate(awake) for of in ((n, "awake", a), (n, "weights_offloaded", 1 - a))]
    return s.reply(200, "".join(["vllm:num_requests_running 0\n", *lines]).encode())


VLLM = s.reply(200, b'vllm:num_requests_running{model_name="m"} 0.0\n')  # one that has no such gauge
UNTOLD = s.reply(200, b"process_resident_memory_bytes 1.0\n")  # with --disable-log-stats
WORDS = {
    "/metrics": (gauge(0, 0), gauge(0, 1)),
    "/is_sleeping": tuple(s.reply(200, json.dumps({"is_sleeping": asleep}).encode()) for asleep in (True, False)),
}


@pytest.mark.parametrize("balance", ["least_loaded", "round_robin"], ids=["metrics read each second", "metrics not read"])
@pytest.mark.parametrize(
    ("metrics", "page"),
    [(VLLM, "/metrics"), (VLLM, "/is_sleeping"), (UNTOLD, "/is_sleeping"), (s.reply(404, b"{}"), "/is_sleeping")],
    ids=["by its metrics", "by its page", "by its page, without statistics", "by its page, without metrics"],
)
async def test_sleep(start_gateway: Start, metrics: s.Script, page: str, balance: str) -> None:
    """A backend that sleeps gets nothing and is shown so; where all sleep the gateway is not ready; it comes back by itself."""
    async with fleet(2) as backends:
        asleep, awake = WORDS[page]
        for backend in backends:
            backend.probes |= {"/metrics": metrics, page: awake}
        gateway = await start_gateway(config={"health": FAST, "balance": balance}, backends=urls(backends))
        backends[0].probes[page] = asleep
        await reached(gateway, 1, state="asleep")
        assert {(await gateway.ask()).status for _ in range(4)} == {200}
        assert not backends[0].requests
        assert await gateway.metric("tokenpipe_backend_state", state="asleep") == 1
        backends[1].probes[page] = asleep
        await reached(gateway, 2, state="asleep")
        answer = await gateway.ask()
        assert (answer.status, answer.get("x-gateway-error")) == (503, "no_backend")
        answer = await gateway.admin(s.get("/readyz"))
        names = [url.removeprefix("http://") for url in urls(backends)]
        said = f"no backend can be reached: {names[0]} is asleep, {names[1]} is asleep"
        assert (answer.status, answer.body.decode().strip()) == (503, said)
        for backend in backends:
            backend.probes[page] = awake
        await reached(gateway, 2, state="up")
        assert (await gateway.admin(s.get("/readyz"))).status == 200


@pytest.mark.parametrize("page", [s.reply(404, b"{}"), s.reply(200, b"no json"), s.reply(200, b"[]"), s.vanish])
async def test_who_does_not_know_of_sleep(start_gateway: Start, page: s.Script) -> None:
    """Is awake, and not asked each time (unless it was not to be understood at all)."""
    async with fleet(1) as (backend,):
        backend.probes |= {"/metrics": VLLM, "/is_sleeping": page}
        gateway = await start_gateway(config={"health": FAST}, backends=[backend.url])
        await until(lambda: backend.probed.count("/health") > 4, "probes")
        assert backend.probed.count("/is_sleeping") == 1 or page is s.vanish
        assert (await states(gateway))[0]["state"] == "up"


async def test_who_was_away_is_asked_for_its_sleep_again(start_gateway: Start) -> None:
    """It may have been started with other flags meanwhile."""
    async with fleet(1) as (backend,):
        backend.probes |= {"/metrics": VLLM, "/is_sleeping": s.reply(404, b"{}")}
        gateway = await start_gateway(config={"health": FAST}, backends=[backend.url])
        await reached(gateway, 1, state="up")
        backend.probes |= {"/health": s.reply(503, b""), "/is_sleeping": WORDS["/is_sleeping"][0]}
        await reached(gateway, 1, state="down")
        backend.probes["/health"] = s.reply(200, b"")
        await reached(gateway, 1, state="asleep")


async def test_who_has_counted_nothing_yet_is_asked_when_it_has(start_gateway: Start) -> None:
    async with fleet(1) as (backend,):
        backend.probes |= {"/metrics": s.reply(200, b""), "/is_sleeping": WORDS["/is_sleeping"][0]}
        gateway = await start_gateway(config={"health": FAST}, backends=[backend.url])
        await until(lambda: backend.probed.count("/health") > 4, "probes")
        assert "/is_sleeping" not in backend.probed
        backend.probes["/metrics"] = UNTOLD
        await reached(gateway, 1, state="asleep")


async def test_another_engine_is_not_asked_for_a_page_of_vllm_s(start_gateway: Start) -> None:
    async with fleet(1) as (backend,):
        backend.probes["/metrics"] = s.reply(200, b'# TYPE sglang:num_running_reqs gauge\nsglang:num_running_reqs 0.0\n')
        gateway = await start_gateway(config={"health": FAST}, backends=[backend.url])
        await until(lambda: backend.probed.count("/health") > 4, "probes")
        assert (backend.probed.count("/metrics"), backend.probed.count("/is_sleeping")) == (1, 0)
        assert (await states(gateway))[0]["state"] == "up"


async def test_undrain(start_gateway: Start) -> None:
    """Out for maintenance, and back as it was configured: with nothing in flight, and while it drains."""
    async with fleet(2) as backends:
        listed = [{"url": b.url, "name": f"b{n}", "weight": 1 + n} for n, b in enumerate(backends)]
        gateway = await start_gateway(config={"health": SLOW, "backends": listed})

        async def order(what: str, name: str = "b1") -> Message:
            return await gateway.admin(s.get(f"/-/backends/{name}/{what}", method="POST"))

        assert (await order("undrain", "nobody")).status == 404
        assert (await order("drain")).status == 200
        assert await out(gateway) == ["b1"]
        assert {(await gateway.ask()).status for _ in range(4)} == {200}
        assert not backends[1].requests
        for _ in range(2):  # what is in service already stays so
            back = await order("undrain")
            assert (back.status, back.json()["weight"], back.json()["in_flight"]) == (200, 2, 0)
        assert await out(gateway) == []
        for backend in backends:
            backend.script = s.Held(s.SSE_HEAD)
        clients = [await gateway.connect() for _ in range(4)]
        for client in clients:
            await client.send(s.post())
        await until(lambda: backends[1].requests, "a request there")
        assert (await order("drain")).status == 202
        assert [b["state"] for b in await states(gateway)] == ["up", "draining"]
        assert (await order("undrain")).json()["in_flight"] >= 1
        assert "draining" not in [b["state"] for b in await states(gateway)]
        for client in clients:
            client.reset()


async def out(gateway: Gateway) -> list[str]:
    return [b["name"] for b in (await gateway.admin(s.get("/-/backends/out"))).json()]


@pytest.mark.parametrize("probe", [s.reply(503, b""), s.reply(404, b""), silent], ids=["503", "404", "late"])
async def test_panic(start_gateway: Start, probe: s.Script) -> None:
    """All are down by their probes, and take connections: with health.panic they are asked all the same, and what is told of
    the fleet's health stays. Once one of them is well again, it alone is asked; those that take no connection never are."""
    async with fleet(3) as backends:
        config = {"health": {**FAST, "fail": 1, "pass": 1, "panic": True}, "balance": "round_robin"}
        gateway = await start_gateway(config=config, backends=urls(backends))
        backends[2].close_listener()
        for backend in backends[:2]:
            backend.probes["/health"] = probe
        await reached(gateway, 3, state="down")
        await until(lambda: gateway.stderr().count("asked where no other can be (health.panic)") >= 2, "both are last resorts")
        assert [(await gateway.ask()).status for _ in range(6)] == [200] * 6
        assert [len(backend.requests) for backend in backends] == [3, 3, 0]
        names = [url.removeprefix("http://") for url in urls(backends)]
        assert [await gateway.metric("tokenpipe_panic_picks_total", backend=name) for name in names] == [3, 3, 0]
        assert (await gateway.ask(s.get("/v1/models"))).status == 200
        assert (await gateway.admin(s.get("/readyz"))).status == 503
        assert (await gateway.ask(s.get("/health"))).status == 503
        backends[1].probes["/health"] = s.reply()
        await reached(gateway, 1, state="up")
        assert [(await gateway.ask()).status for _ in range(4)] == [200] * 4
        assert [len(backend.requests) for backend in backends] == [3, 7, 0]
        assert await gateway.metric("tokenpipe_panic_picks_total") == 6
        for backend in backends[:2]:
            backend.close_listener()
        await reached(gateway, 3, state="down")

        async def refused() -> bool:
            return (await gateway.ask()).get("x-gateway-error") == "no_backend"

        async with asyncio.timeout(10):
            while not await refused():
                await asyncio.sleep(0.05)
