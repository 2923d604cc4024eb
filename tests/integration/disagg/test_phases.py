"""The client leaves at random moments within each phase of a disaggregated exchange: acceptance cases 31 to 36 with I1 to I4.

For each connector fifty or more leave in each phase (TOKENPIPE_OFFSETS says how many), in waves, until the gateway has counted
as many in that phase. The moments are drawn with TOKENPIPE_SEED, which a failure shows. Leases are the
connectors' own, 30 s and more: nothing that is left behind goes away while the test looks.
"""

from __future__ import annotations

import asyncio
import os
import random
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.integration.disagg.test_connectors import NAMES, STORES, options, request
from tests.integration.test_disagg_aborts import shy
from tests.support import pairs
from tests.support import script as s
from tests.support.disagg import BODIES, PATHS, Engines, Start, asked, mocks, undisturbed
from tests.support.gateway import Gateway, Samples, until
from tests.support.tls import Certificates

OFFSETS = int(os.environ.get("TOKENPIPE_OFFSETS", "50"))
SEED = int(os.environ.get("TOKENPIPE_SEED") or random.randrange(1 << 32))
TOGETHER = 60  # clients at once: some are late, or early
WAVES = 8
# no release is refused, those for what may have been fetched already end soon, and so do idle connections
QUICK: dict[str, Any] = {"release_cap": 64, "admission_grace": 1.0, "pool": {"idle": 0.3}}

AT_ONCE: dict[str, Any] = {"ttft": 0, "itl": 0, "fault": ""}

# engines that keep what nobody fetches for as long as they like, as no proxy can have it freed: a cache, no strand
KEEPING = ("offloading_p2p", *STORES)
# whose legs are under way together: they are in one phase until decode's first octet
TOGETHER_LEGS = ("mooncake", "layerwise", "sglang", "moriio_write")
UNSURE = "mooncake"  # of them: its decode may have fetched when prefill says that it holds something; a release waits in vain
NOT_FREED = "moriio_write"  # nobody can have it let go of what it keeps for a decode that was closed: it is counted


class Phase(NamedTuple):
    """Knobs of prefill and of decode that make it last; seconds at which clients leave, both ends of it within; as what the
    gateway counts them."""

    prefill: dict[str, Any]
    decode: dict[str, Any]
    span: tuple[float, float]
    counted: tuple[str, ...]


PHASES = {
    "prefill": Phase({"ttft": 60}, {}, (0.0, 0.11), ("prefill", "probe")),
    "prefill_answers": Phase({"ttft": 0.08}, {}, (0.06, 0.16), ("prefill", "handoff", "wait")),
    "wait": Phase({}, {"ttft": 0.3}, (0.05, 0.4), ("wait",)),
    # half of the time while events come, half of it while decode says nothing, and would for ever
    "stream": Phase({}, {"itl": 0.02, "fault": "hang@token:6"}, (0.0, 0.2), ("stream",)),
}
# an engine that has finished and is told to stop before it has written its answer keeps KV that nobody can know of: where a
# prefill may end within the span, it is given the time to say so
STAGES: tuple[tuple[float, tuple[str, ...]], ...] = ((0, ("prefill", "stream")), (2, ("prefill_answers", "wait")))


def chances(of: str) -> random.Random:
    print(f"TOKENPIPE_SEED={SEED}")  # which pytest shows of a test that fails
    return random.Random(f"{SEED} {of}")


async def no_connections(gateway: Gateway, engines: Engines) -> None:
    """I3: when those that are idle have been closed (pool.idle) there is none left, as both sides see it."""
    async with asyncio.timeout(5):
        while await gateway.metric("tokenpipe_upstream_connections"):
            await asyncio.sleep(0.05)
    for mock in engines.all:
        assert mock.running == mock.waiting == 0


async def leave(gateway: Gateway, phase: Phase, chance: random.Random) -> None:
    """A wave of clients, streaming and not, each at its moment."""

    async def one(number: int) -> None:
        client = await gateway.connect()
        content = f"{chance.random()}: who are you?"  # no cache has it
        body = {**BODIES["chat"], "messages": [{"role": "user", "content": content}]}
        await client.send(request(PATHS["chat"], body, stream=phase.counted == ("stream",) or number % 2 == 0))
        if phase.counted == ("stream",):
            await client.receive_until(b'"role"')
        await asyncio.sleep(chance.uniform(*phase.span))
        client.reset()

    await asyncio.gather(*(one(number) for number in range(TOGETHER)))


async def waves(gateway: Gateway, engines: Engines, phase: Phase, chance: random.Random) -> Samples:
    """As many as it takes; I1 to I4 at the end of each."""
    counted = phase.counted
    if engines.connector in TOGETHER_LEGS and "prefill" in counted:
        counted = ("prefill", "wait")

    def in_phase(samples: Samples) -> float:
        return sum(samples.value("tokenpipe_pd_aborts_total", phase=each) for each in counted)

    samples = await gateway.metrics()
    wanted = in_phase(samples) + OFFSETS
    for _ in range(WAVES * max(OFFSETS // 50, 1)):
        await leave(gateway, phase, chance)
        await engines.at_rest(gateway)
        samples = await gateway.metrics()
        if in_phase(samples) >= wanted:
            return samples
    raise AssertionError(f"{in_phase(samples)} of {wanted} left in this phase")


@pytest.mark.seconds(180)
@pytest.mark.parametrize("name", NAMES)
async def test_leaving_within(start_gateway: Start, name: str, tmp_path: Path) -> None:
    """31, 32, 34, 35."""
    chance = chances(name)
    async with mocks(name, **options(name, tmp_path)) as engines:
        for grace, phases in STAGES:
            gateway = await start_gateway(config=engines.config(prefill_grace=grace, **QUICK))
            if name in KEEPING:
                await engines.turn(engines.all, lease=1)
            for each in phases:
                phase = PHASES[each]
                await engines.turn(engines.prefills, **{**AT_ONCE, **phase.prefill})
                await engines.turn(engines.decodes, **{**AT_ONCE, **phase.decode})
                before = [await asked(mock, "/admin/synth") for mock in engines.decodes]
                samples = await waves(gateway, engines, phase, chance)
                if each == "prefill" and name not in (*TOGETHER_LEGS, "shared_storage"):  # 31: decode is not asked
                    after = [await asked(mock, "/admin/synth") for mock in engines.decodes]
                    assert [one["arrived"] for one in after] == [one["arrived"] for one in before]
                # nothing is counted as a strand that could be freed
                if name != NOT_FREED:
                    unsure = samples.value("tokenpipe_pd_release_total", result="timeout") if name == UNSURE else 0
                    assert samples.value("tokenpipe_pd_stranded_total") == unsure, each
            await no_connections(gateway, engines)
            await engines.turn(engines.all, **AT_ONCE)
            body = {**BODIES["chat"], "stream": True, "seed": 9}
            assert (await gateway.ask(request(PATHS["chat"], body))).text() == await undisturbed(PATHS["chat"], body)
            await engines.at_rest(gateway)
        assert await engines.counted("recomputed") == 0 or name in STORES


@pytest.mark.seconds(60)
async def test_leaving_within_the_handoff(start_gateway: Start, certificates: Certificates) -> None:
    """36 at random moments: some before decode takes a connection, some as it does, some behind that."""
    chance = chances("handoff")
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
        samples = await gateway.metrics()
        assert samples.value("tokenpipe_pd_aborts_total", phase="handoff") > 0
        stranded = samples.value("tokenpipe_pd_stranded_total", connector="nixl")
        assert len(ledger.held) <= stranded <= samples.value("tokenpipe_pd_release_total", result="capped")
        assert (await gateway.ask()).body == b"".join(pairs.OUTPUT)
