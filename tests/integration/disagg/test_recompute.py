"""disaggregation.recompute: resume. What decode drops is prefilled anew and goes on in the same stream, where that is exact;
else the marker passes, as without (acceptance cases 44 and 46). In the midst of it, whoever ends the exchange ends all legs."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.integration.disagg.test_connectors import NAMES, options
from tests.integration.disagg.test_phases import OFFSETS, QUICK, chances, no_connections
from tests.integration.test_migration import CHAT, PROMPT, WORDS, chunks_of, text_of, usage
from tests.support import script as s
from tests.support.client import RawClient
from tests.support.disagg import BODIES, PATHS, mocks, undisturbed
from tests.support.disagg import asked as asked_of
from tests.support.gateway import Gateway, until
from tests.support.messages import HttpWire, Message
from tests.support.pairs import Ledger, at_rest, config, decode, engines, prefill
from tests.support.upstream import RawUpstream

Start = Callable[..., Awaitable[Gateway]]
COUNTED = {"stream_options": {"include_usage": True}}
ASKED = {**CHAT, **COUNTED, "max_tokens": 64, "min_tokens": 3}
TOLD = {**PROMPT, **COUNTED}
PROMPT_TOKENS = 7


class Engine:
    """Goes on with whatever text it is given, to the end of WORDS, a token each; the first `drops` answers it drops, each after
    so many words. Then it says usage, where that is asked for."""

    def __init__(self, ledger: Ledger, *drops: int, gap: float = 0.0) -> None:
        self.drops, self.gap = list(drops), gap
        self.asked: list[dict[str, Any]] = []
        self.script = decode(ledger, self.answer)

    async def answer(self, wire: HttpWire, request: Message) -> None:
        asked = json.loads(request.body)
        self.asked.append(asked)
        chat = "messages" in asked
        if chat:
            last = asked["messages"][-1]
            done = last["content"] if last["role"] == "assistant" else ""
            assert bool(done) == asked.get("continue_final_message", False) == (not asked.get("add_generation_prompt", True))
        else:
            done = asked["prompt"].removeprefix(PROMPT["prompt"])
        left, size = list(WORDS), 0
        while size < len(done):
            size += len(left.pop(0))
        assert "".join(WORDS).startswith(done) and size == len(done)
        drop = self.drops.pop(0) if self.drops else None
        words = left if drop is None else left[:drop]
        common = {"id": f"chatcmpl-{len(self.asked)}", "created": 1000 + len(self.asked), "model": "m"}

        def one(text: str, finish: str | None = None, stop: str | None = None, **more: Any) -> bytes:
            said: dict[str, Any] = {"delta": {**more, "content": text}} if chat else {"text": text}
            return s.event({**common, "choices": [{"index": 0, **said, "finish_reason": finish, "stop_reason": stop}]})

        made = [one("", role="assistant")] if chat else []
        made += [one(word, "stop" if drop is None and word is WORDS[-1] else None) for word in words]
        made += [one("", "stop", "recomputed")] if drop is not None else []
        if asked.get("stream_options"):
            made.append(s.event({**common, "choices": [], "usage": usage(len(words), PROMPT_TOKENS + len(done))}))
        await s.stream(*made, s.DONE, gap=self.gap)(wire, request)


def on(ps: list[RawUpstream], ds: list[RawUpstream], **more: Any) -> str:
    return config(ps, ds, disaggregation={"recompute": "resume", **more.pop("disaggregation", {})}, **more)


async def resumed(gateway: Gateway) -> dict[str, float]:
    """`pd_resumed_total` by its result; `dropped` is `pd_recomputed_total`."""
    samples = await gateway.metrics()
    found = {labels["result"]: value for name, labels, value in samples if name == "tokenpipe_pd_resumed_total"}
    return found | {"dropped": samples.value("tokenpipe_pd_recomputed_total")}


async def test_it_is_prefilled_where_the_request_says(start_gateway: Start) -> None:
    """prefiller_header: follow holds for the rest of an answer, too."""
    async with engines(2, 2) as (ps, ds, ledger):
        engine = Engine(ledger, 4)
        for d in ds:
            d.script = engine.script
        gateway = await start_gateway(config=on(ps, ds, disaggregation={"prefiller_header": "follow"}))
        answer = await gateway.ask(s.post(ASKED, fields=[("x-prefiller-host-port", f"127.0.0.1:{ps[1].port}")]))
        assert text_of(answer.body) == "".join(WORDS)
        assert [len(p.requests) for p in ps] == [0, 2]
        await at_rest(gateway, ledger, *ps, *ds)


@pytest.mark.parametrize("chat", [True, False], ids=["chat", "completions"])
@pytest.mark.parametrize("words", [0, 4, 8])
async def test_it_goes_on(start_gateway: Start, chat: bool, words: int) -> None:
    """One text, one role, one id, one usage, which is the whole's; and the limit is what is left of it (46)."""
    async with engines(2, 2) as (ps, ds, ledger):
        engine = Engine(ledger, words)
        for d in ds:
            d.script = engine.script
        gateway = await start_gateway(config=on(ps, ds))
        body, path = (ASKED, "/v1/chat/completions") if chat else (TOLD, "/v1/completions")
        answer = await gateway.ask(s.post(body, path=path))
        assert answer.complete and b"recomputed" not in answer.body
        assert text_of(answer.body) == "".join(WORDS)
        chunks = chunks_of(answer.body)
        assert len({(chunk["id"], chunk["created"]) for chunk in chunks}) == 1
        assert sum("role" in choice.get("delta", {}) for chunk in chunks for choice in chunk["choices"]) == chat
        assert [chunk["usage"] for chunk in chunks if chunk.get("usage")] == [usage(len(WORDS), PROMPT_TOKENS)]
        _, second = engine.asked
        assert second["max_tokens"] == 64 - words
        if chat:
            assert second["min_tokens"] == max(3 - words, 0)
            assert second["messages"][: len(CHAT["messages"])] == CHAT["messages"]
        # each of the four backends once: an attempt with an id, leases and a prefill of its own
        assert [len(one.requests) for one in (*ps, *ds)] == [1, 1, 1, 1]
        legs = [[one.requests[0].get("x-request-id") for one in side] for side in (ps, ds)]
        assert sorted(map(str, legs[0])) == sorted(map(str, legs[1])) and len(set(legs[0])) == 2
        assert ledger.ever == 2 and not ledger.held and not ledger.unknown
        prefilled = sorted((json.loads(p.requests[0].body) for p in ps), key=lambda asked: len(json.dumps(asked)))
        assert all(asked["max_tokens"] == 1 and not asked["stream"] for asked in prefilled)
        assert prefilled[1].get("messages") == second.get("messages") and prefilled[1].get("prompt") == second.get("prompt")
        (line,) = await gateway.logged()
        assert (line["outcome"], line["attempts"], line["phase"]) == ("complete", 2, "done")
        assert (line["prompt_tokens"], line["output_tokens"]) == (PROMPT_TOKENS, len(WORDS))
        last = next(d for d in ds if d.requests[0].json() == second)
        assert line["backend"] == f"127.0.0.1:{last.port}"
        await at_rest(gateway, ledger, *ps, *ds)
        assert await resumed(gateway) == {"dropped": 1, "done": 1}
        samples = await gateway.metrics()
        assert samples.value("tokenpipe_pd_prefill_seconds_count") == 2
        assert samples.value("tokenpipe_time_to_first_token_seconds_count") == 1
        assert samples.value("tokenpipe_inter_token_latency_seconds_count") == len(WORDS) - 1


async def test_46_what_is_left_of_a_limit(start_gateway: Start) -> None:
    """Of the one that the client gave: it gets no other."""
    async with engines() as ((p,), (d,), ledger):
        engine = Engine(ledger, 5)
        d.script = engine.script
        gateway = await start_gateway(config=on([p], [d]))
        answer = await gateway.ask(s.post({**CHAT, **COUNTED, "max_completion_tokens": 100}))
        assert text_of(answer.body) == "".join(WORDS)
        assert [asked.get("max_completion_tokens") for asked in engine.asked] == [100, 95]
        assert not any("max_tokens" in asked for asked in engine.asked)
        await at_rest(gateway, ledger, p, d)


@pytest.mark.parametrize("prompt", [PROMPT["prompt"], [501, 502]], ids=["words", "tokens"])
async def test_a_completion_goes_on_from_its_tokens(start_gateway: Start, prompt: Any) -> None:
    """Where the stream tells them all (return_token_ids): the text is not cut into tokens once more."""
    async with engines(2, 2) as (ps, ds, ledger):
        asked: list[dict[str, Any]] = []

        async def answer(wire: HttpWire, request: Message) -> None:
            body = request.json()
            asked.append(body)
            given = body["prompt"] if isinstance(body["prompt"], list) else [501, 502]
            done = len(given) - 2
            assert given == [501, 502, *range(done)]
            until = 3 * len(asked) if len(asked) < 3 else len(WORDS)  # the first two are dropped

            def one(token: int | None, **more: Any) -> dict[str, Any]:
                begins = {"prompt_token_ids": given} if token == done else {}
                said = {"text": "" if token is None else WORDS[token], "token_ids": [] if token is None else [token]}
                return {"id": "x", "choices": [{"index": 0, **said, **begins, "finish_reason": None, **more}]}

            chunks = [one(token) for token in range(done, until)]
            chunks.append(one(None, finish_reason="stop", stop_reason="recomputed" if len(asked) < 3 else None))
            await s.stream(*map(s.event, chunks), s.DONE)(wire, request)

        for d in ds:
            d.script = decode(ledger, answer)
        gateway = await start_gateway(config=on(ps, ds))
        body = {**PROMPT, "prompt": prompt, "return_token_ids": True, "max_tokens": 20}
        found = await gateway.ask(s.post(body, path="/v1/completions"))
        assert text_of(found.body) == "".join(WORDS) and b"recomputed" not in found.body
        choices = [chunk["choices"][0] for chunk in chunks_of(found.body)]
        assert [one for choice in choices for one in choice["token_ids"]] == list(range(len(WORDS)))
        assert [choice["prompt_token_ids"] for choice in choices if choice.get("prompt_token_ids")] == [[501, 502]]
        assert [(one["prompt"], one["max_tokens"]) for one in asked] == [
            (prompt, 20), ([501, 502, 0, 1, 2], 17), ([501, 502, *range(6)], 14)
        ]  # fmt: skip
        assert sorted(len(p.requests) for p in ps) == [1, 2]
        prefilled = [request.json()["prompt"] for p in ps for request in p.requests]
        assert sorted(prefilled, key=len) == sorted([one["prompt"] for one in asked], key=len)
        await at_rest(gateway, ledger, *ps, *ds)
        assert await resumed(gateway) == {"dropped": 2, "done": 2}


async def test_at_most_three_times(start_gateway: Start) -> None:
    """One engine of each with room for one request: what is dropped has left it. With the fourth marker the stream is cut."""
    async with engines() as ((p,), (d,), ledger):
        engine = Engine(ledger, 1, 0, 2, 1)
        d.script = engine.script
        listed = [{"url": p.url, "role": "prefill"}, {"url": d.url, "role": "decode", "max_in_flight": 1}]
        gateway = await start_gateway(config=json.dumps({**json.loads(on([], [])), "backends": listed}))
        answer = await gateway.ask(s.post(ASKED))
        chunks = chunks_of(answer.body + s.DONE)
        assert text_of(answer.body) == "".join(WORDS[:4]) and not answer.complete
        assert not [c for chunk in chunks for c in chunk["choices"] if c["finish_reason"]]
        assert {chunk["id"] for chunk in chunks} == {"chatcmpl-1"}
        assert [asked["max_tokens"] for asked in engine.asked] == [64, 63, 63, 61]
        (line,) = await gateway.logged()
        assert (line["attempts"], line["outcome"]) == (4, "stream_error")
        await at_rest(gateway, ledger, p, d)
        assert await resumed(gateway) == {"dropped": 4, "done": 3, "most": 1}


async def test_with_prefill_s_cached_tokens(start_gateway: Start) -> None:
    """An option that changes the same event."""
    async with engines() as ((p,), (d,), ledger):
        d.script = Engine(ledger, 3).script
        plain = prefill(ledger)

        async def counts(wire: HttpWire, request: Message) -> None:
            usage = {"prompt_tokens": 7, "prompt_tokens_details": {"cached_tokens": 5}}
            params = ledger.hold(request.get("x-request-id") or "")
            await s.reply(200, {"usage": usage, "kv_transfer_params": params})(wire, request)

        p.script = s.in_turn(counts, plain)
        gateway = await start_gateway(config=on([p], [d], disaggregation={"cached_tokens": "prefill"}))
        answer = await gateway.ask(s.post(ASKED))
        assert text_of(answer.body) == "".join(WORDS)
        assert chunks_of(answer.body)[-1]["usage"] == {
            **usage(len(WORDS), PROMPT_TOKENS), "prompt_tokens_details": {"cached_tokens": 5}
        }  # fmt: skip
        await at_rest(gateway, ledger, p, d)


async def test_usage_that_the_gateway_asked_for(start_gateway: Start) -> None:
    """usage: inject makes limits known to clients that ask for no usage, who see none."""
    async with engines() as ((p,), (d,), ledger):
        engine = Engine(ledger, 3)
        d.script = engine.script
        gateway = await start_gateway(config=on([p], [d], usage="inject"))
        answer = await gateway.ask(s.post({**CHAT, "max_tokens": 64}))
        assert text_of(answer.body) == "".join(WORDS) and b"usage" not in answer.body
        assert engine.asked[1]["max_tokens"] == 61
        await at_rest(gateway, ledger, p, d)


MARKER = s.event({"choices": [{"index": 0, "delta": {"content": ""}, "finish_reason": "stop", "stop_reason": "recomputed"}]})
HI = s.delta("hi")
PASSED: list[tuple[str, dict[str, Any], bytes]] = [
    ("tools", {"tools": [{"type": "function", "function": {"name": "f"}}]}, HI),
    ("several choices", {"n": 2}, HI),
    ("log probabilities", {"logprobs": True}, HI),
    ("a schema", {"response_format": {"type": "json_object"}}, HI),
    ("stop strings", {"stop": ["x"]}, HI),
    ("reasoning", {}, s.event({"choices": [{"index": 0, "delta": {"reasoning_content": "hm"}}]})),
    ("a call", {}, s.event({"choices": [{"index": 0, "delta": {"tool_calls": [{"index": 0}]}}]})),
    ("a limit without a count", {"max_tokens": 64}, HI),
]


async def test_what_is_not_exact_is_relayed(start_gateway: Start) -> None:
    """Octet for octet (44); nobody is asked again."""
    async with engines() as ((p,), (d,), ledger):
        gateway = await start_gateway(config=on([p], [d]))
        for number, (what, more, said) in enumerate(PASSED, 1):
            sent = (said, MARKER, s.DONE)
            d.script = decode(ledger, s.stream(*sent))
            body = {**CHAT, "messages": [{"role": "system", "content": "Be brief."}, *CHAT["messages"]], **more}
            assert (await gateway.ask(s.post(body))).body == b"".join(sent), what
            assert len(d.requests) == len(p.requests) == number, what
        d.script = decode(ledger)  # nor is an answer in one piece looked at
        assert (await gateway.ask(s.post({**CHAT, "stream": False}))).status == 200
        await at_rest(gateway, ledger, p, d)
        assert await resumed(gateway) == {"dropped": len(PASSED), "inexact": len(PASSED)}


async def test_what_ends_otherwise(start_gateway: Start) -> None:
    """Errors, and ends without an end, pass as without the option."""
    async with engines() as ((p,), (d,), ledger):
        gateway = await start_gateway(config=on([p], [d], breaker={"failures": 100}))
        aborted = s.event({"choices": [{"index": 0, "delta": {"content": ""}, "finish_reason": "abort"}]})
        for last, outcome in (((aborted, s.DONE), "stream_error"), ((), "upstream_truncated")):
            d.script = decode(ledger, s.stream(HI, *last))
            assert (await gateway.ask(s.post(CHAT))).body == b"".join((HI, *last))
            await gateway.logged(outcome=outcome)
        d.script = decode(ledger, s.raw(s.SSE_HEAD + s.chunk(HI), then="reset"))
        client = await gateway.connect()
        await client.send(s.post(CHAT))
        await client.wait_closed()
        assert s.chunk(HI) in client.pending and not client.pending.endswith(s.LAST)
        client.fin()
        await gateway.logged(outcome="upstream_reset")
        await at_rest(gateway, ledger, p, d)
        assert await resumed(gateway) == {"dropped": 0}


async def test_a_connection_that_ends_behind_the_marker(start_gateway: Start) -> None:
    """It had said all that is needed."""
    async with engines() as ((p,), (d,), ledger):
        engine = Engine(ledger)
        begun = s.raw(s.SSE_HEAD + s.chunk(s.delta(WORDS[0])) + s.chunk(MARKER), then="reset")
        d.script = s.in_turn(decode(ledger, begun), engine.script)
        gateway = await start_gateway(config=on([p], [d]))
        assert text_of((await gateway.ask(s.post(CHAT))).body) == "".join(WORDS)
        await at_rest(gateway, ledger, p, d)
        assert await resumed(gateway) == {"dropped": 1, "done": 1}


def rejecting(ledger: Ledger, answer: s.Script) -> s.Script:
    """A decode engine that tells prefill to let go, or has fetched, and answers so."""

    async def script(wire: HttpWire, request: Message) -> None:
        ledger.fetch(request)
        await answer(wire, request)

    return script


def dropping(ledger: Ledger) -> s.Script:
    return decode(ledger, s.stream(HI, MARKER, s.DONE))


NO = s.reply(400, {"error": {"message": "too long", "code": 400}})
BOOM = s.stream(s.event({"error": {"message": "boom", "type": "E", "code": 500}}), s.DONE)
FAILURES: list[tuple[str, Any, Any]] = [
    ("prefill refuses", NO, None),
    ("prefill breaks", s.vanish, None),
    ("prefill hands nothing over", s.reply(200, {"choices": []}), None),
    ("decode refuses", None, NO),
    ("decode breaks", None, s.vanish),
    ("decode cannot load", None, BOOM),
    ("decode does not stream", None, s.reply(200, {"choices": []})),
]


@pytest.mark.parametrize("failure", FAILURES, ids=[failure[0] for failure in FAILURES])
async def test_where_it_fails_the_marker_passes(start_gateway: Start, failure: Any) -> None:
    """And the connection goes on."""
    _, at_prefill, at_decode = failure
    async with engines() as ((p,), (d,), ledger):
        p.script = s.in_turn(prefill(ledger), at_prefill or prefill(ledger))
        takes = at_decode is not None and at_decode not in (s.vanish, BOOM)
        fails = s.in_turn(dropping(ledger), rejecting(ledger, at_decode) if takes else at_decode or decode(ledger))

        async def script(wire: HttpWire, request: Message) -> None:
            """A release leg is served."""
            await (fails if request.json()["stream"] else decode(ledger))(wire, request)

        d.script = script
        gateway = await start_gateway(config=on([p], [d], retry={"budget": 1}, breaker={"failures": 100}))
        client = await gateway.connect()
        await client.send(s.post(CHAT))
        assert (await client.read_response()).body == b"".join((HI, MARKER, s.DONE))
        (line,) = await gateway.logged()
        assert (line["outcome"], line["backend"]) == ("complete", f"127.0.0.1:{d.port}")
        assert line["attempts"] >= 2
        await at_rest(gateway, ledger, p, d)
        assert await resumed(gateway) == {"dropped": 1, "failed": 1}
        p.script, d.script = prefill(ledger), Engine(ledger).script
        await client.send(s.post(CHAT))
        assert text_of((await client.read_response()).body) == "".join(WORDS)
        client.fin()


async def test_another_prefill_where_one_fails(start_gateway: Start) -> None:
    """It is tried as any request is: by retry.attempts."""
    async with engines(2) as (ps, (d,), ledger):
        engine = Engine(ledger, 2)
        d.script = engine.script
        gateway = await start_gateway(config=on(ps, [d], retry={"attempts": 2, "budget": 1}))
        ps[0].script = ps[1].script = s.in_turn(prefill(ledger), s.vanish, prefill(ledger))  # whichever is asked second
        answer = await gateway.ask(s.post(ASKED))
        assert text_of(answer.body) == "".join(WORDS) and len(engine.asked) == 2
        (line,) = await gateway.logged()
        assert line["attempts"] == 3
        await at_rest(gateway, ledger, *ps, d)
        assert await resumed(gateway) == {"dropped": 1, "done": 1}


async def cut(client: RawClient) -> None:
    await client.wait_closed()
    assert not client.pending.endswith(s.LAST) and MARKER not in client.pending
    client.fin()


@pytest.mark.parametrize("name", NAMES)
async def test_every_connector(start_gateway: Start, name: str, tmp_path: Path) -> None:
    """Dropped twice; a ledger is kept of what is held and fetched. The text is that of one engine alone."""
    async with mocks(name, **options(name, tmp_path)) as both:
        gateway = await start_gateway(config=both.config(recompute="resume"))
        for api, path in PATHS.items():
            seen = (await asked_of(both.decodes[0], "/admin/synth"))["arrived"]
            await both.turn(both.decodes, fault=f"recomputed@token:4@request:{seen + 1}-{seen + 2}")
            body = {**BODIES[api], "stream": True, **COUNTED}
            answer = await gateway.ask(s.post(body, path=path))
            assert text_of(answer.body) == await undisturbed_text(path, body)
            assert chunks_of(answer.body)[-1]["usage"]["completion_tokens"] == BODIES[api]["max_tokens"]
            await both.turn(both.decodes, fault="")
        await both.at_rest(gateway)
        assert await both.held() == 0 and await both.counted("recomputed") == 0
        found = await resumed(gateway)
        # one that is asked first whether it has the prompt is dropped with that
        assert found in [{"dropped": n, "done": n} for n in ((4,) if name != "shared_storage" else (2, 3, 4))]
        assert await gateway.metric("tokenpipe_pd_stranded_total") == 0


async def undisturbed_text(path: str, body: dict[str, Any]) -> str:
    return await undisturbed(path, {name: value for name, value in body.items() if name not in ("stream", *COUNTED)})


@pytest.mark.parametrize("where", ["prefill", "wait", "stream"])
@pytest.mark.parametrize("how", ["client", "operator", "total", "idle", "stop"])
async def test_ended_in_the_midst(start_gateway: Start, how: str, where: str) -> None:
    """All legs end, each in the manner of its state; what prefill holds is fetched, or counted; the drop is counted."""
    async with engines() as ((p,), (d,), ledger):
        held = s.Held(s.SSE_HEAD + s.chunk(s.delta("more")) if where == "stream" else b"")
        if where == "prefill":
            p.script, d.script = s.in_turn(prefill(ledger), held), dropping(ledger)
        elif where == "wait":
            p.script, d.script = prefill(ledger), s.in_turn(dropping(ledger), decode(ledger, seconds=0.3))
        else:
            d.script = s.in_turn(dropping(ledger), decode(ledger, held))
        timeouts = {"total": {"total": 1}, "idle": {"idle": 1}, "stop": {"drain": 0}}.get(how, {})
        gateway = await start_gateway(config=on([p], [d], timeouts=timeouts))
        if where == "wait" and how in ("total", "idle"):
            d.script = s.in_turn(dropping(ledger), decode(ledger, seconds=1.2))
        client = await gateway.connect()
        await client.send(s.post(CHAT, fields=[("X-Request-Id", "one")]))
        if where == "wait":
            await until(lambda: len(d.requests) == 2, "decode is asked again")
        elif where == "prefill":
            await held.wire()
        else:
            await client.receive_until(b"more")
        if how == "client":
            client.reset()
        elif how == "operator":
            assert (await gateway.admin(s.get("/-/streams/one", method="DELETE"))).status == 204
        elif how == "stop":
            gateway.signal(signal.SIGTERM)
            await gateway.stopped()
        if where != "wait":
            wire = await held.wire()
            await until(lambda: wire.ended, "its connection is closed")
        if how != "client":
            await cut(client)
        if how == "stop":
            await until(lambda: not ledger.held, "what prefill held is fetched")
            return
        (line,) = await gateway.logged()
        outcomes = {"client": "client_gone", "operator": "draining", "total": "timeout_total", "idle": "timeout_idle"}
        assert (line["outcome"], line["attempts"], line["phase"]) == (outcomes[how], 2, "stream")
        await at_rest(gateway, ledger, p, d)
        assert not ledger.held
        assert await resumed(gateway) == {"dropped": 1, "done" if where == "stream" else "ended": 1}
        if how == "client":
            assert await gateway.metric("tokenpipe_pd_aborts_total", phase=where) == 1


async def test_a_slow_reader(start_gateway: Start) -> None:
    """Who takes nothing as the answer is dropped still gets all of it, and is held back in the second as well."""
    async with engines() as ((p,), (d,), ledger):
        first, second = [s.delta("x" * 1000)] * 200, [s.delta("y" * 1000)] * 8000
        d.script = s.in_turn(
            decode(ledger, s.raw(s.SSE_HEAD + b"".join(map(s.chunk, (*first, MARKER, s.DONE))) + s.LAST)),
            decode(ledger, s.raw(s.SSE_HEAD + b"".join(map(s.chunk, (*second, *s.FINISHED))) + s.LAST)),
        )
        gateway = await start_gateway(config=on([p], [d]))
        client = await gateway.connect()
        await client.send(s.post(CHAT))
        async with asyncio.timeout(10):
            while not await gateway.metric("tokenpipe_backpressure_pauses_total"):
                await asyncio.sleep(0.05)
        assert await gateway.metric("tokenpipe_write_buffer_bytes") < 300_000
        answer = await client.read_response(timeout=20)
        assert text_of(answer.body) == "x" * 200_000 + "y" * 8_000_000
        client.fin()
        await at_rest(gateway, ledger, p, d)


@pytest.mark.seconds(60)
@pytest.mark.parametrize("name", ["nixl", "layerwise", "sglang"])
async def test_leaving_at_any_moment(start_gateway: Start, name: str) -> None:
    """Fifty for each connector, or as many as TOKENPIPE_OFFSETS says, while answers are dropped after two tokens, all of them,
    so that each moment is likely to be one of a resumption's. Then who stays gets all there is."""
    chance = chances(name)
    async with mocks(name, 2, 2) as both:
        # who has finished and is told to stop before it has written its answer keeps KV that nobody can know of
        gateway = await start_gateway(config=both.config(recompute="resume", prefill_grace=2, **QUICK))
        await both.turn(both.prefills, ttft=0.02)
        await both.turn(both.decodes, ttft=0.02, itl=0.005, fault="recomputed@token:2")

        async def one(number: int) -> None:
            client = await gateway.connect()
            asked = [{"role": "user", "content": f"{number}: who are you?"}]
            await client.send(s.post({**BODIES["chat"], "messages": asked, "stream": True, **COUNTED}))
            await asyncio.sleep(chance.uniform(0.03, 0.2))
            client.reset()

        for first in range(0, OFFSETS, 10):
            await asyncio.gather(*(one(first + number) for number in range(10)))
        await both.at_rest(gateway)
        found = await resumed(gateway)
        assert found["dropped"] == sum(value for result, value in found.items() if result != "dropped")
        assert found["done"] and "failed" not in found
        await both.turn(both.all, ttft=0, itl=0, fault="")
        body = {**BODIES["chat"], "stream": True, **COUNTED}
        answer = await gateway.ask(s.post(body))
        assert text_of(answer.body) == await undisturbed_text(PATHS["chat"], body)
        await both.at_rest(gateway)
        await no_connections(gateway, both)
