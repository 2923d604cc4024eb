"""Prefill and decode engines that fail in every way, clients that leave in every state, an operator who drains: all at once.

Afterwards nothing may be left of it: every lease is back, every exchange has one outcome, what prefill still holds was counted,
and the fleet serves as before.

    FLEET_FUZZ=60 FLEET_FUZZ_SEED=7 pytest tests/integration/disagg/test_disorder.py     # seconds; else six
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
from collections import Counter
from typing import Any

import pytest

from tests.integration.test_fleet import states
from tests.support import script as s
from tests.support.disagg import Start
from tests.support.gateway import Gateway
from tests.support.messages import HttpWire, Message
from tests.support.pairs import OUTPUT, Ledger, at_rest, config, decode, engines, prefill
from tests.support.upstream import RawUpstream, listening_socket
from tests.support.wire import Closed

SECONDS = float(os.environ.get("FLEET_FUZZ", "6"))
SEED = int(os.environ.get("FLEET_FUZZ_SEED", "0")) or random.randrange(1, 1_000_000)
CLIENTS = 16


class Ill:
    """An engine that does as `well` does, or not. `ledger`: it is to fetch from it; `missing`: what was not there."""

    def __init__(self, dice: random.Random, well: s.Script, ledger: Ledger | None = None) -> None:
        self.dice, self.well, self.ledger, self.calm, self.missing = dice, well, ledger, False, 0

    async def __call__(self, wire: HttpWire, request: Message) -> None:
        dice = self.dice
        if self.ledger is not None:
            asked = json.loads(request.body)
            frees = asked["max_tokens"] == 1  # what nobody will come for; it may have been fetched before
            self.missing += not frees and asked["kv_transfer_params"]["remote_request_id"] not in self.ledger.held
        fate = 1.0 if self.calm else dice.random()
        if fate < 0.05:
            fields = [s.JSON_TYPE, ("retry-after", dice.choice("0011"))]
            await s.reply(dice.choice((429, 503)), b"{}", fields)(wire, request)
        elif fate < 0.08:
            status = dice.choice((400, 408, 422, 500, 502))
            if status in (400, 422):
                self._fetch(request)  # decode tells prefill that it has turned it away
            await s.reply(status, b"{}")(wire, request)
        elif fate < 0.11:
            wire.reset()
        elif fate < 0.12:
            wire.fin()
        elif fate < 0.15 and wire.received.count(b"POST /v1") > 1:
            await wire.send(s.head(408, [("connection", "close"), ("content-length", "0")]))
            wire.fin()
        elif fate < 0.17:
            self._fetch(request)
            await wire.wait_closed(timeout=600)
        else:
            if fate < 0.3:
                await asyncio.sleep(dice.choice((0.01, 0.1, 0.3)))
            if not wire.ended:
                await self.well(wire, request)

    def _fetch(self, request: Message) -> None:
        if self.ledger is not None:
            self.ledger.fetch(request)


def configuration(dice: random.Random, ps: list[RawUpstream], ds: list[RawUpstream]) -> str:
    more: dict[str, Any] = {
        "disaggregation": {"hold": 1, "release_timeout": 1, "prefill_timeout": 0.8},
        "timeouts": {"first_byte": 0.8, "queue": 0.5, "idle": 1, "total": 4},
        "retry": {"attempts": 3, "budget": 1},
        "breaker": {"failures": 4, "window": 5, "open": 0.3},
        "balance": dice.choice(("least_loaded", "round_robin", "power_of_two")),
        "commit": dice.choice(("head", "first_event")),
        "limits": {"in_flight": 30, "queue": 12},
        "log": {"access": True},
    }
    found = json.loads(config(ps, ds, **more))
    found["health"] = {"interval": 0.2, "timeout": 0.5, "slow_start": 0.2, "silence": 0.3}
    for number, backend in enumerate(found["backends"]):
        backend["name"] = f"e{number}"
        if dice.random() < 0.4:
            backend["max_in_flight"] = dice.randint(1, 6)
    return json.dumps(found)


class Clients:
    def __init__(self, gateway: Gateway, dice: random.Random) -> None:
        self.gateway, self.dice = gateway, dice
        self.sent = 0
        self.answers: Counter[tuple[int, str | None]] = Counter()

    async def run(self, end: asyncio.Event) -> None:
        while not end.is_set():
            with contextlib.suppress(Closed, ConnectionError, TimeoutError):
                client = await self.gateway.connect()
                try:
                    while not end.is_set() and await self._one(client):
                        pass
                finally:
                    client.fin()

    async def _one(self, client: Any) -> bool:
        """Whether the connection goes on."""
        self.sent += 1
        body = {**s.CHAT, "stream": self.dice.random() < 0.7}
        await client.send(s.post(body, fields=[("X-Request-Id", f"q{self.sent}")]))
        if self.dice.random() < 0.3:
            await asyncio.sleep(self.dice.choice((0, 0.01, 0.05, 0.2)))
            if self.dice.random() < 0.5:
                client.reset()
            return False
        answer = await client.read_response(timeout=20)
        self.answers[answer.status, answer.get("x-gateway-error")] += 1
        if answer.status == 200 and answer.complete and body["stream"]:
            assert answer.body == b"".join(OUTPUT)
        return bool(answer.complete) and answer.get("connection") != "close"


async def operate(gateway: Gateway, dice: random.Random, everyone: list[RawUpstream], end: asyncio.Event) -> None:
    prefills = len(everyone) // 2
    while not end.is_set():
        await asyncio.sleep(dice.uniform(0.05, 0.3))
        number, what = dice.randrange(len(everyone)), dice.choice(("drain", "undrain", "undrain", "down", "up"))
        if what == "up":
            await up(everyone)
        elif what == "down":
            everyone[number].close_listener()
            for wire in everyone[number].open_connections if number >= prefills else ():  # what prefill holds would be gone
                wire.reset()
        else:
            await gateway.admin(s.post(b"", f"/-/backends/e{number}/{what}"))


async def up(everyone: list[RawUpstream]) -> None:
    for engine in everyone:
        if engine._listener is None:
            await engine.start(listening_socket(port=engine.port))


@pytest.mark.seconds(SECONDS + 60)
async def test_pairs_in_disorder(start_gateway: Start) -> None:
    dice = random.Random(SEED)
    print(f"FLEET_FUZZ_SEED={SEED}")
    async with engines(3, 3) as (ps, ds, ledger):
        ill = [*(Ill(random.Random(dice.random()), prefill(ledger)) for _ in ps),
               *(Ill(random.Random(dice.random()), decode(ledger), ledger) for _ in ds)]  # fmt: skip
        everyone = [*ps, *ds]
        for engine, script in zip(everyone, ill, strict=True):
            engine.script = script
        gateway = await start_gateway(config=configuration(dice, ps, ds))
        clients, end = Clients(gateway, dice), asyncio.Event()
        async with asyncio.TaskGroup() as group:
            for _ in range(CLIENTS):
                group.create_task(clients.run(end))
            group.create_task(operate(gateway, dice, everyone, end))
            await asyncio.sleep(SECONDS)
            end.set()
        for script in ill:
            script.calm = True
        await up(everyone)
        for number in range(len(everyone)):
            await gateway.admin(s.post(b"", f"/-/backends/e{number}/undrain"))
        await gateway.idle(20)

        logged = Counter(entry["request_id"] for entry in gateway.access_log())
        outcomes = Counter(entry["outcome"] for entry in gateway.access_log())
        print(clients.sent, "sent", dict(outcomes), dict(clients.answers))
        assert set(logged.values()) == {1}
        assert outcomes["internal"] == 0 and outcomes["complete"] > 0
        assert sum(script.missing for script in ill) == 0

        # whoever leaves while prefill writes its answer leaves KV of which the gateway may not hear
        missed = len(ledger.held) - await gateway.metric("tokenpipe_pd_stranded_total")
        print(ledger.ever, "held,", len(ledger.held), "still,", missed, "not counted")
        assert missed <= 2 + ledger.ever // 100
        ledger.held.clear()
        ledger.unknown = 0  # what frees KV may find that it was fetched, by an engine that then said nothing more
        await at_rest(gateway, ledger, *everyone)
        async with asyncio.timeout(20):  # one that was silent waits for its trial, ten seconds
            while any(backend["state"] == "down" for backend in await states(gateway)):
                await asyncio.sleep(0.05)
        for _ in range(20):
            assert (await gateway.ask()).body == b"".join(OUTPUT)
        assert {backend["in_flight"] for backend in await states(gateway)} == {0}
