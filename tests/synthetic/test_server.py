"""Schedule, seed, sockets and stopping."""

from __future__ import annotations

import asyncio
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gateway.synthetic.server import MockSettings, SyntheticUpstream
from tests.support.client import RawClient
from tests.support.wire import ORDINARY
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

RUN = "import sys; from gateway.synthetic.server import *; sys.exit(run(MockSettings(port=int(sys.argv[1]))))"
STREAMED = {**BODIES[CHAT], "stream": True, "max_tokens": 12, "ignore_eos": True}


async def times(mock: SyntheticUpstream) -> tuple[list[float], str]:
    """When each event came, after the request was sent, and the text."""
    client = await connect(mock)
    start = time.monotonic()
    answer = await client.ask(request("POST", CHAT, STREAMED))
    client.fin()
    return [at - start for at, _ in answer.chunks], answer.text()


async def planned(mock: SyntheticUpstream) -> list[float]:
    """When each write of the latest request was to leave, since it came: what a busy machine does not change."""
    client = await connect(mock)
    latest = (await client.ask(request("GET", "/admin/synth/log"))).json()["requests"][0]["id"]
    entry = (await client.ask(request("GET", f"/admin/synth/log/{latest}"))).json()
    client.fin()
    return [(event["planned_ns"] - entry["arrived_ns"]) / 1e9 for event in entry["events"]]


async def test_tokens_come_when_they_are_due(start_mock: StartMock) -> None:
    mock = await start_mock(ttft=0.04, itl=0.01)
    role, *tokens, done = (await times(mock))[0]
    assert role >= 0.038 and done >= tokens[-1]
    # Deadlines are absolute, and none is kept too early.
    assert all(at >= 0.038 + 0.01 * number for number, at in enumerate(tokens))
    _head, due, *rest, _ = await planned(mock)
    assert due == pytest.approx(0.04, abs=0.005)
    assert rest == pytest.approx([due + 0.01 * number for number in range(12)], abs=1e-6)


async def test_the_same_seed_says_the_same(start_mock: StartMock) -> None:
    options = {"ttft": "uniform:0:0.01", "itl": "exponential:0.001"}
    one, two, three = [await start_mock(seed=seed, **options) for seed in (5, 5, 6)]
    said = [[(await times(mock))[1] for _ in range(2)] for mock in (one, two, three)]
    assert said[0] == said[1]
    assert said[0] != said[2]
    assert said[0][0] != said[0][1]


async def test_the_same_seed_keeps_the_same_schedule(start_mock: StartMock) -> None:
    schedules = []
    for seed in (3, 3, 4):
        mock = await start_mock(seed=seed, itl="uniform:0:0.02")
        await times(mock)
        _head, first, *rest = await planned(mock)
        schedules.append([at - first for at in rest])
    assert schedules[0] == pytest.approx(schedules[1], abs=1e-6)
    assert schedules[0] != pytest.approx(schedules[2], abs=1e-3)


async def test_a_requests_own_seed_counts_everywhere(start_mock: StartMock) -> None:
    said = set()
    for seed in (1, 2):
        client = await connect(await start_mock(seed=seed))
        for _ in range(2):
            said.add((await client.ask(request("POST", CHAT, {**STREAMED, "seed": 9}))).text())
        client.fin()
    assert len(said) == 1


async def test_streamed_and_whole_say_the_same(start_mock: StartMock) -> None:
    client = await connect(await start_mock())
    streamed = await client.ask(request("POST", CHAT, {**STREAMED, "seed": 1}))
    whole = await client.ask(request("POST", CHAT, {**STREAMED, "seed": 1, "stream": False}))
    assert streamed.text() == whole.json()["choices"][0]["message"]["content"]
    client.fin()


async def test_an_idle_connection_is_closed(start_mock: StartMock) -> None:
    client = await connect(await start_mock(knobs={"idle_close": 0.02}))
    await client.ask(request("GET", "/health"))
    await client.wait_closed()
    assert client.ended == "fin"
    client.fin()


async def test_an_orderly_stop_ends_streams_as_vllm_does(start_mock: StartMock) -> None:
    mock = await start_mock(itl=10)
    clients = {path: await connect(mock) for path in BODIES}
    for path, client in clients.items():
        await client.send(request("POST", path, {**BODIES[path], "stream": True}))
    whole = await connect(mock)
    await whole.send(request("POST", CHAT, BODIES[CHAT]))
    heads = {path: await client.read_response_head() for path, client in clients.items()}
    async with asyncio.timeout(ORDINARY):
        while await metric(mock, "vllm:generation_tokens_total") < 5:
            await asyncio.sleep(0.001)
    await mock.stop()
    answers = {path: await client.read_response_body(heads[path]) for path, client in clients.items()}
    assert all(answer.complete for answer in answers.values())
    assert '"delta":{"content":""},"logprobs":null,"finish_reason":"abort"' in answers[CHAT].events()[-2]
    assert answers[CHAT].events()[-1] == answers[COMPLETIONS].events()[-1] == "[DONE]"
    assert len(re.findall("assistant", answers[CHAT].body.decode())) == 1
    assert '"status":"completed"' in answers[RESPONSES].events()[-1]
    assert '"stop_reason":null' in answers[MESSAGES].events()[-2]
    assert (await whole.read_response()).json()["choices"][0]["finish_reason"] == "abort"
    for client in (*clients.values(), whole):
        client.reset()


async def test_stopped_before_its_first_token_a_stream_has_no_finish_reason(start_mock: StartMock) -> None:
    mock = await start_mock(ttft=10)
    client = await connect(mock)
    await client.send(request("POST", CHAT, STREAMED))
    head = await client.read_response_head()
    await mock.stop()
    role, done = (await client.read_response_body(head)).events()
    assert '"role":"assistant"' in role
    assert done == "[DONE]"
    client.reset()


async def test_a_reader_that_does_not_read_does_not_hold_up_a_stop(start_mock: StartMock) -> None:
    mock = await start_mock()
    client = await RawClient.connect(port=int(mock.url.rpartition(":")[2]), receive_buffer=4096)
    await client.send(request("POST", CHAT, {**STREAMED, "max_tokens": 1_000_000}))
    await standing_still(mock)
    start = time.monotonic()
    await mock.stop()
    assert time.monotonic() - start < 4
    client.reset()


async def test_a_unix_socket(tmp_path: Path) -> None:
    mock, path = SyntheticUpstream(MockSettings(ttft=0, itl=0)), tmp_path / "mock.sock"
    assert await mock.start(unix_path=path) == mock.url == f"unix:{path}"
    client = await RawClient.connect(unix=path)
    assert (await client.ask(request("GET", "/health"))).status == 200
    client.fin()
    await mock.stop()
    assert not path.exists()


async def test_a_taken_port_can_be_tried_again(start_mock: StartMock) -> None:
    first = await start_mock()
    second = SyntheticUpstream(MockSettings(port=int(first.url.rpartition(":")[2])))
    with pytest.raises(RuntimeError, match="not started"):
        second.url  # noqa: B018
    with pytest.raises(OSError, match="in use"):
        await second.start()
    await second.stop()
    await first.stop()
    assert await second.start() == first.url
    with pytest.raises(RuntimeError, match="already"):
        await second.start()
    await second.stop()
    await second.stop()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_run_until_a_signal(number: signal.Signals) -> None:
    with subprocess.Popen([sys.executable, "-c", RUN, "0"], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        said = process.stderr.readline()
        assert re.fullmatch(r"listening on http://127\.0\.0\.1:\d+\n", said)
        taken = subprocess.run(
            [sys.executable, "-c", RUN, said.strip().rpartition(":")[2]], stderr=subprocess.PIPE, text=True, timeout=10
        )
        assert taken.returncode == 1
        assert re.fullmatch(r"tokenpipe mock: cannot listen on http://127\.0\.0\.1:\d+: .*in use; .*--port.*\n", taken.stderr)
        process.send_signal(number)
        assert process.wait(10) == 0
        assert process.stderr.read() == ""
