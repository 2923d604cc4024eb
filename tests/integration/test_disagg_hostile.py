"""Disaggregated prefill and decode among the hostile and the dying: engines that say anything at all, clients that send it, and
operators who come with another proxy's command line. After each of them nothing is in flight, nothing held that is not counted,
and nothing untidy on standard error.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable

import pytest

from tests.support import script as s
from tests.support.gateway import Gateway, until
from tests.support.messages import HttpWire, Message
from tests.support.pairs import NULLS, OUTPUT, Ledger, at_rest, config, decode, engines, prefill
from tests.support.script import Script
from tests.support.upstream import RawUpstream

Start = Callable[..., Awaitable[Gateway]]
WHOLE = {**s.CHAT, "stream": False}
AS_JSON = ("content-type", "application/json")


def flags(ps: list[RawUpstream], ds: list[RawUpstream], *more: str) -> list[str]:
    """The command line of vLLM Ascend's proxy, whole."""
    return [
        "--host", "127.0.0.1", "--port", "0", "--admin-port", "0",
        "--prefiller-hosts", *("127.0.0.1" for _ in ps), "--prefiller-ports", *(str(p.port) for p in ps),
        "--decoder-hosts", *("localhost" for _ in ds), "--decoder-ports", *(str(d.port) for d in ds),
        "--max-retries", "3", "--retry-delay", "0.001", "--max-waiting-retries", "3", "--waiting-retry-interval", "10",
        "--workers", "1", "--log-level", "INFO", "--log-format", "json", *more,
    ]  # fmt: skip


# ---- who comes with another proxy's command line


def ascend(ledger: Ledger) -> Script:
    """A prefill engine of vLLM Ascend, whose first token would be the end: it stages KV only where min_tokens forbids that."""
    staging = prefill(ledger)

    async def script(wire: HttpWire, request: Message) -> None:
        if request.json().get("min_tokens") == 1 and "stop" not in request.json():
            await staging(wire, request)
        else:
            choice = {"index": 0, "finish_reason": "stop"}
            await s.reply(200, {"id": "cmpl-1", "choices": [choice], "kv_transfer_params": None})(wire, request)

    return script


async def test_engines_of_ascend_without_a_word_of_their_connector(start_gateway: Start) -> None:
    """The program's name is all that changes: they are found out at the first prompt that needs it, and the log tells."""
    async with engines() as ((p,), (d,), ledger):
        p.script = ascend(ledger)
        gateway = await start_gateway(flags=flags([p], [d]))
        for _ in range(2):
            answer = await gateway.ask(s.post({**s.CHAT, "stop": ["x"], "min_tokens": 9}))
            assert (answer.status, answer.body) == (200, b"".join(OUTPUT))
        first, again, second = (request.json() for request in p.requests)
        assert "min_tokens" not in first and again["min_tokens"] == second["min_tokens"] == 1
        assert [request.json()["stop"] for request in d.requests] == [["x"], ["x"]]
        said = gateway.stderr()
        assert said.count("mooncake_ascend") == 2, said  # at the start, and when it was found out
        await at_rest(gateway, ledger, p, d)


def looked_at(engine: RawUpstream) -> list[str | None]:
    """With which keys probes come."""
    seen: list[str | None] = []

    async def health(wire: HttpWire, request: Message) -> None:
        seen.append(request.get("authorization"))
        await s.reply(200, b"", ())(wire, request)

    engine.probes["/health"] = health
    return seen


@pytest.mark.parametrize("key", ["sk-engines", ""])
async def test_the_engines_key_of_the_environment(start_gateway: Start, key: str) -> None:
    """As theirs: engines are shown OPENAI_API_KEY, and nothing of the client's; unset, never the word None."""
    shown = f"Bearer {key}" if key else "Bearer EMPTY"
    async with engines(1, 2) as ((p,), (d, added), ledger):
        probed = [looked_at(one) for one in (p, added)]
        gateway = await start_gateway(flags=flags([p], [d]), environment={"OPENAI_API_KEY": key})
        more = json.dumps({"type": "decode", "instances": f"127.0.0.1:{added.port}"}).encode()
        assert (await gateway.admin(s.post(more, "/instances/add"))).status == 200
        await until(lambda: all(probed), "probes, also of what was added")
        for fields in ([("Authorization", "Bearer EMPTY")], [("Authorization", "Bearer EMPTY"), ("X-Api-Key", "mine")]) * 2:
            assert (await gateway.ask(s.post(fields=fields))).status == 200
        for request in (*p.requests, *d.requests, *added.requests):
            assert request.get("authorization") == shown
            assert not key or request.get("x-api-key") is None
        assert p.requests and d.requests and added.requests
        assert (await gateway.ask(s.post())).status == 200
        assert p.requests[-1].get("authorization") == (shown if key else None)
        if key:
            assert {field for each in probed for field in each} == {shown}
        await at_rest(gateway, ledger, p, d, added)
        said = gateway.stderr() + (await gateway.admin(s.get("/-/config"))).body.decode()
        assert "sk-engines" not in said and ("OPENAI_API_KEY" in said) == bool(key)


async def test_a_key_of_the_environment_is_for_that_command_line_alone(start_gateway: Start) -> None:
    async with engines() as ((p,), (d,), _):
        probed = looked_at(p)
        gateway = await start_gateway(config=config([p], [d]), environment={"OPENAI_API_KEY": "sk-engines"})
        assert (await gateway.ask()).status == 200
        await until(lambda: probed, "a probe")
        assert {*(one.get("authorization") for one in (*p.requests, *d.requests)), *probed} == {None}


async def test_engines_of_nixl_are_asked_as_ever(start_gateway: Start) -> None:
    async with engines() as ((p,), (d,), ledger):
        gateway = await start_gateway(flags=flags([p], [d]))
        assert (await gateway.ask(s.post({**s.CHAT, "min_tokens": 9}))).status == 200
        assert p.requests[0].json() == {**s.CHAT, "stream": False, "max_tokens": 1, "max_completion_tokens": 1, "n": 1,
                                        "kv_transfer_params": NULLS}  # fmt: skip
        await at_rest(gateway, ledger, p, d)


async def test_a_prefill_that_hands_over_nothing_however_asked(start_gateway: Start) -> None:
    """It is asked in the other way once, not for ever."""
    async with engines() as ((p,), (d,), ledger):
        p.script = s.reply(200, {"choices": [{"finish_reason": "stop"}]})
        gateway = await start_gateway(config=config([p], [d], retry={"attempts": 5}))
        answer = await gateway.ask()
        assert (answer.status, answer.get("x-gateway-error")) == (502, "pd_handoff_missing")
        assert len(p.requests) == 2 and not d.requests
        await at_rest(gateway, ledger, p, d)


async def test_what_that_proxy_has_on_its_one_port(start_gateway: Start) -> None:
    """Who asks the public port for its management is told where that is."""
    async with engines() as ((p,), (d,), ledger):
        gateway = await start_gateway(flags=flags([p], [d]))
        add = {"type": "prefill", "instances": ["127.0.0.1:1"]}
        posts = [s.post(add, path) for path in ("/instances/add", "/instances/remove")]
        for request in (s.get("/healthcheck"), s.get("/metrics"), *posts):
            answer = await gateway.ask(request)
            assert (answer.status, answer.get("x-gateway-error")) == (404, "unknown_path")
            assert "admin listener" in answer.json()["error"]["message"]
        assert "admin" not in (await gateway.ask(s.get("/sleep"))).json()["error"]["message"]
        health = await gateway.admin(s.get("/healthcheck"))
        assert health.json() == {"status": "ok", "prefill_instances": 1, "decode_instances": 1, "request_num": 0}
        p.script = held = s.Held()
        client = await gateway.connect()
        await client.send(s.post())
        await held.wire()
        health = await gateway.admin(s.get("/healthcheck"))
        assert health.json()["request_num"] == 1  # of one request, both of whose engines are taken
        client.fin()
        await at_rest(gateway, ledger, p, d)


# ---- prefill engines that say anything at all


def answers(status: int, body: bytes, *fields: tuple[str, str]) -> Script:
    return s.reply(status, body, fields or (AS_JSON,))


async def trickle(wire: HttpWire, request: Message) -> None:
    await wire.send(s.head(200, [AS_JSON, ("content-length", "1000")]))
    while not wire.ended:
        await wire.send(b" ")
        await asyncio.sleep(0.05)


DEEP = b"[" * 100_000 + b"]" * 100_000
HEAD = s.head(200, [AS_JSON, ("content-length", "100")])
PREFILLS: dict[str, tuple[Script, int, str]] = {
    "no json": (answers(200, b"<html>"), 502, "pd_handoff_missing"),
    "nothing": (answers(200, b""), 502, "pd_handoff_missing"),
    "a list": (answers(200, b"[1]"), 502, "pd_handoff_missing"),
    "deep": (answers(200, b"[" * 100_000), 502, "pd_handoff_missing"),
    "deep params": (answers(200, b'{"kv_transfer_params": ' + DEEP + b"}"), 502, "pd_handoff_missing"),
    "not utf-8": (answers(200, b'{"kv_transfer_params": "\xff\xfe"}'), 502, "pd_handoff_missing"),
    "odd choices": (answers(200, b'{"choices": [[]], "usage": 7, "kv_transfer_params": {}}'), 502, "pd_handoff_missing"),
    "odd finish": (answers(200, b'{"choices": [{"finish_reason": {}}]}'), 502, "pd_handoff_missing"),
    "a stream": (s.stream(*OUTPUT), 502, "pd_handoff_missing"),
    "no content": (s.raw(s.head(204)), 502, "pd_handoff_missing"),
    "accepted": (answers(202, b"{}"), 502, "pd_handoff_missing"),
    "elsewhere": (answers(302, b"", ("location", "http://evil/")), 502, "pd_handoff_missing"),
    "no http": (s.raw(b"SSH-2.0-OpenSSH\r\n", then="fin"), 502, "upstream_malformed"),
    "half": (s.raw(HEAD, b'{"id":', then="reset"), 502, "upstream_reset"),
    "half, fin": (s.raw(HEAD, b'{"id":', then="fin"), 502, "upstream_reset"),
    "bad chunk": (s.raw(s.head(200, [AS_JSON, ("transfer-encoding", "chunked")]), b"zz\r\n{}"), 502, "upstream_malformed"),
    "trickle": (trickle, 504, "timeout_first_byte"),
    "hang": (s.Held(), 504, "timeout_first_byte"),
}  # fmt: skip


@pytest.mark.parametrize("what", PREFILLS)
async def test_prefill_says(start_gateway: Start, what: str) -> None:
    """Nothing of it is the client's answer, and decode is not asked."""
    script, status, code = PREFILLS[what]
    async with engines() as ((p,), (d,), ledger):
        p.script = script
        gateway = await start_gateway(config=config([p], [d], disaggregation={"prefill_timeout": 0.5}))
        answer = await gateway.ask()
        assert (answer.status, answer.get("x-gateway-error")) == (status, code), answer.body
        assert "prefill" in answer.json()["error"]["message"]
        assert not d.requests
        (entry,) = await gateway.logged()
        assert (entry["status"], entry["code"], entry["phase"]) == (status, code, "prefill")
        assert entry["prefill_backend"] == f"127.0.0.1:{p.port}"
        p.script = prefill(ledger)
        assert (await gateway.ask()).status == 200
        await at_rest(gateway, ledger, p, d)


async def test_prefill_says_sixty_five_mebibytes(start_gateway: Start) -> None:
    async with engines() as ((p,), (d,), ledger):

        async def endless(wire: HttpWire, request: Message) -> None:
            await wire.send(s.head(200, [AS_JSON, ("transfer-encoding", "chunked")]))
            while not wire.ended:
                try:
                    await wire.send(s.chunk(b" " * (1 << 20)))
                except OSError:
                    return

        p.script = endless
        gateway = await start_gateway(config=config([p], [d]))
        answer = await gateway.ask(timeout=20)
        assert (answer.status, answer.get("x-gateway-error")) == (502, "upstream_malformed")
        await at_rest(gateway, ledger, p, d)


async def test_prefill_says_it_twice(start_gateway: Start) -> None:
    """What comes after the answer is nobody's: the connection is not used again."""
    async with engines() as ((p,), (d,), ledger):

        async def twice(wire: HttpWire, request: Message) -> None:
            await prefill(ledger)(wire, request)
            await s.reply(200, {"evil": 1})(wire, request)

        p.script = twice
        gateway = await start_gateway(config=config([p], [d]))
        for _ in range(4):
            assert (await gateway.ask()).body == b"".join(OUTPUT)
        await at_rest(gateway, ledger, p, d)


@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.parametrize("how", ["fin", "reset", "408"])
async def test_a_kept_connection_is_stale(start_gateway: Start, side: str, how: str) -> None:
    """The engine closes it with the next request on its way: that is no failure, also where one attempt is all there is. Where
    it says 408 first, it has read nothing: what prefill holds is not computed anew."""
    async with engines() as ((p,), (d,), ledger):
        engine = p if side == "prefill" else d
        good = engine.script
        assert good is not None
        gateway = await start_gateway(config=config([p], [d], retry={"attempts": 1}))
        assert (await gateway.ask()).status == 200
        word = s.head(408, [("connection", "close"), ("content-length", "0")])
        engine.script = s.in_turn(s.raw(word, then="fin") if how == "408" else s.raw(then=how), good)
        answer = await gateway.ask()
        assert (answer.status, answer.body) == (200, b"".join(OUTPUT))
        assert how != "408" or (len(p.requests), len(d.requests)) == ((3, 2) if side == "prefill" else (2, 3))
        await at_rest(gateway, ledger, p, d)


# ---- decode engines

DECODES: dict[str, tuple[Script, int, str | None]] = {
    "no http": (s.raw(b"SSH-2.0-OpenSSH\r\n", then="fin"), 502, "upstream_malformed"),
    "head, reset": (s.raw(s.SSE_HEAD, then="reset"), 502, "upstream_reset"),
    "head, fin": (s.raw(s.SSE_HEAD, then="fin"), 502, "upstream_reset"),
    "bad chunk": (s.raw(s.SSE_HEAD, b"zz\r\n{}"), 502, "upstream_malformed"),
    "hang": (s.Held(), 504, "timeout_first_byte"),
    "head, hang": (s.Held(s.SSE_HEAD), 504, "timeout_first_byte"),
    "half an event": (s.Held(s.SSE_HEAD, s.chunk(b"data: {")), 504, "timeout_first_byte"),
    "nothing": (answers(200, b""), 200, None),
    "an empty stream": (s.stream(), 502, "upstream_reset"),
    "no content": (s.raw(s.head(204)), 204, None),
    "elsewhere": (answers(302, b"", ("location", "http://x/")), 302, None),
    "error, cut": (s.raw(s.head(500, [AS_JSON, ("content-length", "100")]), b"{", then="reset"), 500, None),
}  # fmt: skip


@pytest.mark.parametrize("what", DECODES)
@pytest.mark.parametrize("release", ["auto", "never"])
async def test_decode_says(start_gateway: Start, what: str, release: str) -> None:
    script, status, code = DECODES[what]
    async with engines() as ((p,), (d,), ledger):
        d.script = script
        more = {"timeouts": {"first_byte": 0.4}, "retry": {"attempts": 1}}
        text = config([p], [d], disaggregation={"release": release, "hold": 1, "release_timeout": 0.5}, **more)
        gateway = await start_gateway(config=text)
        answer = await gateway.ask()
        assert (answer.status, answer.get("x-gateway-error")) == (status, code), answer.body
        if code is not None:
            assert "decode" in answer.json()["error"]["message"]
        (entry,) = await gateway.logged()
        assert (entry["status"], entry.get("code")) == (status, code)
        assert (entry["backend"], entry["prefill_backend"]) == (f"127.0.0.1:{d.port}", f"127.0.0.1:{p.port}")
        if status < 400 or (release, what) == ("auto", "an empty stream"):  # it was taken at its word
            ledger.held.clear()
        await at_rest(gateway, ledger, p, d)
        d.script = decode(ledger)
        assert (await gateway.ask()).body == b"".join(OUTPUT)
        await at_rest(gateway, ledger, p, d)


# ---- operators


async def test_a_stop_while_prefill_is_asked(start_gateway: Start) -> None:
    """What is under way is let finish, and new ones are not begun."""
    async with engines() as ((p,), (d,), ledger):
        p.script = prefill(ledger, seconds=0.5)
        gateway = await start_gateway(config=config([p], [d]))
        client = await gateway.connect()
        await client.send(s.post())
        await p.wait_requests()
        gateway.signal(15)
        assert (await client.read_response()).body == b"".join(OUTPUT)
        client.fin()
        await gateway.stopped()
        assert not ledger.held and len(d.requests) == 1


async def test_another_connector_under_load(start_gateway: Start) -> None:
    """A request goes on by the rules that it began with, and the next one by the new ones. Then there are no roles any more."""
    async with engines() as ((p,), (d,), ledger):
        p.script = prefill(ledger, seconds=0.3)
        gateway = await start_gateway(config=config([p], [d]))
        assert gateway.config_path is not None

        async def reloaded(text: str) -> None:
            assert gateway.config_path is not None
            gateway.config_path.write_text(text)
            assert (await gateway.admin(s.get("/-/reload", method="POST"))).status == 200

        first = asyncio.create_task(gateway.ask())
        await p.wait_requests()
        await reloaded(config([p], [d], disaggregation={"connector": "mooncake_ascend"}))
        second = asyncio.create_task(gateway.ask())
        await p.wait_requests(2)
        await reloaded(config([], [], [d]))
        assert [(await task).body for task in (first, second)] == [b"".join(OUTPUT)] * 2
        assert ["min_tokens" in request.json() for request in p.requests] == [False, True]
        assert (await gateway.ask()).status == 200
        assert len(p.requests) == 2
        ledger.unknown = 0
        await at_rest(gateway, ledger, p, d)
