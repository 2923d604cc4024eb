"""`start_mock(...)` starts a synthetic upstream for one test; `mock` is one that never waits; `ask` talks to it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from gateway.synthetic.server import MockSettings, SyntheticUpstream
from tests.support.client import RawClient
from tests.support.messages import Message

StartMock = Callable[..., Awaitable[SyntheticUpstream]]
Ask = Callable[..., Awaitable[Message]]
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"model": "synthetic", "messages": [{"role": "user", "content": "hello there"}], "max_tokens": 4},
    COMPLETIONS: {"model": "synthetic", "prompt": "hello there", "max_tokens": 4},
    RESPONSES: {"model": "synthetic", "input": "hello there", "max_output_tokens": 4},
    MESSAGES: {"model": "synthetic", "messages": [{"role": "user", "content": "hello there"}], "max_tokens": 4},
}


def request(method: str, path: str, body: Any = None, fields: str = "Content-Type: application/json\r\n") -> bytes:
    content = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
    head = f"{method} {path} HTTP/1.1\r\nHost: mock\r\n{fields}Content-Length: {len(content)}\r\n\r\n"
    return head.encode() + content


async def connect(mock: SyntheticUpstream) -> RawClient:
    return await RawClient.connect(port=int(mock.url.rpartition(":")[2]))


async def metric(mock: SyntheticUpstream, name: str) -> float:
    """The sum of a family's samples, or of one series where `name` holds a label."""
    client = await connect(mock)
    lines = (await client.ask(request("GET", "/metrics"))).body.decode().splitlines()
    client.fin()
    found = [line for line in lines if line.startswith((name + "{", name + " ")) or ("{" in name and name in line)]
    assert found, f"no {name}"
    return sum(float(line.rpartition(" ")[2]) for line in found)


async def standing_still(mock: SyntheticUpstream) -> float:
    """Wait until no token is produced any more, and say how many there were."""
    before, now = -1.0, 0.0
    async with asyncio.timeout(10):
        while now == 0 or before != now:
            await asyncio.sleep(0.05)
            before, now = now, await metric(mock, "vllm:generation_tokens_total")
    return now


@pytest.fixture
async def start_mock() -> AsyncIterator[StartMock]:
    started: list[SyntheticUpstream] = []

    async def start(**options: Any) -> SyntheticUpstream:
        mock = SyntheticUpstream(MockSettings(**{"port": 0, "ttft": 0, "itl": 0, **options}))
        await mock.start()
        started.append(mock)
        return mock

    yield start
    for mock in started:
        await mock.stop()


@pytest.fixture
async def mock(start_mock: StartMock) -> SyntheticUpstream:
    return await start_mock(tokens=4)


@pytest.fixture
async def ask(mock: SyntheticUpstream) -> AsyncIterator[Ask]:
    """`await ask(path, field=value, ...)` posts the usual body with these fields changed."""
    client = await connect(mock)

    async def ask(path: str, **changes: Any) -> Message:
        return await client.ask(request("POST", path, {**BODIES[path], **changes}))

    yield ask
    client.fin()
