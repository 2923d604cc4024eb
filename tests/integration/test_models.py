"""Several models behind one gateway: who gets what, what an alias comes to on the wire, and what is told of it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from tests.integration.test_websocket import UPGRADE, agree
from tests.support import script as s
from tests.support.gateway import Gateway, until
from tests.support.messages import Message
from tests.support.upstream import RawUpstream

Start = Callable[..., Awaitable[Gateway]]
SLOW = {"interval": 60}
QUICK = {"health": {"interval": 0.1, "timeout": 1.0, "fail": 1, "pass": 1}, "discovery": {"interval": 0.1}}


@contextlib.asynccontextmanager
async def serving(*models: tuple[str, ...]) -> AsyncIterator[list[RawUpstream]]:
    backends = [RawUpstream(models=names) for names in models]
    for backend in backends:
        await backend.start()
    try:
        yield backends
    finally:
        for backend in backends:
            await backend.stop()


def chat(model: Any, **more: Any) -> bytes:
    return s.post({"model": model, "messages": [], **more})


def urls(backends: list[RawUpstream]) -> list[str]:
    return [backend.url for backend in backends]


def asked(backend: RawUpstream) -> Counter[str]:
    """Models, as the requests that reached it name them."""
    return Counter(json.loads(request.body)["model"] for request in backend.requests)


async def card_names(gateway: Gateway) -> list[str]:
    return [card["id"] for card in (await gateway.ask(s.get("/v1/models"))).json()["data"]]


async def soon(what: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(10):
        while not await what():
            await asyncio.sleep(0.02)


def refused(answer: Message, status: int, code: str) -> str:
    assert (answer.status, answer.get("x-gateway-error")) == (status, code), answer.body
    message = answer.json()["error"]["message"]
    assert isinstance(message, str)
    return message


# who gets what ------------------------------------------------------------------------------------------------------------


async def test_each_model_goes_where_it_is_served(start_gateway: Start) -> None:
    """From the very first request on, and evenly among those who serve it; adapters are models, too."""
    async with serving(("a", "a-lora"), ("b",), ("a", "b")) as backends:
        gateway = await start_gateway(config={"health": SLOW}, backends=urls(backends))
        client = await gateway.connect()
        for model in ("a", "b", "a-lora") * 8:
            assert (await client.ask(chat(model))).status == 200
        client.fin()
        only_a, only_b, both = map(asked, backends)
        assert (only_a.keys(), only_b.keys(), both.keys()) == ({"a", "a-lora"}, {"b"}, {"a", "b"})
        assert only_a["a-lora"] == 8
        assert only_a["a"] == both["a"] == only_b["b"] == both["b"] == 4


async def test_without_a_model_anywhere(start_gateway: Start) -> None:
    """No JSON, a model that is none, and no body: any backend."""
    async with serving(("a",), ("b",)) as backends:
        gateway = await start_gateway(config={"health": SLOW}, backends=urls(backends))
        upload = s.post(b"--x--", "/v1/audio/transcriptions").replace(b"application/json", b"multipart/form-data; boundary=x")
        for request in (upload, chat(None), chat(5), chat(""), s.get("/ping")) * 2:
            assert (await gateway.ask(request)).status == 200
        assert [len(backend.requests) for backend in backends] == [5, 5]


async def test_a_list_that_changes_holds_at_its_next_reading(start_gateway: Start) -> None:
    """An adapter that is loaded is served; one that is unloaded is not any more."""
    async with serving(("a",), ("b",)) as (one, two):
        gateway = await start_gateway(config=QUICK, backends=[one.url, two.url])
        refused(await gateway.ask(chat("new")), 404, "unknown_model")
        two.probes["/v1/models"] = s.reply(200, json.dumps({"data": [{"id": "b"}, {"id": "new"}]}).encode())

        async def served() -> bool:
            return (await gateway.ask(chat("new"))).status == 200

        async def not_served() -> bool:
            return not await served()

        await soon(served)
        assert (asked(one)["new"], asked(two)["new"] > 0) == (0, True)
        two.probes["/v1/models"] = s.reply(200, json.dumps({"data": [{"id": "b"}]}).encode())
        await soon(not_served)


async def test_who_cannot_tell_gets_anything(start_gateway: Start) -> None:
    """A backend whose list cannot be had is asked for any model, beside those who serve it, also for one that nobody knows."""
    async with serving(("a",), ("x",), ("x",), ("x",)) as backends:
        for backend, answer in zip(backends[1:], ((404, b"{}"), (200, b"{"), (200, b'{"data": []}')), strict=True):
            backend.probes["/v1/models"] = s.reply(*answer)
        gateway = await start_gateway(config={"health": SLOW}, backends=urls(backends))
        for model in ("a",) * 4 + ("what",) * 3:
            assert (await gateway.ask(chat(model))).status == 200
        assert [asked(backend) for backend in backends] == [Counter(a=1), *[Counter(a=1, what=1)] * 3]


async def test_configured_models_are_the_operator_s_word(start_gateway: Start) -> None:
    """`backends[].models`: these and no others, whatever the backend says of itself; with one backend, too."""
    async with serving(("a", "b")) as (one,):
        gateway = await start_gateway(config={"health": SLOW, "backends": [{"url": one.url, "models": ["b", "c"]}]})
        assert (await gateway.ask(chat("c"))).status == 200
        assert "'a' does not exist" in refused(await gateway.ask(chat("a")), 404, "unknown_model")
        assert await card_names(gateway) == ["b", "c"]
        cards = (await gateway.ask(s.get("/v1/models"))).json()["data"]
        assert (cards[0]["max_model_len"], cards[1]["owned_by"]) == (4096, "tokenpipe")


async def test_one_backend_judges_itself(start_gateway: Start) -> None:
    """There is nothing to choose: whatever it is asked for, and its list, pass as they are."""
    async with serving(("a",)) as (one,):
        gateway = await start_gateway(config={"health": SLOW}, backends=[one.url])
        one.script = s.reply(404, b'{"error": {"message": "The model `x` does not exist."}}')
        answer = await gateway.ask(chat("x"))
        assert (answer.status, answer.get("x-gateway-error")) == (404, None)
        assert (await gateway.ask(s.get("/v1/models"))).json()["data"][0]["owned_by"] == "vllm"
        await until(lambda: one.probed.count("/v1/models") >= 2, "it has been asked for this one, and by the gateway itself")


# what is not there --------------------------------------------------------------------------------------------------------


async def test_unknown_models_in_each_dialect(start_gateway: Start) -> None:
    """404 with the nearest names, before anything is asked of anybody; and `other` in the metrics."""
    async with serving(("llama-70b", "a"), ("qwen-7b",)) as backends:
        gateway = await start_gateway(config={"health": SLOW}, backends=urls(backends))
        answer = await gateway.ask(chat("lama-70b"))
        message = refused(answer, 404, "unknown_model")
        assert "'lama-70b' does not exist" in message
        assert "llama-70b" in message
        error = answer.json()["error"]
        assert (error["type"], error["param"], error["code"]) == ("not_found_error", "model", "unknown_model")
        anthropic = await gateway.ask(s.post({"model": "qwen", "messages": [], "max_tokens": 1}, "/v1/messages"))
        assert "qwen-7b" in refused(anthropic, 404, "unknown_model")
        assert (anthropic.json()["type"], anthropic.json()["error"]["type"]) == ("error", "not_found_error")
        assert "a, llama-70b, qwen-7b" in refused(await gateway.ask(chat("?")), 404, "unknown_model")
        assert not any(backend.requests for backend in backends)
        assert await gateway.metric("tokenpipe_requests_total", code="unknown_model", model="other") == 3


async def test_a_known_model_whose_backends_are_down(start_gateway: Start) -> None:
    """503 that names the model and its backends, and leaves others alone."""
    async with serving(("a",), ("b",)) as (one, two):
        gateway = await start_gateway(config=QUICK, backends=[one.url, two.url])
        await two.stop()

        async def down() -> bool:
            return (await gateway.ask(chat("b"))).status == 503

        await soon(down)
        answer = await gateway.ask(chat("b"))
        message = refused(answer, 503, "no_backend")
        assert message.startswith("no backend that serves b can be reached: ")
        assert answer.get("retry-after") == "5"
        assert (await gateway.ask(chat("a"))).status == 200


# aliases ------------------------------------------------------------------------------------------------------------------


def with_alias(*targets: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"health": SLOW, "models": {"gpt-4": {"route_to": list(targets)}}, **more}


BODIES = [
    (b'{"model": "gpt-4"}', b'{"model": "llama/70b"}'),
    (b' \n{"stream":true , "model"\t:\n"gpt\\u002d4","seed":165598928036513123123, "t":1.0,"s":"\\ud800" } \n',
     b' \n{"stream":true , "model"\t:\n"llama/70b","seed":165598928036513123123, "t":1.0,"s":"\\ud800" } \n'),
    (b'\xef\xbb\xbf{"a":{"model":"gpt-4"},"mod\\u0065l":"gpt-4"}',
     b'\xef\xbb\xbf{"a":{"model":"gpt-4"},"mod\\u0065l":"llama/70b"}'),
    (b'{"model":"other","x":1e400,"model":"gpt-4"}', b'{"model":"other","x":1e400,"model":"llama/70b"}'),
]  # fmt: skip


async def test_one_value_is_rewritten(start_gateway: Start) -> None:
    """The model that holds, of several the last one; every other octet is the client's, the response the backend's, and the
    log names what the client named."""
    async with serving(("llama/70b",)) as (one,):
        one.script = s.reply(200, b'{"model": "llama/70b"}')
        gateway = await start_gateway(config=with_alias({"model": "llama/70b"}), backends=[one.url])
        for number, ((sent, arrived), chunked) in enumerate(itertools.product(BODIES, (False, True))):
            field = ("X-Request-Id", f"r{number}")
            request = s.post(sent, fields=[field])
            if chunked:
                head = s.post(b"", fields=[("Transfer-Encoding", "chunked"), field], length=False)
                request = head + b"".join(s.chunk(sent[i : i + 7]) for i in range(0, len(sent), 7)) + s.LAST
            answer = await gateway.ask(request)
            assert (answer.status, answer.body) == (200, b'{"model": "llama/70b"}')
            assert one.requests[-1].body == arrived
            (entry,) = await gateway.logged(request_id=f"r{number}")
            assert (entry["model"], entry["outcome"], entry["bytes_in"]) == ("gpt-4", "complete", len(sent))
        assert await gateway.metric("tokenpipe_requests_total", model="gpt-4", code="200") == number + 1


def answering(alias: str = "gpt-4", **more: Any) -> dict[str, Any]:
    target = {"route_to": [{"model": "llama"}]}
    return {"health": SLOW, "models": {alias: {**target, "rewrite_response": True}, "plain": target}, **more}


async def test_an_answer_names_the_alias_where_that_is_asked_for(start_gateway: Start) -> None:
    """Whole and streamed, of the alias that asks for it alone, on a connection that goes on; and with
    usage: inject, whose own event goes out all the same."""
    async with serving(("llama",)) as (one,):
        body = b'{"id": "x", "model":\t"llama", "n": 1.0}'
        gateway = await start_gateway(config=answering(usage="inject"), backends=[one.url])
        client = await gateway.connect()
        one.script = s.reply(200, body)
        for model, wanted in (("gpt-4", "gpt-4"), ("plain", "llama"), ("llama", "llama"), ("gpt-4", "gpt-4")):
            answer = await client.ask(chat(model))
            assert answer.body == body.replace(b"llama", wanted.encode())
            embeddings = await client.ask(s.post({"model": model, "input": "x"}, "/v1/embeddings"))
            assert embeddings.body == answer.body
        usage = s.event({"id": "x", "model": "llama", "choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 2}})
        events = s.delta("a", model="llama"), s.delta("llama", model="llama", finish="stop"), usage, s.DONE
        one.script = s.stream(*events)
        for model, wanted in (("gpt-4", "gpt-4"), ("plain", "llama")):
            answer = await client.ask(chat(model, stream=True))
            assert answer.body == s.delta("a", model=wanted) + s.delta("llama", model=wanted, finish="stop") + s.DONE
        client.fin()
        entries = await gateway.logged(2, stream=True)
        assert [(entry["model"], entry["outcome"], entry["output_tokens"]) for entry in entries] == [
            ("gpt-4", "complete", 2), ("plain", "complete", 2)
        ]  # fmt: skip


async def test_what_is_not_looked_into_names_the_target(start_gateway: Start) -> None:
    """Coded answers, other content types, errors, and HTTP/1.0, whose end of the body is the connection's."""
    async with serving(("llama",)) as (one,):
        body = b'{"model": "llama"}'
        gateway = await start_gateway(config=answering(), backends=[one.url])
        for status, fields in (
            (200, [s.JSON_TYPE, ("Content-Encoding", "gzip")]),
            (200, [("Content-Type", "text/plain")]),
            (404, [s.JSON_TYPE]),
        ):
            one.script = s.reply(status, body, fields=fields)
            answer = await gateway.ask(chat("gpt-4"))
            assert (answer.body, answer.get("content-length")) == (body, str(len(body)))
        one.script = s.reply(200, body)
        answer = await gateway.ask(s.post({"model": "gpt-4"}, version="1.0"))
        assert (answer.body, answer.get("transfer-encoding")) == (b'{"model": "gpt-4"}', None)


async def test_two_names_of_which_the_last_one_holds(start_gateway: Start) -> None:
    """Nobody reaches a model by naming another one first: the last one is judged, as the engine reads it."""
    async with serving(("a",), ("b",)) as (one, two):
        gateway = await start_gateway(config={"health": SLOW}, backends=[one.url, two.url])
        for _ in range(3):
            assert (await gateway.ask(s.post(b'{"model": "a", "model": "b"}'))).status == 200
        assert (len(one.requests), len(two.requests)) == (0, 3)
        refused(await gateway.ask(s.post(b'{"model": "a", "model": "nobody"}')), 404, "unknown_model")


async def test_by_weight(start_gateway: Start) -> None:
    """Of 400 requests three quarters, within 5 standard deviations; and no fallback, while others can be reached."""
    async with serving(("a",), ("b",), ("c",)) as backends:
        targets = {"model": "a", "weight": 3}, {"model": "b"}, {"model": "c", "fallback": True}
        gateway = await start_gateway(config=with_alias(*targets), backends=urls(backends))
        client = await gateway.connect()
        for _ in range(400):
            assert (await client.ask(chat("gpt-4"))).status == 200
        client.fin()
        counts = [len(backend.requests) for backend in backends]
        assert counts[2] == 0
        assert abs(counts[0] - 300) < 45, counts


async def test_a_fallback_for_whom_nobody_can_be_reached(start_gateway: Start) -> None:
    """Down, by its probe: the next target. Back: the first one again."""
    async with serving(("a",), ("b",)) as (one, two):
        config = with_alias({"model": "a"}, {"model": "b", "fallback": True}) | QUICK
        gateway = await start_gateway(config=config, backends=[one.url, two.url])
        assert (await gateway.ask(chat("gpt-4"))).status == 200
        one.probes["/health"] = s.reply(503, b"")

        async def at_two() -> bool:
            assert (await gateway.ask(chat("gpt-4"))).status == 200
            return bool(two.requests)

        await soon(at_two)
        assert asked(two).keys() == {"b"}
        before = len(one.requests)
        one.probes["/health"] = s.reply(200, b"")

        async def at_one() -> bool:
            assert (await gateway.ask(chat("gpt-4"))).status == 200
            return len(one.requests) > before

        await soon(at_one)
        assert asked(one).keys() == {"a"}


async def test_a_fallback_after_an_attempt_that_failed(start_gateway: Start) -> None:
    """A connection that is refused: the same request goes on to the next target, under its name, and counts as another try."""
    async with serving(("a",), ("longer-name",)) as (one, two):
        config = with_alias({"model": "a"}, {"model": "longer-name", "fallback": True}, limits={"in_flight": 4})
        config["models"] |= {"a": {"in_flight": 1}, "longer-name": {"in_flight": 1}}
        gateway = await start_gateway(config=config, backends=[one.url, two.url])
        await one.stop()
        for number in range(3):
            assert (await gateway.ask(chat("gpt-4", n=number))).status == 200
        assert [json.loads(request.body) for request in two.requests] == [
            {"model": "longer-name", "messages": [], "n": number} for number in range(3)
        ]
        (entry, *_) = await gateway.logged(3, model="gpt-4")
        assert entry["attempts"] == 2


@pytest.mark.parametrize("fallback", [False, True])
async def test_a_target_whose_backends_rest(start_gateway: Start, fallback: bool) -> None:
    """One that is full by its own word is left alone for as long, and clients are not told of it, however many they are: what
    second tries may cost is not spent on it."""
    async with serving(("a",), ("b",)) as (one, two):
        targets = {"model": "a"}, {"model": "b", **({"fallback": True} if fallback else {})}
        gateway = await start_gateway(config=with_alias(*targets), backends=[one.url, two.url])
        one.script = s.reply(429, b"{}", [("retry-after", "30")])
        client = await gateway.connect()
        assert {(await client.ask(chat("gpt-4"))).status for _ in range(150)} == {200}
        client.fin()
        assert (len(one.requests), len(two.requests)) == (1, 150)


async def test_nobody_at_all(start_gateway: Start) -> None:
    """All targets down: 503 by the name that the client knows."""
    async with serving(("a", "b"), ("c",)) as (one, two):
        config = with_alias({"model": "a"}, {"model": "b", "fallback": True}) | QUICK
        gateway = await start_gateway(config=config, backends=[one.url, two.url])
        one.probes["/health"] = s.reply(503, b"")

        async def down() -> bool:
            return (await gateway.ask(chat("gpt-4"))).status == 503

        await soon(down)
        assert "serves gpt-4" in refused(await gateway.ask(chat("gpt-4")), 503, "no_backend")


async def test_a_target_that_nobody_serves_is_told_of(start_gateway: Start) -> None:
    """A line of the log, once all backends have said what they serve."""
    async with serving(("a",), ("a",)) as backends:
        gateway = await start_gateway(config=with_alias({"model": "lama"}), backends=urls(backends))
        assert "models.gpt-4 asks for lama, which no backend serves" in gateway.stderr()
        refused(await gateway.ask(chat("gpt-4")), 503, "no_backend")


def form(model: bytes, audio: bytes) -> bytes:
    field = b'--x\r\nContent-Disposition: form-data; name="model"\r\n\r\n' + model
    return field + b'\r\n--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n' + audio + b"\r\n--x--\r\n"


async def test_uploads(start_gateway: Start) -> None:
    """A form's field says the model, of small and of large ones; an alias is rewritten there, too."""
    async with serving(("a",), ("whisper-large",)) as (one, two):
        gateway = await start_gateway(config=with_alias({"model": "whisper-large"}), backends=[one.url, two.url])
        kind = b"multipart/form-data; boundary=x"
        for audio in (b"\0\xff\r\n", bytes(range(256)) * 1000):
            for model in (b"whisper-large", b"gpt-4"):
                request = s.post(form(model, audio), "/v1/audio/transcriptions").replace(b"application/json", kind)
                assert (await gateway.ask(request)).status == 200
                assert two.requests[-1].body == form(b"whisper-large", audio)
        assert not one.requests
        request = s.post(form(b"wisper", b""), "/v1/audio/transcriptions").replace(b"application/json", kind)
        assert "whisper-large" in refused(await gateway.ask(request), 404, "unknown_model")


# large bodies -------------------------------------------------------------------------------------------------------------

PADDING = b'{"messages": [{"role": "user", "content": "' + b"x" * (3 << 20) + b'"}]'


async def test_a_model_that_comes_late(start_gateway: Start) -> None:
    """Behind 3 MiB of pictures: the body is held until it is there, and goes where it belongs, rewritten."""
    async with serving(("a",), ("b",)) as (one, two):
        gateway = await start_gateway(config=with_alias({"model": "b"}), backends=[one.url, two.url])
        tail = b', "user": "' + b"y" * (1 << 20) + b'"'
        for (name, more), chunked in itertools.product(((b"gpt-4", b""), (b"gpt-4", tail), (b"b", tail)), (False, True)):
            body = PADDING + b', "model": "' + name + b'"' + more + b"}"
            request = s.post(body)
            if chunked:
                head = s.post(b"", fields=[("Transfer-Encoding", "chunked")], length=False)
                request = head + b"".join(s.chunk(body[i : i + 100_000]) for i in range(0, len(body), 100_000)) + s.LAST
            assert (await gateway.ask(request)).status == 200
            assert two.requests[-1].body == body.replace(b'"gpt-4"', b'"b"')
        assert not one.requests


async def test_a_second_name_that_comes_late(start_gateway: Start) -> None:
    """Once a body is on its way to a model's backend, it names no other one: 400, and the engine never gets all of it."""
    async with serving(("a",), ("b",)) as (one, two):
        gateway = await start_gateway(config={"health": SLOW}, backends=[one.url, two.url])
        body = b'{"model": "a", ' + PADDING[1:] + b', "model": "b"}'
        answer = await gateway.ask(s.post(body))
        assert "twice" in refused(answer, 400, "bad_request")
        assert not any(request.complete for request in one.requests)
        assert not two.requests
        await gateway.idle()


# pages --------------------------------------------------------------------------------------------------------------------


async def test_the_merged_list(start_gateway: Start) -> None:
    """Each model once, as its backend describes it; aliases with the card of what they stand for; one by its name."""
    async with serving(("org/a", "m"), ("m", "b")) as (one, two):
        card = {"id": "b", "object": "model", "max_model_len": 131072, "permission": [{"id": "p"}], "root": "/data/b"}
        listed = {"object": "list", "data": [{"id": "m", "root": "later"}, card]}
        two.probes["/v1/models"] = s.reply(200, json.dumps(listed).encode())
        gateway = await start_gateway(config=with_alias({"model": "b"}, {"model": "m"}), backends=[one.url, two.url])
        answer = await gateway.ask(s.get("/v1/models"))
        assert answer.json()["object"] == "list"
        cards = {one["id"]: one for one in answer.json()["data"]}
        assert list(cards) == ["org/a", "m", "b", "gpt-4"]
        assert (cards["m"]["root"], cards["b"]) == ("m", card)
        assert cards["gpt-4"] == {**card, "id": "gpt-4", "root": "b"}
        for name in cards:
            assert (await gateway.ask(s.get(f"/v1/models/{name}"))).json() == cards[name]
        answer = await gateway.ask(s.get("/v1/models/gpt%204"))
        assert "gpt-4" in refused(answer, 404, "unknown_model")
        assert not one.requests
        assert not two.requests


async def test_reload_changes_models(start_gateway: Start) -> None:
    """New aliases hold for the next request; the admin listener shows what is in force, and what each backend serves."""
    async with serving(("a",), ("b",)) as backends:
        gateway = await start_gateway(config=with_alias({"model": "a"}), backends=urls(backends))
        assert gateway.config_path is not None
        text = json.loads(gateway.config_path.read_text())
        text["models"] = {"gpt-4": {"route_to": {"model": "b"}}}
        gateway.config_path.write_text(json.dumps(text))
        assert (await gateway.admin(s.post(b"", "/-/reload"))).status < 300
        assert (await gateway.ask(chat("gpt-4"))).status == 200
        assert asked(backends[1]) == Counter(b=1)
        assert (await gateway.admin(s.get("/-/config"))).json()["models"]["gpt-4"]["route_to"][0]["model"] == "b"
        assert [b["models"] for b in (await gateway.admin(s.get("/-/backends"))).json()] == [["a"], ["b"]]


# WebSockets ---------------------------------------------------------------------------------------------------------------


def realtime(query: str, request_id: str = "ws") -> bytes:
    return s.get(f"/v1/realtime{query}", [*UPGRADE, ("X-Request-Id", request_id)])


async def test_a_websocket_goes_by_its_query(start_gateway: Start) -> None:
    """/v1/realtime?model=NAME: to who serves it, every octet of the target as it came; an alias' value alone is rewritten, for
    a fallback once more; one that nobody knows gets 404; and the log names what the client named."""
    async with serving(("a",), ("b/c d",)) as (one, two):
        target = {"route_to": [{"model": "a"}, {"model": "b/c d", "fallback": True}]}
        config = {"health": SLOW, "models": {"gpt 4": target}}
        gateway = await start_gateway(config=config, backends=[one.url, two.url])
        for backend in (one, two):
            backend.script = agree
        for query in ("?model=a", "?x=1&mod%65l=%61&y=%2f+", "?model=what&model=a&"):
            client = await gateway.connect()
            await client.send(realtime(query))
            assert (await client.read_response_head()).status == 101
            assert one.requests[-1].target == "/v1/realtime" + query
            client.reset()
        client = await gateway.connect()
        await client.send(realtime("?model=b%2Fc+d"))
        assert (await client.read_response_head()).status == 101
        assert [request.target for request in two.requests] == ["/v1/realtime?model=b%2Fc+d"]
        client.reset()
        client = await gateway.connect()
        await client.send(realtime("?a=%20+&model=gpt+4&b=%7E", "alias"))
        assert (await client.read_response_head()).status == 101
        assert one.requests[-1].target == "/v1/realtime?a=%20+&model=a&b=%7E"
        client.reset()
        (entry,) = await gateway.logged(request_id="alias")
        assert (entry["model"], entry["status"]) == ("gpt 4", 101)
        assert "'gpt-4' does not exist" in refused(await gateway.ask(realtime("?model=gpt-4")), 404, "unknown_model")
        one.close_listener()
        client = await gateway.connect()
        await client.send(realtime("?model=gpt%204"))
        assert (await client.read_response_head()).status == 101
        assert two.requests[-1].target == "/v1/realtime?model=b%2Fc%20d"
        client.reset()
        count = len(one.requests) + len(two.requests)
        for query in ("", "?model=", "?model", "?models=a"):  # names none: anywhere
            client = await gateway.connect()
            await client.send(realtime(query))
            assert (await client.read_response_head()).status == 101
            client.reset()
        assert len(one.requests) + len(two.requests) == count + 4
