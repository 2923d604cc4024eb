"""Who takes a request, over real sockets: kept together where asked for, by what engines say, and away from those that fail."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tests.integration.test_fleet import SLOW, fleet, reached, served, states, urls
from tests.support import script as s
from tests.support.gateway import Gateway, until
from tests.support.upstream import RawUpstream

Start = Callable[..., Awaitable[Gateway]]
PASS = {"kv_transfer_params": "pass", "ec_transfer_params": "pass", "bootstrap_room": "pass"}
AFFINITY = {"balance": "affinity", "health": SLOW}
TEXT = [("content-type", "text/plain; version=1.0.0; charset=utf-8")]


def chat(*said: str, session: str = "", user: str = "") -> bytes:
    """A conversation so far: what the user said, with an answer to all but the last."""
    messages = [{"role": "system", "content": "You are of use. " * 100}]
    for words in said:
        messages += [{"role": "user", "content": words}, {"role": "assistant", "content": f"You said: {words}"}]
    body: dict[str, Any] = {"model": "m", "messages": messages[:-1]} | ({"user": user} if user else {})
    return s.post(body, fields=[("X-Session-Id", session)] if session else [])


async def takers(gateway: Gateway, backends: list[RawUpstream], *requests: bytes) -> list[int]:
    """Which backend took each of these, one after the other."""
    found = []
    for request in requests:
        before = served(backends)
        assert (await gateway.ask(request)).status == 200
        (taker,) = [place for place, count in enumerate(served(backends)) if count > before[place]]
        found.append(taker)
    return found


def engine(running: int, waiting: int = 0) -> s.Script:
    """A page of metrics, as vLLM has them."""
    text = f'vllm:num_requests_running{{engine="0"}} {running}.0\nvllm:num_requests_waiting{{engine="0"}} {waiting}.0\n'
    return s.reply(200, text.encode(), TEXT)


@pytest.mark.parametrize(
    "make",
    [
        lambda name, words: chat(*words, session=name),
        lambda name, words: chat(*words, user=name),
        lambda name, words: chat(f"I am {name}", *words),
    ],
    ids=["header", "user", "prefix"],
)
async def test_conversations_stay_together(start_gateway: Start, make: Callable[[str, list[str]], bytes]) -> None:
    """All turns of one go to one backend, and sixteen of them to several."""
    async with fleet(4) as backends:
        gateway = await start_gateway(config=AFFINITY, backends=urls(backends))
        homes = []
        for number in range(16):
            turns = [make(f"client-{number}", [str(turn) for turn in range(1, last + 1)]) for last in range(1, 5)]
            (home,) = set(await takers(gateway, backends, *turns))
            homes.append(home)
        assert len(set(homes)) >= 3


async def test_requests_without_a_key_are_spread(start_gateway: Start) -> None:
    """Affinity by a header that they do not have, and bodies in which nothing is looked for."""
    config = {**AFFINITY, "affinity": {"by": ["header"], "header": "X-Chat"}}
    async with fleet(4) as backends:
        gateway = await start_gateway(config=config, backends=urls(backends))
        await takers(gateway, backends, *(chat("hi", session="s") for _ in range(20)))
        assert served(backends) == [5] * 4
        request = s.post(fields=[("x-CHAT", "one")])
        assert len(set(await takers(gateway, backends, *[request] * 4))) == 1


async def test_a_body_that_comes_in_pieces(start_gateway: Start) -> None:
    """Where nothing else looks into bodies, one is held as far as the key needs it: its turns stay together."""
    async with fleet(4) as backends:
        gateway = await start_gateway(config={**AFFINITY, "fields": PASS}, backends=urls(backends))
        (home,) = await takers(gateway, backends, chat("one"))
        long = chat("one", "x" * 300_000, "two")
        before = served(backends)
        client = await gateway.connect()
        await client.send_pieces(*(long[i : i + 60_000] for i in range(0, len(long), 60_000)), gap=0.01)
        assert (await client.read_response()).status == 200
        client.fin()
        assert [count - old for count, old in zip(served(backends), before, strict=True)].index(1) == home
        assert backends[home].requests[-1].body == long.partition(b"\r\n\r\n")[2]


@pytest.mark.parametrize("session", ["", "s"])
async def test_a_body_that_need_not_be_held_streams_on(start_gateway: Start, session: str) -> None:
    """Too large to be held, or with its key in the head: its first octets are at the backend before its last were sent."""
    words = "x" * (200_000 if session else 3_000_000)
    content = json.dumps({"model": "m", "messages": [{"role": "user", "content": words}]}).encode()
    fields = [("X-Session-Id", session)] if session else []
    async with fleet(2) as backends:
        gateway = await start_gateway(config={**AFFINITY, "fields": PASS}, backends=urls(backends))
        client = await gateway.connect()
        request = s.post(content, fields=fields)
        await client.send(request[:-1000])

        def arrived() -> int:
            return max((len(wire.received) for backend in backends for wire in backend.connections), default=0)

        await until(lambda: arrived() > len(content) // 2, "the beginning of the body")
        await client.send(request[-1000:])
        assert (await client.read_response()).status == 200
        client.fin()


async def test_a_session_whose_backend_is_gone(start_gateway: Start) -> None:
    """It goes on elsewhere, always at the same place, and comes home; other sessions do not move."""
    async with fleet(4) as backends:
        quick = {"interval": 0.1, "timeout": 0.3, "fail": 1, "pass": 1, "slow_start": 0}
        config = {"balance": "affinity", "health": quick}
        gateway = await start_gateway(config=config, backends=urls(backends))
        requests = [chat("hi", session=f"s-{number}") for number in range(12)]
        homes = await takers(gateway, backends, *requests)
        gone = homes[0]
        backends[gone].probes["/health"] = s.reply(503, b"")
        await _state(gateway, gone, "down")
        during = await takers(gateway, backends, *requests)
        assert all(new == old for old, new in zip(homes, during, strict=True) if old != gone)
        assert gone not in during
        assert during == await takers(gateway, backends, *requests)
        backends[gone].probes["/health"] = s.reply(200, b"")
        await _state(gateway, gone, "up")
        assert homes == await takers(gateway, backends, *requests)


async def test_a_session_that_is_too_much_for_one_backend(start_gateway: Start) -> None:
    """Forty streams of one session: its backend has its share and a quarter, and no other one more."""
    held = s.Held(s.SSE_HEAD)
    async with fleet(4, held) as backends:
        gateway = await start_gateway(config=AFFINITY, backends=urls(backends))
        clients = [await gateway.connect() for _ in range(40)]
        for client in clients:
            await client.send(chat("hi", session="hot"))
        await held.wire(39)
        assert max(served(backends)) == 12
        for client in clients:
            client.reset()


async def test_what_engines_say_counts(start_gateway: Start) -> None:
    """An engine that has much from elsewhere gets little from here, until its figures change; the admin page has them."""
    async with fleet(2) as backends:
        backends[0].probes["/metrics"], backends[1].probes["/metrics"] = engine(30, 5), engine(0)
        gateway = await start_gateway(config={"health": SLOW}, backends=urls(backends))
        async with asyncio.timeout(5):
            while None in (said := [b["engine"] for b in await states(gateway)]):
                await asyncio.sleep(0.02)
        assert said[0] == {"running": 30.0, "waiting": 5.0, "kv_usage": 0.0}
        assert set(await takers(gateway, backends, *[s.post()] * 20)) == {1}
        backends[0].probes["/metrics"] = s.reply(404, b"{}")
        async with asyncio.timeout(5):
            while (await states(gateway))[0]["engine"] is not None:
                await asyncio.sleep(0.02)
        assert Counter(await takers(gateway, backends, *[s.post()] * 20)) == {0: 10, 1: 10}


@pytest.mark.parametrize(("balance", "count"), [("round_robin", 3), ("least_loaded", 1)])
async def test_engines_are_not_asked_in_vain(start_gateway: Start, balance: str, count: int) -> None:
    """In turn, or with one backend only, nothing depends on it."""
    async with fleet(count) as backends:
        gateway = await start_gateway(config={"balance": balance, "health": SLOW}, backends=urls(backends))
        await takers(gateway, backends, *[s.post()] * 3)
        await until(lambda: all("/v1/models" in b.probed for b in backends), "a look at the models")
        await asyncio.sleep(1.5)  # a look each second is what the balancing would take
        assert all(b.probed.count("/metrics") <= 1 for b in backends)  # once, whether it is a vLLM that may sleep


@pytest.mark.parametrize("status", [429, 500])
async def test_quick_refusals_draw_no_load(start_gateway: Start, status: int) -> None:
    """A backend that refuses at once has nothing in flight; yet of many requests it gets few."""
    async with fleet(2) as backends:
        held = s.Held(s.SSE_HEAD)
        backends[0].script, backends[1].script = s.reply(status, b"{}"), held
        gateway = await start_gateway(config={"health": SLOW}, backends=urls(backends))
        clients = [await gateway.connect() for _ in range(40)]
        for number, client in enumerate(clients):
            await client.send(s.post(fields=[("X-Request-Id", f"q-{number}")]))
            await until(lambda n=number: sum(served(backends)) > n, "the request's arrival")  # type: ignore[misc]
            await asyncio.sleep(0.002)
        assert 1 <= served(backends)[0] <= 12
        assert [b["breaker"] for b in await states(gateway)] == ["closed", "closed"]
        for client in clients:
            client.reset()


@pytest.mark.parametrize("weight", [1, 2])
@pytest.mark.parametrize("how", ["503", "reset", "refused"])
async def test_who_is_not_asked_has_had_no_turn(start_gateway: Start, how: str, weight: int) -> None:
    """In turn, and one fails in a way after which nobody else may be asked: the others have their turns all the same."""
    async with fleet(2) as backends:
        listed = [{"url": backends[0].url}, {"url": backends[1].url, "weight": weight}]
        config = {"balance": "round_robin", "health": SLOW, "breaker": {"failures": 100}, "backends": listed}
        gateway = await start_gateway(config=config | ({"retry": {"attempts": 1}} if how == "refused" else {}))
        await reached(gateway, 2, health="up")
        backends[0].script = s.vanish if how == "reset" else s.reply(503, b"{}")
        if how == "refused":
            backends[0].close_listener()
        statuses = Counter([(await gateway.ask()).status for _ in range(12)])
        assert statuses == {503 if how == "503" else 502: 12 // (1 + weight), 200: 12 * weight // (1 + weight)}


async def test_a_reload_changes_the_policy(start_gateway: Start) -> None:
    """From counting to affinity and back, with what is known of the backends kept."""
    async with fleet(3) as backends:
        gateway = await start_gateway(config={"health": SLOW}, backends=urls(backends))
        requests = [chat("hi", session="s")] * 6
        assert Counter(await takers(gateway, backends, *requests)) == {0: 2, 1: 2, 2: 2}
        assert gateway.config_path
        before = gateway.config_path.read_text()
        gateway.config_path.write_text(json.dumps({**json.loads(before), "balance": "affinity"}))
        assert (await gateway.admin(s.get("/-/reload", method="POST"))).status == 200
        assert len(set(await takers(gateway, backends, *requests))) == 1
        gateway.config_path.write_text(before)
        assert (await gateway.admin(s.get("/-/reload", method="POST"))).status == 200
        assert Counter(await takers(gateway, backends, *requests)) == {0: 2, 1: 2, 2: 2}


async def _state(gateway: Gateway, place: int, state: str) -> None:
    async with asyncio.timeout(5):
        while (await states(gateway))[place]["state"] != state:
            await asyncio.sleep(0.02)
