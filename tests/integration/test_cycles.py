"""What has ended is freed at once: no exchange leaves anything for the cycle collector, whose walks all others would feel."""

from __future__ import annotations

import asyncio
import json
import signal
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from tests.integration.disagg.test_recompute import ASKED, Engine
from tests.support import pairs, upstream
from tests.support import script as s
from tests.support.disagg import CHAT, mocks
from tests.support.gateway import Gateway
from tests.support.messages import HttpWire, Message

Start = Callable[..., Awaitable[Gateway]]
COUNT = 40

# Runs inside the gateway: on SIGUSR1 it says which objects only the collector could free, and frees them.
INSIDE = """
import collections, gc, json, os, signal
def look(*_):
    gc.set_debug(gc.DEBUG_SAVEALL)
    gc.collect()
    found = collections.Counter(f"{type(thing).__module__}.{type(thing).__qualname__}" for thing in gc.garbage)
    gc.set_debug(0)
    gc.garbage.clear()
    gc.collect()
    with open(os.environ["CYCLES"] + ".new", "w") as file:
        json.dump(found, file)
    os.replace(os.environ["CYCLES"] + ".new", os.environ["CYCLES"])
signal.signal(signal.SIGUSR1, look)
"""


async def garbage(gateway: Gateway, path: Path) -> Counter[str]:
    path.unlink(missing_ok=True)
    gateway.signal(signal.SIGUSR1)
    async with asyncio.timeout(20):
        while not path.exists():
            await asyncio.sleep(0.02)
    return Counter(json.loads(path.read_text()))


async def left_by(gateway: Gateway, path: Path, request: bytes, status: int = 200) -> dict[str, int]:
    """Kinds of objects of which each exchange leaves one or more."""
    await gateway.ask(request)
    await garbage(gateway, path)
    client = await gateway.connect()
    for _ in range(COUNT):
        assert (await client.ask(request)).status == status
    client.fin()
    await gateway.idle()
    return {kind: n for kind, n in (await garbage(gateway, path)).items() if n >= COUNT}


@pytest.fixture
def inside(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "sitecustomize.py").write_text(INSIDE)
    return {"PYTHONPATH": str(tmp_path), "CYCLES": str(tmp_path / "cycles.json")}


@pytest.mark.parametrize("status", [200, 500, 502])
async def test_one_backend(start_gateway: Start, inside: dict[str, str], status: int) -> None:
    script = {
        200: s.stream(s.delta("x"), *s.FINISHED), 500: s.reply(500, {"error": {"message": "no"}}), 502: s.vanish,
    }[status]  # fmt: skip
    async with upstream.running(script) as engine:
        gateway = await start_gateway(backends=[engine.url], environment=inside)
        assert await left_by(gateway, Path(inside["CYCLES"]), s.post(), status) == {}


@pytest.mark.parametrize("connector", ["nixl", "layerwise", "shared_storage", "sglang", "nixl_bidirectional"])
@pytest.mark.parametrize("stream", [True, False])
async def test_a_pair(start_gateway: Start, inside: dict[str, str], connector: str, stream: bool) -> None:
    async with mocks(connector, ttft=0, itl=0) as engines:
        gateway = await start_gateway(config=engines.config(), environment=inside)
        body = {**CHAT, "stream": stream, "max_tokens": 3}
        assert await left_by(gateway, Path(inside["CYCLES"]), s.post(body)) == {}


@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.parametrize("status", [400, 500, 200, 0])
async def test_a_pair_that_fails(start_gateway: Start, inside: dict[str, str], side: str, status: int) -> None:
    """With a status, with an error inside a 200, or without a word (0)."""
    async with pairs.engines(2, 2) as (ps, ds, _):
        for engine in ps if side == "prefill" else ds:
            error = {"message": "no", "type": "BadRequestError", "code": status}
            engine.script = s.reply(status, {"error": error}) if status else s.vanish
        config = pairs.config(ps, ds, breaker={"failures": 1000}, retry={"budget": 1.0})
        gateway = await start_gateway(config=config, environment=inside)
        found = (await gateway.ask()).status
        assert await left_by(gateway, Path(inside["CYCLES"]), s.post(), found) == {}


@pytest.mark.parametrize("status", [200, 400])
async def test_a_pair_that_goes_on(start_gateway: Start, inside: dict[str, str], status: int) -> None:
    """An answer that is dropped, and goes on; or the request for its rest is refused, and it ends so."""
    async with pairs.engines(1, 2) as (ps, ds, ledger):
        for engine in ds:
            engine.script = resumed(ledger, status)
        config = pairs.config(ps, ds, disaggregation={"recompute": "resume"}, retry={"budget": 1.0})
        gateway = await start_gateway(config=config, environment=inside)
        assert await left_by(gateway, Path(inside["CYCLES"]), s.post({**ASKED, "stream": True})) == {}
        result = "done" if status == 200 else "failed"
        assert await gateway.metric("tokenpipe_pd_resumed_total", result=result) > COUNT


def resumed(ledger: pairs.Ledger, status: int) -> s.Script:
    dropping, whole = Engine(ledger, *[2] * 1000), Engine(ledger)

    async def script(wire: HttpWire, request: Message) -> None:
        if not request.json().get("continue_final_message"):
            await dropping.script(wire, request)
        elif status == 200:
            await whole.script(wire, request)
        else:
            ledger.fetch(request)
            await s.reply(status, b"{}")(wire, request)

    return script
