"""Prefill, decode and encode backends that say that they are full: as with any other backend, somebody else is asked, and they
are left in peace for as long as they say."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator

import pytest

from tests.integration.disagg.test_encoders import encoders, image
from tests.integration.test_fleet import states
from tests.integration.test_full import refuse
from tests.support import script as s
from tests.support.disagg import Start
from tests.support.gateway import Gateway
from tests.support.messages import HttpWire, Message
from tests.support.pairs import OUTPUT, Ledger, at_rest, config, engines
from tests.support.upstream import RawUpstream

SIDES = ["prefill", "decode", "encode"]
FULL = b'{"error": {"message": "full"}}'
PICTURE = {"model": "m", "messages": [{"role": "user", "content": [image("a")]}], "stream": True}


def asked(backend: RawUpstream, side: str) -> int:
    """But for what has decode free what prefill holds, which is no stream."""
    return sum(request.json()["stream"] or side != "decode" for request in backend.requests)


@contextlib.asynccontextmanager
async def two_of(side: str) -> AsyncIterator[tuple[list[RawUpstream], list[RawUpstream], str, Ledger]]:
    """Two backends of that side, all backends, and the configuration; one of each other side."""
    async with engines(1 + (side == "prefill"), 1 + (side == "decode")) as (ps, ds, ledger), encoders(2) as es:
        es = es if side == "encode" else es[:1]
        given = json.loads(config(ps, ds, disaggregation={"hold": 1, "release_timeout": 1}, balance="round_robin"))
        given["backends"] += [{"url": e.url, "role": "encode"} for e in es]
        given["health"]["slow_start"] = 0
        yield {"prefill": ps, "decode": ds, "encode": es}[side], [*ps, *ds, *es], json.dumps(given), ledger


async def of(gateway: Gateway, backend: RawUpstream) -> tuple[str, float]:
    (found,) = [b for b in await states(gateway) if b["url"] == backend.url]
    return found["state"], found["penalty"]


@pytest.mark.parametrize("status", [429, 503])
@pytest.mark.parametrize("side", SIDES)
async def test_one_that_is_full_rests(start_gateway: Start, side: str, status: int) -> None:
    """No client sees it, and for the time of its Retry-After it is not asked again, although it is its turn."""
    async with two_of(side) as (them, everyone, text, ledger):
        them[0].script = refuse(status, "20")
        gateway = await start_gateway(config=text)
        for _ in range(4):
            answer = await gateway.ask(s.post(PICTURE))
            assert (answer.status, answer.body) == (200, b"".join(OUTPUT))
        assert asked(them[0], side) == 1
        assert (await of(gateway, them[0]))[0] == "busy"
        await at_rest(gateway, ledger, *everyone)


@pytest.mark.parametrize("side", SIDES)
async def test_all_are_full(start_gateway: Start, side: str) -> None:
    """The last one's own answer, which counts once against it. The next request finds all at rest: one is asked all the same,
    and nobody else after it."""
    async with two_of(side) as (them, everyone, text, ledger):
        for one in them:
            one.script = refuse(429, "20")
        gateway = await start_gateway(config=text)
        answer = await gateway.ask(s.post(PICTURE))
        assert (answer.status, answer.body, answer.get("retry-after")) == (429, FULL, "20")
        await gateway.idle()
        assert [asked(one, side) for one in them] == [1, 1]
        found = [await of(gateway, one) for one in them]
        assert all(state == "busy" and 0.25 < penalty <= 1 for state, penalty in found), found
        assert await gateway.metric("tokenpipe_retries_total") == 1
        answer = await gateway.ask(s.post(PICTURE))
        assert (answer.status, answer.body) == (429, FULL)
        assert await gateway.metric("tokenpipe_retries_total") == 1
        await at_rest(gateway, ledger, *everyone)


async def test_a_stream_that_begins_with_an_error_counts(start_gateway: Start) -> None:
    """As one of any other backend: a penalty, no failure."""
    async with engines() as ((p,), (d,), ledger):
        error = s.event({"error": {"message": "boom", "type": "E", "param": None, "code": 503}})

        async def broken(wire: HttpWire, request: Message) -> None:
            ledger.fetch(request)
            await s.stream(error, s.DONE)(wire, request)

        d.script = broken
        gateway = await start_gateway(config=config([p], [d], commit="first_event"))
        assert (await gateway.ask()).status == 503
        state, penalty = await of(gateway, d)
        assert 0.25 < penalty <= 1 and state != "ejected"
        assert await gateway.metric("tokenpipe_backend_failures_total") == 0
        await at_rest(gateway, ledger, p, d)
