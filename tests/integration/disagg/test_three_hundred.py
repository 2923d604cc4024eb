"""36: three hundred clients leave at once, in each phase and with each family of connectors, and others ask meanwhile.

What prefill held is fetched, or counted; loads and gauges are 0; memory does not grow with those that left; whoever asks while
they leave gets what one engine alone would say."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.client import RawClient
from tests.support.disagg import BODIES, PATHS, Engines, Start, mocks, port_of, undisturbed
from tests.support.gateway import Gateway, until
from tests.support.script import post
from tests.support.shy import Shy
from tests.support.tls import Certificates

# one of each family: pulled, pushed, met at a key, called back for, named by an id, laid into a store
FAMILIES = ("nixl", "nixl_push", "mooncake", "layerwise", "sglang", "p2p_nccl", "moriio_write", "shared_storage")
TOGETHER = ("mooncake", "layerwise", "sglang", "moriio_write")  # both legs: they are in one phase until decode's first octet
HANDED_OVER = ("nixl_push", "mooncake_ascend", "moriio_read", "p2p_nccl")  # nixl: test_disagg_aborts
ALL, ASKING = 300, 10
PHASES = {  # knobs of prefill and of decode that make an exchange stand in a phase
    "prefill": ({"ttft": 60}, {}),
    "wait": ({}, {"ttft": 60}),
    "stream": ({}, {"itl": 60}),
}


def request(**changes: Any) -> bytes:
    return post(json.dumps({**BODIES["chat"], "stream": True, **changes}).encode(), PATHS["chat"])


async def clients_of(gateway: Gateway) -> list[RawClient]:
    clients = [await gateway.connect() for _ in range(ALL)]
    for client in clients:
        await client.send(request())
    return clients


async def leave(gateway: Gateway, engines: Engines, clients: list[RawClient], phase: str) -> None:
    """All of them, while others ask."""
    wanted = await undisturbed(PATHS["chat"], {**BODIES["chat"], "stream": True})
    before = gateway.rss()
    asking = []
    for count, client in enumerate(clients):
        client.reset()
        if count % (ALL // ASKING) == 0:
            asking.append(asyncio.create_task(gateway.ask(request())))
            await asyncio.sleep(0)
    for answer in await asyncio.gather(*asking):
        assert (answer.status, answer.text()) == (200, wanted)
        assert answer.complete
    await engines.at_rest(gateway, seconds=20)
    assert gateway.rss() - before < 20 << 20
    samples = await gateway.metrics()
    aborts = {labels["phase"]: int(v) for n, labels, v in samples if n == "tokenpipe_pd_aborts_total" and v}
    if engines.connector == "shared_storage" and phase == "wait":  # a decode engine that finds the prompt of those before
        assert aborts.keys() <= {"wait", "probe"} and sum(aborts.values()) == ALL
    else:
        assert aborts == {phase: ALL}
    answer = await gateway.ask(request())
    assert (answer.status, answer.text()) == (200, wanted)
    await engines.at_rest(gateway)
    assert engines.connector == "shared_storage" or await engines.counted("recomputed") == 0


@pytest.mark.seconds(60)
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("name", FAMILIES)
async def test_they_leave_at_once(start_gateway: Start, name: str, phase: str, tmp_path: Path) -> None:
    ours, theirs = PHASES[phase]
    knobs = {"knobs": {"store": str(tmp_path / "kv")}} if name == "shared_storage" else {}
    async with mocks(name, ttft=0, itl=0, **knobs) as engines:
        gateway = await start_gateway(config=engines.config(hold=2, release_timeout=1, admission_grace=0.5))
        await engines.turn(engines.prefills, lease=2, **ours)
        await engines.turn(engines.decodes, lease=2, **theirs)
        (watched,) = engines.prefills if phase == "prefill" else engines.decodes
        clients = await clients_of(gateway)
        await until(lambda: watched.running == ALL, "all of them in this phase", 20)
        if phase == "stream":
            for client in clients:
                await client.receive_until(b'"role"')
        await engines.turn(engines.all, ttft=0, itl=0)  # for those that come now
        await leave(gateway, engines, clients, "wait" if name in TOGETHER and phase == "prefill" else phase)


@pytest.mark.seconds(60)
@pytest.mark.parametrize("name", HANDED_OVER)
async def test_they_leave_between_the_legs(start_gateway: Start, name: str, certificates: Certificates) -> None:
    async with mocks(name, ttft=0, itl=0) as engines:
        (p,), (d,) = engines.prefills, engines.decodes
        shy = Shy(port_of(d), certificates)
        async with shy.listening() as url:
            config = json.loads(engines.config(hold=3, release_timeout=1))
            config["backends"][1] |= {"url": url, "tls": {"verify": False}}
            config["timeouts"] = {"connect": 20}
            gateway = await start_gateway(config=json.dumps(config), ready=False)
            await engines.turn(engines.all, lease=3)
            clients = await clients_of(gateway)
            # a probe may be among those that wait
            await until(lambda: shy.waiting >= ALL and not p.running, "all of them between the legs", 20)
            shy.open = True
            await leave(gateway, engines, clients, "handoff")
            assert not p.running
            samples = await gateway.metrics()
            freed = samples.value("tokenpipe_pd_release_total", result="done")
            assert freed >= 4 and freed + samples.value("tokenpipe_pd_stranded_total") == ALL
