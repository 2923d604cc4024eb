"""The client leaves at random moments within each phase of a disaggregated exchange: acceptance cases 31 to 36 with I1 to I4.

Six moments for each phase and connector; TOKENPIPE_OFFSETS=50 for as many as the acceptance asks for. Leases are the
connectors' own, 30 s and more: nothing that is left behind goes away while the test looks.
"""

from __future__ import annotations

import asyncio
import os
import random
from pathlib import Path
from typing import Any

import pytest

from tests.integration.disagg.test_connectors import NAMES, STORES, options, request
from tests.integration.test_disagg_aborts import shy
from tests.support import pairs
from tests.support import script as s
from tests.support.disagg import BODIES, PATHS, Engines, Start, mocks, undisturbed
from tests.support.gateway import Gateway, until
from tests.support.tls import Certificates

OFFSETS = int(os.environ.get("TOKENPIPE_OFFSETS", "6"))
TOGETHER = 10  # clients at once
# no release is refused, those for what may have been fetched already end soon, and so do idle connections
QUICK: dict[str, Any] = {"release_cap": 64, "admission_grace": 1.0, "pool": {"idle": 0.3}}

# engines that keep what nobody fetches for as long as they like, as no proxy can have it freed
KEEPING = ("offloading_p2p", "moriio_write", *STORES)

# knobs of prefill and of decode that make this phase last 80 ms, and the span of the moments; both ends are in it
PHASES = {
    "prefill": ({"ttft": 60}, {"ttft": 0}, (0.0, 0.11)),
    "prefill_answers": ({"ttft": 0.08}, {"ttft": 0}, (0.07, 0.1)),
    "wait": ({"ttft": 0}, {"ttft": 0.08}, (0.0, 0.11)),
    "stream": ({"ttft": 0}, {"ttft": 0, "itl": 0.005}, (0.0, 0.11)),
}


async def no_connections(gateway: Gateway, engines: Engines) -> None:
    """I3: when those that are idle have been closed (pool.idle) there is none left, as both sides see it."""
    async with asyncio.timeout(5):
        while await gateway.metric("tokenpipe_upstream_connections"):
            await asyncio.sleep(0.05)
    for mock in engines.all:
        assert mock.running == mock.waiting == 0


async def leave(gateway: Gateway, phase: str, span: tuple[float, float], chance: random.Random) -> None:
    """So many clients, streaming and not, each at its moment."""

    async def one(number: int) -> None:
        client = await gateway.connect()
        asked = [{"role": "user", "content": f"{number} of {OFFSETS} in {phase}: who are you?"}]  # no cache has it
        body = {**BODIES["chat"], "messages": asked}
        await client.send(request(PATHS["chat"], body, stream=phase == "stream" or number % 2 == 0))
        if phase == "stream":
            await client.receive_until(b'"role"')
        await asyncio.sleep(chance.uniform(*span))
        client.reset()

    for first in range(0, OFFSETS, TOGETHER):
        await asyncio.gather(*(one(number) for number in range(first, min(first + TOGETHER, OFFSETS))))


@pytest.mark.seconds(180)
@pytest.mark.parametrize("name", NAMES)
async def test_leaving_within(start_gateway: Start, name: str, tmp_path: Path) -> None:
    """31, 32, 34, 35."""
    chance = random.Random(name)
    async with mocks(name, **options(name, tmp_path)) as engines:
        # an engine that has finished and is told to stop before it has written its answer keeps KV that nobody can know of:
        # where a prefill may end within the span (that of `wait` begins with the request), it is given the time to say so
        for grace, phases in ((0, ("prefill", "stream")), (2, ("prefill_answers", "wait"))):
            gateway = await start_gateway(config=engines.config(prefill_grace=grace, **QUICK))
            if name in KEEPING:
                await engines.turn(engines.all, lease=1)
            for phase in phases:
                ours, theirs, span = PHASES[phase]
                await engines.turn(engines.prefills, **{"ttft": 0, "itl": 0, **ours})
                await engines.turn(engines.decodes, **{"ttft": 0, "itl": 0, **theirs})
                await leave(gateway, phase, span, chance)
                await engines.at_rest(gateway)
            samples = await gateway.metrics()
            aborts = sum(v for n, _, v in samples if n == "tokenpipe_pd_aborts_total")
            assert 0 < aborts <= samples.value("tokenpipe_requests_total", outcome="client_gone") <= OFFSETS * len(phases)
            await no_connections(gateway, engines)
            await engines.turn(engines.all, ttft=0, itl=0)
            body = {**BODIES["chat"], "stream": True, "seed": 9}
            assert (await gateway.ask(request(PATHS["chat"], body))).text() == await undisturbed(PATHS["chat"], body)
            await engines.at_rest(gateway)
        assert await engines.counted("recomputed") == 0 or name in STORES


@pytest.mark.seconds(60)
async def test_leaving_within_the_handoff(start_gateway: Start, certificates: Certificates) -> None:
    """36 at random moments: some before decode takes a connection, some as it does, some behind that."""
    chance = random.Random(3)
    async with pairs.engines() as ((p,), (d,), ledger), shy(certificates, p, d) as (text, go_on):
        gateway = await start_gateway(config=text, ready=False)
        clients = [await gateway.connect() for _ in range(4 * OFFSETS)]
        for client in clients:
            await client.send(s.post())
        await until(lambda: ledger.ever == len(clients), "the prefills")
        asyncio.get_running_loop().call_later(0.1, go_on)

        async def leaves(number: int) -> None:
            await asyncio.sleep(chance.uniform(0, 0.3))
            clients[number].reset()

        await asyncio.gather(*map(leaves, range(len(clients))))
        await pairs.at_rest(gateway, ledger, p, d)
        assert len(ledger.held) <= await gateway.metric("tokenpipe_pd_stranded_total", connector="nixl")
        assert (await gateway.ask()).body == b"".join(pairs.OUTPUT)
