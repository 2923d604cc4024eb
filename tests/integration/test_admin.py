"""The admin listener over a real gateway: what it tells of what is in flight, and what it can do to it."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support import script as s
from tests.support.client import RawClient
from tests.support.gateway import Gateway
from tests.support.messages import HttpWire, Message
from tests.support.upstream import RawUpstream, probe_status

Start = Callable[..., Awaitable[Gateway]]
Connect = Callable[..., Awaitable[RawClient]]


def chat(request_id: str, **members: Any) -> bytes:
    return s.post({**s.CHAT, **members}, fields=[("X-Request-Id", request_id)])


async def streams(gateway: Gateway) -> dict[str, dict[str, Any]]:
    return {x["request_id"]: x for x in (await gateway.admin(s.get("/-/streams"))).json()}


async def reached(gateway: Gateway, **phases: str) -> dict[str, dict[str, Any]]:
    """Wait until these exchanges stand in these phases."""
    async with asyncio.timeout(5):
        while True:
            found = await streams(gateway)
            if all(found.get(name, {}).get("phase") == phase for name, phase in phases.items()):
                return found
            await asyncio.sleep(0.01)


def delete(request_id: str) -> bytes:
    return s.get(f"/-/streams/{request_id}", method="DELETE")


@pytest.mark.config({"limits": {"in_flight": 3}})
async def test_streams_in_every_phase(gateway: Gateway, upstream: RawUpstream, connect: Connect) -> None:
    """Each exchange with where it stands; nothing of its prompt or its output."""
    clients = {name: await connect() for name in ("read", "wait", "first", "stream", "queue")}
    await clients["read"].send(chat("read")[:-10])
    for name, begun in (("wait", ()), ("first", (s.SSE_HEAD,)), ("stream", (s.SSE_HEAD, s.chunk(s.delta("secret"))))):
        upstream.script = held = s.Held(*begun)
        await clients[name].send(chat(name, user="secret"))
        await held.wire()
    await clients["queue"].send(chat("queue"))
    found = await reached(gateway, read="read", wait="wait", first="first_token", stream="stream", queue="queue")
    assert len(found) == 5
    stream = found["stream"]
    assert stream["output_events"] == 1
    assert stream["bytes_out"] == len(s.delta("secret"))
    assert (stream["method"], stream["path"], stream["model"]) == ("POST", "/v1/chat/completions", "m")
    assert stream["client"].startswith("127.0.0.1")
    assert 0 <= stream["age_s"] < 5
    assert not stream["paused"]
    assert found["queue"]["backend"] is None
    assert "secret" not in json.dumps(found)
    samples = await gateway.metrics()
    for phase in ("read", "queue", "wait", "first_token", "stream"):
        assert samples.value("tokenpipe_requests_in_flight", phase=phase) == 1
    assert samples.value("tokenpipe_queue_depth") == 1


@pytest.mark.config({"limits": {"in_flight": 3}})
async def test_abort_one(gateway: Gateway, upstream: RawUpstream, connect: Connect) -> None:
    """DELETE ends that one and no other: its backend is told at once, its client sees that it is not whole."""
    upstream.script = held = s.Held(s.SSE_HEAD, s.chunk(s.delta("a")))
    clients = [await connect() for _ in range(2)]
    for number, client in enumerate(clients):
        await client.send(chat(f"abort-{number}"))
        await held.wire(number)
    began = time.monotonic()
    assert (await gateway.admin(delete("abort-0"))).status in (200, 202, 204)
    took = await held.wires[0].wait_closed() - began
    print(f"aborted by an operator: {took * 1000:.1f} ms")
    assert took < 0.25
    assert not (await clients[0].read_response()).complete
    (entry,) = await gateway.logged(request_id="abort-0")
    assert entry["phase"] == "stream"
    await held.wires[1].send(b"".join(map(s.chunk, s.FINISHED)) + s.LAST)
    assert (await clients[1].read_response()).complete
    assert (await gateway.admin(delete("abort-0"))).status == 404
    assert (await gateway.admin(delete("never"))).status == 404


@pytest.mark.config({"limits": {"in_flight": 1}})
async def test_abort_before_the_head(gateway: Gateway, upstream: RawUpstream, connect: Connect) -> None:
    """Then there is still an answer to be given: a 503, while waiting, in the queue, and with half a body."""
    upstream.script = held = s.Held()
    clients = {name: await connect() for name in ("wait-1", "queue-1", "read-1")}
    await clients["wait-1"].send(chat("wait-1"))
    wire = await held.wire()
    await clients["queue-1"].send(chat("queue-1"))
    await clients["read-1"].send(chat("read-1")[:-10])
    await reached(gateway, **{"wait-1": "wait", "queue-1": "queue", "read-1": "read"})
    for name in ("read-1", "queue-1", "wait-1"):
        assert (await gateway.admin(delete(name))).status in (200, 202, 204)
        answer = await clients[name].read_response()
        assert (answer.status, answer.complete) == (503, True)
        assert answer.get("x-gateway-error")
        await gateway.logged(request_id=name)
    await wire.wait_closed(1)
    await gateway.idle()
    upstream.script = s.reply()
    assert (await gateway.ask()).status == 200


async def test_abort_while_the_client_holds_back(gateway: Gateway, upstream: RawUpstream, connect: Connect) -> None:
    """A stream that is paused ends too."""

    async def flood(wire: HttpWire, request: Message) -> None:
        await wire.send(s.SSE_HEAD)
        try:
            while True:
                await wire.send(s.chunk(s.delta("y" * 8000)) * 8)
        except ConnectionError:
            pass

    upstream.script = flood
    client = await connect(receive_buffer=4096)
    await client.send(chat("paused"))
    async with asyncio.timeout(5):
        while not (await streams(gateway)).get("paused", {}).get("paused"):
            await asyncio.sleep(0.01)
    began = time.monotonic()
    assert (await gateway.admin(delete("paused"))).status in (200, 202, 204)
    assert await upstream.wires[-1].wait_closed() - began < 0.25
    await gateway.logged(request_id="paused")
    client.reset()


async def test_backends(gateway: Gateway, upstream: RawUpstream, connect: Connect) -> None:
    """Each one's state, load, connections and models."""
    await gateway.ask()
    upstream.script = held = s.Held(s.SSE_HEAD)
    client = await connect()
    await client.send(chat("held"))
    await held.wire()
    async with asyncio.timeout(10):
        while (await gateway.admin(s.get("/-/backends"))).json()[0]["state"] != "up":
            await asyncio.sleep(0.02)
    (backend,) = (await gateway.admin(s.get("/-/backends"))).json()
    assert backend["url"] == upstream.url
    assert backend["name"] == upstream.url.removeprefix("http://")
    assert (backend["in_flight"], backend["connections"], backend["models"]) == (1, 1, ["m"])


async def test_readyz_and_health(start_gateway: Start, upstream: RawUpstream) -> None:
    """readyz and /health follow the backends; livez does not."""
    config = {"health": {"interval": 0.1, "timeout": 0.2, "fail": 1, "pass": 1}}
    gateway = await start_gateway(config=config, backends=[upstream.url])
    probe = upstream.probes["/health"]
    for _ in range(2):
        for bad, ready in ((probe_status(503), 503), (probe, 200)):
            upstream.probes["/health"] = bad
            async with asyncio.timeout(5):
                while (await gateway.admin(s.get("/readyz"))).status != ready:
                    await asyncio.sleep(0.02)
            assert (await gateway.ask(s.get("/health"))).status == ready
            assert (await gateway.ask()).status == ready
            assert (await gateway.admin(s.get("/livez"))).status == 200


@pytest.mark.parametrize(
    "path",
    ["/metrics", "/livez", "/readyz", "/-/backends", "/-/streams", "/-/config", "/-/reload", "/-/dashboard", "/-/events"],
)
async def test_never_on_the_public_port(gateway: Gateway, upstream: RawUpstream, path: str) -> None:
    """The public listener knows none of it, and neither does a backend."""
    for method in ("GET", "POST"):
        answer = await gateway.ask(s.get(path, [("Content-Length", "0")], method=method))
        assert (answer.status, answer.get("x-gateway-error")) == (404, "unknown_path")
    assert not upstream.requests


async def test_token(start_gateway: Start, upstream: RawUpstream, tmp_path: Path) -> None:
    """Everything but livez and readyz asks for it, and it stands nowhere in what is told."""
    token = tmp_path / "token"
    token.write_text("s3cret-of-the-admin\n")
    config = {"listen": "127.0.0.1:0", "admin": {"listen": "127.0.0.1:0", "token_file": str(token)}}
    gateway = await start_gateway(config=config, backends=[upstream.url])
    right = [("Authorization", "Bearer s3cret-of-the-admin")]
    for path in ("/livez", "/readyz"):
        assert (await gateway.admin(s.get(path))).status == 200
    for path in ("/metrics", "/-/backends", "/-/streams", "/-/config", "/-/dashboard", "/-/dashboard.js", "/nothing"):
        for fields in ([], [("Authorization", "Bearer wrong")], [("Authorization", "Basic s3cret-of-the-admin")]):
            assert (await gateway.admin(s.get(path, fields))).status == 401, path
        answer = await gateway.admin(s.get(path, right))
        assert answer.status == (404 if path == "/nothing" else 200)
        assert b"s3cret" not in answer.body
    assert (await gateway.admin(s.get("/-/reload", method="POST"))).status == 401
    assert (await gateway.admin(s.get("/-/reload", right, method="POST"))).status == 200
    assert "s3cret" not in gateway.stderr()


async def test_secrets_are_redacted(start_gateway: Start, upstream: RawUpstream, tmp_path: Path) -> None:
    """A backend's key reaches the backend in place of the client's, and nobody else."""
    key = tmp_path / "key"
    key.write_text("sk-backend-key\n")
    config = {"backends": [{"url": upstream.url, "api_key_file": str(key)}]}
    gateway = await start_gateway(config=config)
    await gateway.ask(s.post(fields=[("Authorization", "Bearer sk-client-key")]))
    assert upstream.requests[0].all("authorization") == ["Bearer sk-backend-key"]
    for path in ("/-/config", "/-/backends", "/metrics", "/-/streams"):
        body = (await gateway.admin(s.get(path))).body
        assert b"sk-backend-key" not in body
        assert b"sk-client-key" not in body
    assert "sk-" not in gateway.stderr()


async def test_a_scrape_does_not_hold_up_streams(gateway: Gateway, upstream: RawUpstream, connect: Connect) -> None:
    """Twenty scrapes beside a paced stream: its events are not late."""
    upstream.script = s.stream(*[s.delta("p")] * 50, *s.FINISHED, gap=0.01)
    client = await connect()
    await client.send(chat("beside"))
    reading = asyncio.create_task(client.read_response())
    for _ in range(20):
        await gateway.admin(s.get("/metrics"))
    answer = await reading
    times = [at for at, _ in answer.chunks]
    assert max(b - a for a, b in itertools.pairwise(times)) < 1.0


async def test_callers_that_make_no_sense(gateway: Gateway) -> None:
    """A scanner, and one that leaves within its body, are no error of ours: no traceback, and a line at most."""
    for octets in (b"\x16\x03\x01\x02\x00\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n\r\n"):
        answer = await gateway.admin(octets)
        assert answer.status == 400
    client = await RawClient.connect(gateway.admin_host, gateway.admin_port)
    await client.send(s.post(b"{", "/-/backends", [("Content-Length", "9")], length=False))
    client.reset()
    assert (await gateway.admin(s.get("/livez"))).status == 200
    chunked = s.post(b"zz\r\n{}\r\n0\r\n\r\n", "/-/backends", [("Transfer-Encoding", "chunked")], length=False)
    assert (await gateway.admin(chunked)).status == 400
    log = gateway.stderr()
    assert log.count("a request that cannot be read: 400") >= 2, log  # the first is known at sight
    assert "Traceback" not in log and '"level": "error"' not in log, log
