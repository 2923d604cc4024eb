"""The live feed over real sockets: who samples, for whom, and for how long."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from typing import Any

import pytest
from aiohttp import ClientResponse, web
from aiohttp.test_utils import TestClient

from gateway.control.dashboard_feed import BACKENDS_MOST, HISTORY, MODELS_MOST, Feed
from gateway.core.exchange import Exchange, Observer
from tests.support.gateway import until
from tests.telemetry.fakes import ended, stream

Client = TestClient[Any, Any]


class House:
    """What the feed asks of the gateway."""

    def __init__(self) -> None:
        self.observers: list[Observer | None] = []
        self.live: list[Exchange] = [stream()]
        self.looks = 0
        self.broken: Exception | None = None
        self.backend = {
            "name": "b1", "url": "http://b1", "state": "up", "in_flight": 1, "max_in_flight": None, "weight": 1,
            "connections": 2, "models": ["llama"],
        }  # fmt: skip
        self.members = [self.backend]

    def observe(self, observer: Observer | None) -> None:
        self.observers.append(observer)

    def exchanges(self) -> Iterable[Exchange]:
        self.looks += 1
        if self.broken is not None:
            raise self.broken
        return iter(self.live)

    def backends(self) -> list[dict[str, Any]]:
        return self.members

    def outcomes(self) -> Mapping[str, int]:
        return {"complete": 5}

    def status(self) -> dict[str, Any]:
        return {"version": "1", "uptime_s": 3, "queued": 0, "trouble": None}


Open = Callable[..., Awaitable[tuple[Feed, Client]]]


@pytest.fixture
def house() -> House:
    return House()


@pytest.fixture
async def start(house: House, aiohttp_client: Any) -> AsyncIterator[Open]:
    feeds: list[Feed] = []

    async def start(**options: Any) -> tuple[Feed, Client]:
        feed = Feed(house, **{"interval": 0.05, **options})
        feeds.append(feed)
        app = web.Application()
        app.router.add_get("/events", feed.serve, allow_head=False)
        app.on_shutdown.append(lambda _: feed.stop())
        return feed, await aiohttp_client(app)

    yield start
    for feed in feeds:
        await feed.stop()


async def samples(response: ClientResponse) -> AsyncIterator[dict[str, Any]]:
    while True:
        block = (await response.content.readuntil(b"\n\n")).decode()
        fields = dict(line.split(": ", 1) for line in block.strip().split("\n"))
        if "data" in fields:
            assert fields["event"] == "sample"
            yield json.loads(fields["data"])


def samplers() -> list[str]:
    return [task.get_name() for task in asyncio.all_tasks() if "samples" in task.get_name()]


async def test_a_viewer_gets_samples(start: Open, house: House) -> None:
    _, client = await start()
    async with client.get("/events") as response:
        assert response.headers["Content-Type"] == "text/event-stream"
        assert response.headers["Cache-Control"] == "no-store"
        feed = samples(response)
        first, second = await anext(feed), await anext(feed)
        house.observers[0].ended(ended(house.live.pop()))  # type: ignore[union-attr]
        third = await anext(feed)
        while third["in_flight"]:
            third = await anext(feed)
    assert [len(s["points"]) for s in (first, second)] == [1, 1]
    assert first["points"][0]["t"] <= second["points"][0]["t"]
    assert (first["in_flight"], first["phases"], first["outcomes"]) == (1, {"stream": 1}, {"complete": 5})
    assert [s["request_id"] for s in first["streams"]] == ["req-1"]
    assert (first["backends_total"], first["version"], first["trouble"]) == (1, "1", None)
    (backend,) = first["backends"]
    assert (backend["name"], backend["state"], backend["models"], backend["models_total"]) == ("b1", "up", ["llama"], 1)
    assert "url" not in backend
    assert third["streams"] == []


async def test_nobody_looks(start: Open, house: House) -> None:
    """No task, no observer, no look: before the first viewer, and after the last one."""
    _, client = await start()
    assert (house.observers, house.looks, samplers()) == ([], 0, [])
    for turn in (1, 2):
        async with client.get("/events") as response:
            await anext(samples(response))
            assert len(samplers()) == 1
            response.close()
        await until(lambda: not samplers(), "the end of sampling")
        assert house.observers[-1] is None
        assert len(house.observers) == 2 * turn
        looks = house.looks
        await asyncio.sleep(0.15)
        assert house.looks == looks


async def test_viewers_share_one_task(start: Open, house: House) -> None:
    _, client = await start()
    responses = [await client.get("/events") for _ in range(5)]
    feeds = [samples(response) for response in responses]
    taken = [[await anext(feed) for _ in range(3)] for feed in feeds]
    assert len(samplers()) == 1
    assert len(house.observers) == 1
    assert len({s["points"][-1]["t"] for some in taken for s in some}) <= house.looks
    for response in responses[1:]:
        response.close()
    await anext(feeds[0])
    await anext(feeds[0])
    assert house.observers[-1] is not None  # one still looks
    responses[0].close()
    await until(lambda: not samplers(), "the end of sampling")


async def test_a_later_viewer_gets_the_last_minutes_too(start: Open) -> None:
    """The points are kept, also while nobody looks; never more than so many."""
    feed, client = await start(interval=0.01)
    async with client.get("/events") as response:
        early = samples(response)
        for _ in range(5):
            await anext(early)
        response.close()
    await until(lambda: not samplers(), "the end of sampling")
    async with client.get("/events") as response:
        assert len((await anext(samples(response)))["points"]) >= 6
    assert feed._points.maxlen == HISTORY


async def test_no_more_viewers_than_there_may_be(start: Open) -> None:
    feed, client = await start(most=2)
    responses = [await client.get("/events") for _ in range(2)]
    assert feed.full
    responses[0].close()
    await until(lambda: not feed.full, "a place")
    responses[1].close()
    await until(lambda: not samplers(), "the end of sampling")


async def test_a_viewer_that_does_not_read_is_dropped(start: Open, house: House) -> None:
    """It holds up nobody, little is held for it, and its place is free soon."""
    house.live = [stream(request_id=f"{n:0100}") for n in range(200)]
    feed, client = await start(interval=0.01, send_timeout=0.5, most=2)
    address = client.server.host, client.server.port
    with socket.socket() as idle:
        idle.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        idle.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(idle, address)
        await loop.sock_sendall(idle, b"GET /events HTTP/1.1\r\nHost: x\r\n\r\n")
        async with client.get("/events") as response:
            beside = samples(response)
            await anext(beside)
            await until(lambda: feed._viewers == 2, "both")
            while feed._viewers == 2:
                await anext(beside)
            for _ in range(3):
                await anext(beside)
            response.close()
    await until(lambda: not samplers(), "the end of sampling")


async def test_a_slow_viewer_misses_samples_but_no_points(start: Open, house: House) -> None:
    feed, client = await start(interval=0.01)
    house.live = [stream(request_id=f"{n:0100}") for n in range(200)]
    async with client.get("/events") as response:
        await until(lambda: feed._taken > 150, "many samples")  # nobody reads meanwhile
        taken, numbers = 0, []
        async for sample in samples(response):
            taken += 1
            numbers += [point["t"] for point in sample["points"]]
            if len(numbers) >= 150:
                break
        assert taken < len(numbers)
        assert numbers == sorted(numbers)
        response.close()
    await until(lambda: not samplers(), "the end of sampling")


async def test_a_fault_ends_the_feed_and_the_next_viewer_starts_anew(
    start: Open, house: House, caplog: pytest.LogCaptureFixture
) -> None:
    feed, client = await start()
    async with client.get("/events") as response:
        await anext(samples(response))
        house.broken = RuntimeError("a fault of ours")
        await response.content.read()  # to its end, which comes in order
    assert "a fault of ours" in caplog.text
    await until(lambda: feed._viewers == 0, "no viewer")
    assert house.observers[-1] is None
    house.broken = None
    async with client.get("/events") as response:
        await anext(samples(response))
        response.close()
    await until(lambda: not samplers(), "the end of sampling")


async def test_stopping_ends_viewers_at_once(start: Open) -> None:
    feed, client = await start(interval=60)
    async with client.get("/events") as response:
        await anext(samples(response))
        await feed.stop()
        await response.content.read()
    assert not samplers()


async def test_relays_have_their_turn_between_looks(start: Open, house: House) -> None:
    """Thousands of streams are looked at in portions."""
    house.live = [stream(request_id=str(n)) for n in range(1000)]
    turns, looked = 0, []

    def exchanges() -> Iterable[Exchange]:
        for exchange in house.live:
            looked.append(turns)
            yield exchange

    house.exchanges = exchanges  # type: ignore[method-assign]
    _, client = await start(interval=60)

    async def count_turns() -> None:
        nonlocal turns
        while len(looked) < 1000:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count_turns())
    async with client.get("/events") as response:
        sample = await anext(samples(response))
        response.close()
    await counting
    assert len(set(looked)) >= 10
    assert (sample["in_flight"], len(sample["streams"])) == (1000, 200)
    await until(lambda: not samplers(), "the end of sampling")


async def test_backends_are_bounded(start: Open, house: House) -> None:
    """Those in trouble are shown before those that are up."""
    house.members = [{**house.backend, "name": f"b{n}", "models": ["m"] * 50} for n in range(BACKENDS_MOST + 20)]
    house.members[-1]["state"] = "down"
    _, client = await start()
    async with client.get("/events") as response:
        sample = await anext(samples(response))
        response.close()
    assert (sample["backends_total"], len(sample["backends"])) == (BACKENDS_MOST + 20, BACKENDS_MOST)
    assert sample["backends"][0]["state"] == "down"
    assert (len(sample["backends"][0]["models"]), sample["backends"][0]["models_total"]) == (MODELS_MOST, 50)
    await until(lambda: not samplers(), "the end of sampling")
