"""The usual answer is written from the timer's own call: nothing of it may differ but what it costs."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest

from tests.synthetic.conftest import BODIES, CHAT, COMPLETIONS, MESSAGES, RESPONSES, StartMock, connect, request

ASKS = [
    "tokens=9",
    "tokens=9;usage=continuous",
    "tokens=9;usage=null",
    "tokens=9;usage=twice",
    "tokens=30;text=multibyte",
    "tokens=9;reasoning=3;tools=1",
    "tokens=30;tokens_per_event=accepted:3:0.7",
    "tokens=9;stream_interval=4",
    "tokens=9;escape=ascii;event_id=on",
    "tokens=30;hidden=0.5",
    "tokens=1",
    "tokens=9;itl=uniform:0:0.004",
]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES, MESSAGES])
@pytest.mark.parametrize("ask", ASKS)
async def test_the_bytes_are_those_of_the_way_with_a_coroutine(start_mock: StartMock, path: str, ask: str) -> None:
    """A comment that is not due in this hour keeps an answer off the short way."""
    bodies, plans = [], []
    for more in ("", ";comment=3600"):
        mock = await start_mock(ttft=0, itl=0)
        client = await connect(mock)
        body = {**BODIES[path], "stream": True, "max_tokens": 1000}
        fields = f"Content-Type: application/json\r\nx-synth: {ask}{more}\r\n"
        answer = await client.ask(request("POST", path, body, fields))
        assert answer.status == 200
        bodies.append(re.sub(rb'"created(_at)?":\d+', b"", answer.body))
        log = (await client.ask(request("GET", "/admin/synth/log"))).json()["requests"][0]
        plans.append((log["writes"], log["ended"]))
        client.fin()
    assert bodies[0] == bodies[1]
    assert bodies[0].count(b"data:") >= 2
    assert plans[0] == plans[1]
    assert plans[0][1] == "complete"


async def test_several_choices_too(start_mock: StartMock) -> None:
    mock = await start_mock(ttft=0, itl=0)
    client = await connect(mock)
    answer = await client.ask(request("POST", CHAT, {**BODIES[CHAT], "stream": True, "n": 3}))
    client.fin()
    assert answer.body.count(b'"index":2') == 5  # its role, and four tokens


async def test_a_client_of_http_1_0_has_no_chunks(start_mock: StartMock) -> None:
    mock = await start_mock(ttft=0, itl=0)
    client = await connect(mock)
    asked = request("POST", CHAT, {**BODIES[CHAT], "stream": True}).replace(b"HTTP/1.1", b"HTTP/1.0", 1)
    answer = await client.ask(asked)
    client.fin()
    assert answer.status == 200
    assert "transfer-encoding" not in {name.lower() for name, _ in answer.fields}
    assert answer.body.startswith(b"data: {")
    assert answer.body.endswith(b"data: [DONE]\n\n")


async def test_in_a_burst_a_token_does_not_wait_until_every_request_is_read(start_mock: StartMock) -> None:
    """All are there before the loop comes round once. The first token of each is out before the next but one begins."""
    mock = await start_mock(ttft=0, itl=0)
    asked = request("POST", CHAT, {**BODIES[CHAT], "stream": True})
    idle = [await connect(mock) for _ in range(30)]
    await asyncio.sleep(0.05)  # accepted
    for client in idle:
        client.sock.send(asked)
    for client in idle:
        await client.read_response_head()
    log = await connect(mock)
    await settled(log, 30)
    summaries = (await log.ask(request("GET", "/admin/synth/log"))).json()["requests"]
    found: list[dict[str, Any]] = []
    for summary in reversed(summaries):
        found.append((await log.ask(request("GET", f"/admin/synth/log/{summary['id']}"))).json())
    for client in (*idle, log):
        client.reset()
    late = [a["index"] for a, b in zip(found, found[2:], strict=False) if a["events"][2]["sent_ns"] > b["arrived_ns"]]
    assert not late


async def settled(client: Any, count: int) -> None:
    async with asyncio.timeout(10):
        while True:
            requests = (await client.ask(request("GET", "/admin/synth/log"))).json()["requests"]
            if sum(entry["ended"] == "complete" for entry in requests) == count:
                return
            await asyncio.sleep(0.02)
