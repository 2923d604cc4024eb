"""A client that leaves stops the work that was done for it, in each phase and by each way of leaving."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from gateway.synthetic.server import SyntheticUpstream
from tests.support.client import RawClient
from tests.synthetic.conftest import (
    BODIES,
    CHAT,
    COMPLETIONS,
    MESSAGES,
    RESPONSES,
    StartMock,
    connect,
    metric,
    request,
    standing_still,
)

ABORTED = "tokenpipe_mock_aborted_requests_total"
MANY: dict[str, Any] = {"max_tokens": 1000, "max_output_tokens": 1000, "ignore_eos": True}
WAYS = ["fin", "reset", "half_close"]


async def begin(mock: SyntheticUpstream, path: str, **changes: Any) -> RawClient:
    client = await connect(mock)
    await client.send(request("POST", path, {**BODIES[path], **MANY, **changes}))
    await until(lambda: mock.running == 1)
    return client


async def until(true: Any, within: float = 2.0) -> None:
    deadline = time.monotonic() + within
    while not true():
        assert time.monotonic() < deadline, "not within the time"
        await asyncio.sleep(0.001)


async def stopped(mock: SyntheticUpstream) -> None:
    await until(lambda: mock.running == 0, within=0.5)
    assert await metric(mock, "vllm:num_requests_running") == 0
    assert await metric(mock, "vllm:kv_cache_usage_perc") == 0
    assert await metric(mock, ABORTED) == 1
    assert await metric(mock, "vllm:request_success_total") == 0  # vLLM does not count what a client aborted
    tokens = await metric(mock, "vllm:generation_tokens_total")
    await asyncio.sleep(0.02)
    assert await metric(mock, "vllm:generation_tokens_total") == tokens


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES, MESSAGES])
async def test_before_the_first_token(start_mock: StartMock, path: str, way: str) -> None:
    mock = await start_mock(ttft=30)
    client = await begin(mock, path, stream=True)
    # The head is there at once, long before there is anything to say.
    assert (await client.read_response_head()).status == 200
    getattr(client, way)()
    await stopped(mock)
    assert await metric(mock, "vllm:generation_tokens_total") == 0
    client.reset()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES, MESSAGES])
async def test_in_the_middle_of_a_stream(start_mock: StartMock, path: str, way: str) -> None:
    mock = await start_mock(itl=0.003)
    client = await begin(mock, path, stream=True)
    await client.receive_until(b'"text":' if path == COMPLETIONS else b"delta")
    getattr(client, way)()
    await stopped(mock)
    assert 1 <= await metric(mock, "vllm:generation_tokens_total") < 100
    client.reset()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES, MESSAGES])
async def test_unstreamed(start_mock: StartMock, path: str, way: str) -> None:
    mock = await start_mock(itl=0.003)
    client = await begin(mock, path)
    getattr(client, way)()
    await stopped(mock)
    client.reset()


async def test_at_full_speed(start_mock: StartMock) -> None:
    """With nothing to wait for, the leaving must still be seen between two tokens."""
    mock = await start_mock()
    client = await begin(mock, CHAT, stream=True, max_tokens=1_000_000)
    await client.receive_until(b"delta")
    client.reset()
    await stopped(mock)


async def test_a_reader_that_pauses_pauses_the_tokens(start_mock: StartMock) -> None:
    mock = await start_mock()
    client = await RawClient.connect(port=int(mock.url.rpartition(":")[2]), receive_buffer=4096)
    await client.send(request("POST", CHAT, {**BODIES[CHAT], **MANY, "stream": True, "max_tokens": 1_000_000}))
    assert await standing_still(mock) < 100_000
    assert mock.running == 1
    client.reset()
    await stopped(mock)


async def test_leaving_after_the_last_token_aborts_nothing(start_mock: StartMock) -> None:
    mock = await start_mock()
    client = await connect(mock)
    await client.ask(request("POST", CHAT, {**BODIES[CHAT], "stream": True}))
    client.reset()
    assert mock.running == 0
    assert await metric(mock, ABORTED) == 0
    assert await metric(mock, "vllm:request_success_total") == 1
