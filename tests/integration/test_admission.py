"""The queue over real sockets: limits of the gateway, of models and of backends, and who is turned away before its body."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from tests.support import script as s
from tests.support.client import RawClient
from tests.support.gateway import Gateway
from tests.support.messages import HttpWire, Message
from tests.support.upstream import RawUpstream, running

Start = Callable[..., Awaitable[Gateway]]
SLOW = {"interval": 60}


class Doors:
    """A script that holds each request until it is let go on."""

    def __init__(self) -> None:
        self.arrived: list[str] = []
        self._gates: dict[str, asyncio.Event] = {}

    def _gate(self, name: str) -> asyncio.Event:
        return self._gates.setdefault(name, asyncio.Event())

    async def __call__(self, wire: Any, request: Message) -> None:
        name = request.get("x-request-id") or ""
        self.arrived.append(name)
        await self._gate(name).wait()
        await s.reply(200, b"{}")(wire, request)

    def open(self, *names: str) -> None:
        for name in names:
            self._gate(name).set()

    async def until(self, *names: str) -> None:
        async with asyncio.timeout(10):
            while not set(names) <= set(self.arrived):
                await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def engine(*models: str) -> AsyncIterator[tuple[RawUpstream, Doors]]:
    doors = Doors()
    backend = RawUpstream(doors, models=models or ("m",))
    await backend.start()
    try:
        yield backend, doors
    finally:
        await backend.stop()


def chat(name: str, model: str = "m", *fields: tuple[str, str]) -> bytes:
    return s.post({"model": model, "messages": []}, fields=[("X-Request-Id", name), *fields])


class Crowd:
    """Requests under way, each on a connection of its own."""

    def __init__(self, gateway: Gateway):
        self.gateway = gateway
        self.answers: dict[str, asyncio.Task[Message]] = {}

    async def send(self, name: str, model: str = "m", *fields: tuple[str, str], queued: int | None = None) -> None:
        """`queued`: wait until so many wait."""
        self.answers[name] = asyncio.create_task(self.gateway.ask(chat(name, model, *fields), timeout=20))
        if queued is not None:
            async with asyncio.timeout(10):
                while await self.gateway.metric("tokenpipe_queue_depth") != queued:
                    await asyncio.sleep(0.01)

    async def status(self, name: str) -> int:
        return (await self.answers[name]).status


def refused(answer: Message, code: str) -> int:
    assert (answer.status, answer.get("x-gateway-error")) == (503, code), answer.body
    return int(answer.get("retry-after") or "0")


async def test_a_full_model_holds_up_no_other(start_gateway: Start) -> None:
    """Behind one model's limit its own requests wait, an alias' too; others, who came later, go on."""
    async with engine("a", "b") as (backend, doors):
        config = {"health": SLOW, "models": {"a": {"in_flight": 1}, "x": {"route_to": {"model": "a"}}}}
        gateway = await start_gateway(config=config, backends=[backend.url])
        crowd = Crowd(gateway)
        await crowd.send("a1", "a")
        await doors.until("a1")
        await crowd.send("a2", "a", queued=1)
        await crowd.send("x1", "x", queued=2)
        await crowd.send("b1", "b")
        await doors.until("b1")
        assert doors.arrived == ["a1", "b1"]
        doors.open("a1", "a2", "x1", "b1")
        assert [await crowd.status(name) for name in crowd.answers] == [200] * 4
        assert doors.arrived == ["a1", "b1", "a2", "x1"]
        await gateway.idle()
        samples = await gateway.metrics()
        assert samples.value("tokenpipe_queue_seconds_count", model="a") == 2
        assert samples.value("tokenpipe_queue_depth") == 0


async def test_a_full_backend_holds_up_no_other_model(start_gateway: Start) -> None:
    """`backends[].max_in_flight`: the model that only it serves waits, others do not."""
    async with engine("a") as (one, doors), engine("b") as (two, others):
        listed = [{"url": one.url, "max_in_flight": 1}, {"url": two.url}]
        gateway = await start_gateway(config={"health": SLOW, "backends": listed})
        crowd = Crowd(gateway)
        await crowd.send("a1", "a")
        await doors.until("a1")
        await crowd.send("a2", "a", queued=1)
        for name in ("b1", "b2"):
            await crowd.send(name, "b")
            await others.until(name)
        doors.open("a1", "a2")
        others.open("b1", "b2")
        assert [await crowd.status(name) for name in crowd.answers] == [200] * 4


async def test_classes(start_gateway: Start) -> None:
    """The model's class, or the client's own word where the operator asks for it: the higher one is served first."""
    async with engine("m", "batch") as (backend, doors):
        config = {
            "health": SLOW,
            "models": {"batch": {"priority": "low"}},
            "limits": {"in_flight": 1, "priority": {"header": "x-priority"}},
        }
        gateway = await start_gateway(config=config, backends=[backend.url])
        crowd = Crowd(gateway)
        await crowd.send("first")
        await doors.until("first")
        await crowd.send("low", "batch", queued=1)
        await crowd.send("normal", queued=2)
        await crowd.send("asked", "batch", ("X-Priority", "high"), queued=3)
        doors.open("first", "low", "normal", "asked")
        assert [await crowd.status(name) for name in crowd.answers] == [200] * 4
        assert doors.arrived == ["first", "asked", "normal", "low"]
        assert backend.requests[1].get("x-priority") == "high"


async def test_nobody_s_word_counts_unasked(start_gateway: Start) -> None:
    """Without `limits.priority.header`, a client that calls itself important waits its turn."""
    async with engine() as (backend, doors):
        gateway = await start_gateway(config={"health": SLOW, "limits": {"in_flight": 1}}, backends=[backend.url])
        crowd = Crowd(gateway)
        await crowd.send("first")
        await doors.until("first")
        await crowd.send("second", queued=1)
        await crowd.send("third", "m", ("X-Priority", "high"), ("Priority", "u=0"), queued=2)
        doors.open("first", "second", "third")
        assert [await crowd.status(name) for name in crowd.answers] == [200] * 3
        assert doors.arrived == ["first", "second", "third"]


async def head_only(gateway: Gateway, *fields: tuple[str, str]) -> RawClient:
    """A client that has sent the head of a large request, and no octet of its body."""
    client = await gateway.connect()
    await client.send(s.post(b"", fields=[("Content-Length", "5000000"), *fields], length=False))
    return client


async def test_shed_before_the_body(start_gateway: Start) -> None:
    """With the queue full, whoever has only sent a head is refused, and is not told to go on (Expect: 100-continue)."""
    async with engine() as (backend, doors):
        config = {"health": SLOW, "limits": {"in_flight": 1, "queue": 1}}
        gateway = await start_gateway(config=config, backends=[backend.url])
        crowd = Crowd(gateway)
        await crowd.send("first")
        await doors.until("first")
        await crowd.send("second", queued=1)
        assert refused(await gateway.ask(chat("third")), "queue_full") >= 1
        for fields in ((), (("Expect", "100-continue"),)):
            client = await head_only(gateway, *fields)
            answer = await client.read_response()
            assert refused(answer, "queue_full") >= 1
            assert answer.interim == []
            client.fin()
        await gateway.logged(3, code="queue_full")
        doors.open("first", "second")
        assert [await crowd.status(name) for name in crowd.answers] == [200] * 2
        await gateway.idle()


async def test_who_would_wait_too_long_is_told_at_once(start_gateway: Start) -> None:
    """Once turns have shown how slowly they come: 503 overloaded with Retry-After, in no time; those before it are served."""
    async with engine() as (backend, _):
        backend.script = paced(0.05)
        config = {"health": SLOW, "limits": {"in_flight": 1}, "timeouts": {"queue": 1.0}}
        gateway = await start_gateway(config=config, backends=[backend.url])
        known = await asyncio.gather(*(gateway.ask(chat(f"known-{n}")) for n in range(10)))
        assert {answer.status for answer in known} == {200}
        answers = await asyncio.gather(*(gateway.ask(chat(f"crowd-{n}")) for n in range(80)))
        shed = [answer for answer in answers if answer.get("x-gateway-error") == "overloaded"]
        assert len(shed) > 20
        assert sum(answer.status == 200 for answer in answers) > 2
        assert all(refused(answer, "overloaded") >= 1 for answer in shed)
        entries = await gateway.logged(len(shed), code="overloaded")
        assert {(entry["outcome"], entry["status"], entry["phase"]) for entry in entries} == {("refused", 503, "queue")}
        assert max(entry["duration_s"] for entry in entries) < 0.9  # long before it would have timed out
        await gateway.idle()


@pytest.mark.parametrize(
    "limits",
    [{"limits": {"in_flight": 1}}, {"models": {"m": {"in_flight": 1}}}, {}],
    ids=["of the gateway", "of the model", "of the backend"],
)
async def test_the_first_crowd_is_told_at_once_as_well(start_gateway: Start, limits: dict[str, Any]) -> None:
    """Nobody has had to wait before, but requests have been served: so long is a place held."""
    async with engine() as (backend, _):
        backend.script = paced(0.3)
        backends = [{"url": backend.url} | ({} if limits else {"max_in_flight": 1})]
        gateway = await start_gateway(config={"backends": backends, "health": SLOW, "timeouts": {"queue": 1.0}} | limits)
        for number in range(9):
            assert (await gateway.ask(chat(f"known-{number}"))).status == 200
        answers = await asyncio.gather(*(gateway.ask(chat(f"crowd-{n}")) for n in range(12)))
        assert sum(answer.get("x-gateway-error") == "overloaded" for answer in answers) >= 6
        assert sum(answer.status == 200 for answer in answers) >= 2
        entries = await gateway.logged(6, code="overloaded")
        assert max(entry["duration_s"] for entry in entries) < 0.9
        await gateway.idle()


def paced(seconds: float) -> s.Script:
    async def script(wire: Any, request: Message) -> None:
        await asyncio.sleep(seconds)
        await s.reply(200, b"{}")(wire, request)

    return script


async def test_leaving_the_line_of_a_model(start_gateway: Start) -> None:
    """A client that leaves makes room in the queue at once, and its turn passes to the next."""
    async with engine("a") as (backend, doors):
        config = {"health": SLOW, "models": {"a": {"in_flight": 1}}, "limits": {"queue": 2}}
        gateway = await start_gateway(config=config, backends=[backend.url])
        crowd = Crowd(gateway)
        await crowd.send("first", "a")
        await doors.until("first")
        leaving = await gateway.connect()
        await leaving.send(chat("leaving", "a"))
        await crowd.send("second", "a", queued=2)
        leaving.fin()
        await crowd.send("third", "a", queued=2)
        await gateway.logged(request_id="leaving", outcome="client_gone", phase="queue")
        doors.open("first", "second", "third")
        assert [await crowd.status(name) for name in crowd.answers] == [200] * 3
        assert doors.arrived == ["first", "second", "third"]


async def test_a_reload_changes_limits(start_gateway: Start) -> None:
    """A model's limit that is raised lets in who waits, and one that is taken away, everybody; what runs goes on."""
    async with engine("a") as (backend, doors):
        config: dict[str, Any] = {"health": SLOW, "models": {"a": {"in_flight": 1}}}
        gateway = await start_gateway(config=config, backends=[backend.url])
        crowd = Crowd(gateway)
        for number in range(4):
            await crowd.send(f"r{number}", "a", queued=number if number else None)
            await doors.until("r0")
        text = json.loads((gateway.config_path or gateway.folder).read_text())
        for models, arrived in (({"a": {"in_flight": 2}}, 2), ({}, 4)):
            (gateway.folder / "tokenpipe.yaml").write_text(json.dumps({**text, "models": models}))
            assert (await gateway.admin(s.post(b"", "/-/reload"))).status < 300
            await doors.until(*(f"r{number}" for number in range(arrived)))
            assert len(doors.arrived) == arrived
        doors.open(*crowd.answers)
        assert [await crowd.status(name) for name in crowd.answers] == [200] * 4
        await gateway.idle()


@pytest.mark.parametrize("doubt", ["ejected", "busy", "silent"])
async def test_who_is_only_full_is_waited_for(start_gateway: Start, doubt: str) -> None:
    """One is ejected, rests or is silent, and has room without end; the other one is well, and has room for one. All that come
    together wait for that one, and are served."""

    async def well(wire: HttpWire, request: Message) -> None:
        await asyncio.sleep(0.01)
        await s.reply()(wire, request)

    scripts = {"ejected": s.vanish, "busy": s.reply(429, b"{}", [("retry-after", "30")]), "silent": s.Held()}
    async with running(scripts[doubt]) as ill, running(well) as one:
        config = {
            "health": {**SLOW, "silence": 0.2},
            "balance": "round_robin",
            "breaker": {"failures": 2, "open": 60},
            "backends": [{"url": ill.url}, {"url": one.url, "max_in_flight": 1}],
        }
        gateway = await start_gateway(config=config)
        hanging = [await gateway.connect() for _ in range(2 if doubt == "silent" else 0)]
        for client in hanging:
            await client.send(s.post())
        for _ in range(0 if hanging else 4):
            await gateway.ask()

        async def state() -> str:
            found = (await gateway.admin(s.get("/-/backends"))).json()
            return str(found[0]["state"])

        async with asyncio.timeout(10):
            while await state() != doubt:
                await asyncio.sleep(0.02)
        before = len(ill.requests)
        answers = await asyncio.gather(*(gateway.ask() for _ in range(20)))
        assert [answer.status for answer in answers] == [200] * 20
        assert len(ill.requests) == before
        for client in hanging:
            client.reset()


async def test_room_that_comes_with_time(start_gateway: Start) -> None:
    """Those who wait for a full one are served by another whose rest is over, though nothing ends meanwhile."""
    held = s.Held(s.SSE_HEAD)
    async with running(s.in_turn(s.reply(429, b"{}", [("retry-after", "1")]), s.reply())) as rests, running(held) as full:
        backends = [{"url": rests.url, "weight": 100}, {"url": full.url, "max_in_flight": 1}]
        gateway = await start_gateway(config={"health": SLOW, "balance": "round_robin", "backends": backends})
        client = await gateway.connect()
        await client.send(s.post())
        await held.wire()  # turned away by the first one
        assert (await gateway.ask()).status == 200
        assert len(rests.requests) == 2
        client.reset()
