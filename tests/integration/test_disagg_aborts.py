"""The client leaves, in each phase of a disaggregated exchange: no KV is left behind that is not counted (pd.md 6.4)."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from tests.support import script as s
from tests.support.gateway import Gateway, until
from tests.support.messages import HttpWire, Message
from tests.support.pairs import OUTPUT, at_rest, config, decode, engines, fetched, prefill
from tests.support.tls import Certificates
from tests.support.upstream import RawUpstream

Start = Callable[..., Awaitable[Gateway]]
WHOLE = {**s.CHAT, "stream": False}


async def leave(gateway: Gateway, body: dict[str, Any], when: Callable[[], Awaitable[object]]) -> None:
    client = await gateway.connect()
    await client.send(s.post(body))
    await when()
    client.reset()


async def test_during_prefill(start_gateway: Start) -> None:
    """Prefill's connection is closed at once; nothing goes to decode."""
    async with engines() as ((p,), (d,), ledger):
        p.script = held = s.Held()
        gateway = await start_gateway(config=config([p], [d]))
        await leave(gateway, s.CHAT, held.wire)
        await (await held.wire()).wait_closed(timeout=2)
        await at_rest(gateway, ledger, p, d)
        assert not d.requests
        samples = await gateway.metrics()
        assert samples.value("tokenpipe_pd_aborts_total", phase="prefill") == 1
        assert samples.value("tokenpipe_client_aborts_total", phase="prefill") == 1


@pytest.mark.parametrize("phase", ["prefill", "stream"])
async def test_31_35_at_once(start_gateway: Start, phase: str) -> None:
    """Within 100 ms the engine is told, which says nothing meanwhile, and the load is given back; of five tries the best, as
    the machine may have other things to do."""
    async with engines() as ((p,), (d,), ledger):
        held = s.Held() if phase == "prefill" else s.Held(s.SSE_HEAD, s.chunk(OUTPUT[0]))
        if phase == "prefill":
            p.script = held
        else:
            d.script = decode(ledger, held)
        gateway = await start_gateway(config=config([p], [d]))
        times = []
        for number in range(5):
            client = await gateway.connect()
            await client.send(s.post())
            engine = p if phase == "prefill" else d
            await engine.wait_requests(number + 1)
            if phase == "stream":
                await client.receive_until(OUTPUT[0])
            began = time.monotonic()
            client.reset()
            await engine.wires[-1].wait_closed(timeout=5)
            while await gateway.metric("tokenpipe_backend_in_flight"):
                pass
            times.append(time.monotonic() - began)
        assert min(times) < 0.1, times
        await at_rest(gateway, ledger, p, d)
        assert await gateway.metric("tokenpipe_pd_aborts_total", phase=phase) == 5
        assert len(d.requests) == (0 if phase == "prefill" else 5)


@pytest.mark.parametrize("grace", [0, 20])
@pytest.mark.parametrize("piecemeal", [False, True])
async def test_as_prefill_answers(start_gateway: Start, piecemeal: bool, grace: float) -> None:
    """32: the answer is on its way when prefill is told to stop, or comes within the grace: it is heard, and KV is freed."""
    async with engines() as ((p,), (d,), ledger):
        seen, gone = asyncio.Event(), asyncio.Event()

        async def crosses(wire: HttpWire, request: Message) -> None:
            answer = json.dumps({"id": "1", "kv_transfer_params": ledger.hold(request.get("x-request-id") or "")}).encode()
            whole = s.head(200, [s.JSON_TYPE, ("content-length", str(len(answer)))]) + answer
            first = len(whole) - 9 if piecemeal else 0
            await wire.send(whole[:first])
            seen.set()
            await gone.wait()
            if not grace:
                await wire.wait_closed(timeout=2)  # told to stop, at once
            assert bool(wire.ended) == (not grace)
            await wire.send(whole[first:])

        p.script = crosses
        gateway = await start_gateway(config=config([p], [d], disaggregation={"prefill_grace": grace}))
        await leave(gateway, s.CHAT, seen.wait)
        await gateway.logged(outcome="client_gone")
        gone.set()
        await d.wait_requests()
        await at_rest(gateway, ledger, p, d)
        assert not ledger.held and d.requests[0].json()["max_tokens"] == 1
        samples = await gateway.metrics()
        assert samples.value("tokenpipe_pd_aborts_total", phase="prefill") == 1
        assert samples.value("tokenpipe_pd_release_total", result="done") == 1
        assert samples.value("tokenpipe_client_aborts_total", phase="prefill") == 1


async def test_a_prefill_that_takes_longer_than_its_grace(start_gateway: Start) -> None:
    async with engines() as ((p,), (d,), ledger):
        p.script = held = s.Held()
        gateway = await start_gateway(config=config([p], [d], disaggregation={"prefill_grace": 0.3}))
        await leave(gateway, s.CHAT, held.wire)
        await (await held.wire()).wait_closed(timeout=3)
        await at_rest(gateway, ledger, p, d)
        assert not d.requests


@pytest.mark.parametrize("body", [s.CHAT, WHOLE])
async def test_between_head_and_first_octet(start_gateway: Start, body: dict[str, Any]) -> None:
    """Decode's leg goes on until it has fetched, and is closed then."""
    async with engines() as ((p,), (d,), ledger):
        go_on = asyncio.Event()

        async def slow(wire: HttpWire, request: Message) -> None:
            await wire.send(s.SSE_HEAD)
            await go_on.wait()
            assert wire.ended is None
            ledger.fetch(request)
            await wire.send(s.chunk(OUTPUT[0]))
            await wire.wait_closed(timeout=5)

        d.script = slow
        gateway = await start_gateway(config=config([p], [d]))
        await leave(gateway, body, d.wait_requests)
        await until(lambda: gateway.access_log(outcome="client_gone"), "the end of the exchange")
        assert await gateway.metric("tokenpipe_pd_release_inflight") == 1
        assert ledger.held
        go_on.set()
        await at_rest(gateway, ledger, p, d)
        assert not ledger.held and len(d.requests) == 1
        samples = await gateway.metrics()
        assert samples.value("tokenpipe_pd_aborts_total", phase="wait") == 1
        assert samples.value("tokenpipe_pd_release_total", result="detached") == 1
        assert samples.value("tokenpipe_pd_stranded_total") == 0


async def test_no_longer_than_the_grace(start_gateway: Start) -> None:
    """An answer in one piece begins at its end: decode has fetched long before, and is cut."""
    async with engines() as ((p,), (d,), ledger):
        held = s.Held()

        async def never(wire: HttpWire, request: Message) -> None:
            ledger.fetch(request)
            await held(wire, request)

        d.script = never
        gateway = await start_gateway(config=config([p], [d], disaggregation={"admission_grace": 0.3}))
        await leave(gateway, WHOLE, d.wait_requests)
        await (await held.wire()).wait_closed(timeout=3)
        await at_rest(gateway, ledger, p, d)
        assert await gateway.metric("tokenpipe_pd_stranded_total") == 0


@pytest.mark.parametrize("body", [s.CHAT, WHOLE])
async def test_34_engines_that_do_not_survive_an_abort(start_gateway: Start, body: dict[str, Any]) -> None:
    """No grace ends a leg on these before its first octet."""
    async with engines() as ((p,), (d,), ledger):
        go_on = asyncio.Event()

        async def slow(wire: HttpWire, request: Message) -> None:
            await go_on.wait()
            assert wire.ended is None
            await decode(ledger)(wire, request)

        d.script = slow
        flags = {"abort_unsafe": True, "admission_grace": 0.1}
        gateway = await start_gateway(config=config([p], [d], disaggregation=flags))
        await leave(gateway, body, d.wait_requests)
        await gateway.logged(outcome="client_gone")
        await asyncio.sleep(0.5)
        assert not d.wires[0].ended and await gateway.metric("tokenpipe_pd_release_inflight") == 1
        go_on.set()
        await at_rest(gateway, ledger, p, d)
        assert not ledger.held and len(d.requests) == 1
        samples = await gateway.metrics()
        assert samples.value("tokenpipe_pd_release_total", result="detached") == 1
        assert samples.value("tokenpipe_pd_stranded_total") == 0


async def test_34_after_a_probe(start_gateway: Start) -> None:
    """How the probe's answer began is not how decode's does, which has not come yet."""
    async with engines() as ((p,), (d,), _):
        gone, head = asyncio.Event(), s.Held(s.SSE_HEAD)
        missed = s.event({"choices": [{"index": 0, "delta": {}, "finish_reason": "cache_threshold"}]})

        async def probed(wire: HttpWire, request: Message) -> None:
            if request.json()["cache_hit_threshold"]:
                await s.stream(missed, s.DONE)(wire, request)
            else:
                await gone.wait()
                await head(wire, request)

        d.script = probed
        flags = {"connector": "shared_storage", "abort_unsafe": True}
        gateway = await start_gateway(config=config([p], [d], disaggregation=flags))
        await leave(gateway, s.CHAT, lambda: d.wait_requests(2))
        await gateway.logged(outcome="client_gone")
        gone.set()
        wire = await head.wire()
        await asyncio.sleep(0.3)
        assert not wire.ended and await gateway.metric("tokenpipe_pd_release_inflight") == 1
        await wire.send(s.chunk(OUTPUT[0]))
        await wire.wait_closed(timeout=2)
        assert await gateway.metric("tokenpipe_pd_release_total", result="detached") == 1


@pytest.mark.parametrize("how", ["hang", "reset"])
async def test_a_decode_that_never_fetches_is_counted(start_gateway: Start, how: str) -> None:
    async with engines() as ((p,), (d,), ledger):
        go_on = asyncio.Event()

        async def lost(wire: HttpWire, request: Message) -> None:
            await wire.send(s.SSE_HEAD)
            if how == "reset":
                await go_on.wait()
                wire.reset()
            else:
                await wire.wait_closed(timeout=5)

        d.script = lost
        text = config([p], [d], disaggregation={"release_timeout": 0.3 if how == "hang" else 30, "hold": 2})
        gateway = await start_gateway(config=text)
        await leave(gateway, s.CHAT, d.wait_requests)
        await until(lambda: gateway.access_log(outcome="client_gone"), "the end of the exchange")
        go_on.set()
        await at_rest(gateway, ledger, p, d)
        samples = await gateway.metrics()
        assert samples.value("tokenpipe_pd_stranded_total", connector="nixl") == 1
        assert samples.value("tokenpipe_pd_release_total", result="timeout" if how == "hang" else "lost") == 1


async def test_mid_stream(start_gateway: Start) -> None:
    """As any stream: decode is told at once."""
    async with engines() as ((p,), (d,), ledger):
        held = s.Held(s.SSE_HEAD, s.chunk(OUTPUT[0]))
        d.script = decode(ledger, held)
        gateway = await start_gateway(config=config([p], [d]))
        client = await gateway.connect()
        await client.send(s.post())
        assert (await client.read_response_head()).status == 200
        client.reset()
        await (await held.wire()).wait_closed(timeout=2)
        await at_rest(gateway, ledger, p, d)
        assert await gateway.metric("tokenpipe_pd_aborts_total", phase="stream") == 1


@contextlib.asynccontextmanager
async def shy(
    certificates: Certificates, p: RawUpstream, d: RawUpstream, **disaggregation: Any
) -> AsyncIterator[tuple[str, Callable[[], None]]]:
    """A configuration in which decode `d` speaks TLS, and shakes hands only when it is let: a hand-off lasts until then."""
    d.close_listener()
    await d.start(tls=certificates.server_context())
    loop, listener = asyncio.get_running_loop(), d._listener
    assert listener is not None
    loop.remove_reader(listener)
    listed = [{"url": p.url, "role": "prefill"}, {"url": d.url, "role": "decode", "tls": {"verify": False}}]
    place = "127.0.0.1:0"
    common = {"listen": place, "admin": {"listen": place}, "health": {"interval": 60}, "timeouts": {"connect": 20}}
    common |= {"backends": listed, "disaggregation": disaggregation}
    yield json.dumps(common), lambda: loop.add_reader(listener, d._accept)


@pytest.mark.parametrize("release", ["auto", "pressure"])
async def test_between_the_legs(start_gateway: Start, certificates: Certificates, release: str) -> None:
    """Prefill has answered, and decode takes no connection yet: decode is asked for one token in the client's stead; also
    where that is for engines that have little room: this one does not say."""
    async with engines() as ((p,), (d,), ledger), shy(certificates, p, d, release=release) as (text, go_on):
        gateway = await start_gateway(config=text, ready=False)
        await leave(gateway, s.CHAT, lambda: until_async(lambda: len(ledger.held) == 1))
        await gateway.logged(outcome="client_gone")
        assert await gateway.metric("tokenpipe_pd_release_inflight") == 1
        go_on()
        await at_rest(gateway, ledger, p, d)
        assert not ledger.held and ledger.unknown == 0
        (release,) = d.requests
        asked = release.json()
        assert (asked["max_tokens"], asked["max_completion_tokens"], asked["n"], asked["stream"]) == (1, 1, 1, False)
        assert asked["messages"] == s.CHAT["messages"]
        assert release.get("x-request-id") == p.requests[0].get("x-request-id")
        samples = await gateway.metrics()
        assert samples.value("tokenpipe_pd_aborts_total", phase="handoff") == 1
        assert samples.value("tokenpipe_pd_release_total", result="done") == 1


async def test_many_between_the_legs(start_gateway: Start, certificates: Certificates) -> None:
    """Four at once on one decode backend; the others are counted. New requests are served as ever."""
    async with engines() as ((p,), (d,), ledger), shy(certificates, p, d) as (text, go_on):
        gateway = await start_gateway(config=text, ready=False)
        clients = [await gateway.connect() for _ in range(300)]
        for client in clients:
            await client.send(s.post())
        await until(lambda: ledger.ever == 300, "300 prefills", 15)
        await asyncio.sleep(0.3)  # and that they have been read
        before = gateway.rss()
        for client in clients:
            client.reset()
        await gateway.logged(300, outcome="client_gone", timeout=10)
        go_on()
        await at_rest(gateway, ledger, p, d)
        samples = await gateway.metrics()
        assert samples.value("tokenpipe_pd_release_total", result="done") == 4
        assert samples.value("tokenpipe_pd_release_total", result="capped") == 296
        assert samples.value("tokenpipe_pd_stranded_total", connector="nixl") == len(ledger.held) == 296
        assert gateway.rss() - before < 20 << 20
        assert (await gateway.ask()).body == b"".join(OUTPUT)


async def until_async(condition: Callable[[], bool]) -> None:
    await until(condition, "the prefill's answer")
    await asyncio.sleep(0.1)  # and that it has been read


@pytest.mark.parametrize("stream", [True, False])
async def test_at_any_moment(start_gateway: Start, stream: bool) -> None:
    """Fifty clients leave at random moments of exchanges of some 60 ms; and new ones are served as ever."""
    chance = random.Random(7 + stream)
    async with engines(2, 2) as (ps, ds, ledger):
        for p in ps:
            p.script = prefill(ledger, seconds=0.02)
        for d in ds:
            d.script = decode(ledger, seconds=0.02)
        gateway = await start_gateway(config=config(ps, ds))

        async def one() -> None:
            seconds = chance.uniform(0, 0.08)
            await leave(gateway, {**s.CHAT, "stream": stream}, lambda: asyncio.sleep(seconds))

        for _ in range(10):
            await asyncio.gather(*(one() for _ in range(5)))
        await at_rest(gateway, ledger, *ps, *ds)
        assert (await gateway.ask()).body == b"".join(OUTPUT)
        await fetched(ledger, 1)
        assert await gateway.metric("tokenpipe_pd_stranded_total") == 0


async def test_many_at_once(start_gateway: Start) -> None:
    """300 clients leave while decode has said nothing: detached, each of them, and memory does not grow with them."""
    async with engines() as ((p,), (d,), ledger):
        go_on = asyncio.Event()

        async def slow(wire: HttpWire, request: Message) -> None:
            await wire.send(s.SSE_HEAD)
            await go_on.wait()
            ledger.fetch(request)
            await wire.send(s.chunk(OUTPUT[0]))
            await wire.wait_closed(timeout=10)

        d.script = slow
        gateway = await start_gateway(config=config([p], [d]))
        clients = [await gateway.connect() for _ in range(300)]
        for client in clients:
            await client.send(s.post())
        await d.wait_requests(300, timeout=15)
        before = gateway.rss()
        for client in clients:
            client.reset()
        await gateway.logged(300, outcome="client_gone", timeout=10)
        go_on.set()
        await at_rest(gateway, ledger, p, d)
        assert not ledger.held
        assert gateway.rss() - before < 20 << 20
        d.script = decode(ledger)
        assert (await gateway.ask()).status == 200


async def test_a_stop_waits_for_what_is_detached(start_gateway: Start) -> None:
    async with engines() as ((p,), (d,), ledger):
        go_on = asyncio.Event()

        async def slow(wire: HttpWire, request: Message) -> None:
            await wire.send(s.SSE_HEAD)
            await go_on.wait()
            ledger.fetch(request)
            await wire.send(s.chunk(OUTPUT[0]))
            await wire.wait_closed(timeout=5)

        d.script = slow
        gateway = await start_gateway(config=config([p], [d]))
        await leave(gateway, s.CHAT, d.wait_requests)
        await until(lambda: gateway.access_log(outcome="client_gone"), "the end of the exchange")
        gateway.signal(15)
        await asyncio.sleep(0.3)
        assert gateway.process.poll() is None
        go_on.set()
        await gateway.stopped()
        assert not ledger.held
