"""The live page's feed on a real gateway, over bare sockets."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections.abc import Awaitable, Callable
from typing import Any

from gateway.control.dashboard_feed import VIEWERS_MOST
from tests.support import script as s
from tests.support.client import RawClient, connected
from tests.support.gateway import Gateway
from tests.support.upstream import RawUpstream

Start = Callable[..., Awaitable[Gateway]]
Connect = Callable[..., Awaitable[RawClient]]


def watch(gateway: Gateway) -> bytes:
    return s.get("/-/events").replace(b"gateway.test", f"127.0.0.1:{gateway.admin_port}".encode())


async def take(viewer: RawClient, marker: bytes) -> bytes:
    """What comes up to the marker, which is taken too."""
    while marker not in viewer.pending:
        assert await viewer.more(), "the end of the feed"
    end = viewer.pending.index(marker) + len(marker)
    taken = bytes(viewer.pending[:end])
    del viewer.pending[:end]
    return taken


async def begin(viewer: RawClient, gateway: Gateway) -> bytes:
    """Ask for the feed; its head."""
    await viewer.send(watch(gateway))
    return await take(viewer, b"\r\n\r\n")


async def sample(viewer: RawClient) -> dict[str, Any]:
    """The next one that comes."""
    while True:
        for line in (await take(viewer, b"\n\n")).decode().splitlines():
            if line.startswith("data: "):
                found: dict[str, Any] = json.loads(line.removeprefix("data: "))
                return found


async def test_what_is_told(gateway: Gateway, upstream: RawUpstream, connect: Connect) -> None:
    """A stream as it goes, its backend, its ending; nothing of prompt or output."""
    upstream.script = held = s.Held(s.SSE_HEAD, s.chunk(s.delta("secret")))
    client = await connect()
    await client.send(s.post({**s.CHAT, "user": "secret"}, fields=[("X-Request-Id", "told")]))
    wire = await held.wire()
    async with connected(gateway.admin_host, gateway.admin_port) as viewer:
        await begin(viewer, gateway)
        first = await sample(viewer)
        (stream,) = first["streams"]
        assert (stream["request_id"], stream["phase"], stream["tokens"], stream["paused"]) == ("told", "stream", 1, False)
        assert (stream["model"], stream["backend"]) == ("m", upstream.url.removeprefix("http://"))
        assert (first["in_flight"], first["phases"]) == (1, {"stream": 1})
        (backend,) = first["backends"]
        assert (backend["in_flight"], backend["connections"]) == (1, 1)
        before = first["outcomes"].get("complete", 0)
        await wire.send(s.chunk(s.delta("secret")) * 2 + b"".join(map(s.chunk, s.FINISHED)) + s.LAST)
        assert (await client.read_response()).complete
        ended = 0
        while not ended:
            last = await sample(viewer)
            ended = sum(point["ended"].get("complete", 0) for point in last["points"])
        assert (ended, last["streams"], last["outcomes"]["complete"]) == (1, [], before + 1)
        assert "secret" not in json.dumps([first, last])
    assert (await gateway.metric("tokenpipe_requests_total", outcome="complete")) == before + 1


async def admitted(gateway: Gateway) -> RawClient:
    """A viewer, once there is a place: one that has left is noticed with the next sample."""
    async with asyncio.timeout(10):
        while True:
            viewer = await RawClient.connect(gateway.admin_host, gateway.admin_port)
            if b" 200 " in await begin(viewer, gateway):
                return viewer
            viewer.reset()


async def test_viewers_are_bounded(gateway: Gateway) -> None:
    """One too many is told so, the others go on, and a place is free once one has left."""
    viewers = [await admitted(gateway) for _ in range(VIEWERS_MOST)]
    refused = await gateway.admin(watch(gateway))
    assert (refused.status, refused.json()["error"]["code"]) == (503, "overloaded")
    assert refused.get("retry-after")
    for viewer in viewers:
        await sample(viewer)
    viewers.pop().reset()
    viewers.append(await admitted(gateway))
    for viewer in viewers:
        viewer.reset()


async def test_a_stop_ends_the_feed_in_order(start_gateway: Start, upstream: RawUpstream) -> None:
    """A viewer does not hold up the end of the process, and sees its message's proper end."""
    gateway = await start_gateway(backends=[upstream.url])
    async with connected(gateway.admin_host, gateway.admin_port) as viewer:
        assert b"text/event-stream" in await begin(viewer, gateway)
        await sample(viewer)
        began = time.monotonic()
        gateway.signal(signal.SIGTERM)
        await take(viewer, b"\r\n0\r\n\r\n")
        await gateway.stopped()
        print(f"stopped {time.monotonic() - began:.2f} s after the signal")


async def test_it_says_that_it_drains(start_gateway: Start, upstream: RawUpstream) -> None:
    """While streams end, the page goes on, and says what goes on."""
    upstream.script = held = s.Held(s.SSE_HEAD)
    gateway = await start_gateway(backends=[upstream.url])
    client = await gateway.connect()
    await client.send(s.post())
    wire = await held.wire()
    async with connected(gateway.admin_host, gateway.admin_port) as viewer:
        await begin(viewer, gateway)
        assert (await sample(viewer))["trouble"] is None
        gateway.signal(signal.SIGTERM)
        while (await sample(viewer))["trouble"] != "draining":
            pass
    await wire.send(b"".join(map(s.chunk, s.FINISHED)) + s.LAST)
    assert (await client.read_response()).complete
    client.fin()
    await gateway.stopped()
