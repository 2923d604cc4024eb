"""Backends that answer, or end, before they have read the request; and what is left of it on a kept connection."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from tests.support import script as s
from tests.support.gateway import Gateway
from tests.support.messages import HttpWire
from tests.support.tls import Certificates
from tests.support.upstream import RawUpstream

Start = Callable[..., Awaitable[Gateway]]
HEALTH = {"health": {"interval": 60}}
TOO_LARGE = s.head(413, [s.JSON_TYPE, ("content-length", "2")], "Content Too Large") + b"{}"
CLOSE_DELIMITED = s.head(413, [s.JSON_TYPE], "Content Too Large") + b"{}"


def body(octets: int) -> bytes:
    return b'{"model": "m", "messages": [{"role": "user", "content": "' + b"x" * octets + b'"}]}'


@pytest.mark.parametrize("answer", [CLOSE_DELIMITED, b""])
async def test_an_end_is_seen_though_octets_are_unsent(start_gateway: Start, answer: bytes) -> None:
    """A backend that half closes takes no more of the upload: its end completes a response, or is a 502 at once."""

    upstream = RawUpstream()

    async def serve(wire: HttpWire) -> None:
        await wire.receive_until(b"\r\n\r\n")
        wire.pause()
        await wire.send(answer)
        wire.half_close()
        await asyncio.sleep(30)

    upstream.on_connect = serve
    await upstream.start()
    try:
        gateway = await start_gateway(config={**HEALTH, "timeouts": {"first_byte": 60, "idle": 60}}, backends=[upstream.url])
        got = await gateway.ask(s.post(body(6_000_000)), timeout=15)
        if answer:
            assert (got.status, got.body) == (413, b"{}")
        else:
            assert (got.status, got.get("x-gateway-error")) == (502, "upstream_reset")
    finally:
        await upstream.stop(check=False)


@pytest.mark.parametrize("encrypted", [False, True])
async def test_an_answer_beats_the_error_of_a_write(start_gateway: Start, certificates: Certificates, encrypted: bool) -> None:
    """A backend answers, and closes over what it has not read, which resets the connection: its answer had come all the
    same."""

    upstream = RawUpstream()

    async def serve(wire: HttpWire) -> None:
        if b"POST" in await wire.receive_until(b"\r\n\r\n"):
            await wire.send(TOO_LARGE)
            wire.fin()  # with the body unread
        else:
            await wire.send(s.head(200, [("content-length", "0"), ("connection", "close")]))
            wire.fin()

    upstream.on_connect = serve
    await upstream.start(tls=certificates.server_context() if encrypted else None)
    try:
        backend: dict[str, object] = {"url": upstream.url}
        if encrypted:
            backend["tls"] = {"ca": str(certificates.ca)}
        gateway = await start_gateway(config={**HEALTH, "backends": [backend], "breaker": {"failures": 1000}})
        for _ in range(25):
            got = await gateway.ask(s.post(body(3_000_000)))
            assert (got.status, got.body) == (413, b"{}"), got.start
    finally:
        await upstream.stop(check=False)


async def test_no_request_queues_behind_what_is_left_of_another(start_gateway: Start) -> None:
    """A backend that answers early and reads no further is not sent the next request on that connection."""
    asked: list[bytes] = []

    async def serve(wire: HttpWire) -> None:
        head = await wire.receive_until(b"\r\n\r\n")
        asked.append(head)
        if b"POST" in head and int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0]) > 100_000:
            wire.pause()
            await wire.send(TOO_LARGE)
            await asyncio.sleep(30)
        await wire.send(s.head(200, [s.JSON_TYPE, ("content-length", "2"), ("connection", "close")]) + b"{}")
        wire.fin()

    upstream = RawUpstream()
    upstream.on_connect = serve
    await upstream.start()
    try:
        gateway = await start_gateway(config={**HEALTH, "timeouts": {"first_byte": 5}}, backends=[upstream.url])
        assert (await gateway.ask(s.post(body(900_000)))).status == 413
        assert (await gateway.ask(s.post(body(10)))).status == 200
    finally:
        await upstream.stop(check=False)


async def test_a_stale_connection_at_the_backends_limit(start_gateway: Start) -> None:
    """A GET on it is tried once more, though the backend has no place for another: its own is still taken."""
    upstream = RawUpstream(s.reply(200, b"{}"))
    await upstream.start()
    try:
        config = {**HEALTH, "backends": [{"url": upstream.url, "max_in_flight": 1}], "pool": {"idle": 30}}
        gateway = await start_gateway(config=config)
        upstream.script = s.in_turn(s.reply(200, b"{}"), s.vanish, s.reply(200, b"{}"))
        statuses = [(await gateway.ask(s.get("/v1/models/m"))).status for _ in range(3)]
        assert statuses == [200, 200, 200]
    finally:
        await upstream.stop(check=False)
