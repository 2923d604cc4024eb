"""models.NAME.migrate: a stream whose backend dies goes on on another one, cut between two events, or ends as it would have."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from gateway.core.retry import RESERVE
from tests.integration.test_fleet import SLOW, fleet, served, states, urls
from tests.support import script as s
from tests.support.client import RawClient
from tests.support.gateway import Gateway, until
from tests.support.messages import HttpWire, Message
from tests.support.upstream import RawUpstream

Start = Callable[..., Awaitable[Gateway]]
WORDS = ["The", " capital", " of", " Fränce", " is", " \"Paris\"", "\n-", "🙂", "."]
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True, "temperature": 0}
COUNTED = {**CHAT, "max_tokens": 64, "min_tokens": 3, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
PROMPT = {"model": "m", "prompt": "Say: ", "stream": True, "max_tokens": 64}
PROMPT_TOKENS = 7


def configured(**more: Any) -> dict[str, Any]:
    return {"models": {"m": {"migrate": {"attempts": 2}}}, "health": SLOW, "balance": "round_robin", **more}


def usage(tokens: int, prompt: int = PROMPT_TOKENS) -> dict[str, int]:
    return {"prompt_tokens": prompt, "total_tokens": prompt + tokens, "completion_tokens": tokens}


def events(
    words: list[str], *, number: int = 1, counted: bool = False, chat: bool = True, prompt: int = PROMPT_TOKENS,
    ids: bool = False,
) -> list[bytes]:  # fmt: skip
    """What an engine streams for `words`: a token each; the last one ends it."""
    made = []
    common = {"id": f"chatcmpl-{number}", "object": "chat.completion.chunk", "created": 1000 + number, "model": "m"}

    def one(choice: dict[str, Any], tokens: int) -> bytes:
        return s.event({**common, "choices": [{"index": 0, **choice}], **({"usage": usage(tokens, prompt)} if counted else {})})

    if chat:
        made.append(one({"delta": {"role": "assistant", "content": ""}, "finish_reason": None}, 0))
    for at, word in enumerate(words, 1):
        said: dict[str, Any] = {"delta": {"content": word}} if chat else {"text": word}
        if ids:
            said["token_ids"] = [at]
        made.append(one({**said, "finish_reason": "stop" if at == len(words) else None}, at))
    if counted:
        made.append(s.event({**common, "choices": [], "usage": usage(len(words), prompt)}))
    return [*made, s.DONE]


def framed(found: list[bytes]) -> bytes:
    return b"".join(map(s.chunk, found))


def text_of(body: bytes) -> str:
    said = [json.loads(line[6:]) for line in body.split(b"\n\n") if line and line != b"data: [DONE]"]
    choices = [choice for chunk in said for choice in chunk["choices"]]
    return "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices)


def chunks_of(body: bytes) -> list[dict[str, Any]]:
    assert body.endswith(s.DONE)
    assert body.count(s.DONE) == 1
    return [json.loads(line[6:]) for line in body.removesuffix(s.DONE).split(b"\n\n") if line]


class Engine:
    """Goes on with whatever text it is given, to the end of WORDS; it counts, and reads prompts, as it is told."""

    def __init__(self, **manner: Any) -> None:
        self.manner = manner
        self.asked: list[dict[str, Any]] = []

    async def __call__(self, wire: HttpWire, request: Message) -> None:
        asked = json.loads(request.body)
        self.asked.append(asked)
        if "prompt" in asked:
            done = asked["prompt"].removeprefix(PROMPT["prompt"])
        else:
            last = asked["messages"][-1]
            done = last["content"] if last["role"] == "assistant" else ""
            assert bool(done) == asked.get("continue_final_message", False) == (not asked.get("add_generation_prompt", True))
        whole = "".join(WORDS)
        assert whole.startswith(done)
        left, size = list(WORDS), 0
        while size < len(done):
            size += len(left.pop(0))
        await wire.send(s.SSE_HEAD + framed(events(left, number=2, **self.manner)) + s.LAST)


async def start(start_gateway: Start, backends: list[RawUpstream], **more: Any) -> Gateway:
    return await start_gateway(config=configured(**more), backends=urls(backends))


async def at_rest(gateway: Gateway) -> None:
    await gateway.idle()
    assert {b["in_flight"] for b in await states(gateway)} == {0}
    assert (await gateway.metrics()).value("tokenpipe_requests_in_flight") == 0


async def ask(gateway: Gateway, body: dict[str, Any], path: str = "/v1/chat/completions") -> Message:
    return await gateway.ask(s.post(body, path=path))


async def test_at_every_offset(start_gateway: Start) -> None:
    """Whatever the dead backend's last octet was, the client sees whole events, one text, one id and one end."""
    async with fleet(2) as backends:
        whole = framed(events(WORDS))
        backends[1].script = Engine()
        gateway = await start(start_gateway, backends, breaker={"failures": 10_000})
        last = len(framed(events(WORDS)[-2:]))  # with the last token comes the reason why it ends: nothing is left to be said
        offsets = list(range(0, len(whole) - last, 5)) + [len(whole) - last]
        for offset in offsets:
            backends[0].script = s.raw(s.SSE_HEAD + whole[:offset], then="reset" if offset % 2 else "fin")
            answer = await ask(gateway, CHAT)
            assert answer.complete, offset
            assert text_of(answer.body) == "".join(WORDS), offset
            chunks = chunks_of(answer.body)
            assert len({chunk["id"] for chunk in chunks}) == len({chunk["created"] for chunk in chunks}) == 1
            assert sum("role" in chunk["choices"][0]["delta"] for chunk in chunks) == 1
        assert served(backends) == [len(offsets)] * 2
        await at_rest(gateway)
        assert await gateway.metric("tokenpipe_migrations_total", reason="upstream_reset") == len(offsets)


async def test_a_backend_that_died_before_its_first_octet_is_asked_again(start_gateway: Start) -> None:
    """What the next one says is no answer of the first one's: none of those who waited there is counted twice."""
    async with fleet(2) as backends:
        backends[0].script, backends[1].script = s.raw(s.SSE_HEAD, then="reset"), Engine()
        gateway = await start(start_gateway, backends, health=SLOW | {"silence": 0.2})
        answer = await ask(gateway, CHAT)
        assert (answer.complete, text_of(answer.body)) == (True, "".join(WORDS))
        await at_rest(gateway)
        await asyncio.sleep(0.5)
        assert [b["state"] for b in await states(gateway)] == ["up", "up"]


async def test_a_kept_connection_that_is_stale_ends_no_stream(start_gateway: Start) -> None:
    """Whoever is to go on is asked on a fresh connection: what a kept one is worth may be learnt by others."""
    async with fleet(2) as backends:
        first, second = backends
        engine = Engine()
        first.script, second.script = engine, engine
        gateway = await start(start_gateway, backends)
        while not all(served(backends)):  # each keeps a connection
            assert (await ask(gateway, CHAT)).complete

        async def fickle(wire: HttpWire, request: Message) -> None:
            await (engine(wire, request) if wire.received.count(b"HTTP/1.1\r\n") == 1 else s.vanish(wire, request))

        async def broken(wire: HttpWire, request: Message) -> None:
            first.script, second.script = (dies(*events(WORDS)[:4]), fickle) if wire in first.connections else (
                fickle, dies(*events(WORDS)[:4]))  # whoever has the stream dies under it
            await (first if wire in first.connections else second).script(wire, request)

        first.script = second.script = broken
        answer = await ask(gateway, CHAT)
        assert (answer.complete, text_of(answer.body)) == (True, "".join(WORDS))
        await at_rest(gateway)


ABORTED = s.event({"id": "x", "choices": [{"index": 0, "delta": {"content": "lost"}, "finish_reason": "abort"}]})
BROKEN = s.event({"error": {"message": "boom", "type": "E", "param": None, "code": 500}})
DEATHS = [
    ("reset", s.raw, b"", "reset", "upstream_reset"),
    ("end", s.raw, b"", "fin", "upstream_reset"),
    ("no chunks", s.raw, b"what is this\r\n", "keep", "upstream_reset"),
    ("abort", s.raw, framed([ABORTED, s.DONE]) + s.LAST, "keep", "stream_error"),
    ("error", s.raw, framed([BROKEN, s.DONE]) + s.LAST, "keep", "stream_error"),
    ("no reason", s.raw, framed([s.DONE]) + s.LAST, "keep", "stream_error"),
    ("no terminal", s.raw, s.LAST, "keep", "upstream_truncated"),
]


@pytest.mark.parametrize("death", DEATHS, ids=[death[0] for death in DEATHS])
async def test_every_way_to_die(start_gateway: Start, death: Any) -> None:
    _, script, last, then, reason = death
    async with fleet(2) as backends:
        gateway = await start(start_gateway, backends)
        all_words = (0, 1, 3)
        for words in all_words:
            begun = events(WORDS, counted=True)[: words + 1]
            backends[0].script = script(s.SSE_HEAD + framed(begun) + last, then=then)
            engine = backends[1].script = Engine(counted=True, prompt=PROMPT_TOKENS + words)
            answer = await gateway.ask(s.post(COUNTED, fields=[("X-Request-Id", str(words))]))
            assert (answer.status, answer.complete) == (200, True)
            assert text_of(answer.body) == "".join(WORDS)
            chunks = chunks_of(answer.body)
            assert chunks[-1]["usage"] == usage(len(WORDS), PROMPT_TOKENS)
            assert {chunk["id"] for chunk in chunks} == {"chatcmpl-1"}
            (asked,) = engine.asked
            assert (asked["max_tokens"], asked["min_tokens"]) == (64 - words, 3 - words)
            (line,) = await gateway.logged(request_id=str(words))
            assert (line["outcome"], line["attempts"], line["output_tokens"]) == ("complete", 2, len(WORDS))
            assert line["migrated_from"] == f"127.0.0.1:{backends[0].port}"
            assert line["backend"] == f"127.0.0.1:{backends[1].port}"
        await at_rest(gateway)
        samples = await gateway.metrics()
        assert samples.value("tokenpipe_migrations_total", reason=reason) == len(all_words)
        assert samples.value("tokenpipe_requests_total", outcome="complete") == len(all_words)
        assert samples.value("tokenpipe_time_to_first_token_seconds_count") == len(all_words)
        # every gap, that at the seam included, is counted once
        assert samples.value("tokenpipe_inter_token_latency_seconds_count") == len(all_words) * (len(WORDS) - 1)


async def until_cut(client: RawClient) -> bytes:
    """All that came on a connection which ended within a stream."""
    await client.wait_closed()
    whole = bytes(client.pending)
    assert not whole.endswith(s.LAST)
    return whole


def dies(*begun: bytes) -> s.Script:
    return s.raw(s.SSE_HEAD + framed(list(begun)), then="reset")


@pytest.mark.parametrize("ids", [False, True])
async def test_completions(start_gateway: Start, ids: bool) -> None:
    """With a limit, only where the tokens are counted: here by their ids, or not at all."""
    async with fleet(2) as backends:
        backends[0].script = dies(*events(WORDS, chat=False, ids=ids)[:4])
        engine = backends[1].script = Engine(chat=False)
        gateway = await start(start_gateway, backends)
        client = await gateway.connect()
        await client.send(s.post(PROMPT, path="/v1/completions"))
        if not ids:
            await client.wait_closed()
            assert not engine.asked
        else:
            answer = await client.read_response()
            assert text_of(answer.body) == "".join(WORDS)
            assert (engine.asked[0]["prompt"], engine.asked[0]["max_tokens"]) == ("Say: " + "".join(WORDS[:4]), 60)
        client.fin()
        await at_rest(gateway)


async def test_a_message_that_the_client_has_begun(start_gateway: Start) -> None:
    async with fleet(2) as backends:
        begun = {**CHAT, "messages": [*CHAT["messages"], {"content": WORDS[0], "role": "assistant"}],
                 "continue_final_message": True, "add_generation_prompt": False}  # fmt: skip
        backends[0].script = dies(*events(WORDS[1:])[:4])
        engine = backends[1].script = Engine()
        gateway = await start(start_gateway, backends)
        answer = await ask(gateway, begun)
        assert WORDS[0] + text_of(answer.body) == "".join(WORDS)
        assert engine.asked[0]["messages"][1:] == [{"content": "".join(WORDS[:4]), "role": "assistant"}]
        await at_rest(gateway)


NEVER: list[tuple[str, dict[str, Any], list[bytes]]] = [
    ("tools", {"tools": [{"type": "function", "function": {"name": "f"}}]}, events(WORDS)[:4]),
    ("a schema", {"response_format": {"type": "json_object"}}, events(WORDS)[:4]),
    ("structured", {"structured_outputs": {"choice": ["a"]}}, events(WORDS)[:4]),
    ("logprobs", {"logprobs": True}, events(WORDS)[:4]),
    ("several choices", {"n": 2}, events(WORDS)[:4]),
    ("stop strings", {"stop": ["x"]}, events(WORDS)[:4]),
    ("a penalty", {"frequency_penalty": 0.5}, events(WORDS)[:4]),
    ("who knows what", {"made_up": 1}, events(WORDS)[:4]),
    ("a limit without a count", {"max_tokens": 64}, events(WORDS)[:4]),
    ("a count that was asked for", {"stream_options": {"include_usage": True}}, events(WORDS)[:4]),
    ("a blank at its end", {}, events(["a", "\n", "b"])[:3]),
    ("all but the end", {}, events(WORDS)[:-1]),
    ("reasoning", {}, [s.event({"choices": [{"index": 0, "delta": {"reasoning": "hm"}}]}), *events(WORDS)[1:3]]),
    ("a limit that is reached", COUNTED | {"max_tokens": 3}, events(WORDS, counted=True)[:4]),
    ("another model", {"model": "m0"}, events(WORDS)[:4]),
]


async def test_what_is_never_gone_on_with(start_gateway: Start) -> None:
    """It ends as it would have without."""
    async with fleet(2) as backends:
        gateway = await start(start_gateway, backends, balance="least_loaded", breaker={"failures": 1000})
        for number, (what, more, begun) in enumerate(NEVER):
            for backend in backends:
                backend.script = dies(*begun)
            client = await gateway.connect()
            await client.send(s.post({**CHAT, **more}, fields=[("X-Request-Id", str(number))]))
            assert framed(begun) in await until_cut(client), what
            client.fin()
            (line,) = await gateway.logged(request_id=str(number))
            assert (line["outcome"], line["attempts"], line["migrated_from"]) == ("upstream_reset", 1, None), what
        assert sum(served(backends)) == len(NEVER)
        await at_rest(gateway)
        assert await gateway.metric("tokenpipe_backend_failures_total", reason="upstream_reset") == len(NEVER)


@pytest.mark.parametrize("death", DEATHS[3:], ids=[death[0] for death in DEATHS[3:]])
async def test_nobody_else(start_gateway: Start, death: Any) -> None:
    """What had been held back passes as it came."""
    _, script, last, then, _ = death
    async with fleet(1) as backends:
        sent = framed(events(WORDS)[:4]) + last
        backends[0].script = script(s.SSE_HEAD + sent, then=then)
        gateway = await start(start_gateway, backends)
        client = await gateway.connect()
        await client.send(s.post(CHAT))
        answer = await client.read_response()
        assert b"".join([s.chunk(data) for _, data in answer.chunks]) == sent.removesuffix(s.LAST)
        client.fin()
        (line,) = await gateway.logged()
        assert line["outcome"] == ("upstream_truncated" if death[0] == "no terminal" else "stream_error")
        await at_rest(gateway)


async def test_who_goes_on_may_die_as_well(start_gateway: Start) -> None:
    """Before its first event or in mid-stream; each time it is an attempt, and there are as many as the model may have."""
    async with fleet(4) as backends:
        backends[0].script = dies(*events(WORDS)[:3])
        backends[1].script = s.vanish
        backends[2].script = dies(*events(WORDS[2:], number=3)[:3])
        engine = backends[3].script = Engine()
        gateway = await start_gateway(
            config=configured(models={"m": {"migrate": {"attempts": 3}}}), backends=urls(backends)
        )
        answer = await ask(gateway, CHAT)
        assert text_of(answer.body) == "".join(WORDS)
        assert {chunk["id"] for chunk in chunks_of(answer.body)} == {"chatcmpl-1"}
        assert engine.asked[0]["messages"][-1]["content"] == "".join(WORDS[:4])
        (line,) = await gateway.logged()
        assert (line["attempts"], line["outcome"]) == (4, "complete")
        assert line["migrated_from"] == ",".join(f"127.0.0.1:{backends[n].port}" for n in (0, 2))
        await at_rest(gateway)
        assert await gateway.metric("tokenpipe_backend_failures_total") == 3


async def test_not_more_often_than_allowed(start_gateway: Start) -> None:
    async with fleet(4) as backends:
        for backend in backends:
            backend.script = dies(*events(WORDS)[:1])
        gateway = await start(start_gateway, backends)
        client = await gateway.connect()
        await client.send(s.post(CHAT))
        await until_cut(client)
        assert served(backends) == [1, 1, 1, 0]
        client.fin()
        await at_rest(gateway)


async def test_silence(start_gateway: Start) -> None:
    """A backend that says nothing more: the idle limit ends it, not the stream."""
    async with fleet(2) as backends:
        silent = backends[0].script = s.Held(s.SSE_HEAD + framed(events(WORDS)[:3]))
        backends[1].script = Engine()
        gateway = await start(start_gateway, backends, timeouts={"idle": 0.5})
        answer = await ask(gateway, CHAT)
        assert text_of(answer.body) == "".join(WORDS)
        wire = await silent.wire()
        await until(lambda: wire.ended, "the silent one's connection is closed")
        await at_rest(gateway)
        assert await gateway.metric("tokenpipe_migrations_total", reason="timeout_idle") == 1


async def test_comments_are_no_progress(start_gateway: Start) -> None:
    """A frozen engine behind a server that says that it lives; and the time of whoever is asked next begins anew."""
    async with fleet(2) as backends:

        async def frozen(wire: HttpWire, request: Message) -> None:
            await wire.send(s.SSE_HEAD + framed(events(WORDS)[:3]))
            while not wire.ended:
                await wire.send(s.chunk(b": keep-alive\n\n"))
                await asyncio.sleep(0.05)

        async def slow(wire: HttpWire, request: Message) -> None:
            await asyncio.sleep(0.5)
            await Engine()(wire, request)

        backends[0].script, backends[1].script = frozen, slow
        gateway = await start(start_gateway, backends, timeouts={"progress": 1})
        answer = await ask(gateway, CHAT)
        told = answer.body.replace(b": keep-alive\n\n", b"")
        assert text_of(told) == "".join(WORDS)
        await at_rest(gateway)
        assert await gateway.metric("tokenpipe_migrations_total", reason="timeout_progress") == 1


async def test_the_client_is_told_where_nobody_goes_on(start_gateway: Start) -> None:
    """on_truncation: error_event. Half an event of the dead backend's is not there to stand in its way."""
    async with fleet(1) as backends:
        backends[0].script = s.raw(s.SSE_HEAD + framed(events(WORDS)[:3])[:-9], then="reset")
        gateway = await start(start_gateway, backends, on_truncation="error_event")
        client = await gateway.connect()
        await client.send(s.post(CHAT))
        whole = await until_cut(client)
        assert framed(events(WORDS)[:2]) in whole
        assert whole.count(b"data: ") == 3
        assert b'"code":"upstream_reset"' in whole
        client.fin()
        await at_rest(gateway)


@pytest.mark.parametrize("how", ["client", "operator", "total", "idle"])
async def test_ended_between_two_backends(start_gateway: Start, how: str) -> None:
    """While another one is being asked: its connection is closed, and its lease is back."""
    async with fleet(2) as backends:
        backends[0].script = dies(*events(WORDS)[:3])
        asked = backends[1].script = s.Held(s.SSE_HEAD)
        limits = {how: 1} if how in ("total", "idle") else {}
        gateway = await start(start_gateway, backends, timeouts=limits)
        client = await gateway.connect()
        await client.send(s.post(CHAT, fields=[("X-Request-Id", "one")]))
        wire = await asked.wire()
        assert sorted(b["in_flight"] for b in await states(gateway)) == [1, 1]
        if how == "client":
            client.fin()
        elif how == "operator":
            assert (await gateway.admin(s.get("/-/streams/one", method="DELETE"))).status == 204
        await until(lambda: wire.ended, "its connection is closed")
        if how != "client":
            await until_cut(client)
            client.fin()
        (line,) = await gateway.logged()
        outcomes = {"client": "client_gone", "operator": "draining", "total": "timeout_total", "idle": "timeout_idle"}
        assert line["outcome"] == outcomes[how]
        await at_rest(gateway)


async def test_a_slow_reader_holds_back_the_second_as_well(start_gateway: Start) -> None:
    """What is held for one client stays bounded, whoever it comes from, and nothing is lost."""
    async with fleet(2) as backends:
        begun = events([*["x" * 1000] * 50, "end"])[:-2]
        backends[0].script = s.raw(s.SSE_HEAD + framed(begun), then="fin")

        async def flood(wire: HttpWire, request: Message) -> None:
            await wire.send(s.SSE_HEAD)
            for event in [*events([*["y" * 1000] * 12_000, "end"], number=2)]:
                await wire.send(s.chunk(event))
            await wire.send(s.LAST)

        backends[1].script = flood
        gateway = await start(start_gateway, backends)
        client = await gateway.connect()
        await client.send(s.post(CHAT))
        await backends[1].wait_requests()
        async with asyncio.timeout(10):
            while not await gateway.metric("tokenpipe_backpressure_pauses_total"):
                await asyncio.sleep(0.05)
        assert await gateway.metric("tokenpipe_write_buffer_bytes") < 300_000
        answer = await client.read_response(timeout=20)
        assert text_of(answer.body) == "x" * 50_000 + "y" * 12_000_000 + "end"
        client.fin()
        await at_rest(gateway)


async def test_usage_that_the_gateway_asked_for(start_gateway: Start) -> None:
    """`usage: inject`: what the client did not ask for is taken out, of both halves; and counted where it is exact."""
    async with fleet(2) as backends:
        backends[0].script = dies(*events(WORDS, counted=True)[:4])
        backends[1].script = Engine(counted=True, prompt=10)
        gateway = await start(start_gateway, backends, usage="inject")
        answer = await ask(gateway, CHAT)
        assert text_of(answer.body) == "".join(WORDS)
        assert all(chunk["choices"] for chunk in chunks_of(answer.body))
        (line,) = await gateway.logged()
        assert (line["prompt_tokens"], line["output_tokens"]) == (PROMPT_TOKENS, len(WORDS))
        await at_rest(gateway)


@pytest.mark.parametrize("limited", [False, True])
async def test_usage_that_the_gateway_asked_for_and_that_is_not_exact(start_gateway: Start, limited: bool) -> None:
    """As engines say it unless they are asked for more: in the end alone. What the client was not to see holds no stream back,
    but a limit of its own does; and the second half's number is not taken for that of both."""
    async with fleet(2) as backends:
        backends[0].script = dies(*events(WORDS)[:4])

        async def says(wire: HttpWire, request: Message) -> None:
            assert json.loads(request.body)["stream_options"] == {"include_usage": True}
            left = events(WORDS[3:], number=2)
            last = s.event({"id": "chatcmpl-2", "object": "chat.completion.chunk", "created": 2, "model": "m",
                            "choices": [], "usage": usage(6, 10)})  # fmt: skip
            await wire.send(s.SSE_HEAD + framed([*left[:-1], last, s.DONE]) + s.LAST)

        backends[1].script = says
        gateway = await start(start_gateway, backends, usage="inject")
        client = await gateway.connect()
        await client.send(s.post({**CHAT, "max_tokens": 64} if limited else CHAT))
        if limited:
            await client.wait_closed()
            assert not backends[1].requests
        else:
            answer = await client.read_response()
            assert (answer.complete, text_of(answer.body)) == (True, "".join(WORDS))
            assert all(chunk["choices"] and "usage" not in chunk for chunk in chunks_of(answer.body))
            (line,) = await gateway.logged()
            assert (line.get("prompt_tokens"), line["output_tokens"], line["outcome"]) == (None, len(WORDS), "complete")
        client.fin()
        await at_rest(gateway)


async def test_the_budget_bounds_what_an_outage_is_multiplied_by(start_gateway: Start) -> None:
    """Each stream is asked for elsewhere once, whatever the budget; once more only while that has something in hand."""

    async def ill(wire: HttpWire, request: Message) -> None:
        if "continue_final_message" in json.loads(request.body):
            await s.reply(500, b"{}")(wire, request)
        else:
            await dies(*events(WORDS)[:4])(wire, request)

    async with fleet(3, ill) as backends:
        gateway = await start(start_gateway, backends, retry={"budget": 0}, breaker={"failures": 10_000})
        streams = int(RESERVE) + 10
        for _ in range(streams):
            client = await gateway.connect()
            await client.send(s.post(CHAT))
            assert b'"content":" of"' in await until_cut(client)
            client.fin()
        await at_rest(gateway)
        asked = sum("continue_final_message" in json.loads(r.body) for b in backends for r in b.requests)
        assert asked == streams + int(RESERVE)


async def test_who_turns_a_migration_away_is_left_in_peace(start_gateway: Start) -> None:
    async def dies(wire: HttpWire, request: Message) -> None:
        await wire.send(s.SSE_HEAD + framed(events(WORDS)[:3]))
        wire.reset()

    async with fleet(2, dies) as backends:
        backends[1].script = s.reply(429, b"{}", [s.JSON_TYPE, ("retry-after", "20")])
        gateway = await start_gateway(config=configured(), backends=urls(backends))
        client = await gateway.connect()
        await client.send(s.post(CHAT))
        assert not (await client.read_response()).complete
        client.fin()
        await gateway.idle()
        assert served(backends) == [1, 1]
        assert [b["state"] for b in await states(gateway)][1] == "busy"
