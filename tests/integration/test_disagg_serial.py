"""Disaggregated prefill and decode, one leg after the other: the bytes, the errors, second attempts, balancing."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tests.integration.test_fleet import refusing, states
from tests.support import script as s
from tests.support.gateway import Gateway, until
from tests.support.messages import HttpWire, Message
from tests.support.pairs import NULLS, OUTPUT, at_rest, config, decode, engines, prefill

Start = Callable[..., Awaitable[Gateway]]
LONG = b'{ "model": "m", "messages": [{"role":"user","content":"hi"}], "stream":true, "seed": 9007199254740993, "x": 1e-5 }'


async def test_two_legs(start_gateway: Start) -> None:
    """Prefill computes one token; decode gets the client's own bytes and what prefill said, whole; the client its stream."""
    async with engines() as ((p,), (d,), ledger):
        gateway = await start_gateway(config=config([p], [d]))
        answer = await gateway.ask(
            s.post(LONG, fields=[("X-Request-Id", "mine"), ("X-Prefiller-Host-Port", "evil:1"), ("Accept-Encoding", "gzip"),
                                 ("X-Data-Parallel-Rank", "3"), ("Authorization", "Bearer k")])
        )  # fmt: skip
        assert (answer.status, answer.body) == (200, b"".join(OUTPUT))
        assert answer.get("content-type") == "text/event-stream; charset=utf-8"
        assert answer.get("x-request-id") == "mine"
        (to_p,), (to_d,) = p.requests, d.requests
        assert to_p.json() == {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": False,
                               "seed": 9007199254740993, "x": 1e-5, "max_tokens": 1, "max_completion_tokens": 1, "n": 1,
                               "kv_transfer_params": NULLS}  # fmt: skip
        params = to_d.json()["kv_transfer_params"]
        assert params["odd_key"] == [1, {"a": 2**60}]
        assert to_d.body.startswith(LONG[:-2]) and {"stream", "seed", "x", "model", "messages"} < to_d.json().keys()
        attempt = to_p.get("x-request-id")
        assert attempt is not None and len(attempt) == 32
        assert to_d.get("x-request-id") == attempt
        for request in (to_p, to_d):
            assert request.get("authorization") == "Bearer k"
            assert request.get("x-prefiller-host-port") is None
            assert request.get("x-data-parallel-rank") is None
        assert (to_p.get("accept-encoding"), to_d.get("accept-encoding")) == (None, "gzip")
        await at_rest(gateway, ledger, p, d)
        (entry,) = await gateway.logged(request_id="mine")
        assert (entry["backend"], entry["prefill_backend"]) == (f"127.0.0.1:{d.port}", f"127.0.0.1:{p.port}")
        assert ledger.unknown == 0


async def test_an_answer_in_one_piece(start_gateway: Start) -> None:
    async with engines() as ((p,), (d,), ledger):
        gateway = await start_gateway(config=config([p], [d]))
        body = {"model": "m", "prompt": "p" * 3_000_000, "min_tokens": 4}
        answer = await gateway.ask(s.post(body, "/v1/completions"))
        assert (answer.status, answer.get("content-type")) == (200, "application/json")
        assert p.requests[0].json()["max_tokens"] == 1
        assert "max_tokens" not in d.requests[0].json()
        assert d.requests[0].json()["prompt"] == body["prompt"]
        await at_rest(gateway, ledger, p, d)


@pytest.mark.parametrize(
    "body, more, reason",
    [
        ({"model": "m", "prompt": "p", "max_tokens": 1}, {}, "one_token"),
        ({"model": "m", "prompt": "p"}, {"disaggregation": {"min_prompt_bytes": 4000}}, "short"),
        ({"model": "m", "prompt": ["p", "q"]}, {}, "prompts"),
    ],
)
async def test_bypass(start_gateway: Start, body: dict[str, Any], more: dict[str, Any], reason: str) -> None:
    """By choice one backend serves it: in the client's own bytes, and counted as such."""
    async with engines() as ((p,), (d,), ledger):
        gateway = await start_gateway(config=config([p], [d], **more))
        assert (await gateway.ask(s.post(body, "/v1/completions"))).status == 200
        assert not p.requests
        assert d.requests[0].json() == body
        assert await gateway.metric("tokenpipe_pd_bypass_total", reason=reason) == 1
        assert not (await gateway.metrics()).has("tokenpipe_pd_fallback_total")
        ledger.unknown = 0
        await at_rest(gateway, ledger, p, d)


async def test_beside_ordinary_backends(start_gateway: Start) -> None:
    """They serve what is not disaggregated, and everything while there is no pair."""
    async with engines(1, 2) as ((p,), (d, both), ledger):
        both.script = s.stream(*OUTPUT)
        gateway = await start_gateway(config=config([p], [d], [both]))
        assert (await gateway.ask()).status == 200
        assert (await gateway.ask(s.post({"input": "x"}, "/v1/embeddings"))).status == 200
        assert len(p.requests) == 1 and len(d.requests) + len(both.requests) == 2
        remove = s.post({"type": "prefill", "instances": f"127.0.0.1:{p.port}"}, "/instances/remove")
        assert (await gateway.admin(remove)).status == 200
        assert (await gateway.ask()).status == 200
        assert len(p.requests) == 1 and len(both.requests) >= 1
        assert await gateway.metric("tokenpipe_pd_bypass_total", reason="no_pair") == 1
        await at_rest(gateway, ledger, p, d)


async def test_models_of_their_own(start_gateway: Start) -> None:
    """One engine of a role is asked for what it serves, as one of several is; and what its connector cannot hand over is no
    matter to a model that has no pair."""
    async with engines(1, 2) as ((p,), (d, other), ledger):
        other.script = s.stream(*OUTPUT)
        for engine, name in ((p, "big"), (d, "big"), (other, "small")):
            engine.probes["/v1/models"] = s.reply(200, json.dumps({"data": [{"id": name}]}).encode())
        text = config([p], [d], [other])
        gateway = await start_gateway(config=text)

        async def known() -> bool:
            listed = (await gateway.admin(s.get("/-/backends"))).json()
            return all(backend["models_known"] for backend in listed)

        while not await known():
            pass
        for body in ({**s.CHAT, "model": "small"}, {**s.CHAT, "model": "small", "stream": False, "prompt_logprobs": 1}):
            assert (await gateway.ask(s.post(body))).status == 200
        assert (len(p.requests), len(d.requests), len(other.requests)) == (0, 0, 2)
        assert (await gateway.ask(s.post({**s.CHAT, "model": "big"}))).status == 200
        assert (len(p.requests), len(d.requests), len(other.requests)) == (1, 1, 2)
        assert await gateway.metric("tokenpipe_pd_bypass_total", reason="no_pair") == 2
        await at_rest(gateway, ledger, p, d)


@pytest.mark.parametrize("connector", ["p2p_nccl", "sglang"])
async def test_engines_that_serve_nothing_alone(start_gateway: Start, connector: str) -> None:
    """Whoever serves whole requests is waited for, where there is no pair: alone these would wait for ever, or die."""
    async with engines(0, 2) as (_, (d, both), ledger):
        both.script = held = s.Held(s.SSE_HEAD.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
        listed = [{"url": d.url, "role": "decode", "connector": {"kv_port": 1}}, {"url": both.url, "max_in_flight": 1}]
        text = config([], [], disaggregation={"connector": connector})
        gateway = await start_gateway(config=json.dumps({**json.loads(text), "backends": listed}))
        clients = [await gateway.connect() for _ in range(3)]
        for number, client in enumerate(clients):
            await client.send(s.post())
            await held.wire()
            while await gateway.metric("tokenpipe_queue_depth") < number:
                pass
        for number, client in enumerate(clients):
            wire = await held.wire(number)
            await wire.send(b"".join(map(s.chunk, s.FINISHED)) + s.LAST)
            assert (await client.read_response_head()).status == 200
            client.fin()
            wire.fin()
        assert not d.requests
        assert await gateway.metric("tokenpipe_pd_bypass_total", reason="no_pair") == 3
        await at_rest(gateway, ledger, d)


async def test_an_alias_falls_back_where_one_backend_serves_it(start_gateway: Start) -> None:
    """The next target gets its own name also where what was the first one's was changed: transfer members are not clients'."""
    async with engines(1, 2) as ((p,), (d, other), ledger):
        other.script = s.stream(*OUTPUT)
        with refusing() as gone:
            listed = [
                {"url": p.url, "role": "prefill", "models": ["far"]}, {"url": d.url, "role": "decode", "models": ["far"]},
                {"url": gone, "models": ["first"]}, {"url": other.url, "models": ["a-longer-name"]},
            ]  # fmt: skip
            targets = [{"model": "first"}, {"model": "a-longer-name", "fallback": True}]
            text = config([], [], models={"alias": {"route_to": targets}})
            gateway = await start_gateway(config=json.dumps({**json.loads(text), "backends": listed}))
            asked = {"cache_hit_threshold": 0.5, "model": "alias", "messages": [], "stream": True}
            assert (await gateway.ask(s.post(asked))).status == 200
            assert other.requests[0].json() == {"model": "a-longer-name", "messages": [], "stream": True}
            assert await gateway.metric("tokenpipe_pd_bypass_total", reason="no_pair") == 1
        await at_rest(gateway, ledger, p, d)


@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_nobody_of_a_role(start_gateway: Start, side: str) -> None:
    """503, also where all of them drain; what is there is not asked in vain."""
    async with engines() as ((p,), (d,), ledger):
        gateway = await start_gateway(config=config([p], [d]))
        gone = p if side == "prefill" else d
        await gateway.admin(s.post({"type": side, "instances": f"127.0.0.1:{gone.port}"}, "/instances/remove"))
        answer = await gateway.ask()
        assert (answer.status, answer.get("x-gateway-error")) == (503, "no_backend")
        assert answer.get("retry-after") is not None
        assert f"the {side} leg" in answer.json()["error"]["message"]
        assert (await gateway.ask(s.get("/health"))).status == 503
        assert not p.requests and not d.requests
        await at_rest(gateway, ledger, p, d)


# ---- errors of prefill


async def test_prefills_refusal_is_the_clients(start_gateway: Start) -> None:
    """A 4xx in its own words: one call, and none to decode."""
    said = b'{"error": {"message": "too long", "code": 400}}'
    async with engines(2) as ((p, other), (d,), ledger):
        p.script = other.script = s.reply(400, said, [("content-type", "application/json; odd=1"), ("x-engine", "1")])
        gateway = await start_gateway(config=config([p, other], [d]))
        answer = await gateway.ask()
        assert (answer.status, answer.body) == (400, said)
        assert (answer.get("content-type"), answer.get("x-engine")) == ("application/json; odd=1", "1")
        assert (len(p.requests) + len(other.requests), len(d.requests)) == (1, 0)
        await at_rest(gateway, ledger, p, other, d)
        assert {b["breaker"] for b in await states(gateway)} == {"closed"}


@pytest.mark.parametrize("status", [429, 500])
async def test_another_prefill_after_an_error(start_gateway: Start, status: int) -> None:
    """Once, under a new id; where that one says the same, its words are the client's."""
    bad = s.reply(status, b'{"error": "mine"}', [("content-type", "application/json"), ("retry-after", "7")])
    async with engines(2) as (ps, (d,), ledger):
        for p in ps:
            p.script = s.in_turn(bad, prefill(ledger))
        gateway = await start_gateway(config=config(ps, [d], breaker={"failures": 1}))
        first = await gateway.ask()
        assert (first.status, first.get("retry-after"), first.body) == (status, "7", b'{"error": "mine"}')
        assert {b["breaker"] for b in await states(gateway)} == {"closed"}  # it is the request's fault
        assert [len(p.requests) for p in ps] == [1, 1]
        assert ps[0].requests[0].get("x-request-id") != ps[1].requests[0].get("x-request-id")
        assert not d.requests
        assert (await gateway.ask()).status == 200
        await at_rest(gateway, ledger, *ps, d)
        assert await gateway.metric("tokenpipe_retries_total", reason="prefill_status") == 1


@pytest.mark.parametrize("status", [500, 429])
async def test_17_19_the_other_prefill_serves(start_gateway: Start, status: int) -> None:
    """One more call, under a new id, and the client knows nothing of it. It counts against the one that failed, by its breaker,
    as another one did what it could not; who is full has done nothing wrong (deploy/health.md)."""
    async with engines(2) as ((bad, good), (d,), ledger):
        bad.script = s.reply(status, b"{}", [s.JSON_TYPE, ("retry-after", "0")])
        gateway = await start_gateway(config=config([bad, good], [d], breaker={"failures": 1}))
        asked = 0
        while not bad.requests:
            assert (await gateway.ask()).body == b"".join(OUTPUT)
            asked += 1
            assert (len(good.requests), len(d.requests)) == (asked, asked)
            assert asked < 10
        ids = [request.get("x-request-id") for p in (bad, good) for request in p.requests]
        assert len(set(ids)) == len(ids)
        assert [r.get("x-request-id") for r in d.requests] == [r.get("x-request-id") for r in good.requests]
        assert await gateway.metric("tokenpipe_retries_total", reason="prefill_status") == len(bad.requests)
        for _ in range(5):
            assert (await gateway.ask()).status == 200
        assert len(bad.requests) == 1
        found = {b["name"]: b["breaker"] for b in await states(gateway)}
        assert found.pop(f"127.0.0.1:{bad.port}") == ("open" if status == 500 else "closed")
        assert set(found.values()) == {"closed"}
        await at_rest(gateway, ledger, bad, good, d)


@pytest.mark.parametrize("how", ["refused", "reset", "incomplete", "nothing"])
async def test_another_prefill_after_a_failure(start_gateway: Start, how: str) -> None:
    """Decode never gets anything but what a prefill has handed over."""
    async with engines(2) as (ps, (d,), ledger):
        with refusing() as nowhere:
            incomplete = prefill(ledger, remote_host=None)
            scripts = {"reset": s.vanish, "incomplete": incomplete, "nothing": s.reply(200, b"{}")}
            bad = ps[0]
            bad.script = scripts.get(how, bad.script)
            gateway = await start_gateway(config=config([nowhere if how == "refused" else bad, ps[1]], [d]))
            for _ in range(2):
                answer = await gateway.ask()
                assert (answer.status, answer.body) == (200, b"".join(OUTPUT))
        assert len(d.requests) == 2
        for request in d.requests:
            assert request.json()["kv_transfer_params"]["remote_host"] == "127.0.0.1"
        ledger.held.clear()
        await at_rest(gateway, ledger, *ps, d)


@pytest.mark.parametrize(
    "how, status, code",
    [("refused", 503, "no_backend"), ("reset", 502, "upstream_reset"), ("nothing", 502, "pd_handoff_missing"),
     ("hang", 504, "timeout_first_byte")],
)  # fmt: skip
async def test_no_prefill_is_left(start_gateway: Start, how: str, status: int, code: str) -> None:
    async with engines() as ((p,), (d,), ledger):
        held = s.Held()
        p.script = {"reset": s.vanish, "nothing": s.reply(200, b'{"id": 1}'), "hang": held}.get(how, p.script)
        with refusing() as nowhere:
            text = config([nowhere if how == "refused" else p], [d], disaggregation={"prefill_timeout": 0.3})
            gateway = await start_gateway(config=text)
            answer = await gateway.ask()
        assert (answer.status, answer.get("x-gateway-error")) == (status, code)
        assert (answer.get("retry-after") is not None) == (status == 503)
        message = answer.json()["error"]["message"]
        assert "prefill" in message, message
        assert not d.requests
        if how == "hang":
            assert "disaggregation.prefill_timeout" in message
            await (await held.wire()).wait_closed(timeout=2)
        await at_rest(gateway, ledger, p, d)


async def test_local_decode(start_gateway: Start) -> None:
    """Where the operator allows it, decode computes the prompt: counted, and told to the client."""
    async with engines() as ((p,), (d,), ledger):
        p.script = s.reply(200, b'{"id": 1}')
        gateway = await start_gateway(config=config([p], [d], disaggregation={"local_decode_fallback": True}))
        answer = await gateway.ask()
        assert (answer.status, answer.get("x-gateway-prefill")) == (200, "local")
        assert d.requests[0].json() == s.CHAT
        assert await gateway.metric("tokenpipe_pd_fallback_total", reason="pd_handoff_missing") == 1
        p.script = s.reply(400, b"{}")  # which would be no better there
        assert (await gateway.ask()).status == 400
        assert len(d.requests) == 1
        p.script = prefill(ledger)
        assert (await gateway.ask()).get("x-gateway-prefill") is None
        await at_rest(gateway, ledger, p, d)


# ---- errors of decode


async def test_decodes_refusal_is_the_clients(start_gateway: Start) -> None:
    said = b'{"error": {"message": "no", "code": 422}}'
    async with engines() as ((p,), (d,), ledger):
        d.script = decode(ledger, s.reply(422, said))
        gateway = await start_gateway(config=config([p], [d]))
        answer = await gateway.ask()
        assert (answer.status, answer.body, answer.get("content-type")) == (422, said, "application/json")
        assert (len(p.requests), len(d.requests)) == (1, 1)
        await at_rest(gateway, ledger, p, d)


async def test_engines_that_do_not_tell_of_refusals(start_gateway: Start) -> None:
    """With a long hold what prefill keeps is fetched for nobody after decode's refusal."""
    async with engines() as ((p,), (d,), ledger):
        d.script = s.in_turn(s.reply(422, b"{}"), decode(ledger))
        gateway = await start_gateway(config=config([p], [d], disaggregation={"hold": 480}))
        assert (await gateway.ask()).status == 422
        await d.wait_requests(2)
        release = d.requests[1].json()
        assert (release["max_tokens"], release["stream"], release["messages"]) == (1, False, s.CHAT["messages"])
        await at_rest(gateway, ledger, p, d)
        assert not ledger.held and not ledger.unknown
        assert await gateway.metric("tokenpipe_pd_release_total", result="done") == 1


KV_FAILED = s.event({"error": {"message": "Internal server error", "type": "InternalServerError", "code": 500}})


@pytest.mark.parametrize("how", ["status", "reset", "kv"])
async def test_prefilled_anew_after_decodes_failure(start_gateway: Start, how: str) -> None:
    """What was handed over once is not handed over again."""
    async with engines() as ((p,), (d,), ledger):
        bad = {"status": s.reply(500, b"{}"), "reset": s.vanish, "kv": s.stream(KV_FAILED, s.DONE)}[how]
        d.script = s.in_turn(decode(ledger, bad), decode(ledger))
        gateway = await start_gateway(config=config([p], [d]))
        answer = await gateway.ask()
        assert (answer.status, answer.body) == (200, b"".join(OUTPUT))
        await until(lambda: ledger.unknown == 1, "a release leg, as nobody knows that the first one had been fetched")
        ledger.unknown = 0
        asked = [request.json() for request in d.requests]
        legs = [one["kv_transfer_params"]["remote_request_id"] for one in asked if one["stream"]]
        assert legs == [p.requests[0].get("x-request-id"), p.requests[1].get("x-request-id")] and len(set(legs)) == 2
        assert [one["max_tokens"] for one in asked if not one["stream"]] == [1]
        assert len(p.requests) == 2
        await at_rest(gateway, ledger, p, d)


@pytest.mark.parametrize("how, status, code", [("status", 500, None), ("kv", 502, "pd_transfer_failed")])
async def test_decode_fails_twice(start_gateway: Start, how: str, status: int, code: str | None) -> None:
    async with engines() as ((p,), (d,), ledger):
        d.script = decode(ledger, {"status": s.reply(500, b'{"e": 1}'), "kv": s.stream(KV_FAILED, s.DONE)}[how])
        gateway = await start_gateway(config=config([p], [d], disaggregation={"release": "never"}))
        answer = await gateway.ask()
        assert (answer.status, answer.get("x-gateway-error")) == (status, code)
        assert (len(p.requests), len(d.requests)) == (2, 2)
        await at_rest(gateway, ledger, p, d)


async def test_another_decode_that_takes_connections(start_gateway: Start) -> None:
    """Nothing has been sent: what prefill holds goes to the other one."""
    async with engines() as ((p,), (d,), ledger):
        with refusing() as nowhere:
            gateway = await start_gateway(config=config([p], [nowhere, d]))
            for _ in range(2):
                assert (await gateway.ask()).status == 200
        assert (len(p.requests), len(d.requests), ledger.unknown) == (2, 2, 0)
        await at_rest(gateway, ledger, p, d)
        assert not ledger.held


async def test_no_decode_takes_connections(start_gateway: Start) -> None:
    async with engines() as ((p,), _, ledger):
        with refusing() as nowhere:
            gateway = await start_gateway(config=config([p], [nowhere], disaggregation={"hold": 1}))
            answer = await gateway.ask()
        assert (answer.status, answer.get("x-gateway-error")) == (503, "no_backend")
        assert answer.get("retry-after") is not None
        assert answer.json()["error"]["message"].count("the decode leg") == 1
        await at_rest(gateway, ledger, p)
        assert await gateway.metric("tokenpipe_pd_stranded_total", connector="nixl") == len(ledger.held) == 1


async def test_decode_hangs(start_gateway: Start) -> None:
    async with engines() as ((p,), (d,), ledger):
        held = s.Held(s.SSE_HEAD)
        d.script = s.in_turn(held, decode(ledger))
        gateway = await start_gateway(config=config([p], [d], timeouts={"first_byte": 0.3}))
        answer = await gateway.ask()
        assert (answer.status, answer.get("x-gateway-error")) == (504, "timeout_first_byte")
        assert "the decode leg" in answer.json()["error"]["message"]
        await (await held.wire()).wait_closed(timeout=2)
        await at_rest(gateway, ledger, p, d)


async def test_a_first_error_is_relayed_or_a_status(start_gateway: Start) -> None:
    """One of the request, not of the transfer: as `commit` says."""
    error = s.event({"error": {"message": "boom", "type": "BadRequestError", "code": 400}})
    async with engines() as ((p,), (d,), ledger):
        d.script = decode(ledger, s.stream(error, s.DONE))
        for commit, status, body in (("head", 200, error + s.DONE), ("first_event", 400, None)):
            gateway = await start_gateway(config=config([p], [d], commit=commit))
            answer = await gateway.ask()
            assert answer.status == status
            assert body is None or answer.body == body
            await at_rest(gateway, ledger, p, d)


@pytest.mark.parametrize("how", ["reset", "fin"])
async def test_29_decode_dies_mid_stream(start_gateway: Start, how: str) -> None:
    """The client can tell: no proper end; and it is counted."""
    async with engines() as ((p,), (d,), ledger):
        d.script = decode(ledger, s.raw(s.SSE_HEAD + s.chunk(OUTPUT[0]), then=how))
        gateway = await start_gateway(config=config([p], [d]))
        client = await gateway.connect()
        await client.send(s.post())
        await client.wait_closed()
        client.fin()
        assert client.pending.endswith(s.chunk(OUTPUT[0]))  # the last chunk would be a proper end
        assert b"[DONE]" not in client.pending
        assert (await gateway.logged())[0]["outcome"] == "upstream_reset"
        assert await gateway.metric("tokenpipe_requests_total", outcome="upstream_reset") == 1
        assert (len(p.requests), len(d.requests)) == (1, 1)
        await at_rest(gateway, ledger, p, d)


async def test_28_a_transfer_that_fails_within_the_stream(start_gateway: Start) -> None:
    """Once something has passed there is no other attempt: the error is the client's to see, octet for octet, and counted."""
    async with engines() as ((p,), (d,), ledger):
        d.script = decode(ledger, s.stream(OUTPUT[0], KV_FAILED, s.DONE))
        gateway = await start_gateway(config=config([p], [d]))
        answer = await gateway.ask()
        assert (answer.status, answer.body) == (200, OUTPUT[0] + KV_FAILED + s.DONE)
        assert (len(p.requests), len(d.requests)) == (1, 1)
        assert (await gateway.logged())[0]["outcome"] == "stream_error"
        await at_rest(gateway, ledger, p, d)


# ---- balancing, membership, times


async def test_ties_are_fair(start_gateway: Start) -> None:
    async with engines(4, 4) as (ps, ds, ledger):
        gateway = await start_gateway(config=config(ps, ds))
        client = await gateway.connect()
        for _ in range(200):
            assert (await client.ask()).status == 200
        client.fin()
        for engine in (*ps, *ds):
            assert abs(len(engine.requests) - 50) <= 10
        await at_rest(gateway, ledger, *ps, *ds)


async def test_a_prefill_engine_stays_until_its_kv_is_fetched(start_gateway: Start) -> None:
    async with engines(2) as ((p, other), (d,), ledger):
        go_on = asyncio.Event()

        async def slow(wire: HttpWire, request: Message) -> None:
            await wire.send(s.SSE_HEAD)
            await go_on.wait()
            await decode(ledger, s.raw(b"".join(map(s.chunk, OUTPUT)) + s.LAST))(wire, request)

        d.script = slow
        gateway = await start_gateway(config=config([p, other], [d]))
        client = await gateway.connect()
        await client.send(s.post())
        await d.wait_requests()
        used = p if p.requests else other
        name = f"127.0.0.1:{used.port}"
        await gateway.admin(s.post({"type": "prefill", "instances": name}, "/instances/remove"))
        assert {b["name"]: b["state"] for b in await states(gateway)}[name] == "draining"
        go_on.set()
        assert (await client.read_response()).status == 200
        assert name not in [b["name"] for b in await states(gateway)]
        client.fin()
        await at_rest(gateway, ledger, p, other, d)


async def test_the_parts_of_the_time_to_the_first_token(start_gateway: Start) -> None:
    async with engines() as ((p,), (d,), ledger):
        p.script, d.script = prefill(ledger, seconds=0.2), decode(ledger, seconds=0.15)
        gateway = await start_gateway(config=config([p], [d]))
        assert (await gateway.ask()).status == 200
        await gateway.idle()
        samples = await gateway.metrics()
        parts = [samples.value(f"tokenpipe_{name}_seconds_sum", **labels)
                 for name, labels in (("queue", {}), ("pd_prefill", {"model": "m", "connector": "nixl"}),
                                      ("pd_handoff", {}), ("pd_decode_first_byte", {}))]  # fmt: skip
        assert parts[1] >= 0.2 and parts[3] >= 0.15 and parts[2] < 0.1
        assert abs(sum(parts) - samples.value("tokenpipe_time_to_first_token_seconds_sum")) < 0.05
        await at_rest(gateway, ledger, p, d)


async def test_what_is_in_flight_names_both_engines(start_gateway: Start) -> None:
    """Whoever looks for the engine that hangs needs the one that hangs."""
    async with engines() as ((p,), (d,), ledger):
        p.script = held = s.Held()
        gateway = await start_gateway(config=config([p], [d]))
        client = await gateway.connect()
        await client.send(s.post())
        await held.wire()
        (stream,) = (await gateway.admin(s.get("/-/streams"))).json()
        assert (stream["backend"], stream["prefill_backend"]) == (f"127.0.0.1:{d.port}", f"127.0.0.1:{p.port}")
        assert stream["phase"] == "prefill"
        client.reset()
        await at_rest(gateway, ledger, p, d)
