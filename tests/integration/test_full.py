"""Backends that say that they are full: somebody else is asked, they are left in peace for a while, and nothing is ejected."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from tests.integration.test_fleet import SLOW, fleet, reached, states, urls
from tests.support import script as s
from tests.support.gateway import Gateway, until
from tests.support.messages import HttpWire, Message

Start = Callable[..., Awaitable[Gateway]]
FULL = {"health": SLOW, "balance": "round_robin", "breaker": {"failures": 1}}
BODY = b'{"error": {"message": "full"}}'


def refuse(status: int = 429, after: str | None = "20") -> s.Script:
    return s.reply(status, BODY, [s.JSON_TYPE, *([("retry-after", after)] if after else []), ("x-own", "1")])


@pytest.mark.parametrize("status, after", [(429, "20"), (429, None), (503, "20")])
async def test_another_backend_takes_it(start_gateway: Start, status: int, after: str | None) -> None:
    """No client sees it, and for the time of its Retry-After it is not asked again."""
    async with fleet(2) as backends:
        backends[0].script = refuse(status, after)
        gateway = await start_gateway(config=FULL, backends=urls(backends))
        assert {(await gateway.ask()).status for _ in range(6)} == {200}
        assert len(backends[0].requests) == 1 or (after is None and len(backends[0].requests) <= 3)
        ids = [request.get("x-request-id") for request in backends[0].requests]
        assert len(ids) == len(set(ids))
        assert await gateway.metric("tokenpipe_retries_total", reason=f"status_{status}") == len(ids)
        found = await states(gateway)
        assert {b["breaker"] for b in found} == {"closed"}
        assert {b["in_flight"] for b in found} == {0}
        assert "busy" in {b["state"] for b in found} or after is None
        assert await gateway.metric("tokenpipe_backend_failures_total") == 0


@pytest.mark.parametrize("status, after, config", [
    (503, None, {}), (500, "20", {}), (429, "20", {"retry": {"attempts": 1}}), (429, "20", {"retry": {"statuses": [503]}}),
])  # fmt: skip
async def test_what_passes(start_gateway: Start, status: int, after: str | None, config: dict[str, object]) -> None:
    """Another status, a 503 that does not say to come again, and whatever the operator excludes."""
    async with fleet(2, refuse(status, after)) as backends:
        gateway = await start_gateway(config=FULL | config, backends=urls(backends))
        answer = await gateway.ask()
        assert (answer.status, answer.body, answer.get("retry-after")) == (status, BODY, after)
        assert sum(len(b.requests) for b in backends) == 1


async def test_all_are_full(start_gateway: Start) -> None:
    """The last one's own answer, whole; each is asked once, and they are asked again although they asked for rest."""
    async with fleet(2, refuse()) as backends:
        gateway = await start_gateway(config=FULL, backends=urls(backends))
        for _ in range(2):
            answer = await gateway.ask()
            assert (answer.status, answer.body, answer.get("retry-after"), answer.get("x-own")) == (429, BODY, "20", "1")
        # the second request finds both at rest: one is asked all the same, and then nobody is left who is not
        assert sorted(len(b.requests) for b in backends) == [1, 2]
        await gateway.idle()
        assert {b["in_flight"] for b in await states(gateway)} == {0}


async def test_the_others_fail(start_gateway: Start) -> None:
    """Where whoever was asked instead cannot be reached, the first answer is what the client gets."""
    async with fleet(2, refuse()) as backends:
        gateway = await start_gateway(config=FULL, backends=urls(backends))
        backends[1].close_listener()
        answers = [await gateway.ask() for _ in range(2)]
        assert {(a.status, a.body) for a in answers} == {(429, BODY)}
        await gateway.idle()
        assert await gateway.metric("tokenpipe_requests_total", outcome="upstream_status") == 2
        assert {b["in_flight"] for b in await states(gateway)} == {0}


async def test_a_body_that_is_not_kept_passes_once(start_gateway: Start) -> None:
    """What was streamed cannot be sent again."""
    async with fleet(2, refuse()) as backends:
        gateway = await start_gateway(config=FULL, backends=urls(backends))
        body = b"x" * 2_000_000
        client = await gateway.connect()
        request = s.post(body, path="/v1/audio/transcriptions").replace(b"application/json", b"audio/wav")
        await client.send(request)
        assert (await client.read_response()).status == 429
        client.fin()
        assert sum(len(b.requests) for b in backends) == 1


async def test_a_client_that_leaves_in_the_pause(start_gateway: Start) -> None:
    """It may leave at any moment between the two: nothing is left of it."""
    async with fleet(2, refuse()) as backends:
        gateway = await start_gateway(config=FULL, backends=urls(backends))
        for number in range(8):
            client = await gateway.connect()
            before = sum(len(b.requests) for b in backends)
            await client.send(s.post())
            await until(lambda: sum(len(b.requests) for b in backends) > before, "the first attempt")  # noqa: B023
            await asyncio.sleep(number * 0.01)
            client.reset()
        await gateway.idle()
        assert {b["in_flight"] for b in await states(gateway)} == {0}


def late(script: s.Script) -> s.Script:
    async def answers(wire: HttpWire, request: Message) -> None:
        await asyncio.sleep(0.3)
        await script(wire, request)

    return answers


async def penalties(gateway: Gateway) -> list[float]:
    return [b["penalty"] for b in await states(gateway)]


@pytest.mark.parametrize("status", [429, 503])
@pytest.mark.parametrize("hedged", [False, True])
async def test_an_answer_that_is_put_off_counts_once(start_gateway: Start, status: int, hedged: bool) -> None:
    """Whether or not it is the client's in the end: one failure is a penalty of one request, and two would be one of three."""
    async with fleet(2, refuse(status, "0")) as backends:
        rule = {"models": {"m": {"hedge": {"after": 0.05, "unstreamed": 0.05}}}} if hedged else {}
        gateway = await start_gateway(config=FULL | rule, backends=urls(backends))
        await reached(gateway, 2, health="up")
        if hedged:
            backends[0].script = backends[1].script = late(refuse(status, "0"))
        else:
            backends[1].close_listener()
        answer = await gateway.ask()
        assert (answer.status, answer.body) == (status, BODY)
        await gateway.idle()
        found = await penalties(gateway)
        assert 0.25 < found[0] <= 1 and (0.25 < found[1] <= 1 if hedged else True), found
        assert {b["in_flight"] for b in await states(gateway)} == {0}
