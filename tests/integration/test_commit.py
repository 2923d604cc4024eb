"""`commit: first_event`: a stream is held back until it says something, so that what goes wrong before can be mended."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

from tests.integration.test_fleet import SLOW, fleet, states, urls
from tests.support import script as s
from tests.support.gateway import Gateway, until
from tests.support.messages import HttpWire, Message

Start = Callable[..., Awaitable[Gateway]]
HELD: dict[str, Any] = {"commit": "first_event", "health": SLOW, "balance": "round_robin"}
ROLE = s.event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]})
OUTPUT = (s.delta("a"), *s.FINISHED)
COMMENT = b": comment\n\n"


def error(code: int) -> bytes:
    return s.event({"error": {"message": "boom", "type": "E", "param": None, "code": code}})


def chunks(*events: bytes) -> bytes:
    return b"".join(map(s.chunk, events))


async def test_bytes_are_as_ever(start_gateway: Start) -> None:
    """What was held back comes whole and in order, and nothing of it before the first event that says something."""
    async with fleet(1) as (backend,):
        go_on = asyncio.Event()

        async def slow(wire: HttpWire, request: Message) -> None:
            await wire.send(s.SSE_HEAD + chunks(COMMENT, ROLE))
            await go_on.wait()
            await wire.send(chunks(*OUTPUT) + s.LAST)

        backend.script = slow
        gateway = await start_gateway(config=HELD, backends=urls([backend]))
        client = await gateway.connect()
        await client.send(s.post())
        await backend.wait_requests()
        with pytest.raises(TimeoutError):
            await client.more(timeout=0.2)
        (held,) = (await gateway.admin(s.get("/-/streams"))).json()
        assert held["phase"] == "first_token"
        go_on.set()
        answer = await client.read_response()
        assert (answer.status, answer.body) == (200, COMMENT + ROLE + b"".join(OUTPUT))
        client.fin()
        await gateway.idle()
        assert await gateway.metric("tokenpipe_requests_total", outcome="complete") == 1
        assert await gateway.metric("tokenpipe_time_to_first_token_seconds_count") == 1


@pytest.mark.parametrize("code, status", [(400, 400), (404, 404), (500, 500), (503, 503), (7, 500), (200, 500)])
async def test_a_first_error_is_a_status(start_gateway: Start, code: int, status: int) -> None:
    """In the engine's own words, with the connection kept for the next request; one backend: there is no other try."""
    async with fleet(1, s.stream(error(code), s.DONE)) as (backend,):
        gateway = await start_gateway(config=HELD, backends=urls([backend]))
        client = await gateway.connect()
        for _ in range(2):
            answer = await client.ask()
            assert (answer.status, answer.get("content-type")) == (status, "application/json")
            assert json.loads(answer.body)["error"]["message"] == "boom"
            assert answer.get("x-gateway-error") is None
        client.fin()
        assert len(backend.requests) == 2
        await gateway.idle()
        assert await gateway.metric("tokenpipe_requests_total", outcome="upstream_status") == 2
        assert {b["breaker"] for b in await states(gateway)} == {"closed"}


async def test_anthropic_errors(start_gateway: Start) -> None:
    """A type stands for a status there."""
    said = {"type": "error", "error": {"type": "overloaded_error", "message": "boom"}}
    async with fleet(1, s.stream(s.event(said, "error"))) as (backend,):
        gateway = await start_gateway(config=HELD, backends=urls([backend]))
        answer = await gateway.ask(s.post(path="/v1/messages"))
        assert (answer.status, json.loads(answer.body)) == (503, said)


BROKEN: list[tuple[str, s.Script]] = [
    ("error", s.stream(error(500), s.DONE)),
    ("error behind what says nothing", s.stream(COMMENT, ROLE, error(503), s.DONE)),
    ("ends at once", s.stream()),
    ("reset behind the head", s.raw(s.SSE_HEAD, then="reset")),
    ("cut within its first event", s.raw(s.SSE_HEAD + chunks(OUTPUT[0])[:20], then="fin")),
    ("closed before the head", s.vanish),
    ("reset within the head", s.raw(s.SSE_HEAD[:40], then="reset")),
    ("no HTTP", s.raw(b"what is this?\r\n", then="fin")),
    ("no chunks", s.raw(s.SSE_HEAD + b"what is this\r\n", then="keep")),
]


@pytest.mark.parametrize("broken", [script for _, script in BROKEN], ids=[name for name, _ in BROKEN])
async def test_another_backend_is_asked(start_gateway: Start, broken: s.Script) -> None:
    """Where a stream broke before it said anything, the client sees nothing of it."""
    async with fleet(2) as backends:
        backends[0].script, backends[1].script = broken, s.stream(*OUTPUT)
        gateway = await start_gateway(config=HELD, backends=urls(backends))
        for _ in range(4):
            answer = await gateway.ask()
            assert (answer.status, answer.body) == (200, b"".join(OUTPUT))
        assert len(backends[0].requests) >= 2
        await gateway.idle()
        assert await gateway.metric("tokenpipe_requests_total", outcome="complete") == 4
        assert {b["in_flight"] for b in await states(gateway)} == {0}


async def test_the_clients_fault_is_no_better_elsewhere(start_gateway: Start) -> None:
    async with fleet(2, s.stream(error(400), s.DONE)) as backends:
        gateway = await start_gateway(config=HELD, backends=urls(backends))
        assert (await gateway.ask()).status == 400
        assert sum(len(b.requests) for b in backends) == 1


async def test_without_it_nothing_is_asked_twice(start_gateway: Start) -> None:
    async with fleet(2, s.stream(error(500), s.DONE)) as backends:
        gateway = await start_gateway(config=HELD | {"commit": "head"}, backends=urls(backends))
        answer = await gateway.ask()
        assert (answer.status, answer.body) == (200, error(500) + s.DONE)
        assert sum(len(b.requests) for b in backends) == 1


async def test_a_kept_connection_that_ends_before_the_head(start_gateway: Start) -> None:
    """An engine that is killed with a request on a kept connection: a stream that is held back comes from the other one."""
    for commit, status in (("first_event", 200), ("head", 502)):
        async with fleet(2, s.stream(*OUTPUT)) as backends:
            gateway = await start_gateway(config=HELD | {"commit": commit}, backends=urls(backends))
            for _ in range(2):
                assert (await gateway.ask()).status == 200  # each has a kept connection now
            killed, other = backends

            async def dies(wire: HttpWire, request: Message) -> None:
                killed.close_listener()  # noqa: B023
                wire.reset()

            killed.script = dies
            assert {(await gateway.ask()).status for _ in range(2)} == {200, status}
            assert (len(killed.requests), len(other.requests)) == ((2, 3) if status == 200 else (2, 2))
            await gateway.idle()


async def test_an_answer_in_one_piece_is_not_asked_for_twice(start_gateway: Start) -> None:
    """Nothing of it is held back: what became of it before its head nobody knows."""
    async with fleet(2, s.vanish) as backends:
        gateway = await start_gateway(config=HELD, backends=urls(backends))
        answer = await gateway.ask(s.post(s.CHAT | {"stream": False}))
        assert (answer.status, answer.get("x-gateway-error")) == (502, "upstream_reset")
        assert sum(len(b.requests) for b in backends) == 1


@pytest.mark.parametrize("sent", [s.SSE_HEAD, s.SSE_HEAD[:40], b""], ids=["behind the head", "within the head", "before it"])
async def test_silence(start_gateway: Start, sent: bytes) -> None:
    """timeouts.first_byte goes on until the first event: then another engine is asked, each once; if all are stuck, 504."""

    async def stuck(wire: HttpWire, request: Message) -> None:
        await wire.send(sent)
        await wire.wait_closed()

    async with fleet(2, stuck) as backends:
        gateway = await start_gateway(config=HELD | {"timeouts": {"first_byte": 0.3}}, backends=urls(backends))
        answer = await gateway.ask()
        assert (answer.status, answer.get("x-gateway-error")) == (504, "timeout_first_byte")
        assert (b"no first event" if sent == s.SSE_HEAD else b"no response head") in answer.body
        assert [len(b.requests) for b in backends] == [1, 1]
        await until(lambda: not [wire for b in backends for wire in b.open_connections if b"POST" in wire.received], "closed")


@pytest.mark.parametrize("end", ["fin", "reset"])
async def test_a_client_leaves_while_it_is_held_back(start_gateway: Start, end: str) -> None:
    """The engine is told at once."""
    async with fleet(1) as (backend,):
        closed = asyncio.Event()

        async def stuck(wire: HttpWire, request: Message) -> None:
            await wire.send(s.SSE_HEAD + chunks(ROLE))
            await wire.wait_closed()
            closed.set()

        backend.script = stuck
        gateway = await start_gateway(config=HELD, backends=urls([backend]))
        client = await gateway.connect()
        await client.send(s.post())
        await backend.wait_requests()
        await asyncio.sleep(0.1)
        getattr(client, end)()
        await asyncio.wait_for(closed.wait(), 5)
        await gateway.idle()
        assert await gateway.metric("tokenpipe_requests_total", outcome="client_gone") == 1


async def test_what_says_nothing_is_held_within_bounds(start_gateway: Start) -> None:
    """A stream of nothing but comments passes once it is more than a connection takes in unread."""
    comments = [b": %d %b\n\n" % (number, b"x" * 4000) for number in range(40)]
    async with fleet(1, s.stream(*comments, *OUTPUT)) as (backend,):
        gateway = await start_gateway(config=HELD, backends=urls([backend]))
        answer = await gateway.ask()
        assert answer.body == b"".join(comments) + b"".join(OUTPUT)


def _untouched() -> Sequence[tuple[str, s.Script]]:
    return [
        ("no stream", s.reply(200, b'{"choices": []}', [s.JSON_TYPE])),
        ("an error's status", s.reply(500, b'{"error": {"code": 500}}', [s.JSON_TYPE])),
        ("coded", s.reply(200, b"\x1f\x8b", [s.SSE_TYPE, ("content-encoding", "gzip")])),
        ("empty", s.stream(ROLE, s.event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}), s.DONE)),
    ]


@pytest.mark.parametrize("script", [script for _, script in _untouched()], ids=[name for name, _ in _untouched()])
async def test_all_else_passes(start_gateway: Start, script: s.Script) -> None:
    async with fleet(1, script) as (backend,):
        held = await start_gateway(config=HELD, backends=urls([backend]))
        plain = await start_gateway(config=HELD | {"commit": "head"}, backends=urls([backend]))
        one, other = await held.ask(), await plain.ask()
        assert (one.status, one.body) == (other.status, other.body)


async def test_receipts(start_gateway: Start) -> None:
    """`headers.receipt: true`: who answered, at which attempt, after what wait; and nothing of it without."""
    async with fleet(2, s.stream(*OUTPUT)) as backends:
        backends[0].script = BROKEN[0][1]
        config = HELD | {"headers": {"receipt": True}}
        gateway = await start_gateway(config=config, backends=urls(backends))
        name = backends[1].url.removeprefix("http://")
        seen = set()
        for _ in range(4):
            answer = await gateway.ask()
            assert answer.get("x-gateway-backend") == name
            assert float(answer.get("x-gateway-queue-seconds") or "-1") == 0
            seen.add(answer.get("x-gateway-attempts"))
        assert seen <= {"1", "2"} and "2" in seen
        for backend in backends:
            backend.script = s.stream(error(500), s.DONE)
        answer = await gateway.ask()  # a first event that becomes a status is a backend's answer as well
        assert (answer.status, answer.get("x-gateway-attempts")) == (500, "2")
        assert answer.get("x-gateway-backend") in {url.removeprefix("http://") for url in urls(backends)}
        backends[1].script = s.stream(*OUTPUT)
        plain = await start_gateway(config=HELD, backends=urls(backends[1:]))
        assert not [name for name, _ in (await plain.ask()).fields if name.lower().startswith("x-gateway-")]
