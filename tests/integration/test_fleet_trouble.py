"""A fleet in trouble: what one thing that goes wrong does to another, and that all of it is over when its cause is."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

from tests.integration.test_fleet import SLOW, fleet, reached, states, urls
from tests.support import script as s
from tests.support.gateway import Gateway

Start = Callable[..., Awaitable[Gateway]]
OUTPUT = (s.delta("a"), *s.FINISHED)
WHOLE = b"".join(OUTPUT)


@contextlib.contextmanager
def no_descriptor_left(gateway: Gateway, spare: int = 0) -> Iterator[None]:
    """For the time of a `with` it can open only so many."""
    taken = {int(name) for name in os.listdir(f"/proc/{gateway.pid}/fd")}
    free = (number for number in range(1_000_000) if number not in taken)
    most = next(number for at, number in enumerate(free) if at == spare)
    before = resource.prlimit(gateway.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(gateway.pid, resource.RLIMIT_NOFILE, (most, before[1]))
    try:
        yield
    finally:
        resource.prlimit(gateway.pid, resource.RLIMIT_NOFILE, before)


async def at_rest(gateway: Gateway) -> None:
    await gateway.idle()
    assert {b["in_flight"] for b in await states(gateway)} == {0}


async def test_a_hedge_for_which_there_is_no_descriptor(start_gateway: Start) -> None:
    """It is not made, and whoever was asked first goes on."""
    async with fleet(2) as backends:
        go_on = asyncio.Event()

        async def late(wire: Any, request: Any) -> None:
            await go_on.wait()
            await s.stream(*OUTPUT)(wire, request)

        for backend in backends:
            backend.script = late
        config = {"models": {"m": {"hedge": {"after": 0.5}}}, "health": SLOW}
        gateway = await start_gateway(config=config, backends=urls(backends))
        client = await gateway.connect()
        await client.send(s.post())
        async with asyncio.timeout(10):
            while not any(backend.requests for backend in backends):
                await asyncio.sleep(0.01)
        with no_descriptor_left(gateway):
            await asyncio.sleep(1)
        go_on.set()
        answer = await client.read_response()
        client.fin()
        assert (answer.status, answer.body) == (200, WHOLE)
        assert sum(len(backend.requests) for backend in backends) == 1
        await at_rest(gateway)
        assert await gateway.metric("tokenpipe_backend_failures_total") == 0


async def test_a_trial_that_goes_on_keeps_nobody_out(start_gateway: Start) -> None:
    """A backend is back, and its trial is a stream of minutes. Then the other one goes: that is what the first is for."""
    async with fleet(2) as backends:
        config = {"health": SLOW | {"silence": None}, "breaker": {"failures": 1, "open": 0.2}, "balance": "round_robin"}
        gateway = await start_gateway(config=config, backends=urls(backends))
        first, second = backends
        first.script = s.vanish
        while not first.requests:
            await gateway.ask()
        await reached(gateway, 1, state="ejected")
        held = first.script = s.Held(s.SSE_HEAD + s.chunk(s.delta("a")))
        await asyncio.sleep(0.3)
        trial = None
        while not held.wires:
            client = await gateway.connect()
            await client.send(s.post())
            await client.read_response_head()
            if held.wires:
                trial = client
            else:
                client.fin()
        assert trial is not None
        assert await trial.receive_until(b'"a"')
        first.script = s.stream(*OUTPUT)
        second.close_listener()
        for wire in second.open_connections:
            wire.fin()
        answers = [await gateway.ask() for _ in range(6)]
        assert [answer.status for answer in answers] == [200] * 6
        trial.fin()
        await at_rest(gateway)
