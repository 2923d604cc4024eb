"""Encoders before prefill: each medium once, all of them well, and nothing asked of prefill where one is not."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.support import script as s
from tests.support.disagg import Start
from tests.support.gateway import Gateway, until
from tests.support.messages import HttpWire, Message
from tests.support.pairs import OUTPUT, at_rest, config, engines
from tests.support.upstream import RawUpstream


def image(name: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"http://pictures/{name}"}}


CONTENT = [{"type": "text", "text": "which?"}, image("a"), image("b"), image("a")]
BODY = {"model": "m", "messages": [{"role": "user", "content": CONTENT}], "stream": True}


async def encoded(wire: HttpWire, request: Message) -> None:
    (part,) = request.json()["messages"][0]["content"]
    await s.reply(200, {"choices": [], "ec_transfer_params": {part["image_url"]["url"]: {"peer_port": 1}}})(wire, request)


@contextlib.asynccontextmanager
async def encoders(count: int = 1) -> AsyncIterator[list[RawUpstream]]:
    found = [RawUpstream(encoded) for _ in range(count)]
    async with contextlib.AsyncExitStack() as stack:
        for one in found:
            await one.start()
            stack.push_async_callback(one.stop)
        yield found


def beside(text: str, es: list[Any], **more: Any) -> str:
    said = json.loads(text)
    said["backends"] += [{"url": getattr(e, "url", e), "role": "encode", **more} for e in es]
    return json.dumps(said)


async def test_each_medium_once(start_gateway: Start) -> None:
    async with engines() as ((p,), (d,), ledger), encoders(2) as es:
        gateway = await start_gateway(config=beside(config([p], [d]), es, max_in_flight=1))
        answer = await gateway.ask(s.post(BODY))
        assert (answer.status, answer.body) == (200, b"".join(OUTPUT))
        asked = [request for e in es for request in e.requests]
        assert sorted(r.json()["messages"][0]["content"][0]["image_url"]["url"][-1] for r in asked) == ["a", "b"]
        assert all((r.json()["max_tokens"], r.json()["stream"]) == (1, False) for r in asked)
        attempt = p.requests[0].get("x-request-id")
        assert {(r.get("x-request-id") or "").split(":")[0] for r in asked} == {attempt}
        assert p.requests[0].json()["ec_transfer_params"].keys() == {"http://pictures/a", "http://pictures/b"}
        assert "ec_transfer_params" not in d.requests[0].json()
        text = await gateway.ask(s.post({**BODY, "messages": [{"role": "user", "content": "hi"}]}))
        assert text.status == 200 and sum(len(e.requests) for e in es) == 2
        await at_rest(gateway, ledger, p, d, *es)
        assert await gateway.metric("tokenpipe_pd_encode_seconds_count") == 1


@pytest.mark.parametrize("status", [400, 500])
async def test_an_encoders_refusal(start_gateway: Start, status: int) -> None:
    """It is the client's answer, and prefill is not asked."""
    async with engines() as ((p,), (d,), ledger), encoders() as (e,):
        e.script = s.reply(status, b'{"error": "mine"}', [("content-type", "application/json")])
        gateway = await start_gateway(config=beside(config([p], [d]), [e]))
        answer = await gateway.ask(s.post(BODY))
        assert (answer.status, answer.body) == (status, b'{"error": "mine"}')
        assert not p.requests and not d.requests
        await at_rest(gateway, ledger, p, d, e)


FALSE: dict[str, Any] = {
    "an error": s.reply(200, {"error": {"message": "boom", "type": "InternalServerError", "code": 500}}),
    "aborted": s.reply(200, {"choices": [{"finish_reason": "abort"}]}),
    "a page": s.reply(200, b"<html>"),
    "nothing": s.reply(200, b""),
    "not to be read": s.reply(200, b'{"x": NaN, "ec_transfer_params": {"a"}}'),
    "another status": s.reply(206, {"choices": [], "ec_transfer_params": {"a": 1}}),
    "no content": s.raw(s.head(204)),
    "elsewhere": s.reply(307, b"", [("location", "http://evil/")]),
}


@pytest.mark.parametrize("others", [0, 1])
async def test_what_is_no_answer_of_an_encoders(start_gateway: Start, others: int) -> None:
    """It is not the client's, and prefill is not asked; another encoder is, where there is one."""
    async with engines() as ((p,), (d,), ledger), encoders(1 + others) as es:
        gateway = await start_gateway(config=beside(config([p], [d], retry={"budget": 1.0}), es))
        for what, script in FALSE.items():
            es[0].script, before = script, [len(one.requests) for one in (p, d, es[0])]
            answer = await gateway.ask(s.post(BODY))
            if others:
                assert (answer.status, answer.body) == (200, b"".join(OUTPUT)), what
            else:
                assert (answer.status, answer.get("x-gateway-error")) == (502, "pd_handoff_missing"), (what, answer.body)
                assert f"the encoder 127.0.0.1:{es[0].port}" in answer.json()["error"]["message"]
                assert [len(p.requests), len(d.requests)] == before[:2]
            assert len(es[0].requests) > before[2]
            await at_rest(gateway, ledger, p, d, *es)


async def test_an_encoders_refusal_inside_a_200(start_gateway: Start) -> None:
    async with engines() as ((p,), (d,), ledger), encoders(2) as es:
        unknown = {"error": {"message": "no such picture", "type": "BadRequestError", "code": 400}}
        for e in es:
            e.script = s.reply(200, unknown)
        gateway = await start_gateway(config=beside(config([p], [d]), es))
        answer = await gateway.ask(s.post(BODY))
        assert (answer.status, answer.json()) == (400, unknown)
        assert not p.requests and sum(len(e.requests) for e in es) == 2
        await at_rest(gateway, ledger, p, d, *es)


async def test_another_encoder_and_none(start_gateway: Start) -> None:
    async with engines() as ((p,), (d,), ledger), encoders() as (e,):
        gateway = await start_gateway(config=beside(config([p], [d]), ["http://127.0.0.1:9", e]))
        assert (await gateway.ask(s.post(BODY))).body == b"".join(OUTPUT)
        alone = await start_gateway(config=beside(config([p], [d]), ["http://127.0.0.1:9"]))
        answer = await alone.ask(s.post(BODY))
        assert (answer.status, answer.get("x-gateway-error")) == (503, "no_backend")
        assert "the encode leg" in answer.json()["error"]["message"]
        await at_rest(gateway, ledger, p, d, e)


async def test_before_one_backend(start_gateway: Start) -> None:
    async with engines() as ((p,), (both,), ledger), encoders() as (e,):
        both.script = s.stream(*OUTPUT)
        gateway = await start_gateway(config=beside(config([], [], [both]), [e]))
        assert (await gateway.ask(s.post(BODY))).body == b"".join(OUTPUT)
        assert both.requests[0].json()["ec_transfer_params"].keys() == {"http://pictures/a", "http://pictures/b"}
        assert len(e.requests) == 2 and not p.requests
        await at_rest(gateway, ledger, both, e)


async def test_the_client_leaves(start_gateway: Start) -> None:
    async with engines() as ((p,), (d,), ledger), encoders() as (e,):
        closed = asyncio.Event()

        async def silent(wire: HttpWire, request: Message) -> None:
            await wire.wait_closed(timeout=10)
            closed.set()

        e.script = silent
        gateway = await start_gateway(config=beside(config([p], [d]), [e]))
        client = await gateway.connect()
        await client.send(s.post(BODY))
        await until(lambda: len(e.requests) == 2, "both legs")
        client.reset()
        await until(closed.is_set, "their end")
        await at_rest(gateway, ledger, p, d, e)
        assert not p.requests
        assert await gateway.metric("tokenpipe_pd_aborts_total", phase="encode") == 1


TEXT = {**BODY, "messages": [{"role": "user", "content": "hi"}]}


async def depth(gateway: Gateway, count: int) -> None:
    async with asyncio.timeout(5):
        while await gateway.metric("tokenpipe_queue_depth") != count:
            await asyncio.sleep(0.02)


class Slow:
    """An encoder that answers when it is let, and says how many it had at once."""

    def __init__(self) -> None:
        self.go_on = asyncio.Event()
        self.running = self.most = 0

    async def __call__(self, wire: HttpWire, request: Message) -> None:
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await self.go_on.wait()
            await encoded(wire, request)
        finally:
            self.running -= 1


@pytest.mark.parametrize("alone", [False, True], ids=["a pair", "one backend"])
async def test_a_full_encoder_is_waited_for(start_gateway: Start, alone: bool) -> None:
    """By those that need it, one after the other, in the queue; nobody else waits, nor is anything held for them meanwhile."""
    async with engines() as ((p,), (d,), ledger), encoders() as (e,):
        e.script = slow = Slow()
        if alone:
            d.script = s.stream(*OUTPUT)
        said = json.loads(beside(config([], [], [d]) if alone else config([p], [d]), [e], max_in_flight=1))
        said["backends"][0]["max_in_flight"] = 2
        gateway = await start_gateway(config=json.dumps(said))
        first = asyncio.ensure_future(gateway.ask(s.post(BODY)))
        await e.wait_requests(1)
        others = [asyncio.ensure_future(gateway.ask(s.post(BODY))) for _ in range(4)]
        leaving = await gateway.connect()
        await leaving.send(s.post(BODY))
        await depth(gateway, 5)
        for _ in range(3):
            assert (await gateway.ask(s.post(TEXT))).body == b"".join(OUTPUT)
        leaving.reset()
        await depth(gateway, 4)
        assert len(e.requests) == 1
        slow.go_on.set()
        assert [(await one).body for one in (first, *others)] == [b"".join(OUTPUT)] * 5
        assert (len(e.requests), slow.most) == (10, 1)  # two media each
        await at_rest(gateway, ledger, p, d, e)
        assert await gateway.metric("tokenpipe_queue_depth") == 0
        assert await gateway.metric("tokenpipe_requests_total", outcome="complete") == 8


async def test_the_queues_own_limits(start_gateway: Start) -> None:
    """How many wait for an encoder, and how long."""
    async with engines() as ((p,), (d,), ledger), encoders() as (e,):
        e.script = slow = Slow()
        more = {"timeouts": {"queue": 0.3}, "limits": {"queue": 1}}
        gateway = await start_gateway(config=beside(config([p], [d], **more), [e], max_in_flight=1))
        first = asyncio.ensure_future(gateway.ask(s.post(BODY)))
        await e.wait_requests(1)
        waits = asyncio.ensure_future(gateway.ask(s.post(BODY)))
        await depth(gateway, 1)
        refused = await gateway.ask(s.post(BODY))
        assert (refused.get("x-gateway-error"), refused.get("retry-after") is not None) == ("queue_full", True)
        assert (await waits).get("x-gateway-error") == "queue_timeout"
        slow.go_on.set()
        assert (await first).body == b"".join(OUTPUT)
        await at_rest(gateway, ledger, p, d, e)


@pytest.mark.parametrize("alone", [False, True], ids=["a pair", "one backend"])
@pytest.mark.parametrize("comes_free", [True, False])
async def test_a_second_try_waits_for_an_encoder(start_gateway: Start, comes_free: bool, alone: bool) -> None:
    """As it would for its first one; where that is in vain, the client gets the answer that there was."""
    async with engines() as ((p,), (d,), ledger), encoders(2) as es:
        slow = Slow()
        es[0].script = es[1].script = slow
        if alone:
            d.script = s.stream(*OUTPUT)
        timeouts = {"queue": 10 if comes_free else 0.3}
        text = config([], [], [d], timeouts=timeouts) if alone else config([p], [d], timeouts=timeouts)
        gateway = await start_gateway(config=beside(text, es, max_in_flight=1))
        one = {**BODY, "messages": [{"role": "user", "content": [image("a")]}]}
        first = asyncio.ensure_future(gateway.ask(s.post(one)))
        await until(lambda: any(e.requests for e in es), "one of them busy")
        (failing,) = (e for e in es if not e.requests)
        failing.script = s.reply(500, {"error": {"message": "of the encoder"}})
        second = asyncio.ensure_future(gateway.ask(s.post(one)))
        if comes_free:
            await depth(gateway, 1)
            slow.go_on.set()
            assert (await second).body == b"".join(OUTPUT)
        else:
            answer = await second
            assert (answer.status, answer.json()) == (500, {"error": {"message": "of the encoder"}})
            slow.go_on.set()
        assert (await first).body == b"".join(OUTPUT)
        await at_rest(gateway, ledger, p, d, *es)


@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_an_encoder_is_not_kept_where_there_is_nobody_else(start_gateway: Start, side: str) -> None:
    async with engines() as ((p,), (d,), ledger), encoders() as (e,):
        gateway = await start_gateway(config=beside(config([p], [d]), [e]))
        gone = f"127.0.0.1:{(p if side == 'prefill' else d).port}"
        await gateway.admin(s.post({"type": side, "instances": gone}, "/instances/remove"))
        answer = await gateway.ask(s.post(BODY))
        assert (answer.status, answer.get("x-gateway-error")) == (503, "no_backend")
        await at_rest(gateway, ledger, p, d, e)
        assert not e.requests


async def test_one_medium_fails_as_another_is_done(start_gateway: Start) -> None:
    """In one moment, while a third one waits for either's encoder: all is given back."""
    async with engines() as ((p,), (d,), ledger), encoders() as (e,):
        attempts: dict[str, list[HttpWire]] = {}

        async def both(wire: HttpWire, request: Message) -> None:
            together = attempts.setdefault((request.get("x-request-id") or "").split(":")[0], [])
            together.append(wire)
            if len(together) == 2:
                answers = (s.JSON_TYPE, ("content-length", "2"))
                await together[0].send(s.head(200, answers) + b"{}")
                await together[1].send(s.head(400, answers) + b"{}")

        e.script = both
        gateway = await start_gateway(config=beside(config([p], [d]), [e], max_in_flight=2))
        content = [image(name) for name in "abc"]
        for _ in range(20):
            answer = await gateway.ask(s.post({**BODY, "messages": [{"role": "user", "content": content}]}))
            assert (answer.status, answer.body) == (400, b"{}")
        await at_rest(gateway, ledger, p, d, e)
        assert not p.requests
