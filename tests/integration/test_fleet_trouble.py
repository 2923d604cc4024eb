"""A fleet in trouble: what one thing that goes wrong does to another, and that all of it is over when its cause is."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from tests.integration.test_fleet import SLOW, fleet, reached, states, urls
from tests.support import script as s
from tests.support.gateway import Gateway, no_descriptor_left
from tests.support.upstream import RawUpstream, listening_socket
from tests.support.wire import Closed

Start = Callable[..., Awaitable[Gateway]]
OUTPUT = (s.delta("a"), *s.FINISHED)
WHOLE = b"".join(OUTPUT)


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
        await reached(gateway, 1, breaker="closed")
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


class Load:
    """Requests one after the other, of several clients, until it is told to stop. `unheard`: a connection may be closed before
    anybody has read what came on it, as the event loop does with what it cannot accept."""

    def __init__(self, gateway: Gateway, clients: int = 6, *, unheard: bool = False):
        self.gateway, self.clients, self._unheard = gateway, clients, unheard
        self.statuses: list[int] = []

    async def _client(self, end: asyncio.Event) -> None:
        while not end.is_set():
            try:
                answer = await self.gateway.ask(timeout=20)
            except (Closed, ConnectionError) as closed:
                if not self._unheard or (isinstance(closed, Closed) and closed.args[0]):
                    raise
                await asyncio.sleep(0.05)
                continue
            self.statuses.append(answer.status if answer.complete else 0)
            await asyncio.sleep(0.01)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[list[int]]:
        end = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            for _ in range(self.clients):
                group.create_task(self._client(end))
            try:
                yield self.statuses
            finally:
                end.set()

    async def more(self, count: int) -> list[int]:
        """What the next so many come to."""
        before = len(self.statuses)
        async with asyncio.timeout(20):
            while len(self.statuses) < before + count:
                await asyncio.sleep(0.01)
        return self.statuses[before:]


async def counted(gateway: Gateway, load: Load) -> None:
    await at_rest(gateway)
    assert await gateway.metric("tokenpipe_requests_total") == len(load.statuses)
    assert await gateway.metric("tokenpipe_queue_depth") == 0


@pytest.mark.seconds(60)
async def test_descriptors_run_out_under_load(start_gateway: Start) -> None:
    """No backend is blamed for it, also where names must be looked up; and when there are some again, all is as before."""
    async with fleet(2, s.stream(*OUTPUT)) as backends:
        named = [backend.url.replace("127.0.0.1", "localhost") for backend in backends]
        config = {"pool": {"idle": 0.01}, "health": {"interval": 0.2, "slow_start": 0}, "breaker": {"failures": 2, "open": 60}}
        gateway = await start_gateway(config=config, backends=named)
        load = Load(gateway, unheard=True)
        async with load.running():
            assert set(await load.more(20)) == {200}
            with no_descriptor_left(gateway, spare=2):
                await asyncio.sleep(2)
            await load.more(20)
            assert set(await load.more(20)) == {200}
        assert set(load.statuses) <= {200, 503}, load.statuses
        await counted(gateway, load)
        assert {b["breaker"] for b in await states(gateway)} == {"closed"}
        assert await gateway.metric("tokenpipe_backend_failures_total") == 0


async def test_a_name_that_cannot_be_looked_up_for_lack_of_descriptors(start_gateway: Start) -> None:
    """That is no backend's fault, however often it is tried: what is known of the name still holds."""
    async with fleet(2, s.stream(*OUTPUT)) as backends:
        named = [backend.url.replace("127.0.0.1", "localhost") for backend in backends]
        config = {"pool": {"idle": 0.01}, "health": SLOW, "breaker": {"failures": 1, "open": 60}}
        gateway = await start_gateway(config=config, backends=named)
        clients = [await gateway.connect() for _ in range(6)]
        for client in clients:
            assert (await client.ask()).status == 200
        await asyncio.sleep(0.2)  # kept connections are closed
        with no_descriptor_left(gateway):
            answers = [await client.ask() for client in clients]
        assert {answer.get("x-gateway-error") for answer in answers} == {"overloaded"}
        for client in clients:
            client.fin()
        assert {b["breaker"] for b in await states(gateway)} == {"closed"}
        assert (await gateway.ask()).status == 200
        await at_rest(gateway)


class Wire:
    """A bad line to a backend: each connection passes, is lost in silence, reset, or comes in single octets."""

    def __init__(self, port: int) -> None:
        self.target, self.manner = port, "pass"
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Wire:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            with contextlib.suppress(OSError):
                theirs, ours = await asyncio.open_connection("127.0.0.1", self.target)
                try:
                    async with asyncio.TaskGroup() as group:
                        group.create_task(self._pass(reader, ours))
                        group.create_task(self._pass(theirs, writer))
                except* OSError:
                    pass
                finally:
                    ours.transport.abort()
        finally:
            writer.transport.abort()
            self._tasks.discard(task)

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            if self.manner == "reset":
                raise ConnectionResetError
            if self.manner == "lost":
                continue
            if self.manner == "slow":
                for at in range(0, len(data), 40):
                    writer.write(data[at : at + 40])
                    await asyncio.sleep(0.002)
            else:
                writer.write(data)
            await writer.drain()
        raise ConnectionResetError  # whoever ends, ends both


@pytest.mark.seconds(60)
async def test_a_bad_line(start_gateway: Start) -> None:
    """It comes and goes in every manner: nobody is hurt but who was on it, and it is used again when it is well."""
    async with fleet(2, s.stream(*OUTPUT)) as backends, Wire(backends[0].port) as line:
        config = {
            "commit": "first_event", "timeouts": {"first_byte": 0.5, "connect": 0.5, "idle": 0.5},
            "health": {"interval": 0.2, "timeout": 0.4, "fail": 2, "slow_start": 0.5, "silence": 0.3},
            "breaker": {"failures": 3, "open": 0.5},
        }  # fmt: skip
        gateway = await start_gateway(config=config, backends=[line.url, backends[1].url])
        load = Load(gateway)
        async with load.running():
            for manner in ("lost", "slow", "reset"):
                line.manner = manner
                await asyncio.sleep(1)
                if manner == "lost":
                    assert set(await load.more(20)) == {200}
                line.manner = "pass"
                await load.more(5)
                before = len(backends[0].requests)
                async with asyncio.timeout(15):
                    while len(backends[0].requests) < before + 10:
                        await asyncio.sleep(0.02)
        assert sum(status != 200 for status in load.statuses) <= 5 * load.clients, load.statuses
        await counted(gateway, load)


@pytest.mark.seconds(60)
async def test_one_after_the_other_is_started_anew(start_gateway: Start) -> None:
    """A rolling restart of two, with the usual slow start: whoever is left takes all of it, warm or not, and nobody sees it."""
    async with fleet(2, s.stream(*OUTPUT)) as backends:
        config = {"health": {"interval": 0.2, "timeout": 1, "fail": 2}, "breaker": {"open": 1}}
        gateway = await start_gateway(config=config, backends=urls(backends))
        await reached(gateway, 2, state="up")
        load = Load(gateway)
        async with load.running():
            assert set(await load.more(20)) == {200}
            for backend in (*backends, *backends):
                name = f"127.0.0.1:{backend.port}"
                assert (await gateway.admin(s.post(b"", f"/-/backends/{name}/drain"))).status < 300
                async with asyncio.timeout(10):
                    while await gateway.metric("tokenpipe_backend_in_flight", backend=name):
                        await asyncio.sleep(0.01)
                backend.close_listener()
                assert set(await load.more(20)) == {200}
                await backend.start(listening_socket(port=backend.port))
                assert (await gateway.admin(s.post(b"", f"/-/backends/{name}/undrain"))).status == 200
                await load.more(10)
        assert set(load.statuses) == {200}
        await counted(gateway, load)


@pytest.mark.parametrize("balance", ["least_loaded", "round_robin", "power_of_two"])
async def test_an_alias_is_spread_as_evenly(start_gateway: Start, balance: str) -> None:
    """400 one after the other, by an alias of two models that the same four serve: 25 % each, within 5 points."""
    async with fleet(4) as backends:
        models = {"x": {"route_to": [{"model": "m", "weight": 3}, {"model": "n", "weight": 1}]}}
        for backend in backends:
            backend.probes["/v1/models"] = s.reply(200, b'{"data":[{"id":"m"},{"id":"n"}]}')
        gateway = await start_gateway(config={"balance": balance, "models": models, "health": SLOW}, backends=urls(backends))
        client = await gateway.connect()
        for _ in range(400):
            assert (await client.ask(s.post({"model": "x", "messages": []}))).status == 200
        client.fin()
        assert all(80 <= len(backend.requests) <= 120 for backend in backends), [len(b.requests) for b in backends]


@pytest.mark.seconds(90)
async def test_many_backends_and_models(start_gateway: Start) -> None:
    """64 and 16: each model where it is served, one list, the nearest name; and what becomes of those who wait for a model
    that vanishes."""
    backends = [RawUpstream(models=(f"model-{number % 16:02}",)) for number in range(64)]
    for backend in backends:
        await backend.start()
    try:
        limits = {"models": {"model-03": {"in_flight": 1}}, "health": SLOW}
        gateway = await start_gateway(config=limits, backends=urls(backends))
        names = [f"model-{number:02}" for number in range(16)]
        async with asyncio.timeout(20):
            while sorted(card["id"] for card in (await gateway.ask(s.get("/v1/models"))).json()["data"]) != names:
                await asyncio.sleep(0.1)
        client = await gateway.connect()
        for name in names * 8:
            assert (await client.ask(s.post({"model": name, "messages": []}))).status == 200
        client.fin()
        assert [len(backend.requests) for backend in backends] == [2] * 64
        answer = await gateway.ask(s.post({"model": "model-3", "messages": []}))
        assert (answer.status, b"model-03" in answer.body) == (404, True)

        serving = backends[3::16]
        go_on = asyncio.Event()

        async def held(wire: Any, request: Any) -> None:
            await go_on.wait()
            await s.reply()(wire, request)

        for backend in serving:
            backend.script = held
        asking = s.post({"model": "model-03", "messages": []})
        waiting = [asyncio.create_task(gateway.ask(asking, timeout=20)) for _ in range(8)]
        async with asyncio.timeout(10):
            while await gateway.metric("tokenpipe_queue_depth") != 7:
                await asyncio.sleep(0.02)
        for backend in serving:
            assert (await gateway.admin(s.get(f"/-/backends/127.0.0.1:{backend.port}", method="DELETE"))).status < 300
        answer = await gateway.ask(s.post({"model": "model-04", "messages": []}))
        assert answer.status == 200
        go_on.set()
        answers = await asyncio.gather(*waiting)
        assert sorted(answer.status for answer in answers) == [200] + [503] * 7
        refused = [answer for answer in answers if answer.status == 503]
        assert {answer.get("x-gateway-error") for answer in refused} == {"no_backend"}
        assert all(b"model-03" in answer.body for answer in refused)
        await at_rest(gateway)
    finally:
        for backend in backends:
            await backend.stop()


@pytest.mark.seconds(30)
async def test_the_gateway_is_stopped_for_longer_than_its_deadlines(start_gateway: Start) -> None:
    """SIGSTOP, a machine that is paused, no processor to be had: engines that went on meanwhile are not told to be late."""
    go_on = asyncio.Event()

    async def late(wire: Any, request: Any) -> None:
        await go_on.wait()
        await s.stream(*OUTPUT)(wire, request)

    async def half(wire: Any, request: Any) -> None:
        await wire.send(s.SSE_HEAD + s.chunk(s.delta("b")))
        await go_on.wait()
        await wire.send(b"".join(map(s.chunk, OUTPUT)) + s.LAST)

    async def probed(wire: Any, request: Any) -> None:
        asked.add(wire)
        await go_on.wait()
        await s.reply()(wire, request)

    asked: set[Any] = set()
    async with fleet(2) as backends:
        backends[0].script, backends[1].script = late, half
        config = {
            "timeouts": {"first_byte": 2, "idle": 2}, "breaker": {"failures": 1, "open": 60}, "balance": "round_robin",
            "health": {"interval": 0.1, "timeout": 2, "fail": 1},
        }  # fmt: skip
        gateway = await start_gateway(config=config, backends=urls(backends))
        clients = [await gateway.connect() for _ in backends]
        for client in clients:
            await client.send(s.post())
        for backend in backends:
            backend.probes["/health"] = probed
        async with asyncio.timeout(10):
            while len(asked) < 2 or not all(backend.requests for backend in backends):
                await asyncio.sleep(0.01)
        gateway.signal(signal.SIGSTOP)
        try:
            go_on.set()
            await asyncio.sleep(2.5)
        finally:
            gateway.signal(signal.SIGCONT)
        answers = [await client.read_response() for client in clients]
        for client in clients:
            client.fin()
        assert sorted(answer.body for answer in answers) == [WHOLE, s.delta("b") + WHOLE]
        await at_rest(gateway)
        assert await gateway.metric("tokenpipe_backend_failures_total") == 0
        assert not any("is down" in line for line in gateway.lines())
