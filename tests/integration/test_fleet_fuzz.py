"""A fleet in disorder: engines that fail in every way, clients that leave in every state, an operator who changes everything.

All of it at random and at once: aliases and their fallbacks, answers put off, hedges, migrations, the queue, limits, drains,
backends that come and go, reloads. Afterwards nothing may be left: every slot, lease and quota is back, what was counted is
what was sent, whatever a client got was its own and whole, and the fleet serves as on its first day.

    FLEET_FUZZ=180 FLEET_FUZZ_SEED=7 pytest tests/integration/test_fleet_fuzz.py     # seconds; else six
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tests.integration.test_fleet import states
from tests.support import script as s
from tests.support.gateway import Gateway, until
from tests.support.messages import HttpWire, Message
from tests.support.upstream import RawUpstream, listening_socket
from tests.support.wire import Closed

Start = Callable[..., Awaitable[Gateway]]
SECONDS = float(os.environ.get("FLEET_FUZZ", "6"))
SEED = int(os.environ.get("FLEET_FUZZ_SEED", "0")) or random.randrange(1, 1_000_000)
CLIENTS = 24
SERVED = (("a",), ("a", "b"), ("b", "c"), ("a", "b", "c"), ("c",))  # models of each engine
LIMITS = {"a": 10, "b": 5, "c": 8}  # in_flight of each
MODELS = ("a", "b", "c", "alias", "a", "b", "c", "alias", "alias", "alias", "unknown", None)
WORDS = 6


def configuration(dice: random.Random, backends: list[RawUpstream], *, calm: bool = False) -> dict[str, Any]:
    """One that the operator may come upon. `calm`: as it is at the end."""
    listed: list[dict[str, Any]] = [{"url": b.url, "name": f"e{n}"} for n, b in enumerate(backends)]
    roomy = not calm and dice.random() < 0.6
    if not calm:
        listed = [one for one in listed if dice.random() < 0.9] or listed[:1]
        for one in listed:
            if dice.random() < (0.1 if roomy else 0.3):
                one["max_in_flight"] = dice.randint(1, 4)
            if dice.random() < 0.3:
                one["weight"] = dice.randint(1, 3)
    second = {"hedge": {"after": 0.1, "unstreamed": 0.15}, "migrate": {"attempts": 2}}
    models: dict[str, Any] = {name: {"in_flight": 10 * limit if roomy else limit} for name, limit in LIMITS.items()}
    models["alias"] = {"in_flight": 140 if roomy else 14, "route_to": [
        {"model": "a", "weight": 2}, {"model": "b", "weight": 1}, {"model": "c", "fallback": True}]}  # fmt: skip
    for name in ("a", "alias") if calm else dice.sample(sorted(models), 3):
        models[name] |= second
    if not calm and dice.random() < 0.2:
        del models[dice.choice(("a", "b", "c"))]["in_flight"]
    return {
        "backends": listed,
        "models": models,
        "balance": "least_loaded" if calm else dice.choice(("least_loaded", "round_robin", "power_of_two", "affinity")),
        "commit": "head" if calm else dice.choice(("head", "first_event")),
        "limits": {"in_flight": 30 if calm or roomy else dice.randint(8, 30), "queue": 16,
                   "priority": {"classes": ["high", "low"], "default": "low", "header": "x-class"}},
        "timeouts": {"queue": 0.6, "first_byte": 0.8, "idle": 0.5, "connect": 0.4, "total": 5},
        "health": {"interval": 0.15, "timeout": 0.5, "fail": 2, "pass": 1, "silence": 0.3, "slow_start": 0.3},
        "breaker": {"failures": 3, "window": 5, "open": 0.4},
        "discovery": {"interval": 0.3},
        "retry": {"attempts": 3, "budget": 1.0},
        "log": {"level": "info", "access": True},
    }  # fmt: skip


def words(request_id: str) -> list[str]:
    return [f"{request_id}." for _ in range(WORDS)]


class Engine:
    """What it does with a request is up to the dice; what it says is the request's own."""

    def __init__(self, dice: random.Random) -> None:
        self.dice, self.calm = dice, False
        self.asked: Counter[str] = Counter()
        self.holds = False  # streams, behind their heads

    async def __call__(self, wire: HttpWire, request: Message) -> None:
        dice, asked = self.dice, json.loads(request.body)
        request_id = request.get("x-request-id") or ""
        fate = 1.0 if self.calm else dice.random()
        if 0.20 <= fate < 0.23 and wire.received.count(b"POST /v1") > 1:  # it had given up waiting: it has seen no request
            await wire.send(s.head(408, [("connection", "close"), ("content-length", "0")]))
            wire.fin()
            return
        self.asked[request_id] += 1
        if fate < 0.06:
            status = dice.choice((429, 503))
            fields = [s.JSON_TYPE, ("retry-after", dice.choice("0001"))]
            await s.reply(status, b'{"error":{"message":"full"}}', fields)(wire, request)
        elif fate < 0.11:
            await s.reply(dice.choice((400, 404, 500, 503)), b'{"error":{"message":"no"}}')(wire, request)
        elif fate < 0.14:
            wire.reset()
        elif fate < 0.16:
            wire.fin()
        elif fate < 0.20:
            await wire.wait_closed(timeout=600)  # it hangs
        elif asked.get("stream"):
            await self._stream(wire, request_id, asked)
        else:
            if not self.calm:
                await asyncio.sleep(dice.choice((0, 0, 0.02, 0.3)))
            text = "".join(words(request_id))
            choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
            await s.reply(200, {"id": "1", "object": "chat.completion", "choices": [choice]})(wire, request)

    async def _stream(self, wire: HttpWire, request_id: str, asked: dict[str, Any]) -> None:
        dice = self.dice
        last = asked["messages"][-1]
        done = last["content"] if last["role"] == "assistant" else ""
        left = words(request_id)
        while done:
            assert done.startswith(left[0]), (done, left)
            done = done.removeprefix(left.pop(0))
        fate = 1.0 if self.calm else dice.random()
        await wire.send(s.SSE_HEAD)
        if self.holds:
            await wire.wait_closed(timeout=600)
        if fate < 0.10:
            await asyncio.sleep(dice.choice((0.05, 0.2, 0.6)))
        elif fate < 0.13:
            await wire.send(s.chunk(s.event({"error": {"message": "engine", "code": dice.choice((400, 500))}})) + s.LAST)
            return
        elif fate < 0.15:
            await wire.wait_closed(timeout=600)
            return
        end = dice.randrange(len(left) + 1) if 0.15 <= fate < 0.35 else None
        for at, word in enumerate(left):
            if at == end:
                await self._die(wire)
                return
            event = s.chunk(s.delta(word))
            if fate < 0.45 and dice.random() < 0.3:
                cut = dice.randrange(1, len(event))
                await wire.send(event[:cut])
                await asyncio.sleep(0.005)
                event = event[cut:]
            await wire.send(event)
            await asyncio.sleep(0 if self.calm else dice.choice((0, 0.002, 0.02)))
        await wire.send(s.chunk(s.FINISHED[0]) + s.chunk(s.DONE) + s.LAST)

    async def _die(self, wire: HttpWire) -> None:
        how = self.dice.choice(("reset", "fin", "silent", "abort", "end", "half"))
        if how == "reset":
            wire.reset()
        elif how == "fin":
            wire.fin()
        elif how == "silent":
            await wire.wait_closed(timeout=600)
        elif how == "abort":
            await wire.send(s.chunk(s.delta("", finish="abort")) + s.chunk(s.DONE) + s.LAST)
        elif how == "end":
            await wire.send(s.LAST)
        else:
            await wire.send(s.chunk(s.delta("never"))[:20])
            wire.reset()


class Clients:
    """`whole`: what was answered to the end, by request id; `sent`: all ids that the gateway may have seen."""

    def __init__(self, gateway: Gateway, dice: random.Random) -> None:
        self.gateway, self.dice = gateway, dice
        self.sent: dict[str, str | None] = {}
        self.whole: dict[str, Message] = {}
        self.wrong: list[str] = []

    def request(self) -> tuple[str, bytes, bool]:
        dice, request_id = self.dice, f"q{len(self.sent)}x"
        stream, model = dice.random() < 0.75, dice.choice(MODELS)
        self.sent[request_id] = model
        asks = "hi" * dice.choice((1, 1, 1, 3000))
        body: dict[str, Any] = {"messages": [{"role": "user", "content": asks}], "stream": stream}
        if model is not None:
            body = {"model": model, **body}
        fields = [("X-Request-Id", request_id), ("X-Class", dice.choice(("high", "low", "none")))]
        return request_id, s.post(body, fields=fields), stream

    async def run(self, end: asyncio.Event) -> None:
        while not end.is_set():
            with contextlib.suppress(Closed, ConnectionError, TimeoutError, OSError):
                client = await self.gateway.connect()
                try:
                    while not end.is_set() and await self._one(client):
                        pass
                finally:
                    client.fin()
            await asyncio.sleep(0.005)

    async def _one(self, client: Any) -> bool:
        """Whether the connection goes on."""
        dice = self.dice
        request_id, octets, stream = self.request()
        leaves = dice.random() < 0.35
        if dice.random() < 0.1:
            await client.send_pieces(octets[:-5], octets[-5:], gap=dice.choice((0, 0.03)))
        else:
            await client.send(octets)
        if leaves:
            await asyncio.sleep(dice.choice((0, 0.001, 0.01, 0.05, 0.11, 0.16, 0.3, 0.7)) * dice.uniform(0.7, 1.3))
            if dice.random() < 0.5:
                client.reset()
            return False
        answer = await client.read_response(timeout=20)
        self.whole[request_id] = answer
        if answer.status == 200:
            self._check(request_id, answer, stream)
        return bool(answer.complete) and (answer.get("connection") or "").lower() != "close"

    def _check(self, request_id: str, answer: Message, stream: bool) -> None:
        """Whatever came is a beginning of what this request was to get, and all of it where it says so."""
        whole = "".join(words(request_id))
        if answer.get("x-request-id") != request_id:
            self.wrong.append(f"{request_id} got the answer of {answer.get('x-request-id')}")
        if not stream:
            if answer.complete and answer.json()["choices"][0]["message"]["content"] != whole:
                self.wrong.append(f"{request_id} got {answer.body!r}")
            return
        text, finished = "", False
        for event in answer.body.split(b"\n\n"):
            if not event.startswith(b"data: {"):
                continue
            try:
                said = json.loads(event[6:])
            except ValueError:
                break  # half an event, which is the last
            for choice in said.get("choices", ()):
                text += choice["delta"].get("content") or ""
                finished = finished or choice["finish_reason"] == "stop"
        if not whole.startswith(text) or (finished and text != whole):
            self.wrong.append(f"{request_id} got {text!r}")


class Operator:
    def __init__(self, gateway: Gateway, dice: random.Random, backends: list[RawUpstream]) -> None:
        self.gateway, self.dice, self.backends = gateway, dice, backends
        self.answers: Counter[str] = Counter()

    async def reload(self, config: dict[str, Any]) -> None:
        assert self.gateway.config_path is not None
        self.gateway.config_path.write_text(json.dumps(config))
        answer = await self.gateway.admin(s.get("/-/reload", method="POST"))
        assert answer.status == 200, answer.body

    async def run(self, end: asyncio.Event) -> None:
        dice = self.dice
        while not end.is_set():
            await asyncio.sleep(dice.uniform(0.02, 0.3))
            what = dice.choice(("undrain", "up", "reload", "drain", "undrain", "add", "remove", "down", "up", "list", "look"))
            name = f"e{dice.randrange(len(self.backends))}"
            if what in ("undrain", "up"):
                await self._bring_back()
                continue
            backend = self.backends[int(name[1:])]
            if what == "reload":
                await self.reload(configuration(dice, self.backends))
            elif what == "drain":
                await self._asked(what, s.post(b"", f"/-/backends/{name}/{what}"))
            elif what == "add":
                await self._asked(what, s.post({"url": backend.url, "name": name}, "/-/backends"))
            elif what == "remove":
                await self._asked(what, s.get(f"/-/backends/{name}", method="DELETE"))
            elif what == "down" and backend._listener is not None and sum(b._listener is not None for b in self.backends) > 2:
                backend.close_listener()
                for wire in backend.open_connections:
                    if dice.random() < 0.5:
                        wire.reset()
            elif what == "list":
                served = dice.choice([SERVED[int(name[1:])]] * 4 + [("other",)])
                self.lists(backend, served)
            else:
                await self.gateway.metrics()

    async def _bring_back(self) -> None:
        """One that is out, or down."""
        out = (await self.gateway.admin(s.get("/-/backends/out"))).json()
        if out:
            await self._asked("undrain", s.post(b"", f"/-/backends/{self.dice.choice(out)['name']}/undrain"))
        for backend in self.backends:
            if backend._listener is None:
                await self.up(backend)
                return

    def lists(self, backend: RawUpstream, served: tuple[str, ...]) -> None:
        listed = {"data": [{"id": model, "object": "model"} for model in served]}
        backend.probes["/v1/models"] = s.reply(200, json.dumps(listed).encode())

    async def up(self, backend: RawUpstream) -> None:
        if backend._listener is None:
            await backend.start(listening_socket(port=backend.port))

    async def _asked(self, what: str, request: bytes) -> None:
        answer = await self.gateway.admin(request)
        assert answer.status < 500, answer.body
        self.answers[f"{what} {answer.status}"] += 1

    async def put_in_order(self) -> None:
        for number, backend in enumerate(self.backends):
            await self.up(backend)
            self.lists(backend, SERVED[number])
        await self.reload(configuration(self.dice, self.backends, calm=True))
        for number in range(len(self.backends)):
            await self._asked("undrain", s.post(b"", f"/-/backends/e{number}/undrain"))


async def nothing_is_left(gateway: Gateway) -> None:
    await gateway.idle(20)
    samples = await gateway.metrics()
    for gauge in ("tokenpipe_requests_in_flight", "tokenpipe_backend_in_flight", "tokenpipe_queue_depth"):
        assert samples.value(gauge) == 0, gauge
    assert [b["name"] for b in await states(gateway) if b["in_flight"] or b["state"] == "draining"] == []


@pytest.mark.seconds(SECONDS + 60)
async def test_a_fleet_in_disorder(start_gateway: Start) -> None:
    dice = random.Random(SEED)
    print(f"FLEET_FUZZ_SEED={SEED}")
    engines = [Engine(random.Random(dice.random())) for _ in SERVED]
    backends = [RawUpstream(engine, models=SERVED[number]) for number, engine in enumerate(engines)]
    for backend in backends:
        await backend.start()
    try:
        gateway = await start_gateway(config=configuration(dice, backends, calm=True))
        await asyncio.sleep(0.5)
        descriptors = gateway.fds()
        clients, operator = Clients(gateway, dice), Operator(gateway, dice, backends)
        end = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            for _ in range(CLIENTS):
                group.create_task(clients.run(end))
            group.create_task(operator.run(end))
            await asyncio.sleep(SECONDS)
            end.set()
        for engine in engines:
            engine.calm = True
        await operator.put_in_order()
        await nothing_is_left(gateway)

        # what was counted, and what was said
        assert clients.wrong == []
        logged = Counter(entry["request_id"] for entry in gateway.access_log())
        print(Counter((entry["outcome"], entry["code"]) for entry in gateway.access_log() if entry["outcome"] != "complete"))
        outcomes = Counter(entry["outcome"] for entry in gateway.access_log())
        print(len(clients.sent), "sent", dict(outcomes), dict(operator.answers))
        print(Counter(answer.status for answer in clients.whole.values()))
        samples = await gateway.metrics()
        for name in ("retries", "hedges", "migrations"):
            print(name, {tuple(labels.values()): value for n, labels, value in samples if n == f"tokenpipe_{name}_total"})
        assert set(logged.values()) == {1}
        assert logged.keys() <= clients.sent.keys()
        assert clients.whole.keys() <= logged.keys()
        assert samples.value("tokenpipe_requests_total") == len(logged)
        assert outcomes["internal"] == 0
        assert {answer.status for answer in clients.whole.values()}.isdisjoint({408})

        # nobody is asked more often than it may be
        for request_id in clients.sent:
            assert sum(engine.asked[request_id] for engine in engines) <= 3 + 1 + 2, request_id

        await all_room_is_back(gateway, engines)
        await until(lambda: gateway.fds() <= descriptors + len(backends), "descriptors are closed")
    finally:
        for backend in backends:
            await backend.stop()


async def all_room_is_back(gateway: Gateway, engines: list[Engine]) -> None:
    """As many as each model's limit are let in at once, and no one more."""
    bodies = {model: {"model": model, "messages": [{"role": "user", "content": "hi"}], "stream": True} for model in LIMITS}
    found: list[dict[str, Any]] = []
    for _ in range(600):
        found = await states(gateway)
        if {b["state"] for b in found} == {"up"}:
            break
        for body in bodies.values():  # one that is ejected waits for a trial, one that was silent for ten seconds
            await gateway.ask(s.post(body))
        await asyncio.sleep(0.05)
    assert [(b["name"], b["state"], b["breaker"], b["models"], b["in_flight"]) for b in found if b["state"] != "up"] == []
    for engine in engines:
        engine.holds = True
    for model, limit in LIMITS.items():
        clients = [await gateway.connect() for _ in range(limit + 1)]
        for client in clients:
            await client.send(s.post(bodies[model]))
        async with asyncio.timeout(10):
            while await gateway.metric("tokenpipe_backend_in_flight") != limit:
                await asyncio.sleep(0.01)
        for client in clients:
            client.reset()
        await nothing_is_left(gateway)
