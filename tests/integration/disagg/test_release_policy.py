"""`disaggregation.release`: what is done about KV that prefill holds for a client that left between the legs."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from tests.support.disagg import BODIES, PATHS, Engines, Start, mocks, port_of, undisturbed
from tests.support.gateway import Gateway, until
from tests.support.script import get, post
from tests.support.shy import Shy
from tests.support.tls import Certificates

Between = Callable[..., contextlib.AbstractAsyncContextManager[tuple[Gateway, Engines, Callable[[], Awaitable[None]]]]]


@pytest.fixture
def between(start_gateway: Start, certificates: Certificates) -> Between:
    """A client between the legs, and what makes it leave."""

    @contextlib.asynccontextmanager
    async def found(connector: str, release: str, path: str = "chat", **knobs: Any) -> AsyncIterator[Any]:
        async with mocks(connector, ttft=0, itl=0) as engines:
            (p,), (d,) = engines.prefills, engines.decodes
            await engines.turn(engines.prefills, **knobs)
            shy = Shy(port_of(d), certificates)
            async with shy.listening() as url:
                config = json.loads(engines.config(release=release))
                config["backends"][1] |= {"url": url, "tls": {"verify": False}}
                config["timeouts"] = {"connect": 20}
                gateway = await start_gateway(config=json.dumps(config), ready=False)
                client = await gateway.connect()
                await client.send(post(json.dumps(BODIES[path]).encode(), PATHS[path]))
                async with asyncio.timeout(10):
                    while await engines.held() == 0 or p.running:
                        await asyncio.sleep(0.02)
                await until(lambda: shy.waiting, "the hand-off")

                async def leave() -> None:
                    shy.open = True
                    client.reset()
                    await gateway.logged(outcome="client_gone", phase="prefill")
                    await engines.at_rest(gateway)

                yield gateway, engines, leave

    return found


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", ["nixl", "nixl_push", "nixl_bidirectional"])
async def test_reject(between: Between, name: str, path: str) -> None:
    """Decode refuses what it is sent, and tells prefill to let go: nothing is transferred, and nothing computed."""
    async with between(name, "reject", path) as (gateway, engines, leave):
        await leave()
        assert await engines.held() == 0
        samples = await gateway.metrics()
        assert samples.value("tokenpipe_pd_release_total", result="done") == 1
        assert samples.value("tokenpipe_pd_stranded_total") == 0
        (p,), (d,) = await engines.states(engines.prefills), await engines.states(engines.decodes)
        assert p["ends"]["rejected"] == 1 and d["loaded"] == d["recomputed"] == 0
        body = {**BODIES["chat"], "stream": True}
        answer = await gateway.ask(post(json.dumps(body).encode(), PATHS["chat"]))
        assert (answer.status, answer.text()) == (200, await undisturbed(PATHS["chat"], body))


async def usage(gateway: Gateway) -> float | None:
    listed = (await gateway.admin(get("/-/backends"))).json()
    (engine,) = [one["engine"] for one in listed if one["role"] == "prefill"]
    return None if engine is None else engine["kv_usage"]


@pytest.mark.parametrize("full", [True, False])
async def test_pressure(between: Between, full: bool) -> None:
    """Where prefill has room the lease may run out by itself; that is counted. (Who says nothing may be full:
    test_disagg_aborts.)"""
    async with between("nixl", "pressure", **({"kv_blocks": 20} if full else {})) as (gateway, engines, leave):
        async with asyncio.timeout(10):
            while (await usage(gateway) or 0) < (0.8 if full else 1e-6):
                await asyncio.sleep(0.05)
        await leave()
        samples = await gateway.metrics()
        assert samples.value("tokenpipe_pd_release_total", result="done") == full
        assert samples.value("tokenpipe_pd_stranded_total", connector="nixl") == (not full)
        assert await engines.held() == (not full)
