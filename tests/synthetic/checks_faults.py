"""Rows of deploy/mock.md: faults, each as its client sees it."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest

from tests.support.client import RawClient
from tests.support.messages import Message
from tests.support.wire import Closed
from tests.synthetic.conftest import CHAT, COMPLETIONS, MESSAGES, RESPONSES, metric, request
from tests.synthetic.trial import Trial, chunks, contents, finishes, sees


async def cut(t: Trial, ask: str | None = None, **options: Any) -> tuple[RawClient, Message]:
    """The client and what it got of an answer that ended before its time."""
    client = await t.send(ask, **options)
    answer = await client.read_response()
    assert not answer.complete
    return client, answer


async def unanswered(t: Trial, ask: str | None = None, **options: Any) -> str | None:
    """How the connection ended without a byte."""
    client = await t.send(ask, **options)
    with pytest.raises(Closed) as closed:
        await client.read_response()
    assert closed.value.args[0] == b""
    return client.ended


async def one_fault(t: Trial, name: str) -> None:
    """It was counted, and is in the log."""
    assert await t.faults() == {name: 1}
    assert (await t.log())["faults"][0].startswith(name)


# grammar --------------------------------------------------------------------------------------------------------------


@sees("fault=reset@token:2")
async def reset_at_a_token(t: Trial) -> None:
    client, answer = await cut(t)
    assert (client.ended, len(contents(answer))) == ("rst", 2)
    await one_fault(t, "reset")
    assert (await t.log())["ended"] == "fault"
    assert await unanswered(t, stream=None) == "rst"


@sees("fault=reset@token:2-5")
async def reset_in_a_range(t: Trial) -> None:
    found = []
    for _ in range(2):
        mock = await t.start(seed=1)
        found.append([len(contents((await cut(t, mock=mock))[1])) for _ in range(6)])
    assert found[0] == found[1]
    assert len(set(found[0])) > 1 and set(found[0]) <= {2, 3, 4, 5}


@sees("fault=reset@ms:40;itl=0.01;tokens=90")
async def reset_at_a_moment(t: Trial) -> None:
    start = time.monotonic()
    client, answer = await cut(t)
    assert client.ended == "rst"
    assert time.monotonic() - start >= 0.038
    assert 1 <= len(contents(answer)) <= 5
    # a moment comes in the engine's silence too, and when nothing is streamed
    assert await unanswered(t, "fault=close@ms:20;ttft=30", stream=None) == "fin"


@sees("fault=status:503@every:2")
async def each_second(t: Trial) -> None:
    assert [(await t.ask()).status for _ in range(5)] == [200, 503, 200, 503, 200]


@sees("fault=status:503@request:2-3")
async def the_second_and_third(t: Trial) -> None:
    assert [(await t.ask()).status for _ in range(5)] == [200, 503, 503, 200, 200]


@sees("fault=status:503:0.5")
async def by_chance(t: Trial) -> None:
    found = []
    for _ in range(2):
        mock = await t.start(seed=5)
        found.append([(await t.ask(mock=mock)).status for _ in range(20)])
    assert found[0] == found[1]
    assert 3 <= found[0].count(503) <= 17
    assert (await t.faults())["status"] == found[0].count(503)


@sees("fault=stall:30@token:1,reset@token:2")
async def two_faults(t: Trial) -> None:
    client, answer = await cut(t)
    assert (client.ended, len(contents(answer))) == ("rst", 2)
    assert await t.faults() == {"stall": 1, "reset": 1}
    planned = await t.planned()
    assert planned[3] - planned[2] == pytest.approx(0.03, abs=1e-6)


# endings --------------------------------------------------------------------------------------------------------------


@sees("fault=refuse", "fault=reset", "fault=close")
async def unanswered_ends(t: Trial) -> None:
    end = "fin" if t.row == "fault=close" else "rst"
    assert await unanswered(t) == end
    await one_fault(t, t.row.partition("=")[2])
    assert await unanswered(t, stream=None) == end


@sees("fault=down:0.2")
async def down(t: Trial) -> None:
    kept = await t.client()
    assert await unanswered(t) == "rst"
    with pytest.raises(ConnectionRefusedError):
        await t.client()
    assert (await kept.ask(request("GET", "/health"))).status == 200  # who is there stays
    async with asyncio.timeout(5):
        while True:
            try:
                assert (await t.get("/health")).status == 200
                break
            except ConnectionRefusedError:
                await asyncio.sleep(0.02)


@sees("fault=hang")
async def hang(t: Trial) -> None:
    for stream in (True, None):
        client = await t.send(stream=stream)
        with pytest.raises(TimeoutError):
            await client.receive(timeout=0.1)
        assert client.received_bytes == 0 and not client.ended
        client.reset()
        await t.until(lambda: t.mock.running == 0)
    assert await metric(t.mock, "tokenpipe_mock_aborted_requests_total") == 2


@sees("fault=hang@token:2")
async def hang_later(t: Trial) -> None:
    client = await t.send()
    with pytest.raises(TimeoutError):
        await client.read_response(timeout=0.2)
    assert client.received.count(b'"content"') == 3 and not client.ended


@sees("fault=close@token:2")
async def fin(t: Trial) -> None:
    client, answer = await cut(t)
    assert (client.ended, len(contents(answer)), client.pending) == ("fin", 2, b"")
    for path in (COMPLETIONS, RESPONSES, MESSAGES):
        assert (await cut(t, path=path))[0].ended == "fin"


@sees("fault=eof_clean@token:2")
async def clean_end(t: Trial) -> None:
    answer = await t.ask()
    assert answer.complete
    assert (len(contents(answer)), answer.events()[-1]) == (2, json.dumps(chunks(answer)[-1], separators=(",", ":")))
    assert "[DONE]" not in answer.events()
    answer = await t.ask("fault=eof_clean@done")
    assert answer.complete and finishes(answer) == ["stop"] and "[DONE]" not in answer.events()


@sees("fault=eof_trunc@token:2")
async def truncated(t: Trial) -> None:
    client, answer = await cut(t)
    assert client.ended == "fin"
    assert answer.body.endswith(b'\n\ndata: {"id":"chatcmpl-')


@sees("fault=bad_chunk@token:2")
async def bad_chunk(t: Trial) -> None:
    refused = await t.ask(f"{t.row};framing=length")
    assert refused.status == 400 and "framing=chunked is expected" in refused.json()["error"]["message"]
    client = await t.send()
    with pytest.raises(AssertionError, match="no plain chunk size: b'xyz'"):
        await client.read_response()


@sees("fault=error_event@token:2")
async def error_event(t: Trial) -> None:
    answer = await t.ask()
    assert answer.complete and len(contents_before_error(answer)) == 2
    assert answer.events()[-2].startswith('{"error": {"message": "Internal server error", "type": "InternalServerError"')
    assert answer.events()[-1] == "[DONE]"
    await one_fault(t, "error_event")
    answer = await t.ask(path=MESSAGES)
    assert json.loads(answer.events()[-1])["type"] == "error" and b"event: error\n" in answer.body
    assert "error" in json.loads((await t.ask(path=RESPONSES)).events()[-1])
    whole = await t.ask(stream=None)
    assert (whole.status, whole.json()["error"]["code"]) == (500, 500)


def contents_before_error(answer: Message) -> list[str]:
    return [data for data in answer.events() if '"content"' in data and "role" not in data]


@sees("fault=error_event:400")
async def error_event_of_a_code(t: Trial) -> None:
    answer = await t.ask()
    assert json.loads(answer.events()[-2])["error"]["code"] == 400
    assert (await t.ask(stream=None)).status == 400


@sees("fault=error_cut@token:2")
async def error_cut(t: Trial) -> None:
    answer = await t.ask()
    assert answer.complete
    assert "error" in json.loads(answer.events()[-1])


@sees("fault=abort@token:2")
async def abort(t: Trial) -> None:
    answer = await t.ask()
    assert (finishes(answer), answer.events()[-1], len(contents(answer))) == (["abort"], "[DONE]", 3)
    whole = (await t.ask(stream=None)).json()["choices"][0]
    assert whole["finish_reason"] == "abort"
    assert t.mock.running == 0


@sees("fault=recomputed@token:2")
async def recomputed(t: Trial) -> None:
    for path in (CHAT, COMPLETIONS):
        last = chunks(await t.ask(path=path))[-1]["choices"][0]
        assert (last["finish_reason"], last["stop_reason"]) == ("stop", "recomputed")
        whole = (await t.ask(path=path, stream=None)).json()["choices"][0]
        assert (whole["finish_reason"], whole["stop_reason"]) == ("stop", "recomputed")
    answer = await t.ask(stream_options={"include_usage": True})
    assert answer.events()[-1] == "[DONE]" and chunks(answer)[-1]["usage"]["completion_tokens"] == 2
    assert t.mock.running == 0


@sees("fault=half_event@token:2")
async def half_event(t: Trial) -> None:
    answer = await t.ask()
    assert answer.complete
    assert answer.body.endswith(b'\n\ndata: {"id":"chatcmpl-')


@sees("fault=half_done")
async def half_done(t: Trial) -> None:
    answer = await t.ask()
    assert answer.complete and b'"finish_reason":"stop"' in answer.body
    assert answer.body.endswith(b"\n\ndata: [DO")


@sees("fault=engine_death@token:2")
async def engine_death(t: Trial) -> None:
    bystander = await t.send("ttft=30")
    head = await bystander.read_response_head()
    whole = await t.send("ttft=30", stream=None)
    await t.until(lambda: t.mock.running == 2)
    answer = await t.ask()
    for found in (answer, await bystander.read_response_body(head)):
        assert found.complete
        assert "EngineCore encountered an issue" in found.events()[-2]
        assert found.events()[-1] == "[DONE]"
    assert (await whole.read_response()).status == 500
    assert (await t.get("/health")).status == 503
    assert (await t.ask("")).status == 500
    assert (await t.log(1))["ended"] == "error"
    await t.get("/admin/synth", "DELETE")
    assert (await t.get("/health")).status == 200
    assert (await t.ask("")).status == 200
    assert (await t.ask("fault=engine_death@head")).status == 500
    await t.get("/admin/synth", "DELETE")
    client, _ = await cut(t, path=RESPONSES)
    assert client.ended == "fin"


# delays ---------------------------------------------------------------------------------------------------------------


@sees("fault=stall:50@token:2")
async def stall(t: Trial) -> None:
    _, at = await t.timed(t.row + ";itl=0.001")
    assert at[3] >= 0.05
    planned = await t.planned()
    assert planned[4] - planned[3] == pytest.approx(0.051, abs=1e-6)
    assert planned[5] - planned[4] == pytest.approx(0.001, abs=1e-6)


@sees("fault=trickle:2000@token:1")
async def trickle(t: Trial) -> None:
    start = time.monotonic()
    answer = await t.ask()
    slow = sum(len(data) for _, data in answer.chunks[2:])
    assert answer.complete
    assert time.monotonic() - start >= slow / 2000 * 0.9
    start = time.monotonic()
    head = await t.send("fault=trickle:1000@head")
    await head.read_response_head()
    assert time.monotonic() - start >= 0.1


@sees("fault=cpu:50@token:1")
async def cpu(t: Trial) -> None:
    await t.ask()
    sent = [event["sent_ns"] for event in (await t.log())["events"]]
    assert sent[3] - sent[2] >= 50e6
    embedded = await t.start(embedded=True)
    refused = await t.ask(mock=embedded)
    assert refused.status == 400 and "would hold up the gateway" in refused.body.decode()


@sees("fault=slow_read:20000")
async def slow_read(t: Trial) -> None:
    start = time.monotonic()
    answer = await t.ask(user="x" * 4000)
    assert answer.complete
    assert time.monotonic() - start >= 0.18
    assert await t.faults() == {"slow_read": 1}


# heads ----------------------------------------------------------------------------------------------------------------


@sees("fault=status:500")
async def status(t: Trial) -> None:
    for path in (CHAT, MESSAGES):
        answer = await t.ask(path=path)
        assert (answer.status, answer.get("content-type"), answer.get("retry-after")) == (500, "application/json", None)
        assert "message" in answer.json()["error"]
    assert (await t.ask("fault=status:404")).status == 404


@sees("fault=status:429;retry_after=7")
async def too_many(t: Trial) -> None:
    answer = await t.ask()
    assert (answer.status, answer.get("retry-after")) == (429, "7")
    assert (await t.ask("fault=status:503")).get("retry-after") == "1"


@sees("fault=status:502;error_body=html")
async def another_body(t: Trial) -> None:
    answer = await t.ask()
    assert (answer.status, answer.get("content-type")) == (502, "text/html; charset=utf-8")
    assert answer.body.startswith(b"<html>")
    assert (await t.ask("fault=status:504;error_body=empty")).body == b""


@sees("fault=ct:text/plain", "fault=ct_missing")
async def content_type(t: Trial) -> None:
    expected = "text/plain" if ":" in t.row else None
    for stream in (True, None):
        answer = await t.ask(stream=stream)
        assert (answer.get("content-type"), answer.complete) == (expected, True)
    odd = await t.ask("fault=ct:text/event-stream%3Bcharset=latin-1")
    assert odd.get("content-type") == "text/event-stream;charset=latin-1"


@sees("fault=ce:gzip")
async def content_encoding(t: Trial) -> None:
    answer = await t.ask()
    assert (answer.get("content-encoding"), answer.events()[-1]) == ("gzip", "[DONE]")


@sees("fault=early_hints")
async def early_hints(t: Trial) -> None:
    answer = await t.ask()
    assert [found.status for found in answer.interim] == [103]
    assert answer.status == 200 and answer.complete


@sees("fault=big_header:20000")
async def big_header(t: Trial) -> None:
    assert len((await t.ask()).get("x-big") or "") == 20000


@sees("fault=many_cookies:50")
async def cookies(t: Trial) -> None:
    assert len((await t.ask()).all("set-cookie")) == 50


@sees("fault=head_garbage")
async def head_garbage(t: Trial) -> None:
    client = await t.send()
    with pytest.raises((AssertionError, Closed)):
        await client.read_response()
    await client.wait_closed()
    assert client.ended == "fin" and b"this is no HTTP" in client.received


@sees("fault=http09")
async def http09(t: Trial) -> None:
    client = await t.send()
    await client.wait_closed()
    assert client.received.startswith(b"data: {") and client.received.endswith(b"data: [DONE]\n\n")


@sees("fault=cl_short")
async def short_length(t: Trial) -> None:
    for stream, end in ((True, b"\n"), (None, b"}")):
        client = await t.send(stream=stream)
        answer = await client.read_response()
        assert answer.complete
        assert await client.receive() == end


@sees("fault=cl_long")
async def long_length(t: Trial) -> None:
    for stream in (True, None):
        client, answer = await cut(t, stream=stream)
        assert client.ended == "fin"
        assert int(answer.get("content-length") or 0) == len(answer.body) + 1000


@sees("fault=te_and_cl")
async def framed_twice(t: Trial) -> None:
    client = await t.send()
    head = await client.read_response_head()
    assert head.get("transfer-encoding") == "chunked" and head.get("content-length") == "5"
    await client.receive_until(b"0\r\n\r\n")


@sees("fault=trailer")
async def trailer(t: Trial) -> None:
    answer = await t.ask()
    assert (answer.complete, answer.trailers) == (True, [("x-trailer", "1")])


# events ---------------------------------------------------------------------------------------------------------------


@sees("fault=long_line:300000@token:2")
async def long_line(t: Trial) -> None:
    for path in (CHAT, COMPLETIONS, RESPONSES, MESSAGES):
        answer = await t.ask(path=path)
        long = [data for data in answer.events() if 300_000 < len(data) < 300_500]
        assert len(long) == 1 and "x" * 300_000 in long[0]
    answer = await t.ask(t.row + ";framing=length")
    assert answer.complete and answer.events()[-1] == "[DONE]"


@sees("fault=bad_json@token:2")
async def bad_json(t: Trial) -> None:
    events = (await t.ask()).events()
    with pytest.raises(ValueError, match="Expecting"):
        json.loads(events[2])
    assert json.loads(events[1]) and json.loads(events[3]) and events[-1] == "[DONE]"
    await one_fault(t, "bad_json")


@sees("fault=bad_utf8@token:2")
async def bad_utf8(t: Trial) -> None:
    answer = await t.ask()
    assert answer.body.count(b'"content":"\xff\xfe') == 1
    assert answer.chunks[2][1].count(b"\xff\xfe") == 1


@sees("fault=nul@token:2")
async def nul(t: Trial) -> None:
    answer = await t.ask()
    assert b'"content":"\x00' in answer.chunks[2][1]
    assert answer.body.count(b"\x00") == 1


@sees("fault=wrong_index@token:2")
async def wrong_index(t: Trial) -> None:
    found = [chunk["choices"][0]["index"] for chunk in chunks(await t.ask())]
    assert found == [0, 0, 7, 0, 0, 0, 0]


@sees("fault=ids_change@token:2")
async def ids_change(t: Trial) -> None:
    ids = [chunk["id"] for chunk in chunks(await t.ask())]
    assert len(set(ids[:2])) == len(set(ids[2:])) == 1
    assert ids[2] == f"other-{ids[0]}"


@sees("fault=role_missing")
async def role_missing(t: Trial) -> None:
    answer = await t.ask()
    assert b'"role"' not in answer.body and len(contents(answer)) == 6
    await one_fault(t, "role_missing")


@sees("fault=finish_missing")
async def finish_missing(t: Trial) -> None:
    answer = await t.ask()
    assert (finishes(answer), answer.events()[-1]) == ([], "[DONE]")
    await one_fault(t, "finish_missing")


@sees("fault=dup_done")
async def dup_done(t: Trial) -> None:
    answer = await t.ask()
    assert answer.complete and answer.events()[-2:] == ["[DONE]", "[DONE]"]
    await one_fault(t, "dup_done")


@sees("fault=data_after_done")
async def data_after_done(t: Trial) -> None:
    answer = await t.ask()
    assert answer.complete and answer.events()[-2] == "[DONE]"
    assert json.loads(answer.events()[-1])["choices"]


# afterwards -----------------------------------------------------------------------------------------------------------


@sees("fault=extra:40")
async def extra(t: Trial) -> None:
    for stream in (True, None):
        client = await t.send(stream=stream)
        answer = await client.read_response()
        assert answer.complete
        async with asyncio.timeout(5):
            while len(client.pending) < 40:
                await client.more()
        assert len(client.pending) == 40 and client.pending.startswith(b"HTTP/1.1 200 OK")


@sees("fault=keepalive_close", "fault=reset@end")
async def close_after(t: Trial) -> None:
    for stream in (True, None):
        client = await t.send(stream=stream)
        answer = await client.read_response()
        assert answer.complete and answer.get("connection") is None
        await client.wait_closed()
        assert client.ended == ("rst" if "reset" in t.row else "fin")
