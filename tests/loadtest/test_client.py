"""The client over bare sockets: what it sends and how often, what it makes of every ending, and its open loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable

import pytest

from gateway.core.outcome import Outcome
from gateway.loadtest.client import Client, LoadtestFailed, first_model
from gateway.loadtest.datasets import Prompt
from gateway.loadtest.endpoints import Asking, Kind
from gateway.loadtest.records import Record, Run
from gateway.loadtest.runner import Interrupt, Runner
from gateway.loadtest.statistics import success_rule
from gateway.loadtest.target import parse
from tests.loadtest.support import client
from tests.support import tls
from tests.support.gateway import until
from tests.support.messages import HttpWire, Message
from tests.support.script import (
    DONE,
    FINISHED,
    JSON_TYPE,
    LAST,
    SSE_HEAD,
    Held,
    Script,
    chunk,
    delta,
    head,
    in_turn,
    raw,
    reply,
    stream,
    vanish,
)
from tests.support.upstream import RawUpstream

PROMPT = Prompt("hi", 1, 4)
TWO = (delta("a"), delta("b"), *FINISHED)


@pytest.fixture
async def make(upstream: RawUpstream) -> AsyncIterator[Callable[..., Client]]:
    made: list[Client] = []

    def make(**options: object) -> Client:
        made.append(client(upstream.url, **options))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for each in made:
        each.close()


async def ask(asked: Client) -> Record:
    record = Record(7, 0.0)
    await asked.ask(PROMPT, record, time.monotonic(), None)
    return record


async def run(clients: list[Client], times: list[list[float]], most: int | None = None) -> Run:
    return await Runner(clients, most, Interrupt()).run([[PROMPT] * len(own) for own in times], times, 10.0)


async def test_a_request(upstream: RawUpstream, make: Callable[..., Client]) -> None:
    upstream.script = stream(*TWO)
    record = await ask(make(request_id_prefix="run-"))
    (request,) = upstream.requests
    assert (request.method, request.path) == ("POST", "/v1/chat/completions")
    assert request.get("x-request-id") == "run-7"
    assert request.get("content-type") == "application/json"
    assert request.get("accept-encoding") is None  # nothing is compressed, and so nothing waits for a block to fill
    assert record.outcome is Outcome.COMPLETE
    # [a] [b] and the last one, which is a token without text
    assert (len(record.events), record.output_tokens, record.token_source) == (3, 3, "events")
    assert 0 < record.started < record.sent < record.head <= record.events[0] <= record.ended  # type: ignore[operator]


@pytest.mark.parametrize(
    ("script", "outcome", "error"),
    [
        (reply(503, {"error": "busy"}, reason="Busy"), Outcome.UPSTREAM_STATUS, 'status 503 Busy {"error": "busy"}'),
        (reply(307, b"", [("location", "/x")]), Outcome.UPSTREAM_STATUS, "status 307"),
        (vanish, Outcome.UPSTREAM_RESET, "closed the connection before it answered"),
        (raw(b"SSH-2.0-x\r\n"), Outcome.UPSTREAM_RESET, "is no HTTP/1.1"),
        (raw(b"HTTP/1.1 200 OK\r\n", b"a: " + b"b" * 70_000), Outcome.UPSTREAM_RESET, "head has more than 65536 octets"),
        (raw(b"HTTP/1.1 200 OK\r\nbad field\r\n\r\n"), Outcome.UPSTREAM_RESET, "head is malformed"),
        (raw(SSE_HEAD, chunk(TWO[0]), then="fin"), Outcome.UPSTREAM_RESET, "within the response"),
        (raw(SSE_HEAD, chunk(TWO[0]), b"xyz\r\n"), Outcome.UPSTREAM_RESET, "body is malformed"),
        (stream(TWO[0]), Outcome.UPSTREAM_TRUNCATED, "without its terminal event"),
        (stream(*FINISHED[1:]), Outcome.STREAM_ERROR, "finish reason: none"),
        (stream(delta("", finish="abort"), DONE), Outcome.STREAM_ERROR, "finish reason: abort"),
        (raw(head(200, [("content-type", "text/event-stream")]), *TWO, then="fin"), Outcome.COMPLETE, ""),
        (raw(b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n" + SSE_HEAD, *map(chunk, TWO), LAST), Outcome.COMPLETE, ""),
    ],
)  # fmt: skip
async def test_endings(
    upstream: RawUpstream, make: Callable[..., Client], script: Script, outcome: Outcome, error: str
) -> None:
    upstream.script = script
    record = await ask(make())
    assert record.outcome is outcome, record.error
    assert error in record.error
    assert (record.error == "") is (error == "")
    assert len(upstream.requests) == 1


async def test_an_answer_in_one_piece(upstream: RawUpstream, make: Callable[..., Client]) -> None:
    usage = {"prompt_tokens": 4, "completion_tokens": 6}
    upstream.script = reply(200, {"choices": [{"finish_reason": "stop"}], "usage": usage})
    record = await ask(make())
    assert (record.outcome, record.ttft, record.output_tokens, record.prompt_tokens) == (Outcome.COMPLETE, None, 6, 4)
    assert record.latency == record.duration > 0


async def test_a_long_answer_in_one_piece(upstream: RawUpstream, make: Callable[..., Client]) -> None:
    """Its usage comes last."""
    choice = {"finish_reason": "stop", "message": {"content": "a" * 300_000}}
    upstream.script = reply(200, {"choices": [choice], "usage": {"prompt_tokens": 4, "completion_tokens": 6}})
    record = await ask(make())
    assert (record.outcome, record.output_tokens, record.prompt_tokens) == (Outcome.COMPLETE, 6, 4)


@pytest.mark.parametrize(
    ("script", "error"),
    [
        (stream(delta("a"), delta("b" * (1 << 21)), *FINISHED), "its events could not be read: one has more than 1 MiB"),
        (raw(head(200, [("content-type", "text/event-stream"), ("content-encoding", "gzip")]), b"\x1f\x8b", then="fin"),
         "its events could not be read: the response has a Content-Encoding"),
    ],
)  # fmt: skip
async def test_what_could_not_be_read_is_no_success(
    upstream: RawUpstream, make: Callable[..., Client], script: Script, error: str
) -> None:
    upstream.script = script
    record = await ask(make())
    assert (record.outcome, record.error) == (Outcome.COMPLETE, error)
    assert not success_rule("strict", Kind.CHAT)(record)


async def test_nobody_listens(make: Callable[..., Client], upstream: RawUpstream) -> None:
    asked = make()
    upstream.close_listener()
    refused = client("http://127.0.0.1:9")  # the discard port
    record = await ask(refused)
    assert (record.outcome, record.error) == (Outcome.UPSTREAM_CONNECT, "Connection refused")
    with pytest.raises(LoadtestFailed, match=r"cannot connect to http://127\.0\.0\.1:9: Connection refused; check that"):
        await refused.check()
    asked.close()


async def test_a_deadline(upstream: RawUpstream, make: Callable[..., Client]) -> None:
    upstream.script = held = Held(SSE_HEAD, chunk(TWO[0]))
    record = await ask(make(timeout=0.2))
    assert (record.outcome, record.error) == (Outcome.TIMEOUT_TOTAL, "not done after 0.2 s (--timeout)")
    assert len(record.events) == 1
    assert record.duration >= 0.2
    await (await held.wire()).wait_closed()


async def test_a_clean_connection_is_kept(upstream: RawUpstream, make: Callable[..., Client]) -> None:
    upstream.script, asked = stream(*TWO), make()
    assert [(await ask(asked)).fresh for _ in range(3)] == [True, False, False]
    assert len(upstream.connections) == 1


@pytest.mark.parametrize("behind", [b"HTTP/1.1 200 OK\r\n\r\n", b"x"])
async def test_one_with_octets_behind_the_end_is_not(
    upstream: RawUpstream, make: Callable[..., Client], behind: bytes
) -> None:
    upstream.script, asked = raw(SSE_HEAD, b"".join(map(chunk, TWO)) + LAST + behind), make()
    assert [(await ask(asked)).fresh for _ in range(2)] == [True, True]


async def test_one_that_the_server_closed_is_not_used(upstream: RawUpstream, make: Callable[..., Client]) -> None:
    upstream.script, asked = raw(SSE_HEAD, *map(chunk, TWO), LAST, then="fin"), make()
    assert (await ask(asked)).outcome is Outcome.COMPLETE
    await asyncio.sleep(0.05)
    again = await ask(asked)
    assert (again.outcome, again.fresh) == (Outcome.COMPLETE, True)


async def test_a_request_that_failed_is_never_sent_again(upstream: RawUpstream, make: Callable[..., Client]) -> None:
    """Nor on a kept connection that the server resets as the request comes, which a client may take for a stale one."""
    upstream.script, asked = in_turn(stream(*TWO), vanish), make()
    await ask(asked)
    record = await ask(asked)
    assert (record.outcome, record.fresh) == (Outcome.UPSTREAM_RESET, False)
    await asyncio.sleep(0.05)
    assert len(upstream.requests) == 2


async def test_a_late_answer_delays_nobody(upstream: RawUpstream, make: Callable[..., Client]) -> None:
    """The first answer never comes to an end by itself: all others are sent, on time, while it is under way."""
    held = Held(SSE_HEAD, chunk(TWO[0]))
    upstream.script = in_turn(held, stream(*TWO))
    asked, interrupt = make(), Interrupt()
    runner = Runner([asked], None, interrupt)
    under_way = asyncio.ensure_future(runner.run([[PROMPT] * 5], [[0.0, 0.02, 0.04, 0.06, 0.08]], 50.0))
    await upstream.wait_requests(5)
    await until(lambda: runner.done == 4, "the others' end")
    (await held.wire()).reset()
    done = await under_way
    assert [each.outcome for each in done.records[0]] == [Outcome.UPSTREAM_RESET, *[Outcome.COMPLETE] * 4]
    assert all(each.arrived >= each.scheduled for each in done.records[0])


async def test_max_concurrency(upstream: RawUpstream, make: Callable[..., Client]) -> None:
    """What waits for a place is not sent, and its wait is no part of TTFT."""
    most = now = 0

    async def script(wire: HttpWire, request: Message) -> None:
        nonlocal most, now
        now += 1
        most = max(most, now)
        await asyncio.sleep(0.03)
        now -= 1
        await stream(*TWO)(wire, request)

    upstream.script = script
    done = await run([make()], [[0.0] * 9], most=3)
    assert most == 3
    waited = [each for each in done.records[0] if each.queued > 0.02]
    assert len(waited) >= 3
    assert all(each.latency < each.events[-1] - each.arrived for each in waited)  # type: ignore[operator]


async def test_an_interrupt_cuts_what_is_under_way(upstream: RawUpstream, make: Callable[..., Client]) -> None:
    upstream.script = in_turn(stream(*TWO), Held(SSE_HEAD, chunk(TWO[0])))
    interrupt = Interrupt()
    runner = Runner([make()], None, interrupt)
    under_way = asyncio.ensure_future(runner.run([[PROMPT] * 3], [[0.0, 0.05, 60.0]], 1.0))
    await until(lambda: runner.done == 1 and len(upstream.requests) == 2, "one to be done, one to be under way")
    interrupt.happened = True
    interrupt.tell()
    done = await under_way
    assert done.interrupted
    assert [each.outcome for each in done.records[0]] == [Outcome.COMPLETE, Outcome.CLIENT_GONE]  # the third was not sent
    assert done.duration < 30
    await upstream.wires[1].wait_closed()


async def test_warming_up(upstream: RawUpstream, make: Callable[..., Client]) -> None:
    upstream.script = in_turn(stream(*TWO), reply(500, b"no"))
    records = await Runner([make()], 1, Interrupt()).warm_up(PROMPT, 3)
    assert sorted(each.outcome for each in records) == [Outcome.COMPLETE, *[Outcome.UPSTREAM_STATUS] * 2]
    assert len(upstream.requests) == 3


async def test_the_first_model(upstream: RawUpstream) -> None:
    target = parse("URL", upstream.url, Kind.CHAT.path)
    assert await first_model(target, [("Authorization", "Bearer k")]) == "m"
    upstream.probes["/v1/models"] = reply(401, {"error": "who?"})
    with pytest.raises(LoadtestFailed, match="is refused with 401: set OPENAI_API_KEY, or use --api-key-file"):
        await first_model(target, [])
    upstream.probes["/v1/models"] = reply(404, b"not here", [JSON_TYPE])
    with pytest.raises(LoadtestFailed, match="answers 404, and lists no model; name the model with --model"):
        await first_model(target, [])


async def test_tls(certificates: tls.Certificates) -> None:
    """Checked, unless --insecure says otherwise."""
    upstream = RawUpstream(stream(*TWO))
    await upstream.start(tls=certificates.server_context())
    asking = Asking(Kind.CHAT, "m")
    checked, unchecked = (
        Client(parse("URL", upstream.url, Kind.CHAT.path, insecure=insecure), asking, (), timeout=20.0)
        for insecure in (False, True)
    )
    record = await ask(checked)
    assert record.outcome is Outcome.UPSTREAM_CONNECT
    assert "self-signed" in record.error or "unable to get local issuer" in record.error
    assert (await ask(unchecked)).outcome is Outcome.COMPLETE
    unchecked.close()
    await upstream.stop()


async def test_a_late_blank_line_does_not_make_its_event_late(upstream: RawUpstream, make: Callable[..., Client]) -> None:
    """An event is as old as its data: here each blank line comes with the next event, and after it."""
    events = [delta("a"), delta("b"), *FINISHED]
    pieces = [events[0][:-1], *(b"\n" + event[:-1] for event in events[1:]), b"\n"]
    sent: list[float] = []

    async def script(wire: HttpWire, request: Message) -> None:
        await wire.send(SSE_HEAD)
        for piece in pieces:
            sent.append(time.monotonic())
            await wire.send(chunk(piece))
            await asyncio.sleep(0.05)
        await wire.send(LAST)

    upstream.script = script
    record = Record(0, 0.0)
    await make().ask(PROMPT, record, 0.0, None)
    assert record.outcome is Outcome.COMPLETE
    assert len(record.events) == 3
    for received, began, later in zip(record.events, sent, sent[1:], strict=False):
        assert began <= received < later
