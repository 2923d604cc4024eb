"""A second try whose backends are all full waits for room, in the queue, like a first one: over real sockets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tests.integration.test_admission import SLOW, Crowd, chat, engine
from tests.integration.test_full import BODY, refuse
from tests.support import script as s
from tests.support.gateway import Gateway
from tests.support.upstream import RawUpstream

Start = Callable[..., Awaitable[Gateway]]


def listed(ill: RawUpstream, *full: RawUpstream, **more: Any) -> dict[str, Any]:
    """The first one has room for anything, and so is asked first; each of the others for one."""
    backends = [{"url": ill.url, "weight": 100}, *({"url": one.url, "max_in_flight": 1} for one in full)]
    return {"health": SLOW, "breaker": {"failures": 100}, "backends": backends, **more}


async def queue_depth(gateway: Gateway, wanted: int) -> None:
    async with asyncio.timeout(10):
        while await gateway.metric("tokenpipe_queue_depth") != wanted:
            await asyncio.sleep(0.01)


async def at_rest(gateway: Gateway) -> None:
    """Nothing is left of anybody: no place, no lease."""
    await gateway.idle()
    samples = await gateway.metrics()
    assert samples.value("tokenpipe_queue_depth") == 0
    backends = (await gateway.admin(s.get("/-/backends"))).json()
    assert {backend["in_flight"] for backend in backends} == {0}


HEDGED = {"models": {"m": {"hedge": {"after": 60, "unstreamed": 60}}}}


def gone(backend: RawUpstream) -> None:
    """It takes no connection any more, and has none."""
    backend.close_listener()
    for wire in backend.open_connections:
        wire.reset()


@pytest.mark.parametrize("more", [{}, HEDGED], ids=["plain", "hedged"])
@pytest.mark.parametrize("how", ["refused", "429"])
async def test_it_waits_for_room_and_is_served(start_gateway: Start, how: str, more: dict[str, Any]) -> None:
    """Its backend refuses, the other one is full: it is served when that has room, and the log has its wait. Its slot is free
    meanwhile: another one, to another model, goes on under limits.in_flight."""
    async with engine("m") as (ill, _), engine("m") as (one, doors), engine("n") as (other, others):
        config = listed(ill, one, limits={"in_flight": 2}, **more)
        config["backends"].append({"url": other.url})
        gateway = await start_gateway(config=config)
        crowd = Crowd(gateway)
        ill.script = refuse(429, "0")
        await crowd.send("first")  # turned away by the one, so it is at the other
        await doors.until("first")
        if how == "refused":
            gone(ill)
        before = await gateway.metric("tokenpipe_retries_total")
        # the one asks for no rest, and has room: the others ask it first
        await crowd.send("second", queued=1)
        await crowd.send("third", "n")
        others.open("third")
        assert await crowd.status("third") == 200
        assert "second" not in doors.arrived
        doors.open("first", "second")
        assert [await crowd.status(name) for name in ("first", "second")] == [200, 200]
        assert doors.arrived == ["first", "second"]
        (entry,) = await gateway.logged(request_id="second")
        assert (entry["attempts"], entry["outcome"]) == (2, "complete")
        assert entry["queue_s"] > 0
        assert await gateway.metric("tokenpipe_retries_total") == before + 1
        await at_rest(gateway)


@pytest.mark.parametrize("how", ["refused", "429"])
async def test_in_vain(start_gateway: Start, how: str) -> None:
    """No room within timeouts.queue: the client is told what went wrong, and nothing of it is counted as tried again."""
    async with engine("m") as (ill, _), engine("m") as (one, doors):
        gateway = await start_gateway(config=listed(ill, one, timeouts={"queue": 0.3}))
        crowd = Crowd(gateway)
        ill.script = refuse(429, "0")
        await crowd.send("first")
        await doors.until("first")
        if how == "refused":
            gone(ill)
        before = await gateway.metric("tokenpipe_retries_total")
        await crowd.send("second")
        answer = await crowd.answers["second"]
        if how == "refused":
            assert (answer.status, answer.get("x-gateway-error")) == (502, "upstream_connect")
        else:
            assert (answer.status, answer.body, answer.get("x-gateway-error")) == (429, BODY, None)
        assert await gateway.metric("tokenpipe_retries_total") == before
        (entry,) = await gateway.logged(request_id="second")
        assert (entry["attempts"], entry["queue_s"] >= 0.2) == (1, True)
        doors.open("first")
        assert await crowd.status("first") == 200
        await at_rest(gateway)


async def test_by_class(start_gateway: Start) -> None:
    """Second tries have the turns that their classes have, whoever came first."""
    async with engine("m") as (ill, _), engine("m") as (one, doors):
        gateway = await start_gateway(config=listed(ill, one, limits={"priority": {"header": "x-class"}}))
        crowd = Crowd(gateway)
        ill.script = refuse(429, "0")
        await crowd.send("first")
        await doors.until("first")
        await crowd.send("late", "m", ("x-class", "low"), queued=1)
        await crowd.send("soon", "m", ("x-class", "high"), queued=2)
        doors.open("first", "late", "soon")
        assert [await crowd.status(name) for name in crowd.answers] == [200] * 3
        assert doors.arrived == ["first", "soon", "late"]
        await at_rest(gateway)


async def test_a_client_that_leaves(start_gateway: Start) -> None:
    """It makes room in the queue at once, and nobody is asked for it any more."""
    async with engine("m") as (ill, _), engine("m") as (one, doors):
        gateway = await start_gateway(config=listed(ill, one))
        crowd = Crowd(gateway)
        ill.script = refuse(429, "0")
        await crowd.send("first")
        await doors.until("first")
        leaves = await gateway.connect()
        await leaves.send(chat("leaves"))
        await queue_depth(gateway, 1)
        leaves.reset()
        await queue_depth(gateway, 0)
        doors.open("first")
        assert await crowd.status("first") == 200
        (entry,) = await gateway.logged(request_id="leaves")
        assert (entry["outcome"], entry["phase"]) == ("client_gone", "queue")
        await at_rest(gateway)
        assert doors.arrived == ["first"]


async def test_an_alias_waits_for_who_serves_it(start_gateway: Start) -> None:
    """Where its fallback has room it goes there at once; where that is full, too, it waits for the first target's other
    backend, under that one's name."""
    async with engine("m") as (ill, _), engine("m") as (one, doors), engine("n") as (other, others):
        config = listed(ill, one)
        config["backends"].append({"url": other.url, "max_in_flight": 1})
        config["models"] = {"x": {"route_to": [{"model": "m"}, {"model": "n", "fallback": True}]}}
        gateway = await start_gateway(config=config)
        crowd = Crowd(gateway)
        ill.script = refuse(429, "0")
        await crowd.send("first")
        await doors.until("first")
        await crowd.send("second", "x")
        await others.until("second")  # there was room
        await crowd.send("third", "x", queued=1)
        doors.open("first", "third")
        assert [await crowd.status(name) for name in ("first", "third")] == [200, 200]
        others.open("second")
        assert await crowd.status("second") == 200
        assert [json.loads(request.body)["model"] for request in one.requests] == ["m", "m"]
        await at_rest(gateway)


async def test_an_alias_whose_first_target_goes_while_it_waits(start_gateway: Start) -> None:
    """It waits for its fallback, which is full, rather than being turned away; its body names that one's model."""
    async with engine("m") as (one, doors), engine("n") as (other, others):
        config = {
            "health": SLOW,
            "backends": [{"url": one.url, "name": "one", "max_in_flight": 1}, {"url": other.url, "max_in_flight": 1}],
            "models": {"x": {"route_to": [{"model": "m"}, {"model": "n", "fallback": True}]}},
        }
        gateway = await start_gateway(config=config)
        crowd = Crowd(gateway)
        await crowd.send("first", "m")
        await crowd.send("second", "n")
        await doors.until("first")
        await others.until("second")
        await crowd.send("third", "x", queued=1)
        drained = await gateway.admin(s.post(b"", "/-/backends/one/drain"))
        assert drained.status == 202, drained.body
        await asyncio.sleep(0.1)
        others.open("second", "third")
        assert await crowd.status("third") == 200
        assert [json.loads(request.body)["model"] for request in other.requests] == ["n", "n"]
        doors.open("first")
        assert [await crowd.status(name) for name in ("first", "second")] == [200, 200]
        await at_rest(gateway)
