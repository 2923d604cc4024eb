"""What each engine is sent, by the acceptance cases of request shaping: each saw each field at most as specified (I6)."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support import script as s
from tests.support.disagg import Start
from tests.support.pairs import NULLS, OUTPUT, at_rest, config, decode, engines

CHAT = {"model": "m", "messages": [{"role": "user", "content": "x" * 400}], "stream": True}
LIMITS = ("max_tokens", "max_completion_tokens", "min_tokens", "n", "stream", "stream_options")


def limits(body: dict[str, Any]) -> dict[str, Any]:
    return {name: body[name] for name in LIMITS if name in body}


CASES = {  # what the client sends; what prefill sees of it; decode sees what the client sent
    "1 max and min": ({"max_tokens": 500, "min_tokens": 20}, {"max_tokens": 1, "max_completion_tokens": 1}),
    "2 max_completion_tokens": ({"max_completion_tokens": 300}, {"max_tokens": 1, "max_completion_tokens": 1}),
    "3 no limit": ({}, {"max_tokens": 1, "max_completion_tokens": 1}),
    "6 usage": ({"stream_options": {"include_usage": True}}, {"max_tokens": 1, "max_completion_tokens": 1}),
    "7 n": ({"n": 4}, {"max_tokens": 1, "max_completion_tokens": 1}),
}


COUNTS = s.event({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}})


@pytest.mark.parametrize("connector, least", [("nixl", {}), ("mooncake_ascend", {"min_tokens": 1})])
@pytest.mark.parametrize("case", CASES)
async def test_limits(start_gateway: Start, case: str, connector: str, least: dict[str, int]) -> None:
    """What decode answers, the last usage too, is the client's."""
    asked, seen = CASES[case]
    async with engines() as ((p,), (d,), ledger):
        sent = (*OUTPUT[:-1], COUNTS, OUTPUT[-1])
        d.script = decode(ledger, s.stream(*sent))
        gateway = await start_gateway(config=config([p], [d], disaggregation={"connector": connector}))
        answer = await gateway.ask(s.post({**CHAT, **asked}))
        assert (answer.status, answer.body) == (200, b"".join(sent))
        first, second = json.loads(p.requests[0].body), json.loads(d.requests[0].body)
        told = limits(first)
        assert told.pop("n", 1) == 1
        assert told == {"stream": False, **seen, **least}
        assert limits(second) == {"stream": True, **asked}
        assert first["kv_transfer_params"] == NULLS
        params = second.pop("kv_transfer_params")
        assert params["remote_request_id"] and params["odd_key"] == [1, {"a": 2**60}]
        assert second == {**CHAT, **asked}
        assert len(p.requests) == len(d.requests) == 1
        await at_rest(gateway, ledger, p, d)
        assert not ledger.held


async def test_one_token_is_decodes_own(start_gateway: Start) -> None:
    """4: nothing is gained by a prefill elsewhere; decode is asked for the one token."""
    async with engines() as ((p,), (d,), ledger):
        gateway = await start_gateway(config=config([p], [d]))
        assert (await gateway.ask(s.post({**CHAT, "max_tokens": 1}))).status == 200
        assert json.loads(d.requests[0].body) == {**CHAT, "max_tokens": 1}
        assert not p.requests
        await at_rest(gateway, ledger, p, d)


async def test_what_is_the_gateways_own(start_gateway: Start) -> None:
    """10 and 11: a client's own transfer fields go nowhere, wherever they stand."""
    kv = {"tp_size": 10**9, "remote_host": "10.9.9.9"}
    own = {"kv_transfer_params": kv, "bootstrap_room": 5, "ec_transfer_params": {"a": 1}}
    fields = [("x-prefiller-host-port", "10.9.9.9:1"), ("X-Data-Parallel-Rank", "3"), ("X-Request-Id", "mine")]
    strip = dict.fromkeys(own, "strip")
    async with engines() as ((p,), (d,), ledger):
        gateway = await start_gateway(config=config([p], [d], fields=strip))
        answer = await gateway.ask(s.post({**CHAT, **own}, fields=fields))
        assert answer.status == 200 and answer.get("x-request-id") == "mine"
        (first,), (second,) = p.requests, d.requests
        for request in (first, second):
            body = json.loads(request.body)
            assert b"10.9.9.9" not in request.body and "bootstrap_room" not in body and "ec_transfer_params" not in body
            assert request.get("x-prefiller-host-port") is None and request.get("x-data-parallel-rank") is None
            assert "mine" not in (request.get("x-request-id") or "")
        assert first.get("x-request-id") == second.get("x-request-id")
        await at_rest(gateway, ledger, p, d)
        plain = await start_gateway(config=config([p], [d]))
        for name, value in own.items():  # without a rule of the operator's they are refused, and no engine is asked
            refused = await plain.ask(s.post({**CHAT, name: value}))
            assert (refused.status, refused.json()["error"]["param"]) == (400, name)
        assert len(p.requests) == len(d.requests) == 1


async def test_the_clients_octets(start_gateway: Start) -> None:
    """13: numbers, order and unknown members as they came, but for the one that is put in."""
    octets = (
        b'{"seed": 9007199254740993, "odd" : [1e-5, {"b":1,"a":2}],\t"model": "m", "stream": true,'
        b' "messages": [{"role": "user", "content": "\\u00e9 \xc3\xa9"}]}'
    )
    async with engines() as ((p,), (d,), ledger):
        gateway = await start_gateway(config=config([p], [d]))
        assert (await gateway.ask(s.post(octets))).status == 200
        got = d.requests[0].body
        shared = next(at for at in range(len(got), 0, -1) if octets.startswith(got[:at]))
        rest = octets[shared:]
        assert got.endswith(rest)
        put = got[shared : len(got) - len(rest)]
        assert json.loads(b"{%b}" % put.removeprefix(b", ").removesuffix(b", ")).keys() == {"kv_transfer_params"}
        assert b"9007199254740993" in p.requests[0].body and b"1e-5" in p.requests[0].body
        await at_rest(gateway, ledger, p, d)


@pytest.mark.seconds(60)
async def test_eight_mebibytes(start_gateway: Start) -> None:
    """14: both legs whole."""
    text = "lorem ipsum " * (8 * 87382)
    async with engines() as ((p,), (d,), ledger):
        gateway = await start_gateway(config=config([p], [d]))
        body = {**CHAT, "messages": [{"role": "user", "content": text}]}
        assert (await gateway.ask(s.post(body), timeout=30)).status == 200
        for engine in (p, d):
            assert json.loads(engine.requests[0].body)["messages"][0]["content"] == text
        await at_rest(gateway, ledger, p, d)
